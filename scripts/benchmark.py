"""Benchmark lookahead against plain decoding, transformers' speculative methods and other libraries.

A cell is a model, a dtype, a temperature and a context length. For each prompt of a cell, the methods run in turn.
Their order rotates from prompt to prompt and from repeat to repeat. Texts are compared with those of plain decoding
from the same seed, which is the prompt's number. OUT.md, OUT.json and the pictures are rewritten after each cell.

    python scripts/benchmark.py --model M --prompts FILE.jsonl --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --dtype float32,bfloat16 --temperature 0.6,0 --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --contexts 256,2048,8192 --out OUT
    python scripts/benchmark.py --model M --prompts FILE.jsonl --methods plain,auto,llama-plain --peers FOLDER --out OUT
    python scripts/benchmark.py --model M --never-slower --out OUT

Prompts are Spec-Bench's question.jsonl, or any file of its format: each line is an object with question_id, category
and turns. They are put into the model's chat template if it has one. If the object also has replies (a text for each
turn but the last), the last turn is decoded; otherwise the first. Peers are other libraries on the CPU. Each has its
own Python environment (FOLDER/llama, FOLDER/openvino, ...) and a worker in scripts/peers. A method that fails gets a
row with the reason.
"""

import importlib.util
import itertools
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import click
import torch
from torch import nn
from transformers import BatchEncoding, PreTrainedModel

import lookahead
from bench import cli
from bench.benchmark_page import draw, markdown
from bench.corpora import RANDOM_LENGTH, category_of, conversation, first_of_each, tokenized_prompts
from bench.methods import DEFAULT, KEEP_DRAWS, METHODS, PEERS, WITH_DRAFT_MODEL, Engines, Subject, as_inputs
from bench.pages import command_line, write_results
from bench.peer_process import PeerError
from bench.speedups import summarise, title
from bench.timing import decoding_options, in_turn, waited, why_no_ratios
from lookahead.compat import is_plain
from lookahead.passes.environment import environment
from lookahead.tools.audit import choice_scores, first_difference, next_logits
from lookahead.tools.prompts import read_prompts

RANDOM_PROMPTS, RANDOM_TEMPERATURE = 16, 1.5  # of --never-slower
MEDIANS = ("seconds", "first_seconds", "own_seconds", "steps", "stepped", "drafted", "accepted", "forward_seconds")


def margin_at(
    model: PreTrainedModel, inputs: BatchEncoding, text: list[int], index: int, options: dict, seed: int
) -> float:
    """Return how close plain decoding's choice of new token ``index`` was, in logits: zero is a tie."""
    row = next_logits(model, inputs.input_ids, text[: index + 1])[-1]
    best = choice_scores(row, options.get("temperature", 0.0), seed, index).topk(2).values
    return (best[0] - best[1]).item()


def bytes_of(weight: torch.Tensor) -> int:
    """Bytes of a weight, or of the tensors that a quantized one wraps."""
    names = [] if is_plain(weight) else weight.__tensor_flatten__()[0]
    return sum(bytes_of(getattr(weight, name)) for name in names) or weight.nbytes


def bytes_read(model: PreTrainedModel, rows: int = 1) -> float:
    """Bytes of the weights that a pass over ``rows`` rows reads: all except experts that no row chooses, and embeddings
    that are not the output layer, too. This is the mean if rows choose experts at random."""
    chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(module.weight) for module in (*embeddings, model.get_input_embeddings())}
    looked_up.discard(id(model.get_output_embeddings().weight))
    size = 0.0
    for name, weight in model.named_parameters():
        if id(weight) not in looked_up:
            left_out = (1 - chosen / len(weight)) ** rows if ".experts." in name else 0
            size += bytes_of(weight) * (1 - left_out)
    return size


def reading(model: PreTrainedModel) -> dict:
    """Return `bytes_read` of a pass over one row, and the seconds that reading as many bytes in sequence takes.

    The time is the best of ten sums over up to 1 GiB of numbers.
    """
    size = round(bytes_read(model))
    numbers = torch.ones(min(size, 2**30) // 4, device=model.device)
    seconds = min(waited(numbers.sum, model.device) for _ in range(10))
    return {"bytes": size, "seconds": seconds * size / numbers.nbytes}


def measure(
    subject: Subject, prompts: list[list[int]], categories: list[str], methods: list[str], options: dict, repeats: int,
    label: str, is_over: Callable[[], bool] = lambda: False,
) -> tuple[list[dict], dict[str, str]]:  # fmt: skip
    """Measure a cell. prompts: token ids, each with its category. methods: they include plain.

    is_over: called before each prompt but the first; if it returns True, the rest is left out.

    Returns a row for each prompt and method, and the reason for each method that failed, which has no rows.
    Raises what plain decoding raises.
    """
    longest = max(map(len, prompts)) + options["max_new_tokens"]
    failures: dict[str, str] = {}
    engines = Engines(subject.draft_model)

    def attempt(number: int, method: str, repeat: int) -> dict | None:
        if method in failures:
            return None
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
            torch.compiler.reset()  # forget code compiled for another length
        attempt(0, method, -1)
    rows = []
    with click.progressbar(list(enumerate(prompts)), label=label, file=sys.stderr) as progress:
        for number, ids in progress:
            if number and is_over():
                break
            calls = in_turn(methods, repeats, number, partial(attempt, number))
            plain = calls["plain"][0]["ids"]
            for method in [method for method in methods if method not in failures]:
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
                    **{name: median([call[name] for call in calls[method]]) for name in MEDIANS},
                    "all_seconds": [call["seconds"] for call in calls[method]],
                    "comparable": comparable,
                    "difference": different,
                    "margin": margin,
                })  # fmt: skip
    return [row for row in rows if row["method"] not in failures], failures


def median(values: list[float | None]) -> float | None:
    return None if None in values else statistics.median(values)


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "models", multiple=True, default=[str(lookahead.DEMO_MODEL)], metavar="NAME_OR_PATH",
              help="May be repeated. Default: the packaged model.")  # fmt: skip
@click.option("--prompts", "prompts_file", type=cli.FILE, help="In Spec-Bench's JSONL format.")
@click.option("--dtype", "dtypes", type=cli.ListOf(click.Choice(["float32", "bfloat16"])), default="float32",
              show_default=True, help="float32, bfloat16 or both.")  # fmt: skip
@click.option("--int8", is_flag=True,
              help="Hold the weights of linear layers in int8, by torchao. Peers read the model as it is.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, ...")
@click.option("--temperature", "temperatures", type=cli.ListOf(click.FloatRange(min=0)),
              help="One or several; 0: greedy, no sampling.  [default: 0.6,0]")  # fmt: skip
@click.option("--methods", type=cli.ListOf(click.Choice(METHODS)),
              help=f"Any of {', '.join(METHODS)}; plain always runs.  [default: {','.join(DEFAULT['cpu'])}; on a GPU "
              f"{','.join(DEFAULT['cuda'])}]")  # fmt: skip
@click.option("--contexts", type=cli.ListOf(cli.WholeOr("none", least=2)), default="none", show_default=True,
              help="Tokens of each prompt; none leaves prompts as they are.")  # fmt: skip
@click.option("--never-slower", is_flag=True,
              help=f"Use prompts of {RANDOM_LENGTH} random tokens, at temperature {RANDOM_TEMPERATURE}.")  # fmt: skip
@cli.new_tokens
@cli.repeats
@cli.limit
@cli.per_category
@click.option("--raw", is_flag=True, help="Do not use the model's chat template.")
@click.option("--assistant", metavar="NAME_OR_PATH", help=f"Draft model for {', '.join(WITH_DRAFT_MODEL)}.")
@click.option("--peers", type=cli.FOLDER, help="Folder with the environments of other libraries.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
              help="Most seconds for a peer's answer or for a compilation.")  # fmt: skip
@click.option("--threads", type=cli.COUNT, help="CPU threads; default: torch's.")
@click.option("--out", type=cli.OUT, required=True, help="Write OUT.md, OUT.json and OUT-*.png.")
def main(
    models, prompts_file, dtypes, int8, device, temperatures, methods, contexts, never_slower, max_new_tokens, repeats,
    limit, per_category, raw, assistant, peers, timeout, threads, out,
) -> None:  # fmt: skip
    methods = methods or DEFAULT["cpu" if device == "cpu" else "cuda"]
    methods = ["plain", *(method for method in methods if method != "plain")]
    contexts = [None if context == "none" else context for context in contexts]
    names = [Path(model).name for model in models]
    foreign = [method for method in methods if method in PEERS]
    for wrong, message in (
        (importlib.util.find_spec("matplotlib") is None,
         "the page has pictures, which need matplotlib: pip install matplotlib"),
        (foreign and device != "cpu",
         f"these methods run on the CPU only: {', '.join(foreign)}; leave out --device, or these of --methods"),
        (int8 and importlib.util.find_spec("torchao") is None, "--int8 needs torchao: pip install torchao"),
        (foreign and peers is None, "methods of other libraries need --peers, the folder of their environments"),
        (set(WITH_DRAFT_MODEL) & set(methods) and assistant is None, f"{', '.join(WITH_DRAFT_MODEL)} need --assistant"),
        (never_slower and (prompts_file or temperatures or contexts != [None] or per_category or raw),
         "--never-slower has its own prompts and temperature: leave out --prompts, --temperature, --contexts, "
         "--per-category and --raw"),
        (not never_slower and not prompts_file, "give --prompts, or --never-slower, which makes its own prompts"),
        (len(set(names)) < len(names), f"two models have the same name: {', '.join(names)}"),
    ):  # fmt: skip
        if wrong:
            raise click.UsageError(message)
    if threads:
        torch.set_num_threads(threads)
    if never_slower:
        texts, temperatures, what = None, [RANDOM_TEMPERATURE], f"{RANDOM_LENGTH} random tokens each"
        categories = ["random"] * (limit or RANDOM_PROMPTS)
    else:
        read = read_prompts(prompts_file, limit)
        read = first_of_each(read, per_category) if per_category else read
        texts, categories = list(map(conversation, read)), list(map(category_of, read))
        temperatures, what = temperatures or [0.6, 0.0], prompts_file.name
    # Read the prompts of all models first, so an error does not come after hours of measuring.
    count = len(categories)
    prompts = {model: tokenized_prompts(model, texts, contexts, count, max_new_tokens, raw) for model in models}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit through the code that ends the peers
    report = {"environment": {}, "cells": []}
    versions: dict[str, dict] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    for (model, name), dtype in itertools.product(zip(models, names, strict=True), dtypes):
        with closing(Subject(model, dtype, device, methods, assistant, peers, timeout)) as subject:
            if int8:  # linear layers and the output layer, as in llama.cpp's Q8_0
                from torchao.quantization import Int8WeightOnlyConfig, quantize_

                quantize_(subject.plain, Int8WeightOnlyConfig())
            for temperature, (context, ids) in itertools.product(temperatures, prompts[model].items()):
                options = decoding_options(max_new_tokens, temperature)
                kind = f"{dtype}, weights in int8" if int8 else dtype
                cell = {"model": name, "dtype": kind, "temperature": temperature, "context": context}
                before = reading(subject.plain)
                rows, failures = measure(subject, ids, categories, methods, options, repeats, f"{name}, {title(cell)}")
                cell["reading"] = min(before, reading(subject.plain), key=lambda read: read["seconds"])
                report["cells"].append({**cell, "table": summarise(rows, methods, failures), "prompts": rows})
                for method, peer in subject.peers.items():
                    if peer.versions:
                        versions.setdefault(PEERS[method][0], {}).update(peer.versions)
                report["environment"] = {
                    "command": command_line(__file__), **environment(subject.plain), "peers": versions,
                    "prompts": f"{len(ids)} prompts: {what}", "max_new_tokens": max_new_tokens, "repeats": repeats,
                    "why_no_ratios": why_no_ratios(),
                }  # fmt: skip
                pictures = [] if report["environment"]["why_no_ratios"] else draw(report, out)
                text = markdown(report, pictures)
                write_results(out, text, report)
    click.echo(text)


if __name__ == "__main__":
    main()
