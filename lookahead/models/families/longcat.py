"""LongCat-Flash (arXiv 2509.01322): layers of two halves, and experts beside both. Some give what they read."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.cpu.products import DecodingLinear, Linear
from lookahead.models.families.deepseek import DeepseekV3
from lookahead.models.families.experts import mixture
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import scaled


class LongcatFlash(DeepseekV3):
    names = MappingProxyType({"Attention": "LongcatFlashMLA"})
    rotary_separates = True  # type: ignore[assignment]

    def layers(self, inner: Any) -> Iterator[Any]:
        layers = inner.layers[: inner.config.num_layers]
        if [half.layer_idx for layer in layers for half in layer.self_attn] != list(range(2 * len(layers))):
            raise UnknownModelError("its layers are not in the order of their layer_idx, by which they find the cache")
        for layer in layers:
            yield self.own(layer, self.layer_class)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        mixed = None
        for half, attention in enumerate(layer.self_attn):
            x = self.add(x, self.attention(self.norm(x, layer.input_layernorm[half]), attention, name))
            normed = self.norm(x, layer.post_attention_layernorm[half])
            mixed = mixed or self.mixed(normed, self.own(layer.mlp, "MoE"))
            x = self.add(x, self.mlp(normed, layer.mlps[half]))
        assert mixed is not None
        return self.add(x, mixed)

    def scaled(self, q: Value, c: Value, attention: Any) -> tuple[Value, Value]:
        return scaled(self, q, attention.mla_scale_q_lora), scaled(self, c, attention.mla_scale_kv_lora)

    def mixed(self, x: Value, mlp: Any) -> Value:
        router, experts = mlp.router, mlp.experts
        self._plain(experts.identity_expert, nn.Identity)
        return mixture(
            self, x, router, experts, adds_to_one=False, rounds=False, suffix="TopkRouter", in_float32=True,
            routing=Linear(self._plain(router.classifier, nn.Linear, DecodingLinear).weight),
            correction=router.e_score_correction_bias, factor=float(router.routed_scaling_factor),
            identities=experts.zero_expert_num,
        )  # fmt: skip
