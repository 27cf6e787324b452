"""Packs weights: the same numbers in fewer bits (`blocks.cpp`).

The time of a pass is proportional to the bytes of its weights. transformers unpacks a GGUF file to floats, and torchao
stores int4 in int8: these are packed in 8 or 4 bits again. So is MXFP4, which transformers unpacks to bf16. Other bf16
numbers, also in a model that was loaded in float32, are packed in 12 bits by indexes. Other transposed weights are
copied in their own number of bits.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import torch

from lookahead.cpu import native
from lookahead.cpu.products import Format, Linear, pointer

GROUP = 32  # GROUP in blocks.cpp
SIZES_OF_BYTES = GROUP, GROUP // 2  # weights with one scale, if they are bytes
ARGUMENTS = [ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 4, ctypes.c_long]
_of_mxfp4 = cache(partial(native.kernels, "find_mxfp4", native.FLOATS, ARGUMENTS))
_of_bfloat16 = cache(partial(native.kernels, "index", native.FLOATS, ARGUMENTS))
_CHANGED = [ctypes.c_void_p, *[ctypes.c_long] * 3]
_changed = cache(partial(native.kernels, "changed", native.FLOATS, _CHANGED, ctypes.c_bool))
_DIGEST = [ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_long]
_digest = cache(partial(native.kernels, "digest", (torch.uint8,), _DIGEST))
TOGETHER = 16 if native.CAPABILITY.startswith("AVX512") else 8  # Indexed::TOGETHER in indexed.h, and Indexed::BLOCK:
INDEXED = 4 * TOGETHER
DIGEST_LANES = 8  # digest::LANES


def pack(linear: Linear, dtype: torch.dtype, known: Linear | None = None, indexes: bool = True) -> Linear:
    """The same layer with the fewest bits that give exactly the same products; the layer itself if it has them.

    dtype: of the layer's input. known: packed of a layer of the same form, which is returned if it still matches this
    layer, as its digest shows. It is never written to, because calls in other threads may read it. indexes: whether
    bf16 may be packed in 12 bits, and transposed weights copied. Float32 becomes 4-bit codes if it was unpacked from
    GGUF's Q4_0, Q4_1 or Q4_K, and int8 if it was unpacked from a format without offsets (Q8_0, Q6_K, Q5_0, Q3_K). Int8
    by groups becomes codes if it is int4. float32 and bf16 become MXFP4 blocks (OCP Microscaling Formats 1.0) if all
    weights are such numbers, also if they are transposed. Other bf16 is packed in 12 bits, and so is float32 if all
    weights are bf16 numbers. Other transposed weights are laid out in rows.
    """
    weight, scales = linear.weight, linear.scales
    is_transposed = linear.is_transposed(dtype)
    ways: list[Callable[[], Linear | None]] = []
    if is_transposed:
        ways = [lambda: made_of(linear, weight.contiguous(), Format.FLOATS)] if indexes else []
    elif weight.dtype == torch.float32 or (scales is not None and scales.ndim == 2):
        from lookahead.cpu import codes  # weights in bf16 have none

        ways = codes.ways(linear, dtype)
    if linear.format == Format.FLOATS and _mxfp4_of(weight[:1], dtype) is not None:  # else they need not all be read
        ways.insert(0, lambda: _find_mxfp4(linear, dtype))
    if not is_transposed and linear.format == Format.FLOATS and indexes and can_index(dtype):
        was_indexed = known is not None and known.format == Format.INDEXED  # very likely it still is
        ways.insert(0 if was_indexed else len(ways), partial(_index, _of_bfloat16()[dtype], linear))
    if not ways:
        return linear
    digest = digest_of(linear)  # before it is read, so that what changes meanwhile is seen later
    if known is not None and known.digest == digest:
        return made_of(linear, known.weight, known.format, known.scales, known.offsets)._replace(digest=digest)
    return next((found._replace(digest=digest) for way in ways if (found := way())), linear)


def can_index(dtype: torch.dtype) -> bool:
    """Whether this processor can read numbers of this dtype in 12 bits."""
    return dtype in _of_bfloat16()


def copies_of(linears: Iterable[Linear]) -> np.ndarray:
    """Return those of these layers that `pack` has made, as a `comparison` takes them: int64 [copies, 10].

    It holds their addresses: the layers, with their `origin`, must outlive it.
    """
    return np.array([_copy(linear) for linear in linears if linear.origin is not None], np.int64).reshape(-1, 10)


def comparison(copies: np.ndarray, dtype: torch.dtype) -> Callable[[int, int], bool]:
    """Return a function of a turn and a number of parts: whether copies no longer match their weights.

    Each turn checks one block of each copy in one part of the copies; the next turn checks another part and other
    blocks. The array must outlive the function.
    """
    return partial(_changed()[dtype], copies.ctypes.data, len(copies))


def digest_of(linear: Linear) -> bytes:
    """The digests of a layer's weight and scales (`digest.h`). They differ if any number has changed."""
    return digests(memory_of([linear])).tobytes()


def memory_of(linears: Iterable[Linear]) -> np.ndarray:
    """Addresses and bytes of weights and scales, int64 [tensors, 2]. The layers must outlive it."""
    tensors = [tensor for linear in linears for tensor in (linear.weight, linear.scales) if tensor is not None]
    return np.array([(tensor.data_ptr(), _span(tensor)) for tensor in tensors], np.int64).reshape(-1, 2)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first number to its last, including gaps between rows if it is a part of another tensor."""
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return (last + 1) * tensor.element_size()


def digests(memory: np.ndarray) -> np.ndarray:
    """The digests of what `memory_of` has found: uint64 [tensors, DIGEST_LANES]."""
    found = np.zeros((len(memory), DIGEST_LANES), np.uint64)
    _digest()[torch.uint8](memory.ctypes.data, len(memory), found.ctypes.data, torch.get_num_threads())
    return found


def _copy(found: Linear) -> tuple[int, ...]:
    """The fields of a Copy in blocks.cpp."""
    weight, scales, origin = found.weight, found.scales, found.origin
    assert origin is not None
    outputs, inputs = origin.weight.shape
    return (
        origin.weight.data_ptr(), pointer(origin.scales), weight.data_ptr(), pointer(scales), pointer(found.offsets),
        outputs, inputs, inputs if scales is None else inputs // scales.shape[1],
        0 if origin.weight.is_contiguous() else origin.weight.stride(1), found.format,
    )  # fmt: skip


def made_of(
    linear: Linear,
    weight: torch.Tensor,
    found: Format,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> Linear:
    """A layer with the bias of this one, and with what was found of its weight."""
    unpacked = linear.weight if found == Format.INDEXED else None
    return Linear(weight, scales, linear.bias, offsets, unpacked, linear, None, found)


def _find_mxfp4(linear: Linear, dtype: torch.dtype) -> Linear | None:
    blocks = _mxfp4_of(linear.weight, dtype)
    return None if blocks is None else made_of(linear, blocks, Format.MXFP4)


def _mxfp4_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return these weights as MXFP4 blocks, uint8 [outputs, bytes], if they all are such numbers."""
    if dtype not in _of_mxfp4() or weight.shape[1] % GROUP or not weight.numel():
        return None
    weight, (weights, size) = weight.contiguous(), Format.MXFP4.block
    blocks = torch.empty(len(weight), weight.shape[1] // weights * size, dtype=torch.uint8, device="cpu")
    return blocks if finds(_of_mxfp4()[dtype], weight, weight.numel() // GROUP, GROUP, blocks) else None


def finds(
    finder: Callable[..., None],
    weight: torch.Tensor,
    count: int,
    size: int,
    into: torch.Tensor,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> bool:
    """Whether a function of blocks.cpp can write all of a weight ``into`` memory in its format.

    count, size: its units and the weights of a unit or group, as the function takes them.
    """
    found = ctypes.c_bool()
    finder(
        weight.data_ptr(), count, size, into.data_ptr(), pointer(scales), pointer(offsets), ctypes.byref(found),
        torch.get_num_threads(),
    )  # fmt: skip
    return found.value


def _index(indexer: Callable[..., None], linear: Linear) -> Linear | None:
    """Return the layer with its weight in 12 bits (`indexed.h`), if its weights are bf16 numbers."""
    outputs, inputs = linear.weight.shape
    if inputs % INDEXED:
        return None
    first = linear.weight[0]
    if not torch.equal(first, first.bfloat16().to(first.dtype)):  # nothing large is allocated in vain
        return None
    bytes_of_row = -(-(inputs * 3 // 2 + 16 + inputs // INDEXED) // 64) * 64
    weight = torch.zeros(-(-outputs // TOGETHER) * TOGETHER, bytes_of_row, dtype=torch.uint8, device="cpu")
    return made_of(linear, weight, Format.INDEXED) if finds(indexer, linear.weight, outputs, inputs, weight) else None
