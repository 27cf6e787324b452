"""A program over a cache whose keys and values have fixed places, in plain torch: what a CUDA graph captures.

Nothing in it depends on a number that the device has yet to find out, so that it never waits for the device.
"""

from collections.abc import Mapping
from functools import singledispatchmethod
from typing import ClassVar

import torch
from torch.nn import functional

from lookahead.compat import is_plain
from lookahead.compat.operators import flash_attention, grouped_products
from lookahead.cpu import operations as op
from lookahead.cpu.alibi import Alibi
from lookahead.cpu.elementwise import Clip, Scale, Xielu
from lookahead.cpu.experts import Experts, Weigh
from lookahead.cpu.heads import HeadProducts, Join, Select
from lookahead.cpu.products import Format, Linear
from lookahead.cpu.program import Program
from lookahead.cpu.reference import Reference
from lookahead.cpu.states import GatedNorm
from lookahead.models.split_attention import repeated_mask

PART = 256  # Columns; twice as many of a long context. With these, an H100 was quickest at 16 rows.
LONG_CONTEXT = 2048


class StaticPass(Reference):
    """One pass over T rows in the program's dtype. It is launched operation by operation, or replayed as a graph.

    RMS norms are torch's own kernel, which rounds once.
    """

    serves: ClassVar[tuple[type[op.Operation], ...]] = (
        op.Embed, op.Norm, op.Products, Select, HeadProducts, Join, op.Rotary, op.Append, op.Attend, op.Gate,
        Clip, Xielu, Experts, Weigh, Scale, op.Add, op.Keep, op.Logits,
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        columns: torch.Tensor,
        hidden: Mapping[int, torch.Tensor],
        wanted: tuple[int, ...] = (),
    ):
        """Other arguments as for `Reference`.

        caches: by layer, the columns of keys and values that are shown, [key heads, shown, head size]; those of the
        rows are written to. columns: of the rows, int64 [T]. hidden: by layer, which columns each row must not see,
        bool [T, shown]; layers of one kind have the same tensor. wanted: numbers of the outputs that are kept.
        """
        self.wanted = wanted
        self.columns = columns
        self.masks: dict[int, torch.Tensor] = {}
        """Additive, by the identity of a tensor of `hidden`."""
        super().__init__(program, ids, positions, rotary, caches, hidden, wide=program.dtype)

    @singledispatchmethod
    def computed(self, operation: op.Operation) -> torch.Tensor | None:
        return super().computed(operation)

    @computed.register
    def _(self, norm: op.Norm) -> torch.Tensor | None:
        if norm.is_centered or norm.offset:
            return super().computed(norm)
        x = self.heads(norm.x, norm.size)
        return functional.rms_norm(x, (norm.size,), norm.weight, norm.epsilon).flatten(1)

    @computed.register
    def _(self, keep: op.Keep) -> None:
        if keep.index in self.wanted:
            self.outputs[keep.index] = self.values[keep.x]

    @computed.register
    def _(self, append: op.Append) -> None:
        pairs = (append.keys, append.size), (append.values, append.value_size)
        for held, (x, size) in zip(self.caches[append.layer], pairs, strict=True):
            held.index_copy_(1, self.columns, self.heads(x, size).transpose(0, 1))

    @computed.register
    def _(self, attend: op.Attend) -> torch.Tensor | None:
        is_usual = attend.size == attend.value_size and not attend.cap and attend.sinks is None
        if attend.is_latent or not is_usual:
            return super().computed(attend)
        queries = self.heads(attend.x, attend.size).transpose(0, 1)
        keys, values = self.caches[attend.layer]
        mask = self.mask(self.hidden[attend.layer])
        return attend_in_parts(queries[None], keys[None], values[None], mask, attend.scaling).flatten(2)[0]

    def mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """An additive mask, [1, 1, T, shown]. All layers of a kind have the same."""
        if id(hidden) not in self.masks:
            mask = torch.zeros_like(hidden, dtype=self.dtype)
            least = torch.finfo(self.dtype).min / 2  # kernels scale it: the least number would overflow
            self.masks[id(hidden)] = mask.masked_fill_(hidden, least)[None, None]
        return self.masks[id(hidden)]

    def mixed(self, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each choice of a row is a row of its own here. They are sorted by expert, so that experts are read once."""
        order = chosen.flatten().argsort(stable=True)
        of_rows = chosen.flatten()[order]
        groups = torch.arange(experts.count, device=order.device)
        stops = torch.searchsorted(of_rows, groups, right=True).to(torch.int32)

        def product(x: torch.Tensor, linears: tuple[Linear, ...]) -> torch.Tensor:
            stacked = together(linears)
            assert stacked is not None  # as `why_not` has found
            found = grouped_products(x, stacked.mT, stops)
            biases = [one.bias for one in linears if one.bias is not None]
            return found + torch.stack(biases)[of_rows] if biases else found

        rows = self.values[experts.x][order // experts.top_k]
        taken, given = experts.weighed(rows, weights.flatten()[order, None])
        inner = self.within(experts, product(self.rounded(taken), experts.experts[::2]))
        weighed = self.rounded(product(inner, experts.experts[1::2]) * given)
        by_choice = torch.empty_like(weighed).index_copy_(0, order, weighed)
        return by_choice.unflatten(0, (-1, experts.top_k)).sum(1)


def attend_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Compute the attention of a step of one sequence. Arguments and result are as for `attention.attend`.

    A step has too few queries to occupy a GPU. So columns are computed in parts, all at once (flash decoding: Dao et
    al. 2023, pytorch.org/blog/flash-decoding).
    """
    heads, columns = key.shape[1:3]
    groups, part = query.shape[1] // heads, PART if columns <= LONG_CONTEXT else 2 * PART
    parts = columns // part if columns % part == 0 else 1
    grouped = query.reshape(heads, 1, groups * query.shape[2], -1).expand(-1, parts, -1, -1)
    keys, values = (states[0].unflatten(1, (parts, -1)) for states in (key, value))
    repeated = repeated_mask(mask, groups, 0, query.dtype)[0, 0].unflatten(1, (parts, -1)).transpose(0, 1)
    out, log_sums = flash_attention(grouped, keys, values, repeated.expand(heads, -1, -1, -1), scaling)
    out = (out * log_sums.softmax(1)[..., None]).sum(1).to(query.dtype)
    return out.reshape(query.shape).transpose(1, 2).contiguous()


def together(linears: tuple[Linear, ...]) -> torch.Tensor | None:
    """The weights of these layers as one tensor [layers, outputs, inputs], not a copy; None if they lie apart."""
    weights = [linear.weight for linear in linears]
    places = [weight.storage_offset() for weight in weights]
    first, step = weights[0], places[1] - places[0] if len(places) > 1 else 0
    alike = {(one.untyped_storage().data_ptr(), one.shape, one.stride()) for one in weights}
    if len(alike) > 1 or places != [places[0] + i * step for i in range(len(places))]:
        return None
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


def why_not(program: Program) -> str | None:
    """Say why `StaticPass` cannot run this program; None if it can."""
    for one in program.operations:
        has_identities = isinstance(one, Experts) and one.identities > 0
        if isinstance(one, (Alibi, GatedNorm)) or has_identities or not isinstance(one, StaticPass.serves):
            return f"no graph computes its {type(one).__name__.lower()}"
        if isinstance(one, Experts) and (one.is_apart or None in map(together, (one.experts[::2], one.experts[1::2]))):
            return "the weights of its experts are not contiguous"
    if not all(one.shapes_fit() for one in program.operations):
        return "the shapes of its weights do not fit"
    wide = {id(tensor) for one in program.operations for tensor in one.wide()}
    narrow = [tensor for tensor in program.tensors if id(tensor) not in wide]
    is_of_floats = all(linear.format == Format.FLOATS for linear in program.linears)
    if not is_of_floats or {tensor.dtype for tensor in narrow} != {program.dtype}:
        return "its weights are not all of one dtype"
    if not all(map(is_plain, program.tensors)):
        return "some of its weights are not plain tensors"
    if len({tensor.device for tensor in program.tensors}) > 1:
        return "it is on several devices"
    return None
