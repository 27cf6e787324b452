"""A whole pass over the rows of one step, for decoders built like Llama: `decoder.cpp`.

A layer is a dozen small operations. On a CPU, calling them one by one takes as long as computing them. Here one call
computes all layers, and its threads meet at a spinning barrier. Weights are read where they are, and nothing is copied,
except what `blocks` makes smaller.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, count
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from lookahead.cpu import blocks, native, products
from lookahead.cpu.likeliest import MAX_COUNT
from lookahead.cpu.pages import HugePages
from lookahead.cpu.products import Linear
from lookahead.cpu.tree_attention import MAX_HEAD_DIM

_kernels = cache(partial(native.kernels, "run", native.FLOATS, [ctypes.c_void_p], ctypes.c_long))
_sizes = cache(partial(native.kernels, "sizes", native.FLOATS, [ctypes.c_void_p] * 2))
_MOVES = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p] * 2 + [ctypes.c_long]
_movers = cache(partial(native.kernels, "move_rows", (torch.uint8,), _MOVES))  # one, which moves any dtype


class Layer(NamedTuple):
    """One layer. All tensors but quantised weights have one dtype. A norm that is None is left out.

    input_norm and mlp_norm are of what attention and the MLP take. The others are of what these products give: q_norm
    and k_norm of each head, [head_dim], or of all heads together.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    input_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_norm: torch.Tensor | None = None
    down_norm: torch.Tensor | None = None


_FIELDS = tuple(Layer.__annotations__)
_LINEARS, _NORMS = _FIELDS[:7], _FIELDS[7:]
# Of `Program._room`, in _Pass.
_PARTS = ("product", "q", "attended", "mlp", "largest", "total", "sums", "room", "peaks")
_OUT = {"q": "q", "k": "k", "v": "v", "o": "product", "up": "mlp", "down": "product"}  # the part that a product goes to
_SETTINGS = (
    "is_gelu", "norms_round_once", "rotary_rounds_once", "epsilon", "scaling", "norm_offset", "embedding_factor",
    "residual_factor",
)  # fmt: skip
_OF_PASS = ("cos", "sin", "keys", "values", "key_stride", "held", "hidden", "masked", "output")
# Place of each field of a Layer in decoder.cpp, all of 8 bytes. A linear layer is a Matrix.
_PLACES = {name: products.FIELDS * i for i, name in enumerate(_LINEARS)}
_PLACES |= {name: products.FIELDS * len(_LINEARS) + i for i, name in enumerate(_NORMS + _OF_PASS)}


@dataclass(frozen=True)
class Decoder:
    """A decoder built like Llama. embedding: [vocabulary, hidden]. norm: [hidden]. epsilon: of all norms."""

    layers: Sequence[Layer]
    rotary: Sequence[str | None]
    """For each layer, the name of its rotary embedding. None: it has none."""
    embedding: torch.Tensor
    norm: torch.Tensor
    head: Linear
    head_dim: int
    scaling: float
    epsilon: float
    norm_offset: float
    """Added to the weights of norms."""
    norms_round_once: bool
    """Norms multiply with their weights in float32, and do not round before."""
    rotary_rounds_once: bool
    is_gelu: bool
    """The activation is GELU, approximated by tanh. Otherwise it is SiLU."""
    embedding_factor: float
    residual_factor: float
    """Of what attention and the MLP add."""
    logits_divisor: float


def smallest(decoder: Decoder, known: dict[int, Linear], indexes: bool) -> Decoder:
    """The same decoder, with weights of fewer bits where these make the same products exactly (`blocks.smallest`).

    known: what earlier calls have found, by place; the place of each linear layer is its own. Where weights have
    changed since, a new copy takes the place of the old one, which calls in other threads go on reading. indexes:
    whether bf16 numbers may be indexed.
    """
    places = count()
    memory = HugePages()

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else memory.copy(tensor)

    def smaller(field: Any) -> Any:
        if not isinstance(field, Linear):
            return field
        place = next(places)
        found = blocks.smallest(field, decoder.embedding.dtype, before := known.get(place), indexes)
        if found is not field:
            if before is None or found.weight is not before.weight:
                weight, scales, bias, offsets, whole, origin = found
                found = Linear(memory.copy(weight), copied(scales), bias, copied(offsets), whole, origin)
            known[place] = Linear(found.weight, found.scales, None, found.offsets)
        else:
            known.pop(place, None)
        return found

    layers = [Layer(*map(smaller, layer)) for layer in decoder.layers]
    return replace(decoder, layers=layers, head=smaller(decoder.head))


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a pass multiplies with."""
    return sum(linear.weight.nbytes for linear in _linears(decoder))


def indexed_bytes(decoder: Decoder) -> int:
    """Bytes, about, of a copy in which `smallest` has indexed all weights; 0 if it cannot."""
    numbers = sum(linear.weight.numel() for linear in _linears(decoder) if linear.scales is None)
    return numbers * 3 // 2 if blocks.can_index(decoder.embedding.dtype) else 0


class _Pass(ctypes.Structure):
    """Pass in decoder.cpp."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        [("layers", ctypes.c_void_p), ("head", ctypes.c_long * products.FIELDS)]
        + [(name, ctypes.c_void_p) for name in ("ids", "embedding", "norm", "positions")]
        + [(name, ctypes.c_void_p) for name in ("product", "q", "attended", "mlp")]
        + [(name, ctypes.c_void_p) for name in ("first_hidden", "largest", "total", "sums", "room", "peaks")]
        + [(name, ctypes.c_void_p) for name in ("tokens", "probabilities")]
        + [(name, ctypes.c_long) for name in ("room_bytes", "layer_count", "rows", "shown", "said", "likeliest")]
        + [(name, ctypes.c_long) for name in ("length", "keys_of_step", "has_near")]
        + [(name, ctypes.c_long) for name in ("hidden", "heads", "key_heads", "size")]
        + [(name, ctypes.c_long) for name in ("rotary", "intermediate", "threads")]
        + [(name, ctypes.c_long) for name in ("is_gelu", "norms_round_once", "rotary_rounds_once", "norms_of_rows")]
        + [(name, ctypes.c_double) for name in ("epsilon", "scaling", "norm_offset")]
        + [(name, ctypes.c_double) for name in ("embedding_factor", "residual_factor", "temperature")]
    )


def tensors_of(decoder: Decoder) -> list[torch.Tensor]:
    """All tensors that a decoder which no `smallest` has changed is made of."""
    parts = [part for linear in _linears(decoder) for part in linear[:4]]
    norms = [norm for layer in decoder.layers for norm in layer[7:]]
    return [tensor for tensor in (decoder.embedding, decoder.norm, *parts, *norms) if tensor is not None]


def _linears(decoder: Decoder) -> list[Linear]:
    return [decoder.head, *(linear for layer in decoder.layers for linear in layer[:7])]


def serves(decoder: Decoder) -> bool:
    """Whether `Program` takes this decoder."""
    norms = [norm for layer in decoder.layers for norm in layer[7:] if norm is not None]
    dtype = decoder.embedding.dtype
    return (
        dtype in _kernels()
        and all(linear.is_served(dtype) for linear in _linears(decoder))
        and all(products.is_plain_of(tensor, dtype) for tensor in (decoder.embedding, decoder.norm, *norms))
        and decoder.embedding.ndim == 2
        and 0 < decoder.head_dim <= MAX_HEAD_DIM
        and _has_equal_layers(decoder)
        and all(_norms_fit(decoder, layer) for layer in decoder.layers)
    )


def _norms_fit(decoder: Decoder, layer: Layer) -> bool:
    """Whether each norm has a weight for each number. torch would repeat a single one."""
    width, size, first = decoder.embedding.shape[1], decoder.head_dim, decoder.layers[0]
    of_rows = (layer.q.outputs,), (layer.k.outputs,)  # of all heads together
    of_heads = [None if norm is None else norm.shape for norm in (layer.q_norm, layer.k_norm)]
    of_first = [None if norm is None else norm.shape for norm in (first.q_norm, first.k_norm)]
    others = decoder.norm, layer.input_norm, layer.mlp_norm, layer.o_norm, layer.down_norm
    return (
        all(norm is None or norm.shape == (width,) for norm in others)
        and of_heads == of_first
        and tuple(of_heads) in ((None, None), ((size,), (size,)), of_rows)
    )


def _has_equal_layers(decoder: Decoder) -> bool:
    """Whether all layers have the same shapes, and these fit together. Those of a pruned model may not."""
    shapes = {tuple(linear.weight.shape for linear in layer[:7]) for layer in decoder.layers}
    q, k, v, o, gate, up, down = next(iter(shapes))
    width, size = decoder.embedding.shape[1], decoder.head_dim
    return (
        len(shapes) == 1
        and min(map(min, (q, k, gate))) > 0
        and q[1] == k[1] == gate[1] == o[0] == down[0] == decoder.head.weight.shape[1] == width
        and (k, up) == (v, gate)
        and (q[0], gate[0]) == (o[1], down[1])
        and q[0] % size == k[0] % size == q[0] // size % (k[0] // size) == 0
    )


def _held(field: Any) -> Any:
    """The same tensor, or layer, in memory that stays for as long as this is held, whatever a parameter is set to."""
    if isinstance(field, Linear):
        return Linear(*map(_held, field))
    return field.detach() if isinstance(field, torch.Tensor) else field


class Program:
    """The passes of one decoder. It refers to the weights by their addresses, and holds the memory that they lie in."""

    def __init__(self, decoder: Decoder):
        layers = [Layer(*map(_held, layer)) for layer in decoder.layers]
        embedding, norm, head = map(_held, (decoder.embedding, decoder.norm, decoder.head))
        self.decoder = decoder = replace(decoder, layers=layers, embedding=embedding, norm=norm, head=head)
        self.head_dim = decoder.head_dim
        self._copies, self._turn = blocks.copies_of(_linears(decoder)), 0
        self._differ = blocks.comparison(self._copies, decoder.embedding.dtype) if len(self._copies) else None
        self.layers, first = len(decoder.layers), decoder.layers[0]
        self.key_heads = first.k.outputs // decoder.head_dim
        self._heads = first.q.outputs // decoder.head_dim
        self._outputs, self._intermediate = head.outputs, first.gate.outputs
        # What `smallest` has made stays while the model's tensors are let go.
        copied = [linear for linear in _linears(decoder) if linear.origin is not None]
        self._made = [(linear.weight, linear.scales, linear.offsets) for linear in copied]
        self._room = np.empty(0, np.uint8)
        self._rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}  # in the table, as are the `caches` of `run`
        self._positions = 0  # of those
        self._caches: Sequence[tuple[int, int, int]] = []
        self._layouts: dict[tuple[int, ...], tuple[int, dict[str, int], int]] = {}  # `_layout`, by its arguments
        self._table = np.zeros((len(decoder.layers), _PLACES["output"] + 1), np.int64)
        for row, layer in zip(self._table, decoder.layers, strict=True):
            matrices = [field for linear in layer[:7] for field in linear.matrix()]
            row[: _PLACES["cos"]] = matrices + [products.pointer(norm) for norm in layer[7:]]
        self._pass = _Pass(
            layers=self._table.ctypes.data,
            head=tuple(decoder.head.matrix()),
            embedding=decoder.embedding.data_ptr(),
            norm=decoder.norm.data_ptr(),
            layer_count=len(decoder.layers),
            hidden=decoder.embedding.shape[1],
            heads=self._heads,
            key_heads=self.key_heads,
            size=decoder.head_dim,
            intermediate=self._intermediate,
            norms_of_rows=first.q_norm is not None and len(first.q_norm) > decoder.head_dim,
            **{name: getattr(decoder, name) for name in _SETTINGS},
        )

    def run(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[tuple[int, int, int]],
        held: Sequence[int],
        hidden: Sequence[tuple[np.ndarray, Sequence[int]]],
        outputs: tuple[int, ...] = (),
        shown: int | None = None,
        likeliest: tuple[int, int, float] = (0, 0, 1.0),
        length: int | None = None,
        computed: int = 0,
        is_prompt: bool = False,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], bool, tuple[np.ndarray, np.ndarray] | None]:
        """Compute T rows, and append their keys and values to the caches. Return logits [1, shown, vocabulary]; the
        outputs that were asked for; whether a row has become NaN before the output layer; and the likeliest tokens.

        ids, positions: int64 [T].
        rotary: by name, cosines and sines of all positions, float32 [positions, rotary] each; another mapping whenever
        these have changed.
        caches: for each layer, the addresses of the first key and value that it shows, [key heads, .., head_dim], and
        how many numbers lie between two heads.
        held: for each layer, how many keys it shows before the T rows.
        hidden: which of the last keys each row must not see, bool [T, keys], and the layers of which this is true.
        outputs: layers whose output [1, T, hidden] is returned too, as transformers counts them: 0 is the embedding,
        and the last is the output of the final norm.
        shown: rows whose logits are computed, the last ones; default: all.
        likeliest: of how many of the rows that are shown the likeliest tokens are returned, from the first on; how
        many tokens; and the temperature. They are as `likeliest.likeliest` returns them: tokens and probabilities,
        [1, rows, tokens]; None for a decoder that divides its logits, and for more than MAX_COUNT tokens.
        length: positions before the step; default: before these rows.
        computed: rows of the same step, right before these, that other passes have computed.
        is_prompt: whether bits may depend on how many rows are computed together, which takes less time for many.
        Raises ValueError for a layer that there is not, and for tables of rotary embeddings that do not fit.
        """
        decoder, rows, table = self.decoder, len(ids), self._table
        if outputs and not 0 <= min(outputs) <= max(outputs) <= len(table):
            raise ValueError(f"outputs={outputs}: the model has the outputs 0 to {len(table)}")
        threads = torch.get_num_threads()
        length = int(positions[0]) if length is None else length
        for_each, parts = self._parts(rows, threads, rows + computed, length.bit_length())
        shown = rows if shown is None else shown
        logits = decoder.embedding.new_empty(1, shown, self._outputs)
        kept = {i: decoder.embedding.new_empty(1, rows, decoder.embedding.shape[1]) for i in outputs}
        said, count, temperature = likeliest
        count = min(count, self._outputs)
        if not 0 < count <= MAX_COUNT or decoder.logits_divisor != 1:
            said = count = 0
        tokens, probabilities = np.empty((1, said, count), np.int64), np.empty((1, said, count), np.float32)
        for name, part in _OUT.items():
            table[:, _PLACES[name] + products.OUT] = parts[part]
        if rotary is not self._rotary:
            self._turn_by(rotary)
        if max(positions.tolist()) >= self._positions:
            raise ValueError(f"the tables of the rotary embedding have only {self._positions} positions")
        self._attend_to(caches, held, hidden)
        table[:, _PLACES["output"]] = [products.pointer(kept.get(i)) for i in range(1, len(table) + 1)] if kept else 0
        now = self._pass
        now.ids, now.positions, now.head[products.OUT] = ids.ctypes.data, positions.ctypes.data, logits.data_ptr()
        for name in _PARTS:
            setattr(now, name, parts[name])
        now.first_hidden = kept[0].data_ptr() if 0 in kept else 0
        now.tokens, now.probabilities = tokens.ctypes.data, probabilities.ctypes.data
        now.length, now.keys_of_step, now.has_near = length, rows + computed, not is_prompt
        now.room_bytes, now.rows, now.shown, now.said, now.likeliest = for_each, rows, shown, said, count
        now.rotary, now.threads, now.temperature = next(iter(rotary.values()))[0].shape[1], threads, temperature
        has_nan = _kernels()[logits.dtype](ctypes.byref(now))
        if decoder.logits_divisor != 1:
            logits = logits / decoder.logits_divisor
        return logits, kept, bool(has_nan), (tokens, probabilities) if said else None

    def _attend_to(
        self,
        caches: Sequence[tuple[int, int, int]],
        held: Sequence[int],
        hidden: Sequence[tuple[np.ndarray, Sequence[int]]],
    ) -> None:
        """Write into the table which keys the rows of a pass see. Arguments as for `run`."""
        table = self._table
        if caches != self._caches:
            table[:, _PLACES["keys"] : _PLACES["held"]] = caches
            self._caches = caches
        table[:, _PLACES["held"]] = held
        for array, layers in hidden:
            rows_of = slice(None) if len(hidden) == 1 else layers
            table[rows_of, _PLACES["hidden"]], table[rows_of, _PLACES["masked"]] = array.ctypes.data, array.shape[1]

    def _parts(self, *layout: int) -> tuple[int, dict[str, int]]:
        """Make `_room` for a pass. Return the bytes that each thread needs for itself, and the addresses of parts.

        layout: arguments of `_layout`.
        """
        if layout not in self._layouts:
            self._layouts[layout] = self._layout(*layout)
        for_each, places, end = self._layouts[layout]
        if self._room.nbytes < end:
            self._room = np.empty(end + 64, np.uint8)
        address = -(-self._room.ctypes.data // 64) * 64
        return for_each, {name: address + place for name, place in places.items()}

    def let_go(self) -> None:
        """Hold no tensor but the copies that `smallest` has made, until `resume`."""
        nothing = self.decoder.embedding.new_empty(0)
        self.decoder = replace(self.decoder, layers=(), embedding=nothing, norm=nothing, head=Linear(nothing))
        self._tensors: list[torch.Tensor] = []

    def resume(self, embedding: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Hold the model's tensors again, which are where they were."""
        self.decoder, self._tensors = replace(self.decoder, embedding=embedding), tensors

    def is_stale(self, turn: int | None = None) -> bool:
        """Whether a copy that `smallest` has made differs from the weights, in one block of each matrix.

        Each time, another block is looked at. So a change of most weights is seen at once, others are seen by chance.
        turn: `blocks.ALL` looks at all of them.
        """
        self._turn += 1
        return self._differ is not None and self._differ(turn or self._turn, torch.get_num_threads())

    def can_turn_by(self, rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether `run` takes these tables."""
        tables = [table for pair in rotary.values() for table in pair]
        width = tables[0].shape[-1]
        is_served = width % 2 == 0 and 0 < width <= self.head_dim
        return is_served and all(
            table.ndim == 2 and table.shape[1] == width and products.is_plain_of(table, torch.float32)
            for table in tables
        )

    def _turn_by(self, rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not self.can_turn_by(rotary):
            raise ValueError("the tables of the rotary embedding do not fit the heads")
        tables = [table for pair in rotary.values() for table in pair]
        turned_by: dict[str | None, tuple[int, int]] = {None: (0, 0)}
        turned_by |= {name: (cos.data_ptr(), sin.data_ptr()) for name, (cos, sin) in rotary.items()}
        self._table[:, _PLACES["cos"] : _PLACES["keys"]] = [turned_by[name] for name in self.decoder.rotary]
        self._rotary, self._positions = rotary, min(map(len, tables))

    def _layout(self, rows: int, threads: int, keys_of_step: int, bits: int) -> tuple[int, dict[str, int], int]:
        """Return the bytes that each thread needs for itself, where the parts of `_room` begin, and where it ends.

        bits: of the positions before the step.
        """
        decoder, heads = self.decoder, self._heads
        itemsize, now = decoder.embedding.element_size(), self._pass
        width, intermediate = decoder.embedding.shape[1], self._intermediate
        of_heads, of_keys = heads * decoder.head_dim, self.key_heads * decoder.head_dim
        now.rows, now.threads, now.keys_of_step, now.length = rows, threads, keys_of_step, 2**bits
        found = (ctypes.c_long * 3)()
        _sizes()[decoder.embedding.dtype](ctypes.byref(now), found)
        for_each, of_peaks, most_parts = found
        parts = rows * heads * most_parts
        of_row = {
            "product": width,
            "q": of_heads,
            "attended": of_heads,
            "mlp": intermediate,
            "k": of_keys,
            "v": of_keys,
        }
        sizes = {name: itemsize * rows * n for name, n in of_row.items()}
        sizes |= {"largest": 4 * parts, "total": 4 * parts, "sums": 4 * parts * decoder.head_dim}
        sizes |= {"room": threads * for_each, "peaks": of_peaks}
        *places, end = accumulate([-(-size // 64) * 64 for size in sizes.values()], initial=0)
        return for_each, dict(zip(sizes, places, strict=True)), end


def can_move(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether `move_rows` takes these buffers."""
    first = buffers[0]
    shape, dtype = first.shape[1::2], first.dtype
    return torch.uint8 in _movers() and all(
        buffer.shape[1::2] == shape and len(buffer) == 1 and products.is_plain_of(buffer, dtype) for buffer in buffers
    )


def move_rows(buffers: Sequence[torch.Tensor], sources: np.ndarray, targets: np.ndarray) -> None:
    """Move rows of contiguous buffers [1, heads, .., head_dim] from columns ``sources`` to ``targets``, int64 [n].

    Both ascend, and no target lies behind its source. All buffers have the same heads, head_dim and dtype.
    """
    first = buffers[0]
    itemsize = first.element_size()
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    addresses = np.array([(buffer.data_ptr(), itemsize * buffer.stride(1)) for buffer in buffers], np.int64).T.copy()
    _movers()[torch.uint8](
        addresses[0].ctypes.data, addresses[1].ctypes.data, len(buffers), first.shape[1], itemsize * first.shape[3],
        sources.ctypes.data, targets.ctypes.data, len(sources),
    )  # fmt: skip
