"""Matrices in panels, which a few rows are multiplied with as fast as memory gives them: `panels.cpp`."""

import ctypes
from functools import cache

import torch

from lookahead import native

OUTPUTS = 32  # of a panel, as in the source
_ARGUMENTS = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 4


def can_hold(weight: torch.Tensor) -> bool:
    """Whether panels of this weight, [outputs, inputs], can be multiplied with here.

    bfloat16 is left to others where the processor multiplies matrices of it by tiles (AMX): faster for many rows.
    """
    return weight.is_cpu and weight.dtype in _kernels() and weight.shape[1] % _together(weight) == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[panels, inputs / together, OUTPUTS, together] of a weight [outputs, inputs]; bfloat16 goes two together."""
    together = _together(weight)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % OUTPUTS))
    return padded.view(-1, OUTPUTS, weight.shape[1] // together, together).transpose(1, 2).contiguous()


def unpack(panels: torch.Tensor, outputs: int) -> torch.Tensor:
    """The weight, [outputs, inputs]."""
    return panels.transpose(1, 2).reshape(len(panels) * OUTPUTS, -1)[:outputs].clone()


def multiply(input: torch.Tensor, panels: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., outputs]: what a linear layer of the weight gives for an input [..., inputs] of its dtype, on the CPU.

    Summed in float32. Nothing is checked.
    """
    inputs = panels.shape[1] * panels.shape[3]
    input = input.contiguous()
    bias = None if bias is None else bias.to(input.dtype).contiguous()
    out = input.new_empty(*input.shape[:-1], outputs)
    _kernels()[input.dtype](
        input.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        input.numel() // inputs, inputs, outputs, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _together(weight: torch.Tensor) -> int:
    return 4 // weight.element_size()


@cache
def _kernels() -> dict[torch.dtype, "ctypes._CFuncPtr"]:
    """What multiplies, by dtype; without AVX-512 there are too few registers for the sums."""
    if not native.HAS_AVX512:
        return {}
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    dtypes = [torch.float32, torch.bfloat16] if native.HAS_BF16 and not has_tiles else [torch.float32]
    return native.kernels("panels", "multiply", dtypes, _ARGUMENTS)
