"""Gemma: the embedding is scaled, and norms add 1 to their weights. Gemma 2 and 3 have norms before and after each
part."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import AttendsBy
from lookahead.models.families.parts import embed_scaled, qk_norm


class Gemma(Llama):
    norm_offset = 1.0
    norms_round_once = True

    def embedding(self, inner: Any) -> Value:
        return embed_scaled(self, inner.embed_tokens, "TextScaledWordEmbedding")


class Gemma2(Gemma):
    attends_by: AttendsBy = "eager"
    slides = "by type"

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        attended = self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name)
        x = self.add(x, self.norm(attended, layer.post_attention_layernorm))
        more = self.mlp(self.norm(x, layer.pre_feedforward_layernorm), layer.mlp)
        return self.add(x, self.norm(more, layer.post_feedforward_layernorm))

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention, cap=attention.attn_logit_softcapping)

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, cap=self.model.config.final_logit_softcapping)


class Gemma3(Gemma2):
    attends_by = "split"
    model_class = "TextModel"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(*qk_norm(self, q, k, attention), attention, name)

    def attended(self, q: Value, k: Value, v: Value, attention: Any) -> Value:
        return self.attend(q, k, v, attention)


class VaultGemma(Gemma2):
    def layer(self, x: Value, layer: Any, name: str) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.input_layernorm), layer.self_attn, name))
        return self.add(x, self.mlp(self.norm(x, layer.pre_feedforward_layernorm), layer.mlp))
