"""Compare ways to speculate in vLLM on the CPU: none, ngram, suffix trees, lookahead's pool.

Each method has its own engine in the environment FOLDER/vllm, which scripts/peers/install.sh makes. An engine is
suspended while others run. The methods run in turn, and their order rotates from repeat to repeat. Times are medians. A
method that remembers earlier prompts is timed twice: after it has forgotten them, and "again" on the same prompts.

    python scripts/benchmark_vllm.py --model M --prompts FILE.jsonl --peers FOLDER --pool code.pool --out results
"""

import signal
import statistics
import sys
from functools import partial

import click
import torch
from transformers import AutoTokenizer

from bench import cli
from bench.pages import command_line, heading, show_results, table
from bench.peer_process import Peer, PeerError, worker_command
from bench.timing import decoding_options, in_turn
from lookahead import DEMO_MODEL
from lookahead.passes.environment import processor
from lookahead.tools.prompts import read_prompts

MAX_REQUESTS = 64  # requests at once
BUILT = "lookahead, built pool"
METHODS = {  # (the worker's name for the method, whether it remembers earlier prompts)
    "plain": ("plain", False),
    "ngram": ("ngram", False),
    "suffix": ("suffix", False),
    "suffix, shared": ("suffix-shared", True),
    "lookahead": ("lookahead", True),
    BUILT: ("lookahead", True),
}


MOST_SPREAD = 0.15  # largest spread of a method's rates over repeats, as a share of their median


def summarize(runs: dict[tuple, list[dict]], greedy: bool) -> list[dict]:
    """Return a row for each (concurrency, method), from its answers.

    Greedy answers are compared with the first answer of plain vLLM.
    """
    rows = []
    for (concurrency, method), answers in runs.items():
        tokens = [sum(map(len, answer["ids"])) for answer in answers]
        rates = [n / answer["seconds"] for n, answer in zip(tokens, answers, strict=True)]
        plain = runs[concurrency, "plain"][0]["ids"]
        same = [one == other for answer in answers for one, other in zip(answer["ids"], plain, strict=True)]
        drafted, accepted = (sum(answer[name] or 0 for answer in answers) for name in ("drafted", "accepted"))
        rows.append({
            "concurrency": concurrency,
            "method": method,
            "tokens_per_second": statistics.median(rates),
            "rates": rates,
            "drafted_per_token": drafted / sum(tokens),
            "accepted_per_token": accepted / sum(tokens),
            "accepted_per_drafted": accepted / drafted if drafted else None,
            "identical": sum(same) if greedy else None,
            "texts": len(same),
        })  # fmt: skip
    plain = {row["concurrency"]: row for row in rows if row["method"] == "plain"}
    return [row | {"times_plain": _times_plain(row, plain[row["concurrency"]])} for row in rows]


def _times_plain(row: dict, plain: dict) -> float | None:
    """Return the ratio of rates; None if the machine was busy. Engines are other processes, so only the spread of their
    repeats shows that."""
    for rates in (row["rates"], plain["rates"]):
        if len(rates) < 2 or max(rates) - min(rates) > MOST_SPREAD * statistics.median(rates):
            return None
    return row["tokens_per_second"] / plain["tokens_per_second"]


def markdown(rows: list[dict], where: dict, failures: dict[str, str]) -> str:
    columns = ["requests at once", "method", "tokens/s", "least-most", "times plain", "drafted a token",
               "accepted a token", "accepted a drafted token", "as plain"]  # fmt: skip
    cells = [
        [row["concurrency"], row["method"], f"{row['tokens_per_second']:.1f}",
         f"{min(row['rates']):.1f}-{max(row['rates']):.1f}", row["times_plain"], row["drafted_per_token"],
         row["accepted_per_token"], row["accepted_per_drafted"],
         None if row["identical"] is None else f"{row['identical']}/{row['texts']}"]
        for row in rows
    ]  # fmt: skip
    failed = "".join(f"\n\n{method} failed: {reason}" for method, reason in failures.items())
    note = f"\n\ntimes plain: only if the repeats of both methods differ by less than {MOST_SPREAD:.0%}."
    return heading(where) + table(columns, cells, "rlrrrrrrr") + note + failed + "\n"


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", type=cli.FOLDER, default=DEMO_MODEL, help="A folder. Default: the packaged model.")
@cli.prompts
@click.option("--peers", required=True, type=cli.FOLDER, help="Folder made by scripts/peers/install.sh.")
@click.option("--pool", type=cli.FILE, help="From `lookahead pool build`, for the method with a built pool.")
@click.option("--methods", type=cli.ListOf(click.Choice(list(METHODS)), ";"), default=";".join(METHODS),
              show_default=True, help="Separated by semicolons; plain always runs.")  # fmt: skip
@click.option("--concurrency", "concurrencies", type=cli.ListOf(click.IntRange(1, MAX_REQUESTS)), default="1,8",
              show_default=True, help="Requests at once.")  # fmt: skip
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--threads", default=2, show_default=True, type=cli.COUNT)
@cli.new_tokens
@cli.temperature
@cli.repeats
@cli.limit
@click.option("--timeout", default=1200, show_default=True, help="Most seconds for an engine's start or answer.")
@click.option("--out", type=cli.OUT, help="Write OUT.json and OUT.md.")
def main(
    model, prompts_file, peers, pool, methods, concurrencies, dtype, threads, max_new_tokens, temperature, repeats,
    limit, timeout, out,
) -> None:  # fmt: skip
    methods = [method for method in methods if pool or method != BUILT]
    chosen = [method for method in METHODS if method in ("plain", *methods)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(prompt["turns"][0]).input_ids for prompt in read_prompts(prompts_file, limit)]
    options = decoding_options(max_new_tokens, temperature)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit through the code that ends the engines
    engines = {}
    for method in chosen:
        command = worker_command(peers, "vllm", str(model), dtype, threads, METHODS[method][0], MAX_REQUESTS)
        variables = ["env", f"LOOKAHEAD_VLLM_POOL={pool.resolve()}"] if method == BUILT else []
        engines[method] = Peer([*variables, *command], timeout)
    failures: dict[str, str] = {}
    runs: dict[tuple[int, str], list[dict]] = {}

    def ask(concurrency: int, method: str, repeat: int) -> list[dict] | None:
        """Return an answer after the method has forgotten earlier prompts; if it remembers them, also a second one."""
        progress.update(1)
        if method in failures:
            return None
        try:
            call = partial(engines[method].ask, prompts, options, repeat, concurrency=concurrency)
            return [call(forget=forget) for forget in ((True, False) if METHODS[method][1] else (True,))]
        except PeerError as error:
            failures[method] = str(error)

    try:
        steps = len(concurrencies) * len(chosen) * repeats
        with click.progressbar(length=steps, label="runs", file=sys.stderr) as progress:
            for concurrency in concurrencies:
                calls = in_turn(chosen, repeats, 0, partial(ask, concurrency))
                for method in [method for method in chosen if method not in failures]:
                    for again, answers in enumerate(zip(*calls[method], strict=True)):
                        runs[concurrency, method + again * ", again"] = answers
        versions = next((engine.versions for engine in engines.values() if engine.versions), {})
    finally:
        for engine in engines.values():
            engine.close()
    if "plain" in failures:
        raise click.ClickException(f"plain vLLM failed: {failures['plain']}")
    runs = {key: answers for key, answers in runs.items() if key[1].removesuffix(", again") not in failures}
    rows = summarize(runs, temperature == 0)
    where = {
        "command": command_line(__file__), "processor": processor(torch.device("cpu")), "threads": threads,
        "dtype": dtype, "prompts": len(prompts), "new tokens": max_new_tokens, "temperature": temperature,
        "repeats": repeats, **versions,
    }  # fmt: skip
    text = markdown(rows, where, failures)
    show_results(out, text, {"where": where, "table": rows, "failures": failures})


if __name__ == "__main__":
    main()
