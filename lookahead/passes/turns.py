"""Passes of one model run one after the other, whatever the threads that they run in."""

import os
import threading
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

_turns: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


def turn(model: PreTrainedModel) -> threading.RLock:
    """What a thread holds while it runs a pass of this model. Two passes at once would take each other's cores."""
    return _turns.get(model) or _turns.setdefault(model, threading.RLock())


def _after_fork() -> None:
    """Free all locks: a child has none of the threads that held them."""
    for lock in list(_turns.values()):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as Python does it for its own locks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
