"""The base class of all pages: how a model's modules become operations of a program.

Pages do not read the model's own code: they know what it does in these families, as transformers defines them. So every
module must be exactly of its class, with no hook, no other forward and no adapter. The probe also compares the results.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lookahead.compat import global_hooks_of_users, has_own_call, registered_experts
from lookahead.cpu import operations as op
from lookahead.cpu.operations import Value
from lookahead.cpu.products import DecodingLinear, Linear
from lookahead.cpu.program import Program
from lookahead.models.origin import is_defined, is_own

ACTIVATIONS: dict[str, op.Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_new",
    "BloomGelu": "gelu_bloom",
    "GELU": "gelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
    "Tanh": "tanh",
}
"""By the class in torch or transformers."""


Slides = Literal["never", "always", "by type"]
AttendsBy = Literal["split", "sdpa", "eager", "nothing"]


class UnknownModelError(Exception):
    """There is no program for the model. The message says why."""


class Page:
    """Writes the program of a family's model. `write` calls the methods here, each of which adds an operation."""

    attends_by: AttendsBy = "split"
    """The `attn_implementation` with which the model computes what `attend` describes; split: "sdpa", which it looks up
    in transformers' registry. nothing: it has no attention, and takes no positions."""
    names: Mapping[str, str] = {}
    """By suffix of a class, the full name of one that lacks the family's name."""
    suffix = "ForCausalLM"
    """What follows the family's name in the name of the model's class."""
    layer_class = "DecoderLayer"
    """What follows the family's name in the name of the layers' class."""
    layers_at = "layers"
    """The name of the list of layers in the inner model."""
    attention_at = "self_attn"
    """The name of attention in a layer."""
    slides: Slides = "never"
    """Which layers have a sliding window, if the configuration names its length."""
    rotates_part = False
    """Whether the rotary embedding may rotate only the first elements of a head."""
    norm_class: str | type[nn.Module] = "RMSNorm"
    """The class of norms: the family's own, without the family's name, or torch's."""
    norm_offset = 0.0
    """`norm_*`, `norms_*` and `rotary_*` are settings of `Norm` and `Rotary`."""
    norms_round_once = False
    norms_are_centered = False
    rotary_rounds_once = False
    rotary_is_interleaved = False
    rotary_separates = False
    may_lack_rotary = False
    """Whether a configuration may leave the rotary embedding out, so that attention goes without positions."""
    dropouts: tuple[str, ...] = ()
    """Settings by which layers drop numbers in training mode, beside that of attention."""

    def __init__(self, model: Any, own: type):
        """own: the class of the model that transformers defines.

        Raises UnknownModelError if code that neither torch nor transformers defines computes experts.
        """
        if not is_own(experts := registered_experts(model.config)):
            raise UnknownModelError(f"its experts are computed by {experts}, which transformers does not define")
        self.model = model
        self._own: Any = own
        self._home, self._family = own.__module__, own.__name__.removesuffix(self.suffix)
        self._operations: list[op.Operation] = []

    def program(self) -> Program:
        """Return the program of the model in its current state.

        Raises UnknownModelError if the model, or a part of it, is not as transformers defines it.
        """
        if type(self.model).forward is not self._own.forward:
            raise UnknownModelError(f"{type(self.model).__name__} has its own forward")
        if global_hooks_of_users():
            raise UnknownModelError("hooks are set on all modules")
        config = self.model.config.get_text_config(decoder=True)
        if self.model.training and any(getattr(config, name) for name in self.dropouts):
            raise UnknownModelError("its layers are in training mode and have dropout or noise")
        self._operations = []
        try:
            self._check(self.model)
            self.write()
        except AttributeError as error:
            raise UnknownModelError(f"a part is missing: {error}") from error
        operations, self._operations = self._operations, []
        return Program(operations)

    def write(self) -> None:
        """Write the operations of the model."""
        raise NotImplementedError

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.model

    # -- parts of the model --

    def own(self, module: Any, suffix: str) -> Any:
        """Return a module, which must be of the family's class of this name."""
        return self._of_class(module, self._home, self.names.get(suffix, self._family + suffix))

    def _of_class(self, module: Any, home: str, wanted: str) -> Any:
        cls = type(module)
        if (cls.__module__, cls.__qualname__) != (home, wanted):
            raise UnknownModelError(f"a {cls.__name__} of {cls.__module__} stands where {wanted} is expected")
        return self._check(module)

    def layers(self, inner: Any) -> Iterator[Any]:
        """Yield the layers that the model computes, each at the place of the cache that it fills."""
        layers = getattr(inner, self.layers_at)[: inner.config.num_hidden_layers]
        if [self.mixer(layer).layer_idx for layer in layers] != list(range(len(layers))):
            raise UnknownModelError("its layers are not in the order of their layer_idx, by which they find the cache")
        for layer in layers:
            yield self.own(layer, self.layer_class)

    def mixer(self, layer: Any) -> Any:
        """Return the part of a layer that the cache is for."""
        return getattr(layer, self.attention_at)

    def linear(self, module: Any) -> Linear:
        """Return the tensors of a linear layer."""
        if type(module) is Conv1D:
            return Linear(self._check(module).weight.detach().T, None, module.bias)
        if getattr(getattr(module, "weight", None), "dtype", None) == torch.uint8:
            from lookahead.models.families import gguf  # other weights are not in blocks

            return gguf.linear(self, module)
        return Linear.from_layer(self._plain(module, nn.Linear, DecodingLinear))

    def _plain(self, module: Any, *classes: type) -> Any:
        if type(module) not in classes:
            raise UnknownModelError(f"a {type(module).__name__} stands where {classes[0].__name__} is expected")
        return self._check(module)

    def _check(self, module: Any) -> Any:
        if has_own_call(module):
            raise UnknownModelError(f"a {type(module).__name__} has a hook or its own forward")
        return module

    # -- operations --

    def embed(self, module: Any, factor: float = 1.0, suffix: str = "", positions: Any = None) -> Value:
        """suffix: of the family's own class, if it has one. positions: an embedding of these, or a module whose table
        is called ``weights``. It may have an ``offset`` that is added to them.
        """
        if module.weight.dtype == torch.uint8 and positions is None:
            from lookahead.models.families import gguf  # other weights are not in blocks

            return gguf.embed(self, module, factor, suffix)
        embedding = self.own(module, suffix) if suffix else self._plain(module, nn.Embedding)
        for one in (embedding, positions):
            if getattr(one, "max_norm", None) is not None:
                raise UnknownModelError("its embedding changes when it is read (max_norm)")
        table, offset = getattr(positions, "weights", None), getattr(positions, "offset", 0)
        if isinstance(positions, nn.Embedding):
            table = positions.weight
        return self._add(op.Embed(Value(embedding.weight.shape[-1]), embedding.weight, factor, table, offset))

    def norm(self, x: Value, module: Any) -> Value:
        return self._norm(x, module, x.width, of_heads=False)

    def norm_heads(self, x: Value, module: Any, size: int) -> Value:
        """Norm queries or keys: those of each head, or of all heads together if the module has so many weights."""
        weight = getattr(module, "weight", None)
        is_of_each = weight is None or weight.shape == (size,)
        return self._norm(x, module, size if is_of_each else x.width, of_heads=True)

    def _norm(self, x: Value, module: Any, size: int, of_heads: bool) -> Value:
        if isinstance(self.norm_class, str):
            norm = self.own(module, self.norm_class)
        else:
            norm = self._plain(module, self.norm_class)
        epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        settings: dict[str, Any] = {"offset": self.norm_offset, "rounds_once": self.norms_round_once}
        settings |= {"is_centered": self.norms_are_centered, "of_heads": of_heads, "size": size}
        return self._add(op.Norm(x, Value(x.width), weight, epsilon, bias, **settings))

    def products(self, x: Value, *linears: Linear) -> list[Value]:
        outs = tuple(Value(linear.outputs) for linear in linears)
        self._operations.append(op.Products(x, linears, outs))
        return list(outs)

    def product(self, x: Value, module: Any) -> Value:
        (out,) = self.products(x, self.linear(module))
        return out

    def rotary(self, x: Value, size: int, name: str = "") -> Value:
        if self._lacks_rotary:
            return x
        is_interleaved = self.rotary_is_interleaved or self.rotary_separates
        settings = self.rotary_rounds_once, is_interleaved, self.rotary_separates
        return self._add(op.Rotary(x, Value(x.width), size, name, *settings))

    def attend(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        attention: Any,
        size: int = 0,
        scaling: float | None = None,
        dropout: str = "attention_dropout",
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        layer: int | None = None,
        is_latent: bool = False,
        kind: type[op.Attend] = op.Attend,
        **settings: Any,
    ) -> Value:
        """Append keys and values to the cache, and attend to it.

        size, scaling: if attention does not name them as usual. dropout: the name of attention's setting or module of
        it, if it has one. cap: None: scores are not capped. layer: of the cache, if it is not the attention's own.
        Without keys and values, it has them already. is_latent: as for `Attend`, with one head of keys.
        kind: of the operation. settings: its further ones.
        """
        if self.reads_prompts and not getattr(attention, "is_causal", True):  # some are never otherwise
            raise UnknownModelError("its attention is not causal")
        rate = getattr(attention, dropout) if dropout else 0
        if attention.training and getattr(rate, "p", rate):
            raise UnknownModelError("its attention is in training mode and has dropout")
        layer, size = attention.layer_idx if layer is None else layer, size or attention.head_dim
        scaling = float(attention.scaling if scaling is None else scaling)
        if cap == 0:
            raise UnknownModelError("the cap of its scores is 0")
        if k is not None and v is not None:
            self._operations.append(op.Append(k, v, layer, k.width if is_latent else size))
        held = next(one for one in self._operations if isinstance(one, op.Append) and one.layer == layer)
        out = Value(q.width // size * (held.size if is_latent else held.value_size))
        return self._add(kind(q, out, layer, size, held.heads, scaling, cap or 0.0, sinks, is_latent, **settings))

    def gate(self, x: Value, activation: Any, by: Value | None = None) -> Value:
        return self._add(op.Gate(x, Value(x.width), self._activation(activation), by))

    def add(self, x: Value, more: Value, factor: float = 1.0) -> Value:
        return self._add(op.Add(x, Value(x.width), more, factor))

    def output(self, x: Value) -> Value:
        """Keep the next one of the hidden states that the model can show."""
        kept = sum(isinstance(operation, op.Keep) for operation in self._operations)
        self._operations.append(op.Keep(x, kept))
        return x

    def logits(
        self, x: Value, module: Any, divisor: float = 1.0, factor: float = 1.0, cap: float | None = None
    ) -> None:
        if cap == 0:
            raise UnknownModelError("the cap of its logits is 0")
        self._operations.append(op.Logits(x, self.linear(module), divisor, factor, cap or 0.0))

    def _add(self, operation: Any) -> Value:
        self._operations.append(operation)
        return operation.out

    def _activation(self, activation: Any) -> op.Activation:
        self._check(activation)
        cls: Any = type(activation)
        name = cls.__name__ if is_defined(cls) else f"{cls.__name__} of {cls.__module__}"
        arguments = {"GELUTanh": {"approximate": "tanh"}}.get(name)
        is_usual = getattr(getattr(activation, "act", None), "keywords", None) == arguments
        if name == "GELUActivation":
            is_usual = activation.act is nn.functional.gelu
        if name == "GELU":
            is_usual = activation.approximate == "none"
        if name not in ACTIVATIONS or not is_usual:
            raise UnknownModelError(f"its activation is {name}, which no operation computes")
        return ACTIVATIONS[name]

    # -- what passes need beside the program --

    @property
    def rotary_module(self) -> Any:
        """The module that makes cosines and sines, or None."""
        return getattr(self.inner, "rotary_emb", None)

    @property
    def _lacks_rotary(self) -> bool:
        return self.may_lack_rotary and self.rotary_module is None

    @property
    def reads_prompts(self) -> bool:
        """Whether the model computes the tokens of a prompt as it computes single ones."""
        return True

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Return cosines and sines of these positions, [1, n], as `Rotary` takes them: [n, rotary] each.

        like: of the model's dtype. name: of the rotary embedding.
        """
        return [table[0] for table in self.rotary_module(like, positions, *([name] if name else []))]

    def rotary_names(self) -> Sequence[str]:
        """The name of the rotary embedding of each layer, empty where one serves all, or none."""
        if self._lacks_rotary:
            return [""] * self.inner.config.num_hidden_layers
        types = self.own(self.rotary_module, "RotaryEmbedding").rope_type
        by_name = types if isinstance(types, dict) else {"": types}
        for name, rope_type in by_name.items():
            if "dynamic" in rope_type or (rope_type == "longrope" and name):
                raise UnknownModelError(f"its rotary embedding is {rope_type}, which changes with the length")
        config = self.inner.config
        return config.layer_types if isinstance(types, dict) else [""] * config.num_hidden_layers

    def placeholders(self) -> list[int]:
        """Return the tokens in whose place the model reads something else than their embedding."""
        return []

    def windows(self) -> list[int | None]:
        """Return how many positions each layer sees, by its masks in a prompt; None: all of them. 0: it caches none."""
        config = self.inner.config
        kinds = config.layer_types if self.slides == "by type" else ["sliding_attention"] * config.num_hidden_layers
        has_window = [self.slides != "never" and kind == "sliding_attention" for kind in kinds]
        return [config.sliding_window if slides else None for slides in has_window]
