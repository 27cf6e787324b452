"""How many guesses a step verifies, and whether a source or a window pays. The aim is the most tokens per second.

A step that verifies the n most likely guesses yields 1 + p1 + ... + pn tokens on average and costs c(1 + n). A text has
the most tokens per second if each step maximises its tokens minus its cost times the overall rate, because each second
could yield tokens in other steps (Dinkelbach 1967, "On nonlinear fractional programming").
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain, zip_longest

from lookahead.guessing.source import Outcome
from lookahead.passes.costs import RUNGS, Prices, StepCosts
from lookahead.passes.runner import Company
from ngram_pool import GuessTree
from ngram_pool.forks import Lock

MAX_GUESSES = RUNGS[-1] - 1  # with the root, the most rows for which costs are measured
FADE = 0.98  # factor by which each step fades the sums that make up the rate and the trust
FRUITLESS = 64  # steps without an accepted guess, after which only one of WAKING steps looks for guesses
WAKING = 4
PRIOR_CLAIMS = 2.0  # accepted guesses that stand beside the recent ones, so that bad experience fades, too
FIRST_PAUSE = 128  # steps before the first trial of a window, and in the first pause
PAUSE_GROWTH = 8  # a trial that does not pay makes the next pause longer by this factor
TRIAL_STEPS = 24
WAITING = 32  # steps that are counted together: counted one by one between passes, each would find cold caches
DOUBT_PAUSE = 32  # least steps before the costs are doubted
DOUBT_SHARE = 128  # steps to wait for each pass that the last doubt seemed to cost: less than 1% of the time
DOUBTED_ROW = 1 / 32  # most that one more row adds to a pass while the costs are doubted; in passes
MAX_LOSS = 4.0  # tokens; a trial that has lost more than these, and more than chance explains, ends early


def average_length(texts: Sequence[Sequence[int]]) -> int:
    """Return the average length of the texts."""
    return sum(map(len, texts)) // len(texts)


class Pace:
    """The recent rate of decoding, and the budgets that follow from it. Lives as long as the wrap."""

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self._lock = Lock()
        self._tokens, self._seconds = 1.0, self._of_step(1, 0, 1)  # the rate of plain decoding
        self._claimed = self._accepted = 0.0
        self._fruitless = 0  # steps since a guess was accepted
        self._until_doubt = DOUBT_PAUSE
        self.doubts = False
        """Whether the next step verifies as many guesses as if more rows cost little. Costs of rows are learned only
        from steps with as many rows; so costs measured on a busy machine would turn guesses off forever."""
        self.reach = 16
        """Number of guesses to look for: about twice as many as were worth verifying lately."""

    def rate(self) -> float:
        """Return the recent tokens per second."""
        return self._tokens / self._seconds

    def trust(self) -> float:
        """Return the ratio of recently accepted to expected guesses. Expected is the sum of their probabilities.

        Sources calibrate themselves, but on a new text they err in the same direction for dozens of steps. Where few
        guesses pay, a low ratio would stop them all, and then stay as it is: so it approaches 1 as steps go by.
        """
        return (self._accepted + PRIOR_CLAIMS) / (self._claimed + PRIOR_CLAIMS)

    @property
    def rests(self) -> bool:
        """Whether the next step looks for no guesses, because none was accepted for long. Now and then, one does."""
        return self._fruitless >= FRUITLESS and self._fruitless % WAKING > 0

    def choose(
        self, trees: list[GuessTree], length: int, window_rows: int, is_ragged: bool = False, others: int = 0
    ) -> list[int]:
        """Return the number of guesses to verify of each sequence.

        length: average committed positions of a sequence. window_rows: rows of each sequence's window. is_ragged:
        whether a pass has only the rows of each step. If not, all steps have as many as the longest. others: rows of
        other calls in the same pass.
        """
        batch, trust, rate = len(trees), self.trust(), self._tokens / self._seconds
        gains = [sorted(tree.probabilities.tolist(), reverse=True) for tree in trees]
        if batch == 1:
            gained, at_once = gains[0], 1
        elif is_ragged:  # each guess separately
            gained, at_once = sorted(chain.from_iterable(gains), reverse=True), 1
        else:
            gained, at_once = [sum(column) for column in zip_longest(*gains, fillvalue=0.0)], batch
        first = batch * (1 + window_rows) + others
        prices = self._prices(first + at_once * len(gained))
        seconds, per_row = prices.passes, length * prices.per_position_and_row + prices.overhead_per_row
        per_doubted = seconds[first] * DOUBTED_ROW if self.doubts else float("inf")
        best, most, tokens = 0, 0.0, 0.0
        for count, gain in enumerate(gained, 1):
            tokens += trust * gain
            added = at_once * count
            worth = tokens - rate * min(seconds[first + added] - seconds[first] + added * per_row, added * per_doubted)
            if worth > most:
                best, most = count, worth
        if at_once == batch or not best:
            return [best] * batch
        least, counts = -gained[best - 1], []
        left = best - sum([bisect_left(gain, least, key=operator.neg) for gain in gains])  # for those that are equal
        for gain in gains:
            surer, all_of_it = (bisect(gain, least, key=operator.neg) for bisect in (bisect_left, bisect_right))
            counts.append(surer + min(left, all_of_it - surer))
            left -= counts[-1] - surer
        return counts

    def least(self, length: int) -> float:
        """Return the probability below which `choose` chooses no guess of a single sequence, for any number of guesses.

        The last chosen guess must be worth its row, and the others are no less likely.
        """
        prices = self._prices()
        of_row = prices.least_of_row + length * prices.per_position_and_row
        if self.doubts:
            of_row = min(of_row, prices.passes[1] * DOUBTED_ROW)
        return self._tokens / self._seconds * of_row / self.trust()

    def _prices(self, most: int = 0) -> Prices:
        """The costs as plain numbers, for passes over up to ``most`` rows."""
        prices = self.costs.prices  # other threads may replace it
        return prices if prices is not None and most < len(prices.passes) else self.costs.priced(most)

    def _of_step(self, rows: int, length: int, sequences: int) -> float:
        """Return the seconds of a whole step: its pass, and the code between passes. Arguments as for `count`."""
        prices = self._prices(rows)
        per_length = sequences * prices.per_position + (rows - sequences) * prices.per_position_and_row
        return prices.passes[rows] + length * per_length + prices.overhead + prices.overhead_per_row * (rows - 1)

    def price(self, rows: int, fewer: int, length: int, sequences: int = 1) -> float:
        """Return the tokens that could be written in the extra time of a step of ``rows``, compared with ``fewer``."""
        if rows == fewer:
            return 0.0
        return self.rate() * (self._of_step(rows, length, sequences) - self._of_step(fewer, length, sequences))

    def count(
        self, tokens: int, rows: int, length: int, seconds: float = 0.0, sequences: int = 1, share: float = 1.0
    ) -> None:
        """Add a step to the rate: the tokens that it wrote, and its time.

        rows, sequences: of its pass. seconds: of sources of guesses. share: the part of the pass that is its own.
        """
        with self._lock:
            self._tokens = FADE * self._tokens + tokens
            self._seconds = FADE * self._seconds + share * self._of_step(rows, length, sequences) + seconds

    def count_guesses(self, chosen: list[GuessTree], paths: list[list[int]]) -> None:
        """Update `reach`, `trust`, `rests` and `doubts` from a step's verified guesses and accepted rows."""
        most = accepted = 0
        claimed = 0.0
        for tree, path in zip(chosen, paths, strict=True):
            most = max(most, len(tree.tokens))
            claimed += sum(tree.probabilities.tolist())
            accepted += max(len(path) - 1, 0)
        self.reach = min(max(3 * self.reach // 4, 2 * most + 8), MAX_GUESSES)
        with self._lock:
            self._fruitless = 0 if accepted else self._fruitless + 1
            self._until_doubt -= 1
            if self.doubts and most:
                passes = self._prices().passes
                more = passes[min(len(chosen) + sum(map(len, chosen)), MAX_GUESSES)] / passes[len(chosen)] - 1
                self._until_doubt = max(DOUBT_PAUSE, int(DOUBT_SHARE * more))
            self.doubts = self._until_doubt <= 0
            self._claimed = FADE * self._claimed + claimed
            self._accepted = FADE * self._accepted + accepted


class Budget:
    """How many guesses the steps of a call look for, and how many they verify."""

    def __init__(self, guesses: int | None, pace: Pace | None, is_ragged: bool = False):
        """guesses: most guesses of a step, over all sequences; None: let ``pace`` choose.

        pace: None if nothing in this call depends on costs. is_ragged: as for `Pace.choose`.
        """
        self._is_ragged = is_ragged
        self.max_guesses = MAX_GUESSES if guesses is None else guesses
        """Most guesses of one sequence in a step."""
        self.pace = pace
        self._chooser = pace if guesses is None else None
        self._timed: list[tuple[int, int, float, float | None, int]] = []  # steps that have not corrected the costs yet

    def limit(self, sequences: int) -> int:
        """Return the number of guesses to look for, for each sequence of a batch."""
        return self._chooser.reach if self._chooser else -(-self.max_guesses // sequences)

    def least(self, sequences: int, length: int) -> float:
        """Return a probability below which `choose` verifies no guess; 0 if none is known. Arguments as for `limit`."""
        return self._chooser.least(length) if self._chooser and (self._is_ragged or sequences == 1) else 0.0

    @property
    def rests(self) -> bool:
        """Whether the next step looks for no guesses."""
        return self._chooser is not None and self._chooser.rests

    def choose(self, trees: list[GuessTree], length: int, window_rows: int, others: int = 0) -> list[GuessTree]:
        """Return the part of each tree that is verified. Arguments as for `Pace.choose`."""
        if self._chooser:
            counts = self._chooser.choose(trees, length, window_rows, self._is_ragged, others)
        else:
            counts = [self.limit(len(trees))] * len(trees)
        return [tree.prune(count) for tree, count in zip(trees, counts, strict=True)]

    def rows(self, trees: list[GuessTree], window_rows: int) -> int:
        """Return the rows of a pass that verifies these trees. Arguments as for `Pace.choose`."""
        guesses = list(map(len, trees))
        return len(trees) * (1 + window_rows) + (sum(guesses) if self._is_ragged else len(trees) * max(guesses))

    def count(
        self,
        chosen: list[GuessTree],
        outcome: Outcome,
        length: int,
        seconds: float,
        rested: bool,
        company: Company | None,
    ) -> None:
        """Count the tokens of a step. chosen: the guesses that were verified.

        seconds: of sources of guesses, except free ones. rested: whether the step looked for none.
        company: `Output.company`.
        """
        if self.pace is None:
            return
        if self._chooser:
            self._chooser.count_guesses(chosen, outcome.paths)
            if rested:
                return
        tokens, sequences, rows, share = sum(map(len, outcome.paths)), len(outcome.steps), len(outcome.logits), 1.0
        if company is not None:
            share, rows, sequences = rows / company.rows, company.rows, company.sequences
        self.pace.count(tokens, rows, length, seconds, sequences, share)

    def time(self, rows: int, length: int, seconds: float, overhead: float | None, sequences: int) -> None:
        """Update the costs from a step. Arguments as for `StepCosts.follow`."""
        self._timed.append((rows, length, seconds, overhead, sequences))
        if len(self._timed) >= WAITING:
            self.flush()

    def flush(self) -> None:
        """Update the costs from the waiting steps."""
        timed, self._timed = self._timed, []
        if self.pace:
            for step in timed:
                self.pace.costs.follow(*step)


class Trials:
    """Finds by trial which level of something pays, that is, gains more tokens than its time is worth.

    A level is tried for TRIAL_STEPS, or until it is hopeless. If it pays, the next level is tried. If not, the previous
    level is used for a pause, and the next such pause is longer. Lives as long as the wrap.
    """

    def __init__(self, levels: int, first: int = 0):
        """levels: the highest level; level 0 is off. first: the first level; if it is above 0, it starts with a
        trial."""
        self._levels = levels
        self.level = first
        self._pause = FIRST_PAUSE
        self._steps_left = TRIAL_STEPS if first else FIRST_PAUSE
        self._on_trial = first > 0
        self._earned = self._cost = self._cost_of_calls = 0.0
        self._lock = Lock()

    def count(self, tokens: float, cost: float, is_first: bool = False) -> None:
        """Count a step. tokens: gained by the level. cost: its time, in tokens at the recent rate.

        is_first: it is the first step of a call, in which a source may read the prompt. One such step proves nothing.
        """
        with self._lock:
            self._earned += tokens
            self._cost += cost
            self._cost_of_calls += cost if is_first else 0.0
            self._steps_left -= 1
            loss = self._cost - self._cost_of_calls - self._earned
            is_hopeless = self._on_trial and loss > MAX_LOSS + 2 * max(self._earned, 0.0) ** 0.5
            if is_hopeless or not self._steps_left:
                self._decide()

    def rests(self, steps: int) -> bool:
        """Whether the level is off, and no trial starts within this many steps."""
        return self.level == 0 and self._steps_left >= steps

    def _decide(self) -> None:
        """Choose the level at the end of a trial or a pause."""
        pays = self.level == 0 or self._earned > self._cost
        if pays and self.level < self._levels:
            self.level, self._on_trial = self.level + 1, True
            self._steps_left = TRIAL_STEPS
        else:
            if not pays:
                self.level -= 1
                self._pause *= PAUSE_GROWTH if self._on_trial else 1
            self._on_trial = False
            self._steps_left = self._pause
        self._earned = self._cost = self._cost_of_calls = 0.0
