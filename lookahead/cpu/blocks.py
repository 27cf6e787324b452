"""The same weights in fewer bits: `blocks.cpp`.

A pass takes as long as its weights are large. transformers unpacks a GGUF file to floats, and torchao holds int4 in
int8: their 8 or 4 bits are found again. bf16 numbers, also in a model that was loaded in float32, are indexed in 12
bits.
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
_of_bfloat16 = cache(partial(native.kernels, "blocks", "index", native.FLOATS, _ARGUMENTS))
TOGETHER = 16 if native.HAS_TILES else 1  # Indexed::TOGETHER in weights.h, and Indexed::BLOCK:
INDEXED = 64 if native.CAPABILITY.startswith("AVX512") else 32


def smallest(linear: Linear, dtype: torch.dtype, known: Linear | None = None, indexes: bool = True) -> Linear:
    """The same layer with the fewest bits that make the same products exactly; the layer itself if it has them.

    dtype: of the layer's input. known: what was found before; it is written over where weights have changed since.
    indexes: whether bf16 numbers may be indexed.
    Float32 becomes codes of 4 bits where it was unpacked from GGUF's Q4_0, Q4_1 or Q4_K, and int8 where it was unpacked
    from a format without offsets (Q8_0, Q6_K, Q5_0, Q3_K). Int8 by groups becomes codes where it is int4. bf16 becomes
    12 bits, and so does float32 where all weights are bf16 numbers.
    """
    weight, scales = linear.weight, linear.scales
    ways: list[Callable[[], Linear | None]] = []
    if scales is None and weight.dtype == torch.float32 and _of_codes():
        ways = [partial(_find, _of_codes()[dtype], linear, GROUP, GROUP, True, known)]
        ways += [partial(_find, _of_bytes()[dtype], linear, size, size, False, known) for size in SIZES_OF_BYTES]
    elif scales is not None and scales.ndim == 2 and _of_int4():
        ways = [partial(_find, _of_int4()[dtype], linear, GROUP, weight.shape[1] // scales.shape[1], True, known)]
    if scales is None and indexes and can_index(dtype):
        was_indexed = known is not None and known.scales is None  # then it very likely is so still
        ways.insert(0 if was_indexed else len(ways), partial(_index, _of_bfloat16()[dtype], linear, known))
    return next((found for way in ways if (found := way())), linear)


def can_index(dtype: torch.dtype) -> bool:
    """Whether this processor can read numbers of this dtype in 12 bits."""
    return dtype in _of_bfloat16()


def _index(indexer: Callable[..., None], linear: Linear, known: Linear | None) -> Linear | None:
    """Return the layer with its weight in 12 bits (`Indexed` in weights.h), if its weights are bf16 numbers."""
    outputs, inputs = linear.weight.shape
    if inputs % INDEXED:
        return None
    shape = -(-outputs // TOGETHER) * TOGETHER, -(-(inputs * 3 // 2 + 16 + inputs // INDEXED) // 64) * 64
    weight = known.weight if known is not None and known.scales is None and known.weight.shape == shape else None
    if weight is None:
        first = linear.weight[0]
        if not torch.equal(first, first.bfloat16().to(first.dtype)):  # nothing large is allocated in vain
            return None
        weight = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    found = ctypes.c_bool()
    indexer(
        linear.weight.data_ptr(), outputs, inputs, weight.data_ptr(), 0, 0, ctypes.byref(found), torch.get_num_threads()
    )
    return Linear(weight, None, linear.bias, None, linear.weight) if found else None


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
