"""Compare texts written with different numbers of guesses. With fused passes, they are the same.

Each prompt is decoded without guesses and with each of `--guesses`, with a fresh pool and from the same seed. Then all
prompts are decoded in passes over several texts (`--at-once`), and in two threads. The exit status is 1 if a text
differs from the one without guesses; the page names the prompts.

    python scripts/compare_budgets.py --model M --prompts FILE.jsonl --dtype bfloat16 --out OUT
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import click
import torch
from transformers import PreTrainedModel

from bench import cli
from bench.corpora import conversation, prompt_ids
from bench.methods import as_inputs, timed_by
from bench.pages import command_line, heading, table, write_results
from bench.timing import decoding_options
from lookahead import Lookahead, LookaheadConfig, NgramPool, Sequences, unwrap, wrap
from lookahead.passes.environment import environment
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts


def engine_of(guesses: int | str) -> Lookahead:
    """Return an engine with this budget; without guesses, it has no window, either."""
    config = LookaheadConfig(budget=guesses, **({"window_size": 0} if guesses == 0 else {}))
    return Lookahead(config, NgramPool(config.pool_memory_mb))


def written_at_once(model: PreTrainedModel, prompts: list[list[int]], options: dict, most: int) -> list[list[int]]:
    """Return a wrapped model's texts if up to ``most`` of them share passes. Seeds are 0, 1, ..."""
    sequences, futures = Sequences(model), list[Future]()
    while len(futures) < len(prompts) or len(sequences):
        while len(futures) < len(prompts) and len(sequences) < most:
            ids = torch.tensor([prompts[len(futures)]])
            futures.append(sequences.submit(ids, seed=len(futures), **options))
        sequences.step()
    return [future.result()[0, len(ids) :].tolist() for future, ids in zip(futures, prompts, strict=True)]


def written_in_threads(model: PreTrainedModel, prompts: list[list[int]], options: dict) -> list[list[int]]:
    """Return the texts of two threads, each of which decodes one text at a time."""
    halves = [list(range(len(prompts)))[begin::2] for begin in (0, 1)]

    def write(numbers: list[int]) -> dict[int, list[int]]:
        sequences, texts = Sequences(model), {}
        for seed in numbers:
            future = sequences.submit(torch.tensor([prompts[seed]]), seed=seed, **options)
            while sequences.step():
                pass
            texts[seed] = future.result()[0, len(prompts[seed]) :].tolist()
        return texts

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(write, halves)
    return [text for _, text in sorted((first | second).items())]


def compare(
    model: PreTrainedModel, prompts: list[list[int]], options: dict, guesses: list[int | str], at_once: int
) -> list[dict]:
    """Return, for each number of guesses, the prompts whose texts differ, and the number of steps."""
    engines = {budget: engine_of(budget) for budget in dict.fromkeys([0, *guesses])}
    differ: dict[int | str, list[int]] = {budget: [] for budget in engines}
    steps = dict.fromkeys(engines, 0)
    without = []
    label = f"temperature {options.get('temperature', 0)}"
    with click.progressbar(list(enumerate(prompts)), label=label, file=sys.stderr) as progress:
        for seed, ids in progress:
            texts = {}
            for budget, engine in engines.items():
                engine.pool = NgramPool(engine.config.pool_memory_mb)
                (texts[budget],), _ = timed_by(engine, model, as_inputs(ids, model.device), options, seed)
                if engine.last.plain:
                    raise click.ClickException(f"the model's own decoding took over: {engine.last.plain}")
                steps[budget] += engine.last.steps
                differ[budget] += [seed] * (texts[budget] != texts[0])
            without.append(texts[0])
    of_all = {"temperature": options.get("temperature", 0), "prompts": len(prompts), "steps_without": steps[0]}
    results = [of_all | {"guesses": budget, "differ": differ[budget], "steps": steps[budget]} for budget in guesses]
    ways = {
        f"auto, {at_once} texts at once": partial(written_at_once, most=at_once),
        "auto, two threads": written_in_threads,
    }
    unwrap(model)
    for name, write in ways.items():
        wrap(model, pool=NgramPool(LookaheadConfig().pool_memory_mb))
        texts = write(model, prompts, options)
        unlike = [seed for seed, text in enumerate(texts) if text != without[seed]]
        results.append(of_all | {"guesses": name, "differ": unlike, "steps": model.lookahead.stats.sequence_steps})
        unwrap(model)
    return results


def page(where: dict, results: list[dict]) -> str:
    columns = ["temperature", "guesses", "texts as without guesses", "prompts that differ", "tokens/step"]
    rows = [
        [
            f"{one['temperature']:g}", one["guesses"], f"{one['prompts'] - len(one['differ'])} of {one['prompts']}",
            ", ".join(map(str, one["differ"])), one["steps_without"] / one["steps"],
        ]
        for one in results
    ]  # fmt: skip
    return f"{heading(where)}{table(columns, rows, 'rrrlr')}\n"


@click.command(help=__doc__.split("\n")[0])
@cli.model
@cli.prompts
@cli.limit
@cli.dtype
@cli.temperatures
@cli.new_tokens
@cli.guesses("4,16,64,auto")
@click.option("--at-once", type=cli.COUNT, default=8, show_default=True, help="Texts that share passes.")
@click.option("--out", type=cli.OUT, required=True, help="Write OUT.md and OUT.json.")
def main(model_name, prompts_file, limit, dtype, temperatures, max_new_tokens, guesses, at_once, out) -> None:
    model, tokenizer = load(model_name, dtype, "cpu")
    prompts = [prompt_ids(tokenizer, conversation(prompt), raw=False) for prompt in read_prompts(prompts_file, limit)]
    where = {"command": command_line(__file__), **environment(model), "prompts": len(prompts)}
    results: list[dict] = []
    for temperature in temperatures:
        results += compare(model, prompts, decoding_options(max_new_tokens, temperature), guesses, at_once)
        write_results(out, page(where, results), {"where": where, "results": results})
    if any(result["differ"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
