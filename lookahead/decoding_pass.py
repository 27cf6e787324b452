"""Marks the passes of the decoding loop, and the time in which sources of guesses compute.

Only then are our own attention and products used. Any other call of the model or its layers, in any thread, gets
torch's.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from lookahead.compat import version_of
from lookahead.step import Forest


@dataclass
class DecodingPass:
    """A pass of the decoding loop. Its thread runs it within ``with``."""

    splits_attention: bool
    """Whether models with "sdpa" attention use `attention.attend`."""
    uses_kernels: bool
    """Whether our own kernels may be used on a CPU (`products`, `tree_attention`)."""
    is_traced: bool
    """Whether torch.compile traces the pass for `passes.compiled`."""
    siblings: Mapping[int, tuple[nn.Linear, ...]]
    """The layers that take the same input as a layer, by the id of that layer (`products.siblings`)."""
    forest: Forest | None = None
    """The rows of the pass, if layers with a state compute them as a tree (`models.recurrence`)."""
    _input: torch.Tensor | None = None  # the input of `_products`
    _version: int | None = None  # its version when they were computed
    _products: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of the layer, until the layer takes it

    def __enter__(self) -> None:
        self._before = current_pass()
        _thread.current = self

    def __exit__(self, *raised: object) -> None:
        _thread.current = self._before

    def keep(self, input: torch.Tensor, products: dict[int, torch.Tensor]) -> None:
        """Keep products of one input, by the ids of their layers, until the layers take them."""
        self._input, self._version, self._products = input, version_of(input), products

    def product(self, layer: int, input: torch.Tensor) -> torch.Tensor | None:
        """Hand over the product kept for a layer, or None if the input is another one or was written to since."""
        if self._input is not input or self._version != version_of(input):
            return None
        return self._products.pop(layer, None)


_thread = threading.local()


def decoding_pass(
    splits_attention: bool,
    uses_kernels: bool,
    is_traced: bool = False,
    siblings: Mapping[int, tuple[nn.Linear, ...]] = MappingProxyType({}),
    forest: Forest | None = None,
) -> DecodingPass:
    """Run a block as a pass of the decoding loop, in this thread: ``with decoding_pass(...)``."""
    # Tracers follow only torch's own operations, and our kernels give no gradients.
    uses_kernels = uses_kernels and not torch.is_grad_enabled() and not torch.jit.is_tracing()
    return DecodingPass(splits_attention, uses_kernels, is_traced, siblings, forest)


def current_pass() -> DecodingPass | None:
    """The pass that this thread is running; None outside of the decoding loop."""
    return getattr(_thread, "current", None)


@torch.compiler.assume_constant_result
def is_traced() -> bool:
    """Whether this thread traces a pass for `passes.compiled`. Users who compile a model get torch's attention."""
    decoding = current_pass()
    return decoding is not None and decoding.is_traced
