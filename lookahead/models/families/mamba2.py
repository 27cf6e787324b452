"""Hybrids of attention and Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): Bamba and Granite 4."""

from typing import Any

from transformers.activations import ACT2FN

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.mixtral import GraniteMoe, GraniteMoeShared
from lookahead.models.families.page import UnknownModelError


class Bamba(Llama):
    turns_part = True
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
        """The recurrence behind short convolutions. Its result is gated and normed."""
        if self.own(mixer, self.mixer_class).time_step_limit not in (None, (0.0, float("inf"))):
            raise UnknownModelError("its time steps are limited, but not those of single tokens")
        width, size, heads = mixer.intermediate_size, mixer.ssm_state_size, mixer.num_heads
        of_keys = mixer.n_groups * size
        gate, *parts, times = self.products(x, *self.parts(mixer.in_proj, width, width, of_keys, of_keys))
        convolved, first, activation = [], 0, ACT2FN[mixer.activation]
        for part in parts:  # values, keys and queries
            convolved.append(self.gate(self.convolve(part, mixer.conv1d, mixer.layer_idx, first), activation))
            first += part.width
        v, k, q = convolved
        of_heads = mixer.A_log.detach(), mixer.dt_bias.detach(), mixer.D.detach()
        scanned = self._add(op.Scan(q, Value(width), k, v, times, *of_heads, mixer.layer_idx, heads, size))
        norm = self.own(mixer.norm, "RMSNormGated")
        size = getattr(norm, "group_size", width)  # older transformers norm all groups together
        settings: dict[str, Any] = {"of_heads": True, "size": size, "gate": gate}
        normed = op.Norm(scanned, Value(width), norm.weight.detach(), norm.variance_epsilon, **settings)
        return self.product(self._add(normed), mixer.out_proj)

    def windows(self) -> list[int | None]:
        return [0 if kind == "linear_attention" else None for kind in self.inner.config.layer_types]


class GraniteMoeHybrid(Bamba, GraniteMoeShared):
    """Its experts, and positions in its attention, are settings."""

    turns_part = False
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
