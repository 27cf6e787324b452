"""Cohere: attention and MLP take the same normed states, neighbouring numbers turn together, and logits are scaled."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError


class Cohere(Llama):
    norm_class = "LayerNorm"
    norms_are_centered = True
    rotary_is_interleaved = True
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return self.side_by_side(x, layer, name)

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.use_qk_norm:
            raise UnknownModelError("each of its heads has a norm of its own")
        return super().turned(q, k, attention, name)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [
            table[:, ::2].repeat(1, 2) for table in super().rotary_tables(like, positions, name)
        ]  # each stood twice

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, factor=float(self.model.logit_scale))


class Cohere2(Cohere):
    slides = "by type"

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.sliding_window is None:
            return q, k
        return Llama.turned(self, q, k, attention, name)
