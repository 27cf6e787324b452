"""Foreign code in passes: hooks, and functions that replace those of torch or transformers."""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from lookahead.models.origin import OF_LOOP, PREPARES_INPUTS, Foreign, enclosed, function_of, is_defined, is_own

PASS_ON = ("accelerate", "bitsandbytes", "peft", "torchao")
"""Packages that wrap modules, and pass masks and positions on to them unchanged."""
PREPARES = "_prefill", *PREPARES_INPUTS
"""Those of `OF_LOOP` that models of users may replace: what they give their passes is tried."""
# Functions of a module that get only the tokens of a pass, and those of torch that get keys or scores.
_OF_ROWS = {"apply_rotary_pos_emb", "rotate_half", "clip_qkv"}
_OF_KEYS = {"scaled_dot_product_attention", "softmax", "matmul", "bmm", "baddbmm", "einsum", "cat"}
_MOST_FLAGS, _MOST_HELD = 256, 16  # values that are checked, in all and in one container
_NO_FLAGS = nn.Module, torch.Tensor, PreTrainedConfig, ModuleType, BuiltinFunctionType


def name_of(foreign: Foreign) -> str:
    """The name that foreign code is called by."""
    return foreign.place.split(" ")[0].rsplit(".", 1)[-1]


def package_of(foreign: Foreign) -> str:
    """The package that foreign code comes from."""
    space = getattr(function_of(foreign.found), "__globals__", {})
    name = space.get("__name__") or getattr(foreign.found, "__module__", None) or type(foreign.found).__module__
    return str(name).split(".")[0]


class UsersCode:
    """The foreign code that passes of a model run."""

    def __init__(self, modules: list[nn.Module], own: type, foreign: tuple[Foreign, ...], hooks: list[Callable]):
        """modules: of the model. own: its class, as it was before it was wrapped."""
        self._own, self._foreign = own, foreign
        self._functions = [*hooks, *(one.found for one in foreign)]
        self.flags = _flags(self._functions)
        """Values that it may depend on."""
        hand_on = {base for module in modules if _takes_masks(module) for base in type(module).__mro__}
        self.seeing_masks = [
            one for one in foreign if package_of(one) not in PASS_ON and (one.cls is None or one.cls in hand_on)
        ]
        """Foreign code that gets masks."""
        self.may_go_by_place = bool(hooks) or any(package_of(one) not in PASS_ON for one in foreign)
        """Whether some of it may treat a row by its place in the pass."""
        self.prepares = next((str(one) for one in foreign if name_of(one) in PREPARES), None)
        """Code that chooses what the passes of generate() are given, in a model of users; None if there is none."""

    def is_current(self) -> bool:
        """Whether the values that it depends on have not changed."""
        return _flags(self._functions) == self.flags

    def why_no_trees(self) -> str | None:
        """Why the model must make its own masks; None if it need not."""
        return next((str(foreign) for foreign in self._foreign if "mask" in name_of(foreign)), None)

    def why_no_kernels(self) -> str | None:
        """Why linear layers are not those of torch; None if they are."""
        places = "torch.nn.modules.linear.Linear.", "torch.nn.functional.linear"
        return next((str(foreign) for foreign in self._foreign if foreign.place.startswith(places)), None)

    def why_plain(self) -> str | None:
        """Why the model's own decoding must serve its calls; None if lookahead can."""
        for foreign in self._foreign:
            bases = foreign.cls.__mro__ if foreign.cls else ()
            is_of_transformers = any(base.__module__.startswith("transformers.models.") for base in bases)
            is_of_object = " of a " in foreign.place  # it was set on a module, and not on its class
            name = name_of(foreign)
            # What a model of users gives its passes is tried (`conditions.loop_gives_usual_inputs`).
            of_loop = name in OF_LOOP and (name not in PREPARES or is_of_transformers or is_of_object)
            if of_loop or foreign.place.startswith(("transformers.cache_utils.", "transformers.generation.")):
                return f"a model whose cache or loop was replaced ({foreign})"
        return next(
            (
                f"a model whose attention was replaced ({foreign})"
                for foreign in self._foreign
                if self._sees_keys(foreign)
            ),
            None,
        )

    def _sees_keys(self, foreign: Foreign) -> bool:
        """Whether this code replaces transformers' attention, or a function that it calls.

        It may change its behaviour at some number of keys, which passes over several tokens reach sooner.
        """
        own = self._own
        name = name_of(foreign)
        if foreign.place.startswith("torch."):
            return name in _OF_KEYS
        if not (is_defined(own) or foreign.place.startswith("transformers.")) or isinstance(foreign.found, type):
            return False  # a model of the user's is tried as it is; a class in a module has no objects here
        is_of_layer = foreign.cls is None or foreign.cls not in own.__mro__
        return foreign in self.seeing_masks and is_of_layer and name not in _OF_ROWS


def _flags(functions: list[Any]) -> list[Any]:
    """Values that functions may depend on: those that they hold, or that the names in their code refer to.

    A number counts only as zero or not zero, because it may be a counter. Numbers and None in a list may be a record,
    and do not count. Values in a model, torch or transformers are left out.
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
    """The values that a function, a container or an object holds."""
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
    """Whether a module may get the mask: attention, modules that contain it, and what torch.jit hides."""
    return any(
        isinstance(part, torch.jit.ScriptModule)
        or not {"layer_idx", "is_causal"}.isdisjoint(vars(part))
        or "attention_mask" in _arguments(type(part).forward)
        for part in module.modules()
    )


_arguments_of: WeakKeyDictionary[Callable, frozenset[str]] = WeakKeyDictionary()


def _arguments(forward: Callable) -> Collection[str]:
    if forward not in _arguments_of:
        _arguments_of[forward] = frozenset(inspect.signature(forward).parameters)
    return _arguments_of[forward]
