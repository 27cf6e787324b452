"""Plain Jacobi decoding, for ``LookaheadConfig(strategy="jacobi")``."""

import numpy as np

from lookahead.extending import Batch, Guesser, GuessSource, Limits, Outcome
from ngram_pool import GuessTree, Origin


class JacobiSource(GuessSource):
    """Guesses a block of tokens: those that the model chose for these positions in the last step.

    Each step verifies the block as a chain. The model's choices after the accepted part are the next step's guesses
    (Santilli et al. 2023, arXiv 2305.10427, algorithm 1).
    """

    is_free = True
    is_calibrated = True

    def __init__(self, size: int):
        """size: number of positions in the block."""
        self.size = size

    def start(self, batch: Batch) -> "JacobiBlocks":
        return JacobiBlocks(self.size, batch.texts)


class JacobiBlocks(Guesser):
    """A block for each sequence of a call."""

    def __init__(self, size: int, texts: list[list[int]]):
        self._size = size
        self._blocks = [np.full(size, text[-1] if text else 0, np.int64) for text in texts]
        self._accepted, self._observed = 1.0, 2.0  # of the guesses whose parent was accepted: how many were, and all

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        chances = (self._accepted / self._observed) ** np.arange(1, self._size + 1)
        return [
            GuessTree.chain(block[:depth], Origin.JACOBI, chances[:depth])
            for block, depth in zip(self._blocks, limits.depths, strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        said = outcome.logits.argmax(-1).cpu().numpy()
        for b, (step, new) in enumerate(zip(outcome.steps, outcome.emitted, strict=True)):
            first = outcome.first[b]
            following = said[first + len(new) : first + len(step)]  # row i has the output after the i-th guess
            self._blocks[b] = np.concatenate([following, np.full(self._size, new[-1])])[: self._size]
            self._accepted += len(new) - 1
            self._observed += min(len(new), step.guesses)

    def select(self, sequences: list[int]) -> None:
        self._blocks = [self._blocks[b] for b in sequences]
