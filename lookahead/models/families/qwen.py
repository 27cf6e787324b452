"""Qwen2 and Qwen3: the latter norms each head of queries and keys."""

from typing import Any

from lookahead.cpu.program import Value
from lookahead.models.families.llama import Llama


class Qwen2(Llama):
    slides = "by type"


class Qwen3(Llama):
    slides = "by type"

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q = self.norm_heads(q, attention.q_norm, attention.head_dim)
        k = self.norm_heads(k, attention.k_norm, attention.head_dim)
        return super().turned(q, k, attention, name)
