"""What a step costs: c(T, L), the seconds of a pass over T rows when L positions are committed.

Costs are measured once for each model, machine, dtype, number of threads and way of computing. They are kept in the
user's cache directory. Every decoded step corrects them a little.
"""

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import click
import numpy as np
import platformdirs
import torch
import xxhash
from transformers import PreTrainedModel

from lookahead.compat import attention_implementation, settings_of
from lookahead.cpu import native, products
from lookahead.models.adapter import context_length, device_of, vocabulary_of
from lookahead.models.cache import LookaheadCache
from lookahead.passes.environment import environment
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree, Origin
from ngram_pool.forks import Lock
from ngram_pool.waiting import kept_for_later

logger = logging.getLogger(__name__)

RUNGS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of rows that are measured
_RUNGS = np.array(RUNGS, float)
ROWS_AT_LENGTH = (1, 16)  # numbers of rows that are measured again with a long cache
LONG_CONTEXT = 1024  # positions in the long cache
# `seconds` and `per_position` if nothing can be measured. The unit is one pass over one row.
ASSUMED_COSTS = 1 + _RUNGS / 32, np.array([1e-4, 1e-5])
SECONDS = 1.5  # time for measuring; long passes take more
FOLLOW_RATES = 0.02, 0.01  # how far the time of a step moves the nearest rungs, and all of them
RENEWAL = 128  # a rung that was last timed n steps ago is moved by n / RENEWAL of the way, at least by the rate above
LONG_AGO = 0.5  # and at most so far
MANY_ROWS = 16  # scale of the rows when overheads are fitted
LEAST_OVERHEAD = 1e-6
FOLDER = Path(platformdirs.user_cache_dir("lookahead")) / "step-costs"
REWRITE_RATIO = 1.25  # the file is rewritten when the costs differ from it by this ratio


class Prices(NamedTuple):
    """`StepCosts` as plain numbers, for those who ask many times in each step."""

    passes: list[float]
    """Seconds of passes over 0, 1, 2, ... rows when nothing is committed."""
    per_position: float
    """Seconds that each committed position adds to the first row of a sequence."""
    per_position_and_row: float
    """Seconds that each committed position adds to each further row of it."""
    overhead: float
    overhead_per_row: float
    least_of_row: float
    """Seconds that a further row adds to a step where nothing is committed, and where it adds least."""


@dataclass
class StepCosts:
    """c(T, L) of one model on one machine."""

    seconds: np.ndarray
    """Seconds of passes over RUNGS rows when nothing is committed, float64 [rungs]."""
    per_position: np.ndarray
    """Seconds that each committed position adds to the first row of a sequence, and to each further row of it, float64
    [2]."""
    overhead: float = 1e-3
    """Seconds of a step of one row outside of its pass."""
    overhead_per_row: float = 3e-5
    """Seconds that each further row adds to them."""
    path: Path | None = None
    """The file that keeps the costs for other processes; None if they were not measured."""
    _kept: np.ndarray | None = None  # `_summary` of the costs in the file
    _ages: np.ndarray = field(default_factory=lambda: np.zeros(len(RUNGS)), repr=False, compare=False)
    # for each rung, the steps since one last had about as many rows
    prices: Prices | None = field(default=None, repr=False, compare=False)
    """What `priced` has made of all this; None after a change."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __call__(self, rows: np.ndarray | int, length: np.ndarray | int, sequences: int = 1) -> np.ndarray:
        """Return the seconds of passes over ``rows`` rows of all sequences, which hold ``length`` positions each."""
        base = self._without_positions(np.asarray(rows), self.seconds)
        return base + length * (sequences * self.per_position[0] + (rows - sequences) * self.per_position[1])

    def priced(self, most: int = RUNGS[-1]) -> Prices:
        """Return and keep all this as plain numbers, for passes over up to ``most`` rows at least."""
        passes = self._without_positions(np.arange(2 * max(most, RUNGS[-1])), self.seconds).tolist()
        least = min((passes[b] - passes[a]) / (b - a) for a, b in pairwise(RUNGS)) + self.overhead_per_row
        first, further = self.per_position.tolist()
        prices = self.prices = Prices(passes, first, further, self.overhead, self.overhead_per_row, least)
        return prices

    @staticmethod
    def _without_positions(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        base = np.interp(rows, _RUNGS, seconds)
        if rows.max(initial=0) > RUNGS[-1]:
            slope = (seconds[-1] - seconds[-3]) / (RUNGS[-1] - RUNGS[-3])
            base = base + slope * np.maximum(rows - RUNGS[-1], 0)
        return base

    def of_step(self, rows: np.ndarray | int, length: np.ndarray | int, sequences: int = 1) -> np.ndarray:
        """Return the seconds of whole steps: their passes, and what is done between them."""
        return self(rows, length, sequences) + self.between(rows)

    def between(self, rows: np.ndarray | int) -> np.ndarray | float:
        """Return the seconds of steps outside of their passes."""
        return self.overhead + self.overhead_per_row * (rows - 1)

    def follow(self, rows: int, length: int, seconds: float, overhead: float | None = None, sequences: int = 1) -> None:
        """Correct the costs by a step whose pass took ``seconds``, with ``overhead`` seconds outside of it, if known.

        The correction is divided between rows and positions in proportion to the seconds expected of each. The longer
        no step has had about so many rows, the further this one moves what they cost.
        """
        local, everywhere = FOLLOW_RATES
        alone = float(self._without_positions(np.array(rows), self.seconds))
        expected = float(self(rows, length, sequences))
        share = alone / expected
        ratio = min(max(seconds / expected, 1 / 3), 3.0)  # a larger error has another cause
        near = _nearness(rows)
        with self._lock:  # other threads may be reading the old arrays, so make new ones
            rates = np.clip(self._ages / RENEWAL, local, LONG_AGO)
            self._ages = np.where(near > 0, 0.0, self._ages + 1)
            self.seconds = _ascending(self.seconds * ratio ** (share * (everywhere + rates * near)))
            self.per_position = self.per_position * ratio ** ((1 - share) * (everywhere + rates[near.argmax()]))
            if overhead is not None:  # fit a line by normalised least mean squares (Nagumo & Noda 1967)
                expected, further = float(self.between(rows)), (rows - 1) / MANY_ROWS
                error = local * (min(overhead, 3 * expected) - expected) / (1 + further**2)
                self.overhead = max(self.overhead + error, LEAST_OVERHEAD)
                self.overhead_per_row = max(self.overhead_per_row + error * further / MANY_ROWS, 0.0)
            self.prices = None

    def save(self) -> None:
        """Replace the file if the costs have drifted from it. If that fails, the next process measures them again."""
        if self.path is None:
            return
        with self._lock:
            now = self._summary()
            if self._kept is not None and np.abs(np.log(now / self._kept)).max() < np.log(REWRITE_RATIO):
                return
            self._kept = now
        data = {"rungs": RUNGS, "seconds": self.seconds.tolist(), "per_position": self.per_position.tolist(),
                "overhead": self.overhead, "overhead_per_row": self.overhead_per_row}  # fmt: skip
        try:
            write_json(self.path, data)
        except OSError as error:
            logger.info("step costs are not kept: %s", error)

    def _summary(self) -> np.ndarray:
        return np.array([self(_RUNGS, length) for length in (0, LONG_CONTEXT)])


def measure(
    runner: EagerRunner, seconds: float = SECONDS, progress: Callable[[float], None] = lambda done: None
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
    base = _ascending(base)
    first, second = (max(times[rows, long] - times[rows, 0], 0.0) / long for rows in ROWS_AT_LENGTH)
    further = max(second - first, 0.0) / (ROWS_AT_LENGTH[1] - ROWS_AT_LENGTH[0])
    return StepCosts(base, np.array([first, further]))


@cache
def _nearness(rows: int) -> np.ndarray:
    """How near each rung is to a number of rows: 1 if they are equal, 0 if one is twice the other, or more."""
    return np.maximum(1 - np.abs(np.log2(_RUNGS / min(rows, RUNGS[-1]))), 0)


def _ascending(seconds: np.ndarray) -> np.ndarray:
    """Fewer rows cost no more. If it seems so, the machine was busy, and rows that are seldom used would keep that."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


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
            cache.skip(length)
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
                taken = _pass(runner, caches[length], tokens[:rows])
                best[rows, length] = min(best[rows, length], taken if rounds else np.inf)
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
    taken = time.perf_counter() - start
    cache.commit([step], [[]])
    return taken


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


_known: WeakKeyDictionary[PreTrainedModel, dict[tuple, StepCosts]] = WeakKeyDictionary()


def step_costs(runner: EagerRunner, anew: float | None = None) -> StepCosts:
    """Return the costs of the runner's passes, already known in this process, read from their file, or measured.

    If they cannot be measured, assumed costs are used, with a warning: costs only change how long a text takes. Costs
    of steps replayed as CUDA graphs are first measured without graphs, then corrected by the steps.

    anew: measure again, for this many seconds, and raise any error.
    """
    model, adapter = runner.model, runner.adapter
    now = (
        attention_implementation(model.config),
        adapter.splits_attention,
        adapter.branches_states,
        runner.name,
        runner.weight_bytes,
        adapter.uses_kernels,
        native.CAPABILITY,  # its user may forbid instructions that the processor has
        products.are_installed(model),
        model.dtype,
        device_of(model),
        torch.get_num_threads(),
    )
    known = _known.setdefault(model, {})
    if now not in known or anew:
        path = path_of(model, environment(model), *now)
        costs = None if anew else _load(path)
        if costs is None:
            try:
                with progress_bar("measuring step costs") as progress, kept_for_later():
                    costs = measure(runner, anew or SECONDS, progress)
                costs.path = path
            except Exception as error:  # a model may raise anything at lengths that the caller did not ask for
                if anew:
                    raise
                warnings.warn(f"step costs could not be measured, so budgets use assumed ones: {error!r}", stacklevel=2)
                costs = _assumed(runner)
        costs.save()
        known[now] = costs
    return known[now]


def _assumed(runner: EagerRunner) -> StepCosts:
    """Return costs in the usual proportions (ASSUMED_COSTS). The time of one pass, if it succeeds, gives the scale."""
    try:
        taken = time_passes(runner, [(1, 0)], SECONDS / 100)[1, 0]
    except Exception:
        taken = 10e-3
    seconds, per_position = ASSUMED_COSTS
    return StepCosts(taken * seconds / seconds[0], taken * per_position)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal. Yields a function that is called with the share of the work that is done."""
    with click.progressbar(length=100, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        yield lambda share: bar.update(int(100 * share) - bar.pos)


def path_of(model: PreTrainedModel, *depends_on: object) -> Path:
    """Name a file of measurements by the model and all else that they depend on."""
    text = json.dumps([type(model).__name__, settings_of(model.config), *depends_on], sort_keys=True, default=str)
    return FOLDER / f"{model.config.model_type}-{xxhash.xxh3_64_hexdigest(text.encode())}.json"


def write_json(path: Path, data: dict) -> None:
    """Write a file at once, so that no reader finds half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
        json.dump(data, file, indent=1)
    os.replace(file.name, path)


def _load(path: Path) -> StepCosts | None:
    """Read a file. None: there is none, or its content is not valid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        seconds, per_position = np.array(data["seconds"], float), np.array(data["per_position"], float)
        costs = StepCosts(seconds, per_position, float(data["overhead"]), float(data["overhead_per_row"]), path)
        numbers = np.array([*seconds, *per_position, costs.overhead, costs.overhead_per_row])
        has_shape = data["rungs"] == list(RUNGS) and (len(seconds), len(per_position)) == (len(RUNGS), 2)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (has_shape and np.isfinite(numbers).all() and numbers.min() >= 0 and min(*seconds, costs.overhead) > 0):
        return None
    costs._kept = costs._summary()
    return costs
