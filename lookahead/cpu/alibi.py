"""Attention that is biased by the positions of keys (ALiBi, Press et al. 2022, arXiv 2108.12409)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead.cpu.operations import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class Alibi(Attend):
    """Scores are scaling * queries @ keys + biases, and have no cap.

    biases: float32 [heads, positions], contiguous: what is added to the score of a key, by its position. by_distance:
    the last one is that of the query's own position, after which no key stands. rounds_scores: scores are rounded
    then.
    """

    biases: np.ndarray
    by_distance: bool = False
    rounds_scores: bool = False

    @property
    def most_positions(self) -> int:
        return self.biases.shape[1]

    def cpp_fields(self) -> dict[str, Any]:
        return {**super().cpp_fields(), "kind": "ATTEND", "positions": self.most_positions}

    def shapes_fit(self) -> bool:
        return super().shapes_fit() and len(self.biases) == self.heads and not self.cap
