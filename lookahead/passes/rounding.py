"""How much rounding alone can change a row of logits from one pass to another."""

import torch

# Errors of a row, relative to its spread, that rounding can explain. In float32, 1e-6 is usual. A row that saw a wrong
# token, stood at a wrong position or lost a state is off by more. (In a mixture of experts, rounding alone can send a
# row to another expert.)
_HALF_PRECISION = {torch.bfloat16: 8e-2, torch.float16: 2e-2}
_FULL_PRECISION = 1e-5
AT_ONCE = 8  # rows that are compared at a time: in float64, they may need more memory than a small model


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF_PRECISION


def tolerance(dtype: torch.dtype, noise: float = 0.0) -> float:
    """Return the largest error of a row that rounding can explain. noise: error between plain passes of two shapes."""
    return max(_HALF_PRECISION.get(dtype, _FULL_PRECISION), 4 * noise)


def row_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the distances, [rows], of rows [..., vocabulary] from a reference, relative to the spread of its rows.

    Equal rows have the error 0, also without a spread: where a padding token has a zero embedding, its logits are zero.
    """
    parts = [rows.reshape(-1, rows.shape[-1]).split(AT_ONCE) for rows in (logits, reference)]
    return torch.cat([_row_errors(*part) for part in zip(*parts, strict=True)])


def _row_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logits, reference = logits.double(), reference.double().to(logits.device)
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    distance = (logits - reference).norm(dim=-1)
    return (distance / spread).where(distance != 0, 0.0)


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error of a row (`row_errors`), or infinity if one is NaN."""
    return row_errors(logits, reference).nan_to_num(torch.inf).max().item()
