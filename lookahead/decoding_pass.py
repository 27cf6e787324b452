"""Which pass of a thread is one of the decoding loop's.

Attention and products of our own take part in those passes alone. Whoever else calls the model or its layers, in
whatever thread and at whatever time, gets torch's.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from lookahead.compat import version_of


@dataclass
class DecodingPass:
    """A pass that is under way."""

    splits_attention: bool
    """Whether models with "sdpa" attention use `attention.attend`."""
    uses_kernels: bool
    """Whether kernels of our own may be used on a CPU (`products`, `tree_attention`)."""
    is_traced: bool
    """Whether torch.compile looks at the pass, to make a program of it for `passes.compiled`."""
    siblings: Mapping[int, tuple[nn.Linear, ...]]
    """For a layer, by its id, those that are given the same input (`products.siblings`)."""
    _input: torch.Tensor | None = None  # that products were last computed of
    _version: int | None = None  # of it, then
    _products: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, those that were not asked for yet

    def keep(self, input: torch.Tensor, products: dict[int, torch.Tensor]) -> None:
        """Keep products of one input until their layers, known by their ids, ask for them."""
        self._input, self._version, self._products = input, version_of(input), products

    def product(self, layer: int, input: torch.Tensor) -> torch.Tensor | None:
        """The product kept for a layer, if it is of this input, not written to since."""
        if self._input is not input or self._version != version_of(input):
            return None
        return self._products.pop(layer, None)


_thread = threading.local()


@contextmanager
def decoding_pass(
    splits_attention: bool,
    uses_kernels: bool,
    is_traced: bool = False,
    siblings: Mapping[int, tuple[nn.Linear, ...]] = MappingProxyType({}),
) -> Iterator[None]:
    """Make what this thread does in the block a pass of the decoding loop."""
    before = current_pass()
    # Tracers follow torch's own operations alone, and our kernels give no gradients.
    uses_kernels = uses_kernels and not torch.is_grad_enabled() and not torch.jit.is_tracing()
    _thread.current = DecodingPass(splits_attention, uses_kernels, is_traced, siblings)
    try:
        yield
    finally:
        _thread.current = before


def current_pass() -> DecodingPass | None:
    """That of this thread; None outside of the decoding loop."""
    return getattr(_thread, "current", None)


@torch.compiler.assume_constant_result
def is_traced() -> bool:
    """Whether this thread traces a pass for `passes.compiled`. Whoever else compiles a model gets torch's attention."""
    under_way = current_pass()
    return under_way is not None and under_way.is_traced
