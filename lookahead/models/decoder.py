"""Finds the weights of a model that is built like Llama, so that one call can compute its pass (`cpu.decoder`).

What a model's own code does is not read but known: of these classes, as transformers defines them. So every module must
be exactly of its class, with no hook, no forward of its own and no adapter. The probe compares the results besides.
"""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lookahead.compat import global_hooks, has_own_call
from lookahead.cpu.decoder import Decoder, Layer
from lookahead.cpu.products import DecodingLinear, Linear

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnknownDecoderError(Exception):
    """The model is not built like Llama. The message says what is different."""


def read_decoder(model: PreTrainedModel) -> Decoder:
    """Return the weights of a model, as they are at this moment.

    Raises UnknownDecoderError if the model, or a part of it, is not as transformers defines it.
    """
    known = [cls for cls in type(model).__mro__ if cls.__name__ in CLASSES]
    own: Any = next((cls for cls in known if cls.__module__.startswith("transformers.models.")), None)
    if own is None:
        raise UnknownDecoderError(f"{type(model).__name__} is none of {', '.join(CLASSES)}")
    if type(model).forward is not own.forward:
        raise UnknownDecoderError(f"{type(model).__name__} has a forward of its own")
    if global_hooks():
        raise UnknownDecoderError("hooks are set on all modules")
    try:
        return _Reader(own.__name__.removesuffix("ForCausalLM"), sys.modules[own.__module__]).model(model)
    except AttributeError as error:
        raise UnknownDecoderError(f"a part is missing: {error}") from error


class _Reader:
    """Reads the modules of one family. Its classes have a prefix, and are defined in one Python module."""

    def __init__(self, prefix: str, defined_in: object):
        self._prefix, self._defined_in = prefix, defined_in
        self._epsilons: set[float] = set()

    def model(self, model: nn.Module) -> Decoder:
        self._check(model)
        inner = self._module(model, "model", "Model")
        rotary = self._module(inner, "rotary_emb", "RotaryEmbedding")
        if rotary.rope_type in ("dynamic", "longrope"):
            raise UnknownDecoderError(f"its rotary embedding is {rotary.rope_type}, which changes with the length")
        layers = inner.layers[: inner.config.num_hidden_layers]
        found = [self._layer(layer) for layer in layers]
        embedding = self._child(inner, "embed_tokens", nn.Embedding)
        if embedding.max_norm is not None:
            raise UnknownDecoderError("its embedding changes when it is read (max_norm)")
        attention = layers[0].self_attn
        norm = self._norm(inner, "norm")
        head = self._linear(model, "lm_head")
        if len(self._epsilons) > 1:
            raise UnknownDecoderError("its norms differ in their epsilon")
        return Decoder(found, embedding.weight, norm, head, attention.head_dim, attention.scaling, self._epsilons.pop())

    def _layer(self, layer: nn.Module) -> Layer:
        self._is(layer, "DecoderLayer")
        attention = self._module(layer, "self_attn", "Attention")
        mlp = self._module(layer, "mlp", "MLP")
        activation = mlp.act_fn
        if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            raise UnknownDecoderError(f"its activation is {type(activation).__name__}, not SiLU")
        self._check(activation)
        has_norms = hasattr(attention, "q_norm")
        return Layer(
            q=self._linear(attention, "q_proj"),
            k=self._linear(attention, "k_proj"),
            v=self._linear(attention, "v_proj"),
            o=self._linear(attention, "o_proj"),
            gate=self._linear(mlp, "gate_proj"),
            up=self._linear(mlp, "up_proj"),
            down=self._linear(mlp, "down_proj"),
            input_norm=self._norm(layer, "input_layernorm"),
            post_norm=self._norm(layer, "post_attention_layernorm"),
            q_norm=self._norm(attention, "q_norm") if has_norms else None,
            k_norm=self._norm(attention, "k_norm") if has_norms else None,
        )

    def _norm(self, parent: nn.Module, name: str) -> nn.Parameter:
        norm = self._module(parent, name, "RMSNorm")
        self._epsilons.add(norm.variance_epsilon)
        return norm.weight

    def _linear(self, parent: nn.Module, name: str) -> Linear:
        return Linear.of(self._child(parent, name, nn.Linear, DecodingLinear))

    def _module(self, parent: nn.Module, name: str, suffix: str) -> Any:
        module = getattr(parent, name, None)
        self._is(module, suffix)
        return module

    def _child(self, parent: nn.Module, name: str, *classes: type) -> Any:
        module = getattr(parent, name, None)
        if type(module) not in classes:
            raise UnknownDecoderError(f"{name} is a {type(module).__name__}, not a {classes[0].__name__}")
        self._check(module)
        return module

    def _is(self, module: Any, suffix: str) -> None:
        wanted = getattr(self._defined_in, self._prefix + suffix, None)
        if wanted is None or type(module) is not wanted:
            raise UnknownDecoderError(f"a {type(module).__name__} stands where {self._prefix}{suffix} is expected")
        self._check(module)

    def _check(self, module: Any) -> None:
        if has_own_call(module):
            raise UnknownDecoderError(f"a {type(module).__name__} has a hook or a forward of its own")
