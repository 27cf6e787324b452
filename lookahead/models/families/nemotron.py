"""Nemotron, Arcee and Jais 2: an MLP without a gate. Nemotron's layer norms add 1 to their weights."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Arcee(Llama):
    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.up_proj), mlp.act_fn), mlp.down_proj)


class Nemotron(Arcee):
    norm_class = "LayerNorm1P"
    norms_are_centered = True
    norm_offset = 1.0
    rotates_part = True


class Jais2(Arcee):
    norm_class = nn.LayerNorm
    norms_are_centered = True
