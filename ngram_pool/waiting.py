"""Messages for a user who waits at a terminal."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds of silence before the message
_kept: list[float] = []  # seconds that this process spent on results that later processes reuse


@contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """Write ``what`` to stderr if the block runs for longer than PATIENCE and stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def kept_for_later() -> Iterator[None]:
    """Count the time of the block, unless it raises, as spent on results that later processes reuse."""
    began = time.perf_counter()
    yield
    _kept.append(time.perf_counter() - began)


def seconds_saved() -> float:
    """Return the seconds that a later process saves by reusing this one's results."""
    return sum(_kept)
