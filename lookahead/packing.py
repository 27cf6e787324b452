"""Weights of linear layers, reordered once into the order that a CPU multiplies them in.

A plain ``nn.Linear`` hands over its weight row by row, and for the few rows of a decoding step it then takes longer to
bring it into order than to multiply. Weights go into panels of our own (`panels`), or, where those cannot be used, into
the blocks of oneDNN. A packed weight takes the place of the plain one, so memory does not grow, except where other
modules need the plain one, too: a tied embedding stays, and the output layer gets a packed copy beside it.

Layers that are given the same input, such as query, key and value, are packed side by side as one matrix, for one
product takes less time than three.
"""

import copy
from collections import Counter
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lookahead import panels

ROWS = 16  # of an input that oneDNN's blocks are made for; made for one row, they are half as fast for several
LEAST_WEIGHTS = 2**16  # in a matrix; below, the call takes longer than a plain product
# Layers of one module that are given the same input; if they are not, it costs time and nothing else.
GIVEN_THE_SAME = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_NO_PARTS = None, None, {}
_READ_ONLY = (
    "the weights of this model are packed for inference on the CPU and cannot be written to: change them after "
    "lookahead.unwrap(model), or wrap it with LookaheadConfig(pack_weights=False)"
)


class PackedLinear(nn.Linear):
    """A linear layer for inference. Its ``weight`` is a `PackedWeight` unless it is shared.

    Moved to where it cannot be packed, the layer is plain again. Moved, loaded or given another weight, it is packed by
    itself.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product, place = self._product, self._place
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (input, weight, bias)):
            return _WithoutGradient.apply(input.new_empty(0).requires_grad_(), input, self)
        if not product.takes(input) or not product.is_of(place, weight, bias) or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, weight, bias)
        if torch.compiler.is_compiling():  # whose compiler takes a packed weight for a plain one
            whole = torch.ops.lookahead.packed_linear(input, product.handle, product.outputs)
            return whole[..., product.rows[place]]
        return product.part(input, place)

    def __setattr__(self, name: str, value) -> None:
        if name != "weight":
            return super().__setattr__(name, value)
        _unpack(self)
        self.weight = value
        _pack([self], shared=True)  # whoever gave it may hold it, too

    def _apply(self, fn, recurse: bool = True) -> nn.Linear:
        shared = _unpack(self)
        nn.Linear._apply(self, fn, recurse)
        _pack([self], shared)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = _plain(destination[prefix + "weight"])

    def _load_from_state_dict(self, *args) -> None:
        shared = _unpack(self)
        nn.Linear._load_from_state_dict(self, *args)
        _pack([self], shared)


class _WithoutGradient(torch.autograd.Function):
    """What a packed layer gives, and an error in the place of a gradient."""

    @staticmethod
    def forward(ctx, wants_gradient: torch.Tensor, input: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        return PackedLinear.forward(layer, input)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        raise RuntimeError(
            "the weights of this model are packed for inference on the CPU and give no gradients: train it after "
            "lookahead.unwrap(model), or wrap it with LookaheadConfig(pack_weights=False)"
        )


class Product:
    """Layers that are given the same input, as one packed matrix. Copies and pickles hold the plain weights."""

    def __init__(self, layers: list[nn.Linear], shared: bool):
        """shared: whether the weight, of a single layer then, is one that other modules hold, too."""
        weights = [layer.weight.detach() for layer in layers]
        ends = torch.tensor([len(weight) for weight in weights]).cumsum(0).tolist()
        self.rows = [slice(end - len(weight), end) for end, weight in zip(ends, weights, strict=True)]
        """Of the matrix, for each layer."""
        self.outputs = ends[-1]
        self.inputs, self.dtype = weights[0].shape[1], weights[0].dtype
        self.biases = [layer.bias for layer in layers]
        self._shared = layers[0].weight if shared else None
        self._pack(torch.cat(weights) if len(weights) > 1 else weights[0])
        handle = _last_handles.get(layers[0])  # of when they were packed before, so that nothing is compiled anew
        self._enlist(next(_handles) if handle is None or handle in _products else handle)
        _last_handles[layers[0]] = self.handle

    def _pack(self, weight: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._in_panels = panels.can_hold(weight)
            if self._in_panels:
                self._matrix = panels.pack(weight)
            elif _can_block(weight):
                self._matrix = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            else:
                self._matrix = weight
        is_watched = self._shared is not None and not self._shared.is_inference()
        self._version = self._shared._version if is_watched else None
        self._fingerprint = None if self._shared is None else _fingerprint(self._shared)

    def look_at_shared_weight(self) -> None:
        """Pack it anew if it is not what was packed."""
        if self._shared is not None and _fingerprint(self._shared) != self._fingerprint:
            self._pack(self._shared.detach())

    def _enlist(self, handle: int) -> None:
        self._parts: tuple[torch.Tensor | None, int | None, dict[int, torch.Tensor]] = _NO_PARTS
        self.handle = handle
        """By which compiled passes know it."""
        _products[handle] = self

    def is_of(self, place: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether a layer's weight and bias are those that were packed; others may have been put into their place."""
        packed = self if self._shared is None else self._shared
        return getattr(weight, "_product", weight) is packed and bias is self.biases[place]

    def takes(self, input: torch.Tensor) -> bool:
        """Whether an input is one that can be multiplied; others, such as those of tracers, are for plain layers."""
        compiling = torch.compiler.is_compiling()
        is_real = compiling or (type(input) is torch.Tensor and not torch.jit.is_tracing())
        return is_real and input.dtype == self.dtype and input.shape[-1] == self.inputs and input.is_cpu

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[..., outputs], of all layers."""
        if self._version is not None and self._version != self._shared._version:  # a shared weight was written to
            self._pack(self._shared.detach())
        bias = self.biases[0]
        if bias is not None and len(self.biases) > 1:
            bias = torch.cat(self.biases)
        if self._in_panels:
            return panels.multiply(input, self._matrix, self.outputs, bias)
        if self._matrix.layout == torch.strided:
            return nn.functional.linear(input, self._matrix, bias)
        return _linear(input, self._matrix, bias, "none", [], "")

    def part(self, input: torch.Tensor, place: int) -> torch.Tensor:
        """[..., outputs of one layer]. The other layers' are kept until they ask for them, of the same input."""
        if len(self.rows) == 1:
            return self(input)
        of, version, parts = self._parts
        now = None if input.is_inference() else input._version
        part = parts.pop(place, None) if of is input and version == now else None
        if part is None:
            whole = self(input)
            parts = {i: whole[..., rows] for i, rows in enumerate(self.rows)}
            self._parts = input, now, parts
            part = parts.pop(place)
        if not parts:
            self._parts = _NO_PARTS
        return part

    def plain(self) -> torch.Tensor:
        """[outputs, inputs], as it was before it was packed."""
        if self._in_panels:
            return panels.unpack(self._matrix, self.outputs)
        return self._matrix if self._matrix.layout == torch.strided else self._matrix.to_dense()

    def __getstate__(self) -> dict:
        state = self.__dict__ | {"_matrix": self.plain()}
        del state["_version"], state["_fingerprint"], state["_parts"], state["handle"]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self._pack(state["_matrix"])
        self._enlist(next(_handles))


class ReadOnly(torch.Tensor):
    """What reads as a tensor that it stands for, and raises RuntimeError where it is written to; so do its views."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> "ReadOnly":
        view = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=plain.device
        )
        view._plain = plain
        return view

    def plain(self) -> torch.Tensor:
        return self._plain

    def numpy(self, **options) -> np.ndarray:
        array = self.plain().numpy(**options)
        array.flags.writeable = False
        return array

    def tolist(self) -> list:
        return self.plain().tolist()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(_READ_ONLY)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        for number, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.is_write and any(isinstance(x, ReadOnly) for x in tree_leaves(value)):
                raise RuntimeError(_READ_ONLY)
        if function is torch.ops.aten.detach.default:
            return args[0].detached()
        args, kwargs = tree_map_only(ReadOnly, lambda x: x.plain(), (args, kwargs))
        result = function(*args, **kwargs)
        is_view = not schema.is_mutable and any(returned.alias_info for returned in schema.returns)
        return tree_map_only(torch.Tensor, ReadOnly, result) if is_view else result

    def detached(self) -> "ReadOnly":
        return ReadOnly(self._plain)


class PackedWeight(ReadOnly):
    """The weight of a packed layer, [outputs, inputs]: whoever reads it is given the plain one, made anew each time."""

    @staticmethod
    def __new__(cls, product: Product, place: int, original: nn.Parameter) -> "PackedWeight":
        """original: the parameter that it stands for, empty meanwhile; whether it takes gradients is asked of it."""
        rows = product.rows[place]
        shape = rows.stop - rows.start, product.inputs
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=product.dtype, device="cpu")
        weight._product, weight._place, weight._original = product, place, original
        return weight

    def plain(self) -> torch.Tensor:
        whole = self._product.plain()
        return whole if len(self._product.rows) == 1 else whole[self._product.rows[self._place]].clone()

    def detached(self) -> "PackedWeight":
        return PackedWeight(self._product, self._place, self._original)

    @property
    def requires_grad(self) -> bool:
        return self._original.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._original.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> "PackedWeight":
        self.requires_grad = requires_grad
        return self

    def restored(self) -> nn.Parameter:
        """The parameter that it stands for, filled again."""
        with torch.inference_mode(False), torch.no_grad():
            self._original.data = self.plain()
        return self._original

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        product, original = copy.deepcopy((self._product, self._original), memo)
        memo[id(self)] = copied = _parameter(product, self._place, original)
        return copied

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _parameter, (self._product, self._place, self._original)


def _parameter(product: Product, place: int, original: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(PackedWeight(product, place, original), original.requires_grad)


def pack(model: nn.Module) -> nn.Module:
    """Pack what can be packed of a model on the CPU; returns ``model``.

    That is: plain linear layers in float32, or in bfloat16 where the CPU has instructions for it. Layers that are
    adapted (PEFT), quantized, or driven by somebody else (accelerate) stay as they are.
    """
    taken = {id(module.base_layer) for module in model.modules() if hasattr(module, "base_layer")}
    taken |= {id(module) for module in model.modules() if "forward" in vars(module)}
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())

    def is_free(layer: nn.Module | None) -> bool:
        return type(layer) is nn.Linear and id(layer) not in taken

    for module in model.modules():
        for names in GIVEN_THE_SAME:
            layers = [layer for name in names if is_free(layer := module._modules.get(name))]
            alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
            are_apart = len(set(layers)) == len(layers) and all(owners[id(layer.weight)] == 1 for layer in layers)
            if len(alike) == 1 and are_apart:
                _pack(layers)
    for module in model.modules():
        if is_free(module):
            _pack([module], shared=owners[id(module.weight)] > 1)
    return model


def unpack(model: nn.Module) -> nn.Module:
    """Undo `pack`: the parameters are those that they were, for an optimizer, too. Returns ``model``."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            _unpack(module)
    return model


def _can_pack(weight: torch.Tensor) -> bool:
    return panels.can_hold(weight) or _can_block(weight)


def _can_block(weight: torch.Tensor) -> bool:
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.backends.mkldnn.is_available() and supported and weight.is_cpu


def _pack(layers: list[nn.Linear], shared: bool = False) -> None:
    """Pack plain layers as one matrix, if they can be packed and are large enough."""
    weights = [layer.weight for layer in layers]
    can = all(type(weight) is nn.Parameter and _can_pack(weight) for weight in weights)
    if not can or sum(weight.numel() for weight in weights) < LEAST_WEIGHTS:
        return
    product = Product(layers, shared)
    for place, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        layer._product, layer._place = product, place
        if not shared:
            with torch.inference_mode(False):
                empty = weight.new_empty(0)
                if weight.is_inference():  # which can never be filled again
                    weight = nn.Parameter(empty, weight.requires_grad)
                weight.data = empty  # whoever holds it finds it filled again when the layer is unpacked
            layer.weight = _parameter(product, place, weight)
        layer.__class__ = PackedLinear


def _unpack(layer: PackedLinear) -> bool:
    """Make a layer a plain one; whether its weight is shared."""
    shared = not isinstance(layer.weight, PackedWeight)
    layer.__class__ = nn.Linear
    if not shared:
        layer.weight = layer.weight.restored()
    del layer._product, layer._place
    return shared


def _fingerprint(weight: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(weight.detach().contiguous().view(torch.uint8).numpy())


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.plain() if isinstance(weight, PackedWeight) else weight


def look_at_shared_weights(model: nn.Module) -> None:
    """Pack anew the layers whose weight others share, and wrote to in a way that leaves no trace (``weight.data``)."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module._product.look_at_shared_weight()


_products: WeakValueDictionary[int, Product] = WeakValueDictionary()
_last_handles: WeakKeyDictionary[nn.Linear, int] = WeakKeyDictionary()
_handles = count()


def _multiply(input: torch.Tensor, handle: int, outputs: int) -> torch.Tensor:
    return _products[handle](input)


_linear = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("packed_linear(Tensor input, int handle, int outputs) -> Tensor")
_library.impl("packed_linear", _multiply, "CPU")
_library.impl("packed_linear", lambda input, handle, outputs: input.new_empty(*input.shape[:-1], outputs), "Meta")
