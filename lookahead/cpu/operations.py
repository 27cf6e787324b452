"""The operations of a pass. Each computes values from others; a value is [rows, width].

An operation has the current settings and weights of its own module. All tensors except quantized weights and `wide`
ones have one dtype, and every operation rounds its result to it. Operations that few families need are in separate
modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from lookahead.cpu.products import Format, Linear, is_plain_of

if TYPE_CHECKING:
    from lookahead.cpu.states import StateShape

LANES = 16
"""Numbers of the longest vector."""
MAX_HEAD_DIM = 576  # MAX_SIZE in attention.h
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_new", "gelu_bloom", "relu", "relu_squared", "sigmoid", "tanh", "softplus",
    "identity",
]  # fmt: skip
"""gelu_tanh: GELU as approximated by tanh. gelu_new: the same, rounded at each step of the formula; gelu_bloom: of
Bloom's form of it."""
Part = tuple[Literal["outputs", "heads"], int] | None
"""How threads divide an operation: each computes some of this many outputs or heads. In operations with an equal Part,
a thread has the same part. None: any thread may compute any part."""


@dataclass(frozen=True, eq=False)
class Value:
    """[rows, width]."""

    width: int


@dataclass(frozen=True, eq=False)
class Operation:
    """Base class of operations. Their fields are values, tensors, linear layers and settings."""

    is_private: ClassVar[bool] = False
    """Whether each thread computes all of it for itself, because it is cheap and all threads read it."""
    works_in_place: ClassVar[bool] = False
    """Whether the result may overwrite the value that it reads last."""
    reads_all_weights: ClassVar[bool] = True
    """Whether each pass uses all of its linear layers."""

    @property
    def part(self) -> Part:
        return None

    @property
    def most_positions(self) -> int | None:
        """Most positions of a text; None: no table of it bounds them."""
        return None

    def cpp_fields(self) -> dict[str, Any]:
        """Fields that have another name in C++ (`OPERATION`): values, tensors, arrays and numbers."""
        return {}

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        """Whether it is within the limits of executor.cpp."""
        return True

    def widths_beside(self, itemsize: int, limits: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """The widths of its temporary buffers (`temporary` in C++): private ones and shared ones."""
        return [], []

    def state_shapes(self, before: Mapping[int, "StateShape"]) -> dict[int, "StateShape"]:
        """Return the layer of the cache whose state it reads, and the shape of the state, if it reads one.

        before: by layer, the states that earlier operations read.
        """
        return {}

    def values_read(self) -> list[Value]:
        """The values that it reads."""
        found = [getattr(self, field.name) for field in fields(self) if field.name != "out"]
        return [value for value in found if isinstance(value, Value)]

    def values_written(self) -> tuple[Value, ...]:
        """The values that it writes."""
        out = getattr(self, "out", None)
        return () if out is None else (out,)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors except those of linear layers."""
        found = [getattr(self, field.name) for field in fields(self)]
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    def wide(self) -> list[torch.Tensor]:
        """Those of its `tensors` that are in float32, whatever the program's dtype."""
        return []

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that it multiplies with."""
        return ()

    def shapes_fit(self) -> bool:
        """Whether the shapes of its inputs fit together. torch would broadcast inputs that are too short."""
        return True

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether C++ can read its `tensors` in place, in a program of this dtype."""
        wide = set(map(id, self.wide()))
        return all(is_plain_of(tensor, torch.float32 if id(tensor) in wide else dtype) for tensor in self.tensors())


@dataclass(frozen=True, eq=False)
class Embed(Operation):
    """out = factor * weight[ids], rounded, and + of_positions[offset + positions] if there are any.

    weight: [vocabulary, width], or blocks of such rows, if the format says so. of_positions: [positions, width].
    """

    out: Value
    weight: torch.Tensor
    factor: float = 1.0
    of_positions: torch.Tensor | None = None
    offset: int = 0
    format: Format = Format.FLOATS
    is_private = True

    @property
    def most_positions(self) -> int | None:
        return None if self.of_positions is None else len(self.of_positions) - self.offset

    def cpp_fields(self) -> dict[str, Any]:
        return {"width": self.out.width, "bias": self.of_positions, "index": self.offset}

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that it makes."""
        return self.weight.dtype if self.format == Format.FLOATS else torch.float32

    def shapes_fit(self) -> bool:
        table, places = Linear(self.weight, format=self.format), self.of_positions
        return table.inputs == self.out.width and (places is None or places.shape[1:] == (self.out.width,))

    def is_plain(self, dtype: torch.dtype) -> bool:
        if self.format == Format.FLOATS:
            return super().is_plain(dtype)
        return Linear(self.weight, format=self.format).is_served(dtype) and self.of_positions is None


@dataclass(frozen=True, eq=False)
class Norm(Operation):
    """out = x / rms(x) * (weight + offset); if it is centered, (x - mean) / deviation * (weight + offset) + bias.

    weight, bias: [size]; None: as if all were 1, or 0. Each `size` numbers of a row are normed together. RMS norms
    round before they multiply with their weights, unless they round once. of_heads: x is queries or keys, and not
    hidden states.
    """

    x: Value
    out: Value
    weight: torch.Tensor | None
    epsilon: float
    bias: torch.Tensor | None = None
    offset: float = 0.0
    rounds_once: bool = False
    is_centered: bool = False
    of_heads: bool = False
    size: int = 0
    works_in_place = True

    @property
    def is_private(self) -> bool:  # type: ignore[override]  # a setting decides
        return not self.of_heads

    @property
    def part(self) -> Part:
        return ("heads", self.x.width // self.size) if self.of_heads else None

    def cpp_fields(self) -> dict[str, Any]:
        return {"kind": "NORM_HEADS" if self.of_heads else "NORM"}

    @property
    def weight_width(self) -> int:
        """Of its weight and its bias."""
        return self.size

    def shapes_fit(self) -> bool:
        return (
            (self.is_centered or self.bias is None)
            and {tuple(tensor.shape) for tensor in self.tensors()} <= {(self.weight_width,)}
            and self.size > 0
            and self.x.width % self.size == 0
        )


@dataclass(frozen=True, eq=False)
class Products(Operation):
    """outs[i] = linears[i](x)."""

    x: Value
    layers: tuple[Linear, ...]
    outs: tuple[Value, ...]

    def values_written(self) -> tuple[Value, ...]:
        return self.outs

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.layers

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        return len(self.layers) <= limits["MOST_PRODUCTS"]

    def shapes_fit(self) -> bool:
        return all(linear.inputs == self.x.width and linear.outputs > 0 for linear in self.layers)


@dataclass(frozen=True, eq=False)
class Rotary(Operation):
    """The first elements of each head of `size` rotate by the row's position (Su et al. 2021, arXiv 2104.09864).

    name: of the tables of cosines and sines. rounds_once: products are not rounded before they are added.
    is_interleaved: adjacent elements rotate together, instead of one of the first half with one of the second.
    separates: neighbours are then stored in these two halves.
    """

    x: Value
    out: Value
    size: int
    name: str = ""
    rounds_once: bool = False
    is_interleaved: bool = False
    separates: bool = False
    works_in_place = True

    @property
    def part(self) -> Part:
        return "heads", self.x.width // self.size

    def shapes_fit(self) -> bool:
        return self.x.width % self.size == 0


@dataclass(frozen=True, eq=False)
class Append(Operation):
    """Append keys and values to a layer of the cache. size: of a head of keys. There are as many heads of values."""

    keys: Value
    values: Value
    layer: int
    size: int

    @property
    def heads(self) -> int:
        """Of keys, and of values."""
        return self.keys.width // self.size

    @property
    def part(self) -> Part:
        return "heads", self.heads

    def cpp_fields(self) -> dict[str, Any]:
        return {"width": self.keys.width, "x": self.keys, "y": self.values, "index": self.layer}

    @property
    def value_size(self) -> int:
        """Numbers of a head of values."""
        return self.values.width // self.heads

    def shapes_fit(self) -> bool:
        return (
            0 < self.size <= self.keys.width and not self.keys.width % self.size and not self.values.width % self.heads
        )


@dataclass(frozen=True, eq=False)
class Attend(Operation):
    """Each head of queries attends to keys and values of a layer of the cache, the pass's own among them.

    out = softmax(scaling * queries @ keys, where not hidden) @ values. size: of a head of queries. Neighbouring heads
    share a key head. Other operations may have appended keys and values to the layer. cap: scores s become cap * tanh(s
    / cap), unless it is 0 (Gemma 2, arXiv 2408.00118). sinks: [heads], of each the score of a key without a value (Xiao
    et al. 2023, arXiv 2309.17453), in float32 or the program's dtype. is_latent: keys are also the values, and what the
    cache holds as values are further numbers of each key (DeepSeek-V2, arXiv 2405.04434).
    """

    x: Value
    out: Value
    layer: int
    size: int
    key_heads: int
    scaling: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None
    is_latent: bool = False

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.x.width // self.size

    @property
    def value_size(self) -> int:
        """Numbers of a head of values, and of the result."""
        return self.out.width // self.heads

    def cpp_fields(self) -> dict[str, Any]:
        named = {"index": self.layer, "count": self.key_heads, "factor": self.scaling, "weight": self.sinks}
        return {**named, "has_wide_weight": bool(self.wide())}

    def wide(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors() if tensor.dtype == torch.float32]

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        return max(self.size, self.value_size) <= MAX_HEAD_DIM

    def shapes_fit(self) -> bool:
        heads = self.heads
        heads_fit = not self.x.width % self.size and not self.out.width % heads and not heads % self.key_heads
        return heads_fit and (self.sinks is None or len(self.sinks) == heads)


@dataclass(frozen=True, eq=False)
class Gate(Operation):
    """out = activation(x), rounded unless it rounds once, and * by if there is such a value."""

    x: Value
    out: Value
    activation: Activation
    by: Value | None = None
    rounds_once: bool = False
    works_in_place = True

    @property
    def part(self) -> Part:
        return "outputs", self.x.width

    def cpp_fields(self) -> dict[str, Any]:
        return {"y": self.by}

    def shapes_fit(self) -> bool:
        return self.by is None or self.by.width == self.x.width


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """out = x + factor * more, where the product is rounded, too."""

    x: Value
    out: Value
    more: Value
    factor: float = 1.0
    is_private = works_in_place = True

    def cpp_fields(self) -> dict[str, Any]:
        return {"y": self.more}

    def shapes_fit(self) -> bool:
        return self.x.width == self.more.width


@dataclass(frozen=True, eq=False)
class Keep(Operation):
    """x is an output of the pass: 0 is the embedding, 1 the first layer."""

    x: Value
    index: int


@dataclass(frozen=True, eq=False)
class Logits(Operation):
    """The last operation: lm_head(x) / divisor * factor of the rows that are shown, and their top-k tokens.

    cap: unless it is 0, logits y become cap * tanh(y / cap) then (Gemma 2, arXiv 2408.00118).
    """

    x: Value
    linear: Linear
    divisor: float = 1.0
    factor: float = 1.0
    cap: float = 0.0

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.linear,)

    def shapes_fit(self) -> bool:
        return self.linear.inputs == self.x.width and self.linear.outputs > 0
