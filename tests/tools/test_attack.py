"""scripts/attack.py notices hangs, leaks and where an interrupt hit."""

import mmap
import os
import threading

import attack
import click
import pytest
from attack import in_thread, interrupted, watched

from lookahead import NgramPool


@pytest.mark.parametrize("by_signal", [True, False], ids=["SIGINT", "exception"])
def test_interrupted(by_signal):
    pool = NgramPool(1)

    def endless():
        while True:
            pool.learn([1, 2, 3] * 1000)

    assert interrupted(endless, 0.2, by_signal).startswith(("pool.", "table."))
    assert interrupted(lambda: None, 0.05, by_signal) is None, "a late interrupt hits nothing"


def test_in_thread(monkeypatch):
    assert in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0)
    monkeypatch.setattr(attack, "PATIENCE", 0.2)
    held = threading.RLock()
    with held, pytest.raises(AssertionError, match="hangs"):
        in_thread(held.acquire)


def test_watched():
    left, over = [], threading.Event()

    def memory() -> mmap.mmap:
        """New pages, because an allocator may hold enough from other tests."""
        pages = mmap.mmap(-1, 2**22)
        pages.write(bytes(2**22))
        return pages

    def thread() -> None:
        threading.Thread(target=over.wait, daemon=True).start()

    watched("nothing", 10, lambda: None)
    for leak in (lambda: os.open("/dev/null", os.O_RDONLY), memory, thread):
        with pytest.raises(click.ClickException, match="leak memory"):
            watched("leaks", 10, lambda leak=leak: left.append(leak()))
    over.set()
