"""The top-k tokens of rows of logits on a CPU: `top_k.cpp`. torch takes ten times as long."""

import ctypes
from functools import cache, partial

import numpy as np
import torch

from lookahead.cpu import native

MAX_COUNT = 256  # in top_k.h
_ARGUMENTS = [ctypes.c_void_p] + [ctypes.c_long] * 3 + [ctypes.c_void_p] * 2 + [ctypes.c_long, ctypes.c_float]
_kernels = cache(partial(native.kernels, "top_k", native.FLOATS, _ARGUMENTS))


def serves(logits: torch.Tensor, count: int) -> bool:
    """Whether `top_k` takes these logits."""
    return logits.is_cpu and logits.dtype in _kernels() and 0 < count <= min(MAX_COUNT, logits.shape[-1])


def top_k(logits: torch.Tensor, temperature: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the top ``count`` tokens of each row and their probabilities, [..., count], most likely first.

    logits: [..., vocabulary]. The probabilities are a softmax of logits / temperature over the whole vocabulary, to
    four digits. Those of a row with a NaN or an infinity are 0.
    """
    logits = logits.contiguous()
    *shape, vocabulary = logits.shape
    probabilities, tokens = np.empty((*shape, count), np.float32), np.empty((*shape, count), np.int64)
    rows = probabilities.size // count
    _kernels()[logits.dtype](
        logits.data_ptr(), rows, vocabulary, count, probabilities.ctypes.data, tokens.ctypes.data,
        torch.get_num_threads(), temperature,
    )  # fmt: skip
    return tokens, probabilities
