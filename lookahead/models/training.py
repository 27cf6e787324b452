"""What a model may do in training mode but not in evaluation mode, as far as settings and code show it.

Reinforcement learning generates in training mode. If nothing is drawn at random, a pass computes the same as in
evaluation mode.
"""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lookahead.compat import global_hooks_of_users, hooks_of_users
from lookahead.models.origin import Foreign, is_defined
from lookahead.models.state import State
from lookahead.models.users_code import package_of

_OF_LORA = "peft.tuners.lora.layer", "peft.tuners.tuners_utils"  # of its layers that are in place of torch's


def random_part(model: PreTrainedModel, names: Collection[str]) -> str | None:
    """Name the first setting by which a part in training mode draws at random, with its value; None if none is seen.

    Dropout, layers that are left out, and noise of routers are settings of modules, or of their configurations.

    names: of attributes that passes read (`ReachableCode.names`). Other settings of a configuration do not count.
    """
    training = [(f"{place}." if place else "", module) for place, module in model.named_modules() if module.training]
    found = {
        place + name: x for place, module in training for name, x in vars(module).items() if _is_rate(name, module)
    }
    for place, module in training:
        config = vars(module).get("config")
        settings = vars(config) if isinstance(config, PreTrainedConfig) else {}
        found |= {f"{place}config.{name}": x for name, x in settings.items() if name in names and _is_rate(name)}
    active = (f"{name} is {x}" for name, x in found.items() if isinstance(x, (int, float)) and x)
    return next(active, None)


def _is_rate(name: str, module: nn.Module | None = None) -> bool:
    """Whether a setting, by its name, says how much is drawn at random."""
    return "drop" in name or "jitter" in name or (name == "p" and "Dropout" in type(module).__name__)


def unknown_part(model: PreTrainedModel, state: State) -> str | None:
    """Name code whose behaviour in training mode is unknown; None if there is none."""
    modules = list(model.modules())
    hooked = next((f"a {type(module).__name__}" for module in modules if hooks_of_users(module)), None)
    if hooked or global_hooks_of_users():
        return f"a hook on {hooked or 'all modules'}"
    variants = [type(x) for module in modules for x in vars(module).get("lora_variant", {}).values()]
    undefined = [cls for cls in map(type, modules) if not is_defined(cls)]
    found: list[Foreign | type] = [*state.foreign, *undefined, *variants]
    unknown = [x for x in found if not _drops_at_most(x)]
    return next((x.place if isinstance(x, Foreign) else f"{x.__module__}.{x.__qualname__}" for x in unknown), None)


def _drops_at_most(found: Foreign | type) -> bool:
    """Whether the only thing that it may do in training mode is dropout by a known setting.

    This is true of PEFT's layers for LoRA, and of accelerate's forwards for autocast and offloading.
    """
    is_of_peft, cls = (True, found) if isinstance(found, type) else (package_of(found) == "peft", found.cls)
    is_of_lora = is_of_peft and cls is not None and cls.__module__ in _OF_LORA
    return is_of_lora or (isinstance(found, Foreign) and package_of(found) == "accelerate")
