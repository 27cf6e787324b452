"""Memory in huge pages, where Linux gives them: the weights that a pass reads lie in it.

A pass reads all weights once. With pages of 4 KiB, the processor must look up an address every 64 cache lines, which
costs a fifth of the memory's bandwidth and more. With pages of 2 MiB it hardly ever does.
"""

import numpy as np
import torch

CHUNK = 2**25  # bytes that are asked for at once, at least; numpy asks Linux for huge pages from 2**22 on
ALIGNMENT = 64  # bytes, of a cache line


class HugePages:
    """Copies tensors into memory in huge pages. A chunk of it is free again when all copies in it are."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the CPU, which is not empty."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._used + size > self._chunk.nbytes:
            self._chunk = np.empty(max(CHUNK, size + ALIGNMENT), np.uint8)
            self._used = -self._chunk.ctypes.data % ALIGNMENT
        room = self._chunk[self._used : self._used + tensor.nbytes]
        self._used += size
        return torch.from_numpy(room).view(tensor.dtype).view(tensor.shape).copy_(tensor)
