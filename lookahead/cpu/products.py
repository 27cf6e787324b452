"""Linear layers on a CPU: the formats of their weights, and `DecodingLinear`, which uses our kernels while decoding."""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache, partial
from typing import NamedTuple, SupportsIndex

import torch
from torch import nn

from lookahead.compat import is_compiled
from lookahead.cpu import native
from lookahead.decoding_pass import current_pass
from ngram_pool.forks import Lock

MIN_WEIGHTS = 2**16  # Weights in one call, at least. Below this, torch is faster.
STRIDE = {torch.float32: 16, torch.bfloat16: 32}  # inputs that the kernel reads at a time
_PLAIN = nn.Parameter, torch.Tensor
_ARGUMENTS = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p, ctypes.c_long]
kernels = cache(partial(native.kernels, "multiply", native.FLOATS, _ARGUMENTS))


class Format(IntEnum):
    """The formats of weights, as numbered in matrix.h. From Q4_0 on they are blocks, named as in GGUF files.

    `blocks` makes blocks of MXFP4, too. If the weights were bf16, each byte of these holds two neighbours.
    """

    FLOATS = 0
    BYTES = 1
    """int8, with a scale for each output."""
    GROUPED = 2
    """int8, with a scale for each group of inputs."""
    CODES = 3
    """4 bits, with a scale and an offset for each group."""
    INDEXED = 4
    """bf16 numbers in 12 bits."""
    Q4_0 = 5
    Q4_1 = 6
    Q5_0 = 7
    Q5_1 = 8
    Q8_0 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 15
    IQ4_XS = 16
    MXFP4 = 17

    @property
    def block(self) -> tuple[int, int]:
        """Weights of a block, and elements of the weight tensor that hold them: bytes, in GGUF's formats."""
        return _BLOCKS.get(self, (1, 1))

    @property
    def is_in_blocks(self) -> bool:
        """Whether it is one of GGUF's."""
        return self >= Format.Q4_0


_BLOCKS = {
    Format.CODES: (2, 1),
    Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q5_0: (32, 22), Format.Q5_1: (32, 24), Format.Q8_0: (32, 34),
    Format.Q2_K: (256, 84), Format.Q3_K: (256, 110), Format.Q4_K: (256, 144), Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210), Format.IQ4_NL: (32, 18), Format.IQ4_XS: (256, 136), Format.MXFP4: (32, 17),
}  # fmt: skip


class Linear(NamedTuple):  # made in each call of a layer, so it must be cheap
    """The tensors of a linear layer.

    weight: FLOATS: [outputs, inputs], contiguous, of the input's dtype. BYTES and GROUPED: int8 [outputs, inputs].
        CODES: uint8 [outputs, inputs / 2]. INDEXED: uint8, rows of `Indexed` in indexed.h. In blocks: uint8 [outputs,
        bytes]; the input must then be in float32, or of the origin's dtype.
    scales: of int8 and codes. [outputs], of the input's dtype: they multiply the sums. float32 [outputs, groups]: they
        multiply the weights of each group of inputs, before these are rounded to the input's dtype.
    bias: [outputs], of the input's dtype.
    offsets: float32 [outputs, groups], added to scaled codes.
    unpacked: the weight [outputs, inputs] that `blocks.py` has packed in 12 bits.
    origin: the layer that `blocks.py` has packed; digest: its digest then (`blocks.digest_of`).
    format: of the weight.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    unpacked: torch.Tensor | None = None
    origin: "Linear | None" = None
    digest: bytes | None = None
    format: Format = Format.FLOATS

    @classmethod
    def from_layer(cls, layer: nn.Linear) -> "Linear":
        """The current tensors of a layer."""
        weight = layer.weight
        if type(weight) in _PLAIN:
            return cls(weight, None, layer.bias)
        from lookahead.compat.quantized import int8_weight  # other weights do not need it

        if (quantized := int8_weight(weight)) is None:
            return cls(weight, None, layer.bias)
        data, scales = quantized  # torchao, too, rounds scales of outputs, and computes weights of groups in float32
        if scales.ndim == 1:
            return cls(data, scales.to(weight.dtype), layer.bias, format=Format.BYTES)
        return cls(data, scales.float(), layer.bias, format=Format.GROUPED)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, also those of its origin."""
        of_origin = [] if self.origin is None else self.origin.tensors()
        return [part for part in self[:5] if part is not None] + of_origin  # type: ignore[misc]

    @property
    def outputs(self) -> int:
        return (self.weight if self.unpacked is None else self.unpacked).shape[0]

    @property
    def inputs(self) -> int:
        weight, (weights, size) = self.weight if self.unpacked is None else self.unpacked, self.format.block
        return weight.shape[1] // size * weights

    def slice(self, start: int, stop: int) -> "Linear":
        """Outputs start..stop-1 alone, of a layer as it is in the model."""
        return Linear(*(field[start:stop] if isinstance(field, torch.Tensor) else field for field in self))  # type: ignore[arg-type]

    def matrix(self, out: torch.Tensor | None = None) -> tuple[int, ...]:
        """The fields of a Matrix in matrix.h."""
        weight, scales, bias, offsets, unpacked, *_ = self
        outputs, inputs = self.outputs, self.inputs
        of_outputs, of_groups = pointer(scales), 0
        if scales is not None and scales.ndim == 2:
            of_outputs, of_groups, inputs = 0, of_outputs, inputs // scales.shape[1]
        return (
            weight.data_ptr(), of_outputs, of_groups, pointer(offsets), pointer(bias), pointer(out), outputs, inputs,
            pointer(unpacked), self.format,
        )  # fmt: skip

    def is_served(self, dtype: torch.dtype) -> bool:
        """Whether our kernel supports this layer, if its input has this dtype."""
        weight, scales, *_ = self
        if self.format.is_in_blocks:
            is_weight = is_plain_of(weight, torch.uint8) and weight.ndim == 2 and weight.shape[1] > 0
            is_read = is_weight and weight.shape[1] % self.format.block[1] == 0 and dtype in kernels()
            return is_read and self._has_bias_of(dtype) and dtype == torch.float32
        return (
            is_plain_of(weight, dtype if scales is None else torch.int8)
            and weight.ndim == 2
            and dtype in STRIDE
            and weight.shape[1] % STRIDE[dtype] == 0
            and dtype in kernels()
            and (scales is None or _are_scales(scales, weight.shape[0], weight.shape[1], dtype))
            and self._has_bias_of(dtype)
        )

    def _has_bias_of(self, dtype: torch.dtype) -> bool:
        return self.bias is None or (self.bias.shape == self.weight.shape[:1] and is_plain_of(self.bias, dtype))

    def is_transposed(self, dtype: torch.dtype) -> bool:
        """Whether the weight is transposed in memory, [inputs, outputs]: then `blocks.pack` lays it out in rows."""
        weight, scales = self.weight, self.scales
        return (
            scales is None
            and weight.ndim == 2
            and weight.layout is torch.strided
            and not weight.is_contiguous()
            and dtype in STRIDE
            and weight.shape[1] % STRIDE[dtype] == 0
            and is_plain_of(weight[:, 0], dtype)
            and self._has_bias_of(dtype)
        )

    def is_in_tiles(self, dtype: torch.dtype) -> bool:
        """Whether the processor's matrix unit multiplies it with an input of this dtype: `takes_tiles` in C++."""
        scales = self.scales is not None and self.scales.ndim == 1
        return native.HAS_AMX and (dtype == torch.bfloat16 or self.unpacked is not None or scales)


def _are_scales(scales: torch.Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    if scales.ndim == 1:
        return len(scales) == outputs and is_plain_of(scales, dtype)
    return (
        scales.ndim == 2
        and len(scales) == outputs
        and is_plain_of(scales, torch.float32)
        and scales.shape[1] > 0
        and inputs % (scales.shape[1] * STRIDE[dtype]) == 0
    )


def is_plain_of(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether C++ can read this tensor in place, as contiguous numbers of this dtype."""
    is_plain = type(tensor) in _PLAIN and tensor.dtype == dtype and tensor.is_cpu and tensor.layout is torch.strided
    is_dense = is_plain and tensor.is_contiguous()
    has_memory = is_dense and (tensor.data_ptr() != 0 or not tensor.numel())  # not where offloading has taken it
    return has_memory and not tensor.is_neg()  # torch would negate what it reads there


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class DecodingLinear(nn.Linear):
    """A linear layer while passes of the decoding loop run. In these it uses our kernel, and torch elsewhere."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # code that a user compiles has torch's products
            decoding = current_pass()
            if decoding is not None and decoding.uses_kernels:
                from lookahead.cpu import gemm  # passes in one call do not need it

                if gemm.serves(input, linear := Linear.from_layer(self)):
                    return gemm.multiply(input, [linear])[0]
        return nn.Linear.forward(self, input)  # accelerate may call this for a layer that is no longer of this class

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        _, _, *state = super().__reduce_ex__(protocol)  # type: ignore[str-unpack]  # it is a tuple
        return object.__new__, (nn.Linear,), *state  # a copy that is made while a pass runs is no part of it


def served_layers(model: nn.Module) -> list[nn.Linear]:
    """The larger plain linear layers of a model that computes on a CPU.

    There are none if a part of it is compiled: that uses torch's products.
    """
    modules = list(model.modules())
    if any(map(is_compiled, modules)):
        return []
    layers: list[nn.Linear] = [module for module in modules if type(module) in (nn.Linear, DecodingLinear)]  # type: ignore[misc]
    # A weight without memory is loaded when its layer computes.
    return [layer for layer in layers if layer.weight.device.type != "cuda" and layer.weight.numel() >= MIN_WEIGHTS]


@contextmanager
def installed(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """In this block, these layers are `DecodingLinear`. Parameters and hooks stay as they are.

    Between passes they have their own class, which libraries that quantize or extend linear layers look for.
    """
    here = object()
    try:
        with _lock:
            _passes[here] = layers
            for layer in layers:
                if type(layer) is nn.Linear:
                    _set_class(layer, DecodingLinear)
        yield
    finally:
        with _lock:
            _passes.pop(here, None)
            _restore(layers)


def _restore(layers: Iterable[nn.Linear]) -> None:
    """Give the layers their own class, but for those that passes of other threads need."""
    needed = {id(layer) for others in _passes.values() for layer in others}
    for layer in layers:
        if type(layer) is DecodingLinear and id(layer) not in needed:
            _set_class(layer, nn.Linear)


def _set_class(layer: nn.Linear, cls: type[nn.Linear]) -> None:
    object.__setattr__(layer, "__class__", cls)  # modules' own way looks for parameters, and takes eight times as long


def _restore_all() -> None:
    """In a forked process, no pass of another thread runs on."""
    left = list(_passes.values())
    _passes.clear()
    for layers in left:
        _restore(layers)


_lock = Lock()
_passes: dict[object, Sequence[nn.Linear]] = {}
"""The layers of each pass that runs."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_all)


def classes_of(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """The modules' own classes, also while passes run."""
    return [nn.Linear if cls is DecodingLinear else cls for cls in map(type, modules)]
