"""Measures what passes cost: `costs.StepCosts` of a model that no file has."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import torch

from lookahead.models.adapter import context_length, device_of, vocabulary_of
from lookahead.models.cache import InPlaceLayer, LookaheadCache
from lookahead.passes import costs
from lookahead.passes.costs import LONG_CONTEXT, RUNGS, StepCosts, ascending
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree, Origin
from ngram_pool.waiting import kept_for_later

_RUNGS = np.array(RUNGS, float)
ROWS_AT_LENGTH = (1, 16)  # numbers of rows that are measured again with a long cache
# `seconds` and `per_position` if nothing can be measured. The unit is one pass over one row.
ASSUMED_COSTS = 1 + _RUNGS / 32, np.array([1e-4, 1e-5])


def measured(runner: EagerRunner, anew: float | None, path: Path) -> StepCosts:
    """Return the costs of the runner's passes, to be kept at ``path``; or assumed ones. As for `costs.step_costs`."""
    try:
        with progress_bar("measuring step costs") as progress, kept_for_later():
            found = measure(runner, anew or costs.SECONDS, progress)
        found.path = path
        return found
    except Exception as error:  # a model may raise anything at lengths that the caller did not ask for
        if anew:
            raise
        warnings.warn(f"step costs could not be measured, so budgets use assumed ones: {error!r}", stacklevel=2)
        return _assumed(runner)


def measure(
    runner: EagerRunner, seconds: float = costs.SECONDS, progress: Callable[[float], None] = lambda done: None
) -> StepCosts:
    """Measure the costs for about ``seconds``. progress is called with the share of that time that has passed.

    No pass goes beyond the model's positions. Raises ValueError if there are too few of them.
    """
    context = context_length(runner.model)
    long = min(LONG_CONTEXT, context - ROWS_AT_LENGTH[-1])
    if long <= 0:
        raise ValueError(f"the model has {context} positions; measuring needs more than {ROWS_AT_LENGTH[-1]}")
    plan = [(rows, 0) for rows in RUNGS if rows <= context] + [(rows, long) for rows in ROWS_AT_LENGTH]
    times = time_passes(runner, plan, seconds, progress)
    known = [rows for rows in RUNGS if (rows, 0) in times]
    base = np.array([times[rows, 0] for rows in known])
    slope = max((base[-1] - base[-2]) / (known[-1] - known[-2]), 0.0)
    base = np.interp(_RUNGS, known, base) + slope * np.maximum(_RUNGS - known[-1], 0)
    base = ascending(base)
    first, second = (max(times[rows, long] - times[rows, 0], 0.0) / long for rows in ROWS_AT_LENGTH)
    further = max(second - first, 0.0) / (ROWS_AT_LENGTH[1] - ROWS_AT_LENGTH[0])
    return StepCosts(base, np.array([first, further]))


def time_passes(
    runner: EagerRunner,
    plan: list[tuple[int, int]],
    seconds: float,
    progress: Callable[[float], None] = lambda done: None,
) -> dict[tuple[int, int], float]:
    """Return the seconds of a pass for each (rows, committed positions) of a plan. The tokens are random.

    Passes are timed in turn. The shortest time of each counts, because other work of the machine only adds to it.
    Passes over more than ROWS_AT_LENGTH[-1] rows take long, so they are timed three times at most, and left out if
    ``seconds`` are too few for two rounds.
    """
    plan = list(plan)
    max_rows = max(rows for rows, _ in plan)
    tokens = np.random.default_rng(0).integers(0, vocabulary_of(runner.model), max_rows + 1)
    caches = {length: runner.adapter.make_cache(length + max_rows) for _, length in plan}
    best = dict.fromkeys(plan, np.inf)
    with torch.no_grad():
        for length, cache in caches.items():
            if runner.adapter.has_state:  # without one, layers compute a prompt, which takes another time
                runner.prefill(torch.from_numpy(tokens[None, :1]), cache)
            else:
                _pass(runner, cache, tokens[:2])
            skip(cache, length)
        start, rounds, left = time.perf_counter(), 0, True
        while left:
            began = time.perf_counter()
            for rows, length in list(plan):
                if rows > ROWS_AT_LENGTH[-1]:
                    if rounds >= 4:  # the first does not count
                        continue
                    if began + seconds < time.perf_counter():
                        plan.remove((rows, length))
                        continue
                elapsed = _pass(runner, caches[length], tokens[:rows])
                best[rows, length] = min(best[rows, length], elapsed if rounds else np.inf)
                progress(min((time.perf_counter() - start) / seconds, 1.0))
            rounds += 1  # the first round warms up
            left = rounds < 2 or 2 * time.perf_counter() - began < start + seconds
    return {key: best[key] for key in plan}


def _pass(runner: EagerRunner, cache: LookaheadCache, tokens: np.ndarray) -> float:
    """Return the seconds of one pass. The cache is left as it was, but for states that a single row has moved on."""
    step = lay_out(tokens[0], GuessTree.chain(tokens[1:], Origin.TEXT))
    start = time.perf_counter()
    runner.run([step], cache)
    synchronize(device_of(runner.model))
    elapsed = time.perf_counter() - start
    cache.commit([step], [[]])
    return elapsed


def skip(cache: LookaheadCache, count: int) -> None:
    """Let a cache pretend to hold ``count`` more positions, with zeros in the full layers: attention costs as much."""
    for layer in cache.in_place:
        if type(layer) is InPlaceLayer and layer.is_initialized:
            layer.update(*(x.new_zeros((*x.shape[:2], count, x.shape[3])) for x in layer.buffers))
    cache.lengths = [length + count for length in cache.lengths]


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _assumed(runner: EagerRunner) -> StepCosts:
    """Return costs in the usual proportions (ASSUMED_COSTS). The time of one pass, if it succeeds, gives the scale."""
    try:
        elapsed = time_passes(runner, [(1, 0)], costs.SECONDS / 100)[1, 0]
    except Exception:
        elapsed = 10e-3
    seconds, per_position = ASSUMED_COSTS
    return StepCosts(elapsed * seconds / seconds[0], elapsed * per_position)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal. Yields a function that is called with the share of the work that is done."""
    with click.progressbar(length=100, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda share: bar.update(int(100 * share) - bar.pos)
