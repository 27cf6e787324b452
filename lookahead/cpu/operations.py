"""The operations that a pass is made of. Each makes values of others; a value is [rows, width].

An operation carries the settings and the weights of its own module, as they are at this moment. All tensors but
quantized weights and `wide` ones have one dtype, and every operation rounds its result to it.
"""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch

from lookahead.cpu.products import Format, Linear, is_plain_of

LANES = 16
"""Numbers of the longest vector."""
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_new", "gelu_bloom", "relu", "relu_squared", "sigmoid", "identity"
]  # fmt: skip
"""gelu_tanh: GELU as approximated by tanh. gelu_new: the same, rounded at each step of the formula; gelu_bloom: of
Bloom's form of it."""


@dataclass(frozen=True, eq=False)
class Value:
    """[rows, width]."""

    width: int


@dataclass(frozen=True, eq=False)
class Operation:
    """What all operations have in common: their fields are values, tensors, linear layers and settings."""

    def read(self) -> list[Value]:
        """The values that it reads."""
        found = [getattr(self, field.name) for field in fields(self) if field.name != "out"]
        return [value for value in found if isinstance(value, Value)]

    def written(self) -> tuple[Value, ...]:
        """The values that it makes."""
        out = getattr(self, "out", None)
        return () if out is None else (out,)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors but those of linear layers."""
        found = [getattr(self, field.name) for field in fields(self)]
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    def wide(self) -> list[torch.Tensor]:
        """Those of them that are in float32, whatever the program's dtype is."""
        return []

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that it multiplies with."""
        return ()

    def fits(self) -> bool:
        """Whether the shapes of what it reads fit together. torch would repeat what is too short."""
        return True

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether C++ can read its `tensors` where they are, in a program of this dtype."""
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

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that it makes."""
        return self.weight.dtype if self.format == Format.FLOATS else torch.float32

    def fits(self) -> bool:
        table, places = Linear(self.weight, blocks=self.format or None), self.of_positions
        return table.inputs == self.out.width and (places is None or places.shape[1:] == (self.out.width,))

    def is_plain(self, dtype: torch.dtype) -> bool:
        if self.format == Format.FLOATS:
            return super().is_plain(dtype)
        return Linear(self.weight, blocks=self.format).is_served(dtype) and self.of_positions is None


@dataclass(frozen=True, eq=False)
class Norm(Operation):
    """out = x / rms(x) * (weight + offset); if it is centered, (x - mean) / deviation * (weight + offset) + bias.

    weight, bias: [size]; None: as if all were 1, or 0. Each `size` numbers of a row are normed together. RMS norms
    round before they multiply with their weights, unless they round once. of_heads: x is what attention takes, queries
    or keys, and no row of the hidden states. gate: what is normed is silu(gate) * x, not rounded. Then the weight is
    that of the whole row. gates_behind: silu(gate) multiplies the result instead, before that is rounded.
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
    gate: Value | None = None
    gates_behind: bool = False

    def fits(self) -> bool:
        shapes, is_gated = {tuple(tensor.shape) for tensor in self.tensors()}, self.gate is not None
        return (
            (self.is_centered or self.bias is None)
            and shapes <= {(self.x.width if is_gated else self.size,)}
            and not (is_gated and (self.is_centered or self.offset or not self.of_heads))
            and (self.gate is None or self.gate.width == self.x.width)
            and self.size > 0
            and self.x.width % self.size == 0
        )


@dataclass(frozen=True, eq=False)
class Products(Operation):
    """outs[i] = linears[i](x)."""

    x: Value
    of: tuple[Linear, ...]
    outs: tuple[Value, ...]

    def written(self) -> tuple[Value, ...]:
        return self.outs

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.of

    def fits(self) -> bool:
        return all(linear.inputs == self.x.width and linear.outputs > 0 for linear in self.of)


@dataclass(frozen=True, eq=False)
class Select(Operation):
    """Some of the heads of x, which are of `size` and stand in groups: of each group, `taken` from `first` on.

    They keep their order. Each is repeated so many times.
    """

    x: Value
    out: Value
    size: int
    group: int
    first: int
    taken: int = 1
    repeats: int = 1

    def fits(self) -> bool:
        groups, rest = divmod(self.x.width, self.group * self.size)
        is_within = 0 <= self.first < self.first + self.taken <= self.group
        return not rest and is_within and self.out.width == groups * self.taken * self.repeats * self.size


@dataclass(frozen=True, eq=False)
class HeadProducts(Operation):
    """The numbers of each head of x, multiplied with rows of a weight that are the head's own, from `first` on.

    weight: [heads * rows of each, width]. The rows give the numbers of a head of out, and take a head of `width`; if
    they are transposed, they take the numbers of a head of x, and give a head of `width`.
    """

    x: Value
    out: Value
    weight: torch.Tensor
    heads: int
    first: int
    is_transposed: bool

    @property
    def taken(self) -> int:
        """Rows for each head."""
        return (self.x if self.is_transposed else self.out).width // self.heads

    def fits(self) -> bool:
        rows, width = self.weight.shape
        of_width, of_rows = (self.out, self.x) if self.is_transposed else (self.x, self.out)
        return (
            rows % self.heads == of_rows.width % self.heads == 0
            and of_width.width == self.heads * width
            and 0 <= self.first < self.first + self.taken <= rows // self.heads
            and width % LANES == 0
        )


@dataclass(frozen=True, eq=False)
class Join(Operation):
    """Each head of out is a head of x, followed by one of more."""

    x: Value
    out: Value
    more: Value
    heads: int

    def fits(self) -> bool:
        has_whole_heads = not self.x.width % self.heads and not self.more.width % self.heads
        return has_whole_heads and self.out.width == self.x.width + self.more.width


@dataclass(frozen=True, eq=False)
class Rotary(Operation):
    """The first numbers of each head of `size` turn by the row's position (Su et al. 2021, arXiv 2104.09864).

    name: of the tables of cosines and sines. rounds_once: products are not rounded before they are added up.
    is_interleaved: neighbouring numbers turn together, and not one of the first half with one of the second. separates:
    then they come to stand in these halves.
    """

    x: Value
    out: Value
    size: int
    name: str = ""
    rounds_once: bool = False
    is_interleaved: bool = False
    separates: bool = False

    def fits(self) -> bool:
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
    def value_size(self) -> int:
        """Numbers of a head of values."""
        return self.values.width // self.heads

    def fits(self) -> bool:
        return (
            0 < self.size <= self.keys.width and not self.keys.width % self.size and not self.values.width % self.heads
        )


@dataclass(frozen=True, eq=False)
class Attend(Operation):
    """Each head of queries attends to keys and values of a layer of the cache, the pass's own among them.

    out = softmax(scaling * queries @ keys, where not hidden) @ values. size: of a head of queries. Neighbouring heads
    share a key head. Other operations may have appended keys and values to the layer. cap: scores s become cap * tanh(s
    / cap), unless it is 0 (Gemma 2, arXiv 2408.00118). sinks: [heads], of each the score of a key without a value (Xiao
    et al. 2023, arXiv 2309.17453). is_latent: keys are also the values, and what the cache holds as values are further
    numbers of each key (DeepSeek-V2, arXiv 2405.04434). biases: float32 [heads, positions], contiguous: what is added
    to the score of a key, by its position (ALiBi, Press et al. 2022, arXiv 2108.12409). by_distance: the last one is
    that of the query's own position, behind which no key stands. rounds_scores: scores are rounded then.
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
    biases: np.ndarray | None = None
    by_distance: bool = False
    rounds_scores: bool = False

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.x.width // self.size

    @property
    def value_size(self) -> int:
        """Numbers of a head of values, and of the result."""
        return self.out.width // self.heads

    def fits(self) -> bool:
        heads = self.heads
        has_whole_heads = not self.x.width % self.size and not self.out.width % heads and not heads % self.key_heads
        counts = {len(of_heads) for of_heads in (self.sinks, self.biases) if of_heads is not None}
        is_plain = self.biases is None and not (self.by_distance or self.rounds_scores)
        return has_whole_heads and counts <= {heads} and (is_plain or (self.biases is not None and not self.cap))


@dataclass(frozen=True, eq=False)
class Convolve(Operation):
    """Each number of a row, and those of the rows before it at the same place, by weights of this place.

    out = weight[:, -1] * x + weight[:, -2] * x of the parent + ... + bias. weight: [width, taps]. bias: [width]. Before
    the first rows of a step stand the inputs that a layer of the cache holds, for this operation from its channel
    `first` on. The layer takes the inputs of the accepted rows when they are committed.
    """

    x: Value
    out: Value
    weight: torch.Tensor
    layer: int
    bias: torch.Tensor | None = None
    first: int = 0

    @property
    def taps(self) -> int:
        """How many numbers are added up."""
        return self.weight.shape[1]

    def fits(self) -> bool:
        width = self.x.width
        is_of_width = self.weight.shape == (width, self.taps) and (self.bias is None or self.bias.shape == (width,))
        return is_of_width and self.taps > 1 and self.first >= 0


@dataclass(frozen=True, eq=False)
class Delta(Operation):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): each head has a state S, [keys, values] in float32.

    S = d * P + k u^T, where P is the parent's, u = r * (v - d * P^T k), and out = S^T q. Queries x and keys are divided
    by their length, queries also by the root of `size`. d = exp(-exp(log_speeds) * softplus(decays + biases)), and r =
    factor * sigmoid(rates), whose sigmoid is rounded. heads: of values; neighbouring ones share a head of queries and
    keys, of this size. log_speeds, biases: [heads]. Before the first rows of a step comes the state that a layer of the
    cache holds. It takes the updates of the accepted rows when they are committed.
    """

    x: Value
    out: Value
    keys: Value
    values: Value
    decays: Value
    rates: Value
    log_speeds: torch.Tensor
    biases: torch.Tensor
    layer: int
    heads: int
    size: int
    factor: float = 1.0

    @property
    def key_heads(self) -> int:
        """Of queries and keys."""
        return self.x.width // self.size

    @property
    def value_size(self) -> int:
        """Numbers of a head of values."""
        return self.values.width // self.heads

    def fits(self) -> bool:
        heads = self.heads
        has_whole_heads = not (self.x.width % self.size or self.values.width % heads or heads % self.key_heads)
        widths = self.x.width == self.keys.width, self.out.width == self.values.width
        of_heads = {self.decays.width, self.rates.width, *(len(one) for one in (self.log_speeds, self.biases))}
        return has_whole_heads and all(widths) and of_heads == {heads}


@dataclass(frozen=True, eq=False)
class Scan(Operation):
    """The recurrence of Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): each head has a state S, [values, keys] in float32.

    S = d * P + v k^T, where P is the parent's, v of `values`, d = exp(-exp(log_speeds) * t), and k = t * keys, rounded.
    t is softplus(times + biases), of which sum and result are rounded, and out = S x + skips * v, whose terms are.
    heads: of values; neighbouring ones share a head of queries x and keys, of `size`. log_speeds, biases, skips:
    [heads]. The state is held and committed as that of `Delta`.
    """

    x: Value
    out: Value
    keys: Value
    values: Value
    times: Value
    log_speeds: torch.Tensor
    biases: torch.Tensor
    skips: torch.Tensor
    layer: int
    heads: int
    size: int

    @property
    def key_heads(self) -> int:
        """Of queries and keys."""
        return self.x.width // self.size

    @property
    def value_size(self) -> int:
        """Numbers of a head of values."""
        return self.values.width // self.heads

    def fits(self) -> bool:
        heads = self.heads
        has_whole_heads = not (self.x.width % self.size or self.values.width % heads or heads % self.key_heads)
        widths = self.x.width == self.keys.width, self.out.width == self.values.width
        of_heads = {self.times.width, *(len(one) for one in (self.log_speeds, self.biases, self.skips))}
        return has_whole_heads and all(widths) and of_heads == {heads}


@dataclass(frozen=True, eq=False)
class Gate(Operation):
    """out = activation(x), rounded unless it rounds once, and * by if there is such a value."""

    x: Value
    out: Value
    activation: Activation
    by: Value | None = None
    rounds_once: bool = False

    def fits(self) -> bool:
        return self.by is None or self.by.width == self.x.width


@dataclass(frozen=True, eq=False)
class Xielu(Operation):
    """out = positive * x^2 + beta * x where x > 0, else negative * (exp(min(x, least)) - 1 - x) + beta * x.

    xIELU (Huang & Schlag 2024, arXiv 2411.13010), rounded at each step of the formula.
    """

    x: Value
    out: Value
    positive: float
    negative: float
    beta: float
    least: float


@dataclass(frozen=True, eq=False)
class Experts(Operation):
    """The MLPs of the top_k experts of each row, added up by their weights (Shazeer et al. 2017, arXiv 1701.06538).

    of: the router, then for each expert a layer of both halves, gates first, and the one that goes back. The first one
    may also give a single half, which then has no gates. The weights are the router's softmax, or sigmoid, of each
    expert. They are divided by their sum if they add to one, then multiplied by a factor, and may be rounded, also at
    each of these steps (rounds_steps). epsilon: added to that sum. Of experts that are equally good, those are chosen
    that torch's topk takes. rounds_ranks: the weights by which they are chosen are rounded, too. Results are rounded
    when they have been weighed, and added in the order of experts. correction: float32 [experts], added to the weights
    by which experts are chosen (Wang et al. 2024, arXiv 2408.15664). scales: float32 [experts], by which the weights
    are multiplied at last, unless they are rounded. routed: what the router reads, if that is not x. groups: experts
    are divided into so many; of these, `top_groups` are left whose best experts, two or one, add up to the most
    (DeepSeek-V3, arXiv 2412.19437). router: a router in float32, [experts, width], whose products are not rounded; then
    there is none in `of`. limit: unless it is 0, a gate stands beside its number, and the two become (number + 1) *
    gate * sigmoid(alpha * gate), within this limit (gpt-oss, arXiv 2508.10925). nearness: unless it is negative,
    experts are chosen in turn, each with its share of the softmax of those left whose scores s are near its own s':
    (s' - s) / max(|s|, s') <= nearness (SparseMixer, Liu et al. 2024, arXiv 2409.12136).
    """

    x: Value
    out: Value
    of: tuple[Linear, ...]
    top_k: int
    activation: Activation
    adds_to_one: bool
    rounds_weights: bool
    is_sigmoid: bool = False
    factor: float = 1.0
    rounds_steps: bool = False
    rounds_ranks: bool = False
    epsilon: float = 1e-20
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    nearness: float = -1.0
    limit: float = 0.0
    alpha: float = 1.0
    correction: torch.Tensor | None = None
    router: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    routed: Value | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.of

    def wide(self) -> list[torch.Tensor]:
        return self.tensors()

    @property
    def experts(self) -> tuple[Linear, ...]:
        """The layers of the experts."""
        return self.of[self.router is None :]

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.experts) // 2

    @property
    def inner(self) -> int:
        """Numbers of a row within an expert."""
        return self.experts[1].inputs

    @property
    def is_gated(self) -> bool:
        """Whether the first layer of an expert gives both halves."""
        return self.experts[0].outputs != self.inner

    def fits(self) -> bool:
        count, width = self.count, self.x.width
        routing = Linear(self.router) if self.router is not None else self.of[0]
        shapes = {(linear.outputs, linear.inputs) for linear in self.experts[::2]}
        back = {(linear.outputs, linear.inputs) for linear in self.experts[1::2]}
        return (
            0 < self.top_k <= count
            and (routing.outputs, routing.inputs) == (count, (self.routed or self.x).width)
            and shapes == {(self.inner << self.is_gated, width)}
            and (self.is_gated or not self.limit)
            and back == {(width, self.inner)}
            and all(one is None or one.shape == (count,) for one in (self.correction, self.scales))
            and 0 < self.top_groups <= self.groups
            and self.best_of_group in (1, 2)
            and (self.groups == 1 or (count % self.groups == 0 and count // self.groups >= self.best_of_group))
        )


@dataclass(frozen=True, eq=False)
class Weigh(Operation):
    """out = sigmoid(by), rounded, * x. by: one number for each row."""

    x: Value
    out: Value
    by: Value

    def fits(self) -> bool:
        return self.by.width == 1


@dataclass(frozen=True, eq=False)
class Scale(Operation):
    """out = factor * x."""

    x: Value
    out: Value
    factor: float


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """out = x + factor * more, where the product is rounded, too."""

    x: Value
    out: Value
    more: Value
    factor: float = 1.0

    def fits(self) -> bool:
        return self.x.width == self.more.width


@dataclass(frozen=True, eq=False)
class Keep(Operation):
    """x is an output of the pass: the embedding is 0, a layer's own is its number from 1 on."""

    x: Value
    index: int


@dataclass(frozen=True, eq=False)
class Logits(Operation):
    """The last operation: lm_head(x) / divisor * factor of the rows that are shown, and their top-k tokens.

    cap: unless it is 0, logits y become cap * tanh(y / cap) then (Gemma 2, arXiv 2408.00118).
    """

    x: Value
    of: Linear
    divisor: float = 1.0
    factor: float = 1.0
    cap: float = 0.0

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.of,)

    def fits(self) -> bool:
        return self.of.inputs == self.x.width and self.of.outputs > 0
