"""What a step costs: c(T, L), the seconds of a pass over T rows when L positions are committed.

Costs are measured once for each model, machine, dtype, number of threads and way of computing. They are stored in the
user's cache directory. Every decoded step corrects them a little.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead.compat import attention_implementation
from lookahead.cpu import native
from lookahead.models.adapter import device_of
from lookahead.models.kept import OfModels
from lookahead.passes import stored
from lookahead.passes.environment import environment
from lookahead.passes.runner import EagerRunner
from ngram_pool.forks import Lock

RUNGS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of rows that are measured
_RUNGS = np.array(RUNGS, float)
LONG_CONTEXT = 1024  # positions in the long cache
SECONDS = 1.5  # time for measuring; long passes take more
FOLLOW_RATES = 0.02, 0.01  # how far the time of a step moves the nearest rungs, and all rungs
RENEWAL = 128  # a rung that was last timed n steps ago moves by n / RENEWAL, at least by the rate above
LONG_AGO = 0.5  # and at most by this
MANY_ROWS = 16  # scale of the rows when overheads are fitted
LEAST_OVERHEAD = 1e-6
REWRITE_RATIO = 1.25  # the file is rewritten when the costs differ from it by this ratio


class Prices(NamedTuple):
    """`StepCosts` as plain numbers, for callers that need them many times in each step."""

    passes: list[float]
    """Seconds of passes over 0, 1, 2, ... rows when nothing is committed."""
    per_position: float
    """Seconds that each committed position adds to the first row of a sequence."""
    per_position_and_row: float
    """Seconds that each committed position adds to each other row of it."""
    overhead: float
    overhead_per_row: float
    least_of_row: float
    """The least seconds that one more row adds to a step when nothing is committed."""


@dataclass
class StepCosts:
    """c(T, L) of one model on one machine."""

    seconds: np.ndarray
    """Seconds of passes over RUNGS rows when nothing is committed, float64 [rungs]."""
    per_position: np.ndarray
    """Seconds that each committed position adds to the first row of a sequence, and to each other row, float64
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
    """The result of `priced`; None after a change."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __call__(self, rows: np.ndarray | int, length: np.ndarray | int, sequences: int = 1) -> np.ndarray:
        """Return the seconds of passes over ``rows`` rows of all sequences, which hold ``length`` positions each."""
        base = self._without_positions(np.asarray(rows), self.seconds)
        return base + length * (sequences * self.per_position[0] + (rows - sequences) * self.per_position[1])

    def priced(self, most: int = RUNGS[-1]) -> Prices:
        """Return and store the costs as plain numbers, for passes over up to ``most`` rows at least."""
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

    def between(self, rows: np.ndarray | int) -> np.ndarray | float:
        """Return the seconds of steps outside of their passes."""
        return self.overhead + self.overhead_per_row * (rows - 1)

    def follow(self, rows: int, length: int, seconds: float, overhead: float | None = None, sequences: int = 1) -> None:
        """Correct the costs by a step whose pass took ``seconds``, with ``overhead`` seconds outside of it, if known.

        The correction is divided between rows and positions in proportion to their expected seconds. The longer no step
        has had about this many rows, the larger is the correction.
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
            self.seconds = ascending(self.seconds * ratio ** (share * (everywhere + rates * near)))
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
        stored.keep(self.path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """What is kept for later processes."""
        return {
            "rungs": RUNGS, "seconds": self.seconds.tolist(), "per_position": self.per_position.tolist(),
            "overhead": self.overhead, "overhead_per_row": self.overhead_per_row,
        }  # fmt: skip

    def _summary(self) -> np.ndarray:
        return np.array([self(_RUNGS, length) for length in (0, LONG_CONTEXT)])


@cache
def _nearness(rows: int) -> np.ndarray:
    """How near each rung is to a number of rows: 1 if they are equal, 0 if one is twice the other, or more."""
    return np.maximum(1 - np.abs(np.log2(_RUNGS / min(rows, RUNGS[-1]))), 0)


def ascending(seconds: np.ndarray) -> np.ndarray:
    """Costs that never fall with more rows.

    On a busy machine, fewer rows may seem to cost more. The lower cost is then taken, because numbers of rows that are
    rarely used are rarely corrected.
    """
    return np.minimum.accumulate(seconds[::-1])[::-1]


_known = OfModels[dict[tuple, StepCosts]]()


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
        model.dtype,
        device_of(model),
        torch.get_num_threads(),
    )
    known = _known.setdefault(model, {})
    if now not in known or anew:
        path = stored.path_of("step-costs", model, environment(model), *now)
        costs = None if anew else _load(path)
        if costs is None:
            from lookahead.passes.measuring import measured  # not needed if a file has the costs

            costs = measured(runner, anew, path)
        costs.save()
        known[now] = costs
    return known[now]


def _load(path: Path) -> StepCosts | None:
    """Read a file. None: there is none, or its content is not valid."""
    data = stored.read(path)
    if data is None:
        return None
    try:
        seconds, per_position = np.array(data["seconds"], float), np.array(data["per_position"], float)
        costs = StepCosts(seconds, per_position, float(data["overhead"]), float(data["overhead_per_row"]), path)
        numbers = np.array([*seconds, *per_position, costs.overhead, costs.overhead_per_row])
        has_shape = data["rungs"] == list(RUNGS) and (len(seconds), len(per_position)) == (len(RUNGS), 2)
    except (ValueError, KeyError, TypeError):
        return None
    if not (has_shape and np.isfinite(numbers).all() and numbers.min() >= 0 and min(*seconds, costs.overhead) > 0):
        return None
    costs._kept = costs._summary()
    return costs
