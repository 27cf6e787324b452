"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745), its Japanese form, and Persimmon.

A head's query, key and value are adjacent.
"""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import AttendsBy
from lookahead.models.families.parts import select


class GPTNeoX(Llama):
    layer_class = "Layer"
    attention_at = "attention"
    embedding_at = "embed_in"
    last_norm = "final_layer_norm"
    head_size = "head_size"
    """Its name in attention."""
    norm_class = nn.LayerNorm
    norms_are_centered = True
    rotates_part = True
    dropouts = ("hidden_dropout",)

    @property
    def inner(self) -> Any:
        return self.model.gpt_neox

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.attention, name)
        if layer.use_parallel_residual:
            more = self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp)
            return self.add(self.add(more, attended), x)
        x = self.add(attended, x)
        return self.add(self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp), x)

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        q, k, v = self.heads(x, attention, name)
        return self.product(self.attend(q, k, v, attention, getattr(attention, self.head_size)), attention.dense)

    def heads(self, x: Value, attention: Any, name: str) -> tuple[Value, Value, Value]:
        size = getattr(self.own(attention, "Attention"), self.head_size)
        joined = self.product(x, attention.query_key_value)
        q, k, v = (select(self, joined, size, group=3, first=i) for i in range(3))
        return *self.rotated(q, k, attention, name), v

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return self.rotary(q, attention.head_size, name), self.rotary(k, attention.head_size, name)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.dense_h_to_4h), mlp.act), mlp.dense_4h_to_h)


class GPTNeoXJapanese(GPTNeoX):
    """The bias of what attention adds is that of its last layer alone."""

    attends_by: AttendsBy = "eager"

    @property
    def inner(self) -> Any:
        return self.model.gpt_neox_japanese

    def head(self, x: Value) -> None:
        self.logits(x, self.model.embed_out)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.attention, name))
        return self.add(x, self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp))

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        q, k, v = self.heads(x, attention, name)
        scaling, dense = 1 / attention.norm_factor, self.linear(attention.dense)
        attended = self.attend(q, k, v, attention, attention.head_size, scaling)
        (out,) = self.products(attended, dense._replace(bias=attention.dense_bias))
        return out


class Persimmon(GPTNeoX):
    layer_class = "DecoderLayer"
    attention_at = "self_attn"
    embedding_at = "embed_tokens"
    last_norm = "final_layernorm"
    head_size = "head_dim"

    @property
    def inner(self) -> Any:
        return self.model.model

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return Llama.layer(self, x, layer, name)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.qk_layernorm:
            q = self.norm_heads(q, attention.q_layernorm, attention.head_dim)
            k = self.norm_heads(k, attention.k_layernorm, attention.head_dim)
        return Llama.rotated(self, q, k, attention, name)
