"""BitNet (Wang et al. 2023, arXiv 2310.11453): the attention output and the gated values of the MLP are normed."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class BitNet(Llama):
    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.norm(super().attended(q, k, v, attention), attention.attn_sub_norm)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, self.linear(mlp.gate_proj), self.linear(mlp.up_proj))
        return self.product(self.norm(self.gate(gate, mlp.act_fn, up), mlp.ffn_sub_norm), mlp.down_proj)
