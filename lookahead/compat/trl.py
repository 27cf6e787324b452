"""Private names of trl, for models that it trains."""

from types import FunctionType, MethodType

from torch import nn

_HOME, _NAME = "trl.trainer.utils", "_fused_forward"


def calls_forward_of_class(module: nn.Module) -> bool:
    """Whether the module's own forward is that of trl's trainers.

    With ``fused_lm_head=True`` it computes a loss. Otherwise it only calls the class's forward.
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
