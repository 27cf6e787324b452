"""Mixtures whose experts are chosen with a correction (DeepSeek-V3, arXiv 2412.19437), most of them by sigmoids."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import Slides, UnknownModelError
from lookahead.models.families.parts import qk_norm


class WithSharedExperts(Llama):
    """Some layers have a usual MLP."""

    mixture_class = "MoE"

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):
            return super().mlp(x, mlp)
        mixed = self.mixed(x, self.own(mlp, self.mixture_class))
        return mixed if mlp.shared_experts is None else self.add(mixed, super().mlp(x, mlp.shared_experts))

    def mixed(self, x: Value, mlp: Any) -> Value:
        gate = mlp.gate
        return mixture(
            self, x, gate, mlp.experts, gate.norm_topk_prob, rounds=False, suffix="TopkRouter", in_float32=True,
            correction=gate.e_score_correction_bias, is_sigmoid=True, factor=float(gate.routed_scaling_factor),
            groups=gate.num_group, top_groups=gate.topk_group,
        )  # fmt: skip


class Glm4Moe(WithSharedExperts):
    rotates_part = True

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = qk_norm(self, q, k, attention) if attention.use_qk_norm else (q, k)
        return super().rotated(q, k, attention, name)


class SolarOpen(WithSharedExperts):
    rotates_part = True


class Dots1(WithSharedExperts):
    slides: Slides = "by type"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*qk_norm(self, q, k, attention), attention, name)


class ExaoneMoe(Dots1):
    mixture_class = "SparseMoEBlock"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.sliding_window is not None and not attention.is_sliding:
            return qk_norm(self, q, k, attention)
        return super().rotated(q, k, attention, name)


class HYV3(Dots1):
    slides: Slides = "never"

    def mixed(self, x: Value, mlp: Any) -> Value:
        return mixture(
            self, x, mlp.gate, mlp.experts, True, rounds=False, in_float32=True, correction=mlp.e_score_correction_bias,
            is_sigmoid=True, factor=float(mlp.gate.router_scaling_factor),
        )  # fmt: skip


class MiniMaxM2(Dots1):
    slides: Slides = "never"
    rotates_part = True
    dropouts = ("router_jitter_noise",)

    def mlp(self, x: Value, mlp: Any) -> Value:
        correction = self.own(mlp, "SparseMoeBlock").e_score_correction_bias
        return mixture(self, x, mlp.gate, mlp.experts, True, rounds=False, correction=correction, is_sigmoid=True)


class Kolibri1(Dots1):
    """Norms come before and after, and experts are chosen by corrected scores, before they become weights."""

    mixture_class = "SparseMoeBlock"

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_self_attn_layernorm))
        more = self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp)
        return self.add(x, self.norm(more, layer.post_mlp_layernorm))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.sliding_window is not None and not attention.is_sliding:
            return qk_norm(self, q, k, attention)
        return super().rotated(q, k, attention, name)

    def mixed(self, x: Value, mlp: Any) -> Value:
        gate = mlp.gate
        return mixture(
            self, x, gate, mlp.experts, gate.norm_topk_prob, rounds=False, in_float32=True, is_sigmoid=True,
            epsilon=0.0, correction=gate.e_score_correction_bias, ranks_scores=True,
        )  # fmt: skip


class Ernie4_5_Moe(WithSharedExperts):  # the name that transformers gives it
    mixture_class = "SparseMoeBlock"
    rotary_is_interleaved = True
    rotary_rounds_once = True

    def mixed(self, x: Value, mlp: Any) -> Value:
        if mlp.gate.norm_min > 1e-9:
            raise UnknownModelError("it bounds the sum of its experts' weights")
        correction = self.own(mlp.gate.moe_statics, "Statics").e_score_correction_bias
        return mixture(self, x, mlp.gate, mlp.experts, True, in_float32=True, correction=correction)
