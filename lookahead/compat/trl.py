"""What trl puts into a model that it trains."""

from types import FunctionType, MethodType

from torch import nn

_HOME, _NAME = "trl.trainer.utils", "_fused_forward"


def calls_forward_of_class(module: nn.Module) -> bool:
    """Whether an object's own forward is that of trl's trainers.

    They tell it by ``fused_lm_head=True`` to make a loss. Else it calls the class's and does nothing more.
    """
    found = vars(module)["forward"]
    function = getattr(found, "__func__", found)
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if (function.__globals__.get("__name__"), code.co_name) != (_HOME, _NAME) or "original_forward" not in cells:
        return False
    return bool(cells["original_forward"].cell_contents == MethodType(type(module).forward, module))
