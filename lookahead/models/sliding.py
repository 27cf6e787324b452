"""Sliding windows: the cache of a layer that has one, and models whose masks ignore that of their cache."""

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.models import cache
from lookahead.models.adapter import ModelAdapter
from lookahead.models.cache import InPlaceLayer
from lookahead.models.state import state_of


class SlidingLayer(InPlaceLayer):
    """Keys and values of the last ``sliding_window`` - 1 positions and of the current step."""

    is_sliding = True

    def __init__(self, sliding_window: int):
        self.sliding_window = sliding_window
        super().__init__(min(2 * sliding_window, cache.FIRST_CAPACITY))

    @property  # by it, a cache that is taken apart says which layers slide, as in ``DynamicCache(list(cache))``
    def _sliding_window_tensor(self) -> torch.Tensor:
        return torch.tensor(self.sliding_window, device=self.device if self.is_initialized else "cpu")

    def get_max_length(self) -> int:
        return self.sliding_window

    def seen(self) -> int:
        return self.columns - max(int(self.held.min()) - self._most_seen(), 0)

    def _most_seen(self) -> int:
        return self.sliding_window - 1

    def _reach(self, columns: int) -> None:
        self.starts = self.starts + self.columns - columns  # the last position stays
        super()._reach(columns)

    def lacks_room(self, new: int) -> bool:
        wanted = 2 * (self.sliding_window + new)
        # The buffers are too small, or too large since a long prompt.
        return self.columns + new > self.at.room or self.at.room > 2 * max(wanted, cache.FIRST_CAPACITY)

    def make_room(self, new: int) -> None:
        if self.lacks_room(new):
            wanted, held = 2 * (self.sliding_window + new), self.held
            seen = np.minimum(held, self._most_seen())
            self._move(held - seen, held, max(wanted, int(seen.max()) + new, cache.FIRST_CAPACITY))
            self.starts = self.starts + held - seen
            self.columns = int(seen.max())
            self.gaps = self.columns - seen

    def crop(self, tokens_to_remove: int) -> None:
        if max(self.get_seq_length() + tokens_to_remove - self._most_seen(), 0) < self.starts.max():
            raise RuntimeError(
                f"crop({tokens_to_remove}) needs positions that have left the sliding window of {self.sliding_window}"
            )
        super().crop(tokens_to_remove)


def hides_in_cache_alone(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether the cache has a window that the model's masks ignore, as with settings that its code does not read.

    In texts longer than the window, a chain of guesses would then see more than plain decoding, and a tree more or
    less.
    """
    makers = {"create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate"}
    is_known = "create_causal_mask" in (names := state_of(model).names)  # other models make masks in their own way
    return adapter.sees_all_up_to is not None and is_known and makers.isdisjoint(names)
