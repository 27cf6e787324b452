"""LFM2 (arXiv 2511.23404): short convolutions between gates, and a few layers of attention."""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Lfm2(Llama):
    last_norm = "embedding_norm"
    output_projection = "out_proj"

    def mixer(self, layer: Any) -> Any:
        return layer.self_attn if layer.is_attention_layer else layer.conv

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        normed = self.norm(x, layer.operator_norm)
        if layer.is_attention_layer:
            x = self.add(x, self.attention(normed, layer.self_attn, name))
        else:
            x = self.add(x, self.convolution(normed, layer.conv))
        return self.add(x, self.mlp(self.norm(x, layer.ffn_norm), layer.feed_forward))

    def convolution(self, x: Value, conv: Any) -> Value:
        width = self.own(conv, "ShortConv").out_proj.in_features
        before, after, inner = self.products(x, *self.parts(conv.in_proj, width, width))
        convolved = self.convolve(self.times(inner, before), conv.conv, conv.layer_idx)
        return self.product(self.times(convolved, after), conv.out_proj)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, dropout="")

    def normed(self, q: Value, k: Value, attention: Any) -> tuple[Value, Value]:
        size = attention.head_dim
        return self.norm_heads(q, attention.q_layernorm, size), self.norm_heads(k, attention.k_layernorm, size)

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().turned(*self.normed(q, k, attention), attention, name)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.w1), self.linear(mlp.w3))
        return self.product(self._add(op.Gate(gate, Value(gate.width), "silu", up)), mlp.w2)

    def windows(self) -> list[int | None]:
        return [0 if kind == "conv" else None for kind in self.inner.config.layer_types]
