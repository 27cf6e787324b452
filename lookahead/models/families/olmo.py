"""OLMo has norms without weights. In OLMo 2 and 3 they come after attention and MLP, and norm queries and keys."""

from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.clipped import clipped
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import UnknownModelError
from lookahead.models.families.parts import qk_norm


class Olmo(Llama):
    rotary_rounds_once = True

    def norm(self, x: Value, module: Any) -> Value:
        if self.own(module, "LayerNorm").normalized_shape != (x.width,):
            raise UnknownModelError("its norms have another width than their input")
        return self._add(op.Norm(x, Value(x.width), None, 1e-5, is_centered=True, size=x.width))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        q, k = clipped(self, attention.config.clip_qkv, q, k)
        return super().rotated(q, k, attention, name)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        (v,) = clipped(self, attention.config.clip_qkv, v)
        return super().attended(q, k, v, attention)


class Olmo2(Llama):
    norms_round_once = True
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(x, layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        return self.add(x, self.norm(self.mlp(x, layer.mlp), layer.post_feedforward_layernorm))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*qk_norm(self, q, k, attention), attention, name)


class Olmo3(Olmo2):
    slides = "by type"
