"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and families with their latent attention.

The cache holds a latent for each token, from which all heads' keys and values are computed, and the rotated part of its
keys. The model's code computes the keys and values of the whole text in each pass. Here, queries are multiplied with
the key projection, and so attend to the latents themselves: the same, except for rounding.
"""

import math
from typing import Any

import torch
from torch import nn

from lookahead.cpu.heads import HeadProducts, Join
from lookahead.cpu.operations import Value
from lookahead.cpu.products import DecodingLinear
from lookahead.models.families.corrected import WithSharedExperts
from lookahead.models.families.experts import mixture
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import embed_scaled, scaled, select, split


class DeepseekV3(WithSharedExperts):
    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        fixed, rotated, heads = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.num_heads
        has_latent_queries = attention.q_lora_rank is not None
        of_queries = attention.q_a_proj if has_latent_queries else attention.q_proj
        latent = attention.kv_lora_rank
        q, c, k = self.products(x, self.linear(of_queries), *split(self, attention.kv_a_proj_with_mqa, latent))
        if has_latent_queries:
            q = self.product(self.norm_heads(q, attention.q_a_layernorm, q.width), attention.q_b_proj)
        c = self.norm_heads(c, attention.kv_a_layernorm, latent)
        q, c = self.scaled(q, c, attention)
        size = math.gcd(fixed, rotated)
        group = (fixed + rotated) // size
        unturned = select(self, q, size, group, 0, fixed // size)
        q = self.rotary(select(self, q, size, group, fixed // size, rotated // size), rotated, name)
        makes = self._plain(attention.kv_b_proj, nn.Linear, DecodingLinear)
        if makes.bias is not None:
            raise UnknownModelError("its key projection has a bias")
        weight = makes.weight
        sought = self._add(HeadProducts(unturned, Value(heads * latent), weight, heads, 0, is_transposed=True))
        q = self._add(Join(sought, Value(sought.width + q.width), q, heads))
        k = self.rotary(k, rotated, name)
        found = self.attend(q, c, k, attention, latent + rotated, is_latent=True)
        out = Value(heads * attention.v_head_dim)
        values = self._add(HeadProducts(found, out, weight, heads, fixed, is_transposed=False))
        return self.product(self.found(x, values, attention), attention.o_proj)

    def found(self, x: Value, values: Value, attention: Any) -> Value:
        """The output of attention from its result for the rows x."""
        return values

    def scaled(self, q: Value, c: Value, attention: Any) -> tuple[Value, Value]:
        """Queries and latents of families that scale them."""
        return q, c

    @property
    def rotary_separates(self) -> bool:  # type: ignore[override]
        return bool(self.inner.config.rope_interleave)


class DeepseekV2(DeepseekV3):
    mixture_class = "Moe"
    rotary_is_interleaved = True
    rotary_separates = False
    rotary_rounds_once = True

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        rotations = self.rotary_module(like, positions)[0]  # complex numbers
        return [table.repeat(1, 2) for table in (rotations.real, rotations.imag)]

    def mixed(self, x: Value, mlp: Any) -> Value:
        gate, groups = mlp.gate, (1, 1)
        if gate.topk_method == "group_limited_greedy":
            groups = gate.num_group, gate.topk_group
        return mixture(
            self, x, gate, mlp.experts, adds_to_one=False, rounds=False, suffix="TopkRouter", in_float32=True,
            factor=float(gate.routed_scaling_factor), groups=groups[0], top_groups=groups[1], best_of_group=1,
        )  # fmt: skip


class Glm4MoeLite(DeepseekV3):
    pass


class AXK1(DeepseekV3):
    def mlp(self, x: Value, mlp: Any) -> Value:
        more = super().mlp(x, mlp)
        return self.norm(more, mlp.post_mlp_layernorm) if hasattr(mlp, "experts") else more


class Youtu(DeepseekV3):
    """It has no experts."""


class MiniCPM3(DeepseekV3):
    """It has no experts. Settings scale the embedding, what layers add, and what the head reads."""

    rotary_separates = False

    def embedding(self, inner: Any) -> Value:
        return embed_scaled(self, inner.embed_tokens, "ScaledWordEmbedding")

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        factor = float(layer.residual_scale)
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name), factor)
        return self.add(x, self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp), factor)

    def head(self, x: Value) -> None:
        self.logits(scaled(self, x, 1 / self.model.config.logits_scaling), self.model.lm_head)
