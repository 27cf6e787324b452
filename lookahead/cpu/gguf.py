"""Modules that keep the blocks of a GGUF file, which our kernels multiply as they are.

transformers has such modules, too. They need a kernel that is published for the device; for CPUs there is none.
"""

import numpy as np
import torch
from torch import nn

from lookahead.cpu.products import Format, Linear


def unpacked(blocks: torch.Tensor, form: Format) -> torch.Tensor:
    """The numbers of blocks, uint8 [rows, bytes]: float32 [rows, weights]."""
    from gguf import GGMLQuantizationType, dequantize  # which has read the file

    numbers = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[form.name])
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(blocks.device)


class BlocksLinear(nn.Module):
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


class BlocksEmbedding(nn.Module):
    """An embedding whose rows are in blocks. They are unpacked to float32."""

    embed_scale: torch.Tensor | None

    def __init__(self, weight: nn.Parameter, form: Format, embed_scale: torch.Tensor | None = None):
        """weight: uint8 [tokens, bytes of a row], of this form. embed_scale: what rows are multiplied by, or None."""
        super().__init__()
        self.weight, self.form = weight, form
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = unpacked(self.weight[ids.flatten()], self.form).view(*ids.shape, -1)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)
