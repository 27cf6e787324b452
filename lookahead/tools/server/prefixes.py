"""What earlier requests have left: caches of their texts. A prompt that begins with such a text goes on from there."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lookahead.extending import InPlaceLayer
from lookahead.models.cache import KeepsState, copy_of
from lookahead.models.passed_in import empty_cache
from lookahead.tools.audit import first_difference

LEAST_SHARED = 16  # tokens: less of another text is not worth a copy


@dataclass(eq=False)
class _Kept:
    text: list[int]
    """What the cache holds."""
    cache: DynamicCache
    bytes: int
    stays: bool
    """Whether it is copied for each prompt that goes on from it."""


class Prefixes:
    """Caches of texts, up to a number of bytes. The one that was not used for longest goes first.

    Only one thread may use them. Caches are handed out: a call of generate() changes the one that it was given, and
    `keep` takes it back with the longer text. A cache of which the prompt needs a part is copied, so that the text it
    belongs to can go on, too. Where layers cannot be cut back (states, windows that have moved on), a prompt must begin
    with all of a text, so beginnings of prompts are kept, too (`Prompt.ends`).
    """

    def __init__(self, model: PreTrainedModel, most: int):
        """most: bytes; 0: nothing is kept."""
        self._model, self._most = model, most
        self._kept: list[_Kept] = []  # the newest is last
        self.bytes = self.prompt_tokens = self.cached_tokens = 0
        """Bytes of what is kept, tokens of all prompts, and those of them that were found here."""

    def take(self, ids: list[int], shares: bool = False) -> tuple[DynamicCache | None, int]:
        """Return a cache for a call of generate(), and how many tokens of its prompt the cache holds.

        ids: the prompt. shares: whether other calls go on from it, too.
        None, 0 if nothing is to be kept: generate() then makes a cache of its own.
        """
        self.prompt_tokens += len(ids)
        for shared, kept in self._that_share(ids):
            if shares or kept.stays or shared < len(kept.text):
                cache = cut(kept.cache, shared - len(kept.text))
                if cache is None:
                    continue
                self._kept.remove(kept)
                self._kept.append(kept)
            else:
                cache = kept.cache
                self._kept.remove(kept)
                self.bytes -= kept.bytes
            self.cached_tokens += shared
            return cache, shared
        return self._empty(), 0

    def keep(self, ids: list[int], cache: DynamicCache, stays: bool = False) -> None:
        """Keep a cache. ids: the text, of which the cache holds the beginning. stays: when it is handed out, too."""
        text = ids[: cache.get_seq_length()]
        for i, kept in enumerate(self._kept):
            if kept.text == text:  # of another answer to the same prompt
                stays |= kept.stays
                self.bytes -= self._kept.pop(i).bytes
                break
        self._kept.append(_Kept(text, cache, size_of(cache), stays))
        self.bytes += self._kept[-1].bytes
        while self.bytes > self._most:
            self.bytes -= self._kept.pop(0).bytes

    def keep_copy(self, ids: list[int], cache: DynamicCache) -> None:
        """Keep a copy of a cache for all prompts that go on from it."""
        copied = cut(cache, 0)
        assert copied is not None
        self.keep(ids, copied, stays=True)

    def _that_share(self, ids: list[int]) -> list[tuple[int, _Kept]]:
        """Return the texts that share enough with a prompt, and how many tokens. The longest, and newest, is first.

        The last token of a prompt is always computed, because the first one of the answer follows from its logits.
        """
        found, prompt = [], ids[:-1]
        for kept in reversed(self._kept):
            at = first_difference(kept.text, prompt)
            shared = len(prompt) if at is None else at
            if shared >= LEAST_SHARED:
                found.append((shared, kept))
        return sorted(found, key=lambda one: -one[0])

    def _empty(self) -> DynamicCache | None:
        if not self._most or getattr(self._model.generation_config, "cache_implementation", None) is not None:
            return None  # in the latter case, generate() makes that cache, and takes no other
        return empty_cache(self._model)


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


def size_of(cache: Cache) -> int:
    """Return the bytes of the tensors that the layers of a cache hold."""

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, (dict, list, tuple)):
            parts = value.values() if isinstance(value, dict) else value
            return [tensor for part in parts for tensor in tensors(part)]
        return []

    return sum(tensor.nbytes for layer in cache.layers for tensor in tensors(vars(layer)))
