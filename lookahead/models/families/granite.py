"""Granite and HyperCLOVA X: settings scale the embedding, what layers add, and the logits."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Granite(Llama):
    def embedding(self, inner: Any) -> Value:
        return self.embed(inner.embed_tokens, float(inner.embedding_multiplier))

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        factor = float(layer.residual_multiplier)
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name), factor)
        return self.add(x, self.feed_forward(self.norm(x, layer.post_attention_layernorm), layer), factor)

    def feed_forward(self, x: Value, layer: Any) -> Value:
        return self.mlp(x, layer.mlp)

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, float(self.model.config.logits_scaling))


class HyperCLOVAX(Granite):
    def layer(self, x: Value, layer: Any, name: str) -> Value:
        factor = float(layer.residual_multiplier)
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.normed_after(attended, layer.post_norm1), factor)
        more = self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp)
        return self.add(x, self.normed_after(more, layer.post_norm2), factor)

    def normed_after(self, x: Value, module: Any) -> Value:
        """A norm that a setting turns off."""
        return x if type(self._check(module)) is nn.Identity else self.norm(x, module)

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, factor=float(self.model.config.logits_scaling))
