"""Compare ways to speculate in vLLM on the CPU: none, ngram, suffix trees, lookahead's pool.

Each method has an engine of its own, in the environment FOLDER/vllm that scripts/peers/install.sh makes, which is
suspended while others run. The methods run in turn, in an order that rotates from repeat to repeat; times are medians.
Methods that remember earlier prompts are timed twice: after they forgot, and "again", on the same prompts once more.

    python scripts/benchmark_vllm.py --model M --prompts FILE.jsonl --peers FOLDER --pool code.pool --out results
"""

import shlex
import signal
import statistics
import sys
from pathlib import Path

import click
import torch
from peer_process import Peer, PeerError
from results import write_results
from transformers import AutoTokenizer

from lookahead import DEMO_MODEL
from lookahead.passes.environment import processor
from lookahead.tools.prompts import read_prompts

WORKER = Path(__file__).parent / "peers" / "vllm_batches_worker.py"
METHODS = {  # what the worker calls each
    "plain": "plain",
    "ngram": "ngram",
    "suffix": "suffix",
    "suffix, shared": "suffix-shared",
    "lookahead": "lookahead",
    "lookahead, built pool": "lookahead",
}
REMEMBER = ("suffix, shared", "lookahead", "lookahead, built pool")


def start(method: str, model: Path, dtype: str, threads: int, peers: Path, pool: Path | None, timeout: int) -> Peer:
    command = [str(peers / "vllm" / "bin" / "python"), str(WORKER), "--model", str(model), "--dtype", dtype,
               "--threads", str(threads), "--method", METHODS[method]]  # fmt: skip
    if method == "lookahead, built pool":
        command = ["env", f"LOOKAHEAD_VLLM_POOL={pool.resolve()}", *command]
    return Peer(command, timeout)


def summarize(runs: dict[tuple, list[dict]], greedy: bool) -> list[dict]:
    """A row for each (concurrency, method, whether again), from its answers; greedy ones are compared with plain vLLM's
    first."""
    table = []
    for (concurrency, method, again), answers in runs.items():
        tokens = [sum(map(len, answer["ids"])) for answer in answers]
        rate = statistics.median(n / answer["seconds"] for n, answer in zip(tokens, answers, strict=True))
        plain = runs[concurrency, "plain", False][0]["ids"]
        same = [one == other for answer in answers for one, other in zip(answer["ids"], plain, strict=True)]
        drafted, accepted = (sum(answer[name] or 0 for answer in answers) for name in ("drafted", "accepted"))
        table.append({
            "concurrency": concurrency,
            "method": method + (", again" if again else ""),
            "tokens_per_second": rate,
            "rates": [n / answer["seconds"] for n, answer in zip(tokens, answers, strict=True)],
            "drafted_per_token": drafted / sum(tokens),
            "accepted_per_token": accepted / sum(tokens),
            "accepted_per_drafted": accepted / drafted if drafted else None,
            "identical": sum(same) if greedy else None,
            "texts": len(same),
        })  # fmt: skip
    for row in table:
        base = next(each for each in table if each["method"] == "plain" and each["concurrency"] == row["concurrency"])
        row["times_plain"] = row["tokens_per_second"] / base["tokens_per_second"]
    return table


def markdown(table: list[dict], where: dict, failures: dict[str, str]) -> str:
    lines = [
        f"`{where['command']}`",
        "",
        ", ".join(f"{name} {value}" for name, value in where.items() if name != "command"),
        "",
        "| requests at once | method | tokens/s | least-most | times plain | drafted a token | accepted a token | "
        "accepted a drafted token | as plain |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        share = "" if row["accepted_per_drafted"] is None else f"{row['accepted_per_drafted']:.2f}"
        identical = "" if row["identical"] is None else f"{row['identical']}/{row['texts']}"
        lines.append(
            f"| {row['concurrency']} | {row['method']} | {row['tokens_per_second']:.1f} | "
            f"{min(row['rates']):.1f}-{max(row['rates']):.1f} | {row['times_plain']:.2f} | "
            f"{row['drafted_per_token']:.2f} | {row['accepted_per_token']:.2f} | {share} | "
            f"{identical} |"
        )
    lines += [f"\n{method} failed: {reason}" for method, reason in failures.items()]
    return "\n".join(lines) + "\n"


def picture(table: list[dict], path: Path) -> None:
    """Tokens a second of every method, a panel for each concurrency. Needs matplotlib (extra ``bench``)."""
    from matplotlib.figure import Figure

    concurrencies = sorted({row["concurrency"] for row in table})
    figure = Figure(figsize=(5 * len(concurrencies) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(concurrencies), sharey=True, squeeze=False)[0]
    for panel, concurrency in zip(panels, concurrencies, strict=True):
        rows = [row for row in table if row["concurrency"] == concurrency][::-1]
        bars = panel.barh([row["method"] for row in rows], [row["tokens_per_second"] for row in rows], color="tab:blue")
        panel.bar_label(bars, [f"{row['times_plain']:.2f}x" for row in rows], padding=3)
        panel.set(xlabel="tokens/s", title=f"{concurrency} at once")
        panel.margins(x=0.15)
    figure.savefig(path)


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=DEMO_MODEL,
              help="Folder of a causal LM; the packaged one by default.")  # fmt: skip
@click.option("--prompts", "prompts_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--peers", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder that scripts/peers/install.sh made.")  # fmt: skip
@click.option("--pool", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Of `lookahead pool build`, for the method with a built pool.")  # fmt: skip
@click.option(
    "--methods", default=";".join(METHODS), show_default=True, help="Separated by semicolons; plain always runs."
)
@click.option("--concurrency", default="1,8", show_default=True, help="Requests at once.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=2))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0 is greedy.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option("--timeout", default=1200, show_default=True, help="Seconds that an engine has to start, and for a pass.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json, OUT.md and OUT.png.")
def main(
    model, prompts_file, peers, pool, methods, concurrency, dtype, threads, max_new_tokens, temperature, repeats,
    limit, timeout, out,
) -> None:  # fmt: skip
    try:
        concurrencies = [int(each) for each in concurrency.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{concurrency!r} is not a list of whole numbers", param_hint="--concurrency"
        ) from error
    chosen = [method.strip() for method in methods.split(";")]
    for method in chosen:
        if method not in METHODS:
            raise click.BadParameter(f"{method!r} is none of {'; '.join(METHODS)}", param_hint="--methods")
    chosen = [method for method in METHODS if method in chosen or method == "plain"]
    if pool is None:
        chosen = [method for method in chosen if method != "lookahead, built pool"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(prompt["turns"][0]).input_ids for prompt in read_prompts(prompts_file, limit)]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what ends the engines
    engines = {method: start(method, model, dtype, threads, peers, pool, timeout) for method in chosen}
    runs: dict[tuple, list[dict]] = {
        (each, method, again): []
        for each in concurrencies
        for method in chosen
        for again in ((False, True) if method in REMEMBER else (False,))
    }
    failures: dict[str, str] = {}
    try:
        with click.progressbar(length=len(runs) * repeats, label="runs", file=sys.stderr) as progress:
            for repeat in range(repeats):
                for each in concurrencies:
                    turn = repeat % len(chosen)
                    for method in chosen[turn:] + chosen[:turn]:
                        for again in (False, True) if method in REMEMBER else (False,):
                            if method not in failures:
                                try:
                                    runs[each, method, again].append(engines[method].ask({
                                        "prompts": prompts, "concurrency": each, "max_new_tokens": max_new_tokens,
                                        "temperature": temperature, "seed": repeat, "forget": not again,
                                    }))  # fmt: skip
                                except PeerError as error:
                                    failures[method] = str(error)
                            progress.update(1)
        versions = next((engine.versions for engine in engines.values() if engine.versions), {})
    finally:
        for engine in engines.values():
            engine.close()
    if "plain" in failures:
        raise click.ClickException(f"plain vLLM failed: {failures['plain']}")
    runs = {key: answers for key, answers in runs.items() if key[1] not in failures}
    table = summarize(runs, greedy=temperature == 0)
    where = {
        "command": shlex.join(["python", *sys.argv]), "processor": processor(torch.device("cpu")),
        "threads": threads, "dtype": dtype,
        "prompts": len(prompts), "new tokens": max_new_tokens, "temperature": temperature, "repeats": repeats,
        **versions,
    }  # fmt: skip
    text = markdown(table, where, failures)
    click.echo(text)
    if out:
        write_results(out, text, {"where": where, "table": table, "failures": failures})
        picture(table, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
