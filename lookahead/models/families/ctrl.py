"""CTRL (Keskar et al. 2019, arXiv 1909.05858): a scaled embedding, and positions from a table of sines and cosines."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.page import Page


class CTRL(Page):
    suffix = "LMHeadModel"
    names: Mapping[str, str] = {name: name for name in ("EncoderLayer", "MultiHeadAttention")}
    layer_class = "EncoderLayer"
    layers_at = "h"
    attention_at = "multi_head_attention"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = "resid_pdrop", "embd_pdrop"

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def write(self) -> None:
        inner = self.own(self.inner, "Model")
        table = SimpleNamespace(weights=inner.pos_encoding)
        x = self.output(self.embed(inner.w, float(inner.d_model_size**0.5), positions=table))
        for i, layer in enumerate(self.layers(inner)):
            if i:
                self.output(x)
            x = self.add(x, self.attention(self.norm(x, layer.layernorm1), layer.multi_head_attention))
            x = self.add(x, self.mlp(self.norm(x, layer.layernorm2), layer.ffn))
        self.logits(self.output(self.norm(x, inner.layernorm)), self.model.lm_head)

    def attention(self, x: Value, attention: Any) -> Value:
        self.own(attention, "MultiHeadAttention")
        q, k, v = self.products(x, *map(self.linear, (attention.Wq, attention.Wk, attention.Wv)))
        return self.product(self.attend(q, k, v, attention, dropout=""), attention.dense)

    def mlp(self, x: Value, mlp: Any) -> Value:
        into, activation, back = self._plain(mlp, nn.Sequential)
        return self.product(self.gate(self.product(x, into), activation), back)
