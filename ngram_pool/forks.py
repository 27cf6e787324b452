"""Locks that are free in a forked child, and guard there what is whole.

A child begins with the one thread that forked. A lock that another thread held would never be released in it, and what
it guards might be half written. So a fork waits until it has all locks, and the child gets new ones.
"""

import os
import threading
from contextlib import suppress
from weakref import WeakSet

_forking = threading.RLock()  # held while a process forks, and for each new lock
_locks: WeakSet["Lock"] = WeakSet()
_held: list["Lock"] = []  # which the fork under way has taken


class Lock:
    """A lock for anything that is copied and pickled: a copy has one of its own.

    No thread that holds one may wait for another, or two forks could lock each other.
    """

    def __init__(self) -> None:
        with _forking:
            self._lock = threading.RLock()
            _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple:
        return Lock, ()


def _before() -> None:
    _forking.acquire()
    _held.extend(_locks)
    for lock in _held:
        lock._lock.acquire()


def _after_in_parent() -> None:
    for lock in _held:
        with suppress(RuntimeError):  # an interrupt came before it was taken
            lock._lock.release()
    _held.clear()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    for lock in _held:
        lock._lock = threading.RLock()
    _held.clear()
    _forking = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
