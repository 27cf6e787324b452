"""BioGPT (Luo et al. 2022, arXiv 2210.10341) and XGLM (arXiv 2112.10668): OPT's layers, and a scaled embedding."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.opt import OPT
from lookahead.models.families.page import AttendsBy, UnknownModelError


class BioGpt(OPT):
    positions_class = "LearnedPositionalEmbedding"
    """Of the table of positions, without the family's name."""
    dropouts = "hidden_dropout_prob", "activation_dropout", "layerdrop"

    @property
    def inner(self) -> Any:
        return self.model.biogpt

    def write(self) -> None:
        self.write_layers(self.model.output_projection)

    def write_layers(self, head: Any) -> None:
        inner = self.own(self.inner, "Model")
        x = self.output(self.embedding(inner))
        for i, layer in enumerate(self.layers(inner)):
            if i:
                self.output(x)
            x = self.add(x, self.attention(self.norm(x, layer.self_attn_layer_norm), layer.self_attn))
            x = self.add(x, self.mlp(self.norm(x, layer.final_layer_norm), layer))
        self.logits(self.output(self.norm(x, inner.layer_norm)), head)

    def embedding(self, inner: Any) -> Value:
        positions = self.own(inner.embed_positions, self.positions_class)
        return self.embed(inner.embed_tokens, float(inner.embed_tokens.embed_scale), "ScaledWordEmbedding", positions)


class XGLM(BioGpt):
    attends_by: AttendsBy = "eager"
    positions_class = "SinusoidalPositionalEmbedding"
    dropouts = "dropout", "activation_dropout", "layerdrop"

    @property
    def inner(self) -> Any:
        return self.model.model

    def write(self) -> None:
        if self.inner.config.add_cross_attention:
            raise UnknownModelError("its layers also attend to an encoder")
        self.write_layers(self.model.lm_head)
