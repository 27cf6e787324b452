"""Qwen2 and Qwen3: the latter norms each head of queries and keys."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import Slides
from lookahead.models.families.parts import qk_norm


class Qwen2(Llama):
    slides = "by type"


class Qwen3(Llama):
    slides: Slides = "by type"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*qk_norm(self, q, k, attention), attention, name)
