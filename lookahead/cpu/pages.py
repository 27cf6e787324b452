"""Memory in huge pages, if Linux provides them, for packed weights and long caches.

A pass reads all weights once, and all keys and values. With pages of 4 KiB, the processor must translate an address
every 64 cache lines, which costs at least a fifth of the memory's bandwidth. With pages of 2 MiB it hardly ever must.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

CHUNK = 2**25  # least bytes of an allocation; numpy requests huge pages from 2**22 on
ALIGNMENT = 64  # bytes, of a cache line


def empty(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [numbers] on the CPU, with any content. It begins a cache line."""
    size = numbers * dtype.itemsize
    chunk = np.empty(size + ALIGNMENT, np.uint8)
    start = -chunk.ctypes.data % ALIGNMENT
    return torch.from_numpy(chunk[start : start + size]).view(dtype)


def empty_together(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of these shapes as for `empty`, in one allocation, which is more likely to get huge pages."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = empty(sum(sizes), dtype).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class HugePages:
    """Copies tensors into memory in huge pages. A chunk is freed when all copies in it are freed."""

    def __init__(self) -> None:
        self._chunk = empty(0, torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the CPU, which is not empty."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._used + size > self._chunk.nbytes:
            self._chunk, self._used = empty(max(CHUNK, size), torch.uint8), 0
        room = self._chunk[self._used : self._used + tensor.nbytes]
        self._used += size
        return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
