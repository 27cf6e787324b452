"""The Jacobi window (lookahead branch).

    row 0   column 0 .. W-1   oldest iterate, a chain of guesses for the positions after the root
    row r                     column c of it was the model's output at column c of row r-1

Each step's output at the newest row becomes the next row. When N-1 rows are there, output and rows close one n-gram a
column, and the oldest row goes (Fu et al. 2024, arXiv 2402.02057, section 3).
"""

import numpy as np


class JacobiWindow:
    """W columns (at least 1) by up to N-1 rows of guessed tokens."""

    def __init__(self, size: int, ngram_size: int, seed_tokens: list[int]):
        """seed_tokens: where the first row and new columns are drawn from; the prompt serves."""
        self.size = size
        self.ngram_size = ngram_size
        self._seed_tokens = np.asarray(seed_tokens, np.int64)
        self._random = np.random.default_rng(0)  # its own generator: the caller's must be consumed by sampling alone
        self.rows: list[np.ndarray] = [self._draw(size)]

    def __len__(self) -> int:
        """Tokens that it adds to a step."""
        return self.size * len(self.rows)

    def advance(self, output: np.ndarray, accepted: int) -> np.ndarray:
        """Take one iteration's ``output`` (int64 [W], the model's choice at each column of the newest row).

        accepted: tokens emitted in this step; the window moves on by as many positions.
        Returns the n-grams closed, int64 [W, N], or [0, N] while rows are still missing.
        """
        rows = [*self.rows, output]
        shift = accepted
        ngrams = np.empty((0, self.ngram_size), np.int64)
        if len(rows) == self.ngram_size:
            ngrams = np.stack(rows, axis=1)
            rows.pop(0)  # row r becomes row r-1: every column has moved on by one position
            shift -= 1
        shift = min(shift, self.size)
        self.rows = [np.concatenate([row[shift:], self._draw(shift)]) for row in rows]
        return ngrams

    def _draw(self, count: int) -> np.ndarray:
        return self._random.choice(self._seed_tokens, count)
