"""Linear layers and embeddings whose weights are in blocks of a GGUF file, by our own classes or by transformers'."""

from typing import Any

import torch
from torch import nn

from lookahead.compat.gguf import gguf_class, gguf_name
from lookahead.cpu import operations as op
from lookahead.cpu.gguf import BlocksEmbedding, BlocksLinear
from lookahead.cpu.operations import Value
from lookahead.cpu.products import DecodingLinear, Format, Linear
from lookahead.models.families.page import Page, UnknownModelError


def linear(page: Page, module: Any) -> Linear:
    """`Page.linear`, of a module whose weight is uint8 [outputs, bytes]."""
    if type(module) is BlocksLinear:
        return Linear(page._check(module).weight, None, module.bias, format=module.format)
    if type(module) is not gguf_class("GgufLinear"):  # bytes of another kind
        return Linear.from_layer(page._plain(module, nn.Linear, DecodingLinear))
    if page._check(module).input_permutation is not None:
        raise UnknownModelError("the inputs of a layer in blocks of GGUF are permuted")
    return Linear(module.weight, None, module.bias, format=format_of(module.ggml_type))


def embed(page: Page, module: Any, factor: float, suffix: str) -> Value:
    """`Page.embed`, of a module whose weight is uint8 [tokens, bytes]."""
    if type(module) is BlocksEmbedding:
        if page._check(module).dtype != torch.float32:
            raise UnknownModelError("the rows of an embedding in blocks of GGUF are rounded")
        format = module.format
    elif type(module) is gguf_class("GgufEmbedding") and not suffix:
        format = format_of(page._check(module).ggml_type)
    else:
        raise UnknownModelError(f"a {type(module).__name__} stands where {suffix or 'Embedding'} is expected")
    width = Linear(module.weight, format=format).inputs
    return page._add(op.Embed(Value(width), module.weight, factor, format=format))


def format_of(ggml_type: int) -> Format:
    """The format of blocks of GGUF of this type."""
    name = gguf_name(ggml_type)
    if name not in Format.__members__:
        raise UnknownModelError(f"its weights are in {name}, a format of GGUF that our kernels do not read")
    return Format[name]
