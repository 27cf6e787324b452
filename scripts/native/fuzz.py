"""Random programs, as passes of a decoder, against a plain computation in float64. Every buffer ends at a guard page.

Run by `test_native.py` with kernels that sanitizers watch: python fuzz.py PROGRAMS SEED
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import sanitized  # noqa: F401  # first: it chooses the kernels
import torch

from lookahead.cpu import blocks, choice, decoder, likeliest, native, products, tree_attention
from lookahead.cpu.decoder import Decoder, Layer, Program
from lookahead.cpu.products import Linear

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory whose last byte is followed by a page that can be neither read nor written."""

    def __init__(self) -> None:
        self._maps: list[tuple[int, int]] = []

    def room(self, size: int) -> np.ndarray:
        """Return uint8 [size], all 0xff: no number of any dtype."""
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
    """All that the kernels' Python allocates in this block is guarded, too."""
    memory = Guarded()
    fake = SimpleNamespace(**{name: getattr(np, name) for name in dir(np)} | {"empty": memory.numpy_empty})

    def new_empty(like: torch.Tensor, *shape: object, dtype: torch.dtype | None = None) -> torch.Tensor:
        return memory.new_empty(like, *shape, dtype=dtype)

    with (
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
        mock.patch.object(decoder, "np", fake),
        mock.patch.object(likeliest, "np", fake),
        mock.patch.object(decoder, "HugePages", return_value=memory),
    ):
        try:
            yield memory
        finally:
            memory.free()


def random_linear(rng: random.Random, memory: Guarded, outputs: int, inputs: int, dtype: torch.dtype) -> Linear:
    """A layer of any format that a pass takes."""
    bias = memory.copy(torch.randn(outputs).to(dtype)) if rng.random() < 0.3 else None
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    kind = rng.choice(["plain", "bf16", "bytes", "grouped", "int4", "q8", "q4", "odd"])
    numbers, size = torch.randint(-8 if kind == "int4" else -127, 8 if kind == "int4" else 128, weight.shape), 32
    if kind == "bytes":
        scales = (torch.rand(outputs) * 0.02 * inputs**-0.5).to(dtype)
        return Linear(memory.copy(numbers.to(torch.int8)), memory.copy(scales), bias)
    if kind in ("grouped", "int4"):
        groups = rng.choice([n for n in (1, 2, 3, inputs // size) if n and inputs % (n * size) == 0] or [0])
        if groups:
            scales = (torch.rand(outputs, groups) * (0.3 if kind == "int4" else 0.02) * inputs**-0.5).to(dtype).float()
            return Linear(memory.copy(numbers.to(torch.int8)), memory.copy(scales), bias)
    if kind in ("q8", "q4") and inputs % size == 0:
        most = 127 if kind == "q8" else 8
        low, high = (-most, most) if kind == "q8" else (-8, 7)
        codes = torch.randint(low, high + 1, (outputs, inputs // size, size))
        codes[..., 3] = low
        weight = (codes * (torch.rand(outputs, inputs // size, 1) / most * inputs**-0.5).half()).float().flatten(1)
    elif kind == "bf16":
        weight = weight.bfloat16().float()
    elif kind == "odd":
        weight = (weight * 2.0 ** torch.randint(-9, 2, weight.shape)).bfloat16().float()
    return Linear(memory.copy(weight.to(dtype)), None, bias)


def weight_of(linear: Linear, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that a layer multiplies with, in float64 (before scales of outputs)."""
    if linear.scales is None or linear.scales.ndim == 1:
        return linear.weight.double()
    groups = linear.weight.float().unflatten(1, (linear.scales.shape[1], -1)) * linear.scales[..., None]
    return groups.flatten(1).to(dtype).double()


class Plain:
    """The same pass, an operation after the other, in float64, rounded where the dtype rounds."""

    def __init__(self, model: Decoder, heads: int, key_heads: int):
        self.model, self.heads, self.key_heads, self.dtype = model, heads, key_heads, model.embedding.dtype

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).double()

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        sums, bias = x @ weight_of(layer, self.dtype).T, 0 if layer.bias is None else layer.bias.double()
        if layer.scales is not None and layer.scales.ndim == 1:
            sums = self.rounded(self.rounded(sums) * layer.scales.double())
        return self.rounded(sums + bias)

    def norm(self, weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        if weight is None:
            return x
        y = x * (x.square().mean(-1, keepdim=True) + self.model.epsilon).rsqrt()
        y = y if self.model.norms_round_once else self.rounded(y)
        return self.rounded(y * (weight.double() + self.model.norm_offset))

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [rows, heads, size]. cos, sin: [rows, rotary]."""
        part, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
        first, second = part.chunk(2, -1)
        cos, sin = cos.double()[:, None], sin.double()[:, None]
        return self.rounded(torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1))

    def heads_of(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        size = self.model.head_dim
        of_rows = norm is not None and len(norm) > size
        if of_rows:
            x = self.norm(norm, x)
        x = x.unflatten(-1, (-1, size))
        return x if of_rows else self.norm(norm, x)

    def run(
        self, ids: torch.Tensor, rotary: list[tuple | None], caches: list[torch.Tensor], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits, and the outputs of all layers. caches: keys and values [2, key heads, held, size] by layer."""
        model, outputs = self.model, []
        x = self.rounded(model.embedding[ids].double() * np.float32(model.embedding_factor))
        for layer, table, cache in zip(model.layers, rotary, caches, strict=True):
            outputs.append(x)
            normed = self.norm(layer.input_norm, x)
            q = self.heads_of(self.linear(layer.q, normed), layer.q_norm)
            k = self.heads_of(self.linear(layer.k, normed), layer.k_norm)
            v = self.linear(layer.v, normed).unflatten(-1, (-1, model.head_dim))
            if table is not None:
                q, k = self.turned(q, *table), self.turned(k, *table)
            groups = self.heads // self.key_heads
            keys, values = (
                torch.cat([held.double(), new.transpose(0, 1)], 1).repeat_interleave(groups, 0)
                for held, new in zip(cache, (k, v), strict=True)
            )
            scores = q.transpose(0, 1) @ keys.mT * model.scaling
            scores[..., scores.shape[-1] - hidden.shape[1] :].masked_fill_(hidden, -1e300)
            attended = self.rounded((scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
            x = self.added(x, self.norm(layer.o_norm, self.linear(layer.o, attended)))
            normed = self.norm(layer.mlp_norm, x)
            gate, up = self.linear(layer.gate, normed), self.linear(layer.up, normed)
            gate = torch.nn.functional.gelu(gate, approximate="tanh") if model.is_gelu else gate * gate.sigmoid()
            down = self.linear(layer.down, self.rounded(self.rounded(gate) * up))
            x = self.added(x, self.norm(layer.down_norm, down))
        x = self.norm(model.norm, x)
        return self.linear(model.head, x), [*outputs, x]

    def added(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.rounded(x + self.rounded(more * np.float32(self.model.residual_factor)))


def assert_near(got: torch.Tensor, expected: torch.Tensor, allowed: float, what: str, size: float = 1e-30) -> None:
    """size: of a usual result, where those that are expected may all be nearly 0."""
    error = (got.double() - expected).abs().max() / max(expected.abs().max().item(), size)
    assert error < allowed, f"{what} is off by {error:.2e}, more than {allowed}"


def run_program(seed: int) -> str:
    """Make a random decoder, run a random step, and compare. Returns a description."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    unit = products.STRIDE[dtype]
    size = rng.choice([2, 4, 8, 16, 24, 32, 48, 64, 80, 128, 256])
    key_heads, groups = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    while size * key_heads * groups % unit:
        groups += 1
    heads = key_heads * groups
    width, intermediate = (unit * rng.randint(1, 6) for _ in range(2))
    vocabulary = rng.choice([1, 7, 97, 200, 513, 1100])
    rows = rng.choice([1, 1, 2, 3, rng.randint(4, 20), rng.randint(20, 140)])
    held, threads = rng.choice([0, 1, rng.randint(2, 90), rng.randint(90, 900)]), rng.randint(1, 3)
    computed, dropped = rng.randint(0, min(held, 5)), rng.choice([0, 0, rng.randint(1, 300)])
    count = rng.choice([0, 1, 5, 256, 300])
    text = f"{dtype=} {size=} {heads=} {key_heads=} {width=} {intermediate=} {vocabulary=} {rows=} {held=} {threads=}"
    text += f" {computed=} {dropped=}"
    with guarded() as memory:
        norms = {name: (width,) for name in ("input_norm", "mlp_norm", "o_norm", "down_norm") if rng.random() < 0.6}
        norms |= rng.choice([{}, {"q_norm": (size,), "k_norm": (size,)},
                             {"q_norm": (size * heads,), "k_norm": (size * key_heads,)}])  # fmt: skip
        offset = rng.choice([0.0, 1.0])

        def numbers(*shape: int) -> torch.Tensor:
            return memory.copy((torch.randn(shape) * 0.3 + 1 - offset).to(dtype))

        def linear(outputs: int, inputs: int) -> Linear:
            return random_linear(rng, memory, outputs, inputs, dtype)

        of_heads, of_keys = heads * size, key_heads * size
        layers = [
            Layer(
                linear(of_heads, width), linear(of_keys, width), linear(of_keys, width), linear(width, of_heads),
                linear(intermediate, width), linear(intermediate, width), linear(width, intermediate),
                **{name: numbers(*shape) for name, shape in norms.items()},
            )
            for _ in range(rng.randint(1, 2))
        ]  # fmt: skip
        names = [rng.choice(["", "other", None]) for _ in layers]
        model = Decoder(
            layers=layers, rotary=names, embedding=memory.copy(torch.randn(vocabulary, width).to(dtype)),
            norm=numbers(width), head=linear(vocabulary, width), head_dim=size, scaling=rng.choice([size**-0.5, 0.1]),
            epsilon=1e-5, norm_offset=offset, norms_round_once=rng.random() < 0.5,
            rotary_rounds_once=rng.random() < 0.5, is_gelu=rng.random() < 0.5,
            embedding_factor=rng.choice([1.0, 3.0]), residual_factor=rng.choice([1.0, 0.5]), logits_divisor=1.0,
        )  # fmt: skip
        assert decoder.serves(model), "it must be served"
        plain = Plain(model, heads, key_heads)
        packed = decoder.smallest(model, {}, indexes=True) if rng.random() < 0.7 else model
        program = Program(packed)
        rotary_dim = rng.choice([size, max(size // 4 * 2, 2)])
        angles = (torch.arange(dropped + held + rows)[:, None] * torch.rand(rotary_dim // 2)).repeat(1, 2)
        rotary = {name: (memory.copy(angles.cos()), memory.copy(angles.sin())) for name in ("", "other")}
        capacity = held + rows
        caches = [memory.copy(torch.randn(2, key_heads, capacity, size).to(dtype)) for _ in layers]
        before = [cache[:, :, :held].clone() for cache in caches]
        ids = memory.copy(torch.randint(vocabulary, (rows,)))
        positions = memory.copy((dropped + held + torch.randint(rows, (rows,))).long())
        masked = rows + (rng.randint(0, held) if rng.random() < 0.3 else 0)
        hidden = torch.rand(rows, masked) < 0.4
        hidden[:, masked - rows :] &= ~torch.eye(rows, dtype=torch.bool)
        kept_hidden = memory.copy(hidden).numpy()
        shown = rng.randint(1, rows)
        said = rng.randint(1, shown)
        outputs = tuple(sorted(rng.sample(range(len(layers) + 1), rng.randint(0, len(layers)))))
        with mock.patch.object(torch, "get_num_threads", return_value=threads):
            for turn in range(rng.randint(1, 3)):
                assert not program.is_stale(), f"a copy differs in turn {turn}"
            logits, kept, has_nan, found = program.run(
                ids.numpy(), positions.numpy(), rotary,
                [(cache[0].data_ptr(), cache[1].data_ptr(), cache.stride(1)) for cache in caches],
                [held] * len(layers), [(kept_hidden, list(range(len(layers))))], outputs, shown, (said, count, 0.8),
                dropped + held - computed, computed, is_prompt=rng.random() < 0.2,
            )  # fmt: skip
            tables = [None if name is None else tuple(t[positions] for t in rotary[name]) for name in names]
            expected, states = plain.run(ids, tables, before, hidden)
            allowed = 1e-3 if dtype == torch.float32 else 0.25
            assert not has_nan
            head = plain.linear(model.head, torch.eye(width, dtype=torch.float64))
            head -= plain.linear(model.head, torch.zeros(1, width, dtype=torch.float64))  # the bias
            usual = (states[-1].abs() @ head.abs()).max().item() / width**0.5
            assert_near(logits[0], expected[-shown:], allowed, "a logit", usual)
            for i in outputs:
                assert_near(kept[i][0], states[i], allowed, f"output {i}")
            most = min(count, vocabulary)
            assert (found is None) == (not 0 < most <= likeliest.MAX_COUNT)
            if found is not None:
                again, chances = likeliest.likeliest(logits[:, :said], 0.8, most)
                assert (found[0] == again).all()
                np.testing.assert_allclose(found[1], chances, rtol=1e-4, atol=1e-7)
            kernels_alone(rng, memory, logits, heads, key_heads, size, held)
            sources = np.sort(np.array(rng.sample(range(held, capacity), rng.randint(1, rows)), np.int64))
            targets = held + np.arange(len(sources))
            moved = [cache[:, :, torch.from_numpy(sources)].clone() for cache in caches]
            buffers = [states[None] for cache in caches for states in cache]
            assert decoder.can_move(buffers)
            decoder.move_rows(buffers, sources, targets)
            for cache, rows_of in zip(caches, moved, strict=True):
                assert torch.equal(cache[:, :, held : held + len(sources)], rows_of)
    return text


def kernels_alone(
    rng: random.Random, memory: Guarded, logits: torch.Tensor, heads: int, key_heads: int, size: int, held: int
) -> None:
    """Products and attention of single layers, and the choice of a token."""
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
    inputs = products.STRIDE[dtype] * rng.randint(1, 9)
    linears = [random_linear(rng, memory, rng.randint(1, 60), inputs, dtype) for _ in range(rng.randint(1, 3))]
    x = memory.copy(torch.randn(rows, inputs).to(dtype))
    plain = Plain(SimpleNamespace(embedding=logits), heads, key_heads)  # type: ignore[arg-type]
    for linear, got in zip(linears, products.multiply(x, linears), strict=True):
        assert_near(got, plain.linear(linear, x.double()), 1e-4 if dtype == torch.float32 else 0.1, "a product")
    assert choice.likeliest(logits) == int(logits[0, 0].float().argmax())
    state, variates = torch.Generator().manual_seed(rng.randint(0, 99)).get_state(), memory.room(logits.shape[2] * 4)
    choice.draw(memory.copy(state), variates.view(np.float32))
    token = choice.drawn(logits, variates.view(np.float32), choice.Warp(0.7, rng.choice([0, 1, 5]), 0.9))
    assert token is None or 0 <= token < logits.shape[2]


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
