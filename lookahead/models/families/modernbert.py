"""ModernBERT's decoder (Weller et al. 2025, arXiv 2507.11412)."""

from typing import Any

from torch import nn

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama
from lookahead.models.families.parts import split


class ModernBertDecoder(Llama):
    layer_class = "Layer"
    attention_at = "attn"
    last_norm = "final_norm"
    output_projection = "Wo"
    slides = "by type"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    rotary_rounds_once = True
    dropouts = "embedding_dropout", "attention_dropout", "mlp_dropout"

    def embedding(self, inner: Any) -> Value:
        embeddings = self.own(inner.embeddings, "Embeddings")
        return self.norm(self.embed(embeddings.tok_embeddings), embeddings.norm)

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        normed = x if type(self._check(layer.attn_norm)) is nn.Identity else self.norm(x, layer.attn_norm)
        x = self.add(x, self.attention(normed, layer.attn, name))
        return self.add(x, self.mlp(self.norm(x, layer.mlp_norm), layer.mlp))

    def mlp(self, x: Value, mlp: Any) -> Value:
        self.own(mlp, "MLP")
        gate, up = self.products(x, *split(self, mlp.Wi, mlp.Wi.out_features // 2))
        return self.product(self.gate(gate, mlp.act, up), mlp.Wo)

    def head(self, x: Value) -> None:
        head = self.own(self.model.lm_head, "PredictionHead")
        self.logits(self.norm(self.gate(self.product(x, head.dense), head.act), head.norm), self.model.decoder)
