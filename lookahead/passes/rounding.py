"""What passes for rounding: how far a row of logits may be from what another pass says of it."""

import torch

# Largest error of a row that passes for rounding, relative to the row's spread: this, or four times what two
# plain passes of other shapes show. In full precision 1e-6 is usual. A row that saw a wrong token, stood in a wrong
# place or forgot a state is off by more. (A mixture of experts may route a row otherwise by rounding alone.)
_HALF_PRECISION = {torch.bfloat16: 8e-2, torch.float16: 2e-2}
_FULL_PRECISION = 1e-5


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF_PRECISION


def tolerance(dtype: torch.dtype, noise: float = 0.0) -> float:
    """Largest error of a row that passes for rounding. noise: that of plain passes of other shapes."""
    return max(_HALF_PRECISION.get(dtype, _FULL_PRECISION), 4 * noise)


def row_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance of each row [rows, vocabulary] from its reference, relative to the spread of the reference."""
    logits, reference = logits.double(), reference.double().to(logits.device)
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return (logits - reference).norm(dim=-1) / spread


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest of the rows' errors (`row_errors`); infinite where one is NaN."""
    return row_errors(logits, reference).nan_to_num(torch.inf).max().item()
