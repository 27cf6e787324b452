"""Which pass of a thread is one of the decoding loop's.

Attention and products of our own take part in those passes alone. Whoever else calls the model or its layers, in
whatever thread and at whatever time, gets torch's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class DecodingPass:
    """A pass that is under way."""

    attends_in_parts: bool
    """Whether models with "sdpa" attention use `attention.attend`."""
    uses_kernels: bool
    """Whether kernels of our own may be used on a CPU (`products`, `tree_attention`)."""
    given: torch.Tensor | None = None
    """The input that `products` were last computed of, ..."""
    version: int | None = None
    """... its version then, ..."""
    products: dict[int, torch.Tensor] = field(default_factory=dict)
    """... and those that no layer has asked for yet, by the layer's id."""


_thread = threading.local()


@contextmanager
def decoding_pass(attends_in_parts: bool, uses_kernels: bool) -> Iterator[None]:
    before = current_pass()
    _thread.current = DecodingPass(attends_in_parts, uses_kernels)
    try:
        yield
    finally:
        _thread.current = before


def current_pass() -> DecodingPass | None:
    """That of this thread; None outside of the decoding loop."""
    return getattr(_thread, "current", None)
