"""Compare the pool with Arctic Inference's suffix trees (Oliaro et al. 2024, arXiv 2411.04975) on the same tokens.

Both see text alone: the prompts and what the model writes after them. A step guesses from the text so far, accepts
along what was really written, and learns it. Needs the package `arctic-inference`.

    python scripts/compare_suffix.py --model M --prompts FILE.jsonl
"""

import statistics
import time
from collections.abc import Callable

import click
import numpy as np
import torch

import lookahead
from bench import cli
from bench.corpora import standard_library
from bench.pages import report, table
from bench.timing import decoding_options, prompt_and_answer
from lookahead import NgramPool, Source
from lookahead.engine.planning import MIN_PROBABILITY
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts
from ngram_pool.kernels import LONGEST

MATCHED = 64  # tokens of context that the suffix trees are shown; their own default depth
UNLIMITED = {"max_spec_factor": 0.0, "max_spec_offset": 1e6}  # as many guesses as the budget, whatever the match


class Pool:
    """The pool as a drafter that sees text alone."""

    def __init__(self, memory_mb: float = 16):
        self.pool = NgramPool(memory_mb)

    def start(self, prompt: list[int]) -> None:
        self.pool.learn(prompt, Source.PROMPT)

    def guess(self, text: list[int], budget: int, chain: bool) -> tuple[list[int], list[int]]:
        tree = self.pool.guess(text, budget, MIN_PROBABILITY, chain=chain)
        return tree.tokens.tolist(), tree.parents.tolist()

    def learn(self, text: list[int], new: list[int]) -> None:
        recent = text[-LONGEST:]
        self.pool.follow(recent + new, start=len(recent))

    def read(self, text: np.ndarray) -> None:
        self.pool.learn(text)

    def end(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes


class Suffix:
    """Arctic Inference's local (prompt and answer) and global (answers) suffix trees."""

    def __init__(self, options: dict):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=MATCHED)
        self._options = {"min_token_prob": MIN_PROBABILITY, **UNLIMITED, **options}
        self._request = 0

    def start(self, prompt: list[int]) -> None:
        self._request += 1
        self.cache.start_request(self._request, np.array(prompt, np.int32))

    def guess(self, text: list[int], budget: int, chain: bool) -> tuple[list[int], list[int]]:
        draft = self.cache.speculate(
            self._request, text[-MATCHED:], max_spec_tokens=budget, use_tree_spec=not chain, **self._options
        )
        return draft.token_ids, draft.parents

    def learn(self, text: list[int], new: list[int]) -> None:
        self.cache.add_active_response(self._request, new)

    def read(self, text: np.ndarray) -> None:
        self.cache.add_active_response(self._request, text)

    def end(self) -> None:
        self.cache.stop_request(self._request)

    @property
    def nbytes(self) -> int:
        trees = [*self.cache._local_trees.values(), self.cache._global_tree]
        return sum(tree.estimate_memory() for tree in trees)


DRAFTERS = {
    "pool": Pool,
    "suffix": lambda: Suffix({}),
    "suffix, its defaults": lambda: Suffix({"max_spec_factor": 1.0, "max_spec_offset": 0.0, "min_token_prob": 0.1}),
}


def accepted(tokens: list[int], parents: list[int], truth: list[int]) -> int:
    """Length of the path of the tree along what was really written."""
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    node, depth = -1, 0
    while depth < len(truth) and (node, truth[depth]) in children:
        node = children[node, truth[depth]]
        depth += 1
    return depth


def replay(
    make: Callable[[], Pool | Suffix], streams: list[tuple[str, list[int], list[int]]], budget: int, chain: bool,
    shared: bool,
) -> dict:  # fmt: skip
    """Tokens per step (mean of the categories) and median microseconds of a guess and of learning a token."""
    drafter = make()
    counts: dict[str, list[int]] = {}
    guesses, learns = [], []
    for category, prompt, answer in streams:
        if not shared:
            drafter = make()
        drafter.start(prompt)
        text = prompt + answer[:1]
        drafter.learn(prompt, answer[:1])
        done = 1
        while done < len(answer):
            start = time.perf_counter()
            tokens, parents = drafter.guess(text, budget, chain)
            guesses.append(time.perf_counter() - start)
            # A step always yields one token more than it accepts.
            new = answer[done : done + accepted(tokens, parents, answer[done:-1]) + 1]
            start = time.perf_counter()
            drafter.learn(text, new)
            learns.append((time.perf_counter() - start) / len(new))
            text += new
            done += len(new)
            count = counts.setdefault(category, [0, 0])
            count[0] += len(new)
            count[1] += 1
        drafter.end()
    return {
        "tokens_per_step": statistics.mean(tokens / steps for tokens, steps in counts.values()),
        "guess_us": statistics.median(guesses) * 1e6,
        "learn_us": statistics.median(learns) * 1e6,
    }


def passages(ids: np.ndarray, count: int, length: int = 128) -> list[tuple[str, list[int], list[int]]]:
    """Pieces of a text, spread over all of it: 32 tokens to start from, the rest to be written again."""
    begins = np.linspace(0, len(ids) - length, count).astype(int)
    return [("", ids[b : b + 32].tolist(), ids[b + 32 : b + length].tolist()) for b in begins]


@click.command()
@cli.model
@cli.prompts
@cli.limit
@cli.temperature(0.6)
@cli.new_tokens
@click.option("--corpus", default=1_000_000, show_default=True, help="Tokens of the standard library to learn at once.")
@click.option("--out", type=cli.OUT, help="Write OUT.md and OUT.json.")
def main(model_name, prompts_file, limit, temperature, max_new_tokens, corpus, out) -> None:
    """Tokens per step, microseconds and bytes of the pool and of suffix trees."""
    try:
        Suffix({})
    except ImportError as error:
        raise click.ClickException(f"{error}: pip install arctic-inference") from error
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, "float32")
    lookahead.wrap(model)  # the same text, sooner
    options = decoding_options(max_new_tokens, temperature)
    streams = []
    for number, prompt in enumerate(read_prompts(prompts_file, limit)):
        streams.append((prompt["category"], *prompt_and_answer(model, tokenizer, prompt, options, number)))
        click.echo(f"\rwriting, prompt {number + 1} ", nl=False, err=True)
    results = []
    for shape, budget, chain in (("tree", 16, False), ("tree", 64, False), ("chain", 16, True)):
        for name, make in DRAFTERS.items():
            fresh = replay(make, streams, budget, chain, shared=False)
            kept = replay(make, streams, budget, chain, shared=True)
            results.append({"drafter": name, "shape": shape, "budget": budget, "fresh": fresh, "shared": kept})
    text = f"On {len(streams)} answers of a model at temperature {temperature}, text alone:\n\n" + table(
        ["shape", "budget", "drafter", "tokens per step, fresh", "shared", "us a guess", "us a learned token"],
        [[r["shape"], r["budget"], r["drafter"], r["fresh"]["tokens_per_step"], r["shared"]["tokens_per_step"],
          f"{r['shared']['guess_us']:.0f}", f"{r['shared']['learn_us']:.1f}"] for r in results],
    )  # fmt: skip

    ids = standard_library(corpus, tokenizer)
    again = passages(ids, 300)
    lines = []
    for name, make in {"pool, 16 MiB": Pool, "pool, 512 MiB": lambda: Pool(512), "suffix": DRAFTERS["suffix"]}.items():
        drafter = make()
        drafter.start([])
        start = time.perf_counter()
        for chunk in np.array_split(ids.astype(np.int32), len(ids) // 4096 + 1):  # as answers come, not in one
            drafter.read(chunk)
        seconds = time.perf_counter() - start
        drafter.end()
        size = drafter.nbytes
        score = replay(lambda kept=drafter: kept, again, 16, False, shared=True)
        per_token = seconds / len(ids) * 1e6
        results.append({"drafter": name, "corpus": len(ids), "bytes": size, "learn_us": per_token, "again": score})
        lines.append([name, f"{per_token:.2f}", f"{size / 2**20:.0f} MiB", score["tokens_per_step"],
                      f"{score['guess_us']:.0f}"])  # fmt: skip
    text += f"\n\nAfter {len(ids):,} tokens of the standard library, passages of which are then written again:\n\n"
    text += table(["drafter", "us a learned token", "memory", "tokens per step at 16", "us a guess"], lines)
    report(__file__, "The pool and suffix trees", text, results, out)


if __name__ == "__main__":
    main()
