"""A Jacobi window (lookahead branch of Fu et al. 2024, arXiv 2402.02057, section 3):

    row 0   columns 0 .. W-1   the oldest iterate, a chain of guesses for the positions after the root
    row r   columns 0 .. W-1   in column c, the model's output at column c of row r-1

The output of a step at the newest row becomes the next row. Once there are N-1 rows, they and the output make one
n-gram in each column, and the oldest row is dropped.
"""

import numpy as np

from lookahead.guessing.budget import Budget
from lookahead.guessing.source import Outcome
from ngram_pool import GuessTree, Origin


class JacobiWindow:
    """W columns (at least 1) by up to N-1 rows of guessed tokens."""

    def __init__(self, size: int, ngram_size: int, seed_tokens: list[int]):
        """seed_tokens: the first row and new columns are drawn from them, usually the prompt."""
        self.size = size
        self.ngram_size = ngram_size
        self._seed_tokens = np.asarray(seed_tokens, np.int64)
        self._random = np.random.default_rng(0)  # not torch's generator, which only sampling may consume
        self.rows: list[np.ndarray] = [self._draw(size)]

    def __len__(self) -> int:
        """Number of tokens that it adds to a step."""
        return self.size * len(self.rows)

    def advance(self, output: np.ndarray, accepted: int) -> np.ndarray:
        """Append the output of a step (int64 [W], the model's choice at each column of the newest row).

        accepted: tokens emitted in this step. The window moves forward by as many positions.
        Returns the completed n-grams, int64 [W, N], or [0, N] while the window still has too few rows.
        """
        rows = [*self.rows, output]
        shift = accepted
        ngrams = np.empty((0, self.ngram_size), np.int64)
        if len(rows) == self.ngram_size:
            ngrams = np.stack(rows, axis=1)
            rows.pop(0)  # row r becomes row r-1, which moves every column forward by one position
            shift -= 1
        shift = min(shift, self.size)
        self.rows = [np.concatenate([row[shift:], self._draw(shift)]) for row in rows]
        return ngrams

    def _draw(self, count: int) -> np.ndarray:
        return self._random.choice(self._seed_tokens, count)


def earned_and_paid(budget: Budget, outcome: Outcome, chosen: list[GuessTree], length: int) -> tuple[int, float]:
    """Return the accepted tokens of the windows' n-grams in a step, and what the windows' rows cost, in tokens.

    budget: with a pace. chosen: the guesses that were verified. length: as for `Pace.choose`.
    """
    assert budget.pace is not None
    fewer = budget.rows(chosen, 0)
    earned = sum(
        int(np.count_nonzero(tree.sources[np.array(path[1:], np.int64) - 1] == Origin.JACOBI))
        for tree, path in zip(chosen, outcome.paths, strict=True)
    )
    return earned, budget.pace.price(len(outcome.logits), fewer, length, len(chosen))
