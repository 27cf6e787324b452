"""Weights of 8 or 4 bits, found again from the numbers that they were unpacked to: `blocks.cpp`.

transformers unpacks a GGUF file to floats, and torchao holds int4 in int8. A pass takes as long as its weights are
large, so it reads what is found here.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch

from lookahead.cpu import native
from lookahead.cpu.products import Linear, pointer

GROUP = 32  # GROUP in blocks.cpp
SIZES_OF_BYTES = GROUP, GROUP // 2  # weights with one scale, where they are bytes
_ARGUMENTS = [ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 4, ctypes.c_long]
_of_bytes = cache(partial(native.kernels, "blocks", "find_bytes", (torch.float32,), _ARGUMENTS))
_of_codes = cache(partial(native.kernels, "blocks", "find_codes", (torch.float32,), _ARGUMENTS))
_of_int4 = cache(partial(native.kernels, "blocks", "pack", native.FLOATS, _ARGUMENTS))


def smallest(linear: Linear, dtype: torch.dtype, known: Linear | None = None) -> Linear:
    """The same layer with the fewest bits that make the same products exactly; the layer itself if it has them.

    dtype: of the layer's input. known: what was found before; it is written over where weights have changed since.
    Float32 becomes codes of 4 bits where it was unpacked from GGUF's Q4_0, Q4_1 or Q4_K, and int8 where it was unpacked
    from a format without offsets (Q8_0, Q6_K, Q5_0, Q3_K). Int8 by groups becomes codes where it is int4.
    """
    weight, scales = linear.weight, linear.scales
    if scales is None and weight.dtype == torch.float32 and _of_codes():
        found = _find(_of_codes()[dtype], linear, GROUP, GROUP, True, known)
        for size in SIZES_OF_BYTES:
            found = found or _find(_of_bytes()[dtype], linear, size, size, False, known)
    elif scales is not None and scales.ndim == 2 and _of_int4():
        found = _find(_of_int4()[dtype], linear, GROUP, weight.shape[1] // scales.shape[1], True, known)
    else:
        found = None
    return found or linear


def _find(
    finder: Callable[..., None], linear: Linear, unit: int, group: int, in_codes: bool, known: Linear | None
) -> Linear | None:
    """Return what a function of blocks.cpp finds, if it finds all.

    unit: the weights that it takes at a time. group: those with one scale. in_codes: it finds codes.
    """
    outputs, inputs = linear.weight.shape
    if group % unit or inputs % group:
        return None
    shape, dtype = ((outputs, inputs // 2), torch.uint8) if in_codes else ((outputs, inputs), torch.int8)
    groups = outputs, inputs // group
    if known is None or known.scales is None or (known.weight.shape, known.scales.shape) != (shape, groups):
        scales, offsets = torch.empty(2, *groups, dtype=torch.float32, device="cpu")
        known = Linear(torch.empty(shape, dtype=dtype, device="cpu"), scales, None, offsets if in_codes else None)
    scales = known.scales if linear.scales is None else linear.scales.clone()  # never the model's own
    found = ctypes.c_bool()
    finder(
        linear.weight.data_ptr(), linear.weight.numel() // unit, group, known.weight.data_ptr(), pointer(scales),
        pointer(known.offsets), ctypes.byref(found), torch.get_num_threads(),
    )  # fmt: skip
    return Linear(known.weight, scales, linear.bias, known.offsets) if found else None
