"""Families whose attention has sinks: gpt-oss (arXiv 2508.10925), Granite-SWA, Granite-MoE-SWA, Flint, MiMo-V2-Flash.

In gpt-oss, experts have biases and bounds.
"""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.corrected import WithSharedExperts
from lookahead.models.families.experts import mixture
from lookahead.models.families.granite import Granite
from lookahead.models.families.llama import Llama
from lookahead.models.families.mixtral import GraniteMoeShared, Qwen3Moe
from lookahead.models.families.page import AttendsBy, Slides, UnknownModelError
from lookahead.models.families.parts import qk_norm, scaled


class WithSinks(Llama):
    attends_by: AttendsBy = "eager"
    slides: Slides = "by type"

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, sinks=attention.sinks)


class GptOss(WithSinks):
    norms_round_once = True

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [table.repeat(1, 2) for table in super().rotary_tables(like, positions, name)]

    def mlp(self, x: Value, mlp: Any) -> Value:
        experts = self.own(mlp, "MLP").experts
        if experts.limit <= 0:
            raise UnknownModelError("the bound of its gates is not above 0")
        limit, alpha = float(experts.limit), float(experts.alpha)
        return mixture(self, x, mlp.router, experts, adds_to_one=True, limit=limit, alpha=alpha)


class GraniteSWA(WithSinks, Granite):
    """Some layers have no positions."""

    may_lack_rotary = True

    @property
    def rotary_module(self) -> Any:
        modules = self.inner.rotary_embs
        if len(modules) > 1:
            raise UnknownModelError("its layers rotate by several sets of frequencies")
        return modules[0] if modules else None

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        has_positions = self.inner.config.layer_rope_theta[attention.layer_idx]
        return super().rotated(q, k, attention, name) if has_positions else (q, k)


class GraniteMoeSWA(GraniteSWA, GraniteMoeShared):
    pass


class Flint(WithSinks, Qwen3Moe):
    """Only layers with a window have positions."""

    norms_round_once = True

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        has_positions = attention.sliding_window is not None
        return super().rotated(q, k, attention, name) if has_positions else qk_norm(self, q, k, attention)

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):
            return super().mlp(x, mlp)
        gate = self.own(mlp, "SparseMoeBlock").gate
        mixed = mixture(
            self, x, gate, mlp.experts, gate.norm_topk_prob, rounds=False, in_float32=True, is_sigmoid=True, epsilon=0.0
        )
        return self.add(mixed, super().mlp(x, mlp.shared_expert))


class MiMoV2Flash(WithSinks, WithSharedExperts):
    """No experts are shared. Layers with a window have twice as many heads of keys, and sinks."""

    rotates_part = True

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        v = v if attention.v_scale == 1 else scaled(self, v, float(attention.v_scale))
        return super().attended(q, k, v, attention)

    def mlp(self, x: Value, mlp: Any) -> Value:
        return self.mixed(x, self.own(mlp, "MoE")) if hasattr(mlp, "experts") else Llama.mlp(self, x, mlp)
