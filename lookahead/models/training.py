"""What a model may do in training mode that it does not do in evaluation mode, as far as it can be seen.

Reinforcement learning generates in training mode. Where nothing is drawn at random there, a pass computes what it
computes in evaluation mode.
"""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def random_part(model: PreTrainedModel, names: Collection[str]) -> str | None:
    """Name the first setting by which a part in training mode draws at random, with its value; None if none is seen.

    Dropout, layers that are left out, and noise of routers are settings of modules, or of their configurations.

    names: of attributes that passes read (`Origin.names`). Other settings of a configuration do not count.
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
