"""Hunyuan: queries and keys are normed when they have rotated. The mixture also has a shared expert."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama


class HunYuanDenseV1(Llama):
    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = super().rotated(q, k, attention, name)
        q = self.norm_heads(q, attention.query_layernorm, attention.head_dim)
        return q, self.norm_heads(k, attention.key_layernorm, attention.head_dim)


class HunYuanMoEV1(HunYuanDenseV1):
    def mlp(self, x: Value, mlp: Any) -> Value:
        gate = self.own(mlp, "Moe").gate
        routing = self.linear(gate.wg)
        in_float32 = routing.weight.dtype == torch.float32
        mixed = mixture(self, x, gate, mlp.experts, True, not in_float32, "Gate", in_float32, routing=routing)
        return self.add(mixed, super().mlp(x, mlp.shared_mlp))
