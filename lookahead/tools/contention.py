"""Contention: whether this process got the processors that it wanted while something was timed.

The lost time is the time in which computing threads wanted a processor and had none. A machine is quiet if the lost
time is at most MOST_LOST of the span, plus the same again or a TICK, whichever is less: clocks and time slices are no
finer than a TICK. Otherwise a ratio of two rates says little. If one thread has no processor, all others wait for it at
the next barrier, so a run may be slower by any factor, and two runs by different factors.

Linux reports for each thread how long it was ready and had no processor, and how long the host ran other machines. A
thread that waits actively for another one has a processor. A thread that hardly runs, such as a timer, does not count:
no other thread waits for it. If the process was stopped, or its output was blocked, no thread was ready. That time is
missing from the processor time of the process.

Other systems report only the processor time of the decoding thread. On a CPU, this thread always computes or waits
actively, so the rest of the span is lost. With an accelerator it may also sleep, so the lost time is unknown.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

MOST_LOST = 0.1  # share of a span
TICK = 0.01  # seconds: the resolution of /proc/stat, and about a time slice
HARDLY = 0.1  # share of the busiest thread's processor time; a thread that ran for less does not count
BUSY = "the machine is busy, so no ratio"
THREADS = "/proc/self/task"
STOLEN = 8  # the column of /proc/stat: ticks in which the host gave the processors to others


@dataclass(frozen=True)
class Span:
    """A span of time in which this process decoded."""

    seconds: float = 0.0
    lost: float | None = 0.0
    """Seconds in which its threads wanted a processor and had none, added up. None: unknown on this system."""

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
    """Seconds of processor time of all threads."""
    thread: float
    """Seconds of processor time of this thread."""
    of_each: dict[str, _Thread] | None
    """None: unknown on this system."""
    stolen: float


def watch(device: torch.device) -> Callable[[], Span]:
    """Begin a span, and return a function that returns the span until now. Call both in the thread that decodes.

    device: the model's.
    """
    start, on_cpu = _read(), device.type == "cpu"
    return lambda: _between(start, _read(), on_cpu)


def why_no_ratio(*spans: Span) -> str:
    """Return why rates measured in these spans must not be compared; "" if the machine was quiet in all of them."""
    for span in spans:
        if span.lost is None:
            return "this system does not tell whether it is busy, so no ratio"
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
    """Return `_Clocks.of_each`. If the kernel does not count these times, there is no such file, or it holds zeros."""
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
