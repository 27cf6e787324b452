"""Runs a program in one call: `executor.cpp`.

A layer has a dozen small operations. On a CPU, calling them one by one takes as long as computing them. Here one call
computes all of them, and its threads wait at a spinning barrier. Weights are read in place or from the packed copy
(`blocks`).
"""

import ctypes
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lookahead.cpu import blocks, native, pages, products
from lookahead.cpu import operations as op
from lookahead.cpu.products import Format, Linear, pointer
from lookahead.cpu.program import Program
from lookahead.cpu.top_k import MAX_COUNT

if TYPE_CHECKING:
    from lookahead.cpu.states import Pending, Places

_kernels = cache(partial(native.kernels, "run", native.FLOATS, [ctypes.c_void_p], ctypes.c_long))
_sizes = cache(partial(native.kernels, "sizes", native.FLOATS, [ctypes.c_void_p] * 2))
_describe = cache(partial(native.kernels, "describe", (torch.uint8,), [], ctypes.c_char_p))
_MOVES = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p] * 2 + [ctypes.c_long]
_movers = cache(partial(native.kernels, "move_rows", (torch.uint8,), _MOVES))  # one, which moves any dtype
SHARED_BY = 8  # numbers of rows that share one layout, because making one takes 0.1 ms


class _Described(NamedTuple):
    """The limits and structures of executor.cpp, as it describes them itself."""

    limits: dict[str, int]
    kinds: dict[str, int]
    activations: dict[str, int]
    operation: np.dtype
    cached: np.dtype
    sequence: np.dtype
    rotary_table: np.dtype
    arguments: type[ctypes.Structure]


@cache
def _described() -> _Described:
    text = _describe()[torch.uint8]().decode()
    of = {name: fields.strip(",").split(",") for name, fields in (part.split(":") for part in text.split(";"))}

    def fields(name: str, of_double: Any, of_others: Any) -> list[tuple[str, Any]]:
        pairs = (field.split("|") for field in of[name])
        return [(field, of_double if kind == "double" else of_others) for kind, field in pairs]

    def dtype(name: str) -> np.dtype:
        return np.dtype(fields(name, np.float64, np.int64))

    return _Described(
        {name: int(value) for name, value in (limit.split("|") for limit in of["Limit"])},
        {name: i for i, name in enumerate(of["Kind"])},
        {name: i for i, name in enumerate(of["Activation"])},
        dtype("Operation"),
        dtype("Cached"),
        dtype("Sequence"),
        dtype("RotaryTable"),
        type("Pass", (ctypes.Structure,), {"_fields_": fields("Pass", ctypes.c_double, ctypes.c_int64)}),
    )


def serves(program: Program) -> bool:
    """Whether this processor's `Executor` supports this program."""
    if program.dtype not in _kernels() or not program.shapes_fit():
        return False
    return all(operation.within_limits(_described().limits) for operation in program.operations)


def pack(program: Program, known: dict[int, tuple[Hashable, Linear]], indexes: bool) -> Program:
    """The same program with packed weights, if these give exactly the same products (`blocks.pack`).

    known: layers packed in earlier calls, by number: the format of the weight, and the packed layer. Linear layers that
    read the same memory share a number. If weights have changed since, a new copy replaces the old one, which calls in
    other threads continue to read.
    indexes: whether bf16 may be packed in 12 bits.
    """
    memory, dtype, places = pages.HugePages(), program.dtype, count()
    place_of: dict[tuple, int] = {}

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else memory.copy(tensor)

    def smaller(linear: Linear) -> Linear:
        place = place_of.setdefault(_memory_of(linear), next(places))
        form = dtype, indexes, linear.format, *map(_form_of, (linear.weight, linear.scales))
        known_form, before = known.get(place, (None, None))
        if known_form != form:
            before = None
        found = blocks.pack(linear, dtype, before, indexes)
        if found is not linear:
            if before is None or found.weight is not before.weight:
                weight, scales, _, offsets, *_ = found
                found = found._replace(weight=memory.copy(weight), scales=copied(scales), offsets=copied(offsets))
            known[place] = form, found._replace(bias=None, unpacked=None, origin=None)  # none of the model's tensors
        else:
            known.pop(place, None)
        return found

    return program.with_linears(smaller)


def _memory_of(linear: Linear) -> tuple:
    """The addresses of its weight and scales."""
    weight = linear.weight
    return weight.data_ptr(), weight.shape, weight.stride(), pointer(linear.scales)


def _form_of(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())


def weight_bytes(program: Program) -> int:
    """Bytes of the weights that a pass multiplies with."""
    return sum(linear.weight.nbytes for linear in program.linears)


def bytes_to_copy(program: Program) -> int:
    """Estimated bytes of a copy in which `pack` has packed all bf16 weights that it can, and transposed ones as
    rows."""
    of_number = 1.5 if blocks.can_index(dtype := program.dtype) else 0
    found = {_memory_of(linear): linear for linear in program.linears if linear.format == Format.FLOATS}.values()
    return int(sum(one.weight.nbytes if one.is_transposed(dtype) else of_number * one.weight.numel() for one in found))


def can_digest(linear: Linear, dtype: torch.dtype) -> bool:
    """Whether a pass can compute the digest of this layer's weight: floats, in rows of complete vectors."""
    is_read = linear.format == Format.FLOATS and linear.weight.is_contiguous()
    return is_read and linear.weight.shape[1] * dtype.itemsize % (8 * blocks.DIGEST_LANES) == 0


class _Buffer:
    """A buffer for values while a program runs: one for each thread, or one that all threads share."""

    def __init__(self, is_private: bool):
        self.is_private = is_private
        self.width = 0  # of the widest value
        self.used: list[tuple[op.Part, bool]] = []  # since the last barrier: by which parts, and whether it was written


class _Buffers:
    """The buffers of a program, and the operations that need a barrier before them.

    Sums and norms of hidden states are private, so every thread computes them; everything else is shared. A value
    reuses the buffer of one that is no longer read: in place if the operation supports that, or a buffer that no thread
    has used since the last barrier.
    """

    def __init__(self, program: Program):
        self.all: list[_Buffer] = []
        """The private ones first."""
        self.buffer_of: dict[op.Value, _Buffer] = {}
        self.temporary: dict[op.Operation, list[_Buffer]] = {}
        """Temporary buffers of operations."""
        self._itemsize = program.dtype.itemsize
        self.meets: list[bool] = []
        """For each operation, whether there is a barrier before it."""
        parts = [(operation, operation.part) for operation in program.operations]
        self._gated = {x for operation, part in parts if part and part[0] == "outputs" for x in operation.values_read()}
        self._last = program.last_reads
        self._free: list[_Buffer] = []
        for i, operation in enumerate(program.operations):
            self._place(i, operation)
        self.all.sort(key=lambda buffer: not buffer.is_private)

    def is_each_shared(self, operation: op.Operation) -> bool:
        """Whether each product is divided separately, because a gate or the like uses the same outputs."""
        return isinstance(operation, op.Products) and self._gated.issuperset(operation.outs)

    def _place(self, i: int, operation: op.Operation) -> None:
        """Find the buffers of an operation's results, and whether it needs a barrier."""
        part, is_private = operation.part, operation.is_private
        if self.is_each_shared(operation):
            part = "outputs", operation.values_written()[0].width
        reads = [self.buffer_of[value] for value in operation.values_read()]
        dying = [self.buffer_of[value] for value in dict.fromkeys(operation.values_read()) if self._last[value] == i]
        outs = []
        if operation.works_in_place:
            outs = [buffer for buffer in dying if buffer.is_private == is_private][:1]
        meets = any(_conflict(buffer, part, writes=False) for buffer in reads)
        meets = meets or any(_conflict(buffer, part, writes=True) for buffer in outs)
        meets = meets or isinstance(operation, op.Attend)  # whose threads take items in turn
        if meets:
            for buffer in self.all:
                buffer.used.clear()
        self.meets.append(meets)
        outs += [self._allocated(is_private, value.width) for value in operation.values_written()[len(outs) :]]
        self.buffer_of |= zip(operation.values_written(), outs, strict=True)
        self._place_temporary(operation)
        for writes, buffers in ((False, reads), (True, outs)):
            for buffer in buffers:
                if not buffer.is_private:
                    buffer.used.append((part, writes))
        unread = [self.buffer_of[value] for value in operation.values_written() if value not in self._last]
        self._free += [buffer for buffer in dying if buffer not in outs] + unread

    def _allocated(self, is_private: bool, width: int) -> _Buffer:
        """Return a free or a new buffer for this many numbers of a row."""
        found = next((one for one in self._free if one.is_private == is_private and not one.used), None)
        if found is None:
            found = _Buffer(is_private)
            self.all.append(found)
        else:
            self._free.remove(found)
        found.width = max(found.width, width)
        return found

    def _place_temporary(self, operation: op.Operation) -> None:
        """Find the temporary buffers of an operation."""
        widths = operation.widths_beside(self._itemsize, _described().limits)
        private, shared = ([self._allocated(i == 0, width) for width in of] for i, of in enumerate(widths))
        for buffer in shared:
            buffer.used.append((None, True))
        if private or shared:
            self.temporary[operation] = private + shared
            self._free += private + shared


def _conflict(buffer: _Buffer, part: op.Part, writes: bool) -> bool:
    """Whether a thread may read or overwrite what another thread has written or read since the last barrier."""
    return any((writes or wrote) and (part is None or part != other) for other, wrote in buffer.used)


class Rows(NamedTuple):
    """The T rows of one sequence in a pass, and its cache."""

    ids: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]."""
    caches: Sequence[tuple[int, int, int, int]]
    """For each layer, the addresses of the first key and value that it shows, [key heads, .., head size], and how many
    numbers lie between two heads of each."""
    held: Sequence[int]
    """For each layer, how many keys it shows before the T rows."""
    hidden: Sequence[tuple[np.ndarray | None, Sequence[int]]]
    """Which of the last keys each row must not see, bool [T, keys], and the layers of which this is true. None: the
    keys of later rows, and no others."""
    length: int
    """Positions before the step."""
    computed: int = 0
    """Rows of the same step, right before these, that other passes have computed."""
    temperature: float = 1.0
    """Of the probabilities of the top-k tokens."""
    parents: np.ndarray | None = None
    """The parent of each row among the rows, or -1: int64 [T]. Layers that keep a state need it."""
    states: Sequence["Places"] = ()
    """For each layer that keeps a state, in their order."""


class Crew:
    """Chooses how many threads compute a pass: torch's number, or fewer while other programs keep processors busy.

    If one thread has no processor, all wait for it at the next barrier. So if it loses the share f of a pass, the pass
    takes at least 1 / (1 - f) as long, while n - 1 instead of n threads would take at most n / (n - 1) as long: they
    are faster if f > 1 / n.
    """

    PASSES = 32
    """Passes after which one more thread is tried again: a pass that then takes twice as long costs a thirtieth."""
    ENOUGH = 0.75
    """A share of 1 / n, because passes take less than n / (n - 1) as long: they also wait for memory."""

    def __init__(self) -> None:
        self._most = self._now = 0
        self._lost = 0.0  # of the last passes, the last one counting half
        self._left = 0

    def size(self) -> int:
        """Return the number of threads for the next pass."""
        if (most := torch.get_num_threads()) != self._most:
            self._most = self._now = most
            self._lost = 0.0
        return self._now

    def follow(self, lost: float) -> None:
        """lost: the largest share of the last pass in which a thread wanted a processor and had none."""
        self._lost = (self._lost + lost) / 2
        if self._now > 1 and self._lost > self.ENOUGH / self._now:
            self._now, self._lost, self._left = self._now - 1, 0.0, self.PASSES
        elif self._now < self._most:
            self._left -= 1
            if self._left <= 0:
                self._now += 1
                self._lost, self._left = self.ENOUGH / self._now, self.PASSES


class _Layout(NamedTuple):
    """The memory layout of a pass of this many rows, in bytes."""

    for_each: int
    """The private memory of each thread."""
    private: int
    """The private buffers of it."""
    parts: dict[str, int]
    """Where the parts of the room begin, by their names in C++."""
    size: int
    """Of the room."""
    places: np.ndarray
    """Of all buffers in theirs, int64 [buffers]."""


class Executor:
    """Runs the passes of one program. It refers to tensors by their addresses, and keeps their memory alive."""

    def __init__(self, program: Program, digested: Container[int] = ()):
        """digested: numbers of the linear layers whose digests a pass computes (`can_digest`)."""
        self.digests = np.zeros((len(program.linears), blocks.DIGEST_LANES), np.uint64)
        """Of the weights of those, as the last pass has read them."""
        self._tensors = [tensor.detach() for tensor in program.tensors]
        self._copies, self._turn = blocks.copies_of(program.linears), 0
        self._differ = blocks.comparison(self._copies, program.dtype) if len(self._copies) else None
        # Packed copies stay while the model's tensors are released.
        copied = [linear for linear in program.linears if linear.origin is not None]
        self._origins = blocks.memory_of(linear.origin for linear in copied if linear.origin is not None)
        self._digests = [linear.digest for linear in copied]
        self._made = [(linear.weight, linear.scales, linear.offsets) for linear in copied]
        self.caches, self.rotaries, self.positions = program.caches, program.rotaries, program.positions
        self.states, self.layers = program.states, 1 + max([*program.caches, *program.states], default=-1)
        self.vocabulary, self.like = program.vocabulary, torch.empty(0, dtype=program.dtype, device="cpu")
        self._kept = {one.index: one.x.width for one in program.operations if isinstance(one, op.Keep)}
        self.outputs = len(self._kept)
        logits = program.operations[-1]
        assert isinstance(logits, op.Logits)
        self._logits = logits.linear.outputs
        self._divisor, self._factor, self._cap = logits.divisor, logits.factor, logits.cap
        self._scales = (logits.divisor, logits.factor, logits.cap) != (1, 1, 0)
        self._crew = Crew()
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # by the arguments of `_layout`
        described = _described()
        self.most_columns = described.limits["MOST_TAPS"]
        """Inputs that a state may hold of each channel."""
        buffers = _Buffers(program)
        self._widths = {kind: [one.width for one in buffers.all if one.is_private == kind] for kind in (True, False)}
        self._attends = [one for one in program.operations if isinstance(one, op.Attend)]
        self._operations = np.zeros(len(program.operations), described.operation)
        addresses = self.digests.ctypes.data + self.digests.strides[0] * np.arange(len(self.digests))
        self._products = self._lay_out(program, buffers, [int(a) * (i in digested) for i, a in enumerate(addresses)])
        self._cached = np.zeros((0, self.layers), described.cached)  # by sequence and layer
        self._places: list[Sequence[tuple[int, int, int, int]]] = []  # the `Rows.caches` that stand in `_cached`
        self._rotary_tables = np.zeros(len(self.rotaries), described.rotary_table)
        self._rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}  # in these tables
        self._rotated = 0  # positions of those
        self._outputs = np.zeros(self.outputs, np.int64)
        inputs = [linear.inputs for linear in program.linears]
        self._pass = described.arguments(
            operations=self._operations.ctypes.data,
            operation_count=len(self._operations),
            layers=self.layers,
            rotaries=self._rotary_tables.ctypes.data,
            outputs=self._outputs.ctypes.data,
            private_count=len(self._widths[True]),
            widest=max(inputs),
            state_keys=max((shape.keys for shape in self.states.values()), default=0),
        )

    def _lay_out(self, program: Program, buffers: _Buffers, digests: list[int]) -> list[np.ndarray]:
        """Fill in the operations of C++. Return the arrays that they refer to. digests: addresses, or 0.

        Fields with the same name in C++ and `operations` are copied; the others are set here.
        """
        described, kept = _described(), list[np.ndarray]()
        places = {buffer: i for i, buffer in enumerate(buffers.all)}
        names = described.operation.names or ()

        def number(value: op.Value) -> int:
            return places[buffers.buffer_of[value]]

        def address(numbers: np.ndarray) -> int:
            kept.append(numbers)
            return numbers.ctypes.data

        multiplying = -1  # the operation that multiplies next; after experts, only the pass itself finds which weights
        for i in reversed(range(len(program.operations))):
            now, operation = self._operations[i], program.operations[i]
            of_digests = [digests.pop() for _ in operation.linears][::-1]
            settings: dict[str, Any] = {name: getattr(operation, name) for name in names if hasattr(operation, name)}
            settings |= {"width": operation.x.width} if hasattr(operation, "x") else {}
            settings |= {"kind": type(operation).__name__.upper()} | operation.cpp_fields()
            if isinstance(operation, op.Rotary):
                settings["index"] = list(self.rotaries).index(operation.name)
            elif isinstance(operation, (op.Products, op.Logits)):
                outs = [number(out) for out in operation.values_written()] or [-1]
                matrices = [linear.matrix() for linear in operation.linears]
                matrices = [(*m, *to) for m, *to in zip(matrices, outs, of_digests, strict=True)]
                settings |= {"products": np.array(matrices, np.int64), "count": len(matrices)}
                settings["is_each_shared"] = buffers.is_each_shared(operation)
            if temporary := buffers.temporary.get(operation):
                settings["temporary"] = np.array([places[buffer] for buffer in temporary], np.int64)
            now["kind"], now["meets"] = described.kinds[settings.pop("kind")], buffers.meets[i]
            now["next"], now["y"], now["out"] = multiplying, -1, -1
            for name, value in settings.items():
                match value:
                    case op.Value():
                        now[name] = number(value)
                    case torch.Tensor():
                        now[name] = value.data_ptr()
                    case np.ndarray():
                        now[name] = address(value)
                    case list():
                        now[name] = address(np.array(list(map(number, value)), np.int64))
                    case str():
                        now[name] = described.activations[value.upper()]
                    case bool() | int() | float():
                        now[name] = value
            if operation.linears:
                multiplying = i if operation.reads_all_weights else -1
        return kept

    def run(
        self,
        sequences: Sequence[Rows],
        rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        outputs: tuple[int, ...] = (),
        shown: int | None = None,
        top_k: tuple[int, int] = (0, 0),
        is_prompt: bool = False,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], bool, tuple[np.ndarray, np.ndarray] | None]:
        """Compute the rows of all sequences, and append their keys and values to the caches.

        Return logits [shown, vocabulary]; the requested outputs; whether a row has become NaN before the
        lm_head; and the top-k tokens. Rows are in the order of the sequences.

        rotary: by name, cosines and sines of all positions, float32 [positions, rotary] each; another mapping whenever
        these have changed.
        outputs: numbers of the outputs (`operations.Keep`) that are returned too, [rows, hidden] each.
        shown: rows whose logits are computed, the last ones; default: all.
        top_k: (n, k): the top k tokens of each of the first n rows that are shown, as `top_k.top_k` returns them:
            tokens and probabilities, [n, k]; None for a program that scales its logits, and for k above MAX_COUNT.
        is_prompt: whether rows may be rounded differently from those of steps, which takes less time for many rows.
        Raises ValueError for an unknown output, and for tables of rotary embeddings that do not fit.
        """
        if outputs and not 0 <= min(outputs) <= max(outputs) < self.outputs:
            raise ValueError(f"outputs={outputs}: the model has the outputs 0 to {self.outputs - 1}")
        like, threads, ids, positions = self.like, self._crew.size(), sequences[0].ids, sequences[0].positions
        if len(sequences) > 1:
            ids, positions = (np.concatenate([one[i] for one in sequences]) for i in (0, 1))
        rows, table = self._attend_to(sequences), self._sequences
        most_keys, longest = max(table["keys_of_step"].tolist()), max(table["length"].tolist())
        layout, parts = self._parts(rows, threads, most_keys, longest.bit_length())
        shown = rows if shown is None else shown
        logits, kept = like.new_empty(shown, self._logits), {i: like.new_empty(rows, self._kept[i]) for i in outputs}
        said, count = top_k[0], min(top_k[1], self._logits)
        if not 0 < count <= MAX_COUNT or self._scales:
            said = count = 0
        tokens, probabilities = np.empty((said, count), np.int64), np.empty((said, count), np.float32)
        if rotary is not self._rotary:
            self._rotate_by(rotary)
        most = min(self._rotated if self.rotaries else 2**62, self.positions or 2**62)
        if max(positions.tolist()) >= most:
            raise ValueError(f"the tables of positions have only {most} of them")
        if self.outputs:
            self._outputs[:] = [pointer(kept.get(i)) for i in range(self.outputs)] if kept else 0
        now = self._pass
        now.ids, now.positions, now.places = ids.ctypes.data, positions.ctypes.data, layout.places.ctypes.data
        if self.states:
            parents = np.concatenate([one.parents for one in sequences])  # type: ignore[misc]  # each has some
            now.parents = parents.ctypes.data
        for name, address in parts.items():
            setattr(now, name, address)
        now.sequences, now.sequence_count, now.caches = table.ctypes.data, len(sequences), self._cached.ctypes.data
        now.logits, now.tokens, now.probabilities = logits.data_ptr(), tokens.ctypes.data, probabilities.ctypes.data
        now.longest, now.most_keys, now.has_near = longest, most_keys, not is_prompt
        now.room_bytes, now.private_bytes, now.rows, now.shown = layout.for_each, layout.private, rows, shown
        lost = np.zeros(threads)
        now.said, now.top_k, now.threads, now.lost = said, count, threads, lost.ctypes.data
        self.digests[:] = 0
        has_nan = _kernels()[like.dtype](ctypes.byref(now))
        self._crew.follow(max(lost.tolist()))
        if self._scales:
            logits = self._scaled(logits)
        return logits, kept, bool(has_nan), (tokens, probabilities) if said else None

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """`operations.Logits`, except for the product."""
        if self._divisor != 1:
            logits = logits / self._divisor
        if self._factor != 1:
            logits = logits * self._factor
        return (logits / self._cap).tanh() * self._cap if self._cap else logits

    def _attend_to(self, sequences: Sequence[Rows]) -> int:
        """Fill in the addresses of each sequence's rows, and which keys they see. Return the number of all rows."""
        count, start, described = len(sequences), 0, _described()
        if len(self._cached) < count:
            self._cached, self._places = np.zeros((count, self.layers), described.cached), [[]] * count
            for layer, shape in self.states.items():
                for name, value in shape.cpp_fields().items():
                    self._cached[:, layer][name] = value
        found = []
        for b, one in enumerate(sequences):
            table, rows = self._cached[b], len(one.ids)
            if max(one.held, default=0) > one.length + one.computed:  # of which blocks would begin before the first
                raise RuntimeError(f"a cache holds {max(one.held)} keys of {one.length + one.computed} positions")
            found.append((start, rows, one.length, rows + one.computed, one.temperature))
            start += rows
            if one.caches != self._places[b]:
                places = zip(*one.caches, strict=True)
                table["keys"], table["values"], table["key_stride"], table["value_stride"] = places
                self._places[b] = one.caches
            table["held"] = one.held
            for array, layers in one.hidden:
                rows_of = slice(None) if len(one.hidden) == 1 else layers
                covered = (0, 0) if array is None else (array.ctypes.data, array.shape[1])
                table["hidden"][rows_of], table["masked"][rows_of] = covered
            for layer, state in zip(self.states, one.states, strict=True):
                for name, value in state.cpp_fields().items():
                    table[name][layer] = value
        self._sequences = np.array(found, described.sequence)
        return start

    def pending(self, b: int, held: object) -> "Pending":
        """Return the state updates of the last pass for sequence b. held: the memory of its `Places`."""
        from lookahead.cpu.states import Pending  # other programs have no states

        return Pending(self.like.dtype, self._cached[b].copy(), held)

    def _parts(self, rows: int, threads: int, most_keys: int, bits: int) -> tuple["_Layout", dict[str, int]]:
        """Make `_room` for a pass. Return its layout, and the addresses of the parts by their names in C++.

        Arguments as for `_layout`, which a pass of a few rows more can share.
        """
        layout = rows + -rows % SHARED_BY, threads, most_keys + -most_keys % SHARED_BY, bits
        if layout not in self._layouts:
            self._layouts[layout] = self._layout(*layout)
        found = self._layouts[layout]
        if self._room.nbytes < found.size:
            self._room = pages.empty(found.size, torch.uint8)
        address = self._room.data_ptr()
        return found, {name: address + place for name, place in found.parts.items()}

    def _layout(self, rows: int, threads: int, most_keys: int, bits: int) -> "_Layout":
        """most_keys: of a step. bits: of the most positions before a step."""
        now, of_row = self._pass, self.like.element_size() * rows
        (*private, of_private), (*shared, of_shared) = (
            places_of(of_row * width for width in self._widths[kind]) for kind in (True, False)
        )
        now.rows, now.threads, now.most_keys, now.longest = rows, threads, most_keys, 2**bits
        now.private_bytes = of_private
        found = (ctypes.c_long * 3)()
        _sizes()[self.like.dtype](ctypes.byref(now), found)
        for_each, of_tops, most_parts = found
        of_heads = max((one.out.width for one in self._attends), default=0)
        queries = max((one.heads for one in self._attends), default=0)
        of_parts = 4 * rows * most_parts
        sizes = {"shared": of_shared, "room": threads * for_each, "tops": of_tops, "sums": of_parts * of_heads}
        sizes |= {"largest": of_parts * queries, "total": of_parts * queries}
        *starts, size = places_of(sizes.values())
        parts = dict(zip(sizes, starts, strict=True))
        return _Layout(for_each, of_private, parts, size, np.array([*private, *shared], np.int64))

    def let_go(self) -> None:
        """Release all tensors except packed copies, until `resume`."""
        self._tensors = []

    def resume(self, tensors: list[torch.Tensor]) -> None:
        """Hold the model's tensors again, whose addresses have not changed."""
        self._tensors = tensors

    def is_stale(self, part: int = 0, parts: int = 1) -> bool:
        """Whether a packed copy differs from the weights in one block of each matrix.

        Each call checks another block. So a change of most weights is noticed at once, other changes by chance.
        part: which part of how many parts of the matrices to check.
        """
        self._turn += 1
        return self._differ is not None and self._differ(self._turn * parts + part, parts)

    def has_changed(self) -> bool:
        """Whether any packed weight has changed. This takes as long as reading all of them."""
        return blocks.digests(self._origins).tobytes() != b"".join(digest or b"" for digest in self._digests)

    def can_rotate_by(self, rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether `run` supports these tables."""
        return all(
            table.ndim == 2
            and table.shape == pair[0].shape
            and table.shape[1] % 2 == 0
            and 0 < table.shape[1] <= self.rotaries.get(name, table.shape[1])
            and products.is_plain_of(table, torch.float32)
            for name, pair in rotary.items()
            for table in pair
        )

    def _rotate_by(self, rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not self.can_rotate_by(rotary):
            raise ValueError("the tables of the rotary embedding do not fit the heads")
        pairs = [rotary[name] for name in self.rotaries]
        for row, (cos, sin) in zip(self._rotary_tables, pairs, strict=True):
            row["cos"], row["sin"], row["width"] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        self._rotary, self._rotated = rotary, min((len(cos) for cos, _ in pairs), default=0)


def places_of(sizes: Iterable[int]) -> list[int]:
    """The starts of consecutive parts of these sizes in bytes, and the end of the last one."""
    return list(accumulate((-(-size // pages.ALIGNMENT) * pages.ALIGNMENT for size in sizes), initial=0))


def can_move(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether `move_rows` supports these buffers."""
    first = buffers[0]
    shape, dtype = first.shape[1::2], first.dtype
    return torch.uint8 in _movers() and all(
        buffer.shape[1::2] == shape and len(buffer) == 1 and products.is_plain_of(buffer, dtype) for buffer in buffers
    )


def move_rows(buffers: Sequence[torch.Tensor], sources: np.ndarray, targets: np.ndarray) -> None:
    """Move rows of contiguous buffers [1, heads, .., head_dim] from columns ``sources`` to ``targets``, int64 [n].

    Both ascend, and no target lies beyond its source. All buffers have the same heads, head_dim and dtype.
    """
    first = buffers[0]
    itemsize = first.element_size()
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    addresses = np.array([(buffer.data_ptr(), itemsize * buffer.stride(1)) for buffer in buffers], np.int64).T.copy()
    _movers()[torch.uint8](
        addresses[0].ctypes.data, addresses[1].ctypes.data, len(buffers), first.shape[1], itemsize * first.shape[3],
        sources.ctypes.data, targets.ctypes.data, len(sources),
    )  # fmt: skip
