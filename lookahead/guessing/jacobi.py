"""The Jacobi window, which feeds the pool (lookahead branch of Fu et al. 2024, arXiv 2402.02057, section 3):

    row 0   columns 0 .. W-1   the oldest iterate, a chain of guesses for the positions after the root
    row r   columns 0 .. W-1   in column c, the model's output at column c of row r-1

The output of a step at the newest row becomes the next row. Once there are N-1 rows, they and the output make one
n-gram in each column, and the oldest row is dropped.
"""

import numpy as np

from lookahead.guessing.budget import WindowTrials
from lookahead.guessing.source import Batch, Guesser, GuessSource, Limits, Outcome
from ngram_pool import GuessTree


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


class WindowSource(GuessSource):
    """Keeps a Jacobi window for each sequence. It proposes no guesses: its n-grams go into the wrap's pool."""

    is_free = True

    def __init__(self, size: int, ngram_size: int, trials: WindowTrials | None = None):
        """size, ngram_size: W and N of all windows, unless ``trials`` choose them."""
        self._given = (size, ngram_size) if size else None
        self.trials = trials

    @property
    def size(self) -> tuple[int, int] | None:
        """W and N that windows should have now; None: there should be none."""
        return self.trials.size if self.trials else self._given

    @property
    def max_rows(self) -> int:
        """Most rows that a window adds to a step."""
        size, ngram_size = (self.trials.largest if self.trials else self._given) or (0, 1)
        return size * (ngram_size - 1)

    def start(self, batch: Batch) -> "Windows":
        return Windows(self, batch)


class Windows(Guesser):
    """The Jacobi windows of a call."""

    def __init__(self, source: WindowSource, batch: Batch):
        self._source, self._pool = source, batch.pool
        self.size: tuple[int, int] | None
        """W and N of the windows that are open; None: there are none."""
        self._windows: list[JacobiWindow | None]
        self._open(batch.texts)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        return [GuessTree.empty() for _ in texts]

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        return [
            window.rows if window and depth and not limits.is_chain else []
            for window, depth in zip(self._windows, limits.depths, strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        of_each = self._windows, outcome.steps, outcome.emitted, outcome.first
        for window, step, new, first in zip(*of_each, strict=True):
            if window and len(step) > 1 + step.guesses:
                end = first + len(step)
                newest = outcome.logits[end - window.size : end].argmax(-1).cpu().numpy()
                ngrams = window.advance(newest, len(new))
                if len(ngrams):
                    self._pool.learn_ngrams(ngrams)
        if self._source.size != self.size:
            self._open(outcome.texts)

    def select(self, sequences: list[int]) -> None:
        self._windows = [self._windows[b] for b in sequences]

    def _open(self, texts: list[list[int]]) -> None:
        self.size = self._source.size
        self._windows = [JacobiWindow(*self.size, text) if self.size and text else None for text in texts]
