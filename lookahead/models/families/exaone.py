"""EXAONE 4: norms stand behind attention and MLP, heads are normed, and only layers with a window know positions."""

from typing import Any

from lookahead.cpu.program import Value
from lookahead.models.families.llama import Llama


class Exaone4(Llama):
    slides = "by type"

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(x, layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        return self.add(x, self.norm(self.mlp(x, layer.mlp), layer.post_feedforward_layernorm))

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q = self.norm_heads(q, attention.q_norm, attention.head_dim)
        k = self.norm_heads(k, attention.k_norm, attention.head_dim)
        if attention.sliding_window is not None and not attention.is_sliding:
            return q, k
        return super().turned(q, k, attention, name)
