"""gpt-oss (arXiv 2508.10925): attention has sinks, and experts have biases, and bounds for their gates."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
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
