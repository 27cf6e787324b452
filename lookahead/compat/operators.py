"""Private operators of torch, each behind a function."""

import torch


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, and the log-sum-exp of its scores, float32 [batch, heads, queries].

    On a GPU, the mask's first two dimensions must be [batch, heads]; they are not broadcast.
    """
    if query.is_cuda:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, log_sums, *_ = efficient(query, key, value, mask, True, scale=scale)
        return out, log_sums[..., : query.shape[2]]  # the kernel pads the rows
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, attn_mask=mask, scale=scale)


def grouped_products(x: torch.Tensor, weights: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its own weight: [rows, inputs] by [groups, inputs, outputs].

    stops: the end of each group's rows, exclusive, int32 [groups].
    """
    return torch._grouped_mm(x, weights, offs=stops)
