"""Bloom (arXiv 2211.05100) and MPT: attention is biased by the positions of keys (ALiBi, arXiv 2108.12409).

What is added to scores is made by the model's own function, for all positions at once.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead.cpu.alibi import Alibi
from lookahead.cpu.operations import Value
from lookahead.models.families.clipped import clipped
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import select, split

MOST_POSITIONS = 2**16  # of a text, where a configuration names no limit; longer ones are left to the model


class Bloom(Llama):
    attends_by = "eager"
    layer_class = "Block"
    layers_at = "h"
    attention_at = "self_attention"
    last_norm = "ln_f"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    may_lack_rotary = True
    dropouts = ("hidden_dropout",)

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def write(self) -> None:
        columns = torch.ones(1, MOST_POSITIONS, dtype=torch.long, device="cpu")
        biases = self.inner.build_alibi_tensor(columns, self.inner.num_heads, dtype=self.model.dtype)
        self.biases: np.ndarray = biases[:, 0].float().numpy()
        super().write()

    def embedding(self, inner: Any) -> Value:
        return self.norm(self.embed(inner.word_embeddings), inner.word_embeddings_layernorm)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        skips_norms = not layer.apply_residual_connection_post_layernorm
        for part, norm in ((self.heads, layer.input_layernorm), (self.feed_forward, layer.post_attention_layernorm)):
            normed = self.norm(x, norm)
            x = self.add(x if skips_norms else normed, part(normed, layer))
        return x

    def heads(self, x: Value, layer: Any) -> Value:
        attention = self.own(layer.self_attention, "Attention")
        if attention.pretraining_tp > 1 and attention.slow_but_exact:
            raise UnknownModelError("its products are summed in parts")
        joined, size = self.product(x, attention.query_key_value), attention.head_dim
        q, k, v = (select(self, joined, size, group=3, first=i) for i in range(3))
        attended = self.attend(
            q, k, v, attention, scaling=attention.inv_norm_factor, kind=Alibi, biases=self.biases, rounds_scores=True
        )
        return self.product(attended, attention.dense)

    def feed_forward(self, x: Value, layer: Any) -> Value:
        mlp = self.own(layer.mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.dense_h_to_4h), mlp.gelu_impl), mlp.dense_4h_to_h)


class Mpt(Llama):
    attends_by = "eager"
    layer_class = "Block"
    layers_at = "blocks"
    attention_at = "attn"
    embedding_at = "wte"
    last_norm = "norm_f"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    may_lack_rotary = True

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def write(self) -> None:
        inner = self.inner
        biases = inner.build_mpt_alibi_tensor(inner.num_heads, inner.config.max_seq_len)
        self.biases: np.ndarray = biases[:, 0].contiguous().numpy()
        super().write()

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.heads(self.norm(x, layer.norm_1), layer.attn))
        mlp = self.own(layer.ffn, "MLP")
        more = self.gate(self.product(self.norm(x, layer.norm_2), mlp.up_proj), mlp.act)
        return self.add(x, self.product(more, mlp.down_proj))

    def heads(self, x: Value, attention: Any) -> Value:
        self.own(attention, "Attention")
        q, k, v = self.products(x, *split(self, attention.Wqkv, x.width, x.width))
        q, k, v = clipped(self, attention.clip_qkv or None, q, k, v)
        attended = self.attend(
            q, k, v, attention, scaling=attention.softmax_scale, dropout="attn_dropout_p", kind=Alibi,
            biases=self.biases, by_distance=True,
        )  # fmt: skip
        return self.product(attended, attention.out_proj)
