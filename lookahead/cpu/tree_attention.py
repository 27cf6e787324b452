"""Attention of a few queries to many keys on a CPU, with a mask for only the last keys: `tree_attention.cpp`.

For so few queries, torch's own kernel takes two to three times as long.
"""

import ctypes
from functools import cache, partial

import torch

from lookahead.cpu import native
from lookahead.cpu.operations import MAX_HEAD_DIM

_ARGUMENTS = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 10 + [ctypes.c_float]
_kernels = cache(partial(native.kernels, "attend", native.FLOATS, _ARGUMENTS))
_rooms = cache(partial(native.kernels, "attention_room", (torch.uint8,), [], ctypes.c_long))


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attend` supports these tensors."""
    return (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.dtype == key.dtype == value.dtype
        and _fit(query.shape, key.shape)
        and (mask is None or _is_mask_of(query, key, mask))
        and query.stride(3) == 1
        and key.shape == value.shape
        and key.stride() == value.stride()
        and key.stride()[2:] == (key.shape[3], 1)
        and not (torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)))
        and query.dtype in _kernels()
    )


def _fit(query: torch.Size, key: torch.Size) -> bool:
    """Whether these are the shapes of one sequence's queries and keys."""
    return (
        len(query) == len(key) == 4
        and query[0] == key[0] == 1
        and key[1] > 0
        and query[1] % key[1] == 0
        and 0 < query[2] <= key[2]
        and 0 < query[3] == key[3] <= MAX_HEAD_DIM
    )


def _is_mask_of(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    is_served = mask.is_cpu and mask.dtype == query.dtype
    return is_served and mask.shape[:3] == (1, 1, query.shape[2]) and mask.shape[3] <= key.shape[2]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Return the attention of one sequence's tokens, [1, T, heads, head_dim], in the inputs' dtype, summed in float32.

    query: [1, heads, T, head_dim]. key, value: [1, key heads, L + T, head_dim].
    mask: [1, 1, T, masked], added to the scores of the last ``masked`` keys; all tokens see the keys before them. None:
    attention is causal.
    """
    _, heads, rows, size = query.shape
    out = query.new_empty(1, rows, heads, size)
    if mask is not None:
        mask = mask.contiguous()
    threads = torch.get_num_threads()
    room = query.new_empty(threads * _rooms()[torch.uint8](), dtype=torch.uint8)  # torch aligns it to 64 bytes
    _kernels()[query.dtype](
        query.data_ptr(), key.data_ptr(), value.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(),
        room.data_ptr(), heads, key.shape[1], rows, key.shape[2], 0 if mask is None else mask.shape[3], size,
        query.stride(1), query.stride(2), key.stride(1), threads, size**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out
