"""Llama 4: experts read what is weighed before, and layers without positions let queries grow in long texts.

Other layers see the positions of their chunk, by the masks of the pass.
"""

from typing import Any

import torch

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama


class Llama4(Llama):
    rotary_is_interleaved = True
    rotary_rounds_once = True

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, suffix if suffix == "Router" else f"Text{suffix}")

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name))
        return self.add(x, self.feed_forward(self.norm(x, layer.post_attention_layernorm), layer.feed_forward))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.use_rope:
            q, k = super().rotated(q, k, attention, name)
            return (self._normed(q, attention), self._normed(k, attention)) if hasattr(attention, "qk_norm") else (q, k)
        if attention.attn_temperature_tuning:  # a factor of the queries' tables, which rotate by nothing
            q = self.rotary(q, attention.head_dim, f"{attention.floor_scale} {attention.attn_scale}")
        return q, k

    def _normed(self, x: Value, attention: Any) -> Value:
        norm = self.own(attention.qk_norm, "L2Norm")
        return self._add(op.Norm(x, Value(x.width), None, norm.eps, of_heads=True, size=attention.head_dim))

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        if not name:
            rotations = self.rotary_module(like, positions)[0]  # complex numbers
            return [table.repeat(1, 2) for table in (rotations.real, rotations.imag)]
        floor, scale = map(float, name.split())
        factors = torch.log1p(torch.floor((positions[0].float() + 1.0) / floor)) * scale + 1.0
        table = factors[:, None].repeat(1, self.inner.layers[0].self_attn.head_dim)
        return [table, torch.zeros_like(table)]

    def feed_forward(self, x: Value, part: Any) -> Value:
        if not hasattr(part, "experts"):
            return self.mlp(x, part)
        router = self.own(part, "Moe").router
        mixed = mixture(
            self, x, router, part.experts, adds_to_one=False, suffix="Router", routing=Linear.from_layer(router),
            is_transposed=True, is_sigmoid=True, ranks_scores=True, weighs_inputs=True,
        )  # fmt: skip
        return self.add(self.mlp(x, part.shared_expert), mixed)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.gate_proj), self.linear(mlp.up_proj))
        return self.product(self.gate(gate, mlp.activation_fn, up), mlp.down_proj)
