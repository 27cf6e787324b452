"""The KV cache: preallocated, written in place, and cut back to the accepted rows after each step.

A layer's buffer, of shape [batch, heads, capacity, head_dim] for keys and for values alike. Each sequence of a batch
accepts its own number of tokens, so `columns` are in use in all, of which sequence b fills the first columns - gaps[b]:

    full      column i holds position i
    sliding   column i holds position starts[b] + i; what has left the window is dropped when room is made

    sequence 0   [ committed .................. | step ]
    sequence 1   [ committed ......... |  gap   | step ]

`update` appends the T rows of a step behind all columns; `commit` moves the accepted ones of each sequence behind what
it holds. Room is made by doubling (full) or by moving the window to the front (sliding), so a row is copied O(1) times
on average and no step copies the prefix. Without `commit`, the layers behave as transformers' own dynamic ones.

Layers that keep a state instead of positions (recurrent, short convolution) are transformers' own. They cannot be cut
back to an accepted prefix, so they are put back to before the step, and the accepted tokens are computed once more,
ahead of the next step's.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.step import Step

FIRST_CAPACITY = 256  # columns


@dataclass(frozen=True)
class Accepted:
    """Which rows of a step are kept, flat over the sequences of the batch.

    sequences, rows, places: int64 [n]; row ``rows[i]`` of the step becomes position ``places[i]`` after what sequence
    ``sequences[i]`` holds. counts: int64 [batch], how many each keeps.
    """

    sequences: np.ndarray
    rows: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    _moves: dict = field(default_factory=dict)

    @classmethod
    def of(cls, paths: list[list[int]]) -> "Accepted":
        """paths: for each sequence, rising indices into its step."""
        counts = np.array([len(path) for path in paths], np.int64)
        rows = np.array([row for path in paths for row in path], np.int64)
        places = np.array([place for path in paths for place in range(len(path))], np.int64)
        return cls(np.repeat(np.arange(len(paths)), counts), rows, places, counts)

    def moves(
        self, base: int, gaps: np.ndarray, device: torch.device
    ) -> tuple[tuple[torch.Tensor, ...] | None, int, np.ndarray]:
        """What becomes of a layer that had ``base`` columns in use before the step, and these gaps.

        Returns sequences, source and target columns, int64 [n] each on ``device``, of what has to be moved, or None
        where nothing has; the columns then in use; the gaps, int64 [batch]. Layers that are alike ask once.
        """
        key = base, gaps.tobytes(), device
        if key not in self._moves:
            held = np.broadcast_to(base - gaps, self.counts.shape)
            sources, targets = base + self.rows, held[self.sequences] + self.places
            index = np.stack([self.sequences, sources, targets])[:, sources != targets]
            columns = int((held + self.counts).max())
            moved = torch.from_numpy(index).to(device).unbind() if index.size else None
            self._moves[key] = moved, columns, columns - held - self.counts
        return self._moves[key]


class InPlaceLayer(CacheLayerMixin):
    """Keys and values of all positions, for layers that attend to everything (or mask by chunk)."""

    is_sliding = False
    is_croppable = True
    _keys: torch.Tensor
    _values: torch.Tensor

    def __init__(self, expected_length: int = 0):
        """expected_length: positions that will be held if all goes as asked; saves growing."""
        self._capacity = max(expected_length, FIRST_CAPACITY)
        self.reset()

    def reset(self) -> None:
        self.is_initialized = False
        self._keys = self._values = None  # type: ignore[assignment]  # nobody reads them until is_initialized
        self.columns = 0  # in use, those of the last step included until it is committed
        self.base = 0  # in use before the step
        self.computed = 0  # rows of the step that were computed before the next update
        self.gaps = np.zeros(1, np.int64)  # [batch], or [1] while all sequences are alike
        self.starts = np.zeros(1, np.int64)  # [batch] or [1]: position held by the first column

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys, self._values = self._allocate(self._capacity, key_states, value_states)
        self.is_initialized = True

    @staticmethod
    def _allocate(capacity: int, *like: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # what is made in inference mode can never be written to outside of it
            return [states.new_empty((*states.shape[:2], capacity, states.shape[3])) for states in like]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, T, head_dim] and return views of all keys and values that the layer shows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        self.make_room(new)
        begin, seen = self.columns, self.seen()
        self._keys.narrow(2, begin, new).copy_(key_states)  # cheaper than an index
        self._values.narrow(2, begin, new).copy_(value_states)
        self.base, self.columns = begin - self.computed, begin + new
        shown = 2, begin - seen, seen + new
        return self._keys.narrow(*shown), self._values.narrow(*shown)

    def make_room(self, new: int) -> None:
        """See to it that the next update may have ``new`` rows; which columns it shows may change by this."""
        if self.columns + new > self._keys.shape[-2]:
            all_columns = np.zeros(1, np.int64), np.array([self.columns])
            self._move(*all_columns, max(2 * self._keys.shape[-2], self.columns + new))

    def skip(self, count: int) -> None:
        """Hold ``count`` further columns of zeros, as if computed; for measuring what it costs to attend to them."""
        self.make_room(count)
        for buffer in (self._keys, self._values):
            buffer[:, :, self.columns : self.columns + count] = 0
        self.columns += count

    def _move(self, begins: np.ndarray, ends: np.ndarray, capacity: int) -> None:
        """Move columns begins[b]..ends[b]-1 of each sequence to the front of new buffers."""
        old = self._keys, self._values
        self._keys, self._values = self._allocate(capacity, *old)
        everything, columns = slice(None), int((ends - begins).max())
        for b, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            sequence = everything if len(begins) == 1 else b
            for new_buffer, old_buffer in zip((self._keys, self._values), old, strict=True):
                new_buffer[sequence, :, : end - begin] = old_buffer[sequence, :, begin:end]
                # A hidden column still takes part in sums, with weight 0: it must be finite.
                new_buffer[sequence, :, end - begin : columns] = 0

    @property
    def held(self) -> np.ndarray:
        """Columns that each sequence fills, int64 [batch] or [1]."""
        return self.columns - self.gaps

    @property
    def length(self) -> int:
        """Positions of the longest sequence."""
        return int((self.starts + self.held).max())

    def seen(self) -> int:
        """Columns in use that the next update will show."""
        return self.columns

    def positions_shown(self) -> np.ndarray:
        """Position of each committed column that the next update will show, int64 [batch or 1, seen]; -1 in a gap."""
        end = self.columns - self.computed
        columns = np.arange(self.columns - self.seen(), end)
        return np.where(columns < end - self.gaps[:, None], self.starts[:, None] + columns, -1)

    def commit(self, accepted: Accepted) -> None:
        """Keep the accepted rows of the last update, in their order, and forget its other rows."""
        moves, self.columns, self.gaps = accepted.moves(self.base, self.gaps, self.device)
        self.computed = 0
        if moves is not None:
            sequences, sources, targets = moves
            for buffer in (self._keys, self._values):
                if len(accepted.counts) == 1:  # what is moved comes last, which is cheaper than by an index
                    last = buffer.narrow(2, self.columns - len(sources), len(sources))
                    last.copy_(buffer.index_select(2, sources))
                else:
                    buffer[sequences, :, targets] = buffer[sequences, :, sources]
        if self.dtype == torch.float16:  # a rejected guess may have overflowed, and a gap must be finite
            for b in np.flatnonzero(self.gaps):
                for buffer in (self._keys, self._values):
                    buffer[b, :, self.columns - self.gaps[b] : self.columns] = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions (transformers counts them as a negative number)."""
        if not self.is_initialized:  # it uses another layer's keys and values
            return
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"crop({tokens_to_remove}) must lie between -{self.length} and 0")
        self.columns += tokens_to_remove

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        if not self.is_initialized:
            return
        sequences = torch.as_tensor(indices, device=self.device)
        kept = sequences.tolist()
        batch = self._keys.shape[0]
        self.gaps, self.starts = (np.broadcast_to(x, batch)[kept] for x in (self.gaps, self.starts))
        self.columns -= self.gaps.min()
        self.gaps = self.gaps - self.gaps.min()
        self._keys, self._values = self._keys.index_select(0, sequences), self._values.index_select(0, sequences)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self._keys.shape[0]).repeat_interleave(repeats))

    def stack(self, layers: list["InPlaceLayer"], offsets: list[int] | None = None) -> None:
        """Become the batch of ``layers``, of one sequence each and of this layer's kind.

        offsets: where not given, each sequence begins at column 0 and the shorter ones end in a gap. If given, position
        i of sequence b stands at column offsets[b] + i, as plain decoding lays out left-padded sequences.
        """
        lengths = np.array([layer.length for layer in layers])
        seen = np.array([layer.seen() for layer in layers])
        ends = np.zeros(len(layers), np.int64) if offsets is None else np.array(offsets) + lengths
        self.columns = self.base = int(seen.max())
        self.starts, self.gaps = lengths - seen, self.columns - seen
        targets = np.zeros(len(layers), np.int64)
        if offsets is not None:
            # A sequence that ended early may have nothing left among the columns that are still seen.
            self.columns = self.base = min(int(ends.max()), self._most_seen())
            self.starts, self.gaps = np.array([int(ends.max()) - self.columns]), np.zeros(1, np.int64)
            targets = ends - seen - self.starts
        like = [states[:1].expand(len(layers), -1, -1, -1) for states in (layers[0]._keys, layers[0]._values)]
        self.dtype, self.device, self.is_initialized = layers[0].dtype, layers[0].device, True
        self._keys, self._values = self._allocate(max(self._capacity, self.columns), *like)
        self._keys[:, :, : self.columns] = self._values[:, :, : self.columns] = 0
        for b, layer in enumerate(layers):
            begin, end = max(int(targets[b]), 0), int(targets[b] + seen[b])
            source = slice(layer.columns - (end - begin), layer.columns)
            if begin < end:
                self._keys[b, :, begin:end] = layer._keys[0, :, source]
                self._values[b, :, begin:end] = layer._values[0, :, source]

    def _most_seen(self) -> int:
        return 2**62

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the columns in use, once there are any."""
        return self._keys[:, :, : self.columns], self._values[:, :, : self.columns]

    @property  # which transformers has as attributes
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.states()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.states()[1] if self.is_initialized else None

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

    def seen(self) -> int:
        return self.columns - max(int(self.held.min()) - self._most_seen(), 0)

    def _most_seen(self) -> int:
        return self.sliding_window - 1

    def make_room(self, new: int) -> None:
        capacity = self._keys.shape[-2]
        wanted = 2 * (self.sliding_window + new)
        # Too small, or big from a long prompt.
        if self.columns + new > capacity or capacity > 2 * max(wanted, FIRST_CAPACITY):
            held = self.held
            seen = np.minimum(held, self._most_seen())
            self._move(held - seen, held, max(wanted, int(seen.max()) + new, FIRST_CAPACITY))
            self.starts = self.starts + held - seen
            self.columns = int(seen.max())
            self.gaps = self.columns - seen

    def crop(self, tokens_to_remove: int) -> None:
        if max(self.length + tokens_to_remove - self._most_seen(), 0) < self.starts.max():
            raise RuntimeError(
                f"crop({tokens_to_remove}) needs positions that have left the sliding window of {self.sliding_window}"
            )
        super().crop(tokens_to_remove)


class LookaheadCache(Cache):
    """One layer for each layer of the model."""

    def __init__(self, layers: list, lengths: list[int] | None = None):
        """lengths: positions that each sequence of the batch holds already; one empty sequence if not given."""
        super().__init__(layers=layers)
        self.lengths = lengths or [0]
        """Positions accepted, the place of the next step's root."""
        self.replay: list[int] = []
        """Tokens of the last of these positions, which the layers do not hold and the next pass computes again."""
        self._in_place = [layer for layer in layers if isinstance(layer, InPlaceLayer)]
        self._with_state = [x for x in layers if not isinstance(x, InPlaceLayer) and type(x).__name__ != "DummyLayer"]
        self._before: list[dict] = []

    def begin(self, new: int, computed: int = 0) -> None:
        """Make room for a pass over ``new`` rows, and note the states that `commit` may have to go back to.

        computed: rows of the same step that the pass before has computed; the layers must hold all positions then.
        """
        for layer in self._in_place:
            if layer.is_initialized:
                if computed:
                    layer.columns = layer.base + computed
                layer.computed = computed
                layer.make_room(new)
        self._before = [_copy_of_state(vars(layer)) for layer in self._with_state]

    def commit(self, steps: list[Step], paths: list[list[int]]) -> None:
        """Keep rows ``paths[b]`` of the last pass's ``steps[b]``, rising indices that start with the root's 0."""
        lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        if self._with_state:
            paths, replay = self._commit_state(steps[0], paths[0])
        else:
            replay = []
        accepted = Accepted.of(paths)
        for layer in self._in_place:
            if layer.is_initialized:  # not where another layer's keys and values are used
                layer.commit(accepted)
        self.lengths, self.replay, self._before = lengths, replay, []

    def _commit_state(self, step: Step, path: list[int]) -> tuple[list[list[int]], list[int]]:
        """The path that layers with positions have to keep, and the tokens to compute again."""
        if len(path) == len(step):
            return [list(range(len(self.replay) + len(path)))], []
        self._restore_states()
        return [[]], self.replay + step.ids[path].tolist()

    def _restore_states(self) -> None:
        for layer, state in zip(self._with_state, self._before, strict=bool(self._before)):
            vars(layer).update(state)
        self._before = []

    def skip(self, count: int) -> None:
        """Pretend to ``count`` further positions (`InPlaceLayer.skip`), where layers hold all positions."""
        for layer in self._in_place:
            if type(layer) is InPlaceLayer and layer.is_initialized:
                layer.skip(count)
        self.lengths = [length + count for length in self.lengths]

    @property
    def can_rewind(self) -> bool:
        """Whether every layer holds all positions. Sliding layers and states do not."""
        return all(type(layer) is InPlaceLayer for layer in self._in_place) and not self._with_state

    def rewind(self, length: int) -> None:
        """Go back to ``length`` positions of one sequence, after a pass or commit that may be half done.

        Sliding layers and states cannot: they must be copies of what is to be kept.
        """
        for layer in self._in_place:
            if type(layer) is InPlaceLayer:
                layer.columns, layer.gaps = length - int(layer.starts[0]), np.zeros(1, np.int64)
                layer.computed = 0

    def sequence(self, b: int) -> "LookaheadCache":
        """A cache of sequence ``b`` alone; of a batch, a copy."""
        if len(self.lengths) == 1:
            return self
        one = LookaheadCache([copy.copy(layer) for layer in self.layers], self.lengths)
        one.select([b])
        return one

    def select(self, sequences: list[int]) -> None:
        """Keep these sequences of the batch."""
        self.batch_select_indices(torch.tensor(sequences))
        self.lengths = [self.lengths[b] for b in sequences]

    def stack(self, caches: list["LookaheadCache"], offsets: list[int] | None = None) -> None:
        """Become the batch of ``caches``, of one sequence each (`InPlaceLayer.stack`)."""
        for layers in zip(self.layers, *(cache.layers for cache in caches), strict=True):
            if isinstance(layers[0], InPlaceLayer) and layers[1].is_initialized:
                layers[0].stack(list(layers[1:]), offsets)
        self.lengths = [cache.lengths[0] for cache in caches]


def _copy_of_state(value: Any) -> Any:
    """Copy of a layer's attributes; keys and values are shared, for transformers appends to them by making new ones."""
    if isinstance(value, dict):
        return {k: v if str(k).endswith(("keys", "values")) else _copy_of_state(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy_of_state(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
