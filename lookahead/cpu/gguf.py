"""Modules that keep the blocks of a GGUF file, which our kernels multiply as they are.

transformers has such modules, too. They need a kernel that is published for the device; for CPUs there is none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lookahead.cpu.products import Format, Linear


def unpacked(blocks: torch.Tensor, format: Format) -> torch.Tensor:
    """The numbers of blocks, uint8 [rows, bytes]: float32 [rows, weights]."""
    from gguf import GGMLQuantizationType, dequantize  # which has read the file

    numbers = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[format.name])
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(blocks.device)


class _InBlocks(nn.Module):
    """A module whose weights are in blocks. Its state dict has the numbers, as that of any other model has."""

    parts: Mapping[str, Sequence[str]] = {"weight": ("weight",)}
    """Of each weight that other models have, the parameters here whose rows it has, one after the other."""
    formats: Mapping[str, Format]
    """Of each parameter in blocks."""

    def __init__(self, **formats: Format) -> None:
        super().__init__()
        self.formats = formats
        self.register_state_dict_post_hook(_save_numbers)
        self.register_load_state_dict_pre_hook(_load_numbers)

    @property
    def format(self) -> Format:
        """Of the one weight, where there is one."""
        return self.formats["weight"]

    def numbers(self, name: str) -> torch.Tensor:
        """A weight of other models, unpacked: float32 [..., outputs, inputs]."""
        parts = [unpacked(getattr(self, part).detach(), self.formats[part]) for part in self.parts[name]]
        return torch.cat(parts, -2)


def _save_numbers(module: _InBlocks, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Put the numbers of a module into a state dict, in the place of its blocks."""
    for name, parts in module.parts.items():
        for part in parts:
            del state[f"{prefix}{part}"]
        state[f"{prefix}{name}"] = module.numbers(name)


def _load_numbers(
    module: _InBlocks, state: dict[str, Any], prefix: str, metadata: object, strict: bool, *messages: list[str]
) -> None:
    """Let a module keep its blocks if the numbers in a state dict are theirs; else this is an error."""
    for name, parts in module.parts.items():
        given, whole = state.get(f"{prefix}{name}"), f"{prefix}{name}"
        if given is None or (given.dtype, given.shape) == (torch.uint8, getattr(module, parts[0]).shape):
            continue
        del state[whole]
        for part in parts:
            state[f"{prefix}{part}"] = getattr(module, part)  # copied to itself, which writes to no page of the file
        numbers = module.numbers(name)
        if given.shape != numbers.shape or not torch.equal(given.to(numbers), numbers):
            formats = " and ".join(sorted({module.formats[part].name for part in parts}))
            messages[-1].append(f"{whole} is in blocks of {formats}, which cannot hold these numbers")


def _multiply(input: torch.Tensor, linear: Linear) -> torch.Tensor:
    """What a layer in blocks makes of an input. Where our kernel does not serve, they are unpacked in each call."""
    from lookahead.cpu import gemm  # passes in one call do not need it

    if gemm.serves_blocks(input, linear):
        return gemm.multiply(input, [linear])[0]
    return nn.functional.linear(input, unpacked(linear.weight, linear.format).to(input.dtype), linear.bias)


class BlocksLinear(_InBlocks):
    """A linear layer whose weight is in blocks.

    On a CPU it multiplies with them by our kernel, in float32. Elsewhere, in other dtypes and where gradients are asked
    for, it unpacks them in each call.
    """

    def __init__(self, weight: nn.Parameter, format: Format, bias: nn.Parameter | None = None):
        """weight: uint8 [outputs, bytes of a row], of this format. bias: float32 [outputs], or None."""
        super().__init__(weight=format)
        self.weight, self.bias = weight, bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _multiply(input, Linear(self.weight, None, self.bias, format=self.format))

    def extra_repr(self) -> str:
        return f"{self.format.name}, bias={self.bias is not None}"


class BlocksExperts(_InBlocks):
    """Experts whose weights are in blocks, as a file has them: gates and what they are multiplied by lie apart.

    It computes what the experts of Qwen2-MoE, Qwen3-MoE and MiniMax-M2 compute.
    """

    parts: Mapping[str, Sequence[str]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    down_proj: nn.Parameter

    def __init__(self, act_fn: nn.Module, **weights: tuple[nn.Parameter, Format]):
        """weights: gate_proj, up_proj and down_proj, uint8 [experts, outputs, bytes of a row], and their formats."""
        super().__init__(**{name: format for name, (_, format) in weights.items()})
        self.act_fn = act_fn
        for name, (blocks, _) in weights.items():
            setattr(self, name, blocks)

    def linears(self, name: str) -> list[Linear]:
        """A layer of each expert, where the blocks lie."""
        return [Linear(blocks, format=self.formats[name]) for blocks in getattr(self, name).detach()]

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [rows, width]. experts, weights: [rows, top_k], those of each row."""
        out = torch.zeros_like(x)
        layers = [self.linears(name) for name in ("gate_proj", "up_proj", "down_proj")]
        for expert in experts.unique().tolist():
            gate, up, down = (of_all[expert] for of_all in layers)
            rows, places = torch.where(experts == expert)
            inner = self.act_fn(_multiply(x[rows], gate)) * _multiply(x[rows], up)
            out.index_add_(0, rows, (_multiply(inner, down) * weights[rows, places, None]).to(out.dtype))
        return out

    def extra_repr(self) -> str:
        return f"{len(self.down_proj)} in " + ", ".join(format.name for format in self.formats.values())


class BlocksEmbedding(_InBlocks):
    """An embedding whose rows are in blocks. They are unpacked to float32, or to what the model was cast to."""

    embed_scale: torch.Tensor | None

    def __init__(self, weight: nn.Parameter, format: Format, embed_scale: torch.Tensor | None = None):
        """weight: uint8 [tokens, bytes of a row], of this format. embed_scale: what rows are multiplied by, or None."""
        super().__init__(weight=format)
        self.weight, self.dtype = weight, torch.float32
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "BlocksEmbedding":
        """What `to`, `half` and the like call for each module. No tensor here is of the dtype that they change."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = unpacked(self.weight[ids.flatten()], self.format).view(*ids.shape, -1).to(self.dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)
