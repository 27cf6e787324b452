"""The KV cache: preallocated, written in place, and cut back to the accepted rows after each step.

A layer's buffer, of shape [batch, heads, capacity, head_dim] for keys and for values alike:

    full      row i holds position i; rows 0..length-1 are in use
    sliding   row i holds position start + i; what has left the window is dropped when room is made

`update` appends the T rows of a step behind the `length` committed ones; `commit(path)` keeps the accepted ones. Room
is made by doubling (full) or by moving the window to the front (sliding), so a row is copied O(1) times on average
and no step copies the prefix. Without `commit`, the layers behave as transformers' own dynamic ones.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 256  # rows


class InPlaceLayer(CacheLayerMixin):
    """Keys and values of all positions, for layers that attend to everything (or mask by chunk)."""

    is_sliding = False
    is_croppable = True

    def __init__(self, expected_length: int = 0):
        """expected_length: positions that will be held if all goes as asked; saves growing."""
        self._capacity = max(expected_length, FIRST_CAPACITY)
        self.reset()

    def reset(self) -> None:
        self.is_initialized = False
        self._keys = self._values = None
        self.length = 0  # positions seen, the last step's included until it is committed
        self.base = 0  # positions committed before the last update

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = self._allocate(self._capacity, key_states, value_states)
        self.is_initialized = True

    @staticmethod
    def _allocate(capacity: int, *like: torch.Tensor) -> list[torch.Tensor]:
        return [states.new_empty((*states.shape[:2], capacity, states.shape[3])) for states in like]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, T, head_dim] and return views of all keys and values that the layer shows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        begin = self._make_room(new)
        self._keys[:, :, begin : begin + new] = key_states
        self._values[:, :, begin : begin + new] = value_states
        shown = slice(begin - self.seen(), begin + new)
        self.base, self.length = self.length, self.length + new
        return self._keys[:, :, shown], self._values[:, :, shown]

    def _make_room(self, new: int) -> int:
        """Row at which ``new`` rows fit."""
        if self.length + new > self._keys.shape[-2]:
            self._move(0, self.length, max(2 * self._keys.shape[-2], self.length + new))
        return self.length

    def _move(self, begin: int, end: int, capacity: int) -> None:
        """Move rows begin..end-1 to the front of new buffers."""
        old = self._keys, self._values
        self._keys, self._values = self._allocate(capacity, *old)
        for new_buffer, old_buffer in zip((self._keys, self._values), old, strict=True):
            new_buffer[:, :, : end - begin] = old_buffer[:, :, begin:end]

    def seen(self) -> int:
        """Committed positions that the next update will show."""
        return self.length

    def row_of(self, position: int) -> int:
        return position

    def commit(self, path: list[int]) -> None:
        """Keep rows ``path`` (rising indices into the last update), in this order, and forget its other rows."""
        settled = next((i for i, row in enumerate(path) if row != i), len(path))
        moved = path[settled:]
        if moved:
            origin = self.row_of(self.base)
            rows = torch.tensor(moved, device=self.device) + origin
            target = slice(origin + settled, origin + len(path))
            for buffer in (self._keys, self._values):
                buffer[:, :, target] = buffer.index_select(2, rows)
        self.length = self.base + len(path)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions (transformers counts them as a negative number)."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"crop({tokens_to_remove}) must lie between -{self.length} and 0")
        self.length += tokens_to_remove

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys[:, :, : self.row_of(self.length)] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._values[:, :, : self.row_of(self.length)] if self.is_initialized else None

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys shown, position of the first) for a coming update of ``query_length`` rows."""
        return self.seen() + query_length, self.length - self.seen()


class SlidingLayer(InPlaceLayer):
    """Keys and values of the last ``window`` - 1 positions and of the step under way."""

    is_sliding = True

    def __init__(self, sliding_window: int):
        self.sliding_window = sliding_window
        super().__init__(min(2 * sliding_window, FIRST_CAPACITY))

    def reset(self) -> None:
        super().reset()
        self.start = 0  # position held by row 0

    def seen(self) -> int:
        return min(self.length, self.sliding_window - 1)

    def row_of(self, position: int) -> int:
        return position - self.start

    def _make_room(self, new: int) -> int:
        row, capacity = self.row_of(self.length), self._keys.shape[-2]
        wanted = 2 * (self.sliding_window + new)
        if row + new > capacity or capacity > 2 * max(wanted, FIRST_CAPACITY):  # too small, or big from a long prompt
            self._move(row - self.seen(), row, max(wanted, FIRST_CAPACITY))
            self.start = self.length - self.seen()
        return self.row_of(self.length)

    def crop(self, tokens_to_remove: int) -> None:
        length = self.length + tokens_to_remove
        if max(length - self.sliding_window + 1, 0) < self.start:
            raise RuntimeError(
                f"crop({tokens_to_remove}) needs positions that have left the sliding window of {self.sliding_window}"
            )
        super().crop(tokens_to_remove)


class LookaheadCache(Cache):
    """One in-place layer for each layer of the model."""

    def commit(self, path: list[int]) -> None:
        """Keep rows ``path`` of the last step, rising indices that start with the root's 0, in every layer."""
        for layer in self.layers:
            if isinstance(layer, InPlaceLayer):
                layer.commit(path)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        layers = [layer for layer in self.layers if isinstance(layer, InPlaceLayer) and layer.is_initialized]
        return sum(buffer.nbytes for layer in layers for buffer in (layer._keys, layer._values))
