"""Short convolutions, of models that keep a state."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from lookahead.cpu.operations import Activation, Value
from lookahead.cpu.states import Convolve
from lookahead.models.families.page import Page, UnknownModelError


def convolve(
    page: Page, x: Value, module: Any, layer: int, first: int = 0, activation: Activation = "identity"
) -> Value:
    """Convolve channels of a layer of the cache, from the module's channel ``first`` on."""
    page._plain(module, nn.Conv1d)
    channels, _, taps = module.weight.shape
    usual = {"groups": channels, "padding": (taps - 1,), "stride": (1,), "dilation": (1,), "padding_mode": "zeros"}
    if any(getattr(module, name) != value for name, value in usual.items()):
        raise UnknownModelError("its convolutions are not causal, or not of one channel each")
    weight, bias = module.weight.detach()[first : first + x.width, 0], module.bias
    bias = None if bias is None else bias.detach()[first : first + x.width]
    return page._add(Convolve(x, Value(x.width), weight, layer, bias, first, activation))


def convolved(page: Page, parts: Sequence[Value], mixer: Any) -> list[Value]:
    """What a recurrence reads, after a convolution of it all and an activation."""
    found, first, activation = list[Value](), 0, page._activation(ACT2FN[mixer.activation])
    for part in parts:
        found.append(convolve(page, part, mixer.conv1d, mixer.layer_idx, first, activation))
        first += part.width
    return found
