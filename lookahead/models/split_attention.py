"""Split attention: a step's queries see all committed keys, so only the step's own keys need a mask.

    queries of the step  x  committed keys      all are seen: no mask
                         x  keys of the step    only ancestors are seen: mask [T, T]

Single sequences have our own kernel (`tree_attention`). Without it, the two parts are computed apart and joined by
their log-sum-exp, as in flash decoding. Query heads that share a key head are treated as further queries of it, so keys
and values are never repeated. Anything but steps and prompts is left to transformers' "sdpa".

On a GPU a step's time is that of its launches, and one call with a mask over all keys has fewer of them.
"""

from typing import Any

import torch
from torch import nn

from lookahead.compat.operators import flash_attention
from lookahead.cpu import tree_attention
from lookahead.decoding_pass import current_pass
from lookahead.models.attention import sdpa

SHORT_CONTEXT = 1024  # Cached keys. Up to this many, one part with a mask over all keys is quicker than two parts.
MAX_QUERIES = 512  # Queries of a key head in a step, at most. Only a prefill has more.


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute the attention of a pass that splits it. Arguments and result are as for `attention.attend`."""
    unusual = dropout or torch.is_autocast_enabled(query.device.type)
    unusual = unusual or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    unusual = unusual or (attention_mask is not None and attention_mask.shape[1] > 1)  # each head has its own bias
    unusual = unusual or key.shape[-1] != value.shape[-1]
    new, groups = query.shape[2], query.shape[1] // key.shape[1]
    held = key.shape[2] - new
    is_prefill = (attention_mask is None and new > 1) or groups * new > MAX_QUERIES
    is_own_prompt = is_prefill and not unusual and attention_mask is None and held == 0 and _is_causal(module, kwargs)
    if is_own_prompt and _kernel_serves(query, key, value, None):
        return tree_attention.attend(query, key, value, None, scaling)
    if unusual or is_prefill:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            attention_mask = nn.functional.pad(attention_mask, (key.shape[2] - attention_mask.shape[-1], 0))
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)[0]
    return attend_grouped(query, key, value, attention_mask, scaling)


def attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Compute the attention of a step by the quickest kernel. Arguments and result are as for `attend`."""
    if _kernel_serves(query, key, value, mask):
        return tree_attention.attend(query, key, value, mask, scaling)
    new, groups = query.shape[2], query.shape[1] // key.shape[1]
    held = key.shape[2] - (new if mask is None else mask.shape[-1])
    of_step = mask is not None and held > 0
    grouped = query.reshape(len(query), key.shape[1], groups * new, query.shape[3])
    in_one = of_step and held <= SHORT_CONTEXT
    if mask is not None:
        mask = repeated_mask(mask, groups, held if in_one else 0, query.dtype)
    if of_step and not in_one:
        out = _joined(
            *flash_attention(grouped, key[:, :, :held], value[:, :, :held], None, scaling),
            *flash_attention(grouped, key[:, :, held:], value[:, :, held:], mask, scaling),
        )
    else:
        out, _ = flash_attention(grouped, key, value, mask, scaling)
    return out.reshape(query.shape).transpose(1, 2).contiguous()


def _kernel_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    decoding = current_pass()
    return decoding is not None and decoding.uses_kernels and tree_attention.serves(query, key, value, mask)


def repeated_mask(mask: torch.Tensor, groups: int, held: int, dtype: torch.dtype) -> torch.Tensor:
    """Make the mask additive, in this dtype, for ``groups`` query heads, after ``held`` keys that all of them see.

    The result is kept with the mask, because all layers of a type ask for the same.
    """
    wanted = groups, held, dtype
    made_for, repeated = getattr(mask, "_repeated", (None, mask))
    if made_for != wanted:
        repeated = mask
        if mask.dtype == torch.bool:
            repeated = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        repeated = nn.functional.pad(repeated.to(dtype).repeat(1, 1, groups, 1), (held, 0))
        mask._repeated = wanted, repeated  # type: ignore[attr-defined]  # our own attribute
    return repeated


def _is_causal(module: nn.Module, kwargs: dict) -> bool:
    """Whether "sdpa" would take a pass without a mask as causal."""
    is_causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _joined(
    first: torch.Tensor, first_log_sum: torch.Tensor, second: torch.Tensor, second_log_sum: torch.Tensor
) -> torch.Tensor:
    """Join two parts: exp(l1 - l) first + exp(l2 - l) second, where l is the log-sum-exp of l1 and l2."""
    share = torch.sigmoid(second_log_sum - first_log_sum)[..., None]
    return torch.lerp(first.float(), second.float(), share).to(first.dtype)
