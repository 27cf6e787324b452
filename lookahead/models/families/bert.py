"""Decoders of BERT's kind (Devlin et al. 2019, arXiv 1810.04805): norms come after sums, or before all parts.

Tokens, types of tokens and positions have an embedding each. All tokens are of the first type, so that its row is added
to those of positions: the same, except for rounding.
"""

from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import nn
from transformers.activations import gelu

from lookahead.cpu.operations import Value
from lookahead.models.families.page import Page, UnknownModelError


class Bert(Page):
    suffix = "LMHeadModel"
    layer_class = "Layer"
    layers_at = "layer"
    norm_class = nn.LayerNorm
    norms_are_centered = True
    dropouts = ("hidden_dropout_prob",)
    model_at = "bert"
    """The name of the model within."""

    @property
    def inner(self) -> Any:
        return getattr(self.model, self.model_at).encoder

    def mixer(self, layer: Any) -> Any:
        return layer.attention.self

    def write(self) -> None:
        model = self.own(getattr(self.model, self.model_at), "Model")
        inner = self.own(self.inner, "Encoder")
        if getattr(inner.config, "add_cross_attention", False):
            raise UnknownModelError("its layers also attend to an encoder")
        x = self.output(self.embedding(self.own(model.embeddings, "Embeddings"), model))
        for i, layer in enumerate(self.layers(inner)):
            if layer.chunk_size_feed_forward:
                raise UnknownModelError("its layers take a text in chunks")
            if i:
                self.output(x)
            x = self.layer(x, layer)
        self.head(self.output(self.after_layers(x, model)))

    def embedding(self, embeddings: Any, model: Any) -> Value:
        return self.norm(self.sum_of(embeddings), embeddings.LayerNorm)

    def sum_of(self, embeddings: Any) -> Value:
        """The embeddings of tokens, types and positions."""
        return self.embed(embeddings.word_embeddings, positions=self.places(embeddings))

    def places(self, embeddings: Any) -> SimpleNamespace:
        """The embeddings of positions and of the first type."""
        table = self.table(embeddings.position_embeddings)
        for name in ("token_type_embeddings", "task_type_embeddings"):  # some families lack one
            if hasattr(embeddings, name):
                table = table + self.table(getattr(embeddings, name))[0]
        return SimpleNamespace(weights=table)

    def table(self, module: Any) -> Any:
        if self._plain(module, nn.Embedding).max_norm is not None:
            raise UnknownModelError("its embedding changes when it is read (max_norm)")
        return module.weight.detach()

    def after_layers(self, x: Value, model: Any) -> Value:
        """What comes after the last layer."""
        return x

    def layer(self, x: Value, layer: Any) -> Value:
        x = self.norm(self.add(self.attention(x, layer.attention), x), layer.attention.output.LayerNorm)
        return self.norm(self.add(self.mlp(x, layer), x), layer.output.LayerNorm)

    def attention(self, x: Value, attention: Any) -> Value:
        mixer = self.own(self.own(attention, "Attention").self, "SelfAttention")
        q, k, v = self.products(x, *map(self.linear, (mixer.query, mixer.key, mixer.value)))
        return self.product(self.attended(q, k, v, mixer), self.own(attention.output, "SelfOutput").dense)

    def attended(self, q: Value, k: Value, v: Value, mixer: Any) -> Value:
        return self.attend(q, k, v, mixer, mixer.attention_head_size, dropout="dropout")

    def mlp(self, x: Value, layer: Any) -> Value:
        first, last = self.own(layer.intermediate, "Intermediate"), self.own(layer.output, "Output")
        return self.product(self.gate(self.product(x, first.dense), first.intermediate_act_fn), last.dense)

    def head(self, x: Value) -> None:
        head = self.own(self.own(self.model.cls, "OnlyMLMHead").predictions, "LMPredictionHead")
        transform = self.own(head.transform, "PredictionHeadTransform")
        x = self.gate(self.product(x, transform.dense), transform.transform_act_fn)
        self.logits(self.norm(x, transform.LayerNorm), head.decoder)


class BertGeneration(Bert):
    suffix = "Decoder"
    names = MappingProxyType({"Model": "BertGenerationEncoder", "Encoder": "BertEncoder"})

    def head(self, x: Value) -> None:
        self.logits(x, self.own(self.model.lm_head, "OnlyLMHead").decoder)


class Ernie(Bert):
    suffix = "ForCausalLM"
    model_at = "ernie"


class Electra(Bert):
    suffix = "ForCausalLM"
    model_at = "electra"

    def embedding(self, embeddings: Any, model: Any) -> Value:
        x = super().embedding(embeddings, model)
        return self.product(x, model.embeddings_project) if hasattr(model, "embeddings_project") else x

    def head(self, x: Value) -> None:
        head = self.own(self.model.generator_predictions, "GeneratorPredictions")
        x = self.norm(self.gate(self.product(x, head.dense), head.activation), head.LayerNorm)
        self.logits(x, self.model.generator_lm_head)


class Roberta(Bert):
    """RoBERTa (Liu et al. 2019, arXiv 1907.11692)."""

    suffix = "ForCausalLM"
    model_at = "roberta"

    def head(self, x: Value) -> None:
        head = self.own(self.model.lm_head, "LMHead")
        x = self.norm(self.gate(self.product(x, head.dense), gelu), head.layer_norm)
        self.logits(x, head.decoder)


class Camembert(Roberta):
    pass


class XLMRoberta(Roberta):
    pass


class Data2VecText(Roberta):
    model_at = "data2vec_text"


class RobertaPreLayerNorm(Roberta):
    """Norms come before all parts."""

    model_at = "roberta_prelayernorm"

    def layer(self, x: Value, layer: Any) -> Value:
        x = self.add(self.attention(self.norm(x, layer.attention.LayerNorm), layer.attention), x)
        return self.add(self.mlp(self.norm(x, layer.intermediate.LayerNorm), layer), x)

    def after_layers(self, x: Value, model: Any) -> Value:
        return self.norm(x, model.LayerNorm)


class XLMRobertaXL(Roberta):
    """Norms come before all parts, but not after the embedding."""

    def embedding(self, embeddings: Any, model: Any) -> Value:
        return self.sum_of(embeddings)

    def layer(self, x: Value, layer: Any) -> Value:
        x = self.add(self.attention(self.norm(x, layer.attention.self_attn_layer_norm), layer.attention), x)
        return self.add(self.mlp(self.norm(x, layer.LayerNorm), layer), x)

    def after_layers(self, x: Value, model: Any) -> Value:
        return self.norm(x, model.encoder.LayerNorm)
