"""How many guesses a step verifies, and whether a source or a window pays: what gains the most tokens per second.

A step that verifies the n likeliest guesses yields 1 + p1 + ... + pn tokens on average and costs c(1 + n). Over a text,
tokens per second are greatest if every step maximises its tokens less its cost times the rate that is reached overall:
each second that a step takes could have yielded tokens elsewhere (Dinkelbach 1967, "On nonlinear fractional
programming").
"""

import numpy as np

from lookahead.guessing.source import Outcome
from lookahead.passes.costs import StepCosts
from lookahead.stats import FIXED_BUDGETS, Stats
from ngram_pool import GuessTree
from ngram_pool.forks import Lock

MAX_GUESSES = 127  # guesses; with the root, the highest rung that costs are measured for
FADE = 0.98  # of the sums that the rate is taken of, a step
WINDOW_SIZES = ((4, 3), (8, 4), (15, 5))  # W and N that are tried, the next only if the one before pays
FIRST_PAUSE = 128  # steps until the first trial of a window, and the length of the first pause
PAUSE_GROWTH = 8  # each pause after a trial that did not pay is so many times the one before
TRIAL_STEPS = 24  # steps of a trial


class Pace:
    """The rate that decoding reaches, and the budgets that follow from it. Lives as long as the wrap."""

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self._lock = Lock()
        self._tokens, self._seconds = 1.0, float(self._cost(1, 0))  # as plain decoding
        self.reach = 16
        """Guesses that are worth looking for: about twice as many as were worth verifying lately."""

    def rate(self) -> float:
        """Tokens per second, lately."""
        return self._tokens / self._seconds

    def choose(self, trees: list[GuessTree], length: int, window_rows: int) -> int:
        """Number of guesses to verify for each sequence of a batch.

        length: positions that the longest holds. window_rows: of each sequence's window.
        """
        gains = np.zeros(max(map(len, trees)) + 1)
        for tree in trees:
            gains[1 : len(tree) + 1] += tree.probabilities[tree.ranking]
        rows = len(trees) * (1 + window_rows + np.arange(len(gains)))
        chosen = int(np.argmax(np.cumsum(gains) - self.rate() * self.costs(rows, length)))
        self.reach = min(max(self.reach - 1, 2 * chosen + 8), MAX_GUESSES)
        return chosen

    def price(self, rows: int, fewer: int, length: int) -> float:
        """Tokens that could be had in the time by which a step of ``rows`` takes longer than one of ``fewer``."""
        if rows == fewer:
            return 0.0
        return self.rate() * float(self.costs(rows, length) - self.costs(fewer, length))

    def count(self, tokens: int, rows: int, length: int) -> None:
        """Take in what a step has yielded: ``tokens``, of ``rows``, over all sequences."""
        with self._lock:
            self._tokens = FADE * self._tokens + tokens
            self._seconds = FADE * self._seconds + float(self._cost(rows, length))

    def count_regret(self, stats: Stats, tree: GuessTree, chosen: GuessTree, path: list[int], length: int) -> None:
        """Add to ``stats`` what a sequence's step yielded, and what it would have with each of the fixed budgets.

        tree: all that was guessed. chosen: its likeliest part, which was verified; path: the rows that were accepted.
        A smaller budget would have accepted fewer of the same tokens, which is known, and taken as many times the steps
        for them; what a larger one would have accepted beyond is what the guesses' probabilities say.
        """
        accepted = np.array(path[1:], np.int64) - 1
        ranks = np.empty(len(chosen), np.int64)
        ranks[chosen.ranking] = np.arange(len(chosen))
        expected = np.zeros(len(tree) + 1)
        np.cumsum(tree.probabilities[tree.ranking], out=expected[1:])
        guesses = np.minimum(FIXED_BUDGETS, len(tree))
        *costs, cost_of_chosen = self._cost(1 + np.append(guesses, len(chosen)), length)
        steps = len(path) / (1.0 + (ranks[accepted][:, None] < guesses).sum(0))
        stats.fixed_budgets[:, 0] += len(path) + np.maximum(expected[guesses] - expected[len(chosen)], 0)
        stats.fixed_budgets[:, 1] += steps * costs
        stats.chosen_budgets += len(path), cost_of_chosen

    def _cost(self, rows: np.ndarray | int, length: int) -> np.ndarray:
        return self.costs(rows, length) + self.costs.overhead


class Budget:
    """How many guesses the steps of a call look for, and how many of those they verify."""

    def __init__(self, guesses: int | None, pace: Pace | None, stats: Stats):
        """guesses: of all sequences together; None: as many as gain the most tokens per second, by ``pace``.

        pace: what goes by costs follows; None where nothing does. stats: where regret is counted.
        """
        self.most = MAX_GUESSES if guesses is None else guesses
        """Guesses of one sequence in a step, at most."""
        self.pace = pace
        self._chooser = pace if guesses is None else None
        self._stats = stats

    def limit(self, sequences: int) -> int:
        """Guesses to look for, for each sequence of a batch."""
        return self._chooser.reach if self._chooser else -(-self.most // sequences)

    def choose(self, trees: list[GuessTree], length: int, window_rows: int) -> list[GuessTree]:
        """The parts of the trees that are verified.

        length: positions that the longest sequence holds. window_rows: of each sequence's window.
        """
        most = self._chooser.choose(trees, length, window_rows) if self._chooser else self.limit(len(trees))
        return [tree.likeliest(most) for tree in trees]

    def count(self, trees: list[GuessTree], chosen: list[GuessTree], outcome: Outcome, length: int) -> None:
        """Take in what a step has earned. trees: all that was guessed; chosen: what was verified."""
        if self.pace is None:
            return
        if self._chooser:
            for tree, part, path in zip(trees, chosen, outcome.paths, strict=True):
                self._chooser.count_regret(self._stats, tree, part, path, length)
        self.pace.count(sum(map(len, outcome.paths)), outcome.rows, length)


class Trials:
    """Whether something pays, and how much of it: found out by trying, what it earns against what it costs.

    A level is tried for TRIAL_STEPS. If it pays, the next one is tried, too. If not, the level before it is kept for a
    pause, and each pause is longer than the last. Lives as long as the wrap.
    """

    def __init__(self, levels: int, first: int = 0):
        """levels: the highest one; 0 is without. first: the level to begin with, on trial unless it is 0."""
        self._levels = levels
        self.level = first
        self._while = FIRST_PAUSE
        self._left = TRIAL_STEPS if first else FIRST_PAUSE
        self._on_trial = first > 0
        self._earned = self._cost = 0.0
        self._lock = Lock()

    def count(self, tokens: float, cost: float) -> None:
        """Take in a step: tokens that it owes to the level, and those that its cost is worth at the rate reached."""
        with self._lock:
            self._earned += tokens
            self._cost += cost
            self._left -= 1
            if not self._left:
                self._decide()

    def _decide(self) -> None:
        """What is on from now on, at the end of a trial or a pause."""
        pays = self.level == 0 or self._earned > self._cost
        if pays and self.level < self._levels:
            self.level, self._on_trial = self.level + 1, True
            self._left = TRIAL_STEPS
        else:
            if not pays:
                self.level -= 1
                self._while *= PAUSE_GROWTH if self._on_trial else 1
            self._on_trial = False
            self._left = self._while
        self._earned = self._cost = 0.0


class WindowTrials(Trials):
    """Which Jacobi window pays: what its n-grams earn against what its rows cost."""

    def __init__(self, ngram_size: int | None = None):
        """ngram_size: N of all windows, if it is given."""
        super().__init__(len(WINDOW_SIZES))
        self._sizes = [(size, ngram_size or n) for size, n in WINDOW_SIZES]  # of the levels from 1 on

    @property
    def size(self) -> tuple[int, int] | None:
        """W and N of the window that is on; None: off."""
        return self._sizes[self.level - 1] if self.level else None

    @property
    def largest(self) -> tuple[int, int]:
        return self._sizes[-1]
