"""Where the guesses of a step come from, and what a step teaches: the pool with its window, or plain Jacobi iteration.

A strategy offers:
    prefill_logits          how many of the prompt's last logits rows it wants to see
    start(text, logits)     called once, after the prefill
    guess(text, longest)    the step to run and its tree: guesses at most `longest` deep below the last token of `text`
    learn(text, step, logits, path, emitted)   what the step has shown; `text` does not hold `emitted` yet
"""

import numpy as np
import torch

from lookahead.config import LookaheadConfig
from lookahead.step import Step, lay_out
from lookahead.window import JacobiWindow
from ngram_pool import GuessTree, NgramPool, Source, contexts_of
from ngram_pool.kernels import LONGEST

TOP_K = 8  # next tokens learned from each logits row
MIN_PROBABILITY = 0.002  # a guess below it is not worth a row of the forward pass


class PoolStrategy:
    """Lookahead decoding: guesses from the n-gram pool; text, logits and the Jacobi window feed it."""

    prefill_logits = 256

    def __init__(self, config: LookaheadConfig, pool: NgramPool, temperature: float, can_branch: bool):
        """temperature: of the next-token distribution that the guesses have to meet."""
        self._config = config
        self._pool = pool
        self._temperature = temperature
        self._can_branch = can_branch
        self._window: JacobiWindow | None = None

    def start(self, text: list[int], logits: torch.Tensor) -> None:
        if self._config.window_size and self._can_branch:
            self._window = JacobiWindow(self._config.window_size, self._config.ngram_size, text)
        self._pool.learn(text, Source.PROMPT)
        self._pool.learn_next(contexts_of(text, len(logits)), *self._likeliest(logits), Source.LOGITS)

    def guess(self, text: list[int], longest: int) -> tuple[Step, GuessTree]:
        tree = self._pool.guess(text, self._config.budget, MIN_PROBABILITY, longest, chain=not self._can_branch)
        return lay_out(text[-1], tree, self._window if longest else None), tree

    def learn(self, text: list[int], step: Step, logits: torch.Tensor, path: list[int], emitted: list[int]) -> None:
        tokens, probabilities = self._likeliest(logits)
        contexts = step.contexts(text[:-1], LONGEST)
        rows = len(contexts)
        self._pool.calibrate(contexts[path], tokens[path], probabilities[path])
        self._pool.learn_next(contexts, tokens[:rows], probabilities[:rows], Source.LOGITS)
        recent = text[-LONGEST:]
        self._pool.learn(recent + emitted, Source.TEXT, start=len(recent))
        if len(step) > rows:
            ngrams = self._window.advance(tokens[-self._window.size :, 0], len(emitted))
            if len(ngrams):
                self._pool.learn_ngrams(ngrams)

    def _likeliest(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest next tokens of each row and their probabilities, [rows, TOP_K], likeliest first."""
        top, tokens = (logits.float() / self._temperature).softmax(-1).topk(min(TOP_K, logits.shape[-1]))
        # A guess that is rejected may overflow in half precision; what its row says is then worth nothing.
        return tokens.cpu().numpy(), top.nan_to_num_(0.0).cpu().numpy()


class JacobiStrategy:
    """Plain Jacobi decoding: a block of positions is guessed to be what the model last said of them.

    Every step verifies the block as a chain; what follows the accepted part is iterated once more
    (Santilli et al. 2023, arXiv 2305.10427, algorithm 1).
    """

    prefill_logits = 1

    def __init__(self, size: int):
        self._size = size
        self._block = np.empty(0, np.int64)

    def start(self, text: list[int], logits: torch.Tensor) -> None:
        self._block = np.full(self._size, text[-1], np.int64)

    def guess(self, text: list[int], longest: int) -> tuple[Step, GuessTree]:
        tree = GuessTree.chain(self._block[:longest], Source.JACOBI)
        return lay_out(text[-1], tree), tree

    def learn(self, text: list[int], step: Step, logits: torch.Tensor, path: list[int], emitted: list[int]) -> None:
        said = logits.argmax(-1).cpu().numpy()[len(emitted) :]  # row i speaks of the position after the i-th guess
        self._block = np.concatenate([said, np.full(self._size, emitted[-1])])[: self._size]
