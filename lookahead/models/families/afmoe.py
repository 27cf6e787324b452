"""AFMoE (Trinity): the attention output is gated, and only layers with a window have positions."""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.corrected import WithSharedExperts
from lookahead.models.families.experts import mixture
from lookahead.models.families.page import Slides
from lookahead.models.families.parts import qk_norm


class Afmoe(WithSharedExperts):
    slides: Slides = "by type"
    norms_round_once = True
    mixture_class = "SparseMoeBlock"

    def embedding(self, inner: Any) -> Value:
        config = inner.config
        return self.embed(inner.embed_tokens, config.hidden_size**0.5 if config.mup_enabled else 1.0)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        more = self.mlp(self.norm(x, layer.pre_mlp_layernorm), layer.mlp)
        return self.add(x, self.norm(more, layer.post_mlp_layernorm))

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        q, k, v, gate = self.products(x, *self.projections(attention), self.linear(attention.gate_proj))
        q, k = qk_norm(self, q, k, attention)
        if attention.is_local_attention:
            q, k = self.rotated(q, k, attention, name)
        found = self.attended(q, k, v, attention)
        gated = self._add(op.Gate(gate, Value(gate.width), "sigmoid", found))
        return self.product(gated, attention.o_proj)

    def mixed(self, x: Value, mlp: Any) -> Value:
        return mixture(
            self, x, mlp.router, mlp.experts, adds_to_one=True, rounds=False, suffix="TokenChoiceRouter",
            routing=self.linear(mlp.router.gate), correction=mlp.expert_bias, is_sigmoid=True,
            factor=float(mlp.router.route_scale),
        )  # fmt: skip
