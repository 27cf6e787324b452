"""Phi-3 and the text side of Phi-4-multimodal.

One layer gives query, key and value, and one gives both halves of the gated MLP.
"""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.llama import Llama
from lookahead.models.families.parts import split


class WithJoinedHalves(Llama):
    """One layer gives both halves of the gated MLP."""

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, *split(self, mlp.gate_up_proj, mlp.gate_up_proj.out_features // 2))
        return self.product(self.gate(gate, mlp.activation_fn, up), mlp.down_proj)


class Phi3(WithJoinedHalves):
    slides = "always"
    rotates_part = True

    def projections(self, attention: Any) -> list[Linear]:
        of_queries = attention.config.num_attention_heads * attention.head_dim
        of_keys = attention.num_key_value_heads * attention.head_dim
        return split(self, attention.qkv_proj, of_queries, of_keys)


class Phi4Multimodal(Phi3):
    dropouts = "resid_pdrop", "embd_pdrop"
