"""Time passes by rows and context, alternately on a quiet machine and beside a program that keeps a core busy.

Signals stop and resume the other program. On a quiet machine the shortest time counts, beside the program the median.
The KV cache holds random numbers, because Linux maps unwritten memory to a single page of zeros, which L1 would hold.

    python scripts/time_passes.py --model M --dtype bfloat16
"""

import signal
import statistics
import subprocess
import sys
import time

import click
import numpy as np
import torch

from bench import cli
from lookahead.models.cache import LookaheadCache
from lookahead.passes.capabilities import find_adapter, fused_runner
from lookahead.passes.fused import FusedRunner
from lookahead.passes.measuring import skip
from lookahead.step import lay_out
from lookahead.tools.loading import load
from ngram_pool import GuessTree, Origin

QUIET, BUSY = "quiet", "beside a spinner"


def filled_cache(runner: FusedRunner, tokens: np.ndarray, context: int) -> LookaheadCache:
    cache = runner.adapter.make_cache(context + len(tokens))
    time_pass(runner, cache, tokens[:1])
    skip(cache, context)
    for layer in cache.in_place:
        for states in (layer.keys, layer.values):
            states.normal_()
    return cache


def time_pass(runner: FusedRunner, cache: LookaheadCache, tokens: np.ndarray) -> float:
    """Return the milliseconds of a pass over a chain of tokens. The cache is unchanged afterwards."""
    step = lay_out(tokens[0], GuessTree.chain(tokens[1:], Origin.TEXT))
    start = time.perf_counter()
    runner.run([step], cache)
    taken = 1e3 * (time.perf_counter() - start)
    cache.commit([step], [[]])
    return taken


@click.command(help=__doc__.split("\n")[0])
@cli.model
@cli.dtype
@click.option("--rows", default="1,2,4,8,16,32,64", show_default=True)
@click.option("--contexts", default="256,2048,6000", show_default=True)
@click.option("--rounds", default=12, show_default=True, help="Rounds, each with a few passes of each kind.")
@torch.no_grad()
def main(model_name, dtype, rows, contexts, rounds) -> None:
    model, _ = load(model_name, dtype, "cpu")
    runner = fused_runner(model, find_adapter(model), packs=True)
    if not isinstance(runner, FusedRunner):
        sys.exit(f"passes are not fused: {runner}")
    some, lengths = ([int(one) for one in text.split(",")] for text in (rows, contexts))
    tokens = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, max(some))
    caches = {length: filled_cache(runner, tokens, length) for length in lengths}
    times = {(way, length, n): [] for way in (QUIET, BUSY) for length in lengths for n in some}
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for _ in range(rounds):
            for way, number in ((QUIET, signal.SIGSTOP), (BUSY, signal.SIGCONT)):
                spinner.send_signal(number)
                for length in lengths:
                    for n in some:
                        for _ in range(16 if n <= 8 else 3):
                            times[way, length, n].append(time_pass(runner, caches[length], tokens[:n]))
    finally:
        spinner.kill()
    print(f"{'ms a pass over':>32} {' '.join(f'{n:>7}' for n in some)} rows")
    for way, which in ((QUIET, min), (BUSY, statistics.median)):
        for length in lengths:
            found = " ".join(f"{which(times[way, length, n]):7.2f}" for n in some)
            print(f"{way:>16}, context {length:>6} {found}")


if __name__ == "__main__":
    main()
