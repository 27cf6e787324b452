"""Private names by which a module is copied."""

import copy

from torch import nn

from lookahead.compat import replaces_forward


def copy_of_module(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """A copy of a module with these children in place of its own of the same names. All else is the module's own.

    What ``module.compile()`` made is left behind, and a forward of trl: they would run the module itself.
    """
    copied = copy.copy(module)
    if not replaces_forward(module):
        vars(copied).pop("forward", None)
    copied._modules = {**module._modules, **children}
    return copied
