"""Gemma 3n: a row has several hidden states, its streams, of which one goes through a layer (AltUp).

From it, and from what the layer makes of it, all of them are predicted and corrected. As in Gemma 4, layers share keys
and values, and each has an embedding of its own of every token. Gates of some layers are cut but for the largest ones.
"""

import math
from types import MappingProxyType
from typing import Any

import torch
from torch.distributions import Normal

from lookahead.cpu import operations as op
from lookahead.cpu.elementwise import Scale
from lookahead.cpu.heads import Join
from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear
from lookahead.cpu.streams import Blend, Cut, Rescale
from lookahead.models.families.gemma4 import Gemma4
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import embed_scaled, scaled, select


class Gemma3n(Gemma4):
    names = MappingProxyType({"TextRotaryEmbedding": "Gemma3nRotaryEmbedding"})
    _dtype = torch.float32

    def write(self) -> None:
        inner = self.own(self.inner, self.model_class)
        config, rounded = inner.config, self._rounded
        if self.model.training and config.altup_coef_clip is not None:
            raise UnknownModelError("it clips its weights in training mode")
        x = embed_scaled(self, inner.embed_tokens, "TextScaledWordEmbedding")
        (embedded,) = self._operations
        self._dtype = embedded.dtype  # type: ignore[attr-defined]
        scales = rounded(inner.per_layer_projection_scale), rounded(inner.per_layer_input_scale)
        self._of_layers = self.projected(x, inner, inner.hidden_size_per_layer_input, *scales)
        streams = x
        for module in inner.altup_projections:
            more = self._rescaled(self.product(x, module), x)
            streams = self._add(Join(streams, Value(streams.width + more.width), more, heads=1))
        for layer, name in zip(self.layers(inner), self.rotary_names(), strict=True):
            streams = self.layer(self.output(streams), layer, name)
        self.output(streams)
        x = first = self._stream(streams, 0)
        for i, module in enumerate(inner.altup_unembed_projections, 1):
            x = self.add(x, self._rescaled(self.product(self._stream(streams, i), module), first))
        self.head(self.norm(scaled(self, x, 1 / config.altup_num_inputs), inner.norm))

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        altup, config = self.own(layer.altup, "AltUp"), layer.config
        size, active = config.hidden_size, config.altup_active_idx
        router = self._routed(self._stream(x, active), altup)
        weight = self._factors(altup.prediction_coefs)
        predicted = self._add(Blend(x, Value(x.width), x, size, router, weight))
        x = self._stream(predicted, active)
        made = self.within(x, layer, name)
        router = self._routed(made, altup)
        weight = self._factors(altup.correction_coefs)
        innovation = self.add(made, x, -1.0)
        streams = self._add(Blend(predicted, Value(predicted.width), innovation, size, router, weight, 1.0))
        x = self._stream(streams, active)
        if config.altup_correct_scale:
            x = self._add(Scale(x, Value(size), 1.0, altup.correct_output_scale))
        assert self._of_layers is not None
        more = self.of_own(x, layer, self._of_layers)
        return self._add(Blend(streams, Value(streams.width), more, size, offset=1.0, first=1))

    def within(self, x: Value, layer: Any, name: str) -> Value:
        """The output of a layer for its stream."""
        normed, laurel = self.norm(x, layer.input_layernorm), self.own(layer.laurel, "LaurelBlock")
        learned = self.product(self.product(normed, laurel.linear_left), laurel.linear_right)
        learned = self.add(normed, self.norm(learned, laurel.post_laurel_norm))
        attended = self.norm(self.attention(normed, layer.self_attn, name), layer.post_attention_layernorm)
        x = scaled(self, self.add(self.add(x, attended), learned), 1 / math.sqrt(2))
        more = self.mlp(self.norm(x, layer.pre_feedforward_layernorm), layer.mlp)
        return self.add(x, self.norm(more, layer.post_feedforward_layernorm))

    def mlp(self, x: Value, mlp: Any) -> Value:
        gate, up = self.products(x, *map(self.linear, (self.own(mlp, "MLP").gate_proj, mlp.up_proj)))
        if mlp.activation_sparsity > 0:
            factor = self._rounded(Normal(0, 1).icdf(torch.tensor(mlp.activation_sparsity, device="cpu")))
            gate = self._add(Cut(gate, Value(gate.width), factor))
        return self.product(self.gate(gate, mlp.act_fn, up), mlp.down_proj)

    def _routed(self, x: Value, altup: Any) -> Value:
        normed = scaled(self, self.norm(x, altup.router_norm), self._rounded(altup.router_input_scale))
        routed = self.product(normed, altup.modality_router)
        return self._add(op.Gate(routed, Value(routed.width), "tanh"))

    def _factors(self, module: Any) -> torch.Tensor:
        linear = self.linear(module)
        if linear != Linear(linear.weight):
            raise UnknownModelError("what makes factors of its streams has biases, or is quantized")
        return linear.weight

    def _stream(self, streams: Value, index: int) -> Value:
        size = self.inner.config.hidden_size
        return select(self, streams, size, streams.width // size, index)

    def _rescaled(self, x: Value, like: Value) -> Value:
        return self._add(Rescale(x, Value(x.width), like, limit=1e-5))

    def _rounded(self, factor: torch.Tensor) -> float:
        return float(factor.to(self._dtype))
