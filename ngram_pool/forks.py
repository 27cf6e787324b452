"""Locks that work in forked processes.

A child has only the thread that forked. A lock that another thread held would never be released there, and its data
might be half written. So a fork first takes all locks, and the child gets new ones. For a `Turn`, it does not wait.
"""

import os
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakSet

_forking = threading.RLock()  # held while a process forks or a lock is made
_locks: WeakSet["Lock"] = WeakSet()
_turns: WeakSet["Turn"] = WeakSet()
_held: list["Lock"] = []  # the locks that the current fork has taken


class Lock(type(threading.RLock())):  # type: ignore[misc]  # a class in C, so taking the lock runs no Python
    """A lock for objects that are copied and pickled: each copy gets a lock of its own.

    A thread that holds one must not wait for another: two forks could then block each other.
    """

    def __init__(self) -> None:
        with _forking:
            _locks.add(self)

    def __reduce__(self) -> tuple:
        return Lock, ()


class Turn(type(threading.RLock())):  # type: ignore[misc]
    """A lock for work that takes long. A fork does not wait for it, so what it guards may be half done in the child."""

    def __init__(self) -> None:
        _turns.add(self)  # without waiting for a fork: the thread that makes one is not in the child


def _before() -> None:
    _forking.acquire()
    _held.extend(_locks)
    for lock in _held:
        lock.acquire()


def _after_in_parent() -> None:
    for lock in _held:
        with suppress(RuntimeError):  # it is not held, because an interrupt came before it was taken
            lock.release()
    _held.clear()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    turns: list[Any] = [turn for turn in _turns if not turn._is_owned()]  # type: ignore[attr-defined]
    for lock in [*_held, *turns]:
        lock._at_fork_reinit()  # as Python does it for its own locks
    _held.clear()
    _forking = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
