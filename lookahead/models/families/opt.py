"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, layer norms, an MLP without a gate."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.page import Page, UnknownModelError


class OPT(Page):
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts: tuple[str, ...] = ("dropout", "layerdrop")

    @property
    def inner(self) -> Any:
        return self.model.model.decoder

    def write(self) -> None:
        self.own(self.model.model, "Model")
        inner = self.own(self.inner, "Decoder")
        if inner.project_in is not None or inner.project_out is not None:
            raise UnknownModelError("its embedding is projected")
        positions = self.own(inner.embed_positions, "LearnedPositionalEmbedding")
        x = self.output(self.embed(inner.embed_tokens, positions=positions))
        for i, layer in enumerate(self.layers(inner)):
            if i:
                self.output(x)
            x = self.layer(x, layer)
        if inner.final_layer_norm is not None:
            x = self.norm(x, inner.final_layer_norm)
        self.logits(self.output(x), self.model.lm_head)

    def layer(self, x: Value, layer: Any) -> Value:
        if layer.do_layer_norm_before:
            x = self.add(x, self.attention(self.norm(x, layer.self_attn_layer_norm), layer.self_attn))
            return self.add(x, self.mlp(self.norm(x, layer.final_layer_norm), layer))
        x = self.norm(self.add(x, self.attention(x, layer.self_attn)), layer.self_attn_layer_norm)
        return self.norm(self.add(x, self.mlp(x, layer)), layer.final_layer_norm)

    def attention(self, x: Value, attention: Any) -> Value:
        """The model scales queries before it rounds them, and here they are scaled after it: the same in float32."""
        self.own(attention, "Attention")
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = self.products(x, *map(self.linear, projections))
        return self.product(self.attend(q, k, v, attention, dropout="dropout"), attention.out_proj)

    def mlp(self, x: Value, layer: Any) -> Value:
        return self.product(self.gate(self.product(x, layer.fc1), layer.activation_fn), layer.fc2)
