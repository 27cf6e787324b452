"""Private or unstable names of quantized weights, each behind a function."""

import torch


def quantization_of(tensor: torch.Tensor) -> str:
    """How a tensor that wraps others is quantized: kinds and dtypes of its parts and its settings, without numbers."""
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # `is_plain` does not hold
    inner = [(name, getattr(tensor, name)) for name in names]
    return repr(([(name, type(part).__name__, getattr(part, "dtype", None)) for name, part in inner], settings))


_OF_ACTIVATIONS = "act_quant_kwargs", "act_pre_scale", "activation_quantization"


def int8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The int8 numbers [outputs, inputs] and the scales of a weight quantized by torchao; None for other weights.

    Scales [outputs] apply to the sums. With scales [outputs, groups], torchao computes the weights of each group of
    inputs, rounds them to the weight's dtype and multiplies by these. Weights are refused if activations are scaled or
    quantized too. Grouped weights must be on the CPU and have no zero points other than 0.
    """
    kind = type(weight).__name__
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor") or not type(weight).__module__.startswith("torchao."):
        return None
    if any(getattr(weight, name, None) is not None for name in _OF_ACTIVATIONS):
        return None
    numbers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if numbers is None or scales is None or numbers.ndim != 2 or scales.ndim != 2 or len(scales) != len(numbers):
        return None
    if kind == "Int8Tensor" and scales.shape[1] == 1:
        return numbers, scales[:, 0]
    zeros = getattr(weight, "zero_point", None)
    if not numbers.is_cpu or numbers.shape[1] % scales.shape[1] or (zeros is not None and zeros.numpy().any()):
        return None
    return numbers, scales
