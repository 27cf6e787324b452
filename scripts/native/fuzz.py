"""Random programs against the reference in float64. Every buffer ends at a guard page.

Run by `test_native.py` with kernels that sanitizers watch: python fuzz.py PROGRAMS SEED
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import sanitized  # noqa: F401  # first: it chooses the kernels
import torch

from lookahead.cpu import blocks, choice, executor, gemm, native, pages, products, top_k, tree_attention
from lookahead.cpu import operations as op
from lookahead.cpu.alibi import Alibi
from lookahead.cpu.elementwise import Clip, Scale, Xielu
from lookahead.cpu.executor import Executor, Rows
from lookahead.cpu.experts import Experts, Weigh
from lookahead.cpu.heads import HeadProducts, Join, Select
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Format, Linear
from lookahead.cpu.program import Program
from lookahead.cpu.reference import ACTIVATIONS, Reference, State
from lookahead.cpu.states import Convolve, Delta, DeltaByKey, GatedNorm, Places, Scan
from lookahead.cpu.streams import Blend, Cut, Rescale

sys.path.append(str(Path(__file__).parents[1]))
from gguf_blocks import Kind, random_blocks

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory that ends at a page which can be neither read nor written."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []

    def room(self, size: int) -> np.ndarray:
        """Return uint8 [size], all 0xff, which is NaN in any float dtype."""
        whole = -(-max(size, 1) // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        begin = _libc.mmap(None, whole + PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert begin != ctypes.c_void_p(-1).value, "no more memory"
        assert _libc.mprotect(begin + whole, PAGE, 0) == 0
        self._maps.append((begin, whole + PAGE))
        ctypes.memset(begin, 0xFF, whole)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin + whole - size))

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.room(size)).view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def numpy_empty(self, shape: object, dtype: object = float) -> np.ndarray:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)  # type: ignore[arg-type]
        kind = np.dtype(dtype)  # type: ignore[call-overload]
        return self.room(int(np.prod(sizes)) * kind.itemsize).view(kind).reshape(sizes)

    def new_empty(self, like: torch.Tensor, *shape: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.empty(*sizes, dtype=dtype or like.dtype)  # type: ignore[misc]

    def free(self) -> None:
        for begin, size in self._maps:
            _libc.munmap(begin, size)


@contextmanager
def guarded() -> Iterator[Guarded]:
    """In this block, memory that the kernels' Python allocates is guarded, too."""
    memory = Guarded()
    fake = SimpleNamespace(**{name: getattr(np, name) for name in dir(np)} | {"empty": memory.numpy_empty})

    def new_empty(like: torch.Tensor, *shape: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        return memory.new_empty(like, *shape, dtype=dtype)

    with (
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
        mock.patch.object(executor, "np", fake),
        mock.patch.object(top_k, "np", fake),
        mock.patch.object(pages, "HugePages", return_value=memory),
        mock.patch.object(pages, "np", fake),
    ):
        try:
            yield memory
        finally:
            memory.free()


def random_format(rng: random.Random, inputs: int, dtype: torch.dtype) -> Format | None:
    """A format of GGUF whose blocks divide rows of ``inputs`` weights; None if there is none."""
    formats = [format for format in Format if format.is_in_blocks and inputs % format.block[0] == 0]
    return rng.choice(formats) if formats and dtype == torch.float32 else None


def random_weights(format: Format, outputs: int, inputs: int) -> torch.Tensor:
    numbers = np.random.default_rng(int(torch.randint(2**31, ())))
    return torch.from_numpy(random_blocks(Kind[format.name], outputs, inputs, numbers, inputs**-0.5))


def random_linear(
    rng: random.Random, memory: Guarded, outputs: int, inputs: int, dtype: torch.dtype, transposes: bool = False
) -> Linear:
    """A layer in any format that a pass supports. transposes: it may be transposed, and so must be copied."""
    bias = memory.copy(torch.randn(outputs).to(dtype)) if rng.random() < 0.3 else None
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    kind = rng.choice(["plain", "bf16", "bytes", "grouped", "int4", "q8", "q4", "mxfp4", "odd", "gguf", "gguf"])
    numbers, size = torch.randint(-8 if kind == "int4" else -127, 8 if kind == "int4" else 128, weight.shape), 32
    if kind == "gguf" and (format := random_format(rng, inputs, dtype)):
        return Linear(memory.copy(random_weights(format, outputs, inputs)), None, bias, format=format)
    if kind == "bytes":
        scales = (torch.rand(outputs) * 0.02 * inputs**-0.5).to(dtype)
        return Linear(memory.copy(numbers.to(torch.int8)), memory.copy(scales), bias, format=Format.BYTES)
    if kind in ("grouped", "int4"):
        groups = rng.choice([n for n in (1, 2, 3, inputs // size) if n and inputs % (n * size) == 0] or [0])
        if groups:
            scales = (torch.rand(outputs, groups) * (0.3 if kind == "int4" else 0.02) * inputs**-0.5).to(dtype).float()
            return Linear(memory.copy(numbers.to(torch.int8)), memory.copy(scales), bias, format=Format.GROUPED)
    if kind in ("q8", "q4") and inputs % size == 0:
        most = 127 if kind == "q8" else 8
        low, high = (-most, most) if kind == "q8" else (-8, 7)
        codes = torch.randint(low, high + 1, (outputs, inputs // size, size))
        codes[..., 3] = low
        weight = (codes * (torch.rand(outputs, inputs // size, 1) / most * inputs**-0.5).half()).float().flatten(1)
    elif kind == "mxfp4" and inputs % size == 0:
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(8, (outputs, inputs // size, size))]
        powers = 2.0 ** torch.randint(-4, -1, (outputs, inputs // size, 1)) * 2.0 ** -(inputs.bit_length() // 2)
        weight = (numbers * powers).flatten(1).copysign(weight)
    elif kind == "bf16":
        weight = weight.bfloat16().float()
    elif kind == "odd":
        weight = (weight * 2.0 ** torch.randint(-9, 2, weight.shape)).bfloat16().float()
    if transposes and outputs > 1 and rng.random() < 0.1:
        beside = rng.randint(0, 9)
        matrix = torch.cat([torch.randn(inputs, beside), weight.T], 1)
        return Linear(memory.copy(matrix.to(dtype)).T[beside:], None, bias)
    return Linear(memory.copy(weight.to(dtype)), None, bias)


class RandomProgram:
    """Writes a decoder of random shape, with features of all families."""

    def __init__(self, rng: random.Random, memory: Guarded, dtype: torch.dtype, size: int, heads: int, key_heads: int):
        self.rng, self.memory, self.dtype = rng, memory, dtype
        self.size, self.heads, self.key_heads = size, heads, key_heads
        self.layer, self.positions = -1, 0  # last layer of the cache; most positions of a text
        self.shapes: dict[int, tuple[int, int]] = {}  # by layer of the cache: sizes of a key and of a value
        self.latents: set[int] = set()
        self.operations: list[op.Operation] = []
        self.kept = 0
        self.offset, self.rounds_once = rng.choice([0.0, 1.0]), rng.random() < 0.5
        self.is_centered, self.rotates_once = rng.random() < 0.25, rng.random() < 0.5
        self.residual, self.activation = rng.choice([1.0, 0.5]), rng.choice([*ACTIVATIONS, "gelu_new", "gelu_bloom"])
        self.is_interleaved = rng.random() < 0.3

    def linear(self, outputs: int, inputs: int) -> Linear:
        return random_linear(self.rng, self.memory, outputs, inputs, self.dtype, transposes=True)

    def numbers(self, *shape: int, mean: float = 0.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.memory.copy((torch.randn(shape) * 0.3 + mean).to(dtype or self.dtype))

    def either(self) -> torch.dtype:
        """The dtype of weights that may be in float32 whatever the program's is."""
        return self.rng.choice([self.dtype, torch.float32])

    def add(self, operation: Any) -> Value:
        self.operations.append(operation)
        return operation.out

    def norm(self, x: Value, size: int = 0, chance: float = 1.0) -> Value:
        """size: numbers that are normalized together, or 0 for all."""
        if self.rng.random() > chance:
            return x
        of_heads, size = bool(size), size or x.width
        is_centered = self.is_centered and not of_heads
        weight = self.numbers(size, mean=1 - self.offset)
        has_bias, has_weight = self.rng.random() < 0.7, self.rng.random() < 0.8
        return self.add(
            op.Norm(
                x, Value(x.width), weight if has_weight else None, 1e-5,
                bias=self.numbers(size) if is_centered and has_bias else None, offset=self.offset,
                rounds_once=self.rounds_once, is_centered=is_centered, of_heads=of_heads, size=size,
            )
        )  # fmt: skip

    def products(self, x: Value, *widths: int) -> tuple[Value, ...]:
        outs = tuple(map(Value, widths))
        self.operations.append(op.Products(x, tuple(self.linear(width, x.width) for width in widths), outs))
        return outs

    def attention(self, x: Value, norms: str) -> Value:
        size = value_size = self.size
        lenders = [layer for layer in self.shapes if layer not in self.latents]
        if lenders and self.rng.random() < 0.2:  # use the keys and values of another layer
            layer = self.rng.choice(lenders)
            size, value_size = self.shapes[layer]
            (q,) = self.products(x, self.heads * size)
            return self.attended(q, layer, size, value_size, x.width)
        if size <= 256 and self.rng.random() < 0.2:
            return self.latent_attention(x)
        kind = self.rng.choice(["", "", "joined", "repeated", "other sizes"])
        if kind == "other sizes":
            size, value_size = (max(2, self.size // 2) * self.rng.randint(1, 2) for _ in range(2))
            if self.heads * value_size % products.STRIDE[self.dtype]:
                value_size = self.size
        widths = self.heads * size, self.key_heads * size
        if kind == "joined":  # queries, keys and values of a group are adjacent
            group = self.heads // self.key_heads + 2
            (joined,) = self.products(x, self.key_heads * group * size)
            places = (0, group - 2), (group - 2, 1), (group - 1, 1)
            q, k, v = (
                self.add(Select(joined, Value(taken * self.key_heads * size), size, group, first, taken))
                for first, taken in places
            )
        elif kind == "repeated" and self.key_heads > 1:
            q, k, v = self.products(x, widths[0], size, size)
            k, v = (self.add(Select(part, Value(widths[1]), size, 1, 0, 1, self.key_heads)) for part in (k, v))
        else:
            q, k, v = self.products(x, *widths, self.key_heads * value_size)
        if norms:
            q, k = (self.norm(part, size if norms == "heads" else part.width) for part in (q, k))
        name = self.rng.choice(["", "other", None])
        if name is not None:
            q, k = (
                self.add(op.Rotary(part, Value(part.width), size, name, self.rotates_once, self.is_interleaved))
                for part in (q, k)
            )
        layer = self.next_layer()
        self.operations.append(op.Append(k, v, layer, size))
        self.shapes[layer] = size, value_size
        return self.attended(q, layer, size, value_size, x.width)

    def latent_attention(self, x: Value) -> Value:
        rotated, latent, heads = self.size, products.STRIDE[self.dtype] * self.rng.randint(1, 4), self.heads
        width, value_size = self.rng.choice([rotated, 2 * rotated, 3 * rotated]), self.size
        weight = self.numbers(heads * (width + value_size), latent)
        q, c, k = self.products(x, heads * (width + rotated), latent, rotated)
        group, name = width // rotated + 1, self.rng.choice(["", "other"])
        rest = self.add(Select(q, Value(heads * width), rotated, group, 0, group - 1))
        q = self.add(Select(q, Value(heads * rotated), rotated, group, group - 1))
        separates = self.rng.random() < 0.5
        settings = rotated, name, self.rotates_once, separates or self.is_interleaved, separates
        q, k = (self.add(op.Rotary(part, Value(part.width), *settings)) for part in (q, k))
        sought = self.add(HeadProducts(rest, Value(heads * latent), weight, heads, 0, True))
        q = self.add(Join(sought, Value(sought.width + q.width), q, heads))
        layer, size = self.next_layer(), latent + rotated
        self.operations.append(op.Append(self.norm(c, latent), k, layer, latent))
        self.shapes[layer] = latent, rotated
        self.latents.add(layer)
        found = op.Attend(q, Value(heads * latent), layer, size, 1, size**-0.5, is_latent=True)
        values = HeadProducts(self.add(found), Value(heads * value_size), weight, heads, width, False)
        return self.products(self.add(values), x.width)[0]

    def convolved(self, x: Value, layer: int, first: int = 0, taps: int = 3) -> Value:
        dtype, activation = self.either(), self.rng.choice(["identity", "silu", self.activation])
        weight = self.numbers(x.width, taps, dtype=dtype)
        bias = self.numbers(x.width, dtype=dtype) if self.rng.random() < 0.3 else None
        return self.add(Convolve(x, Value(x.width), weight, layer, bias, first, activation))

    def short_convolution(self, x: Value) -> Value:
        """Between gates, as in LFM2."""
        width, taps = products.STRIDE[self.dtype] * self.rng.randint(1, 3), self.rng.randint(2, 8)
        before, after, inner = self.products(x, width, width, width)
        inner = self.add(op.Gate(inner, Value(width), "identity", before))
        inner = self.convolved(inner, self.next_layer(), taps=taps)
        return self.products(self.add(op.Gate(inner, Value(width), "identity", after)), x.width)[0]

    def linear_attention(self, x: Value) -> Value:
        """The gated delta rule after convolutions."""
        keys, values = (self.rng.choice([2, 8, 16, 24, 64, 128]) for _ in range(2))
        key_heads, groups = self.rng.randint(1, 3), self.rng.randint(1, 2)
        heads = key_heads * groups
        while heads * values % products.STRIDE[self.dtype]:
            values += 1
        widths = key_heads * keys, key_heads * keys, heads * values
        layer, taps, first = self.next_layer(), self.rng.randint(2, 5), 0
        by_key = self.rng.random() < 0.5
        of_decays = heads * keys if by_key else heads
        *parts, gate, decays, rates = self.products(x, *widths, heads * values, of_decays, heads)
        convolved = []
        for part in parts:
            convolved.append(self.convolved(part, layer, first, taps))
            first += part.width
        q, k, v = convolved
        out, factor = Value(heads * values), self.rng.choice([1.0, 2.0])
        kind = DeltaByKey if by_key else Delta
        speeds = (self.numbers(count, dtype=self.either()) for count in (heads, of_decays))
        limit = {"limit": self.rng.choice([0.0, -0.5, -5.0])} if by_key else {}
        delta = self.add(kind(q, out, k, v, decays, rates, *speeds, layer, heads, keys, factor, **limit))
        normed = self.norm(delta, values, chance=0.7)
        gated = self.add(op.Gate(gate, Value(gate.width), "silu", normed, rounds_once=self.rng.random() < 0.5))
        return self.products(gated, x.width)[0]

    def scanned(self, x: Value) -> Value:
        """Mamba-2 after convolutions."""
        keys, size = self.rng.choice([2, 8, 16, 24, 64, 128]), self.rng.choice([2, 8, 16, 24, 64, 80])
        key_heads, groups = self.rng.randint(1, 3), self.rng.randint(1, 3)
        heads = key_heads * groups
        while heads * size % products.STRIDE[self.dtype]:
            size += 1
        width, layer, taps, first = heads * size, self.next_layer(), self.rng.randint(2, 5), 0
        gate, *parts, times = self.products(x, width, width, key_heads * keys, key_heads * keys, heads)
        convolved = []
        for part in parts:
            convolved.append(self.convolved(part, layer, first, taps))
            first += part.width
        v, k, q = convolved
        of_heads = [self.numbers(heads) for _ in range(3)]
        found = self.add(Scan(q, Value(width), k, v, times, *of_heads, layer, heads, keys))
        weight = self.numbers(width, mean=1.0) if self.rng.random() < 0.8 else None
        flags = {"rounds_once": self.rng.random() < 0.5, "gates_after": self.rng.random() < 0.5}
        normed = GatedNorm(
            found, Value(width), weight, 1e-5, of_heads=True, size=width // key_heads, gate=gate, **flags
        )
        return self.products(self.add(normed), x.width)[0]

    def next_layer(self) -> int:
        """The next layer of the cache, which may skip some."""
        self.layer += self.rng.choice([1, 1, 2])
        return self.layer

    def mixed(self, x: Value, norms: str) -> Value:
        with_states = self.short_convolution, self.linear_attention, self.scanned
        return self.attention(x, norms) if self.rng.random() < 0.5 else self.rng.choice(with_states)(x)

    def attended(self, q: Value, layer: int, size: int, value_size: int, width: int) -> Value:
        scaling = self.rng.choice([size**-0.5, 0.1])
        cap, sinks = self.rng.choice([0.0, 0.0, 2.0, 30.0]), self.numbers(self.heads, mean=1.0, dtype=self.either())
        sinks = self.rng.choice([None, None, sinks])
        out, kind, biases = Value(self.heads * value_size), op.Attend, dict[str, Any]()
        if not cap and self.rng.random() < 0.4:
            table = self.memory.copy(torch.randn(self.heads, self.positions).to(self.dtype).float()).numpy()
            flags = {"by_distance": self.rng.random() < 0.5, "rounds_scores": self.rng.random() < 0.5}
            kind, biases = Alibi, {"biases": table, **flags}
        attend = kind(q, out, layer, size, self.key_heads, scaling, cap, sinks, **biases)
        return self.products(self.add(attend), width)[0]

    def experts(self, x: Value, width: int) -> Value:
        count, settings = self.rng.choice([1, 2, 5, 20]), dict[str, Any]()
        of = [self.linear(count, x.width)]
        if self.dtype == torch.bfloat16:  # rounding makes scores tie, so the bias decides
            bias = 100.0 * torch.randperm(count)
            of[0] = of[0]._replace(bias=self.memory.copy(bias.to(self.dtype)))
        if self.rng.random() < 0.5:
            settings = {"is_sigmoid": self.rng.random() < 0.5, "factor": self.rng.choice([1.0, 2.5])}
            if count == 20:
                settings |= {
                    "groups": (groups := self.rng.choice([1, 2, 10])),
                    "top_groups": self.rng.randint(1, groups),
                    "best_of_group": self.rng.randint(1, 2),
                }
            if self.rng.random() < 0.2:
                settings["nearness"] = self.rng.choice([0.05, 0.4])
            settings["is_apart"] = self.rng.random() < 0.3
            if not settings["is_apart"] and self.rng.random() < 0.3:
                settings |= {"limit": self.rng.choice([0.2, 7.0]), "alpha": 1.7}
            settings |= {name: self.rng.random() < 0.3 for name in ("ranks_scores", "weighs_inputs")}
            if "nearness" not in settings:  # with it, all scores would be at the cap
                settings["cap"] = self.rng.choice([0.0, 0.0, 2.0])
            if self.rng.random() < 0.5:
                settings["router"] = self.memory.copy(torch.randn(count, x.width) * x.width**-0.5)
                of = []
            if self.dtype == torch.bfloat16:  # the correction decides, also between sums of two scores
                of_scores = 1e4 if settings["ranks_scores"] else 1.0
                settings["correction"] = self.memory.copy(of_scores * 8.0 ** torch.randperm(count))
            elif self.rng.random() < 0.5:
                settings["correction"] = self.memory.copy(torch.randn(count))
            if self.rng.random() < 0.3:
                settings |= {"rounds_steps": True, "rounds_ranks": self.rng.random() < 0.5, "epsilon": 1e-6}
            if self.rng.random() < 0.3:
                settings["scales"] = self.memory.copy(torch.rand(count) + 0.5)
            if self.rng.random() < 0.3:
                settings["routed"], x = x, self.products(x, self.rng.choice([x.width, 2 * x.width]))[0]
        halves = [width << ("limit" in settings or self.rng.random() < 0.7)]
        halves = [width, width] if settings.get("is_apart") else halves
        settings["identities"] = self.rng.choice([0, 0, 1, count // 2]) if count > 1 else 0
        for _ in range(count - settings["identities"]):
            of += [*(self.linear(half, x.width) for half in halves), self.linear(x.width, width)]
        flags = [self.rng.random() < 0.5 for _ in range(2)]
        most = min(count // settings.get("groups", 1) * settings.get("top_groups", 1), 4)
        top_k = self.rng.randint(1, most)
        out = self.add(Experts(x, Value(x.width), tuple(of), top_k, self.activation, *flags, **settings))
        return self.products(out, settings["routed"].width)[0] if "routed" in settings else out

    def mlp(self, x: Value, width: int) -> Value:
        if self.rng.random() < 0.25:
            mixed = self.experts(x, width)
            if self.rng.random() < 0.5:
                return mixed
            (by,) = self.products(x, 1)
            return self.add(Weigh(mixed, Value(x.width), by))
        if self.rng.random() < 0.7:
            gate, up = self.products(x, width, width)
            if self.rng.random() < 0.3:
                gate, up = (self.add(Clip(part, Value(width), self.rng.choice([0.2, 3.0]))) for part in (gate, up))
            if self.rng.random() < 0.2:
                gate = self.add(Cut(gate, Value(width), self.rng.choice([0.0, 1.5])))
            gated = self.add(op.Gate(gate, Value(width), self.activation, up))
        else:
            (gate,) = self.products(x, width)
            if self.rng.random() < 0.3:
                gated = self.add(Xielu(gate, Value(width), 0.8, 0.4, 0.5, -1e-6))
            else:
                gated = self.add(op.Gate(gate, Value(width), self.activation))
        return self.products(gated, x.width)[0]

    def through_streams(self, x: Value) -> Value:
        """x, plus one of a row's streams (Gemma 3n), to each of which sums of all streams were added."""
        count, routed, width = self.rng.randint(1, 4), self.rng.randint(1, 5), x.width
        streams = self.add(Scale(x, Value(width), 0.5, self.numbers(width, mean=1.0)))
        for made in self.products(x, *[width] * (count - 1)) if count > 1 else ():
            more = self.add(Rescale(made, Value(width), x, self.rng.choice([1e-5, 2.0])))
            streams = self.add(Join(streams, Value(streams.width + width), more, 1))
        by = self.add(op.Gate(self.products(x, routed)[0], Value(routed), "tanh"))
        weight, offset = self.numbers(count * count, routed), self.rng.choice([0.0, 1.0])
        streams = self.add(Blend(streams, Value(streams.width), streams, width, by, weight, offset))
        first = self.rng.randint(0, count)
        streams = self.add(Blend(streams, Value(streams.width), x, width, offset=1.0, first=first))
        return self.more(x, self.add(Select(streams, Value(width), width, count, self.rng.randrange(count))))

    def more(self, x: Value, more: Value) -> Value:
        return self.add(op.Add(x, Value(x.width), self.norm(more, chance=0.3), self.residual))

    def keep(self, x: Value) -> Value:
        self.operations.append(op.Keep(x, self.kept))
        self.kept += 1
        return x

    def write(self, vocabulary: int, width: int, intermediate: int, layers: int, positions: int) -> Program:
        self.positions = positions
        has_positions, norms = self.rng.random() < 0.2, self.rng.choice(["", "heads", "all heads"])
        is_parallel = self.rng.random() < 0.2
        table, offset = (self.numbers(positions + 2, width), self.rng.choice([0, 2])) if has_positions else (None, 0)
        format = None if has_positions or self.rng.random() < 0.7 else random_format(self.rng, width, self.dtype)
        rows = torch.randn(vocabulary, width) if format is None else random_weights(format, vocabulary, width)
        embedding = self.memory.copy(rows.to(self.dtype) if format is None else rows)
        factor = self.rng.choice([1.0, 3.0]) * (1 if format is None else width**0.5)
        embed = op.Embed(Value(width), embedding, factor, table, offset, format or Format.FLOATS)
        x = self.keep(self.add(embed))
        for layer in range(layers):
            x = self.through_streams(x) if self.rng.random() < 0.2 else x
            attended = self.mixed(self.norm(x, chance=0.7), norms)
            if is_parallel:
                x = self.more(self.more(x, attended), self.mlp(self.norm(x, chance=0.7), intermediate))
            else:
                x = self.more(x, attended)
                x = self.more(x, self.mlp(self.norm(x, chance=0.7), intermediate))
            if layer + 1 < layers:
                self.keep(x)
        x = self.keep(self.norm(x))
        self.operations.append(op.Logits(x, self.linear(vocabulary, width)))
        return Program(self.operations)


def assert_near(got: torch.Tensor, expected: torch.Tensor, allowed: float, what: str, size: float = 1e-30) -> None:
    """size: typical size of results, if the expected ones may all be nearly 0."""
    assert got.shape == expected.shape, f"{what} is of shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    error = (got.double() - expected).abs().max() / max(expected.abs().max().item(), size)
    assert error < allowed, f"{what} is off by {error:.2e}, more than {allowed}"


def run_program(seed: int) -> str:
    """Make a random program, run a random step, and compare. Returns a description."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    unit = products.STRIDE[dtype]
    size = rng.choice([2, 4, 8, 16, 24, 32, 48, 64, 80, 128, 256, 512])
    key_heads, groups = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    while size * key_heads * groups % unit:
        groups += 1
    heads = key_heads * groups
    width, intermediate = (unit * rng.randint(1, 6) if rng.random() < 0.7 else 256 for _ in range(2))
    vocabulary = rng.choice([1, 7, 97, 200, 513, 1100])
    threads, layers = rng.randint(1, 3), rng.randint(1, 2)
    count = rng.choice([0, 1, 5, 256, 300])
    shapes = [SequenceShape.drawn(rng) for _ in range(rng.choice([1, 1, rng.randint(2, 4)]))]
    text = f"{dtype=} {size=} {heads=} {key_heads=} {width=} {intermediate=} {vocabulary=} {threads=} {shapes=}"
    with guarded() as memory:
        positions_of_all = max(shape.end for shape in shapes)
        writer = RandomProgram(rng, memory, dtype, size, heads, key_heads)
        program = writer.write(vocabulary, width, intermediate, layers, positions_of_all)
        assert executor.serves(program), "the program is not supported"
        packs = program.is_transposed or rng.random() < 0.7
        ready = Executor(executor.pack(program, {}, indexes=True) if packs else program)
        rotary = {}
        for name, least in program.rotaries.items():
            rotary_dim = rng.choice([least, max(least // 4 * 2, 2)])
            angles = (torch.arange(positions_of_all)[:, None] * torch.rand(rotary_dim // 2)).repeat(1, 2)
            rotary[name] = memory.copy(angles.cos()), memory.copy(angles.sin())
        drawn = [RandomRows(shape, rng, memory, program) for shape in shapes]
        rows = sum(shape.rows for shape in shapes)
        shown = rng.choice([0, rng.randint(1, rows), rng.randint(1, rows)])
        said = rng.randint(min(shown, 1), shown)
        outputs = tuple(sorted(rng.sample(range(layers + 1), rng.randint(0, layers))))
        with mock.patch.object(torch, "get_num_threads", return_value=threads):
            for turn in range(rng.randint(1, 3)):
                assert not ready.is_stale(), f"a copy differs in turn {turn}"
            logits, kept, has_nan, found = ready.run(
                [one.rows for one in drawn], rotary, outputs, shown, (said, count), is_prompt=rng.random() < 0.4
            )
            plain = [one.computed_plainly(program, rotary) for one in drawn]
            allowed = 1e-3 if dtype == torch.float32 else 0.25
            assert not has_nan
            lm_head = program.linears[-1]
            weights = plain[0].product(lm_head._replace(bias=None), torch.eye(width, dtype=torch.float64))
            last = torch.cat([one.outputs[layers] for one in plain])
            usual = (last.abs() @ weights.abs()).max().item() / width**0.5
            assert_near(logits, torch.cat([one.logits for one in plain])[rows - shown :], allowed, "a logit", usual)
            for i in outputs:
                assert_near(kept[i], torch.cat([one.outputs[i] for one in plain]), allowed, f"output {i}")
            most = min(count, vocabulary)
            assert (found is None) == (not (said and 0 < most <= top_k.MAX_COUNT))
            if found is not None:
                again, chances = top_k.top_k(logits[:said], 0.8, most)
                assert (found[0] == again).all()
                np.testing.assert_allclose(found[1], chances, rtol=1e-4, atol=1e-7)
            if shown:
                kernels_alone(rng, memory, logits, plain[0], heads, key_heads, size, shapes[0].held)
            for b, (one, expected) in enumerate(zip(drawn, plain, strict=True)):
                if program.states:
                    one.commit(ready, b, expected, rng, allowed)
                one.move(rng)
    return text


class SequenceShape(NamedTuple):
    """The length of a sequence, and its rows in a pass."""

    rows: int
    held: int
    """Keys in its cache before the pass."""
    computed: int
    """Number of these keys that belong to the same step."""
    dropped: int
    """Positions before the cache's first key."""

    @classmethod
    def drawn(cls, rng: random.Random) -> "SequenceShape":
        rows = rng.choice([1, 1, 2, 3, rng.randint(4, 20), rng.randint(20, 140)])
        held = rng.choice([0, 1, rng.randint(2, 90), rng.randint(90, 900)])
        return cls(rows, held, rng.randint(0, min(held, 5)), rng.choice([0, 0, rng.randint(1, 300)]))

    @property
    def end(self) -> int:
        return self.dropped + self.held + self.rows


class RandomRows:
    """The rows and the cache of a sequence of this shape."""

    def __init__(self, shape: SequenceShape, rng: random.Random, memory: Guarded, program: Program):
        rows, held, computed, dropped = self.shape = shape
        capacity, layers = held + rows, [*program.caches, *program.states]
        self.caches = {
            layer: [memory.copy(torch.randn(heads, capacity, size).to(program.dtype)) for size in sizes]
            for layer, (heads, *sizes) in program.caches.items()
        }
        self.before = {layer: [part[:, :held].clone() for part in cache] for layer, cache in self.caches.items()}
        self.ids = memory.copy(torch.randint(program.vocabulary, (rows,)))
        self.positions = memory.copy((dropped + held + torch.randint(rows, (rows,))).long())
        masked = rows + (rng.randint(0, held) if rng.random() < 0.3 else 0)
        self.hidden = torch.rand(rows, masked) < 0.4
        self.hidden[:, masked - rows :] &= ~torch.eye(rows, dtype=torch.bool)
        is_causal = rng.random() < 0.2
        if is_causal:
            self.hidden = torch.ones(rows, rows).triu(1).bool()
        places = [(0, 0, 0, 0)] * (max(layers) + 1)
        for layer, (keys, values) in self.caches.items():
            places[layer] = keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)
        is_chain = rng.random() < 0.5
        self.parents = [row - 1 if is_chain else rng.randint(-1, row - 1) for row in range(rows)]
        self.commits = is_chain and rng.random() < 0.5
        self.states, self.of_rows = {}, []
        for layer, shape in program.states.items():
            columns = rng.randint(shape.columns, 8)
            inputs = memory.copy(torch.randn(shape.channels, columns).to(program.dtype))
            self.states[layer] = State(inputs, memory.copy(torch.randn(shape.of_state)))
            of_inputs = memory.empty(rows, shape.channels, dtype=program.dtype)
            updates = memory.empty(rows, shape.heads, shape.of_update, dtype=torch.float32)
            self.of_rows.append((of_inputs, updates))
        self.states_before = {layer: State(*(part.clone() for part in state)) for layer, state in self.states.items()}
        of_states = [
            Places(
                inputs.data_ptr(), of_inputs.data_ptr() * (not self.commits), inputs.shape[1],
                state.data_ptr() * (state.numel() > 0), updates.data_ptr() * (not self.commits),
            )
            for (inputs, state), (of_inputs, updates) in zip(self.states.values(), self.of_rows, strict=True)
        ]  # fmt: skip
        self.rows = Rows(
            self.ids.numpy(), self.positions.numpy(), places, [held] * len(places),
            [(None if is_causal else memory.copy(self.hidden).numpy(), list(layers))],
            dropped + held - computed, computed, 0.8, np.array(self.parents), of_states,
        )  # fmt: skip

    def computed_plainly(self, program: Program, rotary: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Reference:
        before, hidden = {i: tuple(cache) for i, cache in self.before.items()}, dict.fromkeys(self.before, self.hidden)
        states = self.states_before, self.parents
        wide, start = torch.float64, self.shape.dropped
        return Reference(program, self.ids, self.positions, rotary, before, hidden, *states, wide, start)

    def commit(self, ready: Executor, b: int, plain: Reference, rng: random.Random, allowed: float) -> None:
        """Commit a path, unless the pass has already committed."""
        path = list(range(self.shape.rows)) if self.commits else plain.path_to(rng.randrange(self.shape.rows))
        if not self.commits:
            for layer, state in self.states.items():
                assert all(map(torch.equal, state, self.states_before[layer])), "a pass has changed a state"
            ready.pending(b, self).apply(path)
        for layer, state in plain.states_after(path).items():
            for what, got, expected in zip(State._fields, self.states[layer], state, strict=True):
                if got.numel():
                    assert_near(got, expected, allowed, f"{what} of layer {layer}", 1.0)

    def move(self, rng: random.Random) -> None:
        """Keep some of the rows in the cache, as a commit does."""
        rows, held, _, _ = self.shape
        sources = np.sort(np.array(rng.sample(range(held, held + rows), rng.randint(1, rows)), np.int64))
        buffers = [states[None] for cache in self.caches.values() for states in cache]
        for alike in ([one for one in buffers if one.shape == shape] for shape in {one.shape for one in buffers}):
            moved = [buffer[:, :, torch.from_numpy(sources)].clone() for buffer in alike]
            assert executor.can_move(alike)
            executor.move_rows(alike, sources, held + np.arange(len(sources)))
            for buffer, rows_of in zip(alike, moved, strict=True):
                assert torch.equal(buffer[:, :, held : held + len(sources)], rows_of)


def kernels_alone(
    rng: random.Random,
    memory: Guarded,
    logits: torch.Tensor,
    plain: Reference,
    heads: int,
    key_heads: int,
    size: int,
    held: int,
) -> None:
    """Check products and attention of single layers, and the choice of a token."""
    dtype, rows = logits.dtype, rng.choice([1, 5, 17, 40])
    query = memory.copy(torch.randn(1, heads, rows, size).to(dtype))
    keys, values = (memory.copy(torch.randn(1, key_heads, held + rows, size).to(dtype)) for _ in range(2))
    masked = rng.choice([rows, held + rows])
    mask = torch.zeros(1, 1, rows, masked).masked_fill_(torch.rand(rows, masked) < 0.4, torch.finfo(dtype).min)
    mask[..., masked - rows :].diagonal(dim1=2, dim2=3).zero_()
    for given in (None, memory.copy(mask.to(dtype))):
        got = tree_attention.attend(query, keys, values, given, None)[0].transpose(0, 1)
        scores = query[0].double() @ keys[0].double().repeat_interleave(heads // key_heads, 0).mT * size**-0.5
        hidden = mask[0, 0] < 0 if given is not None else torch.ones(rows, rows).triu(1).bool()
        scores[..., scores.shape[-1] - hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
        expected = scores.softmax(-1) @ values[0].double().repeat_interleave(heads // key_heads, 0)
        assert_near(got, expected, 1e-4 if dtype == torch.float32 else 0.1, "attention")
    inputs = rng.choice([products.STRIDE[dtype] * rng.randint(1, 9), 256, 512])
    linears = [random_linear(rng, memory, rng.randint(1, 60), inputs, dtype) for _ in range(rng.randint(1, 3))]
    x = memory.copy(torch.randn(rows, inputs).to(dtype))
    for linear, got in zip(linears, gemm.multiply(x, linears), strict=True):
        assert_near(got, plain.product(linear, x.double()), 1e-4 if dtype == torch.float32 else 0.1, "a product")
    assert choice.argmax(logits) == int(logits[0].float().argmax())
    state, variates = torch.Generator().manual_seed(rng.randint(0, 99)).get_state(), memory.room(logits.shape[1] * 4)
    choice.draw(memory.copy(state), variates.view(np.float32))
    warp = choice.Warp(0.7, rng.choice([0, 1, 5]), 0.9, rng.choice([0, 0.1]))
    token = choice.drawn(logits, variates.view(np.float32), warp)
    assert token is None or 0 <= token < logits.shape[1]


def main() -> None:
    programs, first = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + programs):
        try:
            run_program(seed)
        except Exception as error:
            raise SystemExit(f"{native.CAPABILITY}: program {seed} failed: {error!r}") from error
        if (seed + 1 - first) % 500 == 0:
            print(f"{native.CAPABILITY}: {seed + 1 - first} programs", flush=True)
    assert blocks.can_index(torch.float32) == (native.CAPABILITY != "DEFAULT")
    print(f"{native.CAPABILITY}: {programs} programs from {first} on: nothing found")


if __name__ == "__main__":
    main()
