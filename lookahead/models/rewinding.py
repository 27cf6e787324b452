"""Caches that go back to an earlier length: after a call that failed, or for passes whose rows are not kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lookahead.compat import caches_nothing
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache, SeparateCaches, caches_in


def can_rewind(cache: AnyCache) -> bool:
    """Whether every layer holds all positions, so not if there are sliding layers or states."""
    layers = [layer for one in caches_in(cache) for layer in one.layers]
    return all(type(layer) is InPlaceLayer or caches_nothing(layer) for layer in layers)


def rewind(cache: LookaheadCache, length: int) -> None:
    """Crop the full layers of one sequence to ``length`` positions, even after half a pass or half a commit.

    Sliding layers and states cannot be cropped. They do not change, so they must be copies.
    """
    for layer in cache.in_place:
        if type(layer) is InPlaceLayer:
            layer.columns, layer.gaps = length - int(layer.starts[0]), np.zeros(1, np.int64)
            layer.computed = 0


def drop_step(cache: LookaheadCache) -> None:
    """Drop the rows of a step whose pass failed, of one sequence, so that it can run again.

    A state that the pass has changed stays changed.
    """
    for layer in cache.in_place:
        if layer.is_initialized:
            layer.columns, layer.computed = cache.lengths[0] - int(layer.starts[0]), 0


@contextmanager
def part_of(cache: AnyCache, layers: Sequence[int]) -> Iterator[AnyCache]:
    """Lend these layers, by index, as the cache of a model that has no others.

    Rows that its passes append are dropped at the end of the block, even after half a pass. Every layer must hold
    all positions (`can_rewind`), and the block must commit nothing.
    """
    parts = [LookaheadCache([one.layers[index] for index in layers], list(one.lengths)) for one in caches_in(cache)]
    lent: list[Any] = [layer for part in parts for layer in part.layers]
    columns = [layer.columns for layer in lent]
    try:
        yield SeparateCaches(parts) if isinstance(cache, SeparateCaches) else parts[0]
    finally:
        for layer, count in zip(lent, columns, strict=True):
            layer.columns, layer.computed = count, 0
