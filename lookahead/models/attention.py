"""The attention that is registered with transformers in place of its own "sdpa", for models on a CPU.

Outside of the passes of the decoding loop (`decoding_pass`), and in passes that do not split attention, it is
transformers' own. In the others, `split_attention` computes it.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

from lookahead.compat import register_attention, registered_attention
from lookahead.decoding_pass import current_pass


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature that transformers asks of an attention function.

    query: [batch, heads, T, head_dim]. key, value: [batch, key heads, L + T, head_dim].
    attention_mask: [batch or 1, 1, T, L + T], additive, or True where seen. Or [batch or 1, 1, T, masked], additive,
    for the last keys, the step's own; all queries then see the keys before them. Or None.
    Returns [batch, T, heads, head_dim] and None.
    """
    decoding = None if torch.compiler.is_compiling() else current_pass()  # compiled code has torch's attention
    if decoding is None or not decoding.splits_attention:
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    from lookahead.models.split_attention import attend as attend_split  # fused passes do not need it

    return attend_split(module, query, key, value, attention_mask, dropout, scaling, **kwargs), None


def register() -> bool:
    """Register `attend` as "sdpa", unless other code has registered a function. Returns whether models get `attend`."""
    register_attention(attend)
    return registered_attention("sdpa") is attend


register()
