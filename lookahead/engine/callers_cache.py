"""The cache that a caller of generate() has passed in, or that its result holds."""

from collections.abc import Mapping

import torch
from transformers.cache_utils import Cache

from lookahead.engine.prefill import positions_in
from lookahead.models.adapter import ModelAdapter
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache
from lookahead.models.passed_in import CountedCache, adopt
from lookahead.models.rewinding import rewind
from lookahead.passes.replaying import settle
from lookahead.passes.runner import EagerRunner


class CallersCache:
    """The call starts from its content, and fills it at the end as plain decoding would."""

    def __init__(self, theirs: Cache, outlives: bool):
        """outlives: whether it may be used after the call."""
        self._theirs, self._outlives, self._held = theirs, outlives, positions_in(theirs)
        self._adopted: LookaheadCache | None = None
        self._of_sequences: dict[int, LookaheadCache] = {}

    def adopt(self, adapter: ModelAdapter, sequences: int) -> LookaheadCache | None:
        """Return our own cache with its content.

        None if it is empty, and each sequence gets a cache of its own. A single one fills layers that are ours already.
        """
        is_filled = sequences == 1 and any(type(layer) is InPlaceLayer for layer in self._theirs.layers)
        self._adopted = adopt(adapter, self._theirs) if self._held or is_filled else None
        return self._adopted

    def rewind(self) -> None:
        """Restore its content before the call."""
        if self._adopted is not None:
            rewind(self._adopted, self._held)

    def collect(self, places: Mapping[int, int], cache: AnyCache) -> None:
        """Copy sequences that have ended from the cache of the call. places: the place of each in that cache."""
        if self._outlives:
            self._of_sequences |= {sequence: cache.sequence(place) for sequence, place in places.items()}

    def fill(self, runner: EagerRunner, starts: list[int], new: torch.Tensor, paddings: list[int]) -> None:
        """Move the collected sequences, each after its padding, into the caller's cache.

        starts: positions of each prompt. new: int64 [sequences, n], the new tokens, padded.
        paddings: columns to the left of each prompt.
        """
        if not self._outlives:
            return
        caches = [self._of_sequences[b] for b in range(len(starts))]
        for cache, start, tokens in zip(caches, starts, new, strict=True):
            lacks = len(tokens) - 1 - (cache.lengths[0] - start)  # the end of a text that ended early, and its padding
            if lacks:
                runner.prefill(tokens[None, -1 - lacks : -1], cache)
        joined = caches[0]
        if len(caches) > 1 or paddings[0]:
            joined = joined.emptied()
            joined.stack(caches, paddings)
        settle(runner, joined)
        for layer in joined.in_place:  # it was made for the longest text that the call might have written
            layer.give_back_room()
        self._theirs.layers = joined.layers
        if isinstance(self._theirs, CountedCache):
            self._theirs.length = joined.lengths[0]
