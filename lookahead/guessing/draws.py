"""The known draws of several rows, for sources whose guesses come from a model."""

from collections.abc import Sequence

import numpy as np
import torch


def draws_at(known: Sequence[np.ndarray | None], depths: list[list[int]], vocabulary: int) -> torch.Tensor | None:
    """Return the draws for some rows of each sequence, float32 [batch, rows, vocabulary]; None if none are known.

    known: `Limits.draws`. depths: of each row below the root, for each sequence.
    """
    if all(draws is None for draws in known):
        return None
    found = torch.ones(len(depths), len(depths[0]), vocabulary, dtype=torch.float32, device="cpu")
    for rows, draws, by_row in zip(found, known, depths, strict=True):
        for row, depth in zip(rows, by_row, strict=True):
            if draws is not None and depth < len(draws):
                row.numpy()[: draws.shape[1]] = draws[depth, :vocabulary]  # which may be read-only
    return found
