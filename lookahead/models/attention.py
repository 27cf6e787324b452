"""Split attention: a step's queries see all committed keys, so only the step's own keys need a mask.

    queries of the step  x  committed keys      seen by all: no mask
                         x  keys of the step    ancestors alone, [T, T]

A kernel of ours takes a single sequence on a CPU (`tree_attention`). Elsewhere, the two parts are joined by their
log-sum-exp, as in flash decoding, and query heads that share a key head are taken as further queries of it, so keys
and values are never repeated. The function is registered with transformers in the place of "sdpa". Outside of passes of
the decoding loop (`decoding_pass`), and for anything but a step or a prompt, it is "sdpa".
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lookahead.compat import flash_attention, registered_attention
from lookahead.cpu import tree_attention
from lookahead.decoding_pass import current_pass, is_traced

SHORT = 1024  # keys up to which one part with a mask over all of them is quicker than two
MOST_QUERIES = 512  # of a key head; prefills are longer


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
    """What transformers calls an attention function.

    query: [batch, heads, T, head_dim]; key, value: [batch, key heads, L + T, head_dim].
    attention_mask: [batch or 1, 1, T, L + T], additive or True where seen; or additive [batch or 1, 1, T, masked], of
    the last keys, which are the step's own, when all keys before them are seen; or None. While a pass is traced for
    `passes.compiled`, nobody reads it, and key and value are those of the step alone.
    Returns [batch, T, heads, head_dim].
    """
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:
        is_ours = is_traced()
    else:
        under_way = current_pass()
        is_ours = under_way is not None and under_way.splits_attention
    if not is_ours:
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    unusual = dropout or torch.is_autocast_enabled(query.device.type)
    unusual = unusual or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    unusual = unusual or (attention_mask is not None and attention_mask.shape[1] > 1)  # a bias of each head
    unusual = unusual or key.shape[-1] != value.shape[-1] or not _has_kernel(query)
    if is_compiling:
        if unusual:
            raise NotImplementedError("this attention is none that compiled passes know")
        return torch.ops.lookahead.attend(query, key, value, module.layer_idx, scaling), None
    new, groups = query.shape[2], query.shape[1] // key.shape[1]
    held = key.shape[2] - new
    is_prefill = (attention_mask is None and new > 1) or groups * new > MOST_QUERIES
    is_whole = is_prefill and not unusual and attention_mask is None and held == 0 and _is_causal(module, kwargs)
    if is_whole and _kernel_serves(query, key, value, None):
        return tree_attention.attend(query, key, value, None, scaling), None
    if unusual or is_prefill:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            attention_mask = nn.functional.pad(attention_mask, (key.shape[2] - attention_mask.shape[-1], 0))
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return attend_grouped(query, key, value, attention_mask, scaling), None


def attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """The attention of a step, by kernels of our choice; arguments and result as of `attend`."""
    if _kernel_serves(query, key, value, mask):
        return tree_attention.attend(query, key, value, mask, scaling)
    new, groups = query.shape[2], query.shape[1] // key.shape[1]
    held = key.shape[2] - (new if mask is None else mask.shape[-1])
    of_step = mask is not None and held > 0
    grouped = query.reshape(len(query), key.shape[1], groups * new, query.shape[3])
    in_one = of_step and query.device.type == "cpu" and held <= SHORT
    if mask is not None:
        mask = _repeated_mask(mask, groups, held if in_one else 0, query.dtype)
    if of_step and not in_one:
        out = _joined(
            *_part(grouped, key[:, :, :held], value[:, :, :held], None, scaling),
            *_part(grouped, key[:, :, held:], value[:, :, held:], mask, scaling),
        )
    else:
        out, _ = _part(grouped, key, value, mask, scaling)
    return out.reshape(query.shape).transpose(1, 2).contiguous()


def _kernel_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    under_way = current_pass()
    return under_way is not None and under_way.uses_kernels and tree_attention.serves(query, key, value, mask)


def _repeated_mask(mask: torch.Tensor, groups: int, held: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask, additive and of this dtype, for ``groups`` query heads that share a key head, behind ``held`` keys that
    all see. Kept with the mask, for all layers of a kind ask for the same.
    """
    wanted = groups, held, dtype
    made_for, repeated = getattr(mask, "_repeated", (None, mask))
    if made_for != wanted:
        repeated = mask
        if mask.dtype == torch.bool:
            repeated = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        repeated = nn.functional.pad(repeated.to(dtype).repeat(1, 1, groups, 1), (held, 0))
        mask._repeated = wanted, repeated  # type: ignore[attr-defined]  # of our own
    return repeated


def _is_causal(module: nn.Module, kwargs: dict) -> bool:
    """Whether a pass without a mask is causal, as "sdpa" decides it."""
    told = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if told is None else told


def _has_kernel(query: torch.Tensor) -> bool:
    """Whether `_part` knows a kernel that returns its log-sum-exp for such queries."""
    if query.is_cuda:
        return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return query.device.type == "cpu"


def _part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys, in the inputs' dtype, and its log-sum-exp, float32 [batch, key heads, queries]."""
    if mask is None or query.device.type == "cpu":
        return flash_attention(query, key, value, mask, scaling)
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling) + mask
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp().to(value.dtype) @ value, log_sum


def _joined(
    first: torch.Tensor, first_log_sum: torch.Tensor, second: torch.Tensor, second_log_sum: torch.Tensor
) -> torch.Tensor:
    """Attention to the keys of both parts: exp(l1 - l) first + exp(l2 - l) second, l being their joint log-sum-exp."""
    share = torch.sigmoid(second_log_sum - first_log_sum)[..., None]
    return torch.lerp(first.float(), second.float(), share).to(first.dtype)


sdpa = registered_attention("sdpa")
AttentionInterface.register("sdpa", attend)
