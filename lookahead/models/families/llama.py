"""Llama (Touvron et al. 2023, arXiv 2302.13971), on which the pages of most families build."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.page import Page


class Llama(Page):
    model_class = "Model"
    """The class of the model within, without the family's name."""
    embedding_at = "embed_tokens"
    """The name of the embedding in the model within."""
    last_norm = "norm"
    """The name of the last norm in the model within."""
    output_projection = "o_proj"
    """The name of the last linear layer in attention."""

    def write(self) -> None:
        inner = self.own(self.inner, self.model_class)
        x = self.output(self.embedding(inner))
        for i, (layer, name) in enumerate(zip(self.layers(inner), self.rotary_names(), strict=False)):
            if i:
                self.output(x)
            x = self.layer(x, layer, name)
        self.head(self.output(self.norm(x, getattr(inner, self.last_norm))))

    def embedding(self, inner: Any) -> Value:
        return self.embed(getattr(inner, self.embedding_at))

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name))
        return self.add(x, self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp))

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        q, k, v = self.products(x, *self.projections(attention))
        q, k = self.rotated(q, k, attention, name)
        return self.product(self.attended(q, k, v, attention), getattr(attention, self.output_projection))

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention)

    def projections(self, attention: Any) -> list[Linear]:
        return [self.linear(module) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return self.rotary(q, attention.head_dim, name), self.rotary(k, attention.head_dim, name)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.gate_proj), self.linear(mlp.up_proj))
        return self.product(self.gate(gate, mlp.act_fn, up), mlp.down_proj)
