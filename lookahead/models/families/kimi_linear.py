"""Kimi Linear (arXiv 2510.26692): a delta rule whose decays are of each number of a key, and latent attention.

Ling 3, which transformers calls Bailing, limits the decays, and gates the attention output of each head.
"""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.cpu.states import DeltaByKey
from lookahead.models.families.convolutions import convolved
from lookahead.models.families.deepseek import DeepseekV3
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import select, times


class KimiLinear(DeepseekV3):
    may_lack_rotary = True  # its attention has no positions

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        if not hasattr(attention, "forget_gate"):
            return super().attention(x, attention, name)
        return self.linear_attention(x, attention)

    def linear_attention(self, x: Value, attention: Any) -> Value:
        self.own(attention, "DeltaAttention")
        forget = self.own(attention.forget_gate, "ForgetGate")
        (to_gate, *then_gate), (to_decays, *then_decays) = self.gating(attention, forget)
        first = attention.q_proj, attention.k_proj, attention.v_proj, to_gate, to_decays, attention.b_proj
        *parts, gate, decays, rates = self.products(x, *map(self.linear, first))
        for module in then_gate:
            gate = self.product(gate, module)
        for module in then_decays:
            decays = self.product(decays, module)
        q, k, v = convolved(self, parts, attention)
        log_speeds, biases = (tensor.detach().flatten() for tensor in (forget.A_log, forget.dt_bias))
        settings: dict[str, Any] = {"layer": attention.layer_idx, "heads": attention.num_heads}
        settings |= {"size": attention.head_dim, "limit": self.limit(forget)}
        delta = self._add(DeltaByKey(q, Value(v.width), k, v, decays, rates, log_speeds, biases, **settings))
        # In bf16, the model does not round between its norm and its gate.
        norm, size = self.own(attention.o_norm, "RMSNormGated"), attention.head_dim
        weight, epsilon = norm.weight.detach(), norm.variance_epsilon
        normed = self._add(op.Norm(delta, Value(v.width), weight, epsilon, rounds_once=True, of_heads=True, size=size))
        gated = self._add(op.Gate(gate, Value(gate.width), "sigmoid", normed, rounds_once=True))
        return self.product(gated, attention.o_proj)

    def gating(self, attention: Any, forget: Any) -> tuple[list[Any], list[Any]]:
        """Return the consecutive layers that compute the gate of a row, and those that compute its decays."""
        return [attention.g_a_proj, attention.g_b_proj], [forget.f_a_proj, forget.f_b_proj]

    def limit(self, forget: Any) -> float:
        """Return the setting of `DeltaByKey`."""
        return 0.0

    def windows(self) -> list[int | None]:
        return [0 if kind == "linear_attention" else None for kind in self.inner.config.layer_types]


class BailingHybrid(KimiLinear):
    may_lack_rotary = False
    rotary_separates = True  # type: ignore[assignment]  # it has no setting for it

    def gating(self, attention: Any, forget: Any) -> tuple[list[Any], list[Any]]:
        return [attention.g_proj], [forget.f_proj]

    def limit(self, forget: Any) -> float:
        if not forget.safe_gate:
            raise UnknownModelError("its decays have no limit (kda_safe_gate)")
        return float(forget.lower_bound)

    def found(self, x: Value, values: Value, attention: Any) -> Value:
        (gate,) = self.products(x, self.linear(attention.g_proj))
        gate = self._add(op.Gate(gate, Value(gate.width), "sigmoid"))
        return times(self, values, select(self, gate, 1, 1, 0, repeats=attention.v_head_dim))
