"""Caches that go from call to call of generate(), as in a conversation, made by `empty_cache` or by the caller."""

from collections.abc import Iterable
from copy import copy
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lookahead.compat import cache_argument, is_callers_own
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import InPlaceLayer, KeepsState, LookaheadCache, copy_of, counts_positions


class CountedCache(DynamicCache):
    """A cache whose layers keep only states, which do not say how many positions they have seen. So it counts them.

    It goes from call to call of a wrapped model. The model's own decoding would not count.
    """

    counts_positions = True
    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def empty_cache(model: PreTrainedModel, expected_length: int = 0) -> DynamicCache | None:
    """Make a cache for a call of generate() that the next call goes on from.

    Where all layers of a wrapped model can be cut back to any length (`can_be_cut`), they are ours from the start. A
    call of one sequence then writes into them, so that `cut` can copy what it has computed so far, between its passes.

    expected_length: positions to make room for at first.
    None if the model takes no such cache, or if its layers keep states alone and it is not wrapped: it then reads
    everything again.
    """
    if cache_argument(model) is None:
        return None
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    adapter = getattr(getattr(model, "lookahead", None), "adapter", None)
    if adapter is not None and can_be_cut(cache):
        ours = adapter.make_cache(expected_length).layers
        cache.layers = ours if all(type(layer) is InPlaceLayer for layer in ours) else cache.layers
    if counts_positions(cache):
        return cache
    return CountedCache(config=config) if getattr(model, "lookahead", None) is not None else None


def can_be_cut(cache: DynamicCache) -> bool:
    """Whether the layers of a cache can be cut back to any length, however long their text becomes."""
    return all(
        isinstance(layer, (DynamicLayer, InPlaceLayer))
        and not isinstance(layer, KeepsState)
        and layer.is_croppable
        and not layer.is_sliding
        for layer in cache.layers
    )


def cut(cache: DynamicCache, tokens: int) -> DynamicCache | None:
    """Return a copy without the last ``-tokens`` tokens; None if a layer cannot be cut back so far."""
    copied = copy(cache)
    # Layers of ours that are cut share their columns until then, so that no more are copied than are needed.
    shares = [isinstance(layer, InPlaceLayer) for layer in cache.layers]
    copied.layers = [
        copy(layer) if shared else copy_of(layer) for layer, shared in zip(cache.layers, shares, strict=True)
    ]
    try:
        if tokens:
            copied.crop(tokens)
    except RuntimeError:
        return None
    copied.layers = [copy_of(layer) if shared else layer for layer, shared in zip(copied.layers, shares, strict=True)]
    return copied


def bytes_of(cache: Cache) -> int:
    """Return the bytes of the tensors that the layers of a cache hold."""

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, (dict, list, tuple)):
            parts = value.values() if isinstance(value, dict) else value
            return [tensor for part in parts for tensor in tensors(part)]
        return []

    return sum(tensor.nbytes for layer in cache.layers for tensor in tensors(vars(layer)))


def why_plain(
    model: PreTrainedModel, adapter: ModelAdapter, cache: Cache, held: int, is_new: bool, sequences: int
) -> str | None:
    """Why lookahead does not decode a call on this cache, or None if it does.

    held: positions in it. is_new: whether it holds nothing, and is not to record its past. sequences: of the prompt.
    """
    is_unknown = is_callers_own(cache) and not isinstance(cache, CountedCache)
    if is_unknown and not counts_positions(DynamicCache(config=adapter.config)):
        return "on a cache that holds only states, which do not say how much of the prompt they cover"
    if type(cache) not in (DynamicCache, CountedCache):
        return f"on a cache of type {type(cache).__name__}"
    if cache.offloading:
        return "on a cache that is offloaded"
    if not is_new and not can_adopt(adapter, cache, model):
        return (
            "on a cache that records its past, or that this model could not have filled: their kind, length, dtype or "
            "device"
        )
    return "batches on a cache that was passed in" if held and sequences > 1 else None


def can_adopt(adapter: ModelAdapter, cache: Cache, model: PreTrainedModel) -> bool:
    """Whether `adopt` can read this cache: each layer is of our type, or transformers' dynamic one, and those
    that hold keys and values hold as many as the others, of one sequence, as this model makes them.
    """
    ours, usual = adapter.make_cache().layers, DynamicCache(config=adapter.config).layers
    if len(cache.layers) != len(ours):
        return False
    dtypes, device = {model.dtype}, device_of(model).type
    if torch.is_autocast_enabled(device):  # then keys and values have either
        dtypes.add(torch.get_autocast_dtype(device))
    lengths: set[int] = set()
    layers: list[Any] = cache.layers
    for mine, own, theirs in zip(ours, usual, layers, strict=True):
        kinds: tuple[type, ...] = (type(mine),)
        if isinstance(mine, KeepsState):
            kinds = type(mine), type(own)
        elif isinstance(mine, InPlaceLayer):
            kinds = type(mine), DynamicLayer, DynamicSlidingWindowLayer
        if type(theirs) not in kinds or getattr(theirs, "record_past", False):
            return False
        if isinstance(mine, InPlaceLayer) and theirs.is_initialized:
            both = theirs.buffers if isinstance(theirs, InPlaceLayer) else (theirs.keys, theirs.values)
            # A layer without a window holds all positions. One for chunks has their length as its window.
            windows = None, getattr(own, "sliding_window", None)
            fits = all(_is_of_one_sequence(states, dtypes, device) for states in both)
            if not fits or getattr(theirs, "sliding_window", None) not in windows:
                return False
            lengths |= {theirs.get_seq_length(), theirs.get_seq_length() + both[0].shape[2] - both[1].shape[2]}
    return len(lengths) < 2


def adopt(adapter: ModelAdapter, cache: Cache) -> LookaheadCache:
    """Make a cache that holds what the caller's ``cache``, of one sequence, holds.

    Our own full layers are shared with ``cache``, because they can be rewound. Everything else is copied.
    """
    layers: list[Any] = []
    pairs: Iterable[Any] = zip(adapter.make_cache(cache.get_seq_length()).layers, cache.layers, strict=True)
    for mine, theirs in pairs:
        keeps_state = isinstance(mine, KeepsState)
        if type(theirs) is InPlaceLayer and not (theirs.is_initialized and theirs.buffers[0].requires_grad):
            mine = theirs
        elif type(theirs) is type(mine):
            mine = copy_of(theirs)
        elif keeps_state:
            mine.copy_from(theirs)
            if isinstance(mine, InPlaceLayer) and theirs.is_initialized:
                _fill(mine, theirs)
        elif isinstance(mine, InPlaceLayer) and isinstance(theirs, DynamicLayer) and theirs.is_initialized:
            _fill(mine, theirs)
        layers.append(mine)
    return LookaheadCache(layers, [cache.get_seq_length()])


def _fill(mine: InPlaceLayer, theirs: Any) -> None:
    """Append the keys and values of a layer of transformers' to an empty layer of ours."""
    mine.update(theirs.keys, theirs.values)
    mine.starts = np.array([theirs.get_seq_length() - mine.columns])


def _is_of_one_sequence(states: object, dtypes: set[torch.dtype], device: str) -> bool:
    return (
        type(states) is torch.Tensor
        and states.ndim == 4
        and len(states) == 1
        and states.dtype in dtypes
        and states.device.type == device
    )
