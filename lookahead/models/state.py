"""The current state of a model: everything that a verdict on its passes depends on.

A model may change while it is wrapped: its classes, their code, dtypes, quantization, hooks, settings. So each call
checks it. If no object has changed since the last check, this takes a fraction of a millisecond.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead import compat
from lookahead.cpu.products import classes_of
from lookahead.models import attention
from lookahead.models.kept import ATTRIBUTE, OfModels
from lookahead.models.origin import OF_LOOP, PREPARES_INPUTS, Foreign, ReachableCode, code_of, is_defined, is_own

_CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)  # which `LookaheadCache` stands in for
# Settings that no pass reads.
_WITHOUT_EFFECT = {
    "_name_or_path", "_commit_hash", "transformers_version", "architectures", "id2label", "label2id", "problem_type",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
}  # fmt: skip
# Settings that the cache and the masks must read from one configuration, and passes, too.
_OF_ALL = {
    "sliding_window", "layer_types", "attention_chunk_size", "rope_parameters", "is_causal",
    "use_bidirectional_attention", "_attn_implementation_internal",
}  # fmt: skip
_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, partial
_SETTINGS = bool, int, float, str
_TOLD = type, torch.Tensor, nn.Module, PreTrainedConfig, GenerationConfig, torch.device, torch.layout
_OF_ALL_MODULES = vars(nn.Module()).keys()  # parts, tensors and hooks
_MOST_LOOKS = 100  # at a model that another thread changes meanwhile
_MOST_ORIGINS = 64  # kept for later models of the same classes

# None has code of users, which may refer to a model and keep it alive.
_origins: dict[frozenset[type], ReachableCode] = {}


class _Same:
    """An object as part of a key: equal only to itself. It is kept, so that no other object can get its address."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class State:
    """Everything that a verdict on a model's passes depends on."""

    def __init__(self, model: PreTrainedModel, before: "State | None" = None):
        """before: of the same model."""
        self._modules = list(model.modules())[1:]  # the model itself would be kept alive
        modules = [model, *self._modules]
        self._classes = classes_of(modules)
        found = [compat.dictionaries_of(module) for module in modules]
        self._dictionaries = [*found[0][1], *(d for own, others, _ in found[1:] for d in (own, *others))]
        self._filled = [d for d in self._dictionaries if d]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._own = _identities(model)
        self._lists = [(value, value.copy()) for value in self._values if _is_list_of_settings(value)]
        self._tensors = [d for *_, tensors in found for d in tensors]  # not the tensors, which would be kept alive
        self._kinds = _kinds(self._tensors)
        self._configs = list(
            {id(c): c for m in modules if isinstance(c := vars(m).get("config"), PreTrainedConfig)}.values()
        )
        self._settings = repr(list(map(_settings, self._configs)))
        self._differing = _differing(model.config.get_text_config(decoder=True), self._configs)
        self._global_hooks = compat.global_hooks_of_users()
        self._registered = _registered(model)
        origin = self._origin = _origin(self._classes, self._registered, before)
        self.names = origin.names
        """Names of attributes and functions that passes use."""
        self.foreign = (*origin.foreign, *_replaced(modules, origin))
        """Code that passes run, and that neither torch nor transformers defines."""
        hooks = [(i, hook) for i, module in enumerate(modules) for hook in compat.hooks_of_users(module)]
        hooks += [(-1, hook) for hook in self._global_hooks]
        self.kept: dict[Hashable, Any] = {}
        """What was made of the model as it is, or found out about it, such as copies of its modules."""
        self.users = None
        """The foreign code and the hooks; None if there are none."""
        if self.foreign or hooks:
            from lookahead.models.users_code import UsersCode  # other models run none

            self.users = UsersCode(modules, _unwrapped(self._classes[0]), self.foreign, [hook for _, hook in hooks])
        own = _replaced_by_family(_unwrapped(self._classes[0]))
        self._own_loop = next((own[name] for name in OF_LOOP if name in own and name not in PREPARES_INPUTS), None)
        by_users = self.users.prepares if self.users else None
        self.prepares = by_users or next((own[name] for name in PREPARES_INPUTS if name in own), None)
        """What chooses the inputs of the passes of generate(), if that is not transformers' usual method."""
        opaque = [
            (i, name, _Same(value))
            for i, module in enumerate(modules)
            for name, value in vars(module).items()
            if name not in _OF_ALL_MODULES and not _is_told(value)
            if i or name in self.names  # others write their own into the whole model
        ]
        self.is_known = not (self.foreign or hooks or opaque) and all(map(is_defined, self._classes))
        """Whether torch and transformers define all code of passes, and `text` says all about the modules."""
        self.in_training = tuple(i for i, module in enumerate(modules) if module.training)
        """Which modules are in training mode."""
        self.is_compiled = any(map(compat.is_compiled, modules))
        """Whether the user has compiled the model or a part of it. Compiled code does not notice that a pass is
        ours."""
        self._hooks_take_keywords = bool(self._global_hooks) or any(map(compat.hooks_take_keywords, modules))
        kinds = [
            (_name(kind), dtype, device, layout, _quantization(tensor))
            for tensor, (kind, dtype, device, layout) in zip(_of(self._tensors), self._kinds, strict=True)
        ]
        self.is_strided = all(layout is torch.strided for *_, layout in self._kinds)
        """Whether all tensors have an address for each number: sparse ones have not."""
        self._lacks_numbers = any(device.type == "meta" for *_, device, _ in self._kinds) and not any(
            compat.execution_device(module) is not None
            for module in modules  # accelerate brings them
        )
        changing = {*origin.written, "training"}  # the probe runs in eval mode
        attributes = [_attributes(module, changing) for module in modules]
        numbers = {id(module): i for i, module in enumerate(modules)}
        # Each module is listed once, wherever the model has it. So it is said what is where.
        places = [
            [(name, numbers[id(part)]) for name, part in parts.items() if part is not None]
            for _, (parts, *_), _ in found
        ]
        self.text = repr((list(map(_name, self._classes)), places, kinds, self._settings, attributes))
        """The whole state, if `is_known`, in words that are equal in another process."""
        self.key = (
            self.text,
            (_unwrapped(self._classes[0]), *self._classes[1:]),
            self.is_compiled,
            tuple((i, _Same(code_of(hook) or hook)) for i, hook in hooks),  # a hook may be made anew for each call
            tuple((foreign.place, _Same(foreign.found)) for foreign in self.foreign),
            tuple(self.users.flags) if self.users else (),
            tuple(opaque),
        )
        """The whole state, for this process."""

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` has not changed."""
        try:
            return self._is_current(model)
        except Exception:  # another thread changes it now
            return False

    def lists_all(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` has the modules that this state was found for. If `is_current`, it has, unless another
        thread replaced some while they were looked at."""
        return list(map(id, model.modules()))[1:] == list(map(id, self._modules))

    def _is_current(self, model: PreTrainedModel) -> bool:
        values = chain.from_iterable(map(dict.values, self._filled))
        return (
            sum(map(len, self._dictionaries)) == len(self._values)
            and all(map(is_, values, self._values))
            and _identities(model) == self._own
            and all(value == before for value, before in self._lists)
            and classes_of(self._modules) == self._classes[1:]
            and type(model) is self._classes[0]
            and _kinds(self._tensors) == self._kinds
            and repr(list(map(_settings, self._configs))) == self._settings
            and compat.global_hooks_of_users() == self._global_hooks
            and _registered(model) == self._registered
            and self._origin.is_current()
            and (self.users is None or self.users.is_current())
        )

    def why_not_split(self) -> str | None:
        """Why a mask that covers only the step must not be passed to the model; None if it may."""
        if self._hooks_take_keywords:
            return "hooks may read the masks"
        return next(map(str, self.users.seeing_masks), None) if self.users else None

    def why_plain(self) -> str | None:
        """Why the model's own decoding must serve its calls; None if lookahead can."""
        if self._lacks_numbers:  # the model's own decoding says what is wrong
            return "a model with weights on the meta device"
        if self._differing:
            return f"a model whose parts have configurations that differ ({', '.join(self._differing)})"
        by_users = self.users.why_plain() if self.users else None
        if by_users is None and self._own_loop is not None:
            return f"a model with a loop of its own ({self._own_loop})"
        return by_users


_states = OfModels[State]()


_thread = threading.local()


@contextmanager
def looked_at(model: PreTrainedModel) -> Iterator[None]:
    """Check a model only once within the block, in this thread."""
    before = getattr(_thread, "looked_at", None)
    _thread.looked_at = model, state_of(model)
    try:
        yield
    finally:
        _thread.looked_at = before


def state_of(model: PreTrainedModel) -> State:
    """Check a model."""
    known, state = getattr(_thread, "looked_at", None) or (None, None)
    if known is model and state is not None:
        return state
    attention.register()
    state = _states.get(model)
    if state is None or not state.is_current(model):
        state = _states.set(model, _look(model, state))
    return state


def _look(model: PreTrainedModel, before: State | None) -> State:
    """Look at a model until it stays the same meanwhile: another thread may swap adapters. before: of this model."""
    seen: State | None = None
    for _ in range(_MOST_LOOKS):
        try:
            state = State(model, before)
            if (state.is_current(model) and state.lists_all(model)) or (seen is not None and state.key == seen.key):
                return state
            seen = state
        except Exception:  # half of a change was seen
            seen = None
    return State(model, before)


def forget(model: PreTrainedModel) -> None:
    """Release the parts of a model. What was learned of it stays, so another wrap need not try it again."""
    _states.pop(model)


def _origin(of_modules: list[type], registered: list[tuple[str, str, Any]], before: State | None) -> ReachableCode:
    """Follow these classes, unless that was done already, for a model of the same ones. before: of this model."""
    classes = frozenset(of_modules)
    origin = _origins.pop(classes, None)
    if origin is None and before is not None and frozenset(before._classes) == classes:
        origin = before._origin
    if origin is None or not origin.is_current() or origin.functions != registered:
        origin = ReachableCode((*classes, *_CACHES, *compat.REGISTRY_CLASSES), registered)
    if not origin.foreign and all(map(is_defined, map(_unwrapped, classes))):
        _origins[classes] = origin
        if len(_origins) > _MOST_ORIGINS:
            del _origins[next(iter(_origins))]
    return origin


def _replaced_by_family(cls: type) -> dict[str, str]:
    """Methods of the loop of generate() that a model's class inherits from its family, by name, and where they are."""
    found: dict[str, Any] = {name: getattr(cls, name, None) for name in OF_LOOP}
    return {
        name: method.__qualname__
        for name, method in found.items()
        if getattr(method, "__module__", "").startswith("transformers.models.")
    }


def _registered(model: PreTrainedModel) -> list[tuple[str, str, Any]]:
    """What is registered for the model's attention, masks and experts, and where transformers defines it."""
    config = model.config.get_text_config(decoder=True)
    name, experts = compat.attention_implementation(config), compat.registered_experts(config)
    found = [("transformers.masking_utils", f"{name}_mask", compat.registered_mask(name))]
    if experts is not None:
        found.append(("transformers.integrations.moe", getattr(experts, "__name__", ""), experts))
    if name == "sdpa":
        now = compat.registered_attention(name)
        of_sdpa = attention.sdpa if now is attention.attend else now
        found.append(("transformers.integrations.sdpa_attention", "sdpa_attention_forward", of_sdpa))
    return found + [("transformers.modeling_utils", *item) for item in compat.own_methods_of_registries()]


def _replaced(modules: list[nn.Module], origin: ReachableCode) -> Iterator[Foreign]:
    """Yield attributes of modules that stand in for methods of their classes, and functions of others."""
    for module in modules:
        replaced = {name: value for name, value in vars(module).items() if isinstance(value, _FUNCTIONS)}
        if not compat.replaces_forward(module):
            replaced.pop("forward", None)
        for name, value in replaced.items():
            if name in origin.names and (name in origin.methods or not is_own(value)):
                yield Foreign(f"{name} of a {type(module).__name__}", value, type(module))


def _differing(of_model: PreTrainedConfig, configs: list[PreTrainedConfig]) -> list[str]:
    """Name settings for which a part would have another cache or other masks than the model's configuration says."""
    others = [config for config in configs if type(config) is type(of_model)]
    return sorted(n for n in _OF_ALL if any(vars(c).get(n) != vars(of_model).get(n) for c in others))


def _unwrapped(cls: type) -> type:
    """The class that was wrapped, or the class itself."""
    is_ours = any(base.__module__ == "lookahead.wrapping" for base in cls.__bases__)
    return next(base for base in cls.__bases__ if base.__module__ != "lookahead.wrapping") if is_ours else cls


def _identities(model: PreTrainedModel) -> list[tuple[str, int]]:
    """The attributes of a model, by name, without those that `wrap` and `generate` use."""
    own = list(vars(model).items())  # at once, for another thread may add one
    return [(name, id(value)) for name, value in own if name not in ("lookahead", "generation_config", ATTRIBUTE)]


def _of(dictionaries: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [tensor for tensor in chain.from_iterable(map(dict.values, dictionaries)) if tensor is not None]


_Kind = tuple[type, torch.dtype, torch.device, torch.layout]


def _kinds(dictionaries: list[dict[str, torch.Tensor | None]]) -> list[_Kind]:
    return [(type(tensor), tensor.dtype, tensor.device, tensor.layout) for tensor in _of(dictionaries)]


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    found = {name: value for name, value in vars(config).items() if name not in _WITHOUT_EFFECT}
    for name, value in found.items():
        if isinstance(value, PreTrainedConfig):
            found[name] = _settings(value)
        elif type(value) is set:
            found[name] = _sorted(value)
    return found


def _attributes(module: nn.Module, changing: set[str]) -> dict[str, Any]:
    """Settings of a module, without values that passes store there."""
    return {
        name: _sorted(value)
        for name, value in vars(module).items()
        if _is_setting(value) and not (name in changing or name in _OF_ALL_MODULES or name.endswith("_cached"))
    }


def _sorted(value: Any) -> Any:
    """In another process, a set may have another order."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(map(_is_setting, value.values()))
    return value is None or isinstance(value, (*_SETTINGS, torch.dtype))


def _is_told(value: Any) -> bool:
    """Whether `State.text` tells an attribute of a module. It does not tell quantized weights that are no tensors: not
    even their dtype shows.
    """
    if isinstance(value, (dict, list, tuple)):
        return all(map(_is_told, value.values() if isinstance(value, dict) else value))
    return _is_setting(value) or isinstance(value, (*_FUNCTIONS, *_TOLD))


def _is_list_of_settings(value: Any) -> bool:
    """Whether it is a list as in a configuration file, which may be changed in place."""
    return type(value) is list and all(isinstance(item, _SETTINGS) for item in value)


def _quantization(tensor: torch.Tensor) -> str:
    if compat.is_plain(tensor):
        return ""
    from lookahead.compat.quantized import quantization_of  # other tensors do not need it

    return quantization_of(tensor)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
