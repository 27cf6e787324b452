"""Linear layers on a CPU, multiplied by a kernel of our own while lookahead decodes: `products.cpp`.

torch brings the weights of a linear layer into another order in each call. For the few rows of a decoding step, that
takes longer than to multiply. Our kernel takes the weights as they are, so nothing is copied, and whatever becomes of
them is seen. Layers that are given the same input, such as query, key and value, are multiplied at once.
"""

import ctypes
import math
from functools import cache

import torch
from torch import nn

from lookahead.compat import pre_hooks
from lookahead.cpu import native
from lookahead.decoding_pass import DecodingPass, current_pass

LEAST_WEIGHTS = 2**16  # that are multiplied at once; below, the call takes longer than torch's
MAX_ROWS = 64  # of an input; beyond, torch's product is faster
STRIDE = {torch.float32: 16, torch.bfloat16: 32}  # inputs that the kernel takes at once
# Layers of one module that are given the same input; if they are not, it costs time and nothing else.
GIVEN_THE_SAME = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_ARGUMENTS = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3 + [ctypes.c_void_p, ctypes.c_long]


class DecodingLinear(nn.Linear):
    """A linear layer whose product is our kernel's in passes of the decoding loop, and torch's everywhere else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a compiled pass has its own way (`compiled`)
            under_way = current_pass()
            if under_way is not None and under_way.uses_kernels:
                product = under_way.product(id(self), input)
                if product is not None:
                    return product
                weight, bias = self.weight, self.bias
                if _serves(input, weight, bias):
                    return self._multiplied(input, weight, bias, under_way)
        return nn.functional.linear(input, self.weight, self.bias)

    def _multiplied(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, under_way: DecodingPass
    ) -> torch.Tensor:
        """This layer's product; those of its siblings are kept until they ask."""
        siblings = under_way.siblings.get(id(self), ())
        if not siblings:  # alone
            return multiply(input, [weight], [bias])[0]
        layers = [layer for layer in siblings if layer is self or _is_as_plain(layer, input)]
        products = multiply(input, [layer.weight for layer in layers], [layer.bias for layer in layers])
        of_layers = {id(layer): product for layer, product in zip(layers, products, strict=True)}
        own = of_layers.pop(id(self))
        under_way.keep(input, of_layers)
        return own


def install(model: nn.Module) -> None:
    """Let the plain linear layers that are worth it be `DecodingLinear`. Parameters and hooks stay as they are."""
    for module in model.modules():
        for layers in _given_the_same(module, nn.Linear):
            if sum(layer.weight.numel() for layer in layers) >= LEAST_WEIGHTS:
                for layer in layers:
                    layer.__class__ = DecodingLinear
        if type(module) is nn.Linear and module.weight.numel() >= LEAST_WEIGHTS:
            module.__class__ = DecodingLinear


def siblings(model: nn.Module) -> dict[int, tuple[nn.Linear, ...]]:
    """For each `DecodingLinear`, by its id, the layers that are given the same input, itself included.

    To be asked in each call of generate(): the layers do not hold each other, and a model may get others.
    """
    groups = (layers for module in model.modules() for layers in _given_the_same(module, DecodingLinear))
    return {id(layer): layers for layers in groups for layer in layers}


def _given_the_same(module: nn.Module, kind: type[nn.Linear]) -> list[tuple[nn.Linear, ...]]:
    """Layers of a kind within a module that are given the same input."""
    children = dict(module.named_children())
    groups = [[layer for name in names if type(layer := children.get(name)) is kind] for names in GIVEN_THE_SAME]
    return [tuple(layers) for layers in groups if len(set(layers)) > 1]


def are_installed(model: nn.Module) -> bool:
    return any(type(module) is DecodingLinear for module in model.modules())


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        if type(module) is DecodingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]  # which is how it was made


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for this weight, [outputs, inputs]."""
    return (
        weight.is_cpu
        and weight.dtype in STRIDE
        and weight.shape[1] % STRIDE[weight.dtype] == 0
        and weight.is_contiguous()
        and weight.dtype in kernels()
    )


def multiply(input: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """[..., outputs] for each weight [outputs, inputs] and bias: what linear layers give for an input [..., inputs].

    All are of one dtype, on the CPU, weights and biases contiguous. Summed in float32. Nothing is checked.
    """
    input = input.contiguous()
    *shape, inputs = input.shape
    rows = math.prod(shape)
    matrices: list[int] = []  # for each a Matrix of the source
    outs: list[torch.Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        out = input.new_empty((*shape, weight.shape[0]))
        matrices += weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), weight.shape[0]
        outs.append(out)
    is_prepared = input.dtype == torch.bfloat16 and not native.HAS_BF16  # as floats, which need room
    room = input.new_empty(rows * inputs, dtype=torch.float32) if is_prepared else None
    kernels()[input.dtype](
        input.data_ptr(), (ctypes.c_int64 * len(matrices))(*matrices), len(weights), rows, inputs,
        None if room is None else room.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return outs


@cache
def kernels() -> native.Kernels:
    """What multiplies, by dtype; nothing where it cannot be built."""
    return native.kernels("products", "multiply", tuple(STRIDE), _ARGUMENTS)


def _is_as_plain(layer: nn.Linear, input: torch.Tensor) -> bool:
    """Whether a layer's product can be computed before it is called, with the same input. Hooks may write to that."""
    has_hooks = pre_hooks(layer) or "forward" in vars(layer)
    return type(layer) is DecodingLinear and not has_hooks and _serves(input, layer.weight, layer.bias)


def _serves(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `multiply` takes these; others are for torch."""
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


def _shapes(input: torch.Tensor, weights: list[torch.Tensor], biases: list) -> list[torch.Tensor]:
    return [input.new_empty(*input.shape[:-1], len(weight)) for weight in weights]


# For compiled passes. A plain definition, for what torch.library.custom_op adds to a call takes as long as a layer.
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("products(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.impl("products", multiply, "CPU")
_library.impl("products", _shapes, "Meta")
