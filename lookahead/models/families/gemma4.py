"""Gemma 4: layers share keys and values, and each may have an embedding of its own of every token.

The last layer of each kind of attention that has keys and values of its own lends them to all later ones of the kind.
"""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.experts import mixture
from lookahead.models.families.gemma import Gemma3
from lookahead.models.families.parts import embed_scaled, scaled, select


class Gemma4Unified(Gemma3):
    norm_offset = 0.0

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, suffix if suffix == "RMSNorm" else f"Text{suffix.removeprefix('Text')}")

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        x = self.add(x, self.norm(self.feed_forward(x, layer), layer.post_feedforward_layernorm))
        return scaled(self, self.with_own(x, layer), float(layer.layer_scalar))

    def feed_forward(self, x: Value, layer: Any) -> Value:
        return self.mlp(self.norm(x, layer.pre_feedforward_layernorm), layer.mlp)

    def with_own(self, x: Value, layer: Any) -> Value:
        """Add the output for the layer's own embedding of the token."""
        return x

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        size, modules = self.own(attention, "Attention").head_dim, [attention.q_proj]
        if not attention.is_kv_shared_layer:
            modules += [one for one in (attention.k_proj, attention.v_proj) if one is not None]
        q, *made = self.products(x, *map(self.linear, modules))
        q = self.rotary(self.norm_heads(q, attention.q_norm, size), size, name)
        if not made:
            return self.product(self.attend(q, None, None, attention, layer=self._lender(name)), attention.o_proj)
        k = self.rotary(self.norm_heads(made[0], attention.k_norm, size), size, name)
        v = self.norm_heads(made[-1], attention.v_norm, size)  # of what the keys are, if there is no other layer
        return self.product(self.attend(q, k, v, attention), attention.o_proj)

    def _lender(self, name: str) -> int:
        """The layer whose keys and values others of this kind attend to, too."""
        all_layers = [layer.self_attn for layer in self.inner.layers]
        return next(one.layer_idx for one in all_layers if one.store_full_length_kv and one.layer_type == name)

    def windows(self) -> list[int | None]:
        config = self.inner.config
        own = config.num_hidden_layers - config.num_kv_shared_layers
        return super().windows()[:own] + [0] * config.num_kv_shared_layers


class Gemma4(Gemma4Unified):
    _of_layers: Value | None = None
    """What `projected` has made."""

    def embedding(self, inner: Any) -> Value:
        x, self._of_layers = super().embedding(inner), None
        if size := inner.hidden_size_per_layer_input:
            scales = inner.per_layer_model_projection_scale, inner.per_layer_input_scale
            self._of_layers = self.projected(x, inner, size, *map(float, scales))
        return x

    def projected(self, x: Value, inner: Any, size: int, scale: float, scale_of_sum: float) -> Value:
        """The inputs of all layers from the tokens, concatenated."""
        of_tokens = embed_scaled(self, inner.embed_tokens_per_layer, "TextScaledWordEmbedding")
        projected = scaled(self, self.product(x, inner.per_layer_model_projection), scale)
        projected = self.norm_heads(projected, inner.per_layer_projection_norm, size)
        return scaled(self, self.add(projected, of_tokens), scale_of_sum)

    def feed_forward(self, x: Value, layer: Any) -> Value:
        more = super().feed_forward(x, layer)
        if layer.enable_moe_block:
            more = self.add(self.norm(more, layer.post_feedforward_layernorm_1), self.mixed(x, layer))
        return more

    def with_own(self, x: Value, layer: Any) -> Value:
        return x if self._of_layers is None else self.add(x, self.of_own(x, layer, self._of_layers))

    def of_own(self, x: Value, layer: Any, of_layers: Value) -> Value:
        """The output of a layer for x and its own embedding."""
        size = layer.hidden_size_per_layer_input
        gate = self.product(x, layer.per_layer_input_gate)
        own = select(self, of_layers, size, of_layers.width // size, layer.layer_idx)
        more = self.product(self.gate(gate, layer.act_fn, own), layer.per_layer_projection)
        return self.norm(more, layer.post_per_layer_input_norm)

    def mixed(self, x: Value, layer: Any) -> Value:
        """The experts in addition to the MLP; their router reads values that no norm has weighted."""
        router = self.own(layer.router, "Router")
        norm = self.own(router.norm, "RMSNorm")
        normed = self._add(op.Norm(x, Value(x.width), router.scale, norm.eps, size=x.width))
        mixed = mixture(
            self, self.norm(x, layer.pre_feedforward_layernorm_2), router, layer.experts, adds_to_one=True,
            rounds=False, suffix="Router", routing=self.linear(router.proj), top_k=router.config.top_k_experts,
            scales=router.per_expert_scale.float(), routed=scaled(self, normed, float(router.scalar_root_size)),
        )  # fmt: skip
        return self.norm(mixed, layer.post_feedforward_layernorm_2)
