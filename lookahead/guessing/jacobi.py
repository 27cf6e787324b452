"""The Jacobi windows of a call, which feed the pool. They are tried now and then, and used while they pay."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lookahead.guessing.budget import Trials
from lookahead.guessing.source import Batch, Guesser, GuessSource, Limits, Outcome
from ngram_pool import GuessTree

if TYPE_CHECKING:
    from lookahead.guessing.window import JacobiWindow

WINDOW_SIZES = ((4, 3), (8, 4), (15, 5))  # W and N of the windows to try; the next is tried only if this one pays


class WindowSource(GuessSource):
    """Has a Jacobi window for each sequence. It proposes no guesses: the pool learns its n-grams."""

    is_free = True

    def __init__(self, sizes: Sequence[tuple[int, int]], trials: Trials | None = None):
        """sizes: W and N of the windows that may be open, the largest last.

        trials: choose one of them, level k the k-th, or none. Without trials, the last is always open.
        """
        self._sizes = sizes
        self.trials = trials

    @property
    def size(self) -> tuple[int, int] | None:
        """W and N of windows that should be open now; None: no window."""
        level = self.trials.level if self.trials else len(self._sizes)
        return self._sizes[level - 1] if level else None

    @property
    def max_rows(self) -> int:
        """Most rows that a window adds to a step."""
        size, ngram_size = self._sizes[-1] if self._sizes else (0, 1)
        return size * (ngram_size - 1)

    def start(self, batch: Batch) -> "Windows":
        return Windows(self, batch)


class Windows(Guesser):
    """The Jacobi windows of a call."""

    def __init__(self, source: WindowSource, batch: Batch):
        self._source, self._pool = source, batch.pool
        self.size: tuple[int, int] | None
        """W and N of the windows that are open; None: there are none."""
        self._windows: list[JacobiWindow | None] = []
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
                stop = first + len(step)
                newest = outcome.logits[stop - window.size : stop].argmax(-1).cpu().numpy()
                ngrams = window.advance(newest, len(new))
                if len(ngrams):
                    self._pool.learn_ngrams(ngrams)
        if self._source.size != self.size:
            self._open(outcome.texts)

    def select(self, sequences: list[int]) -> None:
        self._windows = [self._windows[b] for b in sequences]

    def _open(self, texts: list[list[int]]) -> None:
        self.size, self._windows = self._source.size, [None] * len(texts)
        if self.size is not None:
            from lookahead.guessing.window import JacobiWindow  # most of the time, none is open

            self._windows = [JacobiWindow(*self.size, text) if text else None for text in texts]
