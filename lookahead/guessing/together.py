"""Steps in which several sources guess: their trees are merged (`merging`), and each is asked while it pays."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lookahead.guessing.budget import Budget, average_length
from lookahead.guessing.combine import Ledger
from lookahead.guessing.merging import Node
from lookahead.guessing.source import Guesser, GuessSource, Limits, Outcome
from lookahead.stats import SourceStats
from ngram_pool import GuessTree, Origin


class Together:
    """The guessers of one call, step by step."""

    def __init__(
        self,
        sources: Sequence[GuessSource],
        guessers: Mapping[int, Guesser],
        ledger: Ledger,
        budget: Budget,
        stats: Sequence[SourceStats],
        vocabulary: int,
    ):
        """guessers: of this call, by the number of their source. stats: of each source. Others as for `Combined`."""
        self._sources, self._guessers, self._ledger, self._budget = sources, guessers, ledger, budget
        self._stats, self._vocabulary, self._names = stats, vocabulary, ledger.names[len(Origin) :]
        self._seconds = [0.0] * len(sources)  # that each source took in the current step
        self._has_observed: set[int] = set()  # sources that have observed a step of this call
        self._window_rows = 0  # of each sequence in this step
        self._proposed: list[dict[int, GuessTree]] = []  # for each sequence, the trees of this step by source
        self._roots: list[Node | int] = []  # for each sequence, what `_merge` returns first

    @property
    def paid_seconds(self) -> float:
        """What the sources that are not free took in the current step."""
        return sum(took for took, source in zip(self._seconds, self._sources, strict=True) if not source.is_free)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._seconds = [0.0] * len(self._sources)
        self._asked = [i for i in self._guessers if self._ledger.is_asked(i)]
        proposed: list[dict[int, GuessTree]] = [{} for _ in texts]
        for i in self._asked:
            guesser = self._guessers[i]
            before, began = guesser.passes, time.perf_counter()
            trees = guesser.propose(texts, limits)
            self._seconds[i] += time.perf_counter() - began
            self._stats[i].passes += guesser.passes - before
            if len(trees) != len(texts):
                raise ValueError(f"{self._names[i]} proposes {len(trees)} trees for {len(texts)} sequences")
            for by_source, tree, depth in zip(proposed, trees, limits.depths, strict=True):
                if len(tree):
                    by_source[i] = self._verifiable(i, tree, depth, limits)
                    self._stats[i].proposed += len(by_source[i])
        self._proposed, self._limits = proposed, limits
        merged = [self._merge(by_source) for by_source in proposed]
        self._roots = [root for root, _ in merged]
        return [tree for _, tree in merged]

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        rows = [guesser.look_ahead(limits) for guesser in self._guessers.values()]
        chosen = [next((found[b] for found in rows if found[b]), []) for b in range(len(limits.depths))]
        self._window_rows = max(sum(map(len, rows)) for rows in chosen)
        return chosen

    def observe(self, outcome: Outcome) -> None:
        for i in self._asked:
            began = time.perf_counter()
            self._guessers[i].observe(outcome)
            self._seconds[i] += time.perf_counter() - began
        for root, path, emitted in zip(self._roots, outcome.paths, outcome.emitted, strict=True):
            accepted = len(path) - 1
            if isinstance(root, int):
                self._stats[root].accepted += accepted
            else:
                for i in root.settle_along(emitted, accepted, self._ledger.experience):
                    self._stats[i].accepted += 1
        pace = self._budget.pace
        for i, stats in enumerate(self._stats):
            trials = self._ledger.trials[i] if pace and (i in self._guessers or not self._ledger.is_asked(i)) else None
            earned, cost, is_first = 0, 0.0, False
            if i in self._asked:
                earned, fewer = self._earned(i, outcome)
                seconds, is_first = self._seconds[i], i not in self._has_observed
                self._has_observed.add(i)
                if pace and trials:
                    length, sequences = average_length(outcome.texts), len(outcome.texts)
                    cost = pace.rate() * seconds + pace.price(len(outcome.logits), fewer, length, sequences)
                stats.asked += 1
                stats.earned += earned
                stats.seconds += seconds
            if trials:  # also of a source that was not asked: its pause goes on
                trials.count(earned, cost, is_first)

    def _earned(self, i: int, outcome: Outcome) -> tuple[int, int]:
        """Return the tokens that the step would not have written without this source, and the rows that it then has."""
        accepted = sum(len(path) - 1 for path in outcome.paths)
        proposers = set().union(*self._proposed)
        if i not in proposers:
            return 0, len(outcome.logits)
        if proposers == {i}:
            return accepted, len(self._proposed) * (1 + self._window_rows)
        others = [self._merge({j: tree for j, tree in by_source.items() if j != i})[1] for by_source in self._proposed]
        chosen = self._budget.choose(others, average_length(outcome.texts), self._window_rows)
        earned = accepted - sum(tree.follow(emitted) for tree, emitted in zip(chosen, outcome.emitted, strict=True))
        return earned, self._budget.rows(chosen, self._window_rows)

    def _verifiable(self, i: int, tree: GuessTree, depth: int, limits: Limits) -> GuessTree:
        """Return the part of a source's tree that can be verified, each node with a known number in ``sources``."""
        # Trees are small, so Python's own max and min are faster than numpy's.
        if (largest := max(tree.tokens.tolist())) >= self._vocabulary:
            raise ValueError(
                f"{self._names[i]} proposes token {largest}, but the model knows {self._vocabulary} tokens"
            )
        if max(tree.depths.tolist()) > depth:
            tree = tree.part(np.flatnonzero(tree.depths <= depth))
        if limits.is_chain and (tree.parents != np.arange(-1, len(tree) - 1)).any():
            tree = tree.likeliest_chain()
        tree = tree.prune(limits.guesses)
        origins = tree.sources.tolist()
        if origins and not 0 <= min(origins) <= max(origins) < len(Origin):
            is_known = (tree.sources >= 0) & (tree.sources < len(Origin))
            tree = replace(tree, sources=np.where(is_known, tree.sources, len(Origin) + i))
        return tree

    def _merge(self, trees: dict[int, GuessTree]) -> tuple[Node | int, GuessTree]:
        """Merge the sources' trees of one sequence.

        Returns the root and the merged tree; or a source's index and its tree, if this tree is used as it is.
        """
        if len(trees) == 1:
            ((i, tree),) = trees.items()
            if self._sources[i].is_calibrated:
                return i, tree
        root = Node()
        for i, tree in trees.items():
            root.add(tree, i)
        tree = root.tree(self._ledger.experience)
        if self._limits.is_chain:
            tree = tree.likeliest_chain()
        return root, tree.prune(self._limits.guesses)
