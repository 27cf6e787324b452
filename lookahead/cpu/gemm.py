"""Products of our own kernel, `gemm.cpp`, which linear layers on a CPU use while lookahead decodes.

torch reorders the weights of a linear layer in each call. For the few rows of a step, this takes longer than the
product itself. Our kernel reads the weights in their own order. So nothing is copied, and every change of a weight
takes effect. Weights that torchao stores in int8 are read in int8, with a scale for each output or for each group of
inputs. torch computes long prompts; in bf16 on processors without bf16 instructions, our kernel or torch's float32
does, whichever is faster.
"""

import ctypes
import math
import platform
from functools import cache, partial

import torch
from torch import nn

from lookahead.cpu import native, products
from lookahead.cpu.products import Linear, kernels, pointer
from lookahead.decoding_pass import current_pass

MAX_ROWS = 64  # Most rows of an input. Beyond this, torch is faster, except for these dtypes:
# if the processor has no instructions for bf16, torch takes three to four times as long, however many rows there are.
_IS_SLOW = platform.machine() in ("x86_64", "AMD64") and native.CAPABILITY not in ("AVX512_BF16", "AVX512_AMX")
SLOW_IN_TORCH = (torch.bfloat16,) if _IS_SLOW else ()
MANY_ROWS = 128  # Beyond this, torch's products in float32 are quicker than ours in these dtypes,
AT_ONCE = 2**22  # although the weights have to be converted: so many at a time, at most.
_rooms = cache(partial(native.kernels, "room", native.FLOATS, [ctypes.c_long] * 3, ctypes.c_long))


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, by our kernel in the decoding loop, for layers that are no modules of a model."""
    decoding = current_pass()
    if decoding is not None and decoding.uses_kernels and weight.numel() >= products.MIN_WEIGHTS:
        layer = Linear(weight, None, bias)
        if serves(input, layer):
            return multiply(input, [layer])[0]
    return nn.functional.linear(input, weight, bias)


def multiply(input: torch.Tensor, linears: list[Linear]) -> list[torch.Tensor]:
    """Return the output of each layer for the input [..., inputs]: [..., outputs].

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


def serves(input: torch.Tensor, linear: Linear) -> bool:
    """Whether `multiply` supports these tensors. torch multiplies all others."""
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


def serves_blocks(input: torch.Tensor, linear: Linear) -> bool:
    """Whether `multiply` takes this input of a layer in blocks of GGUF, of as many rows as there are."""
    return (
        type(input) is torch.Tensor
        and input.is_cpu
        and input.numel() > 0
        and input.shape[-1] == linear.inputs
        and linear.is_served(input.dtype)
        and not (torch.is_grad_enabled() and input.requires_grad)
        and not torch.is_autocast_enabled("cpu")
    )
