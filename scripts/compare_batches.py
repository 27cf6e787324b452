"""Compare lookahead with plain decoding on batches of several sizes.

Prompts come in Spec-Bench's JSONL format and are batched in their order, with padding to the left. For every batch the
methods run in turn, in an order that rotates from repeat to repeat; a method's time is the median of its repeats.
Greedy texts are compared with plain decoding's, of the batch and of each prompt alone; sampled ones are other draws.

    python scripts/compare_batches.py --model M --prompts FILE.jsonl --sizes 1,2,4,8
"""

import shlex
import statistics
import sys
from pathlib import Path

import click
from benchmark import timed
from results import write_results

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.passes.environment import environment
from lookahead.tools.cli import AutoOr
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts, up_to_its_end

METHODS = ("plain", "fresh pool", "shared pool")


def cache_bytes(cache) -> int:
    """Memory that a cache's buffers hold, whether in use or not."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class MemoryWatch:
    """While it is open, the largest cache that the model's passes were given."""

    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self.peak = 0
        self._hook = self._model.register_forward_hook(self._look, with_kwargs=True)
        return self

    def _look(self, model, args, kwargs, output):
        if kwargs.get("past_key_values") is not None:  # a pass that tries the model out has none
            self.peak = max(self.peak, cache_bytes(kwargs["past_key_values"]))

    def __exit__(self, *_):
        self._hook.remove()


def markdown(table: list[dict], where: dict) -> str:
    lines = [
        f"`{where['command']}`",
        "",
        ", ".join(f"{name} {value}" for name, value in where.items() if name != "command"),
        "",
        "| batch | method | tokens/s | speed-up | tokens/step of a sequence | largest cache, MiB | identical |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        identical = "" if row["identical"] is None else f"{row['identical']}/{row['prompts']}"
        lines.append(
            f"| {row['batch']} | {row['method']} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} | "
            f"{row['tokens_per_step']:.2f} | {row['cache_mib']:.1f} | {identical} |"
        )
    return "\n".join(lines) + "\n"


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "model_name", metavar="NAME_OR_PATH", help="Causal LM to load; the packaged one by default.")
@click.option("--prompts", "prompts_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--sizes", default="1,2,4,8", show_default=True, help="Batch sizes.")
@click.option(
    "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16", "float16"])
)
@click.option("--device", default="auto", show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=2))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0 does not sample.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option("--budget", default=LookaheadConfig.budget, show_default=True, type=AutoOr(min=0))
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(
    model_name, prompts_file, sizes, dtype, device, max_new_tokens, temperature, repeats, limit, budget, out
) -> None:
    try:
        batch_sizes = [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{sizes!r} is not a list of whole numbers", param_hint="--sizes") from error
    model, tokenizer = load(model_name, dtype, device)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [prompt["turns"][0] for prompt in read_prompts(prompts_file, limit)]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0}
    ends = model.generation_config.eos_token_id
    config = LookaheadConfig(budget=budget)

    def encode(batch: list[str]):
        return tokenizer(batch, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)

    def run(method: str, inputs, seed: int, pool: NgramPool | None = None) -> dict:
        if method != "plain":
            lookahead.wrap(model, config, pool)
        texts, seconds = timed(model, inputs, options, seed)
        stats = None if method == "plain" else model.lookahead.last
        lookahead.unwrap(model)
        return {"texts": texts, "seconds": seconds, "stats": stats}

    run("fresh pool", encode(texts[:1]), 0)  # step costs are measured, on a cache that no memory watch is to count
    alone = []
    if not temperature:
        with click.progressbar(texts, label="each alone", file=sys.stderr) as progress:
            for text in progress:
                alone.append(up_to_its_end(run("plain", encode([text]), 0)["texts"][0], ends))
    table = []
    for size in batch_sizes:
        batches = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        shared = [NgramPool() for _ in range(repeats)]  # each has seen the earlier batches once
        totals = {method: {"seconds": 0.0, "tokens": 0, "identical": 0, "cache": 0} for method in METHODS}
        stats = {method: lookahead.Stats() for method in METHODS}
        for method in METHODS:  # warm up, and look at the memory, which takes time
            with MemoryWatch(model) as watch:
                run(method, encode(batches[0]), 0)
            totals[method]["cache"] = watch.peak
        with click.progressbar(list(enumerate(batches)), label=f"batches of {size}", file=sys.stderr) as progress:
            for number, batch in progress:
                inputs = encode(batch)
                calls: dict[str, list[dict]] = {method: [] for method in METHODS}
                for repeat in range(repeats):
                    turn = (number + repeat) % len(METHODS)
                    for method in METHODS[turn:] + METHODS[:turn]:
                        pool = shared[repeat] if method == "shared pool" else None
                        calls[method].append(run(method, inputs, number, pool))
                for method in METHODS:
                    call, total = calls[method][0], totals[method]
                    written = [up_to_its_end(text, ends) for text in call["texts"]]
                    total["tokens"] += sum(map(len, written))
                    total["seconds"] += statistics.median(each["seconds"] for each in calls[method])
                    if alone:
                        total["identical"] += sum(
                            ours == theirs and text == plain
                            for ours, theirs, text, plain in zip(
                                written, alone[number * size :], call["texts"], calls["plain"][0]["texts"], strict=False
                            )
                        )
                    if call["stats"]:
                        stats[method] += call["stats"]
        plain_rate = totals["plain"]["tokens"] / totals["plain"]["seconds"]
        for method, total in totals.items():
            rate = total["tokens"] / total["seconds"]
            table.append({
                "batch": size,
                "method": method,
                "tokens_per_second": rate,
                "speedup": rate / plain_rate,
                "tokens_per_step": stats[method].tokens_per_step if method != "plain" else 1.0,
                "cache_mib": total["cache"] / 2**20,
                "identical": total["identical"] if alone else None,
                "prompts": len(texts),
            })  # fmt: skip
    where = {"command": shlex.join(["python", "scripts/compare_batches.py", *sys.argv[1:]]), **environment(model)}
    text = markdown(table, where)
    click.echo(text)
    if out is not None:
        write_results(out, text, {"environment": where, "table": table})


if __name__ == "__main__":
    main()
