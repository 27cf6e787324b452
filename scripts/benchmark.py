"""Benchmark lookahead beside plain decoding, transformers' own speculative methods and other libraries.

A cell is a model, a dtype, a temperature and a length of context. For each of its prompts the methods run in turn, in
an order that rotates from prompt to prompt and from repeat to repeat; texts are compared with plain decoding's from the
same seed, the prompt's number. OUT.md, OUT.json and the pictures are written anew after each cell.

    python scripts/benchmark.py --model M --prompts FILE.jsonl --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --dtype float32,bfloat16 --temperature 0.6,0 --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --contexts 256,2048,8192 --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --methods plain,auto,vllm-ngram --peers FOLDER --out OUT
    python scripts/benchmark.py --model M --never-slower --out OUT

Prompts come in Spec-Bench's JSONL format: one object a line with question_id, category and turns, of which the first
is used. Peers are other libraries, on the CPU, each in a Python environment of its own (FOLDER/lade, FOLDER/vllm)
behind a worker in scripts/peers. What fails is a row of the table, with the reason.
"""

import importlib.util
import itertools
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import torch
from benchmark_page import draw, markdown, summarise, title
from peer_process import Peer, PeerError
from results import write_results
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BatchEncoding,
    CompileConfig,
    GenerationConfig,
    StaticCache,
)

import lookahead
from lookahead import Lookahead, LookaheadConfig, NgramPool
from lookahead.passes.costs import synchronize
from lookahead.passes.environment import environment
from lookahead.tools.audit import choice_scores, first_difference, next_logits
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts

DTYPES = ("float32", "bfloat16")
PLAIN = ("plain", "static-compiled", "prompt-lookup", "assisted")
LOOKAHEAD = {
    "steps-of-one": {"budget": 0, "window_size": 0},
    "steps-of-one-torch": {"budget": 0, "window_size": 0, "cpu_kernels": False},
    "jacobi": {"strategy": "jacobi", "budget": 16},
    "lookahead-5-5-5": {"window_size": 5, "ngram_size": 5, "budget": 5},
    "lookahead-15-5-15": {"window_size": 15, "ngram_size": 5, "budget": 15},
    "auto": {},
    "auto-shared": {},
    "auto-torch": {"cpu_kernels": False},
    "steps-of-one-compiled": {"budget": 0, "window_size": 0, "compile_passes": True},
    "auto-compiled": {"compile_passes": True},
    "auto-compiled-shared": {"compile_passes": True},
    "auto-graphs": {"cuda_graphs": True},
}
SHARED = ("auto-shared", "auto-compiled-shared")
PEERS = {  # the environment, and what its worker calls the method
    "lade-15-5-15": ("lade", "lade-15-5-15"),
    "lade-plain": ("lade", "plain"),
    "vllm-plain": ("vllm", "plain"),
    "vllm-ngram": ("vllm", "ngram"),
    "vllm-suffix": ("vllm", "suffix"),
}
METHODS = (*PLAIN, *LOOKAHEAD, *PEERS)
KEEP_DRAWS = ("plain", "static-compiled", *LOOKAHEAD)  # one draw a token from the seed, as plain decoding
DEFAULT = {
    "cpu": ("plain", "prompt-lookup", "steps-of-one", "auto", "auto-compiled"),
    "cuda": ("plain", "static-compiled", "prompt-lookup", "steps-of-one", "auto", "auto-graphs"),
}

GUESS_AT_ONCE = ("prompt-lookup", "assisted")  # their first pass takes guesses beside the prompt: it is a step, too

WORKERS = Path(__file__).parent / "peers"
RANDOM_PROMPTS, RANDOM_TOKENS, RANDOM_TEMPERATURE = 16, 64, 1.5  # of --never-slower


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer."""

    def ring(*_) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again, where it rang in what swallows exceptions
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class ForwardCounter:
    """Counts the forward passes of a model while it is open, and the seconds until the second of them begins."""

    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self.passes = 0
        self.first_seconds = None
        self._opened = time.perf_counter()
        self._hook = self._model.register_forward_pre_hook(self._count)
        return self

    def _count(self, *_):
        self.passes += 1
        if self.passes == 2:
            self.first_seconds = time.perf_counter() - self._opened

    def __exit__(self, *_):
        self._hook.remove()


def timed(model, inputs, options: dict, seed: int) -> tuple[list[list[int]], float]:
    """One call of the model's generate() from a seed: the new ids of each sequence, and its seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(**inputs, **options)
    texts = output[:, inputs.input_ids.shape[1] :].tolist()
    return texts, time.perf_counter() - start


def margin_at(model, inputs, text: list[int], index: int, options: dict, seed: int) -> float:
    """How close plain decoding's choice of new token ``index`` was, in logits: zero is a tie."""
    row = next_logits(model, inputs.input_ids, text[: index + 1])[-1]
    best = choice_scores(row, options.get("temperature", 0.0), seed, index).topk(2).values
    return (best[0] - best[1]).item()


def reading(model) -> dict:
    """Bytes of all weights, and the seconds in which memory yields so many, in order: no pass takes less.

    By summing up to 1 GiB of numbers, the best of ten times.
    """
    size = sum(weight.nbytes for weight in model.parameters())
    numbers = torch.ones(min(size, 2**30) // 4, device=model.device)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        numbers.sum()
        synchronize(model.device)
        times.append(time.perf_counter() - start)
    return {"bytes": size, "seconds": min(times) * size / numbers.nbytes}


class Subject:
    """A model to decode with: plain, wrapped, and behind its peers."""

    def __init__(
        self, name: str, dtype: str, device: str, methods: list[str], assistant: str | None, peers: Path | None, timeout
    ):
        self.plain = load(name, dtype, device)[0]
        # Every method is to decode by one rule: neither a top-p nor a penalty that the model's folder may ask for.
        ends = self.plain.generation_config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends
        self.plain.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
        self.assistant = load(assistant, dtype, device)[0] if "assisted" in methods else None
        self.peers = {}
        for method in methods:
            if method in PEERS:
                library, its_name = PEERS[method]
                self.peers[method] = Peer(
                    [str(peers / library / "bin" / "python"), str(WORKERS / f"{library}_worker.py"), "--model", name,
                     "--dtype", dtype, "--threads", str(torch.get_num_threads()), "--method", its_name], timeout,
                )  # fmt: skip
        self._timeout = timeout

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *_) -> None:
        for peer in self.peers.values():
            peer.close()

    def call(
        self, method: str, ids: list[int], options: dict, seed: int, longest: int, engine: Lookahead | None = None
    ) -> dict:
        """One timed call.

        longest: positions of the longest text of the cell, for which a static cache is made.
        engine: of a lookahead method (`Engines`).
        Returns ids (new ones), seconds, first_seconds (until the first token is there and the second pass begins),
        steps (forward passes after the prefill), stepped (tokens that they yielded), drafted and accepted (guesses),
        forward_seconds (of the steps); None for what is not known.
        """
        if method in PEERS:
            answer = self.peers[method].ask({
                "ids": ids, "max_new_tokens": options["max_new_tokens"], "temperature": options.get("temperature", 0.0),
                "seed": seed,
            })  # fmt: skip
            known = {name: answer.get(name) for name in ("steps", "drafted", "accepted")}
            return _call(answer["ids"], answer["seconds"], **known)
        inputs = as_inputs(ids, self.plain.device)
        if method == "static-compiled":
            compiled = CompileConfig()
            compiled._compile_all_devices = True  # on the CPU, transformers does not by itself
            cache = StaticCache(config=self.plain.config, max_cache_len=longest)
            with time_limit(self._timeout):  # no hook here: it would be compiled, too
                texts, seconds = timed(
                    self.plain, inputs, options | {"past_key_values": cache, "compile_config": compiled}, seed
                )
            return _call(texts[0], seconds, steps=len(texts[0]) - 1)
        extra = {
            "prompt-lookup": {"prompt_lookup_num_tokens": 10},
            "assisted": {"assistant_model": self.assistant},
        }.get(method, {})
        if method in LOOKAHEAD:  # without a counter, whose hooks cannot be compiled
            lookahead.wrap(self.plain, engine.config, engine.pool).lookahead = engine
            try:
                texts, seconds = timed(self.plain, inputs, options, seed)
            finally:
                lookahead.unwrap(self.plain)
            stats = engine.last
            return _call(
                texts[0], seconds, first_seconds=stats.prefill_seconds, steps=stats.steps, drafted=stats.guesses,
                accepted=stats.accepted.total(), forward_seconds=stats.seconds["forward"],
            )  # fmt: skip
        with ForwardCounter(self.plain) as counter:
            texts, seconds = timed(self.plain, inputs, options | extra, seed)
        if method in GUESS_AT_ONCE:
            return _call(texts[0], seconds, steps=counter.passes, stepped=len(texts[0]))
        first_seconds = counter.first_seconds or seconds  # a text of one token has no second pass
        return _call(texts[0], seconds, first_seconds=first_seconds, steps=counter.passes - 1)


class Engines:
    """What lookahead methods know when a prompt begins, in one cell.

    As in a wrapped model that is used for long, a method keeps what it found out of the pace of its steps, but its pool
    is a fresh one for each call. Those of SHARED are kept over all prompts of a repeat.
    """

    def __init__(self):
        self._kept: dict[tuple[str, int | None], Lookahead] = {}

    def begin(self, method: str, repeat: int) -> Lookahead | None:
        """None if ``method`` is another's. repeat: -1 to warm up."""
        if method not in LOOKAHEAD:
            return None
        config = LookaheadConfig(**LOOKAHEAD[method])
        key = (method, repeat if method in SHARED else None)
        if key not in self._kept:
            self._kept[key] = Lookahead(config, NgramPool(config.pool_memory_mb))
        elif method not in SHARED:
            self._kept[key].pool = NgramPool(config.pool_memory_mb)
        return self._kept[key]


def _call(ids: list[int], seconds: float, stepped: int | None = None, **known) -> dict:
    """What `Subject.call` returns. stepped: all tokens but the first, if not given."""
    unknown = dict.fromkeys(("first_seconds", "steps", "drafted", "accepted", "forward_seconds"))
    return {"ids": ids, "seconds": seconds, "stepped": len(ids) - 1 if stepped is None else stepped, **unknown, **known}


def as_inputs(ids: list[int], device: torch.device) -> BatchEncoding:
    ids = torch.tensor([ids], device=device)
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def measure(
    subject: Subject, prompts: list[list[int]], categories: list[str], methods: list[str], options: dict, repeats: int,
    label: str,
) -> tuple[list[dict], dict[str, str]]:  # fmt: skip
    """Measure a cell. prompts: token ids. categories: of each. methods: plain among them.

    Returns a row for each prompt and method, and for each method that failed the reason; it has no rows.
    Raises what plain decoding raises.
    """
    longest = max(map(len, prompts)) + options["max_new_tokens"]
    failures: dict[str, str] = {}

    engines = Engines()

    def attempt(method: str, number: int, repeat: int) -> dict | None:
        try:
            return subject.call(method, prompts[number], options, number, longest, engines.begin(method, repeat))
        except Exception as error:
            if method == "plain":
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            failures[method] = reason if isinstance(error, PeerError) else f"{type(error).__name__}: {reason}"
            click.echo(f"{label}: {method} failed: {error}", err=True)

    for method in methods:
        click.echo(f"{label}: warming up {method}", err=True)
        if method == "static-compiled":
            torch.compiler.reset()  # what was compiled for another length
        attempt(method, 0, -1)
    rows = []
    with click.progressbar(list(enumerate(prompts)), label=label, file=sys.stderr) as progress:
        for number, ids in progress:
            calls: dict[str, list[dict]] = {method: [] for method in methods}
            for repeat in range(repeats):
                turn = (number + repeat) % len(methods)
                for method in methods[turn:] + methods[:turn]:
                    if method not in failures:
                        calls[method].append(attempt(method, number, repeat))
            plain = calls["plain"][0]["ids"]
            for method in methods:
                if method in failures:
                    continue
                differences = [first_difference(call["ids"], plain) for call in calls[method]]
                different = min((place for place in differences if place is not None), default=None)
                comparable = not options["do_sample"] or method in KEEP_DRAWS
                margin = None
                if different is not None and comparable:
                    inputs = as_inputs(ids, subject.plain.device)
                    margin = margin_at(subject.plain, inputs, plain, different, options, number)
                rows.append({
                    "prompt": number,
                    "category": categories[number],
                    "method": method,
                    "tokens": statistics.median(len(call["ids"]) for call in calls[method]),
                    **{name: _median(calls[method], name) for name in
                       ("seconds", "first_seconds", "steps", "stepped", "drafted", "accepted", "forward_seconds")},
                    "all_seconds": [call["seconds"] for call in calls[method]],
                    "comparable": comparable,
                    "difference": different,
                    "margin": margin,
                })  # fmt: skip
    return [row for row in rows if row["method"] not in failures], failures


def _median(calls: list[dict], name: str) -> float | None:
    values = [call[name] for call in calls]
    return None if None in values else statistics.median(values)


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocabulary, (count, RANDOM_TOKENS)).tolist()


def with_context(texts: list[list[int]], begin: list[int], length: int) -> list[list[int]]:
    """Each text behind others, in their order from it on and from the start again, ``length`` tokens in all.

    begin: special tokens that stand before any prompt. A text that is longer is cut at its front.
    Raises ClickException for a single text, which has no others.
    """
    if len(texts) < 2:
        raise click.ClickException("a context is made of the other prompts' texts: give two prompts or more")
    prompts = []
    for number, text in enumerate(texts):
        text = text[-(length - len(begin)) :]
        missing = length - len(begin) - len(text)
        others = [token for other in texts[number + 1 :] + texts[:number] for token in other]
        if missing and not others:
            raise click.ClickException("a context is made of the other prompts' texts, which are empty")
        prompts.append(begin + np.resize(others, missing).tolist() + text if missing else begin + text)
    return prompts


def tokenise(
    name: str, texts: list[str] | None, contexts: list[int | None], count: int, new_tokens: int
) -> dict[int | None, list[list[int]]]:
    """Token ids of a model's prompts for each context; without ``texts``, ``count`` prompts of random tokens.

    Raises ClickException where the model cannot be read, or was not made for prompts as long.
    """
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(name) if texts is not None else None
    except Exception as error:  # what is raised depends on the hub's client and the format
        raise click.ClickException(f"cannot read the model {name}: {error}") from error
    if texts is None:
        prompts = {None: random_prompts(count, config.vocab_size)}
    else:
        whole = tokenizer(texts).input_ids
        bare = tokenizer(texts, add_special_tokens=False).input_ids
        begin = whole[0][: len(whole[0]) - len(bare[0])]
        prompts = {length: whole if length is None else with_context(bare, begin, length) for length in contexts}
    room = getattr(config, "max_position_embeddings", None)
    for context, ids in prompts.items():
        longest = max(map(len, ids)) + new_tokens
        if room is not None and longest > room:
            what = f"a context of {context}" if context else f"a prompt of {longest - new_tokens}"
            raise click.ClickException(
                f"{name} was made for {room} positions, {what} and {new_tokens} new tokens are {longest}: "
                "give less of --contexts or --max-new-tokens, or another model"
            )
    return prompts


def _chosen(parameter: str, values: str, allowed: tuple[str, ...]) -> list[str]:
    chosen = list(dict.fromkeys(values.split(",")))
    for value in chosen:
        if value not in allowed:
            raise click.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=parameter)
    return chosen


def _numbers(parameter: str, values: str, kind: type, least: float) -> list:
    try:
        numbers = [kind(value) for value in dict.fromkeys(values.split(","))]
    except ValueError as error:
        raise click.BadParameter(f"{values!r} is not a list of numbers", param_hint=parameter) from error
    if min(numbers) < least:
        raise click.BadParameter(f"{min(numbers)} is below {least}", param_hint=parameter)
    return numbers


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "models", multiple=True, metavar="NAME_OR_PATH",
              help="May be repeated; the packaged one by default.")  # fmt: skip
@click.option("--prompts", "prompts_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="In Spec-Bench's JSONL format.")  # fmt: skip
@click.option("--dtype", "dtypes", default="float32", show_default=True, help="float32, bfloat16 or both.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, ...")
@click.option("--temperature", "temperatures", help="One or several; 0 does not sample.  [default: 0.6,0]")
@click.option("--methods", help=f"Of {', '.join(METHODS)}; plain always runs.  [default: {','.join(DEFAULT['cpu'])}; "
              f"on a GPU {','.join(DEFAULT['cuda'])}]")  # fmt: skip
@click.option("--contexts", default="none", show_default=True, help="Tokens of a prompt; none leaves it as it is.")
@click.option("--never-slower", is_flag=True,
              help=f"On {RANDOM_TOKENS} random tokens each, at temperature {RANDOM_TEMPERATURE}.")  # fmt: skip
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=2))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option("--assistant", metavar="NAME_OR_PATH", help="Draft model of the method assisted.")
@click.option("--peers", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder of the environments of other libraries.")  # fmt: skip
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
              help="Seconds that a peer or a compilation may take.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's default if not given.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Write OUT.md, OUT.json and OUT-*.png.")
def main(
    models, prompts_file, dtypes, device, temperatures, methods, contexts, never_slower, max_new_tokens, repeats, limit,
    assistant, peers, timeout, threads, out,
) -> None:  # fmt: skip
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("the page has pictures, which need matplotlib: pip install 'lookahead-decoding[bench]'")
    models = models or (str(lookahead.DEMO_MODEL),)
    methods = methods or ",".join(DEFAULT["cpu" if device == "cpu" else "cuda"])
    chosen = ["plain", *[m for m in _chosen("--methods", methods, METHODS) if m != "plain"]]
    if device != "cpu" and (unfit := [method for method in chosen if method in PEERS]):
        raise click.UsageError(f"on the CPU alone: {', '.join(unfit)}; leave out --device or these of --methods")
    dtypes = _chosen("--dtype", dtypes, DTYPES)
    lengths = [None if c == "none" else _numbers("--contexts", c, int, 2)[0] for c in contexts.split(",")]
    if never_slower and (prompts_file or temperatures or lengths != [None]):
        raise click.UsageError("--never-slower brings its prompts and temperature: leave out --prompts, --temperature "
                               "and --contexts")  # fmt: skip
    if not never_slower and not prompts_file:
        raise click.UsageError("give --prompts, or --never-slower, which makes its own")
    if "assisted" in chosen and assistant is None:
        raise click.UsageError("the method assisted needs --assistant")
    if any(method in PEERS for method in chosen) and peers is None:
        raise click.UsageError("methods of other libraries need --peers, the folder of their environments")
    names = [Path(model).name for model in models]
    if len(set(names)) < len(names):
        raise click.UsageError(f"two models of the same name: {', '.join(names)}")
    temperatures = _numbers("--temperature", temperatures or "0.6,0", float, 0)
    if never_slower:
        temperatures = [RANDOM_TEMPERATURE]
    if threads:
        torch.set_num_threads(threads)
    read = [] if never_slower else read_prompts(prompts_file, limit)
    texts = None if never_slower else [prompt["turns"][0] for prompt in read]
    categories = [prompt["category"] for prompt in read] or ["random"] * (limit or RANDOM_PROMPTS)
    # All of them before anything is measured: hours later is late for an error.
    prompts = {model: tokenise(model, texts, lengths, limit or RANDOM_PROMPTS, max_new_tokens) for model in models}
    what = f"{RANDOM_TOKENS} random tokens each" if never_slower else prompts_file.name
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends the peers
    report = {"environment": {}, "cells": []}
    versions: dict[str, dict] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    for (model, name), dtype in itertools.product(zip(models, names, strict=True), dtypes):
        with Subject(model, dtype, device, chosen, assistant, peers, timeout) as subject:
            for temperature, (context, ids) in itertools.product(temperatures, prompts[model].items()):
                options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
                if temperature:
                    options |= {"temperature": temperature, "top_k": 0}
                cell = {"model": name, "dtype": dtype, "temperature": temperature, "context": context}
                label = f"{name}, {title(cell)}"
                rows, failures = measure(subject, ids, categories, chosen, options, repeats, label)
                cell["reading"] = reading(subject.plain)
                report["cells"].append({**cell, "table": summarise(rows, chosen, failures), "prompts": rows})
                versions |= {PEERS[method][0]: peer.versions for method, peer in subject.peers.items() if peer.versions}
                report["environment"] = {
                    "command": shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
                    **environment(subject.plain),
                    "peers": versions,
                    "prompts": f"{len(ids)} prompts: {what}",
                    "max_new_tokens": max_new_tokens,
                    "repeats": repeats,
                }
                text = markdown(report, draw(report, out))
                write_results(out, text, report)
    click.echo(text)


if __name__ == "__main__":
    main()
