"""Apertus (arXiv 2509.14233): queries and keys are normed, and the MLP has an activation with weights of its own.

So does the text side of Apertus 1.5.
"""

from typing import Any

from torch.nn import functional
from transformers.activations import XIELUActivation

from lookahead.cpu.elementwise import Xielu
from lookahead.cpu.operations import Value
from lookahead.models.families.nemotron import Arcee
from lookahead.models.families.parts import qk_norm


class Apertus(Arcee):
    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.attention_layernorm), layer.self_attn, name))
        return self.add(x, self.mlp(self.norm(x, layer.feedforward_layernorm), layer.mlp))

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*qk_norm(self, q, k, attention), attention, name)

    def gate(self, x: Value, activation: Any, by: Value | None = None) -> Value:
        if type(activation) is not XIELUActivation:
            return super().gate(x, activation, by)
        self._check(activation)
        beta, positive, negative = activation.beta, activation.alpha_p.detach(), activation.alpha_n.detach()
        slopes = functional.softplus(positive), beta + functional.softplus(negative)
        return self._add(Xielu(x, Value(x.width), *map(float, (*slopes, beta, activation.eps))))


class Apertus1p5Text(Apertus):
    pass
