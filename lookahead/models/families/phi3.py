"""Phi-3: one layer gives query, key and value, and one gives both halves of the gated MLP."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Phi3(Llama):
    slides = "always"
    turns_part = True

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        of_queries = attention.config.num_attention_heads * attention.head_dim
        of_keys = attention.num_key_value_heads * attention.head_dim
        q, k, v = self.products(x, *self.parts(attention.qkv_proj, of_queries, of_keys))
        q, k = self.turned(q, k, attention, name)
        return self.product(self.attend(q, k, v, attention), attention.o_proj)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, *self.parts(mlp.gate_up_proj, mlp.gate_up_proj.out_features // 2))
        return self.product(self.gate(gate, mlp.activation_fn, up), mlp.down_proj)
