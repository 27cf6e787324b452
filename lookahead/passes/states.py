"""The states of a cache in passes that are one call: where they lie, and what a pass does to them."""

from typing import Any

import torch

from lookahead.cpu import pages
from lookahead.cpu.executor import Executor, places_of
from lookahead.cpu.products import is_plain_of, pointer
from lookahead.cpu.states import Places, StateShape
from lookahead.models.cache import LookaheadCache


def initialize(executor: Executor, cache: LookaheadCache) -> None:
    """Begin the states of an empty cache: all numbers are zero."""
    with torch.inference_mode(False):  # as for keys
        for index, shape in executor.states.items():
            layer: Any = cache.layers[index]
            state = executor.like.new_zeros(1, *shape.of_state, dtype=torch.float32) if shape.heads else None
            layer.initialize(executor.like.new_zeros(1, shape.channels, shape.columns + 1), state)


def can_use(executor: Executor, cache: LookaheadCache) -> bool:
    """Whether C++ can read and write all states of a cache."""
    return all(_can_use(executor, shape, cache.layers[index]) for index, shape in executor.states.items())


def find(executor: Executor, cache: LookaheadCache, rows: int) -> list[Places]:
    """Return where a pass finds the states of a cache, and where it leaves what this many rows do to them.

    rows: 0: it commits all of them, as those of a prompt, or a root alone.
    """
    itemsize, shapes = executor.like.element_size(), executor.states.values()
    of_inputs = [itemsize * rows * shape.channels for shape in shapes]
    of_states = [4 * rows * shape.heads * shape.of_update for shape in shapes]
    *starts, size = places_of([*of_inputs, *of_states])
    if cache.room.nbytes < size:
        cache.room = pages.empty(size, torch.uint8)
    address = cache.room.data_ptr()
    places, held = [], iter(cache.buffers()[2 * len(executor.caches) :])
    for i, shape in enumerate(shapes):
        inputs, state = next(held), next(held) if shape.heads else None
        of_inputs_at, updates_at = ((address + starts[j]) * (rows > 0) for j in (i, i + len(shapes)))
        places.append(Places(inputs.data_ptr(), of_inputs_at, inputs.shape[2], pointer(state), updates_at))
    return places


def _can_use(executor: Executor, shape: StateShape, layer: Any) -> bool:
    """Whether C++ can read and write the state of a layer of the cache."""
    if not layer.tensors():
        return False
    inputs, *states = layer.tensors()
    columns = inputs.shape[2]
    is_of_shape = inputs.shape == (1, shape.channels, columns) and shape.columns <= columns <= executor.most_columns
    has_states = [state.shape for state in states] == ([(1, *shape.of_state)] if shape.heads else [])
    are_plain = is_plain_of(inputs, executor.like.dtype) and all(is_plain_of(one, torch.float32) for one in states)
    return is_of_shape and has_states and are_plain
