"""Kimi Linear (arXiv 2510.26692): a delta rule whose decays are of each number of a key, and latent attention."""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.convolutions import convolved
from lookahead.models.families.deepseek import DeepseekV3


class KimiLinear(DeepseekV3):
    may_lack_rotary = True  # its attention has no positions

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        if not hasattr(attention, "forget_gate"):
            return super().attention(x, attention, name)
        return self.linear_attention(x, attention)

    def linear_attention(self, x: Value, attention: Any) -> Value:
        self.own(attention, "DeltaAttention")
        forget = self.own(attention.forget_gate, "ForgetGate")
        first = (attention.q_proj, attention.k_proj, attention.v_proj, attention.g_a_proj, forget.f_a_proj)
        *parts, gate, decays, rates = self.products(x, *map(self.linear, (*first, attention.b_proj)))
        gate, decays = self.product(gate, attention.g_b_proj), self.product(decays, forget.f_b_proj)
        q, k, v = convolved(self, parts, attention)
        log_speeds, biases = (tensor.detach().float().flatten() for tensor in (forget.A_log, forget.dt_bias))
        settings = attention.layer_idx, attention.num_heads, attention.head_dim
        delta = self._add(op.DeltaByKey(q, Value(v.width), k, v, decays, rates, log_speeds, biases, *settings))
        # In bf16, the model does not round between its norm and its gate.
        norm, size = self.own(attention.o_norm, "RMSNormGated"), attention.head_dim
        weight, epsilon = norm.weight.detach(), norm.variance_epsilon
        normed = self._add(op.Norm(delta, Value(v.width), weight, epsilon, rounds_once=True, of_heads=True, size=size))
        gated = self._add(op.Gate(gate, Value(gate.width), "sigmoid", normed, rounds_once=True))
        return self.product(gated, attention.o_proj)

    def windows(self) -> list[int | None]:
        return [0 if kind == "linear_attention" else None for kind in self.inner.config.layer_types]
