"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): one layer gives query, key and value, in one of three orders."""

import math
from typing import Any

import torch
from torch import nn
from transformers.models.falcon import modeling_falcon

from lookahead.cpu.alibi import Alibi
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.alibi import MOST_POSITIONS
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import select, split


class Falcon(Llama):
    attends_by = "sdpa"
    layers_at = "h"
    attention_at = "self_attention"
    embedding_at = "word_embeddings"
    last_norm = "ln_f"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = "hidden_dropout", "attention_dropout"

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def write(self) -> None:
        self.biases: dict[str, Any] = {}
        if self.inner.use_alibi:
            columns, heads = torch.ones(1, MOST_POSITIONS, dtype=torch.long, device="cpu"), self.inner.num_heads
            biases = modeling_falcon.build_alibi_tensor(columns, heads, dtype=self.model.dtype)[:, 0]
            size = self.inner.config.hidden_size // heads
            self.biases = {"kind": Alibi, "biases": (biases / math.sqrt(size)).float().numpy()}
        super().write()

    def linear(self, module: Any) -> Linear:
        if module is self.model.lm_head:
            return super().linear(module)
        if module.bias is not None and module.weight.dtype != torch.float32:
            raise UnknownModelError("its products are rounded before the bias is added")
        return Linear(self.own(module, "Linear").weight, None, module.bias)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        config = layer.config
        if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
            normed, of_mlp = self.norm(x, layer.ln_attn), self.norm(x, layer.ln_mlp)
        else:
            normed = of_mlp = self.norm(x, layer.input_layernorm)
        attended = self.heads(normed, layer.self_attention, name)
        if config.new_decoder_architecture or config.parallel_attn:
            return self.add(self.add(self.mlp(of_mlp, layer.mlp), attended), x)
        x = self.add(attended, x)
        return self.add(self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp), x)

    def heads(self, x: Value, attention: Any, name: str) -> Value:
        size, heads = self.own(attention, "Attention").head_dim, attention.num_heads
        if attention.new_decoder_architecture:  # each group of queries is followed by its key and value
            groups = heads // attention.num_kv_heads
            joined = self.product(x, attention.query_key_value)
            q = select(self, joined, size, groups + 2, 0, groups)
            k, v = (select(self, joined, size, groups + 2, i, 1, groups) for i in (groups, groups + 1))
        elif attention.multi_query:
            q, k, v = self.products(x, *split(self, attention.query_key_value, heads * size, size))
        else:
            joined = self.product(x, attention.query_key_value)
            q, k, v = (select(self, joined, size, 3, i) for i in range(3))
        if not self.biases:
            q, k = self.rotary(q, size, name), self.rotary(k, size, name)
        attended = self.attend(q, k, v, attention, size, scaling=size**-0.5, **self.biases)
        return self.product(attended, attention.dense)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.dense_h_to_4h), mlp.act), mlp.dense_4h_to_h)
