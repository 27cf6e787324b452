"""Where the guesses of a step come from, and what a step teaches: the pool with its window, or plain Jacobi iteration.

A strategy serves the sequences of a batch, each with its own guesses and window:
    prefill_logits          how many of a prompt's last logits rows it wants to see
    learn_prompt(text, logits)   what a prefill has shown
    start(texts)            called once, with the prompts of the batch
    guess(texts, longest)   for each sequence the step to run and its tree: guesses at most `longest[b]` deep below the
                            last token of `texts[b]`
    learn(texts, steps, logits, paths, emitted)   what the step has shown; `texts[b]` does not hold `emitted[b]` yet
    select(sequences)       keep these sequences
    largest_step            most rows of one sequence in a pass
    pace                    what budgets are chosen by, and whose costs follow the steps; None where they are fixed
"""

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.config import AUTO, LookaheadConfig
from lookahead.guessing.budget import MOST, WINDOWS, Pace, WindowTrials
from lookahead.guessing.jacobi import JacobiWindow
from lookahead.models.adapter import Architecture
from lookahead.stats import Stats
from lookahead.step import Step, lay_out
from ngram_pool import GuessTree, NgramPool, Source, contexts_of
from ngram_pool.kernels import LONGEST

TOP_K = 8  # next tokens learned from each logits row
MIN_PROBABILITY = 0.002  # a guess below it is not worth a row of the forward pass
# The same where a rejection makes the accepted tokens be computed again: a chain must be likely to be accepted whole.
MIN_PROBABILITY_WITH_STATE = 0.2
JACOBI_SIZE = 16  # positions iterated on


class PoolStrategy:
    """Lookahead decoding: guesses from the n-gram pool; text, logits and the Jacobi window feed it."""

    prefill_logits = 256

    def __init__(
        self,
        config: LookaheadConfig,
        pool: NgramPool,
        temperature: float,
        architecture: Architecture,
        pace: Pace | None,
        trials: WindowTrials | None,
        stats: Stats,
    ):
        """temperature: of the next-token distribution that the guesses have to meet.

        pace, trials: what budgets and windows are chosen by, None where the configuration fixes them; trials need a
            pace.
        stats: where regret is counted.
        """
        self._config = config
        self._pool = pool
        self._temperature = temperature
        self._can_branch = architecture.can_branch
        self._min_probability = MIN_PROBABILITY_WITH_STATE if architecture.has_state else MIN_PROBABILITY
        self.pace = pace
        self._chooses = config.budget == AUTO
        self._trials = trials if architecture.can_branch else None
        self._stats = stats
        self._windows: list[JacobiWindow | None] = []
        self._guessed: list[GuessTree] = []  # of which the steps verify the likeliest part
        self._chosen: list[GuessTree] = []

    @property
    def largest_step(self) -> int:
        """Most tokens of one sequence in a forward pass: root, guesses and window."""
        size, ngram_size = WINDOWS[-1] if self._trials else (self._config.window_size, self._config.given_ngram_size)
        window = size * (ngram_size - 1) if self._can_branch else 0
        return 1 + (MOST if self._chooses else self._config.budget) + window

    def learn_prompt(self, text: list[int], logits: torch.Tensor) -> None:
        if text:  # a prompt of embeddings has none
            self._pool.learn(text, Source.PROMPT)
            logits = logits[-len(text) :]
            self._pool.learn_next(contexts_of(text, len(logits)), *self._likeliest(logits), Source.LOGITS)

    def start(self, texts: list[list[int]]) -> None:
        size = self._config.window_size
        if self._trials is not None:
            self._open_windows(texts)
        elif size and self._can_branch:
            self._windows = [
                JacobiWindow(size, self._config.given_ngram_size, text) if text else None for text in texts
            ]
        else:
            self._windows = [None] * len(texts)

    def _open_windows(self, texts: list[list[int]]) -> None:
        size = self._trials.size
        self._windows = [JacobiWindow(*size, text) if size and text else None for text in texts]

    def guess(self, texts: list[list[int]], longest: list[int]) -> list[tuple[Step, GuessTree]]:
        budget = self.pace.reach if self._chooses else -(-self._config.budget // len(texts))
        trees = [
            self._pool.guess(text, budget, self._min_probability, depth, chain=not self._can_branch)
            for text, depth in zip(texts, longest, strict=True)
        ]
        self._guessed = trees
        windows = [window if depth else None for window, depth in zip(self._windows, longest, strict=True)]
        if self._chooses:
            rows = max(len(window) if window else 0 for window in windows)
            guesses = self.pace.choose(trees, max(map(len, texts)), rows)
            trees = [tree.likeliest(guesses) for tree in trees]
        self._chosen = trees
        return [
            (lay_out(text[-1], tree, window), tree) for text, tree, window in zip(texts, trees, windows, strict=True)
        ]

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
        if self.pace:
            self._weigh(texts, steps, paths)

    def _weigh(self, texts: list[list[int]], steps: Sequence[Step], paths: list[list[int]]) -> None:
        """Count what the step's budget and window have earned."""
        length, rows = max(map(len, texts)), len(steps) * max(map(len, steps))
        if self._chooses:
            for tree, chosen, path in zip(self._guessed, self._chosen, paths, strict=True):
                self.pace.count_regret(self._stats, tree, chosen, path, length)
        self.pace.count(sum(map(len, paths)), rows, length)
        if self._trials:
            size = self._trials.size
            fewer = len(steps) * max(1 + step.guesses for step in steps)
            earned = sum(
                np.count_nonzero(tree.sources[np.array(path[1:], np.int64) - 1] == Source.JACOBI)
                for tree, path in zip(self._chosen, paths, strict=True)
            )
            self._trials.count(earned, self.pace.price(rows, fewer, length))
            if self._trials.size != size:
                self._open_windows(texts)

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
    pace = None

    def __init__(self, size: int):
        self._size = size
        self.largest_step = 1 + size
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
