"""Weights of linear layers, reordered once into the blocks that oneDNN multiplies by, for models on a CPU.

A plain ``nn.Linear`` hands over its weight row by row, and for the few rows of a decoding step it then takes longer to
bring it into order than to multiply. A packed weight takes the place of the plain one, so memory does not grow, except
where other modules need the plain one, too: a tied embedding stays, and the output layer gets a packed copy beside it.
"""

from collections import Counter
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import nn

ROWS = 16  # of an input that weights are packed for; packed for one row, they are half as fast for several
LEAST_WEIGHTS = 2**16  # in a layer; below, oneDNN's call takes longer than a plain product


class PackedLinear(nn.Linear):
    """A linear layer for inference. Its ``weight`` is packed (of the layout ``torch._mkldnn``) unless it is shared.

    State dicts, copies and pickles hold the plain weight. Moved to where it cannot be packed, the layer is plain again.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            return _WithoutGradient.apply(input, self)
        if input.dtype != self._packed.dtype or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, _plain(self.weight), self.bias)
        if torch.compiler.is_compiling():  # whose compiler takes a packed weight for a plain one
            return torch.ops.lookahead.packed_linear(input, self._handle, self.out_features)
        return _multiply(input, self._handle)

    def _apply(self, fn, recurse: bool = True) -> nn.Linear:
        shared = _unpack(self)
        nn.Linear._apply(self, fn, recurse)
        return _pack(self, shared)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = _plain(destination[prefix + "weight"])

    def _load_from_state_dict(self, *args) -> None:
        shared = _unpack(self)
        nn.Linear._load_from_state_dict(self, *args)
        _pack(self, shared)

    def __getstate__(self) -> dict:
        weight = self.weight if self.weight.layout == torch.strided else nn.Parameter(_plain(self.weight), False)
        state = self.__dict__ | {"_parameters": self._parameters | {"weight": weight}, "_version": None}
        del state["_packed"], state["_handle"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _pack(self, shared=self._shared)


class _WithoutGradient(torch.autograd.Function):
    """What a packed layer gives, and an error in the place of a gradient."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        return layer(input.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        raise RuntimeError(
            "the weights of this model are packed for inference on the CPU and give no gradients: train it after "
            "lookahead.unwrap(model), or wrap it with LookaheadConfig(pack_weights=False)"
        )


def pack(model: nn.Module) -> nn.Module:
    """Pack what can be packed of a model on the CPU; returns ``model``.

    That is: plain linear layers in float32, or in bfloat16 where the CPU has instructions for it. Layers that are
    adapted (PEFT), quantized, or driven by somebody else (accelerate) stay as they are.
    """
    taken = {id(module.base_layer) for module in model.modules() if hasattr(module, "base_layer")}
    taken |= {id(module) for module in model.modules() if "forward" in vars(module)}
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in taken and module.weight.numel() >= LEAST_WEIGHTS:
            _pack(module, shared=owners[id(module.weight)] > 1)
    return model


def unpack(model: nn.Module) -> nn.Module:
    """Undo `pack`: the weights are what they were, those that were not shared in new parameters. Returns ``model``."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            _unpack(module)
    return model


def _pack(layer: nn.Linear, shared: bool) -> nn.Linear:
    """Pack a layer if its weight can be packed; if not, it is, or becomes, a plain one."""
    weight = layer.weight
    layer.__class__ = nn.Linear
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not (torch.backends.mkldnn.is_available() and supported and type(weight) is nn.Parameter and weight.is_cpu):
        return layer
    with torch.inference_mode(False), torch.no_grad():
        layer._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    layer._shared = shared
    layer._version = weight._version if shared and not weight.is_inference() else None
    layer._takes_gradients = weight.requires_grad
    layer._handle = next(_handles)
    _layers[layer._handle] = layer
    if not shared:
        layer.weight = nn.Parameter(layer._packed, requires_grad=False)
    layer.__class__ = PackedLinear
    return layer


def _unpack(layer: PackedLinear) -> bool:
    """Make a layer a plain one; whether its weight is shared."""
    if layer.weight.layout != torch.strided:
        layer.weight = nn.Parameter(_plain(layer.weight), layer._takes_gradients)
    layer.__class__ = nn.Linear
    shared = layer._shared
    del layer._packed, layer._shared, layer._version, layer._takes_gradients, layer._handle
    return shared


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.layout == torch.strided else weight.detach().to_dense()


_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_handles = count()


def _multiply(input: torch.Tensor, handle: int, outputs: int = 0) -> torch.Tensor:
    layer = _layers[handle]
    if layer._version is not None and layer._version != layer.weight._version:  # a shared weight was written to
        _pack(layer, shared=True)
    return _linear(input, layer._packed, layer.bias, "none", [], "")


_linear = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("packed_linear(Tensor input, int handle, int outputs) -> Tensor")
_library.impl("packed_linear", _multiply, "CPU")
_library.impl("packed_linear", lambda input, handle, outputs: input.new_empty(*input.shape[:-1], outputs), "Meta")
