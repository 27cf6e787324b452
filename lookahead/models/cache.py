"""The KV cache: preallocated, written in place, and cropped to the accepted rows after each step.

A layer has a buffer [batch, heads, capacity, head_dim] for keys and another for values. The sequences of a batch accept
different numbers of tokens. `columns` columns are in use, and sequence b fills the first columns - gaps[b] of them:

    full      column i holds position i
    sliding   column i holds position starts[b] + i; columns that have left the window are dropped when room is made

    sequence 0   [ committed .................. | step ]
    sequence 1   [ committed ......... |  gap   | step ]

`update` appends the T rows of a step after all columns. `commit` moves the accepted rows of each sequence to the end of
its committed part. A full layer makes room by doubling, a sliding layer by moving its window to the front. So a row is
copied O(1) times on average, and no step copies the prefix. Without `commit`, the layers behave like transformers' own.

Layers that keep a state (recurrent, short convolution), instead of positions or in addition, do not change it in a
step, and `commit` applies the accepted rows to it (`recurrence.StateLayer`). If a model's layers cannot compute
branches, they are transformers' own. Their state cannot be cropped to an accepted prefix. So it is restored to its
value before the step, and the next pass computes the accepted tokens again.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead.compat import caches_nothing
from lookahead.cpu import executor, pages
from lookahead.decoding_pass import current_pass
from lookahead.step import Step, Visibility, hidden, to_device

if TYPE_CHECKING:
    from lookahead.cpu.states import Pending

FIRST_CAPACITY = 256  # columns
LONG = 2048  # columns from which on huge pages may pay
# For all layers at once, by `map`: a Python function for each layer and step would take longer.
_IS_INITIALIZED, _KEYS, _VALUES = attrgetter("is_initialized"), attrgetter("_keys"), attrgetter("_values")
_AT, _TENSORS = attrgetter("at"), methodcaller("tensors")


class Columns(NamedTuple):
    """Which columns of its buffers a layer uses. It never changes, so the layers of a kind can share one."""

    room: int
    """Columns of the buffers."""
    columns: int
    """Columns in use, with those of a step not yet committed."""
    base: int
    """Columns in use before the step."""
    computed: int
    """Rows of the step that were computed before the next update."""
    gaps: np.ndarray
    """int64 [batch], or [1] while all sequences are equal."""
    starts: np.ndarray
    """Position in the first column, int64 [batch] or [1]."""


T = TypeVar("T")


class _Of(Generic[T]):
    """A field of a layer's `Columns`. A layer for which it is set goes its own way until the next commit."""

    def __set_name__(self, layer: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: "InPlaceLayer", of: type) -> T:
        return getattr(layer.at, self.name)

    def __set__(self, layer: "InPlaceLayer", value: T) -> None:
        field: dict[str, Any] = {self.name: value}
        layer.at = layer.at._replace(**field)


class InPlaceLayer(CacheLayerMixin):
    """Keys and values of all positions, for layers that attend to all of them or to chunks."""

    is_sliding = False
    is_croppable = True
    hides_unused = False
    """Whether columns that are not in use take part in attention, hidden, so that they must be finite."""
    at: Columns
    columns, base, computed, gaps, starts = _Of[int](), _Of[int](), _Of[int](), _Of[np.ndarray](), _Of[np.ndarray]()
    taken: ClassVar[int] = 0
    """Changes whenever a layer of any cache gets other buffers, or none."""
    _numbers: ClassVar[Iterator[int]] = count(1)
    _keys: torch.Tensor
    _values: torch.Tensor

    def __init__(self, expected_length: int = 0):
        """expected_length: positions to make room for at first, so that the buffers need not grow."""
        self._capacity = max(expected_length, FIRST_CAPACITY)
        self.reset()

    def reset(self) -> None:
        self.is_initialized = False
        self._keys = self._values = None  # type: ignore[assignment]  # not read until is_initialized
        self.at = Columns(0, 0, 0, 0, np.zeros(1, np.int64), np.zeros(1, np.int64))
        InPlaceLayer.taken = next(InPlaceLayer._numbers)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._hold(*self._allocate(self._capacity, key_states, value_states))
        self.is_initialized = True

    @staticmethod
    def _allocate(capacity: int, *like: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # tensors made in inference mode can never be written to outside of it
            if capacity >= LONG and all(states.is_cpu and states.dtype == like[0].dtype for states in like):
                shapes = [(*states.shape[:2], capacity, states.shape[3]) for states in like]
                return pages.empty_together(shapes, like[0].dtype)
            return [states.new_empty((*states.shape[:2], capacity, states.shape[3])) for states in like]

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values, self.at = keys, values, self.at._replace(room=keys.shape[2])
        InPlaceLayer.taken = next(InPlaceLayer._numbers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [batch, heads, T, head_dim]. Return views of all keys and values that the layer shows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and current_pass() is None and not self.gaps.any():
            return self._append(key_states, value_states)
        new = key_states.shape[-2]
        if not (_fits(self._keys, key_states) and _fits(self._values, value_states)):
            self._widen(key_states, value_states)
        first, seen = self.extend(new)
        self._keys.narrow(2, first + seen, new).copy_(key_states)  # cheaper than indexing
        self._values.narrow(2, first + seen, new).copy_(value_states)
        shown = 2, first, seen + new
        return self._keys.narrow(*shown), self._values.narrow(*shown)

    def _append(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `update` does, but make new tensors: autograd may need the old ones as they are.

        `room=0` keeps later updates from writing to the new ones.
        """
        at, seen = self.at, self.seen()
        keys, values = (torch.cat([held, states], dim=2) for held, states in zip(self.states(), new, strict=True))
        self._hold(keys, values)
        columns, starts = keys.shape[2], at.starts + at.columns - seen
        self.at = self.at._replace(room=0, columns=columns, base=seen, computed=0, starts=starts)
        self.dtype = keys.dtype
        return keys, values

    def _widen(self, *new: torch.Tensor) -> None:
        """Convert the buffers to the wider dtype if these states need it, as `torch.cat` does for transformers' layers.
        Raises its error for states of another shape or device.
        """
        old = self._keys, self._values
        both = [torch.cat([held[:, :, :0], states[:, :, :0]], dim=2) for held, states in zip(old, new, strict=True)]
        self._hold(*self._allocate(max(self.at.room, self.columns), *both))
        for buffer, held in zip(self.buffers, old, strict=True):
            buffer[:, :, : self.columns] = held[:, :, : self.columns]
        self.dtype = self._keys.dtype

    def extend(self, new: int) -> tuple[int, int]:
        """Append ``new`` rows, which the caller writes. Return the first column shown, and the columns before the rows.

        The layer must be initialized.
        """
        self.make_room(new)
        at, seen = self.at, self.seen()
        self.at = at._replace(base=at.columns - at.computed, columns=at.columns + new)
        return at.columns - seen, seen

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All columns of keys and of values, [batch, heads, capacity, head_dim] each, in use or not."""
        return self._keys, self._values

    def lacks_room(self, new: int) -> bool:
        """Whether `make_room` would change anything."""
        return self.at.columns + new > self.at.room

    def make_room(self, new: int) -> None:
        """Make room for an update of ``new`` rows. This may change the columns that the update shows."""
        if self.lacks_room(new):
            all_columns = np.zeros(1, np.int64), np.array([self.columns])
            self._move(*all_columns, max(2 * self.at.room, self.columns + new))

    def give_back_room(self) -> None:
        """Keep room for at most as many columns more as are in use."""
        if self.is_initialized and self.at.room > (most := max(2 * self.columns, FIRST_CAPACITY)):
            self._move(np.zeros(1, np.int64), np.array([self.columns]), most)

    def _move(self, starts: np.ndarray, stops: np.ndarray, capacity: int) -> None:
        """Move columns starts[b]..stops[b]-1 of each sequence b to the front of new buffers."""
        old = self._keys, self._values
        self._hold(*self._allocate(capacity, *old))
        everything, columns = slice(None), int((stops - starts).max())
        for b, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            sequence = everything if len(starts) == 1 else b
            for new_buffer, old_buffer in zip((self._keys, self._values), old, strict=True):
                new_buffer[sequence, :, : stop - start] = old_buffer[sequence, :, start:stop]
                # A hidden column takes part in sums with weight 0, so it must be finite.
                new_buffer[sequence, :, stop - start : columns] = 0

    @property
    def held(self) -> np.ndarray:
        """Columns that each sequence fills: int64 [batch] or [1]."""
        return self.columns - self.gaps

    def seen(self) -> int:
        """Number of columns in use that the next update will show."""
        return self.at.columns

    def positions_shown(self) -> np.ndarray:
        """Positions of the committed columns that the next update will show: int64 [batch or 1, seen], -1 in a gap."""
        stop = self.columns - self.computed
        columns = np.arange(self.columns - self.seen(), stop)
        return np.where(columns < stop - self.gaps[:, None], self.starts[:, None] + columns, -1)

    def clear_unused(self) -> None:
        """In float16, a rejected guess may have overflowed. But hidden columns must be finite."""
        for b in np.flatnonzero(self.gaps):
            for buffer in (self._keys, self._values):
                buffer[b, :, self.columns - self.gaps[b] : self.columns] = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions: transformers passes a negative number."""
        if not self.is_initialized:  # the layer uses another layer's keys and values
            return
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) must be negative: the number of positions to drop")
        self.columns -= min(-tokens_to_remove, self.columns)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these sequences of the batch, in this order."""
        if not self.is_initialized:
            return
        sequences = torch.as_tensor(indices, device=self.device)
        kept = sequences.tolist()
        batch = self._keys.shape[0]
        self.gaps, self.starts = (np.broadcast_to(x, batch)[kept] for x in (self.gaps, self.starts))
        self.columns -= self.gaps.min()
        self.gaps = self.gaps - self.gaps.min()
        self._hold(self._keys.index_select(0, sequences), self._values.index_select(0, sequences))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self._keys.shape[0], device="cpu").repeat_interleave(repeats))

    def stack(self, layers: list["InPlaceLayer"], offsets: list[int] | None = None) -> None:
        """Become the batch of ``layers``. Each of them holds one sequence and is of this layer's class.

        offsets: without them, each sequence begins at column 0, and the shorter ones end in a gap. With them, position
        i of sequence b is in column offsets[b] + i, as in plain decoding of left-padded sequences.
        """
        lengths = np.array([layer.get_seq_length() for layer in layers])
        seen = np.array([layer.seen() for layer in layers])
        self.columns = self.base = int(seen.max())
        self.starts, self.gaps = lengths - seen, self.columns - seen
        targets = np.zeros(len(layers), np.int64)
        if offsets is not None:
            stops = np.array(offsets) + lengths
            # A sequence that ended early may have no column left among those that are still seen.
            self.columns = self.base = min(int(stops.max()), self._most_seen())
            self.starts, self.gaps = np.array([int(stops.max()) - self.columns]), np.zeros(1, np.int64)
            targets = stops - seen - self.starts
        like = [states[:1].expand(len(layers), -1, -1, -1) for states in (layers[0]._keys, layers[0]._values)]
        self.dtype, self.device, self.is_initialized = layers[0].dtype, layers[0].device, True
        self._hold(*self._allocate(max(self._capacity, self.columns), *like))
        self._keys[:, :, : self.columns] = self._values[:, :, : self.columns] = 0
        for b, layer in enumerate(layers):
            start, stop = max(int(targets[b]), 0), int(targets[b] + seen[b])
            source = slice(layer.columns - (stop - start), layer.columns)
            if start < stop:
                self._keys[b, :, start:stop] = layer._keys[0, :, source]
                self._values[b, :, start:stop] = layer._values[0, :, source]

    def strip(self, padding: int) -> None:
        """Drop the padding of the only sequence, which has the layout of plain decoding."""
        if self.is_initialized:
            start = np.maximum(padding - self.starts, 0)
            self._move(start, np.array([self.columns]), self.at.room)
            self.columns -= int(start[0])
            self.starts = self.starts + start - padding

    def _most_seen(self) -> int:
        return 2**62

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the next update will show. The layer must be initialized."""
        shown = slice(self.columns - self.seen(), self.columns)
        return self._keys[:, :, shown], self._values[:, :, shown]

    @property  # transformers and its users read and write keys and values as attributes
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.states()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._replace(keys, self.values if self.at.room else self._values)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.states()[1] if self.is_initialized else None

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._replace(self.keys if self.at.room else self._keys, values)

    def _replace(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Hold these states, as assigned by a user. Keys and values come one after the other.

        They are not written to: the next update copies them, because there is no room.
        """
        if not self.is_initialized or keys is None or values is None or not keys.ndim == values.ndim == 4:
            raise AttributeError("keys and values can be replaced by tensors of four dimensions, once there are some")
        if current_pass() is not None:
            raise AttributeError(
                "keys and values cannot be replaced within a pass of lookahead: lookahead.unwrap(model)"
            )
        self._hold(keys, values)
        self.at = self.at._replace(room=0)
        self.dtype, self.device = keys.dtype, keys.device
        self._reach(max(keys.shape[2], values.shape[2]))

    def _reach(self, columns: int) -> None:
        """Have this many columns in use."""
        self.columns = self.base = columns

    def get_seq_length(self) -> int:
        """Positions of the longest sequence."""
        return int((self.starts + self.held).max())

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys shown, position of the first of them) for the next update, of ``query_length`` rows."""
        return self.seen() + query_length, self.get_seq_length() - self.seen()


class KeepsState:
    """Marks `recurrence.StateLayer`, which only models with such layers import."""


class LookaheadCache(Cache):
    """One layer for each layer of the model."""

    def __init__(self, layers: list, lengths: list[int] | None = None):
        """lengths: positions that each sequence holds already. Default: one empty sequence."""
        super().__init__(layers=layers)
        self.lengths = lengths or [0]
        """Accepted positions of each sequence. The next step's root stands at this position."""
        self.replay: list[int] = []
        """The last accepted tokens, if the layers do not hold them. The next pass computes them again."""
        self.paddings: list[int] | None = None
        """Columns of padding before each sequence, if they stand as in plain decoding; usually, they begin together."""
        self.in_place_at = [index for index, layer in enumerate(layers) if isinstance(layer, InPlaceLayer)]
        self.in_place = [layers[index] for index in self.in_place_at]
        """The layers that hold keys and values: all, unless some keep a state, or use those of other layers."""
        self.states_at = [index for index, layer in enumerate(layers) if isinstance(layer, KeepsState)]
        alike: dict[tuple, list[int]] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, InPlaceLayer):
                alike.setdefault((type(layer), getattr(layer, "sliding_window", None)), []).append(index)
        self._kinds = [(at, [layers[index] for index in at]) for at in alike.values()]  # usually with the same columns
        self._states = [layers[index] for index in self.states_at]
        self.pending: Pending | None = None
        """The state updates of the last pass, if it was fused, and their addresses."""
        self.room = torch.empty(0, dtype=torch.uint8, device="cpu")
        ours = InPlaceLayer, KeepsState
        self._with_state = [x for x in layers if not isinstance(x, ours) and not caches_nothing(x)]
        self._before: list[dict] = []

    def prepare(self, new: int, computed: int = 0) -> None:
        """Make room for a pass over ``new`` rows, and copy the states that `commit` may have to restore.

        computed: rows of the same step that earlier passes have computed. If any, the layers must hold all positions.
        """
        for _, kind in self._kinds:
            for layers in _alike(list(filter(_IS_INITIALIZED, kind))):
                at = layers[0].at
                if computed or at.computed:
                    columns = at.base + computed if computed else at.columns
                    _set_all(layers, at._replace(columns=columns, computed=computed))
                if layers[0].lacks_room(new):
                    for layer in layers:
                        layer.make_room(new)
                    _set_all(layers, layers[0].at)
        self._before = [_copy_of_state(vars(layer)) for layer in self._with_state] if self._with_state else []
        self.pending = None
        for layer in self._states:
            layer.pending = []

    def extend(self, new: int) -> list[tuple[list[int], int, int]]:
        """Append ``new`` rows to all layers, after `prepare` and for one sequence. The caller writes them.

        Returns, for each kind of layer, the indices of its layers, and what `InPlaceLayer.extend` returns of them.
        Every layer that caches something must be in place, and initialized before `prepare`.
        """
        extended: list[tuple[list[int], int, int]] = []
        for indices, layers in self._kinds:
            if len(_alike(layers)) > 1:
                extended += [([index], *layer.extend(new)) for index, layer in zip(indices, layers, strict=True)]
                continue
            at, seen = layers[0].at, layers[0].seen()
            _set_all(layers, at._replace(base=at.columns - at.computed, columns=at.columns + new))
            extended.append((indices, at.columns - seen, seen))
        return extended

    def buffers(self) -> list[torch.Tensor]:
        """Return the keys of all layers that are in place, then their values, all columns; then all states."""
        return [*map(_KEYS, self.in_place), *map(_VALUES, self.in_place), *chain(*map(_TENSORS, self._states))]

    def hidden(
        self, ancestors: np.ndarray, positions: np.ndarray, kinds: Mapping[Visibility, Sequence[int]], of_step: bool
    ) -> dict[Visibility, np.ndarray]:
        """Return which keys each row of a step must not see (`step.hidden`), for each kind of layer, by its indices.

        of_step: where no cached key is hidden, only the step's own keys are covered.
        """
        last = max(self.lengths) + positions.shape[1]
        found: dict[Visibility, np.ndarray] = {}
        for visibility, indices in kinds.items():
            layer = self.layers[indices[0]]
            if isinstance(layer, InPlaceLayer):
                if of_step and visibility.is_full and not any(layer.at.gaps.tolist()):
                    cached = np.empty((1, 0), np.int64)
                else:
                    cached = layer.positions_shown()
                    if of_step and not visibility.hides_any(cached, last):
                        cached = cached[:, :0]
                found[visibility] = hidden(ancestors, positions, cached, visibility)
        return found

    def commit(self, steps: list[Step], paths: list[list[int]]) -> None:
        """Keep rows ``paths[b]`` of the last pass's ``steps[b]``: ascending indices, beginning with the root's 0."""
        lengths, replay = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)], []
        if self._with_state:
            step, path = steps[0], paths[0]
            if len(path) == len(step):
                paths = [list(range(len(self.replay) + len(path)))]
            else:
                self._restore_states()
                paths, replay = [[]], self.replay + step.ids[path].tolist()
        # Layers that are not initialized use another layer's keys and values.
        compact(list(filter(_IS_INITIALIZED, self.in_place)), paths)
        for layer in self._states:
            layer.commit(paths)
        if self.pending is not None:
            self.pending.apply(paths[0])
            self.pending = None
        self.lengths, self.replay, self._before = lengths, replay, []

    def _restore_states(self) -> None:
        for layer, state in zip(self._with_state, self._before, strict=bool(self._before)):
            vars(layer).update(state)
        self._before = []

    @property
    def is_empty(self) -> bool:
        """Whether no layer holds anything."""
        return not any(map(_IS_INITIALIZED, self.in_place)) and not any(map(_TENSORS, self._states))

    def sequence(self, b: int) -> "LookaheadCache":
        """Return a cache of only sequence ``b``, without padding: this one if it holds no other, else a copy."""
        if len(self.lengths) == 1 and self.paddings is None:
            return self
        one = LookaheadCache([copy.copy(layer) for layer in self.layers], self.lengths)
        one.select([b])
        if self.paddings is not None:
            for layer in one.in_place:
                layer.strip(self.paddings[b])
        return one

    def emptied(self) -> "LookaheadCache":
        """Return an empty cache of the same kinds of layers, all of which are in place or need no room."""
        layers: list[Any] = [copy.copy(layer) for layer in self.layers]
        for layer in layers:
            is_ours = isinstance(layer, (InPlaceLayer, KeepsState))
            if is_ours:
                layer.reset()
        return LookaheadCache(layers)

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences of the batch."""
        self.batch_select_indices(torch.tensor(sequences, device="cpu"))
        self.lengths = [self.lengths[b] for b in sequences]
        if self.paddings is not None:
            self.paddings = [self.paddings[b] for b in sequences]

    def stack(self, caches: list["LookaheadCache"], offsets: list[int] | None = None) -> None:
        """Become the batch of ``caches``, each of one sequence (`InPlaceLayer.stack`)."""
        for layers in zip(self.layers, *(cache.layers for cache in caches), strict=True):
            first: Any = layers[0]
            keeps_state = isinstance(first, KeepsState)
            if keeps_state or (isinstance(first, InPlaceLayer) and layers[1].is_initialized):
                first.stack(list(layers[1:]), offsets)
            elif offsets and getattr(layers[1], "keys", None) is not None:  # transformers' own, not batches of ours
                first.keys, first.values = (
                    pad(part, (0, 0, offsets[0], 0)) for part in (layers[1].keys, layers[1].values)
                )
        self.lengths, self.paddings = [cache.lengths[0] for cache in caches], offsets


class SeparateCaches:
    """A separate cache for each sequence of a batch. They join and leave between steps, and nothing is moved."""

    replay: Sequence[int] = ()  # none has a state that is restored

    def __init__(self, caches: Iterable[LookaheadCache]):
        self.each = list(caches)
        """Each of one sequence."""

    @property
    def lengths(self) -> list[int]:
        """`LookaheadCache.lengths` of all."""
        return [cache.lengths[0] for cache in self.each]

    def commit(self, steps: list[Step], paths: list[list[int]]) -> None:
        """`LookaheadCache.commit` for each."""
        for cache, step, path in zip(self.each, steps, paths, strict=True):
            cache.commit([step], [path])

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences."""
        self.each = [self.each[b] for b in sequences]

    def sequence(self, b: int) -> LookaheadCache:
        """The cache of sequence ``b``."""
        return self.each[b]

    def emptied(self) -> LookaheadCache:
        """`LookaheadCache.emptied`, for all sequences together."""
        return self.each[0].emptied()


AnyCache = LookaheadCache | SeparateCaches
"""What holds the sequences of a call."""


def caches_in(cache: AnyCache) -> list[LookaheadCache]:
    """The separate caches; or the only one, of one or more sequences."""
    return cache.each if isinstance(cache, SeparateCaches) else [cache]


def counts_positions(cache: Cache) -> bool:
    """Whether a cache knows how many positions it holds. If its layers keep only states, it does not by itself
    (`passed_in.CountedCache`).
    """
    return getattr(cache, "counts_positions", False) or any(hasattr(layer, "get_seq_length") for layer in cache.layers)


def compact(layers: list[InPlaceLayer], paths: list[list[int]]) -> None:
    """Keep rows ``paths[b]`` of the layers' last update, ascending indices for each sequence b. Drop its other rows."""
    for group in _alike(layers):
        at = group[0].at
        moves, columns, gaps = _moves(at.base, at.gaps, paths)
        _set_all(group, at._replace(columns=columns, gaps=gaps, computed=0))
        if moves is not None:
            _move([*map(_KEYS, group), *map(_VALUES, group)], moves)
        for layer in group:
            if layer.hides_unused or layer.dtype == torch.float16:
                layer.clear_unused()


def _alike(layers: list[InPlaceLayer]) -> list[list[InPlaceLayer]]:
    """Group layers by their columns. The layers of a group then share theirs: usually, all have since the last step."""
    if layers and all(map(is_, map(_AT, layers), repeat(layers[0].at))):
        return [layers]
    groups: dict[tuple, list[InPlaceLayer]] = {}
    for layer in layers:
        *numbers, gaps, starts = layer.at
        groups.setdefault((*numbers, gaps.tobytes(), starts.tobytes()), []).append(layer)
    for group in groups.values():
        _set_all(group, group[0].at)
    return list(groups.values())


def _set_all(layers: list[InPlaceLayer], at: Columns) -> None:
    for layer in layers:
        layer.at = at


def _moves(base: int, gaps: np.ndarray, paths: list[list[int]]) -> tuple[np.ndarray | None, int, np.ndarray]:
    """Find the moves of a layer that had ``base`` columns in use, and these gaps, before the step.

    Returns the moves (int64 [3, n]: sequences, source columns, target columns) or None if there are none; the columns
    then in use; and the gaps, int64 [batch].
    """
    if len(paths) == 1:  # the usual case. What follows would take 20 times as long for it.
        (path,), stop = paths, base - int(gaps[0])
        moved = [(0, base + row, stop + place) for place, row in enumerate(path) if base + row != stop + place]
        return np.array(moved, np.int64).T if moved else None, stop + len(path), np.zeros(1, np.int64)
    counts = np.array([len(path) for path in paths], np.int64)
    held = np.broadcast_to(base - gaps, counts.shape)
    columns = int((held + counts).max())
    stops = columns, columns - held - counts
    if all(path[-1:] in ([], [len(path) - 1]) for path in paths) and not gaps.any():
        return None, *stops
    sequences = np.repeat(np.arange(len(counts)), counts)
    sources = base + np.array([row for path in paths for row in path], np.int64)
    targets = held[sequences] + np.array([place for path in paths for place in range(len(path))], np.int64)
    index = np.stack([sequences, sources, targets])[:, sources != targets]
    return (index if index.size else None), *stops


def _move(buffers: list[torch.Tensor], moves: np.ndarray) -> None:
    """Move rows of these buffers (`_moves`)."""
    if executor.can_move(buffers):
        executor.move_rows(buffers, moves[1], moves[2])
        return
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    for buffer in buffers:
        by_shape.setdefault((buffer.shape[1], buffer.shape[3]), []).append(buffer)
    if len(by_shape) > 1:
        for alike in by_shape.values():
            _move(alike, moves)
        return
    sequences, sources, targets = to_device(moves, buffers[0].device).unbind()
    for buffer in buffers:
        if len(buffer) == 1:  # cheaper than indexing
            buffer.index_copy_(2, targets, buffer.index_select(2, sources))
        else:
            buffer[sequences, :, targets] = buffer[sequences, :, sources]


def _fits(buffer: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether states can be written into a buffer, and none of their digits is lost."""
    (batch, heads, _, size), new = buffer.shape, states.shape
    return (
        len(new) == 4
        and (batch, heads, size) == (new[0], new[1], new[3])
        and buffer.device == states.device
        and (buffer.dtype == states.dtype or torch.promote_types(buffer.dtype, states.dtype) == buffer.dtype)
    )


def copy_of_cache(cache: LookaheadCache) -> LookaheadCache:
    """Copy a cache of one sequence (`copy_of`)."""
    return LookaheadCache([copy_of(layer) for layer in cache.layers], list(cache.lengths))


def copy_of(layer: Any) -> Any:
    """Copy a layer of ours, or one that keeps a state. The copy may be written to in any mode, and has no gradients.
    It has the columns in use, and room for as many more at most.

    The layer's tensors may have been made in inference mode, or by a pass that is differentiated.
    """
    copied = copy.copy(layer)
    with torch.inference_mode(False), torch.no_grad():
        vars(copied).update(_copy_of_state(vars(layer)))
        if isinstance(copied, InPlaceLayer) and copied.is_initialized:
            columns = np.array([copied.columns])
            copied._move(np.zeros(1, np.int64), columns, min(copied.buffers[0].shape[2], 2 * copied.columns))
    return copied


def _copy_of_state(value: Any) -> Any:
    """Copy a layer's attributes. Keys and values are shared: transformers appends to them by making new ones."""
    if isinstance(value, dict):
        return {k: v if str(k).endswith(("keys", "values")) else _copy_of_state(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy_of_state(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
