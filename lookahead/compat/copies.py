"""Private names of torch for copying a module."""

import copy

from torch import nn

from lookahead.compat import replaces_forward


def copy_of_module(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """A copy of a module that shares everything with it except these children, by name.

    A compiled call (``module.compile()``) and trl's forward are not copied, because they would run the original.
    """
    copied = copy.copy(module)
    if not replaces_forward(module):
        vars(copied).pop("forward", None)
    copied._modules = {**module._modules, **children}
    return copied
