"""Zamba2 (Glorioso et al. 2024, arXiv 2411.15242): Mamba-2, and few blocks of attention and MLP that many layers share.

A block also reads the embedding. Each layer that runs it adds adapters of its own to its weights.
"""

from typing import Any

from torch import nn

from lookahead.cpu.heads import Join
from lookahead.cpu.operations import Value
from lookahead.models.families.mamba2 import Bamba
from lookahead.models.families.parts import split


class Zamba2(Bamba):
    rotates_part = False
    may_lack_rotary = True
    mixer_class = "MambaMixer"
    _embedded: Value

    def own(self, module: Any, suffix: str) -> Any:
        if suffix == "DecoderLayer":
            suffix = "HybridLayer" if hasattr(module, "shared_transformer") else "MambaDecoderLayer"
        return super().own(module, suffix)

    def mixer(self, layer: Any) -> Any:
        return getattr(layer, "mamba_decoder", layer).mamba

    def embedding(self, inner: Any) -> Value:
        self._embedded = super().embedding(inner)
        return self._embedded

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        read = x
        if hasattr(layer, "shared_transformer"):
            layer, block, linear = layer.mamba_decoder, layer.shared_transformer, layer.linear
            read = self.add(x, self.product(self.block(x, block, layer.mamba.layer_idx), linear))
        own = self.own(layer, "MambaDecoderLayer")
        return self.add(x, self.mamba(self.norm(read, own.input_layernorm), own.mamba, name))

    def block(self, x: Value, block: Any, index: int) -> Value:
        """What a shared block makes for the layer of this index."""
        self.own(block, "AttentionDecoderLayer")
        both = self._add(Join(x, Value(2 * x.width), self._embedded, heads=1))
        attended = self.of_block(self.norm(both, block.input_layernorm), block.self_attn, index)
        mlp = self.own(block.feed_forward, "MLP")
        adapter = mlp.gate_up_proj_adapter_list[mlp.layer_dic[index]]
        normed = self.norm(attended, block.pre_ff_layernorm)
        gate, up = self.adapted(normed, mlp.gate_up_proj, adapter, mlp.down_proj.in_features)
        return self.product(self.gate(gate, mlp.act_fn, up), mlp.down_proj)

    def of_block(self, x: Value, attention: Any, index: int) -> Value:
        if self.own(attention, "Attention").config.use_shared_attention_adapter:
            place, parts = attention.layer_dic[index], list[Value]()
            for kind in "qkv":
                adapter = getattr(attention, f"linear_{kind}_adapter_list")[place]
                parts += self.adapted(x, getattr(attention, f"{kind}_proj"), adapter)
        else:
            parts = self.products(x, *self.projections(attention))
        q, k, v = parts
        q, k = self.rotated(q, k, attention, "")
        return self.product(self.attend(q, k, v, attention, layer=index), attention.o_proj)

    def adapted(self, x: Value, module: Any, adapter: Any, *widths: int) -> list[Value]:
        """What a linear layer and its adapter give together, in parts of these widths, and what is left."""
        first, last = self._plain(adapter, nn.Sequential)
        more = self.products(self.product(x, first), *split(self, last, *widths))
        return list(map(self.add, self.products(x, *split(self, module, *widths)), more))
