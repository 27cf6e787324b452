"""Locks that are free in a forked child, and guard there what is whole.

A child begins with the one thread that forked. A lock that another thread held would never be released in it, and what
it guards might be half written. So a fork waits until it has all locks, and the child gets new ones.
"""

import os
import threading
from contextlib import suppress
from weakref import WeakSet

_forking = threading.RLock()  # held while a process forks, and for each new owner
_owners: WeakSet = WeakSet()
_held: list = []  # owners whose locks the fork under way has taken


def give_lock(owner) -> None:
    """Set ``owner._lock``. No thread that holds it may wait for another owner's, or two forks could lock each other."""
    with _forking:
        owner._lock = threading.RLock()
        _owners.add(owner)


def _before() -> None:
    _forking.acquire()
    _held.extend(_owners)
    for owner in _held:
        owner._lock.acquire()


def _after_in_parent() -> None:
    for owner in _held:
        with suppress(RuntimeError):  # an interrupt came before it was taken
            owner._lock.release()
    _held.clear()
    _forking.release()


def _after_in_child() -> None:
    global _forking
    for owner in _held:
        owner._lock = threading.RLock()
    _held.clear()
    _forking = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
