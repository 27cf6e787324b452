"""NanoChat: norms have no weights, and also come after the embedding and after the rotation of queries and keys."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.parts import qk_norm


class NanoChat(Llama):
    norms_round_once = True

    def embedding(self, inner: Any) -> Value:
        return self.norm(super().embedding(inner), inner.norm)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return qk_norm(self, *super().rotated(q, k, attention, name), attention)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        cos, sin = super().rotary_tables(like, positions, name)
        return [cos, -sin]  # they rotate the other way

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.fc1), mlp.activation_fn), mlp.fc2)

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, cap=self.model.config.final_logit_softcapping)
