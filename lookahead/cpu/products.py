"""Linear layers on a CPU use our own kernel, `products.cpp`, while lookahead decodes.

torch reorders the weights of a linear layer in each call. For the few rows of a step, this takes longer than the
product itself. Our kernel reads the weights as they are. So nothing is copied, and every change of a weight takes
effect. Layers with the same input, such as query, key and value, are computed in one call.
"""

import ctypes
import math
from functools import cache

import torch
from torch import nn

from lookahead.compat import pre_hooks
from lookahead.cpu import native
from lookahead.decoding_pass import DecodingPass, current_pass

MIN_WEIGHTS = 2**16  # Weights in one call, at least. Below this, torch is faster.
MAX_ROWS = 64  # Rows of an input, at most. Beyond this, torch is faster.
STRIDE = {torch.float32: 16, torch.bfloat16: 32}  # inputs that the kernel reads at a time
# Names of layers in a module that usually have the same input. If they do not, only time is lost.
SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_ARGUMENTS = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p, ctypes.c_long]


class DecodingLinear(nn.Linear):
    """A linear layer that uses our kernel in passes of the decoding loop, and torch everywhere else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # `passes.compiled` puts our products into its programs itself
            decoding = current_pass()
            if decoding is not None and decoding.uses_kernels:
                product = decoding.product(id(self), input)
                if product is not None:
                    return product
                weight, bias = self.weight, self.bias
                if _serves(input, weight, bias):
                    return self._multiply(input, weight, bias, decoding)
        return nn.functional.linear(input, self.weight, self.bias)

    def _multiply(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, decoding: DecodingPass
    ) -> torch.Tensor:
        """Return this layer's product. The products of its siblings are kept until they are called."""
        siblings = decoding.siblings.get(id(self), ())
        if not siblings:
            return multiply(input, [weight], [bias])[0]
        layers = [layer for layer in siblings if layer is self or _can_be_early(layer, input)]
        products = multiply(input, [layer.weight for layer in layers], [layer.bias for layer in layers])
        of_layers = {id(layer): product for layer, product in zip(layers, products, strict=True)}
        own = of_layers.pop(id(self))
        decoding.keep(input, of_layers)
        return own


def install(model: nn.Module) -> None:
    """Make the larger plain linear layers `DecodingLinear`. Parameters and hooks stay as they are."""
    for module in model.modules():
        for layers in _same_input(module, nn.Linear):
            if sum(layer.weight.numel() for layer in layers) >= MIN_WEIGHTS:
                for layer in layers:
                    layer.__class__ = DecodingLinear
        if type(module) is nn.Linear and module.weight.numel() >= MIN_WEIGHTS:
            module.__class__ = DecodingLinear


def siblings(model: nn.Module) -> dict[int, tuple[nn.Linear, ...]]:
    """Return, by the id of each `DecodingLinear`, the layers with the same input, itself included.

    Called anew for each generate(): the layers do not refer to each other, and a model's layers may be replaced.
    """
    groups = (layers for module in model.modules() for layers in _same_input(module, DecodingLinear))
    return {id(layer): layers for layers in groups for layer in layers}


def _same_input(module: nn.Module, kind: type[nn.Linear]) -> list[tuple[nn.Linear, ...]]:
    """Return groups of a module's layers, all of this class, that have the same input."""
    children = dict(module.named_children())
    groups = [[layer for name in names if type(layer := children.get(name)) is kind] for names in SAME_INPUT]
    return [tuple(layers) for layers in groups if len(set(layers)) > 1]


def are_installed(model: nn.Module) -> bool:
    return any(type(module) is DecodingLinear for module in model.modules())


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        if type(module) is DecodingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]  # it was made as an nn.Linear


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether our kernel takes this weight, [outputs, inputs]."""
    return (
        weight.is_cpu
        and weight.dtype in STRIDE
        and weight.shape[1] % STRIDE[weight.dtype] == 0
        and weight.is_contiguous()
        and weight.dtype in kernels()
    )


def multiply(input: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the product [..., outputs] of the input [..., inputs] with each weight [outputs, inputs], plus its bias.

    All tensors are on the CPU and have one dtype. Weights and biases are contiguous. Sums are in float32. Nothing is
    checked.
    """
    input = input.contiguous()
    *shape, inputs = input.shape
    rows = math.prod(shape)
    matrices: list[int] = []  # the fields of a Matrix in products.cpp, for each weight
    outs: list[torch.Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        out = input.new_empty((*shape, weight.shape[0]))
        matrices += weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), weight.shape[0]
        outs.append(out)
    is_prepared = input.dtype == torch.bfloat16 and not native.HAS_BF16  # the kernel first converts the input to floats
    room = input.new_empty(rows * inputs, dtype=torch.float32) if is_prepared else None
    kernels()[input.dtype](
        input.data_ptr(), (ctypes.c_int64 * len(matrices))(*matrices), len(weights), rows, inputs,
        None if room is None else room.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return outs


@cache
def kernels() -> native.Kernels:
    """The kernel for each dtype; empty if it cannot be built."""
    return native.kernels("products", "multiply", tuple(STRIDE), _ARGUMENTS)


def _can_be_early(layer: nn.Linear, input: torch.Tensor) -> bool:
    """Whether the product can be computed before the layer is called. A hook or another forward could change it."""
    has_hooks = pre_hooks(layer) or "forward" in vars(layer)
    return type(layer) is DecodingLinear and not has_hooks and _serves(input, layer.weight, layer.bias)


def _serves(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `multiply` takes these tensors. torch takes all others."""
    return (
        type(input) is torch.Tensor
        and type(weight) in (nn.Parameter, torch.Tensor)
        and (bias is None or _is_plain_bias(bias, weight))
        and input.dtype == weight.dtype
        and input.is_cpu
        and input.shape[-1] == weight.shape[1]
        and 0 < input.numel() <= MAX_ROWS * input.shape[-1]
        and can_multiply(weight)
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain_bias(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    is_plain = type(bias) in (nn.Parameter, torch.Tensor)
    return is_plain and bias.dtype == weight.dtype and bias.is_cpu and bias.is_contiguous()


def _empty_products(input: torch.Tensor, weights: list[torch.Tensor], biases: list) -> list[torch.Tensor]:
    return [input.new_empty(*input.shape[:-1], len(weight)) for weight in weights]


# For compiled passes. Defined by hand, because the wrapper of torch.library.custom_op takes as long as a small layer.
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("products(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.impl("products", multiply, "CPU")
_library.impl("products", _empty_products, "Meta")
