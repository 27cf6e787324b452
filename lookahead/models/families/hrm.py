"""HRM-Text: two stacks of layers run in turn, several times, and each time fill other layers of the cache."""

from types import SimpleNamespace
from typing import Any

from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class HrmText(Llama):
    _place = 0
    """Of the stack's first layer in the cache."""
    _shown: Value
    """The output of the previous layer, without the norm after its stack."""

    def write(self) -> None:
        inner = self.own(self.inner, "Model")
        self.rotary_names()
        config, factor = inner.config, float(inner.embedding_scale)
        high = low = self.embed(inner.embed_tokens, factor)
        first = inner.z_L_init.detach().to(self.model.dtype).repeat(config.max_position_embeddings, 1)
        both = self._shown = self.embed(inner.embed_tokens, factor, positions=SimpleNamespace(weights=first))
        self._place = 0
        for turn in range(config.H_cycles):
            read = self.add(high, low) if turn else both
            for _ in range(config.L_cycles):
                low = self.stack(read, inner.L_module)
                read = self.add(high, low)
            high = self.stack(read, inner.H_module)
        self.head(self.output(high))

    def stack(self, x: Value, stack: Any) -> Value:
        self.own(stack, "Stack")
        for layer in stack.layers:
            self.output(self._shown)
            x = self._shown = self.layer(x, self.own(layer, self.layer_class), "")
        self._place += len(stack.layers)
        return self.norm(x, stack.final_norm)

    def attention(self, x: Value, attention: Any, name: str) -> Value:
        self.own(attention, "Attention")
        q, k, v, gate = self.products(x, *self.projections(attention), self.linear(attention.gate_proj))
        q, k = self.rotated(q, k, attention, name)
        found = self.attend(q, k, v, attention, layer=self._place + attention.layer_idx)
        return self.product(self._add(op.Gate(gate, Value(gate.width), "sigmoid", found)), attention.o_proj)
