"""What earlier requests have left: caches of their texts. A prompt that begins with such a text goes on from there."""

from copy import copy
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from lookahead.models.cache import copy_of, empty_cache
from lookahead.tools.audit import first_difference

LEAST_SHARED = 16  # tokens: less of another text is not worth a copy


class _Kept(NamedTuple):
    text: list[int]
    """What the cache holds."""
    cache: DynamicCache
    bytes: int


class Prefixes:
    """Caches of texts, up to a number of bytes. The one that was not used for longest goes first.

    Only one thread may use them. Caches are handed out: a call of generate() changes the one that it was given, and
    `keep` takes it back with the longer text. A cache of which the prompt needs a part is copied, so that the text it
    belongs to can go on, too. Where layers cannot be cut back (states, windows that have moved on), a prompt must begin
    with all of a text.
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
        found = self._longest(ids)
        self.prompt_tokens += len(ids)
        if found is None:
            return self._empty(), 0
        index, shared = found
        kept = self._kept.pop(index)
        cache: DynamicCache | None = kept.cache
        if shares or shared < len(kept.text):
            cache = cut(kept.cache, shared - len(kept.text))
            self._kept.append(kept)
            if cache is None:
                return self._empty(), 0
        else:
            self.bytes -= kept.bytes
        self.cached_tokens += shared
        return cache, shared

    def keep(self, ids: list[int], cache: DynamicCache) -> None:
        """Keep a cache. ids: the text, of which the cache holds the beginning."""
        self._kept.append(_Kept(ids[: cache.get_seq_length()], cache, size_of(cache)))
        self.bytes += self._kept[-1].bytes
        while self.bytes > self._most:
            self.bytes -= self._kept.pop(0).bytes

    def _longest(self, ids: list[int]) -> tuple[int, int] | None:
        """Return the place of the text that shares most with a prompt, and the shared tokens; None if it is too few.

        The last token of a prompt is always computed, because the first one of the answer follows from its logits.
        """
        best, prompt = None, ids[:-1]
        for index, kept in enumerate(self._kept):
            at = first_difference(kept.text, prompt)
            shared = len(prompt) if at is None else at
            if shared >= LEAST_SHARED and (best is None or shared >= best[1]):
                best = index, shared
        return best

    def _empty(self) -> DynamicCache | None:
        if not self._most or getattr(self._model.generation_config, "cache_implementation", None) is not None:
            return None  # in the latter case, generate() makes that cache, and takes no other
        return empty_cache(self._model)


def cut(cache: DynamicCache, tokens: int) -> DynamicCache | None:
    """Return a copy without the last ``-tokens`` tokens; None if a layer cannot be cut back so far."""
    copied = copy(cache)
    copied.layers = [copy_of(layer) for layer in cache.layers]
    try:
        copied.crop(tokens)
    except RuntimeError:
        return None
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
