"""Where the guesses of a step come from, and what a step teaches: the pool with its window, or plain Jacobi iteration.

A strategy serves the sequences of a batch, each with its own guesses and window:
    prefill_logits          how many of a prompt's last logits rows it wants to see
    learn_prompt(text, logits)   what a prefill has shown
    start(texts)            called once, with the prompts of the batch
    guess(texts, longest)   for each sequence the step to run and its tree: guesses at most `longest[b]` deep below the
                            last token of `texts[b]`
    learn(texts, steps, logits, paths, emitted)   what the step has shown; `texts[b]` does not hold `emitted[b]` yet
    select(sequences)       keep these sequences
"""

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.architecture import Architecture
from lookahead.config import LookaheadConfig
from lookahead.step import Step, lay_out
from lookahead.window import JacobiWindow
from ngram_pool import GuessTree, NgramPool, Source, contexts_of
from ngram_pool.kernels import LONGEST

TOP_K = 8  # next tokens learned from each logits row
MIN_PROBABILITY = 0.002  # a guess below it is not worth a row of the forward pass
# The same where a rejection makes the accepted tokens be computed again: a chain must be likely to be accepted whole.
MIN_PROBABILITY_WITH_STATE = 0.2


class PoolStrategy:
    """Lookahead decoding: guesses from the n-gram pool; text, logits and the Jacobi window feed it."""

    prefill_logits = 256

    def __init__(self, config: LookaheadConfig, pool: NgramPool, temperature: float, architecture: Architecture):
        """temperature: of the next-token distribution that the guesses have to meet."""
        self._config = config
        self._pool = pool
        self._temperature = temperature
        self._can_branch = architecture.can_branch
        self._min_probability = MIN_PROBABILITY_WITH_STATE if architecture.has_state else MIN_PROBABILITY
        self._windows: list[JacobiWindow | None] = []

    def learn_prompt(self, text: list[int], logits: torch.Tensor) -> None:
        if text:  # a prompt of embeddings has none
            self._pool.learn(text, Source.PROMPT)
            logits = logits[-len(text) :]
            self._pool.learn_next(contexts_of(text, len(logits)), *self._likeliest(logits), Source.LOGITS)

    def start(self, texts: list[list[int]]) -> None:
        size, ngram_size = self._config.window_size, self._config.ngram_size
        if size and self._can_branch:
            self._windows = [JacobiWindow(size, ngram_size, text) if text else None for text in texts]
        else:
            self._windows = [None] * len(texts)

    def guess(self, texts: list[list[int]], longest: list[int]) -> list[tuple[Step, GuessTree]]:
        budget = -(-self._config.budget // len(texts))
        guessed = []
        for text, window, depth in zip(texts, self._windows, longest, strict=True):
            tree = self._pool.guess(text, budget, self._min_probability, depth, chain=not self._can_branch)
            guessed.append((lay_out(text[-1], tree, window if depth else None), tree))
        return guessed

    def learn(
        self,
        texts: list[list[int]],
        steps: Sequence[Step],
        logits: torch.Tensor,
        paths: list[list[int]],
        emitted: list[list[int]],
    ) -> None:
        tokens, probabilities = self._likeliest(logits)
        contexts = [step.contexts(text[:-1], LONGEST) for step, text in zip(steps, texts, strict=True)]
        rows = [len(c) for c in contexts]
        followers = [np.concatenate([x[b, :n] for b, n in enumerate(rows)]) for x in (tokens, probabilities)]
        contexts = np.concatenate(contexts)
        begins = np.cumsum([0, *rows[:-1]])
        taken = np.concatenate([begin + np.array(path, np.int64) for begin, path in zip(begins, paths, strict=True)])
        self._pool.calibrate(contexts[taken], *(x[taken] for x in followers))
        self._pool.learn_next(contexts, *followers, Source.LOGITS)
        for b, (text, new, step) in enumerate(zip(texts, emitted, steps, strict=True)):
            recent = text[-LONGEST:]
            self._pool.learn(recent + new, Source.TEXT, start=len(recent))
            if len(step) > rows[b]:
                window = self._windows[b]
                ngrams = window.advance(tokens[b, len(step) - window.size : len(step), 0], len(new))
                if len(ngrams):
                    self._pool.learn_ngrams(ngrams)

    def select(self, sequences: list[int]) -> None:
        self._windows = [self._windows[b] for b in sequences]

    def _likeliest(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest next tokens of each row and their probabilities, [..., TOP_K], likeliest first."""
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
        self._blocks: list[np.ndarray] = []

    def learn_prompt(self, text: list[int], logits: torch.Tensor) -> None:
        pass

    def start(self, texts: list[list[int]]) -> None:
        self._blocks = [np.full(self._size, text[-1] if text else 0, np.int64) for text in texts]

    def guess(self, texts: list[list[int]], longest: list[int]) -> list[tuple[Step, GuessTree]]:
        trees = [
            GuessTree.chain(block[:depth], Source.JACOBI) for block, depth in zip(self._blocks, longest, strict=True)
        ]
        return [(lay_out(text[-1], tree), tree) for text, tree in zip(texts, trees, strict=True)]

    def learn(
        self,
        texts: list[list[int]],
        steps: Sequence[Step],
        logits: torch.Tensor,
        paths: list[list[int]],
        emitted: list[list[int]],
    ) -> None:
        said = logits.argmax(-1).cpu().numpy()
        for b, (step, new) in enumerate(zip(steps, emitted, strict=True)):
            following = said[b, len(new) : len(step)]  # row i speaks of the position after the i-th guess
            self._blocks[b] = np.concatenate([following, np.full(self._size, new[-1])])[: self._size]

    def select(self, sequences: list[int]) -> None:
        self._blocks = [self._blocks[b] for b in sequences]
