"""EXAONE 4: norms are placed as in OLMo 2, and if some layers have a window, only these have positions."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.olmo import Olmo2
from lookahead.models.families.parts import qk_norm


class Exaone4(Olmo2):
    norms_round_once = False
    rotary_rounds_once = False
    slides = "by type"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.sliding_window is not None and not attention.is_sliding:
            return qk_norm(self, q, k, attention)
        return super().rotated(q, k, attention, name)
