"""Phi, StableLM and StarCoder 2: layer norms with biases. In Phi and some StableLM, attention and MLP take the same."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import side_by_side


class Phi(Llama):
    norm_class = nn.LayerNorm
    norms_are_centered = True
    rotates_part = True
    last_norm = "final_layernorm"
    output_projection = "dense"
    dropouts = "resid_pdrop", "embd_pdrop"

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        normed = self.norm(x, layer.input_layernorm)
        attended = self.attention(normed, layer.self_attn, name)
        return self.add(self.add(attended, self.mlp(normed, layer.mlp)), x)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.qk_layernorm:
            q = self.norm_heads(q, attention.q_layernorm, attention.head_dim)
            k = self.norm_heads(k, attention.k_layernorm, attention.head_dim)
        return super().rotated(q, k, attention, name)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.fc1), mlp.activation_fn), mlp.fc2)


class StableLm(Llama):
    norm_class = nn.LayerNorm
    norms_are_centered = True
    rotates_part = True
    dropouts = ("hidden_dropout",)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return side_by_side(self, x, layer, name) if layer.use_parallel_residual else super().layer(x, layer, name)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.qk_layernorm:
            raise UnknownModelError("each of its heads has a norm of its own")
        return super().rotated(q, k, attention, name)


class Starcoder2(Llama):
    norm_class = nn.LayerNorm
    norms_are_centered = True
    slides = "always"
    dropouts = "residual_dropout", "embedding_dropout"

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.c_fc), mlp.act), mlp.c_proj)
