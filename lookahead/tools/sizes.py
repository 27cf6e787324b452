"""How many sequences to decode in one batch."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.compat import CACHE
from lookahead.models.adapter import device_of
from lookahead.passes.costs import StepCosts
from lookahead.stats import Stats

SIZES = (1, 2, 4, 8, 16, 32, 64)
WORTH = 1.05  # speed-up that justifies a larger batch, because an interrupted batch has to be decoded again
BUDGETS = np.array([0, 1, 2, 4, 8, 16, 32, 64])  # numbers of guesses for a sequence to choose from
# Accepted tokens in a step for each of BUDGETS, assumed before anything was decoded: 1/2 + 1/4 + 1/6 + ...
EXPECTED = np.array([sum(0.5 / guess for guess in range(1, budget + 1)) for budget in BUDGETS])
STEP_ROWS = 128  # positions that a cache allocates for guesses, at most


def best_size(costs: StepCosts, stats: Stats, length: int, most: int) -> int:
    """Return the smallest of SIZES, up to ``most``, that is nearly as fast as any larger one, by the step costs.

    Each sequence brings its own guesses, so passes of a larger batch are larger, and each guess costs more. Guesses
    yield EXPECTED tokens, scaled to what the steps in ``stats`` have accepted. length: average number of cached
    positions of a sequence.
    """
    rates = {size: _rate(costs, stats, length, size) for size in SIZES if size <= most}
    best = max(rates.values())
    return next(size for size, rate in rates.items() if rate * WORTH >= best)


def _rate(costs: StepCosts, stats: Stats, length: int, size: int) -> float:
    """Return the tokens per second of a batch, with the best of BUDGETS for each sequence."""
    rows = 1 + BUDGETS
    # The overhead of each sequence: making, verifying and learning its guesses.
    overhead = costs.between(rows)
    if stats.sequence_steps:  # take the smaller figure: either may be too high, after batches or a slow first step
        overhead = np.minimum(overhead, (stats.seconds.total() - stats.seconds["forward"]) / stats.sequence_steps)
    accepted = EXPECTED
    if stats.guesses:
        accepted = accepted * (stats.tokens_per_step - 1) / np.interp(stats.draft_length, BUDGETS, EXPECTED)
    tokens = 1 + np.minimum(accepted, BUDGETS)
    together = costs(size * rows, length, size) + size * overhead
    return float((size * tokens / together).max())


def fitting_size(model: PreTrainedModel, length: int) -> int:
    """Return how many sequences of ``length`` positions fit into half of the free memory, at least 1."""
    free = _free_memory(device_of(model))
    if free is None:
        return SIZES[-1]
    with torch.no_grad():
        cache = model(torch.zeros((1, 2), dtype=torch.long, device=device_of(model)), use_cache=True)[CACHE]
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    of_position = sum(tensor.nbytes for tensor in tensors) // 2
    # Twice, because each prompt is prefilled into its own cache before these caches are joined.
    return max(int(free / 2 / (2 * of_position * (length + STEP_ROWS))), 1)


def _free_memory(device: torch.device) -> int | None:
    """Return the number of free bytes on a device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
