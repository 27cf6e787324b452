"""More decoders of BERT's kind: MegatronBERT, RemBERT (arXiv 2010.12821), BigBird, RoCBert, X-MOD and GIT."""

from importlib import import_module
from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.cpu.products import Linear, is_plain_of
from lookahead.models.families.bert import Bert, Roberta
from lookahead.models.families.page import AttendsBy, UnknownModelError


class WithWrittenAttention(Bert):
    """The class of attention computes it itself."""

    suffix = "ForCausalLM"
    attends_by: AttendsBy = "eager"

    def attended(self, q: Value, k: Value, v: Value, mixer: Any) -> Value:
        makes_causal_masks = hasattr(import_module(self._home), "create_causal_mask")  # transformers 5.17 makes none
        if not (self.inner.config.is_decoder and makes_causal_masks):
            raise UnknownModelError("its attention is not causal")
        size = mixer.attention_head_size
        return self.attend(q, k, v, mixer, size, scaling=size**-0.5, dropout="dropout")


class MegatronBert(WithWrittenAttention):
    """Norms come before all parts, but not after the embedding."""

    def embedding(self, embeddings: Any, model: Any) -> Value:
        return self.sum_of(embeddings)

    def layer(self, x: Value, layer: Any) -> Value:
        x = self.add(x, self.attention(self.norm(x, layer.attention.ln), layer.attention))
        return self.add(x, self.mlp(self.norm(x, layer.ln), layer))

    def after_layers(self, x: Value, model: Any) -> Value:
        return self.norm(x, model.encoder.ln)


class RemBert(WithWrittenAttention):
    """Embeddings have other widths than layers."""

    model_at = "rembert"

    def embedding(self, embeddings: Any, model: Any) -> Value:
        return self.product(super().embedding(embeddings, model), model.encoder.embedding_hidden_mapping_in)

    def head(self, x: Value) -> None:
        head = self.own(self.own(self.model.cls, "OnlyMLMHead").predictions, "LMPredictionHead")
        x = self.gate(self.product(x, head.dense), head.activation)
        self.logits(self.norm(x, head.LayerNorm), head.decoder)


class BigBird(WithWrittenAttention):
    """BigBird (Zaheer et al. 2020, arXiv 2007.14062), whose decoders attend to all keys."""

    def sum_of(self, embeddings: Any) -> Value:
        factor = embeddings.hidden_size**0.5 if embeddings.rescale_embeddings else 1.0
        return self.embed(embeddings.word_embeddings, factor, positions=self.places(embeddings))


class RoCBert(Bert):
    """Tokens also have a shape and a pronunciation. These are not given in a text, so they are those of token 0."""

    suffix = "ForCausalLM"
    model_at = "roc_bert"

    def sum_of(self, embeddings: Any) -> Value:
        if embeddings.map_inputs_layer is None:
            return super().sum_of(embeddings)
        words = embeddings.word_embeddings
        (x,) = self.products(self.embed(words), self._of_words(embeddings))
        return self.add(x, self.embed(words, factor=0.0, positions=self.places(embeddings)))

    def _of_words(self, embeddings: Any) -> Linear:
        """The layer that takes all embeddings of a token, for those of words alone: the others add to its bias."""
        both = self.linear(embeddings.map_inputs_layer)
        if both.bias is None or not is_plain_of(both.weight, self.model.dtype):
            raise UnknownModelError("the layer that takes all embeddings of a token is not a usual one")
        tables = []
        if embeddings.enable_shape:
            tables.append(self.table(embeddings.shape_embed))
        if embeddings.enable_pronunciation:
            tables.append(self.table(embeddings.pronunciation_embed))
        width = embeddings.word_embeddings.weight.shape[1]
        weight, others = both.weight.detach().split([width, both.inputs - width], dim=1)
        constant = torch.cat([table[0] for table in tables]) if tables else others.new_zeros(0)
        return Linear(weight.contiguous(), None, both.bias.detach() + others @ constant)


class Xmod(Roberta):
    """X-MOD (Pfeiffer et al. 2022, arXiv 2205.06266): layers end in an adapter, one for each language."""

    def layer(self, x: Value, layer: Any) -> Value:
        of_attention, of_mlp = layer.attention.output, layer.output
        if layer.pre_norm:
            x = self.add(self.attention(self.norm(x, of_attention.LayerNorm), layer.attention), x)
            return self.adapted(self.add(self.mlp(self.norm(x, of_mlp.LayerNorm), layer), x), of_mlp)
        x = self.norm(self.add(self.attention(x, layer.attention), x), of_attention.LayerNorm)
        return self.norm(self.adapted(self.add(self.mlp(x, layer), x), of_mlp), of_mlp.LayerNorm)

    def adapted(self, x: Value, output: Any) -> Value:
        """Add what the adapter of the default language makes."""
        language = self.inner.config.default_language
        if language not in output.adapter_modules:
            raise UnknownModelError("it has no adapter of a default language")
        adapter, normed = self.own(output.adapter_modules[language], "Adapter"), x
        if output.adapter_layer_norm is not None:
            normed = self.norm(x, output.adapter_layer_norm)
        elif output.adapter_reuse_layer_norm:
            normed = self.norm(x, output.LayerNorm)
        more = self.product(self.gate(self.product(normed, adapter.dense1), adapter.adapter_act_fn), adapter.dense2)
        return self.add(more, normed if output.ln_before_adapter else x)

    def after_layers(self, x: Value, model: Any) -> Value:
        return self.norm(x, model.encoder.LayerNorm) if model.encoder.is_pre_norm else x


class Git(Bert):
    """The text side of GIT (Wang et al. 2022, arXiv 2205.14100). Images stand in front of a text, without tokens."""

    suffix = "ForCausalLM"
    attends_by: AttendsBy = "eager"
    model_at = "git"

    def attended(self, q: Value, k: Value, v: Value, mixer: Any) -> Value:
        size = mixer.attention_head_size
        return self.attend(q, k, v, mixer, size, scaling=size**-0.5, dropout="dropout")

    def head(self, x: Value) -> None:
        self.logits(x, self.model.output)
