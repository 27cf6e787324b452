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
    _input: torch.Tensor | None = None  # that products were last computed of
    _version: int | None = None  # of it, then
    _products: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, those that were not asked for yet

    def keep(self, input: torch.Tensor, products: dict[int, torch.Tensor]) -> None:
        """Keep products of one input until their layers, known by their ids, ask for them."""
        self._input, self._version, self._products = input, _version_of(input), products

    def product(self, layer: int, input: torch.Tensor) -> torch.Tensor | None:
        """The product kept for a layer, if it is of this input, not written to since."""
        if self._input is not input or self._version != _version_of(input):
            return None
        return self._products.pop(layer, None)


def _version_of(input: torch.Tensor) -> int | None:
    """How often it was written to; tensors made in inference mode do not tell."""
    return None if input.is_inference() else input._version


_thread = threading.local()


@contextmanager
def decoding_pass(attends_in_parts: bool, uses_kernels: bool) -> Iterator[None]:
    before = current_pass()
    # Tracers follow torch's own operations alone, and our kernels give no gradients.
    uses_kernels = uses_kernels and not torch.is_grad_enabled() and not torch.jit.is_tracing()
    _thread.current = DecodingPass(attends_in_parts, uses_kernels)
    try:
        yield
    finally:
        _thread.current = before


def current_pass() -> DecodingPass | None:
    """That of this thread; None outside of the decoding loop."""
    return getattr(_thread, "current", None)
