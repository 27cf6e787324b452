"""Mixtures of experts: Mixtral, PhiMoE, Qwen2-MoE, Qwen3-MoE, Mellum, OLMoE, FlexOlmo, Granite-MoE and Aria."""

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lookahead.cpu.experts import Weigh
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.models.families.clipped import clipped
from lookahead.models.families.experts import mixture
from lookahead.models.families.granite import Granite
from lookahead.models.families.llama import Llama
from lookahead.models.families.mistral import Mistral
from lookahead.models.families.olmo import Olmo2
from lookahead.models.families.page import Slides, UnknownModelError
from lookahead.models.families.parts import qk_norm, split
from lookahead.models.families.qwen import Qwen2, Qwen3


class Mixtral(Mistral):
    dropouts: tuple[str, ...] = ("router_jitter_noise",)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "SparseMoeBlock")
        return mixture(self, x, mlp.gate, mlp.experts, adds_to_one=True, rounds=False)


class Phimoe(Mixtral):
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = "router_jitter_noise", "input_jitter_noise"

    def mlp(self, x: Value, mlp: Any) -> Value:
        router = self.own(mlp, "SparseMoeBlock").router
        if router.training:  # it draws experts, whatever its settings are
            raise UnknownModelError("its layers are in training mode and have dropout or noise")
        nearness = torch.tensor(2 * router.router_jitter_noise, dtype=router.weight.dtype, device="cpu").item()
        return mixture(
            self, x, router, mlp.experts, adds_to_one=False, top_k=2, routing=Linear.from_layer(router),
            rounds_steps=True, nearness=nearness,
        )  # fmt: skip


class Qwen3Moe(Qwen3):
    slides: Slides = "always"

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):  # some layers have a usual MLP
            return super().mlp(x, mlp)
        self.own(mlp, "SparseMoeBlock")
        return mixture(self, x, mlp.gate, mlp.experts, mlp.gate.norm_topk_prob)


class Mellum(Qwen3Moe):
    slides = "by type"


class Qwen2Moe(Qwen2):
    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):  # some layers have a usual MLP
            return super().mlp(x, mlp)
        self.own(mlp, "SparseMoeBlock")
        of_shared, weight = super().mlp(x, mlp.shared_expert), self.product(x, mlp.shared_expert_gate)
        shared = self._add(Weigh(of_shared, Value(of_shared.width), weight))
        return self.add(mixture(self, x, mlp.gate, mlp.experts, self.adds_to_one(mlp.gate)), shared)

    def adds_to_one(self, router: Any) -> bool:
        """Whether the weights of a row's experts do."""
        return bool(router.norm_topk_prob)


class Olmoe(Llama):
    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "SparseMoeBlock")
        return mixture(self, x, mlp.gate, mlp.experts, mlp.gate.norm_topk_prob)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = clipped(self, attention.config.clip_qkv, *qk_norm(self, q, k, attention))
        return super().rotated(q, k, attention, name)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        (v,) = clipped(self, attention.config.clip_qkv, v)
        return super().attended(q, k, v, attention)


class GraniteMoe(Granite):
    def feed_forward(self, x: Value, layer: Any) -> Value:
        moe = self.own(layer.block_sparse_moe, "MoE")
        return mixture(self, x, moe.router, moe.experts, adds_to_one=True)


class GraniteMoeShared(GraniteMoe):
    def feed_forward(self, x: Value, layer: Any) -> Value:
        mixed = super().feed_forward(x, layer)
        return mixed if layer.shared_mlp is None else self.add(mixed, self.shared(x, layer.shared_mlp))

    def shared(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, *split(self, mlp.input_linear, mlp.input_linear.out_features // 2))
        return self.product(self.gate(gate, mlp.activation, up), mlp.output_linear)


class FlexOlmo(Olmo2):
    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "SparseMoeBlock")
        return mixture(self, x, mlp.gate, mlp.experts, mlp.gate.norm_topk_prob)


class AriaText(Llama):
    """Weights of experts are transposed."""

    names = MappingProxyType({"Experts": "AriaExperts", "MLP": "AriaSharedExpertsMLP"})

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MoELayer")
        mixed = mixture(self, x, mlp.router, mlp.experts, adds_to_one=True)
        return self.add(mixed, super().mlp(x, mlp.shared_experts))
