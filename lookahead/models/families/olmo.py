"""OLMo 2 and 3: norms stand behind attention and MLP, and queries and keys are normed, all heads together."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Olmo2(Llama):
    norms_round_once = True
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(x, layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        return self.add(x, self.norm(self.mlp(x, layer.mlp), layer.post_feedforward_layernorm))

    def turned(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().turned(*self.normed(q, k, attention), attention, name)


class Olmo3(Olmo2):
    slides = "by type"
