"""Experts, as the pages of families with a mixture of them need them."""

from typing import Any

import torch
from torch import nn

from lookahead.compat.gguf import gguf_class
from lookahead.cpu.experts import Experts
from lookahead.cpu.gguf import BlocksExperts
from lookahead.cpu.operations import Activation, Value
from lookahead.cpu.products import Linear
from lookahead.models.families.gguf import format_of
from lookahead.models.families.page import Page


def mixture(
    page: Page,
    x: Value,
    router: Any,
    experts: Any,
    adds_to_one: bool,
    rounds: bool = True,
    suffix: str = "TopKRouter",
    in_float32: bool = False,
    correction: torch.Tensor | None = None,
    top_k: int | None = None,
    routing: Linear | None = None,
    into: str = "gate_up_proj",
    is_transposed: bool = False,
    **settings: Any,
) -> Value:
    """Add the experts that a router chooses for each row of x.

    rounds: whether weights of experts are rounded. suffix: of the router's class. in_float32: whether it computes in
    float32. top_k: the router's, if this is not its own. routing: its layer, if it has one. into: the name of the
    experts' first layers. is_transposed: their weights lie so. settings: further ones of `Experts`.
    """
    page.own(router, suffix)
    is_in_file = type(experts) is BlocksExperts
    if is_in_file or type(experts) is gguf_class("GgufExperts"):
        page._check(experts)
    else:
        page.own(experts, "Experts")
    if routing is None:
        routing = Linear(router.weight, None, getattr(router, "bias", None))
    of = [] if in_float32 else [routing]
    is_transposed = getattr(experts, "is_transposed", is_transposed)
    names = ("gate_proj", "up_proj", "down_proj") if is_in_file else (into, "down_proj")
    first, *others = (_of_each(experts, name, is_transposed) for name in names)
    for layers in zip(first[: len(first) - settings.get("identities", 0)], *others, strict=True):
        of += layers
    settings |= {"is_apart": True} if is_in_file else {}
    settings |= {"router": routing.weight.float() if in_float32 else None}
    settings |= {"correction": None if correction is None else correction.detach().float().flatten()}
    is_silu = "limit" in settings or experts.act_fn is nn.functional.silu
    activation: Activation = "silu" if is_silu else page._activation(experts.act_fn)
    fields = tuple(of), top_k or router.top_k, activation, adds_to_one, rounds
    return page._add(Experts(x, Value(x.width), *fields, **settings))


def _of_each(experts: Any, name: str, is_transposed: bool) -> list[Linear]:
    """A linear layer of each expert. Where they have biases, and in some families, their weights lie transposed."""
    if type(experts) is BlocksExperts:
        return experts.linears(name)
    weights, biases = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
    if type(experts) is gguf_class("GgufExperts"):
        format = format_of(getattr(experts, name.replace("_proj", "_type")))
        return [Linear(weight, format=format) for weight in weights]
    if biases is None:
        return [Linear(weight.T if is_transposed else weight) for weight in weights]
    return [Linear(weight.T, None, bias) for weight, bias in zip(weights, biases.detach(), strict=True)]
