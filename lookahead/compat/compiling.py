"""What `passes.compiled` needs of torch.compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
"""Errors that torch.compile raises if it cannot compile."""

TRACED_LINEAR = torch._C._nn.linear
"""The operation of a linear layer in a traced graph."""


def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """Compile a traced graph to a program that rounds to the tensors' dtype wherever the traced code does."""
    return torch._inductor.compile(graph, inputs, options={"emulate_precision_casts": True})


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Leave the size of a dimension open in the program that is traced with this tensor."""
    torch._dynamo.mark_dynamic(tensor, dimension)


@contextmanager
def guarded_hooks() -> Iterator[None]:
    """Make programs compiled in this block notice hooks that are added later."""
    config = torch._dynamo.config
    before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
    try:
        yield
    finally:
        config.skip_nnmodule_hook_guards = before
