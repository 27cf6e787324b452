"""DBRX: queries, keys and values are clipped, and experts have three layers, which are stored in three tensors."""

from typing import Any

from torch import nn

from lookahead.cpu.experts import Experts
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.clipped import clipped
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import split


class Dbrx(Llama):
    layer_class = "Block"
    layers_at = "blocks"
    embedding_at = "wte"
    last_norm = "norm_f"
    output_projection = "out_proj"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = ("resid_pdrop",)

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def mixer(self, layer: Any) -> Any:
        return layer.norm_attn_norm.attn

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        part = self.own(layer.norm_attn_norm, "NormAttentionNorm")
        x = self.add(x, self.attention(self.norm(x, part.norm_1), part.attn, name))
        return self.add(x, self.mlp(self.norm(x, part.norm_2), layer.ffn))

    def projections(self, attention: Any) -> list[Linear]:
        return split(self, attention.Wqkv, attention.hidden_size, attention.num_key_value_heads * attention.head_dim)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = clipped(self, attention.clip_qkv, q, k)
        return super().rotated(q, k, attention, name)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        (v,) = clipped(self, attention.clip_qkv, v)
        return super().attended(q, k, v, attention)

    def mlp(self, x: Value, mlp: Any) -> Value:
        router, power = self.own(mlp, "FFN").router, mlp.moe_normalize_expert_weights
        if self.own(router, "Router").training and router.moe_jitter_eps is not None:
            raise UnknownModelError("its layers are in training mode, and change what routers read")
        if power not in (None, 1):
            raise UnknownModelError("it divides the weights of experts by another norm than their sum")
        experts = self.own(self.own(mlp.experts, "Experts").mlp, "ExpertGLU")
        size, of = experts.ffn_hidden_size, [self.linear(router.layer)]
        for begin in range(0, len(experts.w1), size):
            gate, up, back = (part.detach()[begin : begin + size] for part in (experts.w1, experts.v1, experts.w2))
            of += Linear(gate), Linear(up), Linear(back.T)
        return self._add(
            Experts(
                x, Value(x.width), tuple(of), mlp.top_k, self._activation(experts.activation_fn), power == 1, True,
                rounds_steps=True, epsilon=0.0, is_apart=True,
            )
        )  # fmt: skip
