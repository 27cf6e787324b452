"""LFM2 (arXiv 2511.23404), its mixtures, and LFM3: short convolutions between gates, and a few layers of attention."""

from typing import Any

from torch import nn

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.convolutions import convolve
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.parts import qk_norm, select, split, times


class Lfm2(Llama):
    last_norm = "embedding_norm"
    output_projection = "out_proj"

    def mixer(self, layer: Any) -> Any:
        return layer.self_attn if layer.is_attention_layer else layer.conv

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.mixed(self.norm(x, layer.operator_norm), layer, name))
        return self.add(x, self.mlp(self.norm(x, layer.ffn_norm), layer.feed_forward))

    def mixed(self, x: Value, layer: Any, name: str) -> Value:
        if layer.is_attention_layer:
            return self.attention(x, layer.self_attn, name)
        return self.convolution(x, layer.conv)

    def convolution(self, x: Value, conv: Any) -> Value:
        width = self.own(conv, "ShortConv").out_proj.in_features
        before, after, inner = self.products(x, *split(self, conv.in_proj, width, width))
        convolved = convolve(self, times(self, inner, before), conv.conv, conv.layer_idx)
        return self.product(times(self, convolved, after), conv.out_proj)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, dropout="")

    def normed(self, q: Value, k: Value, attention: Any) -> tuple[Value, Value]:
        size = attention.head_dim
        return self.norm_heads(q, attention.q_layernorm, size), self.norm_heads(k, attention.k_layernorm, size)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*self.normed(q, k, attention), attention, name)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.w1), self.linear(mlp.w3))
        return self.product(self._add(op.Gate(gate, Value(gate.width), "silu", up)), mlp.w2)

    def windows(self) -> list[int | None]:
        return [0 if kind == "conv" else None for kind in self.inner.config.layer_types]


class Lfm2Moe(Lfm2):
    """The router rounds each step, so experts tie. But their bias stays in float32 where a checkpoint is read."""

    @property
    def rotary_module(self) -> Any:
        return self.inner.pos_emb

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):  # the first layers have a usual MLP
            return super().mlp(x, mlp)
        gate, bias = self.own(mlp, "SparseMoeBlock").gate, mlp.expert_bias if mlp.use_expert_bias else None
        return mixture(
            self, x, gate, mlp.experts, gate.norm_topk_prob, rounds=False, correction=bias, is_sigmoid=True,
            factor=float(gate.routed_scaling_factor), epsilon=1e-6, rounds_steps=True,
            rounds_ranks=bias is None or bias.dtype == gate.weight.dtype,
        )  # fmt: skip


class Lfm3(Lfm2):
    """Attention is gated by heads, and some of it slides. Norms may also come after the parts of a layer."""

    output_projection = "o_proj"
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        mixed = self.mixed(self.norm(x, layer.operator_norm), layer, name)
        x = self.add(x, self.norm_after(mixed, layer.post_operator_norm))
        more = self.mlp(self.norm(x, layer.ffn_norm), layer.feed_forward)
        return self.add(x, self.norm_after(more, layer.post_ffn_norm))

    def norm_after(self, x: Value, norm: Any) -> Value:
        return x if type(norm) is nn.Identity else self.norm(x, norm)

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        if attention.g_proj is None:
            return super().attention(x, attention, name)
        size = self.own(attention, "Attention").head_dim
        q, k, v, by_heads = self.products(x, *self.projections(attention), self.linear(attention.g_proj))
        q, k = self.rotated(q, k, attention, name)
        gate = select(self, by_heads, size=1, group=1, first=0, repeats=size)
        gated = op.Gate(gate, Value(gate.width), "sigmoid", self.attended(q, k, v, attention))
        return self.product(self._add(gated), attention.o_proj)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention)

    def normed(self, q: Value, k: Value, attention: Any) -> tuple[Value, Value]:
        return qk_norm(self, q, k, attention)

    def windows(self) -> list[int | None]:
        config, found = self.inner.config, super().windows()
        kinds = zip(found, config.layer_types, strict=True)
        return [config.sliding_window if kind == "sliding_attention" else window for window, kind in kinds]
