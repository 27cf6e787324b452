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
WORTH = 1.05  # a larger batch has to be faster by this factor: whoever interrupts a batch has to decode it anew
BUDGETS = np.array([0, 1, 2, 4, 8, 16, 32, 64])  # guesses of a sequence, of which the best number is taken
# Accepted tokens of a step with each of BUDGETS, before anything has been decoded: 1/2 + 1/4 + 1/6 + ...
EXPECTED = np.array([sum(0.5 / guess for guess in range(1, budget + 1)) for budget in BUDGETS])
STEP_ROWS = 128  # positions that a cache allocates for guesses, at most


def best_size(costs: StepCosts, stats: Stats, length: int, most: int) -> int:
    """Return the smallest of SIZES, up to ``most``, that no larger one outdoes by much, according to step costs.

    Each sequence brings its own guesses, so a larger batch has larger passes, in which a row of guesses saves less.
    What guesses yield is EXPECTED, in proportion to what the steps in ``stats`` have accepted. length: positions of a
    sequence in the cache, on average.
    """
    rates = {size: _rate(costs, stats, length, size) for size in SIZES if size <= most}
    best = max(rates.values())
    return next(size for size, rate in rates.items() if rate * WORTH >= best)


def _rate(costs: StepCosts, stats: Stats, length: int, size: int) -> float:
    """Return the tokens per second of a batch, with the best of BUDGETS for each sequence."""
    rows = 1 + BUDGETS
    # Overhead of a sequence: guesses are made, verified and learned for each by itself.
    overhead = costs.between(rows)
    if stats.sequence_steps:  # both may be too high: costs may have followed batches, and the first step compiles loops
        overhead = np.minimum(overhead, (stats.seconds.total() - stats.seconds["forward"]) / stats.sequence_steps)
    accepted = EXPECTED
    if stats.guesses:
        accepted = accepted * (stats.tokens_per_step - 1) / np.interp(stats.draft_length, BUDGETS, EXPECTED)
    tokens = 1 + np.minimum(accepted, BUDGETS)
    together = costs(size * rows, length, size) + size * overhead
    return float((size * tokens / together).max())


def fitting_size(model: PreTrainedModel, length: int) -> int:
    """Return how many sequences of ``length`` positions have room in half of the free memory, at least 1."""
    free = _free_memory(device_of(model))
    if free is None:
        return SIZES[-1]
    with torch.no_grad():
        cache = model(torch.zeros((1, 2), dtype=torch.long, device=device_of(model)), use_cache=True)[CACHE]
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    of_position = sum(tensor.nbytes for tensor in tensors) // 2
    # Each prompt is read into a cache of its own before the batch's is made of them.
    return max(int(free / 2 / (2 * of_position * (length + STEP_ROWS))), 1)


def _free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on a device; None if it does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
