"""Beam: the attention output is gated, sums are weighted by depth, and layers without positions scale their queries."""

from typing import Any

import torch

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.corrected import WithSharedExperts
from lookahead.models.families.experts import mixture
from lookahead.models.families.page import Slides
from lookahead.models.families.parts import qk_norm, scaled


class Beam(WithSharedExperts):
    slides: Slides = "by type"
    norms_round_once = True
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.summed(x, self.norm(attended, layer.post_attention_layernorm), layer.attn_residual_add_idx)
        more = self.mlp(self.norm(x, layer.pre_feedforward_layernorm), layer.mlp)
        return self.summed(x, self.norm(more, layer.post_feedforward_layernorm), layer.mlp_residual_add_idx)

    def summed(self, x: Value, more: Value, depth: int) -> Value:
        """Both parts are weighted, so that the sum of all parts has the variance of one."""
        return self.add(scaled(self, x, ((depth - 1) / depth) ** 0.5), more, 1 / depth**0.5)

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        gates = self.linear(attention.gate_proj)
        biases = attention.gate_bias.detach().repeat_interleave(attention.head_dim)
        q, k, v, gate = self.products(x, *self.projections(attention), gates._replace(bias=biases))
        q, k = qk_norm(self, q, k, attention)
        q = self.rotary(q, attention.head_dim, name)
        if self.has_positions(name):
            k = self.rotary(k, attention.head_dim, name)
        found = self.attended(q, k, v, attention)
        return self.product(self._add(op.Gate(gate, Value(gate.width), "sigmoid", found)), attention.o_proj)

    def has_positions(self, name: str) -> bool:
        """Whether layers of this type rotate their keys. The others scale their queries: a factor of their tables."""
        return self.inner.config.rope_parameters[name] is not None

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        if self.has_positions(name):
            return super().rotary_tables(like, positions, name)
        factors = torch.exp(0.1 * torch.log1p((positions[0].float() + 1) / 2048))
        cosines = factors[:, None].repeat(1, self.inner.config.head_dim)
        return [cosines, torch.zeros_like(cosines)]

    def mlp(self, x: Value, mlp: Any) -> Value:
        if hasattr(mlp, "experts"):
            factor = float(self.own(mlp, "MoE").routed_scaling_factor)
            return scaled(self, self.mixed(x, mlp), factor)
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.gate_proj), self.linear(mlp.up_proj))
        activation = self._activation(mlp.act_fn)
        gated = self._add(op.Gate(gate, Value(gate.width), activation, up, rounds_once=True))
        return self.product(gated, mlp.down_proj)

    def mixed(self, x: Value, mlp: Any) -> Value:
        gate = mlp.gate
        return mixture(
            self, x, gate, mlp.experts, gate.norm_topk_prob, rounds=False, in_float32=True, is_sigmoid=True,
            correction=gate.e_score_correction_bias, groups=gate.num_group, top_groups=gate.topk_group,
        )  # fmt: skip

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, cap=self.model.config.final_logit_softcapping)
