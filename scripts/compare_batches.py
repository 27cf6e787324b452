"""Compare lookahead with plain decoding on batches of several sizes.

Prompts are in Spec-Bench's JSONL format. They are batched in their order, with padding to the left. With --samples,
each prompt stands in as many places, for groups of samples of one prompt. For each batch, the methods run in turn, and
their order rotates from repeat to repeat. The time of a method is the median of its repeats. A call of one token is
timed in the same way, to separate the prefill. With --peers, llama.cpp decodes the batch, too: its server gets all of
it at once, and has a slot for each of its texts.
Greedy texts are compared with plain decoding of the batch and of each prompt alone. Sampled texts are not compared,
because their draws differ.

    python scripts/compare_batches.py --model M --prompts FILE.jsonl --sizes 1,2,4,8
"""

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import torch
from transformers import BatchEncoding, PreTrainedModel

import lookahead
from bench import cli
from bench.methods import twin_of
from bench.pages import command_line, heading, show_results, table
from bench.peer_process import Peer, worker_command
from bench.timing import decoding_options, in_turn, load_for_batches, timed, why_no_ratios
from lookahead import LookaheadConfig, NgramPool
from lookahead.compat import CACHE
from lookahead.passes.environment import environment
from lookahead.tools.prompts import read_prompts, up_to_its_end

OURS = ("fresh pool", "shared pool")
PEER = "llama.cpp"
TIMEOUT = 1200  # seconds for the peer to get ready, and to answer


@contextmanager
def watch_caches(model: PreTrainedModel) -> Iterator[list[int]]:
    """List the bytes of the cache in each pass of the model, unused room included."""
    sizes = []

    def look(model, args, kwargs, output) -> None:
        cache = kwargs.get(CACHE)
        if cache is not None:  # some passes of the probe have none
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            sizes.append(sum(storage.nbytes() for storage in storages.values()))

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


def markdown(rows: list[dict], where: dict) -> str:
    why = where["note"]
    columns = ["batch", "method", "tokens/s", "speed-up", "ms/token", "ms/token after the prompts",
               "tokens/step of a sequence", "largest cache, MiB", "identical"]  # fmt: skip
    cells = [
        [row["batch"], row["method"], f"{row['tokens_per_second']:.1f}", None if why else row["speedup"],
         1000 / row["tokens_per_second"], row["ms_behind_prompts"], row["tokens_per_step"], row["cache_mib"],
         None if row["identical"] is None else f"{row['identical']}/{row['prompts']}"]
        for row in rows
    ]  # fmt: skip
    return heading(where) + table(columns, cells, "rlrrrrrrr") + "\n"


@click.command(help=__doc__.split("\n")[0])
@cli.model
@cli.prompts
@click.option("--sizes", type=cli.ListOf(cli.COUNT), default="1,2,4,8", show_default=True, help="Batch sizes.")
@cli.dtype
@cli.device
@cli.new_tokens
@cli.temperature
@cli.repeats
@cli.limit
@click.option("--samples", default=1, show_default=True, type=cli.COUNT, help="Texts of each prompt.")
@click.option("--peers", type=cli.FOLDER, metavar="DIR", help="Compare with llama.cpp, built by peers/install.sh.")
@click.option("--budget", default=LookaheadConfig.budget, show_default=True, type=cli.WholeOr("auto", least=0))
@click.option("--out", type=cli.OUT, help="Write OUT.json and OUT.md.")
def main(
    model_name, prompts_file, sizes, dtype, device, max_new_tokens, temperature, repeats, limit, samples, peers,
    budget, out
) -> None:  # fmt: skip
    if peers and not (model_name and Path(model_name).is_dir()):
        raise click.UsageError(f"--peers needs a --model that is a folder, got {model_name}")
    model, tokenizer = load_for_batches(model_name, dtype, device)
    texts = [prompt["turns"][0] for prompt in read_prompts(prompts_file, limit) for _ in range(samples)]
    options = {**decoding_options(max_new_tokens, temperature), "pad_token_id": tokenizer.pad_token_id}
    ends = model.generation_config.eos_token_id
    wrapped = lookahead.wrap(twin_of(model), LookaheadConfig(budget=budget))
    methods = ("plain", *OURS, *([PEER] if peers else []))

    def encode(batch: list[str]) -> BatchEncoding:
        return tokenizer(batch, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)

    def run(
        inputs: BatchEncoding, seed: int, pools: list[NgramPool | None], method: str, repeat: int = 0, **others: int
    ) -> dict:
        """Call a method. pools: the shared pool of each repeat. others: options that replace the usual ones."""
        if method == PEER:
            shown = zip(inputs.input_ids, inputs.attention_mask.bool(), strict=True)
            prompts = [ids[mask].tolist() for ids, mask in shown]
            said = peer.ask(prompts, options | others, seed, concurrency=len(prompts))
            return {"texts": said["ids"], "seconds": said["seconds"], "stats": None}
        if method in OURS:
            lookahead.wrap(wrapped, pool=pools[repeat] if method == "shared pool" else NgramPool())
        texts, seconds = timed(wrapped if method in OURS else model, inputs, options | others, seed)
        return {"texts": texts, "seconds": seconds, "stats": wrapped.lookahead.last if method in OURS else None}

    run(encode(texts[:1]), 0, [], "fresh pool")  # measures step costs, whose caches must not count
    alone = []
    if not temperature:
        with click.progressbar(texts, label="each alone", file=sys.stderr) as progress:
            alone = [up_to_its_end(run(encode([text]), 0, [], "plain")["texts"][0], ends) for text in progress]
    rows = []
    for size in sizes:
        if peers:
            command = worker_command(peers, "llama", model_name, dtype, torch.get_num_threads(), "plain", size)
            peer = Peer(command, TIMEOUT)
        batches = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
        shared = [NgramPool() for _ in range(repeats)]  # one for each repeat, which sees each batch once
        totals = {
            m: {"seconds": 0.0, "prompts": 0.0, "tokens": 0, "identical": 0, "stats": lookahead.Stats()}
            for m in methods
        }
        for method in methods:  # warm up, and measure memory, which would disturb the timed calls
            with watch_caches(model) as caches:
                run(encode(batches[0]), 0, [None], method)
            totals[method]["cache"] = max(caches, default=0)
        with click.progressbar(list(enumerate(batches)), label=f"batches of {size}", file=sys.stderr) as progress:
            for number, batch in progress:
                run_batch = partial(run, encode(batch), number, shared)
                calls = in_turn(methods, repeats, number, run_batch)
                first_tokens = in_turn(methods, repeats, number, partial(run_batch, max_new_tokens=1))
                plain = calls["plain"][0]["texts"]
                for method, total in totals.items():
                    first = calls[method][0]
                    written = [up_to_its_end(text, ends) for text in first["texts"]]
                    total["tokens"] += sum(map(len, written))
                    total["seconds"] += statistics.median(call["seconds"] for call in calls[method])
                    total["prompts"] += statistics.median(call["seconds"] for call in first_tokens[method])
                    if alone:
                        expected = alone[number * size :][: len(batch)]
                        same = zip(first["texts"], plain, written, expected, strict=True)
                        total["identical"] += sum(a == b and c == d for a, b, c, d in same)
                    if first["stats"]:
                        total["stats"] += first["stats"]
        if peers:
            peer.close()
        for method, total in totals.items():
            rate = total["tokens"] / total["seconds"]
            after = total["seconds"] - total["prompts"], max(total["tokens"] - len(texts), 1)
            rows.append({
                "batch": size,
                "method": method,
                "tokens_per_second": rate,
                "ms_behind_prompts": 1000 * after[0] / after[1],
                "speedup": rate * totals["plain"]["seconds"] / totals["plain"]["tokens"],
                "tokens_per_step": total["stats"].tokens_per_step if method in OURS else 1.0,
                "cache_mib": None if method == PEER else round(total["cache"] / 2**20, 1),
                "identical": total["identical"] if alone else None,
                "prompts": len(texts),
            })  # fmt: skip
    where = {"command": command_line(__file__), **environment(model), "note": why_no_ratios()}
    text = markdown(rows, where)
    show_results(out, text, {"environment": where, "table": rows})


if __name__ == "__main__":
    main()
