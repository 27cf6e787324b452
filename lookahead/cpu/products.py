"""Linear layers on a CPU use our own kernel, `gemm.cpp`, while lookahead decodes.

torch reorders the weights of a linear layer in each call. For the few rows of a step, this takes longer than the
product itself. Our kernel reads the weights as they are. So nothing is copied, and every change of a weight takes
effect. Weights that torchao holds in int8 are read in int8, with a scale for each output or for each group of inputs.
Long prompts are left to torch; in bf16 on processors without instructions for it, to our kernel or to torch's float32,
whichever is quicker.
"""

import ctypes
import math
import platform
from collections.abc import Iterable
from enum import IntEnum
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from lookahead.cpu import native
from lookahead.decoding_pass import current_pass

MIN_WEIGHTS = 2**16  # Weights in one call, at least. Below this, torch is faster.
MAX_ROWS = 64  # Rows of an input, at most. Beyond this, torch is faster, except for these dtypes:
# if the processor has no instructions for bf16, torch takes three to four times as long, however many rows there are.
_IS_SLOW = platform.machine() in ("x86_64", "AMD64") and native.CAPABILITY not in ("AVX512_BF16", "AVX512_AMX")
SLOW_IN_TORCH = (torch.bfloat16,) if _IS_SLOW else ()
MANY_ROWS = 128  # Beyond this, torch's products in float32 are quicker than ours in these dtypes,
AT_ONCE = 2**22  # although the weights have to be converted: so many at a time, at most.
STRIDE = {torch.float32: 16, torch.bfloat16: 32}  # inputs that the kernel reads at a time
_PLAIN = nn.Parameter, torch.Tensor
_ARGUMENTS = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p, ctypes.c_long]
kernels = cache(partial(native.kernels, "multiply", native.FLOATS, _ARGUMENTS))
_rooms = cache(partial(native.kernels, "room", native.FLOATS, [ctypes.c_long] * 3, ctypes.c_long))


class Format(IntEnum):
    """The forms of weights, as matrix.h numbers them. The last ones are blocks of GGUF files, by their names there.

    `blocks` also makes blocks of MXFP4. Those of weights in bf16 have two neighbours in a byte.
    """

    FLOATS = 0
    BYTES = 1
    """int8, with a scale for each output,"""
    GROUPED = 2
    """or for each group of inputs."""
    CODES = 3
    """4 bits, with a scale and an offset for each group."""
    INDEXED = 4
    """bf16 numbers in 12 bits."""
    Q4_0 = 5
    Q4_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    MXFP4 = 11

    @property
    def block(self) -> tuple[int, int]:
        """Weights and bytes of a block; of other forms than GGUF's, 1 and 0."""
        return _BLOCKS.get(self, (1, 0))


_BLOCKS = {
    Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 144), Format.Q5_K: (256, 176), Format.Q6_K: (256, 210), Format.MXFP4: (32, 17),
}  # fmt: skip


class Linear(NamedTuple):  # made in each call of a layer, so it must be cheap
    """The tensors of a linear layer.

    weight: [outputs, inputs], contiguous, of the input's dtype, or int8. scales, if the weight is in int8: [outputs],
    of the input's dtype, what the sums are multiplied by; or float32 [outputs, groups], what the weights of each group
    of inputs are multiplied by before they are rounded to the input's dtype. bias: [outputs], of that dtype, or None.
    offsets: None, or float32 [outputs, groups], what is added before that. The weight is then in codes of 4 bits, uint8
    [outputs, inputs / 2], as `blocks` makes them. unpacked: None, or the weight [outputs, inputs] of which `blocks` has
    made this one, rows of `Indexed` in weights.h, uint8. origin: None, or the layer that `blocks` has made this one of.
    digest: None, or that of the origin (`blocks.digest_of`) when this one was made. blocks: None, or the form of GGUF
    that the weight has, uint8 [outputs, bytes]; the input must then be in float32, or of the origin's dtype.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    unpacked: torch.Tensor | None = None
    origin: "Linear | None" = None
    digest: bytes | None = None
    blocks: Format | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> "Linear":
        """The tensors of a layer, as they are at this moment."""
        weight = layer.weight
        if type(weight) in _PLAIN:
            return cls(weight, None, layer.bias)
        from lookahead.compat.quantized import int8_weight  # other weights need it not

        if (quantized := int8_weight(weight)) is None:
            return cls(weight, None, layer.bias)
        data, scales = quantized  # torchao, too, rounds scales of outputs, and computes weights of groups in float32
        return cls(data, scales.to(weight.dtype if scales.ndim == 1 else torch.float32), layer.bias)

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
        return weight.shape[1] * (2 if self.offsets is not None else 1) * weights // (size or weights)

    @property
    def format(self) -> Format:
        if self.blocks is not None:
            return self.blocks
        if self.unpacked is not None:
            return Format.INDEXED
        if self.scales is None:
            return Format.FLOATS
        return Format.BYTES if self.scales.ndim == 1 else Format.GROUPED if self.offsets is None else Format.CODES

    def slice(self, start: int, stop: int) -> "Linear":
        """Outputs start..stop-1 alone, of a layer as it is in the model."""
        return Linear(*(field[start:stop] if isinstance(field, torch.Tensor) else field for field in self))  # type: ignore[arg-type]

    def matrix(self, out: torch.Tensor | None = None) -> tuple[int, ...]:
        """The fields of a Matrix in gemm.h."""
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
        """Whether our kernel takes this layer, if its input has this dtype."""
        weight, scales, *_ = self
        if self.blocks is not None:
            is_weight = is_plain_of(weight, torch.uint8) and weight.ndim == 2 and weight.shape[1] > 0
            is_read = is_weight and weight.shape[1] % self.blocks.block[1] == 0 and dtype in kernels()
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
        """Whether the weight lies in memory as [inputs, outputs]: then `blocks.smallest` lays it out in rows."""
        weight, scales = self.weight, self.scales
        return (
            scales is None
            and weight.ndim == 2
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
    """Whether C++ can read this tensor where it is, as numbers of this dtype, one after the other."""
    is_dense = type(tensor) in _PLAIN and tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()
    is_there = is_dense and (tensor.data_ptr() != 0 or not tensor.numel())  # offloading may leave it without memory
    return is_there and not tensor.is_neg()  # torch would negate what it reads there


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class DecodingLinear(nn.Linear):
    """A linear layer that uses our kernel in passes of the decoding loop, and torch everywhere else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # code that a user compiles has torch's products
            decoding = current_pass()
            if decoding is not None and decoding.uses_kernels:
                linear = Linear.of(self)
                if _serves(input, linear):
                    return multiply(input, [linear])[0]
        return nn.Linear.forward(self, input)  # accelerate may call this for a layer that is no longer of this class


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, by our kernel in the decoding loop, for layers that are no modules of a model."""
    decoding = current_pass()
    if decoding is not None and decoding.uses_kernels and weight.numel() >= MIN_WEIGHTS:
        layer = Linear(weight, None, bias)
        if _serves(input, layer):
            return multiply(input, [layer])[0]
    return nn.functional.linear(input, weight, bias)


def install(model: nn.Module) -> list[nn.Linear]:
    """Make the larger plain linear layers `DecodingLinear`, and return them. Parameters and hooks stay as they are."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and layer.weight.numel() >= MIN_WEIGHTS]
    for layer in layers:
        layer.__class__ = DecodingLinear
    return layers


def are_installed(model: nn.Module) -> bool:
    return DecodingLinear in map(type, model.modules())


def remove(modules: Iterable[nn.Module]) -> None:
    """Undo `install` for these modules."""
    for module in modules:
        if type(module) is DecodingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]  # it was made as an nn.Linear


def multiply(input: torch.Tensor, linears: list[Linear]) -> list[torch.Tensor]:
    """Return what each layer makes of the input [..., inputs]: [..., outputs].

    All tensors are on the CPU. Sums are in float32. Nothing is checked.
    """
    input = input.contiguous()
    *shape, inputs = input.shape
    rows = math.prod(shape)
    if rows > MANY_ROWS and input.dtype in SLOW_IN_TORCH and all(linear.scales is None for linear in linears):
        return [_multiply_floats(input, linear) for linear in linears]
    matrices: list[int] = []
    outs: list[torch.Tensor] = []
    for linear in linears:
        outs.append(input.new_empty((*shape, linear.outputs)))
        matrices += linear.matrix(outs[-1])
    threads = torch.get_num_threads()
    needed = _rooms()[input.dtype](rows, inputs, threads)
    room = input.new_empty(needed, dtype=torch.uint8) if needed else None
    kernels()[input.dtype](
        input.data_ptr(), (ctypes.c_int64 * len(matrices))(*matrices), len(linears), rows, inputs, pointer(room),
        threads,
    )  # fmt: skip
    return outs


def _multiply_floats(input: torch.Tensor, linear: Linear) -> torch.Tensor:
    """`multiply` by torch, in float32, rounded once."""
    inputs = input.shape[-1]
    out = input.new_empty((*input.shape[:-1], linear.weight.shape[0]))
    rows, out_rows = input.view(-1, inputs).float(), out.view(-1, out.shape[-1])
    for first in range(0, out.shape[-1], size := max(AT_ONCE // inputs, 1)):
        part = slice(first, first + size)
        bias = None if linear.bias is None else linear.bias[part].float()
        out_rows[:, part] = nn.functional.linear(rows, linear.weight[part].float(), bias)
    return out


def _serves(input: torch.Tensor, linear: Linear) -> bool:
    """Whether `multiply` takes these tensors. torch takes all others."""
    return (
        type(input) is torch.Tensor
        and input.is_cpu
        and input.ndim > 0
        and input.numel() > 0
        and input.shape[-1] == linear.weight.shape[-1]
        and (input.numel() <= MAX_ROWS * input.shape[-1] or input.dtype in SLOW_IN_TORCH)
        and linear.is_served(input.dtype)
        and not torch.is_autocast_enabled("cpu")
    )
