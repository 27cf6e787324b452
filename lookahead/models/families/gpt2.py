"""GPT-2 (Radford et al. 2019), whose weights are transposed, and GPT-BigCode, which has usual ones."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.page import Page, UnknownModelError
from lookahead.models.families.parts import select, split


class GPT2(Page):
    suffix = "LMHeadModel"
    layer_class = "Block"
    layers_at = "h"
    attention_at = "attn"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = "attn_pdrop", "resid_pdrop", "embd_pdrop"

    @property
    def inner(self) -> Any:
        return self.model.transformer

    def write(self) -> None:
        inner = self.own(self.inner, "Model")
        if inner.config.add_cross_attention:
            raise UnknownModelError("its layers also attend to an encoder")
        x = self.output(self.embed(inner.wte, positions=self._plain(inner.wpe, nn.Embedding)))
        for i, layer in enumerate(self.layers(inner)):
            if i:
                self.output(x)
            x = self.add(x, self.attention(self.norm(x, layer.ln_1), layer.attn))
            x = self.add(x, self.mlp(self.norm(x, layer.ln_2), layer.mlp))
        self.logits(self.output(self.norm(x, inner.ln_f)), self.model.lm_head)

    def attention(self, x: Value, attention: Any) -> Value:
        self.own(attention, "Attention")
        q, k, v = self.products(x, *split(self, attention.c_attn, x.width, x.width))
        return self.product(self.attend(q, k, v, attention, dropout="attn_dropout"), attention.c_proj)

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        return self.product(self.gate(self.product(x, mlp.c_fc), mlp.act), mlp.c_proj)


class GPTBigCode(GPT2):
    suffix = "ForCausalLM"

    def attention(self, x: Value, attention: Any) -> Value:
        size = self.own(attention, "Attention").head_dim
        if attention.multi_query:
            q, k, v = self.products(x, *split(self, attention.c_attn, attention.embed_dim, size))
        else:
            joined = self.product(x, attention.c_attn)
            q, k, v = (select(self, joined, size, group=3, first=i) for i in range(3))
        return self.product(self.attend(q, k, v, attention, dropout="attn_dropout"), attention.c_proj)
