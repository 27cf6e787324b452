"""What is kept of models, by the models themselves.

Some of what is kept refers to its model, for example through a user's hook. A dictionary with weak keys would hold it,
and so the model, for ever. So what is kept hangs on the model itself, and goes with it.
"""

from typing import Any, Generic, TypeVar
from weakref import ref

from torch import nn

from ngram_pool.forks import Lock

T = TypeVar("T")
ATTRIBUTE = "_kept_by_lookahead"
"""Of a model, the attribute with all that is kept of it. It is not copied or pickled."""

_lock = Lock()


class _Kept:
    """All that is kept of one model."""

    def __init__(self, model: nn.Module):
        self.model = ref(model)
        self.values: dict[OfModels, Any] = {}

    def __reduce__(self) -> tuple:
        return dict, ()  # copies and pickles have nothing, and who reads them needs none of our classes


class OfModels(Generic[T]):
    """One thing for each model, as long as the model lives."""

    def get(self, model: nn.Module) -> T | None:
        """What is kept of this model; None if nothing is."""
        kept = _kept_of(model)
        return kept.values.get(self) if kept else None

    def set(self, model: nn.Module, value: T) -> T:
        """Keep this value in the place of another, and return it."""
        _made(model).values[self] = value
        return value

    def setdefault(self, model: nn.Module, value: T) -> T:
        """Keep this value if nothing is kept, and return what is."""
        return _made(model).values.setdefault(self, value)

    def pop(self, model: nn.Module) -> None:
        """Keep nothing."""
        if kept := _kept_of(model):
            kept.values.pop(self, None)


def _kept_of(model: nn.Module) -> _Kept | None:
    found = vars(model).get(ATTRIBUTE)
    return found if type(found) is _Kept and found.model() is model else None  # not of a model that this is a copy of


def _made(model: nn.Module) -> _Kept:
    if (kept := _kept_of(model)) is None:
        with _lock:
            kept = _kept_of(model)
            if kept is None:
                kept = vars(model)[ATTRIBUTE] = _Kept(model)
    return kept
