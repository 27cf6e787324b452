"""A word to whoever sits before a terminal and waits."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds that nobody wonders about


@contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """Write ``what`` is going on to stderr, if it is a terminal, and if it goes on for longer than PATIENCE."""
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
