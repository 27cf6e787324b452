"""Parts of pages that several families have, and Llama has not."""

from itertools import pairwise
from typing import Any

import torch

from lookahead.cpu.elementwise import Scale
from lookahead.cpu.heads import Select
from lookahead.cpu.operations import Gate, Value
from lookahead.cpu.products import Linear
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import Page


def split(page: Page, module: Any, *widths: int) -> list[Linear]:
    """Return the outputs of a linear layer in parts of these widths, and what is left, as layers of their own."""
    joined, stops = page.linear(module), [0]
    for width in widths:
        stops.append(stops[-1] + width)
    return [joined.slice(start, stop) for start, stop in pairwise([*stops, joined.outputs])]


def embed_scaled(page: Page, module: Any, suffix: str) -> Value:
    """By a class that multiplies what it reads with a factor, which is rounded as its numbers are."""
    dtype = torch.float32 if module.weight.dtype == torch.uint8 else module.weight.dtype  # of blocks
    return page.embed(module, float(module.embed_scale.to(dtype)), suffix)


def qk_norm(page: Page, q: Value, k: Value, attention: Any) -> tuple[Value, Value]:
    """Norm queries and keys, as `Page.norm_heads` does."""
    q = page.norm_heads(q, attention.q_norm, attention.head_dim)
    return q, page.norm_heads(k, attention.k_norm, attention.head_dim)


def side_by_side(page: Llama, x: Value, layer: Any, name: str) -> Value:
    """A layer whose attention and MLP read the same input."""
    normed = page.norm(x, layer.input_layernorm)
    attended = page.attention(normed, layer.self_attn, name)
    return page.add(page.add(x, attended), page.mlp(normed, layer.mlp))


def select(page: Page, x: Value, size: int, group: int, first: int, taken: int = 1, repeats: int = 1) -> Value:
    """Select heads as `Select` does."""
    width = x.width // group * taken * repeats
    return page._add(Select(x, Value(width), size, group, first, taken, repeats))


def times(page: Page, x: Value, by: Value) -> Value:
    """The product of two values of one width."""
    return page._add(Gate(x, Value(x.width), "identity", by))


def scaled(page: Page, x: Value, factor: float) -> Value:
    """The product of a value and a number."""
    return page._add(Scale(x, Value(x.width), factor))
