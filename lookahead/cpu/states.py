"""Layers that keep a state for all positions together: their operations, and the state updates of a pass."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from lookahead.cpu import native
from lookahead.cpu.operations import Activation, Norm, Operation, Part, Value

_COMMITS = [ctypes.c_void_p, ctypes.c_long] * 2 + [ctypes.c_long]
_commits = cache(partial(native.kernels, "commit", native.FLOATS, _COMMITS))


class StateShape(NamedTuple):
    """The shape of the state that a layer of the cache keeps for all positions together."""

    channels: int
    """Of its convolutions."""
    columns: int
    """The last inputs that these read."""
    heads: int = 0
    """Of its recurrence, if it has one."""
    keys: int = 0
    """Numbers of a head of keys."""
    values: int = 0
    is_by_values: bool = False
    """Whether it is held as [heads, values, keys]."""
    decays: int = 1
    """Of a head: one, or one for each of its keys."""

    @property
    def of_update(self) -> int:
        """Numbers of a row's update of a head: decays, keys and an update."""
        return self.decays + self.keys + self.values

    @property
    def of_state(self) -> tuple[int, ...]:
        """The shape of the state of its recurrence, if it has one."""
        sizes = (self.values, self.keys) if self.is_by_values else (self.keys, self.values)
        return (self.heads, *sizes) if self.heads else ()

    def cpp_fields(self) -> dict[str, int]:
        """As C++ calls them (`CACHED`)."""
        of_state = {f"state_{name}": getattr(self, name) for name in ("heads", "keys", "values", "decays")}
        return {"channels": self.channels, **of_state, "is_by_values": self.is_by_values}


class Places(NamedTuple):
    """The addresses of a layer's state, and of its updates by the rows of a pass."""

    inputs: int
    """The address of the last inputs of its convolutions, [channels, columns]."""
    inputs_of_rows: int
    """The address of the rows' inputs, [T, channels]; 0: the pass commits all rows, one after the other."""
    columns: int
    state: int
    """The address of the state of its recurrence, [heads, keys, values], or 0."""
    updates: int
    """The address of the rows' updates, float32 [T, heads, `of_update`]; 0: as for inputs."""

    def cpp_fields(self) -> dict[str, int]:
        """As C++ calls them (`CACHED`)."""
        return dict(zip(Places.__annotations__, self, strict=True))


@dataclass(frozen=True, eq=False)
class Convolve(Operation):
    """A short causal convolution: each channel of a row, and of the rows before it, by the weights of the channel.

    out = activation(weight[:, -1] * x + weight[:, -2] * x of the parent + ... + bias). weight: [width, taps]. bias:
    [width], of the weight's dtype. In it, the sum is rounded; in float32, it is not. Before the first rows of a step
    come the inputs in a layer of the cache, for this operation from its channel `first` on. The layer gets the inputs
    of the accepted rows in the commit.
    """

    x: Value
    out: Value
    weight: torch.Tensor
    layer: int
    bias: torch.Tensor | None = None
    first: int = 0
    activation: Activation = "identity"

    @property
    def taps(self) -> int:
        """How many numbers are summed."""
        return self.weight.shape[1]

    @property
    def part(self) -> Part:
        return "outputs", self.x.width

    def cpp_fields(self) -> dict[str, Any]:
        is_wide = bool(self.wide())
        return {"index": self.layer, "has_wide_weight": is_wide, "has_wide_bias": is_wide}

    def wide(self) -> list[torch.Tensor]:
        return self.tensors() if self.weight.dtype == torch.float32 else []

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        return self.taps <= limits["MOST_TAPS"]

    def state_shapes(self, before: Mapping[int, StateShape]) -> dict[int, StateShape]:
        found = before.get(self.layer, StateShape(0, 0))
        channels, columns = max(found.channels, self.first + self.x.width), max(found.columns, self.taps - 1)
        return {self.layer: found._replace(channels=channels, columns=columns)}

    def shapes_fit(self) -> bool:
        width = self.x.width
        is_of_width = self.weight.shape == (width, self.taps) and (self.bias is None or self.bias.shape == (width,))
        return is_of_width and self.taps > 1 and self.first >= 0


class _Recurrence(Operation):
    """What `Delta` and `Scan` have in common."""

    x: Value
    out: Value
    keys: Value
    values: Value
    log_speeds: torch.Tensor
    biases: torch.Tensor
    layer: int
    heads: int
    size: int
    is_by_values: ClassVar[bool] = False
    """Whether the state is held as [heads, values, keys]."""

    @property
    def key_heads(self) -> int:
        """Of queries and keys."""
        return self.x.width // self.size

    @property
    def decay_size(self) -> int:
        """Decays of a head."""
        return 1

    @property
    def value_size(self) -> int:
        """Numbers of a head of values."""
        return self.values.width // self.heads

    @property
    def part(self) -> Part:
        return ("heads", self.heads) if self.heads > 1 else None  # of a single head, rows are not shared out

    def cpp_fields(self) -> dict[str, Any]:
        others = [value for value in self.values_read() if value not in (self.x, self.keys)]
        named = {"y": self.keys, "index": self.layer, "weight": self.log_speeds, "bias": self.biases}
        are_wide = (tensor.dtype == torch.float32 for tensor in (self.log_speeds, self.biases))
        return {**named, "temporary": others} | dict(zip(("has_wide_weight", "has_wide_bias"), are_wide, strict=True))

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        return self.size <= limits["MOST_STATE_KEYS"]

    def state_shapes(self, before: Mapping[int, StateShape]) -> dict[int, StateShape]:
        found = before.get(self.layer, StateShape(0, 0))
        sizes = self.heads, self.size, self.value_size
        return {self.layer: StateShape(*found[:2], *sizes, self.is_by_values, self.decay_size)}

    def shapes_fit(self) -> bool:
        heads = self.heads
        heads_fit = not (self.x.width % self.size or self.values.width % heads or heads % self.key_heads)
        widths = self.x.width == self.keys.width, self.out.width == self.values.width
        return heads_fit and all(widths) and self._of_heads == {heads}

    @property
    def _of_heads(self) -> set[int]:
        """The widths of what has a number for each head."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Delta(_Recurrence):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): each head has a state S, [keys, values] in float32.

    S = d * P + k u^T, where P is the parent's, u = r * (v - d * P^T k), and out = S^T q. Queries x and keys are divided
    by their length, queries also by the root of `size`. d = exp(-exp(log_speeds) * softplus(decays + biases)), and r =
    factor * sigmoid(rates), whose sigmoid is rounded. heads: of values; neighbouring ones share a head of queries and
    keys, of this size. log_speeds, biases: [heads], each in float32 or the program's dtype. Before the first rows of a
    step comes the state in a layer of the cache, which gets the updates of the accepted rows in the commit.
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

    def wide(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors() if tensor.dtype == torch.float32]

    @property
    def _of_heads(self) -> set[int]:
        return {self.decays.width, self.rates.width, len(self.log_speeds), len(self.biases)}


@dataclass(frozen=True, eq=False)
class DeltaByKey(Delta):
    """The delta rule with a decay for each number of a key (Kimi Linear, arXiv 2510.26692): d is [keys, 1].

    decays: [heads * size] of a row, as are the biases. log_speeds: [heads]. softplus(x) is log(1 + exp(x)), whose sum
    is rounded to float32: where x is far below 0, all of its digits but the first few are lost. limit: unless it is 0,
    log(d) is limit * sigmoid(exp(log_speeds) * x), rounded (Ling 3).
    """

    limit: float = 0.0

    @property
    def decay_size(self) -> int:
        return self.size

    @property
    def _of_heads(self) -> set[int]:
        return {self.rates.width, len(self.log_speeds)}

    def shapes_fit(self) -> bool:
        return super().shapes_fit() and self.decays.width == len(self.biases) == self.heads * self.size


@dataclass(frozen=True, eq=False)
class Scan(_Recurrence):
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
    is_by_values = True

    @property
    def _of_heads(self) -> set[int]:
        return {self.times.width, len(self.log_speeds), len(self.biases), len(self.skips)}


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedNorm(Norm):
    """An RMS norm of heads, as Mamba-2 has it: what is normed is silu(gate) * x, not rounded.

    The weight is that of the whole row. gates_after: silu(gate) multiplies the result instead, before that is rounded.
    """

    gate: Value
    gates_after: bool = False

    def cpp_fields(self) -> dict[str, Any]:
        return {**super().cpp_fields(), "y": self.gate}

    @property
    def weight_width(self) -> int:
        return self.x.width

    def shapes_fit(self) -> bool:
        is_usual = self.of_heads and not (self.is_centered or self.offset)
        return super().shapes_fit() and is_usual and self.gate.width == self.x.width


class Pending:
    """The updates of a sequence's states by the rows of a pass, until the commit."""

    def __init__(self, dtype: torch.dtype, layers: np.ndarray, held: object):
        """dtype: of the program. layers: the C++ structures of layers. held: keeps their memory alive."""
        self._commit, self._layers, self._held = _commits()[dtype], layers, held

    def apply(self, path: list[int]) -> None:
        """Apply these rows to the states: a path from the root."""
        rows, threads = np.array(path, np.int64), torch.get_num_threads()
        self._commit(self._layers.ctypes.data, len(self._layers), rows.ctypes.data, len(rows), threads)
