"""GPT-J and CodeGen: attention and MLP read the same input, and adjacent elements rotate by a table of positions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.parts import select


class GPTJ(Llama):
    layer_class = "Block"
    layers_at = "h"
    attention_at = "attn"
    embedding_at = "wte"
    last_norm = "ln_f"
    output_projection = "out_proj"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    rotary_is_interleaved = True
    rotates_part = True
    dropouts = "attn_pdrop", "resid_pdrop", "embd_pdrop"

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        normed = self.norm(x, layer.ln_1)
        return self.add(self.add(self.attention(normed, layer.attn, name), self.mlp(normed, layer.mlp)), x)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.fc_in), mlp.act), mlp.fc_out)

    def rotary_names(self) -> Sequence[str]:
        self.own(self.rotary_module, "RotaryEmbedding")
        return [""] * len(self.inner.h)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        sin, cos = self.rotary_module(like, positions[:, : self.rotary_module.max_positions])
        return [table[0].repeat(1, 2) for table in (cos, sin)]


class CodeGen(GPTJ):
    @property
    def rotary_rounds_once(self) -> bool:  # type: ignore[override]  # a model that was not cast as a whole does
        return self.rotary_module.embed_positions.dtype == torch.float32

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        """One layer gives query, value and key, in the parts of the machines that it was trained on."""
        self.own(attention, "Attention")
        joined, size = self.product(x, attention.qkv_proj), attention.embed_dim // attention.mp_num
        q, v, k = (select(self, joined, size, group=3, first=i) for i in range(3))
        q, k = self.rotated(q, k, attention, name)
        return self.product(self.attend(q, k, v, attention), attention.out_proj)
