"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060), and hybrids with attention: Bamba, Granite 4, Falcon-H1, Nemotron-H."""

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.cpu.states import GatedNorm, Scan
from lookahead.models.families.convolutions import convolved
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.mixtral import GraniteMoe, GraniteMoeShared
from lookahead.models.families.nemotron import Arcee
from lookahead.models.families.page import AttendsBy, UnknownModelError
from lookahead.models.families.parts import scaled, split


class Bamba(Llama):
    rotates_part = True
    last_norm = "final_layernorm"
    mixer_class = "Mixer"

    def mixer(self, layer: Any) -> Any:
        return getattr(layer, "mamba", None) or layer.self_attn

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.mixed(self.norm(x, layer.input_layernorm), layer, name))
        return self.add(x, self.mlp(self.norm(x, layer.pre_ff_layernorm), layer.feed_forward))

    def mixed(self, x: Value, layer: Any, name: str) -> Value:
        mix = self.attention if self.mixer(layer) is getattr(layer, "self_attn", None) else self.mamba
        return mix(x, self.mixer(layer), name)

    def mamba(self, x: Value, mixer: Any, name: str) -> Value:
        """The recurrence after short convolutions. Its result is gated and normed."""
        self.own(mixer, self.mixer_class)
        width, size, heads = mixer.intermediate_size, mixer.ssm_state_size, mixer.num_heads
        of_keys = mixer.n_groups * size
        gate, *parts, times = self.inputs(x, mixer, (width, width, of_keys, of_keys))
        v, k, q = convolved(self, parts, mixer)
        of_heads = mixer.A_log.detach(), mixer.dt_bias.detach(), mixer.D.detach()
        scanned = self._add(Scan(q, Value(width), k, v, times, *of_heads, mixer.layer_idx, heads, size))
        return self.product(self.gated(scanned, gate, mixer), mixer.out_proj)

    def inputs(self, x: Value, mixer: Any, widths: tuple[int, ...]) -> list[Value]:
        """The gate, values, keys, queries and times."""
        return self.products(x, *split(self, mixer.in_proj, *widths))

    def gated(self, x: Value, gate: Value, mixer: Any) -> Value:
        norm = self.own(mixer.norm, "RMSNormGated")
        size = getattr(norm, "group_size", x.width)  # older transformers norm all groups together
        return self.norm_gated(x, gate, norm, size)

    def norm_gated(self, x: Value, gate: Value, norm: Any, size: int, **settings: Any) -> Value:
        weight, epsilon = norm.weight.detach(), norm.variance_epsilon
        return self._add(GatedNorm(x, Value(x.width), weight, epsilon, of_heads=True, size=size, gate=gate, **settings))

    @property
    def reads_prompts(self) -> bool:
        """The time steps of a prompt may be limited. Those of single tokens are not."""
        limits = (getattr(module, "time_step_limit", None) for module in self.inner.modules())
        return all(limit is None or tuple(limit) == (0.0, float("inf")) for limit in limits)  # files give lists

    def windows(self) -> list[int | None]:
        return [None if kind in ("full_attention", "hybrid") else 0 for kind in self.inner.config.layer_types]


class GraniteMoeHybrid(Bamba, GraniteMoeShared):
    """Its experts, and positions in its attention, are settings."""

    rotates_part = False
    may_lack_rotary = True
    last_norm = "norm"
    mixer_class = "MambaLayer"

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        factor = float(layer.residual_multiplier)
        x = self.add(x, self.mixed(self.norm(x, layer.input_layernorm), layer, name), factor)
        return self.add(x, self.feed_forward(self.norm(x, layer.post_attention_layernorm), layer), factor)

    def feed_forward(self, x: Value, layer: Any) -> Value:
        if not layer.has_experts:
            return self.shared(x, layer.shared_mlp)
        return self.add(GraniteMoe.feed_forward(self, x, layer), self.shared(x, layer.shared_mlp))


class FalconH1(Bamba):
    """Each layer has both, side by side. Factors scale nearly all that they take and give (muP)."""

    rotates_part = False

    def mixer(self, layer: Any) -> Any:
        return layer.self_attn

    def embedding(self, inner: Any) -> Value:
        return self.embed(inner.embed_tokens, float(inner.embedding_multiplier))

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, factor=float(self.model.model.lm_head_multiplier))

    def mixed(self, x: Value, layer: Any, name: str) -> Value:
        if layer.mamba.layer_idx != layer.self_attn.layer_idx:
            raise UnknownModelError("its state and its keys are in different layers of the cache")
        attended = self.attention(self.scaled(x, layer.attention_in_multiplier), layer.self_attn, name)
        recurrent = self.scaled(self.mamba(x, layer.mamba, name), layer.ssm_out_multiplier)
        return self.add(recurrent, attended, float(layer.attn_out_multiplier))

    def scaled(self, x: Value, factor: float) -> Value:
        return x if factor == 1 else scaled(self, x, float(factor))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(q, self.scaled(k, attention.key_multiplier), attention, name)

    def inputs(self, x: Value, mixer: Any, widths: tuple[int, ...]) -> list[Value]:
        parts = super().inputs(self.scaled(x, mixer.ssm_in_multiplier), mixer, widths)
        factors = mixer.mup_vector.flatten().split([part.width for part in parts])
        if mixer.mup_vector.dtype != mixer.D.dtype or any((of_part != of_part[0]).any() for of_part in factors):
            raise UnknownModelError("its vector of muP has other numbers than the model, or several for a part")
        return [self.scaled(part, float(of_part[0])) for part, of_part in zip(parts, factors, strict=True)]

    def gated(self, x: Value, gate: Value, mixer: Any) -> Value:
        if not mixer.mamba_rms_norm:
            return self._add(op.Gate(gate, Value(gate.width), "silu", x))
        norm = self.own(mixer.norm, "RMSNormGated")
        size = x.width // norm.n_groups
        return self.norm_gated(x, gate, norm, size, rounds_once=True, gates_after=norm.norm_before_gate)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.gate_proj), self.linear(mlp.up_proj))
        gated = self.gate(self.scaled(gate, mlp.gate_multiplier), mlp.act_fn, up)
        return self.scaled(self.product(gated, mlp.down_proj), mlp.down_multiplier)


class NemotronH(Bamba, Arcee):
    """Each layer has one part: the recurrence, attention without positions, an MLP, or a mixture of MLPs."""

    layer_class = "Block"
    mixer_class = "Mamba2Mixer"
    embedding_at = "embeddings"
    last_norm = "norm_f"
    norms_round_once = True
    rotates_part = False
    may_lack_rotary = True

    def mixer(self, layer: Any) -> Any:
        return layer.mixer if layer.block_type in ("linear_attention", "full_attention") else layer

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        normed, mixer = self.norm(x, layer.norm), layer.mixer
        match layer.block_type:
            case "linear_attention":
                return self.add(x, self.mamba(normed, mixer, name))
            case "full_attention":
                return self.add(x, self.attention(normed, mixer, name))
            case "mlp":
                return self.add(x, self.mlp(normed, mixer))
        return self.add(x, self.add(self.mixture(normed, mixer), self.mlp(normed, mixer.shared_experts)))

    def mixture(self, x: Value, moe: Any) -> Value:
        gate, before, after = self.own(moe, "MoE").gate, moe.fc1_latent_proj, moe.fc2_latent_proj
        has_latent = not type(before) is type(after) is nn.Identity
        out = mixture(
            self, self.product(x, before) if has_latent else x, gate, moe.experts, gate.norm_topk_prob, rounds=False,
            suffix="TopkRouter", in_float32=True, correction=gate.e_score_correction_bias, is_sigmoid=True,
            factor=float(gate.routed_scaling_factor), groups=gate.num_group, top_groups=gate.topk_group,
            into="up_proj", routed=x if has_latent else None,
        )  # fmt: skip
        return self.product(out, after) if has_latent else out


class Mamba2(NemotronH):
    """Every layer is the recurrence. Sums of layers may be in float32, whatever else is in bf16."""

    attends_by: AttendsBy = "nothing"
    names = MappingProxyType({"RMSNormGated": "MambaRMSNormGated"})
    mixer_class = "Mixer"
    norms_round_once = False

    @property
    def inner(self) -> Any:
        return self.model.backbone

    def write(self) -> None:
        """Unlike others, the model does not name the embedding among its hidden states."""
        inner = self.own(self.inner, self.model_class)
        x = self.embedding(inner)
        for layer in self.layers(inner):
            x = self.output(self.layer(x, layer, ""))
        self.head(self.output(self.norm(x, inner.norm_f)))

    def mixer(self, layer: Any) -> Any:
        return layer.mixer

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        if layer.residual_in_fp32 and layer.norm.weight.dtype != torch.float32:
            raise UnknownModelError("its residual stream is in float32")
        return self.add(x, self.mamba(self.norm(x, layer.norm), layer.mixer, name))
