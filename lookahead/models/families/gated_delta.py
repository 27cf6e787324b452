"""Hybrids of attention and gated DeltaNet (Yang et al. 2024, arXiv 2412.06464).

Qwen3.5, Qwen3-Next, LARA-mini and OLMo Hybrid.
"""

import math
from typing import Any

import torch
from transformers.activations import ACT2FN

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.cpu.states import Delta
from lookahead.models.families.convolutions import convolved
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.mixtral import Qwen2Moe
from lookahead.models.families.olmo import Olmo2
from lookahead.models.families.parts import qk_norm, select, split


class Qwen3_5(Llama):  # the name that transformers gives it
    model_class = "TextModel"
    rotary_class = "TextRotaryEmbedding"
    norm_offset = 1.0
    norms_round_once = True
    rotates_part = True
    gated_norm = "norm"
    """Its name in linear attention, and the next one."""
    linear_output = "out_proj"

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, self.rotary_class if suffix == "RotaryEmbedding" else suffix)

    def mixer(self, layer: Any) -> Any:
        return layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        mix = self.linear_attention if hasattr(layer, "linear_attn") else self.attention
        x = self.add(x, mix(self.norm(x, layer.input_layernorm), self.mixer(layer), name))
        return self.add(x, self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp))

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        size = self.own(attention, "Attention").head_dim
        both, k, v = self.products(x, *self.projections(attention))
        q, gate = (select(self, both, size, 2, i) for i in range(2))  # they stand side by side in each head
        q, k = self.rotated(*qk_norm(self, q, k, attention), attention, name)
        gated = op.Gate(gate, Value(gate.width), "sigmoid", self.attended(q, k, v, attention))
        return self.product(self._add(gated), attention.o_proj)

    def linear_attention(self, x: Value, attention: Any, name: str) -> Value:
        """The gated delta rule after short convolutions. Its result is normed and gated."""
        self.own(attention, "GatedDeltaNet")
        *parts, gate, rates, decays = self.inputs(x, attention)
        q, k, v = convolved(self, parts, attention)
        speeds = attention.A_log.detach(), attention.dt_bias.detach()
        settings = attention.layer_idx, attention.num_v_heads, attention.head_k_dim
        factor = 2.0 if getattr(attention, "allow_neg_eigval", False) else 1.0
        delta = Delta(q, Value(v.width), k, v, decays, rates, *speeds, *settings, factor)
        norm = self.own(getattr(attention, self.gated_norm), "RMSNormGated")
        size = attention.head_v_dim
        normed = op.Norm(self._add(delta), Value(v.width), norm.weight, norm.variance_epsilon, of_heads=True, size=size)
        activation = self._activation(ACT2FN[norm.activation])
        gated = op.Gate(gate, Value(gate.width), activation, self._add(normed), rounds_once=True)
        return self.product(self._add(gated), getattr(attention, self.linear_output))

    def inputs(self, x: Value, attention: Any) -> list[Value]:
        """Queries, keys, values, gates, rates and decays."""
        parts = split(self, attention.in_proj_qkv, attention.key_dim, attention.key_dim)
        rest = attention.in_proj_z, attention.in_proj_b, attention.in_proj_a
        return self.products(x, *parts, *map(self.linear, rest))

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        if self.rotary_class == "TextRotaryEmbedding":  # it also knows places in images, by three numbers
            positions = positions.expand(3, 1, -1)
        return super().rotary_tables(like, positions, name)

    def windows(self) -> list[int | None]:
        return [0 if kind == "linear_attention" else None for kind in self.inner.config.layer_types]


class Qwen3_5Moe(Qwen3_5, Qwen2Moe):
    def adds_to_one(self, router: Any) -> bool:
        return True


class Qwen3Next(Qwen3_5, Qwen2Moe):
    model_class = "Model"
    rotary_class = "RotaryEmbedding"

    def inputs(self, x: Value, attention: Any) -> list[Value]:
        """Those of the heads that share a key head stand side by side."""
        keys, values = attention.head_k_dim, attention.head_v_dim * attention.num_v_heads // attention.num_k_heads
        both, more = self.products(x, self.linear(attention.in_proj_qkvz), self.linear(attention.in_proj_ba))
        size, found, first = math.gcd(keys, values), list[Value](), 0
        for width in (keys, keys, values, values):
            found.append(select(self, both, size, 2 * (keys + values) // size, first // size, width // size))
            first += width
        heads = attention.num_v_heads // attention.num_k_heads
        return [*found, *(select(self, more, heads, 2, i) for i in range(2))]


class LaraMini(Qwen3_5):
    """Only layers with a window have positions."""

    model_class = "Model"
    rotary_class = "RotaryEmbedding"
    norm_offset = 0.0
    rotates_part = False

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        return Llama.attention(self, x, attention, name)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = qk_norm(self, q, k, attention)
        return super().rotated(q, k, attention, name) if attention.sliding_window is not None else (q, k)

    def mlp(self, x: Value, mlp: Any) -> Value:
        gate = self.own(mlp, "SparseMoeBlock").gate
        mixed = mixture(self, x, gate, mlp.experts, gate.norm_topk_prob, in_float32=True)
        return self.add(mixed, super().mlp(x, mlp.shared_expert))

    def windows(self) -> list[int | None]:
        config = self.inner.config
        of_kind = {"linear_attention": 0, "sliding_attention": config.sliding_window, "full_attention": None}
        return [of_kind[kind] for kind in config.layer_types]


class OlmoHybrid(Qwen3_5, Olmo2):
    """Its layers of attention are those of OLMo 2, if need be without positions."""

    model_class = "Model"
    rotary_class = "RotaryEmbedding"
    norm_offset = 0.0
    rotates_part = False
    may_lack_rotary = True
    gated_norm = "o_norm"
    linear_output = "o_proj"

    def own(self, module: Any, suffix: str) -> Any:
        if suffix == "DecoderLayer":
            suffix = f"{'Linear' * hasattr(module, 'linear_attn')}AttentionDecoderLayer"
        return super().own(module, suffix)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return (Qwen3_5 if hasattr(layer, "linear_attn") else Olmo2).layer(self, x, layer, name)

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        return Olmo2.attention(self, x, attention, name)

    def inputs(self, x: Value, attention: Any) -> list[Value]:
        names = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"
        return self.products(x, *(self.linear(getattr(attention, name)) for name in names))
