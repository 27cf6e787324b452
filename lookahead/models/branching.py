"""A copy of a model that can compute branches: it shares everything with the model except some functions.

transformers' forward of such a layer looks up functions over states by name: ``causal_conv1d_fn``,
``mamba2_chunk_scan`` and others. A copy of the layer runs the same forward, and finds our functions (`recurrence`)
under these names. So do models that bias attention by the columns of keys, and find our biases (`biases`). The modules
that contain such a layer are copied with it. Nothing is written to the model or to transformers,
so all other calls, in any thread, get transformers' own functions. Passes over a single row are such calls.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from lookahead.compat import replaces_forward
from lookahead.compat.copies import copy_of_module
from lookahead.models import biases, recurrence
from lookahead.models.layers import keeps_state
from lookahead.models.state import state_of
from lookahead.models.users_code import PASS_ON, package_of

_KNOWN_LAYERS = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
_OURS: dict[str, Callable] = {
    "causal_conv1d_fn": recurrence.convolve,
    "torch_chunk_gated_delta_rule": recurrence.delta_rule,
    "chunk_kimi_delta_attention": recurrence.delta_rule,
    "mamba2_chunk_scan": recurrence.scan,
}
# These are given transformers' own function first.
_BIASES: dict[str, Callable] = {"build_alibi_tensor": biases.by_position, "build_mpt_alibi_tensor": biases.by_distance}
# What a layer calls to change a state of the cache, and the functions that must have computed it.
_CHANGES = {
    "update_conv_state": {"causal_conv1d_fn"},
    "update_recurrent_state": _OURS.keys() - {"causal_conv1d_fn"},
}


def why_not(model: PreTrainedModel) -> str | None:
    """Why layers with a state, or with biases, cannot compute branches; None if they can."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    unknown = {type(layer) for layer in layers if keeps_state(layer)} - _KNOWN_LAYERS
    if unknown:
        return f"its cache keeps states in a {unknown.pop().__name__}"
    state = state_of(model)
    foreign = next((foreign for foreign in state.foreign if package_of(foreign) not in PASS_ON), None)
    if foreign is not None:
        return str(foreign)
    if state.is_compiled:
        return "torch.compile has compiled the model or a part of it"
    is_known = biases_keys(model)
    for module in model.modules():
        for name, method in _methods(type(module)).items():
            changes = _CHANGES.keys() & set(method.__code__.co_names)
            if changes and not (name == "forward" and all(_CHANGES[how] & _looked_up(method) for how in changes)):
                return f"{type(module).__name__} computes its state by functions that lookahead cannot apply to trees"
            is_known = is_known or bool(changes)
    if not is_known:
        return "its layers keep their states outside the cache"
    moved = next((m for m in model.modules() if replaces_forward(m)), None)
    if moved is not None:  # bound to the module itself, so it would run in the place of the copy
        return f"the forward of its {type(moved).__name__} was replaced, as accelerate does"
    return None


def biases_keys(model: PreTrainedModel) -> bool:
    """Whether the code of the model makes biases by the columns of keys, in a way that is known."""
    methods = (method for module in model.modules() for method in _methods(type(module)).values())
    return any(not _BIASES.keys().isdisjoint(_looked_up(method)) for method in methods)


def branching(model: PreTrainedModel) -> PreTrainedModel:
    """Return the copy for passes with a forest or with places, if `why_not` gives no reason against it.

    It is the same while ``model`` does not change.
    """
    kept, key = state_of(model).kept, ("branching", model.training)
    if key not in kept:
        copied = _copied(model, {})
        vars(copied).pop("lookahead", None)  # the wrap of the model
        assert isinstance(copied, PreTrainedModel)
        kept[key] = copied
    return kept[key]


def _copied(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a module, and of those in it, if it contains one that calls them; else the module itself."""
    if id(module) not in known:
        children = {name: _copied(child, known) for name, child in module.named_children()}
        ours = {name: method for name, method in _methods(type(module)).items() if _looked_up(method)}
        if ours or any(child is not module._modules[name] for name, child in children.items()):
            copied = copy_of_module(module, children)
            for name, method in ours.items():
                setattr(copied, name, MethodType(_rebound(method), copied))
            known[id(module)] = copied
        else:
            known[id(module)] = module
    return known[id(module)]


def _methods(cls: type) -> dict[str, FunctionType]:
    """The methods of a class of modules, without what decorators wrap around them."""
    own = [base for base in reversed(cls.__mro__) if issubclass(base, nn.Module) and base is not nn.Module]
    found = {name: inspect.unwrap(value) for base in own for name, value in vars(base).items() if callable(value)}
    return {name: method for name, method in found.items() if isinstance(method, FunctionType)}


def _looked_up(method: FunctionType) -> set[str]:
    """Which of our functions a method would call, by the names that it looks up."""
    known = _OURS.keys() | _BIASES
    return {name for name in method.__code__.co_names if name in known and name in method.__globals__}


def _rebound(method: FunctionType) -> FunctionType:
    """Return the same method, which finds our functions under these names."""
    own = method.__globals__
    ours = {name: _OURS[name] if name in _OURS else partial(_BIASES[name], own[name]) for name in _looked_up(method)}
    namespace = own | ours
    rebound = FunctionType(method.__code__, namespace, method.__name__, method.__defaults__, method.__closure__)
    rebound.__kwdefaults__ = method.__kwdefaults__
    return rebound
