"""Laguna: softplus gates the attention output, by head or by number. Layers differ in their heads."""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.corrected import Dots1
from lookahead.models.families.experts import mixture
from lookahead.models.families.parts import scaled, select, times


class Laguna(Dots1):
    rotates_part = True
    mixture_class = "SparseMoeBlock"

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        q, k, v, gate = self.products(x, *self.projections(attention), self.linear(attention.g_proj))
        found = self.attended(*self.rotated(q, k, attention, name), v, attention)
        if attention.gate_per_head:
            gate = self._add(op.Gate(gate, Value(gate.width), "softplus"))
            gated = times(self, found, select(self, gate, 1, 1, 0, repeats=attention.head_dim))
        else:
            gated = self._add(op.Gate(gate, Value(gate.width), "softplus", found))
        return self.product(gated, attention.o_proj)

    def mixed(self, x: Value, mlp: Any) -> Value:
        gate = mlp.gate
        mixed = mixture(
            self, x, gate, mlp.experts, adds_to_one=True, correction=gate.e_score_correction_bias, is_sigmoid=True,
            epsilon=0.0, cap=max(float(gate.router_logit_softcapping), 0.0),
        )  # fmt: skip
        return scaled(self, mixed, float(mlp.routed_scaling_factor))
