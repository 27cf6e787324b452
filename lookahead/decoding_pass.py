"""Marks the passes of the decoding loop, and the time in which sources of guesses compute.

Only then are our own attention and products used. Any other call of the model or its layers, in any thread, gets
torch's.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lookahead.models.biases import Places
    from lookahead.models.recurrence import Forest


@dataclass
class DecodingPass:
    """A pass of the decoding loop: a block that this thread runs in ``with DecodingPass(...)``."""

    splits_attention: bool
    """Whether models with "sdpa" attention use `attention.attend`."""
    uses_kernels: bool
    """Whether our own kernels may be used on a CPU (`gemm`, `tree_attention`)."""
    forest: "Forest | None" = None
    """The rows of the pass, if layers with a state compute them as a tree (`models.recurrence`)."""
    places: "Places | None" = None
    """The positions of keys and rows, if attention is biased by positions (`models.biases`)."""

    def __post_init__(self) -> None:
        # Tracers follow only torch's own operations, and our kernels give no gradients.
        self.uses_kernels = self.uses_kernels and not torch.is_grad_enabled() and not torch.jit.is_tracing()

    def __enter__(self) -> None:
        self._before = current_pass()
        _thread.current = self

    def __exit__(self, *raised: object) -> None:
        _thread.current = self._before


_thread = threading.local()


def current_pass() -> DecodingPass | None:
    """The pass that this thread is running; None outside of the decoding loop."""
    return getattr(_thread, "current", None)
