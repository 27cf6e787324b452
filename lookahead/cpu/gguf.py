"""Modules that keep the blocks of a GGUF file, which our kernels multiply as they are.

transformers has such modules, too. They need a kernel that is published for the device; for CPUs there is none.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead.cpu.products import Format, Linear


def unpacked(blocks: torch.Tensor, form: Format) -> torch.Tensor:
    """The numbers of blocks, uint8 [rows, bytes]: float32 [rows, weights]."""
    from gguf import GGMLQuantizationType, dequantize  # which has read the file

    numbers = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[form.name])
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(blocks.device)


class _InBlocks(nn.Module):
    """A module whose weight is in blocks. Its state dict has the numbers, as that of any other model has."""

    weight: nn.Parameter
    form: Format

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_save_numbers)
        self.register_load_state_dict_pre_hook(_load_numbers)


def _save_numbers(module: _InBlocks, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Put the numbers of a module into a state dict, in the place of its blocks."""
    state[f"{prefix}weight"] = unpacked(module.weight.detach(), module.form)


def _load_numbers(
    module: _InBlocks, state: dict[str, Any], prefix: str, metadata: object, strict: bool, *messages: list[str]
) -> None:
    """Let a module keep its blocks if the numbers in a state dict are theirs; else this is an error."""
    given, name = state.get(f"{prefix}weight"), f"{prefix}weight"
    if given is None or (given.dtype, given.shape) == (torch.uint8, module.weight.shape):
        return
    state[name] = module.weight  # copied to itself, which writes to no page of the file
    numbers = unpacked(module.weight.detach(), module.form)
    if given.shape != numbers.shape or not torch.equal(given.to(numbers), numbers):
        messages[-1].append(f"{name} is in blocks of {module.form.name}, which cannot hold these numbers")


class BlocksLinear(_InBlocks):
    """A linear layer whose weight is in blocks.

    On a CPU it multiplies with them by our kernel, in float32. Elsewhere, in other dtypes and where gradients are asked
    for, it unpacks them in each call.
    """

    def __init__(self, weight: nn.Parameter, form: Format, bias: nn.Parameter | None = None):
        """weight: uint8 [outputs, bytes of a row], of this form. bias: float32 [outputs], or None."""
        super().__init__()
        self.weight, self.form, self.bias = weight, form, bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from lookahead.cpu import gemm  # passes in one call need it not

        linear = Linear(self.weight, None, self.bias, blocks=self.form)
        if gemm.serves_blocks(input, linear):
            return gemm.multiply(input, [linear])[0]
        return nn.functional.linear(input, unpacked(self.weight, self.form).to(input.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.form.name}, bias={self.bias is not None}"


class BlocksEmbedding(_InBlocks):
    """An embedding whose rows are in blocks. They are unpacked to float32, or to what the model was cast to."""

    embed_scale: torch.Tensor | None

    def __init__(self, weight: nn.Parameter, form: Format, embed_scale: torch.Tensor | None = None):
        """weight: uint8 [tokens, bytes of a row], of this form. embed_scale: what rows are multiplied by, or None."""
        super().__init__()
        self.weight, self.form, self.dtype = weight, form, torch.float32
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "BlocksEmbedding":
        """What `to`, `half` and the like call for each module. No tensor here is of the dtype that they change."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = unpacked(self.weight[ids.flatten()], self.form).view(*ids.shape, -1).to(self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)
