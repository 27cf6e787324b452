"""Messages for a user who waits at a terminal."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds of silence before the message


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
