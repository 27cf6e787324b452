"""Weights that were unpacked from codes of 4 bits or from bytes, as such again (`blocks.cpp`)."""

from collections.abc import Callable
from functools import cache, partial

import torch

from lookahead.cpu import native
from lookahead.cpu.blocks import ARGUMENTS, GROUP, SIZES_OF_BYTES, finds, made_of
from lookahead.cpu.products import Format, Linear

_of_bytes = cache(partial(native.kernels, "find_bytes", (torch.float32,), ARGUMENTS))
_of_codes = cache(partial(native.kernels, "find_codes", (torch.float32,), ARGUMENTS))
_of_int4 = cache(partial(native.kernels, "pack", native.FLOATS, ARGUMENTS))


def ways(linear: Linear, dtype: torch.dtype) -> list[Callable[[], Linear | None]]:
    """Return what to try for a layer in float32, or in int8 by groups, the fewest bits first. dtype: of its input."""
    if linear.scales is not None:
        group = linear.weight.shape[1] // linear.scales.shape[1]
        return [partial(_find, _of_int4()[dtype], linear, GROUP, group, True)] if _of_int4() else []
    if not _of_codes():
        return []
    in_bytes = [partial(_find, _of_bytes()[dtype], linear, size, size, False) for size in SIZES_OF_BYTES]
    return [partial(_find, _of_codes()[dtype], linear, GROUP, GROUP, True), *in_bytes]


def _find(finder: Callable[..., None], linear: Linear, unit: int, group: int, in_codes: bool) -> Linear | None:
    """Return what a function of blocks.cpp finds, if it finds all.

    unit: the weights that it takes at a time. group: those with one scale. in_codes: it finds codes.
    """
    outputs, inputs = linear.weight.shape
    if group % unit or inputs % group or not outputs:
        return None
    shape, dtype = ((outputs, inputs // 2), torch.uint8) if in_codes else ((outputs, inputs), torch.int8)
    weight = torch.empty(shape, dtype=dtype, device="cpu")
    scales, offsets = torch.empty(2, outputs, inputs // group, dtype=torch.float32, device="cpu")
    if linear.scales is not None:
        scales = linear.scales.clone()  # never the model's own
    if not finds(finder, linear.weight, linear.weight.numel() // unit, group, weight, scales, offsets):
        return None
    if in_codes:
        return made_of(linear, weight, Format.CODES, scales, offsets)
    return made_of(linear, weight, Format.GROUPED, scales)
