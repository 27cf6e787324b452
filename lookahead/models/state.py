"""What a verdict on a model's passes depends on, as it is at this moment.

A model may change while it is wrapped: its classes, the code behind them, dtypes, quantization, hooks, settings. So
each call looks at it. If every object is that of the last look, this takes a fraction of a millisecond.
"""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead import compat
from lookahead.models import attention
from lookahead.models.origin import OF_LOOP, Foreign, Origin, code_of, enclosed, function_of, is_defined, is_own
from lookahead.models.training import random_part

PASS_ON = ("accelerate", "bitsandbytes", "peft", "torchao")
"""Packages that wrap modules, and hand masks and positions on to them as they are."""
_OF_LORA = "peft.tuners.lora.layer", "peft.tuners.tuners_utils"  # of its layers that are in place of torch's
_CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)  # which `LookaheadCache` stands in for
_REGISTRIES = AttentionInterface, AttentionMaskInterface  # in which passes look up functions
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
# Functions of a module that are given the tokens of a pass alone, and those of torch that are given keys or scores.
_OF_ROWS = {"apply_rotary_pos_emb", "rotate_half", "clip_qkv"}
_OF_KEYS = {"scaled_dot_product_attention", "softmax", "matmul", "bmm", "baddbmm", "einsum", "cat"}
_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, partial
_MOST_FLAGS, _MOST_HELD = 256, 16  # values that are looked at, in all and in one container
_NO_FLAGS = nn.Module, torch.Tensor, PreTrainedConfig, ModuleType, BuiltinFunctionType
_MOST_ORIGINS = 64  # kept for later models of the same classes

_origins: dict[frozenset[type], Origin] = {}


class _Same:
    """An object as part of a key: equal to itself alone. It is kept, so that no other object can take its address."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class State:
    """What a verdict on a model's passes depends on."""

    def __init__(self, model: PreTrainedModel):
        self._modules = list(model.modules())[1:]  # the model itself would be kept alive
        modules = [model, *self._modules]
        self._classes = list(map(type, modules))
        found = [compat.dictionaries_of(module) for module in modules]
        self._dictionaries = [*found[0][1], *(d for own, others, _ in found[1:] for d in (own, *others))]
        self._filled = [d for d in self._dictionaries if d]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._own = _identities(model)
        self._tensors = [d for *_, tensors in found for d in tensors]  # not the tensors, which would be kept alive
        self._kinds = _kinds(self._tensors)
        self._configs = list(
            {id(c): c for m in modules if isinstance(c := vars(m).get("config"), PreTrainedConfig)}.values()
        )
        self._settings = repr(list(map(_settings, self._configs)))
        self._differing = _differing(model.config.get_text_config(decoder=True), self._configs)
        self._global_hooks = compat.global_hooks_of_users()
        self._registered = _registered(model)
        origin = self._origin = _origin(frozenset(self._classes), self._registered)
        self.names = origin.names
        """Names of attributes and functions that passes use."""
        self.foreign = (*origin.foreign, *_replaced(modules, origin))
        """Code that passes run, and that neither torch nor transformers defines."""
        hooks = [(i, hook) for i, module in enumerate(modules) for hook in compat.hooks_of_users(module)]
        hooks += [(-1, hook) for hook in self._global_hooks]
        self._code_of_users = [*(hook for _, hook in hooks), *(foreign.found for foreign in self.foreign)]
        self._flags = _flags(self._code_of_users)
        self.is_known = not (self.foreign or hooks) and all(map(is_defined, self._classes))
        """Whether torch and transformers define all that passes run."""
        self.in_training = tuple(i for i, module in enumerate(modules) if module.training)
        """Which modules are in training mode."""
        self.why_random = random_part(model, self.names) if self.in_training else None
        """What draws at random in training mode, and is in it; None if nothing is seen that does."""
        self.unknown_in_training = self._unknown_in_training(modules, hooks) if model.training else None
        """Code of which it is not known what it does in training mode, if the model is in it."""
        self.is_compiled = any(map(compat.is_compiled, modules))
        """Whether the user has compiled the model or a part of it. Compiled code cannot tell that a pass is ours."""
        self._hooks_take_keywords = bool(self._global_hooks) or any(map(compat.hooks_take_keywords, modules))
        hand_on = {base for module in modules if _takes_masks(module) for base in type(module).__mro__}
        self._seeing_masks = [
            foreign
            for foreign in self.foreign
            if foreign.package not in PASS_ON and (foreign.cls is None or foreign.cls in hand_on)
        ]
        self._seeing_keys = [foreign for foreign in self.foreign if self._sees_keys(foreign)]
        kinds = [
            (_name(kind), dtype, device, _quantization(tensor))
            for tensor, kind, dtype, device in zip(_of(self._tensors), *zip(*self._kinds, strict=True), strict=True)
        ]
        changing = {*origin.written, "training"}  # the probe runs in eval mode
        attributes = [_attributes(module, changing) for module in modules]
        self.text = repr((list(map(_name, self._classes)), kinds, self._settings, attributes))
        """All of it, if `is_known` holds, in words that another process finds equal."""
        self.key = (
            self.text,
            (_unwrapped(self._classes[0]), *self._classes[1:]),
            self.is_compiled,
            tuple((i, _Same(code_of(hook) or hook)) for i, hook in hooks),  # a hook may be made anew for each call
            tuple((foreign.place, _Same(foreign.found)) for foreign in self.foreign),
            tuple(self._flags),
        )
        """All of it, for this process."""

    def is_current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` is as it was."""
        values = chain.from_iterable(map(dict.values, self._filled))
        return (
            sum(map(len, self._dictionaries)) == len(self._values)
            and all(map(is_, values, self._values))
            and _identities(model) == self._own
            and all(map(is_, map(type, self._modules), self._classes[1:]))
            and type(model) is self._classes[0]
            and _kinds(self._tensors) == self._kinds
            and repr(list(map(_settings, self._configs))) == self._settings
            and compat.global_hooks_of_users() == self._global_hooks
            and _registered(model) == self._registered
            and self._origin.is_current()
            and (not self._code_of_users or _flags(self._code_of_users) == self._flags)
        )

    def _unknown_in_training(self, modules: list[nn.Module], hooks: list[tuple[int, Callable]]) -> str | None:
        for i, _ in hooks:
            return f"a hook on {'all modules' if i < 0 else f'a {type(modules[i]).__name__}'}"
        variants = [type(x) for module in modules for x in vars(module).get("lora_variant", {}).values()]
        found: list[Foreign | type] = [*self.foreign, *(cls for cls in self._classes if not is_defined(cls)), *variants]
        return next((_name(x) if isinstance(x, type) else x.place for x in found if not _drops_at_most(x)), None)

    def _sees_keys(self, foreign: Foreign) -> bool:
        """Whether this code stands in the place of transformers' attention, or of what that calls.

        It may do something else from some number of keys on, and passes over several tokens reach that number sooner.
        """
        own = _unwrapped(self._classes[0])
        name = foreign.place.rsplit(".", 1)[-1]
        if foreign.place.startswith("torch."):
            return name in _OF_KEYS
        if not (is_defined(own) or foreign.place.startswith("transformers.")) or isinstance(foreign.found, type):
            return False  # a model of the user's is tried as it is; a class in a module has no objects here
        is_of_layer = foreign.cls is None or foreign.cls not in own.__mro__
        return foreign in self._seeing_masks and is_of_layer and name not in _OF_ROWS

    def why_not_split(self) -> str | None:
        """Why a mask that covers the step alone may not be handed to the model; None if it may."""
        if self._hooks_take_keywords:
            return "hooks may read the masks"
        return next(map(str, self._seeing_masks), None)

    def why_no_trees(self) -> str | None:
        """Why the model must make its masks itself; None if it need not."""
        return next((str(foreign) for foreign in self.foreign if "mask" in foreign.place.rsplit(".", 1)[-1]), None)

    def why_no_kernels(self) -> str | None:
        """Why linear layers are not those of torch; None if they are."""
        places = "torch.nn.modules.linear.Linear.", "torch.nn.functional.linear"
        return next((str(foreign) for foreign in self.foreign if foreign.place.startswith(places)), None)

    def why_plain(self) -> str | None:
        """Why the model's own decoding must take its calls; None if it need not."""
        if self._differing:
            return f"a model whose parts have configurations that differ ({', '.join(self._differing)})"
        for foreign in self.foreign:
            bases = foreign.cls.__mro__ if foreign.cls else ()
            is_of_transformers = any(base.__module__.startswith("transformers.models.") for base in bases)
            of_loop = foreign.place.rsplit(".", 1)[-1] in OF_LOOP and is_of_transformers  # not of a model of users
            if of_loop or foreign.place.startswith(("transformers.cache_utils.", "transformers.generation.")):
                return f"a model whose cache or loop is replaced ({foreign})"
        return next((f"a model whose attention is replaced ({foreign})" for foreign in self._seeing_keys), None)


_states: WeakKeyDictionary[PreTrainedModel, State] = WeakKeyDictionary()


_thread = threading.local()


@contextmanager
def looked_at(model: PreTrainedModel) -> Iterator[None]:
    """Look at a model once for the whole block, in this thread."""
    before = getattr(_thread, "looked_at", None)
    _thread.looked_at = model, state_of(model)
    try:
        yield
    finally:
        _thread.looked_at = before


def state_of(model: PreTrainedModel) -> State:
    """Look at a model."""
    known, state = getattr(_thread, "looked_at", None) or (None, None)
    if known is model and state is not None:
        return state
    attention.is_registered()
    state = _states.get(model)
    if state is None or not state.is_current(model):
        state = _states[model] = State(model)
    return state


def forget(model: PreTrainedModel) -> None:
    """Let go of the parts of a model."""
    _states.pop(model, None)


def _origin(classes: frozenset[type], registered: list[tuple[str, str, Any]]) -> Origin:
    origin = _origins.pop(classes, None)
    if origin is None or not origin.is_current() or origin.functions != registered:
        origin = Origin((*classes, *_CACHES, *_REGISTRIES), registered)
    _origins[classes] = origin
    if len(_origins) > _MOST_ORIGINS:
        del _origins[next(iter(_origins))]
    return origin


def _registered(model: PreTrainedModel) -> list[tuple[str, str, Any]]:
    """What is registered for the model's attention and masks, and where transformers defines it."""
    name = compat.attention_implementation(model.config.get_text_config(decoder=True))
    found = [("transformers.masking_utils", f"{name}_mask", compat.registered_mask(name))]
    if name == "sdpa":
        now = compat.registered_attention(name)
        of_sdpa = attention.sdpa if now is attention.attend else now
        found.append(("transformers.integrations.sdpa_attention", "sdpa_attention_forward", of_sdpa))
    return found + [("transformers.modeling_utils", *item) for item in compat.own_methods_of_registries()]


def _replaced(modules: list[nn.Module], origin: Origin) -> Iterator[Foreign]:
    """Yield attributes of modules that stand in for methods of their classes, and functions of others."""
    for module in modules:
        replaced = {name: value for name, value in vars(module).items() if isinstance(value, _FUNCTIONS)}
        if not compat.replaces_forward(module):
            replaced.pop("forward", None)
        for name, value in replaced.items():
            if name in origin.names and (name in origin.methods or not is_own(value)):
                yield Foreign(f"{name} of a {type(module).__name__}", value, type(module))


def _differing(of_model: PreTrainedConfig, configs: list[PreTrainedConfig]) -> list[str]:
    """Name the settings by which the cache or the masks of a part would not be those that the model says."""
    others = [config for config in configs if type(config) is type(of_model)]
    return sorted(n for n in _OF_ALL if any(vars(c).get(n) != vars(of_model).get(n) for c in others))


def _unwrapped(cls: type) -> type:
    """The class that `wrap` has made this one of, or the class itself."""
    is_ours = any(base.__module__ == "lookahead.wrapping" for base in cls.__bases__)
    return next(base for base in cls.__bases__ if base.__module__ != "lookahead.wrapping") if is_ours else cls


def _identities(model: PreTrainedModel) -> list[tuple[str, int]]:
    """The attributes of a model, by name, without those that `wrap` and `generate` use."""
    return [(name, id(value)) for name, value in vars(model).items() if name not in ("lookahead", "generation_config")]


def _flags(functions: list[Any]) -> list[Any]:
    """What functions may hang on: values that they hold, or that the names in their code stand for.

    A number counts as zero or not, for it may be a counter. Numbers and None in a list may record what has passed, and
    do not count. What is in a model, torch or transformers is left out.
    """
    found: list[Any] = []
    wanted, seen = deque(functions), set()
    while wanted and len(found) < _MOST_FLAGS:
        value = wanted.popleft()
        if value is None or isinstance(value, (bool, str)):
            found.append(value)
        elif isinstance(value, (int, float)):
            found.append(bool(value))
        elif id(value) not in seen and not isinstance(value, _NO_FLAGS):
            seen.add(id(value))
            wanted += _held(value)
    return found


def _held(value: Any) -> Iterable[Any]:
    """What a function, a container or an object holds."""
    if isinstance(value, dict):
        return islice(value.values(), _MOST_HELD)
    if isinstance(value, (list, tuple)):
        return [x for x in value[:_MOST_HELD] if isinstance(x, bool) or not isinstance(x, (int, float, type(None)))]
    if isinstance(value, type) and is_defined(value):
        return ()
    function = function_of(value)
    held = list(islice(getattr(value, "__dict__", {}).values(), _MOST_HELD))
    if isinstance(function, FunctionType):
        if is_own(function):
            return ()
        held += [getattr(value, name, None) for name in ("__self__", "args", "keywords")]
        held += [function.__globals__.get(name) for name in function.__code__.co_names]
        held += [*enclosed(function), function.__defaults__, function.__kwdefaults__]
    return held


def _takes_masks(module: nn.Module) -> bool:
    """Whether a module may be given the mask: attention, and all that holds some."""
    return any(
        "layer_idx" in vars(part) or "is_causal" in vars(part) or "attention_mask" in _arguments(type(part).forward)
        for part in module.modules()
    )


@cache
def _arguments(forward: Callable) -> Collection[str]:
    return inspect.signature(forward).parameters


def _drops_at_most(found: Foreign | type) -> bool:
    """Whether this, if it does anything otherwise in training mode, drops numbers by a setting that is seen.

    PEFT's layers for LoRA are so, and what accelerate puts before a forward: autocast and offloading.
    """
    is_of_peft, cls = (True, found) if isinstance(found, type) else (found.package == "peft", found.cls)
    is_of_lora = is_of_peft and cls is not None and cls.__module__ in _OF_LORA
    return is_of_lora or (isinstance(found, Foreign) and found.package == "accelerate")


def _of(dictionaries: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [tensor for tensor in chain.from_iterable(map(dict.values, dictionaries)) if tensor is not None]


def _kinds(dictionaries: list[dict[str, torch.Tensor | None]]) -> list[tuple[type, torch.dtype, torch.device]]:
    return [(type(tensor), tensor.dtype, tensor.device) for tensor in _of(dictionaries)]


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        name: _settings(value) if isinstance(value, PreTrainedConfig) else value
        for name, value in vars(config).items()
        if name not in _WITHOUT_EFFECT
    }


def _attributes(module: nn.Module, changing: set[str]) -> dict[str, Any]:
    """Settings that a module keeps, but not what passes keep there."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, tuple)) and not (name in changing or name.endswith("_cached"))
    }


def _quantization(tensor: torch.Tensor) -> str:
    return "" if compat.is_plain(tensor) else compat.quantization_of(tensor)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
