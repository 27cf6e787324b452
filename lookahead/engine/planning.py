"""Plans the next pass: as many guesses as pay, and the rows of a Jacobi window."""

from collections.abc import Sequence

import numpy as np

from lookahead.decoding_pass import decoding_pass
from lookahead.guessing.budget import Budget
from lookahead.guessing.combine import Combined
from lookahead.guessing.jacobi import WindowSource
from lookahead.guessing.source import Limits, Outcome
from lookahead.models.adapter import ModelAdapter
from lookahead.step import Step, lay_out
from ngram_pool import GuessTree, Source

MIN_PROBABILITY = 0.002  # a less likely guess is not worth a row of the pass
# In a model with a state, a rejection costs computing the accepted tokens again. So a chain must be accepted whole.
MIN_PROBABILITY_WITH_STATE = 0.2


class StepPlanner:
    """Asks the sources of a call for guesses, lays out the steps, and counts the tokens that they earn."""

    def __init__(self, source: Combined, budget: Budget, windows: WindowSource | None, adapter: ModelAdapter):
        """windows: the source of Jacobi windows, if there is one."""
        self._source = source
        self._budget = budget
        if not adapter.can_branch:
            windows = None
        self._trials = windows.trials if windows else None
        self.max_rows = 1 + budget.max_guesses + (windows.max_rows if windows else 0)
        """Rows of one sequence in a step, at most."""
        self._is_chain = not adapter.can_branch
        self._uses_kernels = adapter.uses_kernels
        self._least = MIN_PROBABILITY_WITH_STATE if adapter.has_state else MIN_PROBABILITY
        self._guessed: list[GuessTree] = []  # all guesses for the step under way
        self._chosen: list[GuessTree] = []  # the likeliest part of them, which the step verifies

    def plan(
        self, texts: list[list[int]], depths: list[int], draws: Sequence[np.ndarray | None] = ()
    ) -> tuple[list[Step], list[GuessTree]]:
        """Return the next step of each sequence, and the tree of the guesses in it.

        depths: for each sequence, the largest depth that a guess may have. draws: as in `Limits`.
        """
        pace, length = self._budget.pace, max(map(len, texts))
        rate = pace.rate() if pace else None
        least = self._least
        if self._source.stands_alone:
            least = max(least, self._budget.least(len(texts), length))
        limits = Limits(depths, self._budget.limit(len(texts)), least, self._is_chain, rate, draws)
        with decoding_pass(splits_attention=False, uses_kernels=self._uses_kernels):
            self._guessed = self._source.propose(texts, limits)
        windows = self._source.look_ahead(limits)
        window_rows = max(sum(map(len, rows)) for rows in windows)
        self._chosen = self._budget.choose(self._guessed, length, window_rows)
        planned = zip(texts, self._chosen, windows, strict=True)
        return [lay_out(text[-1], tree, rows) for text, tree, rows in planned], self._chosen

    def learn(self, outcome: Outcome) -> None:
        """Show the outcome of the planned steps to the source, and count the tokens that they earned."""
        length = max(map(len, outcome.texts))
        self._source.observe(outcome)
        self._budget.count(self._guessed, self._chosen, outcome, length, self._source.paid_seconds)
        pace = self._budget.pace
        if self._trials and pace:
            earned, cost = 0, 0.0
            if self._trials.size:
                fewer = len(outcome.steps) * max(1 + step.guesses for step in outcome.steps)
                cost = pace.price(outcome.rows, fewer, length)
                earned = sum(
                    int(np.count_nonzero(tree.sources[np.array(path[1:], np.int64) - 1] == Source.JACOBI))
                    for tree, path in zip(self._chosen, outcome.paths, strict=True)
                )
            self._trials.count(earned, cost)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences of the batch."""
        self._source.keep(sequences)
