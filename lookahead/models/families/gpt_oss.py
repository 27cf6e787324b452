"""gpt-oss (arXiv 2508.10925) and Granite-MoE-SWA: attention has sinks. In gpt-oss, experts have biases and bounds."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.mixtral import GraniteMoeShared
from lookahead.models.families.page import AttendsBy, UnknownModelError


class GptOss(Llama):
    attends_by: AttendsBy = "eager"
    slides = "by type"
    norms_round_once = True

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, sinks=attention.sinks)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [table.repeat(1, 2) for table in super().rotary_tables(like, positions, name)]

    def mlp(self, x: Value, mlp: Any) -> Value:
        experts = self.own(mlp, "MLP").experts
        if experts.limit <= 0:
            raise UnknownModelError("the bound of its gates is not above 0")
        limit, alpha = float(experts.limit), float(experts.alpha)
        return self.experts(x, mlp.router, experts, adds_to_one=True, limit=limit, alpha=alpha)


class GraniteMoeSWA(GraniteMoeShared):
    """Some layers know no positions."""

    attends_by: AttendsBy = "eager"
    slides = "by type"
    may_lack_rotary = True

    @property
    def rotary_module(self) -> Any:
        modules = self.inner.rotary_embs
        if len(modules) > 1:
            raise UnknownModelError("its layers turn by several sets of frequencies")
        return modules[0] if modules else None

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, sinks=attention.sinks)

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        has_positions = self.inner.config.layer_rope_theta[attention.layer_idx]
        return super().turned(q, k, attention, name) if has_positions else (q, k)
