"""Families of which adjacent elements of a head rotate together: GLM, GLM-4, ERNIE 4.5 and Helium."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.phi3 import WithJoinedHalves


class Glm(WithJoinedHalves):
    rotary_is_interleaved = True
    rotates_part = True


class Glm4(Glm):
    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_self_attn_layernorm))
        more = self.mlp(self.norm(x, layer.post_attention_layernorm), layer.mlp)
        return self.add(x, self.norm(more, layer.post_mlp_layernorm))


class Ernie4_5(Llama):  # the name that transformers gives it
    rotary_is_interleaved = True
    rotary_rounds_once = True


class Helium(Llama):
    rotary_is_interleaved = True
    norms_round_once = True
