"""Contention: whether this process got the processors that it wanted while something was timed.

A machine is quiet if the threads that compute lose no more than MOST_LOST of the time that is measured, and once more
as much in a span so short that this is less than a TICK, by which clocks and turns are coarse. Otherwise a ratio of two
rates says little: a thread that waits at a barrier for one without a processor makes plain decoding slower by any
factor. Two runs lose different amounts.

Linux says for each thread how long it was ready and had no processor, and how long the host ran other machines. There a
thread that waits actively for another one does not count. Neither does one that hardly runs, such as a timer: it waits
behind those that compute, and none waits for it. What no thread was ready for (the process was stopped, or its output
was blocked) is missing from the processor time of the process. Elsewhere, the processor time of the decoding thread
says it: on a CPU, that thread always computes, or waits actively. On an accelerator it may also sleep, and then nothing
is known.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

MOST_LOST = 0.1  # share of a span
TICK = 0.01  # seconds: the step of /proc/stat, and as long as a thread runs before another one's turn
HARDLY = 0.1  # a thread that has run for less, as a share of the busiest thread's time, does not compute
BUSY = "the machine is busy, so no ratio"
THREADS = "/proc/self/task"
STOLEN = 8  # the column of /proc/stat: ticks in which the host gave the processors to others


@dataclass(frozen=True)
class Span:
    """A span of time in which this process decoded."""

    seconds: float = 0.0
    lost: float | None = 0.0
    """Seconds for which its threads, all together, wanted a processor and had none. None: nothing says so here."""

    @property
    def most_lost(self) -> float:
        """Seconds that a quiet machine loses, at most."""
        share = MOST_LOST * self.seconds
        return share + min(TICK, share)

    def __add__(self, other: "Span") -> "Span":
        lost = None if self.lost is None or other.lost is None else self.lost + other.lost
        return Span(self.seconds + other.seconds, lost)


class _Thread(NamedTuple):
    ran: float
    """Seconds of processor time."""
    waited: float
    """Seconds for which it was ready and had no processor."""


class _Clocks(NamedTuple):
    wall: float
    process: float
    """Seconds of processor time, of all threads."""
    thread: float
    """The same, of this thread."""
    of_each: dict[str, _Thread] | None
    """None: this system does not say."""
    stolen: float


def watch(device: torch.device) -> Callable[[], Span]:
    """Begin a span; returns a function that returns the span until now. Call it in the thread that decodes.

    device: on which the model computes.
    """
    start, on_cpu = _read(), device.type == "cpu"
    return lambda: _between(start, _read(), on_cpu)


def why_no_ratio(*spans: Span) -> str:
    """Return why no ratio may be shown of what was measured in these spans; "" if the machine was quiet in all."""
    for span in spans:
        if span.lost is None:
            return "whether the machine is busy is not known here, so no ratio"
        if span.lost > span.most_lost:
            return f"{BUSY}: in {span.seconds:.2f} s, threads waited {span.lost:.2f} s for a processor"
    return ""


def _between(start: _Clocks, stop: _Clocks, on_cpu: bool) -> Span:
    wall = stop.wall - start.wall
    if start.of_each is None or stop.of_each is None:
        return Span(wall, max(wall - (stop.thread - start.thread), 0.0) if on_cpu else None)
    found = [
        _Thread(max(now.ran - before.ran, 0.0), max(now.waited - before.waited, 0.0))
        for name, now in stop.of_each.items()
        for before in [start.of_each.get(name, _Thread(0.0, 0.0))]
    ]
    least = HARDLY * max((thread.ran for thread in found), default=0.0)
    lost = sum(thread.waited for thread in found if thread.ran >= least) + stop.stolen - start.stolen
    if on_cpu:
        lost += max(wall - (stop.process - start.process), 0.0)
    return Span(wall, lost)


def _read() -> _Clocks:
    return _Clocks(time.perf_counter(), time.process_time(), time.thread_time(), _threads(), _stolen())


def _threads() -> dict[str, _Thread] | None:
    """See `_Clocks.of_each`. Where the kernel does not count, there is no such file, or it holds zeros."""
    found = {}
    for name in os.listdir(THREADS) if os.path.isdir(THREADS) else ():
        with suppress(OSError), open(f"{THREADS}/{name}/schedstat", "rb") as file:  # a thread may end meanwhile
            ran, waited, _ = map(int, file.read().split())
            found[name] = _Thread(ran / 1e9, waited / 1e9)
    return found if any(thread.ran for thread in found.values()) else None


def _stolen() -> float:
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[STOLEN]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
