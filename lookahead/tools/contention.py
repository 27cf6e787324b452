"""Contention: whether this process got the processors that it wanted while something was timed.

A machine is quiet if the threads of this process lose less than MOST_LOST of the time that is measured. Otherwise a
ratio of two rates says little: a thread that waits at a barrier for one without a processor makes plain decoding slower
by any factor. Two runs lose different amounts.

Linux says for each thread how long it was ready and had no processor, and how long the host ran other machines. There a
thread that waits actively for another one does not count. What no thread was ready for (the process was stopped, or its
output was blocked) is missing from the processor time of the process. Elsewhere, the processor time of the decoding
thread says it: on a CPU, that thread always computes, or waits actively. On an accelerator it may also sleep, and then
nothing is known.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

MOST_LOST = 0.1  # share of a span
BUSY = "the machine is busy, so no ratio"
THREADS = "/proc/self/task"
STOLEN = 8  # the column of /proc/stat: ticks in which the host gave the processors to others


@dataclass(frozen=True)
class Span:
    """A span of time in which this process decoded."""

    seconds: float = 0.0
    lost: float | None = 0.0
    """Seconds for which its threads, all together, wanted a processor and had none. None: nothing says so here."""

    def __add__(self, other: "Span") -> "Span":
        lost = None if self.lost is None or other.lost is None else self.lost + other.lost
        return Span(self.seconds + other.seconds, lost)


class _Clocks(NamedTuple):
    wall: float
    process: float
    """Seconds of processor time, of all threads."""
    thread: float
    """The same, of this thread."""
    waiting: dict[str, float] | None
    """For each thread, the seconds for which it was ready and had no processor. None: this system does not say."""
    stolen: float


def watch(device: torch.device) -> Callable[[], Span]:
    """Begin a span; returns a function that returns the span until now. Call it in the thread that decodes.

    device: on which the model computes.
    """
    begin, on_cpu = _read(), device.type == "cpu"
    return lambda: _between(begin, _read(), on_cpu)


def why_no_ratio(*spans: Span) -> str:
    """Return why no ratio may be shown of what was measured in these spans; "" if the machine was quiet in all."""
    for span in spans:
        if span.lost is None:
            return "whether the machine is busy is not known here, so no ratio"
        if span.lost > MOST_LOST * span.seconds:
            return f"{BUSY}: in {span.seconds:.2f} s, threads waited {span.lost:.2f} s for a processor"
    return ""


def _between(begin: _Clocks, end: _Clocks, on_cpu: bool) -> Span:
    wall = end.wall - begin.wall
    if begin.waiting is None or end.waiting is None:
        return Span(wall, max(wall - (end.thread - begin.thread), 0.0) if on_cpu else None)
    lost = sum(max(seconds - begin.waiting.get(name, 0.0), 0.0) for name, seconds in end.waiting.items())
    lost += end.stolen - begin.stolen
    if on_cpu:
        lost += max(wall - (end.process - begin.process), 0.0)
    return Span(wall, lost)


def _read() -> _Clocks:
    return _Clocks(time.perf_counter(), time.process_time(), time.thread_time(), _waiting(), _stolen())


def _waiting() -> dict[str, float] | None:
    """See `_Clocks.waiting`. Where the kernel does not count, there is no such file, or it holds zeros."""
    waiting, ran = {}, 0
    for name in os.listdir(THREADS) if os.path.isdir(THREADS) else ():
        with suppress(OSError), open(f"{THREADS}/{name}/schedstat", "rb") as file:  # a thread may end meanwhile
            on_processor, ready, _ = map(int, file.read().split())
            waiting[name] = ready / 1e9
            ran += on_processor
    return waiting if ran else None


def _stolen() -> float:
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[STOLEN]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
