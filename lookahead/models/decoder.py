"""Finds the weights of a model that is built like Llama, so that one call can compute its pass (`cpu.decoder`).

What a model's own code does is not read but known: of these families, as transformers defines them. So every module
must be exactly of its class, with no hook, no forward of its own and no adapter. The probe compares the results, too.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.compat import global_hooks, has_own_call
from lookahead.cpu.decoder import Decoder, Layer
from lookahead.cpu.products import DecodingLinear, Linear
from lookahead.models.origin import is_defined

_BEFORE = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"o_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
_AROUND = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_AFTER}


class Family(NamedTuple):
    """What a family does otherwise than Llama. What is not said here is found in the modules."""

    norms: Mapping[str, str] = _BEFORE
    """Names of the norms of a layer, by fields of `Layer`."""
    norm_offset: float = 0.0
    """This and the next two are fields of `Decoder`."""
    norms_round_once: bool = False
    rotary_rounds_once: bool = False
    turns_part: bool = False
    """Whether the rotary embedding may turn the first numbers of a head alone."""
    model: str = "Model"
    """The class of the model within, without the family's name."""
    embedding: str | None = None
    """The class of the embedding, without the family's name, if it is not torch's."""
    activation: str = "act_fn"
    """The name of the activation in an MLP."""
    is_joined: bool = False
    """One layer gives query, key and value, and one gives both halves of the gated MLP."""
    has_multipliers: bool = False
    """Embedding, residuals and logits are scaled by settings."""
    can_cap: bool = False
    """A setting may cap the logits."""
    turns: Callable[[Any], bool] = lambda attention: True
    """Whether this attention turns queries and keys by their positions."""
    slides: Literal["never", "always", "by type"] = "never"
    """Which layers have a sliding window, if the configuration names its length."""


FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(slides="always"),
    "Ministral": Family(slides="by type"),
    "Cwm": Family(slides="by type"),
    "SeedOss": Family(),
    "Qwen2": Family(slides="by type"),
    "Qwen3": Family(slides="by type"),
    "SmolLM3": Family(turns=lambda attention: attention.use_rope, slides="by type"),
    "Phi3": Family(activation="activation_fn", is_joined=True, turns_part=True, slides="always"),
    "Granite": Family(has_multipliers=True),
    "Olmo2": Family(_AFTER, norms_round_once=True, rotary_rounds_once=True),
    "Olmo3": Family(_AFTER, norms_round_once=True, rotary_rounds_once=True, slides="by type"),
    "Exaone4": Family(
        _AFTER, turns=lambda attention: attention.is_sliding or attention.sliding_window is None, slides="by type"
    ),
    "Gemma": Family(norm_offset=1.0, norms_round_once=True, embedding="TextScaledWordEmbedding"),
    "Gemma3": Family(
        _AROUND,
        norm_offset=1.0,
        norms_round_once=True,
        model="TextModel",
        embedding="TextScaledWordEmbedding",
        can_cap=True,
        slides="by type",
    ),
}
CLASSES = tuple(f"{family}ForCausalLM" for family in FAMILIES)


class UnknownDecoderError(Exception):
    """The model is not built like Llama. The message says what is different."""


def read_decoder(model: PreTrainedModel) -> Decoder:
    """Return the weights of a model, as they are at this moment.

    Raises UnknownDecoderError if the model, or a part of it, is not as transformers defines it.
    """
    own = _own_class(model)
    if type(model).forward is not own.forward:
        raise UnknownDecoderError(f"{type(model).__name__} has a forward of its own")
    if global_hooks():
        raise UnknownDecoderError("hooks are set on all modules")
    try:
        return _Reader(_prefix(own), own.__module__).model(model)
    except AttributeError as error:
        raise UnknownDecoderError(f"a part is missing: {error}") from error


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Return how many positions each layer of such a model sees, by its masks in a prompt; None: all of them."""
    config = model.model.config  # type: ignore[union-attr]  # a module
    slides = FAMILIES[_prefix(_own_class(model))].slides
    kinds = config.layer_types if slides == "by type" else ["sliding_attention"] * config.num_hidden_layers
    return [config.sliding_window if slides != "never" and kind == "sliding_attention" else None for kind in kinds]


def turns_part(model: PreTrainedModel) -> bool:
    """Whether the rotary embedding of such a model may be narrower than its heads."""
    return FAMILIES[_prefix(_own_class(model))].turns_part


def _own_class(model: PreTrainedModel) -> Any:
    """The class of `FAMILIES` that transformers defines. Raises UnknownDecoderError if the model has none."""
    for cls in type(model).__mro__:
        if cls.__name__ in CLASSES and cls.__module__.startswith("transformers.models."):
            return cls
    raise UnknownDecoderError(f"{type(model).__name__} is none of {', '.join(CLASSES)}")


def _prefix(cls: type) -> str:
    return cls.__name__.removesuffix("ForCausalLM")


class _Reader:
    """Reads the modules of one family. Its classes have a prefix, and are defined in one Python module."""

    def __init__(self, prefix: str, defined_in: str):
        self._prefix, self._defined_in, self._family = prefix, defined_in, FAMILIES[prefix]
        self._found: dict[str, set[Any]] = {}  # values of each setting that must be the same everywhere

    def model(self, model: PreTrainedModel) -> Decoder:
        self._check(model)
        family = self._family
        inner = self._module(model, "model", family.model)
        layers = inner.layers[: inner.config.num_hidden_layers]
        found = [self._layer(layer) for layer in layers]
        if [layer.self_attn.layer_idx for layer in layers] != list(range(len(layers))):
            raise UnknownDecoderError(
                "its layers are not in the order of their layer_idx, by which they find the cache"
            )
        embedding, factor = self._embedding(inner)
        norm = self._norm(inner, "norm")
        if family.can_cap and model.config.final_logit_softcapping is not None:
            raise UnknownDecoderError("its logits are capped")
        return Decoder(
            layers=found,
            rotary=self._rotary(inner, layers),
            embedding=embedding,
            norm=norm,
            head=self._linear(model, "lm_head"),
            head_dim=self._only("head size"),
            scaling=self._only("scaling of attention"),
            epsilon=self._only("epsilon of norms"),
            norm_offset=family.norm_offset,
            norms_round_once=family.norms_round_once,
            rotary_rounds_once=family.rotary_rounds_once,
            is_gelu=self._only("activation"),
            embedding_factor=factor,
            residual_factor=self._only("multiplier of residuals"),
            logits_divisor=float(model.config.logits_scaling) if family.has_multipliers else 1.0,
        )

    def _note(self, what: str, value: Any) -> None:
        self._found.setdefault(what, set()).add(value)

    def _only(self, what: str) -> Any:
        """The value of a setting, which C++ has once for all layers."""
        values = self._found[what]
        if len(values) > 1:
            raise UnknownDecoderError(f"its layers differ in their {what} ({', '.join(map(str, sorted(values)))})")
        return next(iter(values))

    def _embedding(self, inner: Any) -> tuple[torch.Tensor, float]:
        """Return the weights of the embedding, and what it multiplies them by."""
        if self._family.embedding is None:
            embedding = self._child(inner, "embed_tokens", nn.Embedding)
            factor = float(inner.embedding_multiplier) if self._family.has_multipliers else 1.0
        else:
            embedding = self._module(inner, "embed_tokens", self._family.embedding)
            factor = float(embedding.embed_scale.to(embedding.weight.dtype))  # it is rounded, too
        if embedding.max_norm is not None:
            raise UnknownDecoderError("its embedding changes when it is read (max_norm)")
        return embedding.weight, factor

    def _rotary(self, inner: Any, layers: nn.ModuleList) -> list[str | None]:
        """Return `Decoder.rotary`. Where one rotary embedding serves all layers, its name is empty."""
        types = self._module(inner, "rotary_emb", "RotaryEmbedding").rope_type
        by_name = types if isinstance(types, dict) else {"": types}
        for name, rope_type in by_name.items():
            if "dynamic" in rope_type or (rope_type == "longrope" and name):
                raise UnknownDecoderError(f"its rotary embedding is {rope_type}, which changes with the length")
        names = inner.config.layer_types if isinstance(types, dict) else [""] * len(layers)
        turned = [self._family.turns(layer.self_attn) for layer in layers]
        return [name if is_turned else None for name, is_turned in zip(names, turned, strict=False)]

    def _layer(self, layer: Any) -> Layer:
        self._is(layer, "DecoderLayer")
        attention = self._module(layer, "self_attn", "Attention")
        mlp = self._module(layer, "mlp", "MLP")
        if not attention.is_causal:
            raise UnknownDecoderError("its attention is not causal")
        if attention.training and attention.attention_dropout:
            raise UnknownDecoderError("its attention is in training mode, and drops weights")
        self._note("head size", attention.head_dim)
        self._note("scaling of attention", float(attention.scaling))
        self._note("multiplier of residuals", float(layer.residual_multiplier) if self._family.has_multipliers else 1.0)
        self._note("activation", self._is_gelu(getattr(mlp, self._family.activation)))
        norms = {field: self._norm(layer, name) for field, name in self._family.norms.items()}
        if hasattr(attention, "q_norm"):
            norms |= {name: self._norm(attention, name) for name in ("q_norm", "k_norm")}
        if self._family.is_joined:
            of_queries, of_keys = (
                heads * attention.head_dim
                for heads in (attention.config.num_attention_heads, attention.num_key_value_heads)
            )
            q, k, v = self._parts(attention, "qkv_proj", of_queries, of_queries + of_keys)
            gate, up = self._parts(mlp, "gate_up_proj", mlp.gate_up_proj.out_features // 2)
        else:
            q, k, v = (self._linear(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
            gate, up = (self._linear(mlp, name) for name in ("gate_proj", "up_proj"))
        o, down = self._linear(attention, "o_proj"), self._linear(mlp, "down_proj")
        return Layer(q, k, v, o, gate, up, down, **norms)

    def _is_gelu(self, activation: Any) -> bool:
        """Whether the activation is GELU, approximated by tanh, or SiLU."""
        self._check(activation)
        cls: Any = type(activation)
        name = cls.__name__ if is_defined(cls) else f"{cls.__name__} of {cls.__module__}"
        is_gelu = name == "GELUTanh" and getattr(activation.act, "keywords", None) == {"approximate": "tanh"}
        if not is_gelu and name not in ("SiLU", "SiLUActivation"):
            raise UnknownDecoderError(f"its activation is {name}, neither SiLU nor GELU by tanh")
        return is_gelu

    def _norm(self, parent: nn.Module, name: str) -> nn.Parameter:
        norm = self._module(parent, name, "RMSNorm")
        self._note("epsilon of norms", norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        return norm.weight

    def _parts(self, parent: nn.Module, name: str, *ends: int) -> Iterator[Linear]:
        """Yield the rows of a layer up to each of these ends, and the rest, as layers of their own."""
        joined = self._linear(parent, name)
        for begin, end in pairwise((0, *ends, None)):
            yield Linear(*(None if field is None else field[begin:end] for field in joined))  # type: ignore[arg-type]

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
        cls, wanted = type(module), self._prefix + suffix
        if (cls.__module__, cls.__qualname__) != (self._defined_in, wanted):
            raise UnknownDecoderError(f"a {cls.__name__} of {cls.__module__} stands where {wanted} is expected")
        self._check(module)

    def _check(self, module: Any) -> None:
        if has_own_call(module):
            raise UnknownDecoderError(f"a {type(module).__name__} has a hook or a forward of its own")
