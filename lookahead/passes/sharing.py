"""Calls of generate() that run at the same time, in several threads, share their passes.

A pass takes as long as its weights take to be read, or little longer, for one text or for several. So a call waits, for
a part of a pass at most, until the others have laid out their steps, too. Then one of them runs all steps at once, and
each goes on with its own rows. Bits do not depend on the company (docs/numerics.md). Prompts are read between passes.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Protocol
from weakref import WeakSet

from lookahead.models.cache import LookaheadCache, SeparateCaches
from lookahead.passes.runner import Company, Likeliest, Output
from lookahead.step import Step

PATIENCE, LEAST = 0.5, 1e-3  # how long a call waits for others: a part of a pass, and seconds beside it


_all: WeakSet["SharedPasses"] = WeakSet()


class Runner(Protocol):
    """What runs the passes of a call."""

    number: int
    """Larger than that of all calls that have begun before."""
    wants: object
    """What calls that share a pass must want alike."""

    def run_now(self, steps: list[Step], cache: SeparateCaches, last: list[int], likeliest: Likeliest) -> Output:
        """Run a pass, without company."""
        ...


@dataclass(eq=False)
class Wanted:
    """Steps of a call that are to be run, and what has become of them. Fields as for `EagerRunner.run`."""

    runner: Runner
    steps: list[Step]
    caches: list[LookaheadCache]
    last: list[int]
    likeliest: tuple[int, float]
    output: Output | None = None
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.output is not None or self.error is not None


class SharedPasses:
    """Where the calls of one wrapped model meet. At any time, one of them runs a pass, for itself or for all."""

    def __init__(self) -> None:
        _all.add(self)
        self.reset()

    def reset(self) -> None:
        """Begin without calls, as in a forked process, which has none of the threads that they ran in."""
        self._changed = threading.Condition()
        self.threads: dict[int, int] = {}
        """Calls that decode, by the thread that they run in."""
        self.is_busy = False
        """Whether a pass runs that others have to wait for."""
        self._waiting: list[Wanted] = []
        self._has_read = False  # the last pass has read a prompt
        self._free_since = self._took = 0.0  # seconds
        self._numbers = count()

    def __reduce__(self) -> tuple:
        return SharedPasses, ()  # a copy of a model decodes by itself

    def enter(self) -> int:
        """Take part from now on, until `leave`. Returns a number that grows from call to call."""
        with self._changed:
            thread = threading.get_ident()
            self.threads[thread] = self.threads.get(thread, 0) + 1
            return next(self._numbers)

    def leave(self) -> None:
        """Take part no more."""
        with self._changed:
            thread = threading.get_ident()
            self.threads[thread] -= 1
            if not self.threads[thread]:
                del self.threads[thread]
            self._changed.notify_all()

    @contextmanager
    def turn(self, reads: bool = False) -> Iterator[None]:
        """Have the block run while no pass does. reads: a prompt, after which steps that wait go first."""
        with self._changed:
            while self.is_busy or (reads and self._has_read and self._waiting):
                self._changed.wait()
            self.is_busy = True
        try:
            yield
        finally:
            self._free(reads)

    def run(self, wanted: Wanted) -> Output:
        """Run these steps, with those of other calls that come in time."""
        with self._changed:
            self._waiting.append(wanted)
            self._changed.notify_all()
            try:
                self._wait(wanted)
            except BaseException:  # an interrupt
                self._waiting = [one for one in self._waiting if one is not wanted]
                raise
            if not wanted.is_done:
                together = [one for one in self._waiting if _fit(one, wanted)]
                self._waiting = [one for one in self._waiting if one not in together]
                self.is_busy = True
        if not wanted.is_done:
            began = time.perf_counter()
            try:
                _run_together(together)
            except BaseException as error:
                for one in together:
                    one.error = error
                raise
            finally:
                self._took = time.perf_counter() - began
                self._free()
        if wanted.error is not None:
            raise RuntimeError("a pass that this call has shared with others failed") from wanted.error
        assert wanted.output is not None
        return wanted.output

    def _wait(self, wanted: Wanted) -> None:
        """Wait until somebody has run these steps, or until it is time to do so."""
        since = time.perf_counter()
        while not wanted.is_done:
            if self.is_busy:
                self._changed.wait()
                continue
            left = max(since, self._free_since) + PATIENCE * self._took + LEAST - time.perf_counter()
            if left <= 0 or len(self._waiting) >= len(self.threads):
                return
            self._changed.wait(left)

    def _free(self, has_read: bool = False) -> None:
        with self._changed:
            self.is_busy, self._has_read, self._free_since = False, has_read, time.perf_counter()
            self._changed.notify_all()


def _after_fork() -> None:
    for passes in list(_all):
        passes.reset()


os.register_at_fork(after_in_child=_after_fork)


def _fit(one: Wanted, other: Wanted) -> bool:
    """Whether two calls can share a pass."""
    return one.runner.wants == other.runner.wants and one.likeliest[0] == other.likeliest[0]


def _run_together(together: list[Wanted]) -> None:
    """Run the steps of several calls in one pass.

    The call that has begun last runs it: what it has read of the model is no older than the others'.
    """
    newest = max(together, key=lambda one: one.runner.number)
    steps = [step for one in together for step in one.steps]
    caches = SeparateCaches([cache for one in together for cache in one.caches])
    temperatures = [one.likeliest[1] for one in together for _ in one.steps]
    began = time.perf_counter()
    last = [position for one in together for position in one.last]
    whole = newest.runner.run_now(steps, caches, last, (newest.likeliest[0], temperatures))
    company = Company(len(whole.logits), len(steps), time.perf_counter() - began) if len(together) > 1 else None
    ends = [*whole.first[1:], len(whole.logits)]
    for one, end in zip(together, accumulate(len(one.steps) for one in together), strict=True):
        one.output = _part(whole, whole.first[end - len(one.steps) : end], ends[end - 1], company)


def _part(whole: Output, first: Sequence[int], end: int, company: Company | None) -> Output:
    """Return the rows of one call, of which ``first`` are those of its roots, and what it can know of them."""
    rows = slice(first[0], end)
    likeliest = None if whole.likeliest is None else (whole.likeliest[0][rows], whole.likeliest[1][rows])
    return Output(
        whole.logits[rows],
        {i: states[rows] for i, states in whole.hidden_states.items()},
        [row - first[0] for row in first],
        None if whole.has_nan else whole.has_nan,
        likeliest,
        None if whole.argmax is None else whole.argmax[rows],
        company,
    )
