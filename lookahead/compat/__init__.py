"""Private or unstable names of torch, transformers and accelerate, each behind a function.

The rest of the package does not use them. Names that few calls need are in separate modules. If an upgrade moves a
name, tests/engine/test_compat.py shows which.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from itertools import chain
from operator import attrgetter

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from transformers import AttentionInterface, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# -- generate() -------------------------------------------------------------------------------------------------------


def pad_token(generation: GenerationConfig) -> int:
    """The token that generate() pads with where a sequence ends early."""
    return int(generation._pad_token_tensor)  # type: ignore[arg-type]  # set by generate()


def dropped_mask_length(generation: GenerationConfig) -> int | None:
    """Columns of the attention mask that generate() dropped because it hid nothing; None if it dropped none."""
    return getattr(generation, "_mask_length", None)


STOP_CHECKS = [
    (one, "__call__") for name in ("StopCheck", "DeferredStopCheck") if (one := getattr(utils, name, None)) is not None
]
"""Class and name of the method that tells generate()'s loop to stop, if this version of transformers has it."""

CACHE = next(field.name for field in fields(GenerateDecoderOnlyOutput) if "Cache" in str(field.type))
"""What generate() and its results call a cache: "cache"; "past_key_values" before transformers 5.24."""

CACHE_ARGUMENTS = tuple(dict.fromkeys((CACHE, "past_key_values", "cache_params")))
"""What models of transformers call a `Cache` among the arguments of their forward."""


def forward_arguments(model: PreTrainedModel | type[PreTrainedModel]) -> set[str]:
    """Argument names of the model's forward. If a replaced forward takes any keywords, those of its class's as well."""
    arguments = inspect.signature(model.forward).parameters
    is_replaced = isinstance(model, nn.Module) and "forward" in vars(model)
    if is_replaced and any(one.kind is one.VAR_KEYWORD for one in arguments.values()):
        return {*arguments, *inspect.signature(type(model).forward).parameters}  # type: ignore[union-attr]
    return set(arguments)


def cache_argument(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """The argument of the model's forward for a `Cache`; None if it has none."""
    arguments = forward_arguments(model)
    return next((name for name in CACHE_ARGUMENTS if name in arguments), None)


def is_callers_own(cache: Cache | None) -> bool:
    """Whether the caller of generate() passed this cache in, and may use it afterwards."""
    return getattr(cache, "_is_user_defined", False)


def caches_nothing(layer: object) -> bool:
    """Whether a layer of a cache only stands for a layer of the model that caches nothing."""
    return type(layer).__name__ == "DummyLayer"  # older transformers have none


# -- models -----------------------------------------------------------------------------------------------------------


def attention_implementation(config: PretrainedConfig | None) -> str | None:
    """The attention that a configuration names, such as "sdpa"."""
    return getattr(config, "_attn_implementation", None)


def looks_up_attention(model: PreTrainedModel) -> bool:
    """Whether the model's layers use the attention registered under the name in their configuration."""
    return model._supports_attention_backend


def registered_attention(name: str) -> Callable | None:
    """The attention function that transformers has registered under a name; None if there is none."""
    return ALL_ATTENTION_FUNCTIONS.get(name)


def register_attention(function: Callable) -> None:
    """Replace transformers' own "sdpa" attention by a function, unless somebody else has replaced it."""
    if registered_attention("sdpa") is sdpa_attention_forward:
        AttentionInterface.register("sdpa", function)


def registered_mask(name: str | None) -> Callable | None:
    """The function that transformers has registered for making the masks of an attention; None if there is none."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def registered_experts(config: PretrainedConfig) -> Callable | None:
    """The function that computes a model's experts, by the name in its configuration; None if its own code does."""
    return ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None))


_REGISTRIES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS
REGISTRY_CLASSES = tuple(map(type, _REGISTRIES))
"""Classes of the registries in which transformers keeps attention, masks and experts."""


def own_methods_of_registries() -> list[tuple[str, Callable]]:
    """Functions that were set on the registries themselves, by name."""
    return [(name, value) for own in map(vars, _REGISTRIES) for name, value in own.items() if callable(value)]


def settings_of(config: PretrainedConfig) -> dict:
    """All settings of the model itself, without where it came from."""
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}


def execution_device(module: nn.Module) -> torch.device | int | str | None:
    """The device to which accelerate's hook brings a module's weights and inputs; None without such a hook."""
    hook = getattr(module, "_hf_hook", None)
    devices = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    return next((device for device in devices if device is not None), None)


def tensors_of(modules: Iterable[nn.Module]) -> list[tuple[dict, str, torch.Tensor]]:
    """All tensors of these modules: the dictionary that holds each, its name there, and the tensor.

    They are parameters, buffers, and tensors that users have assigned to other attributes.
    """
    found = [dictionaries_of(module) for module in modules]
    places = [place for own, _, of_tensors in found for place in (own, *of_tensors)]
    each = [(place, list(place.items())) for place in places]  # at once, for another thread may add one
    return [(place, name, it) for place, items in each for name, it in items if isinstance(it, torch.Tensor)]


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Whether several processes compute the model together, as with ``tp_plan="auto"``."""
    return (getattr(model, "_tp_size", None) or 1) > 1


# -- modules and tensors ----------------------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def is_compiled_wrapper(model: object) -> bool:
    """Whether this is what ``torch.compile(model)`` returned."""
    return isinstance(model, OptimizedModule)


def hooks_of_users(module: nn.Module) -> list[Callable]:
    """Hooks before or after the module, without those that do not change passes.

    transformers' own hooks only collect outputs, or ask for gradients of the embedding (gradient checkpointing leaves
    these), which passes of `generate` do not compute. Our probe's hooks act only in its own thread.
    """
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in _HARMLESS and not _asks_for_grad(hook)]


_HARMLESS = "transformers.utils.output_capturing", "lookahead.passes.probe"


def _asks_for_grad(hook: Callable) -> bool:
    """Whether ``enable_input_require_grads`` has set this hook."""
    place = getattr(hook, "__module__", None), getattr(hook, "__qualname__", "").split(".<locals>")[0]
    return place == ("transformers.modeling_utils", "PreTrainedModel.enable_input_require_grads")


def hooks_take_keywords(module: nn.Module) -> bool:
    """Whether a hook before the module sees its keyword arguments, such as masks, and may change them."""
    return bool(module._forward_pre_hooks_with_kwargs)


def global_hooks_of_users() -> list[Callable]:
    """Hooks on all modules of the process."""
    return [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]


def dictionaries_of(module: nn.Module) -> tuple[dict, tuple[dict, ...], tuple[dict, ...]]:
    """The dictionaries of a module: its attributes; its modules and hooks; its parameters and buffers."""
    own = vars(module)
    if isinstance(module, torch.jit.ScriptModule):  # its parts are in C++
        return own, ({}, own["_forward_hooks"], own["_forward_pre_hooks"]), ()
    return (
        own,
        (own["_modules"], own["_forward_hooks"], own["_forward_pre_hooks"]),
        (own["_parameters"], own["_buffers"]),
    )


def has_own_call(module: nn.Module) -> bool:
    """Whether calling the module does anything else than the forward of its class."""
    return bool(hooks_of_users(module)) or replaces_forward(module) or is_compiled(module)


def replaces_forward(module: nn.Module) -> bool:
    """Whether the module's own forward replaces its class's. That one itself does not count, which accelerate leaves
    there, nor one of trl's that calls it.
    """
    own = vars(module).get("forward")
    if own is None or (inspect.ismethod(own) and own.__self__ is module and own.__func__ is type(module).forward):
        return False
    from lookahead.compat.trl import calls_forward_of_class  # other modules have no forward of their own

    return not calls_forward_of_class(module)


def is_plain(tensor: torch.Tensor) -> bool:
    """False for a tensor that wraps other tensors, such as a quantized weight."""
    return not is_traceable_wrapper_subclass(tensor)


def modes_of_users() -> list[str]:
    """Names of the active modes that see, and may change, each operation of torch; without default devices."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


VERSION = attrgetter("_version")
"""How often a tensor was written to, if it was not made in inference mode. A getter in C, which makes `map` fast."""


# -- processors and kernels -------------------------------------------------------------------------------------------


@cache
def multinomial_is_race() -> bool:
    """Whether `torch.multinomial` chooses the token with the largest p / e on the CPU, with exponential variates e that
    it draws at once for the whole vocabulary. torch does not promise this, so it is tested."""
    generator, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for vocabulary in (1, 17, 4099):
        p = torch.linspace(0, 1, vocabulary, dtype=torch.float32, device="cpu")[None].softmax(-1)
        for _ in range(8):
            chosen = torch.multinomial(p, num_samples=1, generator=generator)
            raced = torch.argmax(p / torch.empty_like(p).exponential_(1, generator=other), dim=-1, keepdim=True)
            if not (torch.equal(chosen, raced) and torch.equal(generator.get_state(), other.get_state())):
                return False
    return True


def cpu_capability() -> str:
    """The instruction set that torch uses: DEFAULT (also if unknown), AVX2, AVX512, AVX512_BF16 or AVX512_AMX.

    ONEDNN_MAX_CPU_ISA limits it, as it limits torch's products in bf16. AMX counts only if the system lets this process
    use it.
    """
    capability = "DEFAULT"
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    with suppress(AttributeError, RuntimeError):
        capability = torch.backends.cpu.get_cpu_capability()
        if capability != "AVX512" or most in ("AVX512_CORE", "AVX512_CORE_VNNI"):
            return capability
        if torch.cpu._is_avx512_bf16_supported():
            capability = "AVX512_BF16"
            allowed = most in ("ALL", "DEFAULT") or "AMX" in most
            if allowed and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
                capability = "AVX512_AMX"
    return capability
