"""Several sources of guesses as one: their trees merge, their claims are calibrated, each is asked while it pays."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lookahead.guessing.budget import Trials
from lookahead.guessing.source import Batch, GuessSource, Limits, Needs, Outcome
from ngram_pool import GuessTree, Source
from ngram_pool.forks import Lock

BINS = 10  # of claimed probabilities
PRIOR = 8.0  # guesses of each bin that count as having come true as claimed, before any were seen
MIN_CLAIM = 1e-6  # that one is counted as, so that claims of nothing leave something to divide by
FADE = 0.995  # of what a bin has counted, each time that it counts another guess


class Calibration:
    """How often claims of a probability come true: that a guess is accepted once its parent is."""

    def __init__(self) -> None:
        middles = (np.arange(BINS) + 0.5) / BINS
        self._claimed, self._accepted = PRIOR * middles, PRIOR * middles
        self._lock = Lock()

    def __call__(self, claim: float) -> float:
        """The probability that a claim is worth."""
        i = min(int(claim * BINS), BINS - 1)
        return min(claim * self._accepted[i] / self._claimed[i], 1.0)

    def count(self, claim: float, is_accepted: bool) -> None:
        i = min(int(claim * BINS), BINS - 1)
        with self._lock:
            self._claimed[i] = FADE * self._claimed[i] + max(claim, MIN_CLAIM)
            self._accepted[i] = FADE * self._accepted[i] + is_accepted


class Ledger:
    """What sources have claimed and earned, over all calls."""

    def __init__(self, sources: Sequence[GuessSource]):
        self.names = [source.name.lower() for source in Source]
        """What accepted guesses are counted as, by the number in `GuessTree.sources`."""
        self.trials: list[Trials | None] = []
        """Of each source: whether asking it pays."""
        self._calibrations: dict[frozenset[int], Calibration] = {}
        for source in sources:
            self.enter(source)

    def enter(self, source: GuessSource) -> None:
        """Begin the account of one more source."""
        self.names.append(type(source).__name__)
        self.trials.append(None if source.is_free else Trials(1, first=1))

    def calibration(self, proposers: frozenset[int]) -> Calibration:
        """That of guesses which just these sources propose: what several of them say is worth more."""
        known = self._calibrations.get(proposers)
        return known or self._calibrations.setdefault(proposers, Calibration())

    def is_asked(self, number: int) -> bool:
        trials = self.trials[number]
        return trials is None or trials.level > 0


@dataclass
class Node:
    """A guess that one or several sources propose; or the root, which all trees have in common."""

    token: int = -1
    claim: float = 0.0
    """Largest of the claimed probabilities that it is accepted once its parent is."""
    proposers: frozenset[int] = frozenset()
    source: int = -1
    """The number of whoever claimed that."""
    children: dict[int, "Node"] = field(default_factory=dict)

    def add(self, tree: GuessTree, proposer: int) -> None:
        """Merge a tree below this root. proposer: its source's place among the sources."""
        nodes: list[Node] = []
        chances = tree.probabilities.tolist()
        for token, parent, chance, source in zip(
            tree.tokens.tolist(), tree.parents.tolist(), chances, tree.sources.tolist(), strict=True
        ):
            above, before = (nodes[parent], chances[parent]) if parent >= 0 else (self, 1.0)
            claim = chance / before if before > 0 else 0.0
            node = above.children.setdefault(token, Node(token))
            node.proposers |= {proposer}
            if claim >= node.claim:
                node.claim, node.source = claim, source
            nodes.append(node)

    def tree(self, ledger: Ledger) -> GuessTree:
        """What is below this root, depth-first, the likeliest child first, with the probabilities it is worth."""
        rows: list[tuple[int, int, int, float]] = []  # token, parent, source, probability
        waiting: list[tuple[Node, int, float]] = [(self, -1, 1.0)]
        while waiting:
            node, parent, chance = waiting.pop()
            place = -1
            if node is not self:
                place = len(rows)
                rows.append((node.token, parent, node.source, chance))
            worth = [(ledger.calibration(child.proposers)(child.claim), child) for child in node.children.values()]
            excess = max(sum(each for each, _ in worth), 1.0)  # at most one of the children is accepted
            worth.sort(key=lambda pair: pair[0])
            waiting += [(child, place, chance * each / excess) for each, child in worth]
        return GuessTree.of(*zip(*rows, strict=True)) if rows else GuessTree.empty()


def needs_of(sources: Sequence[GuessSource]) -> Needs:
    """What these sources want to see, all together."""
    layers = {layer for source in sources for layer in source.needs.hidden_states}
    return Needs(max(source.needs.prompt_logits for source in sources), tuple(sorted(layers)))


class Combined(GuessSource):
    """The sources of one call."""

    def __init__(self, sources: Sequence[GuessSource], ledger: Ledger, rate: Callable[[], float] | None):
        """rate: tokens that a second is worth; None where every source is to be asked in each step."""
        self.needs = needs_of(sources)
        self._sources = [copy.copy(source) for source in sources]
        self._ledger = ledger
        self._rate = rate
        self._begun: list[GuessSource] = []
        self._seconds = np.zeros(len(sources))  # of the step under way
        self._roots: list[Node | int] = []  # of each sequence's tree, or whose it is (`_merge`)

    def start(self, batch: Batch) -> None:
        self._vocabulary = batch.vocabulary
        for source in self._sources:
            self._begun.append(source)
            source.start(batch)

    def read(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        for source in self._sources:
            source.read(text, logits, hidden_states)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._seconds[:] = 0
        self._asked = [i for i in range(len(self._sources)) if self._ledger.is_asked(i)]
        proposed: list[dict[int, GuessTree]] = [{} for _ in texts]
        for i in self._asked:
            with self._timed(i):
                trees = self._sources[i].propose(texts, limits) or []
            if len(trees) != len(texts):
                raise ValueError(f"{self._name(i)} proposes {len(trees)} trees for {len(texts)} sequences")
            for of_sequence, tree, depth in zip(proposed, trees, limits.depths, strict=True):
                if len(tree):
                    of_sequence[i] = self._taken(i, tree, depth, limits)
        merged = [self._merge(of_sequence, limits.is_chain) for of_sequence in proposed]
        self._roots = [root for root, _ in merged]
        return [tree.likeliest(limits.guesses) for _, tree in merged]

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        rows = [source.look_ahead(limits) for source in self._sources]
        return [next(filter(None, of_sequence), []) for of_sequence in zip(*rows, strict=True)]

    def observe(self, outcome: Outcome) -> None:
        for i in self._asked:
            with self._timed(i):
                self._sources[i].observe(outcome)
        earned = np.zeros(len(self._sources))
        for root, path, emitted in zip(self._roots, outcome.paths, outcome.emitted, strict=True):
            if isinstance(root, Node):
                self._settle(root, emitted, len(path) - 1, earned)
            else:
                earned[root] += len(path) - 1
        if self._rate:
            for i in range(len(self._sources)):
                if trials := self._ledger.trials[i]:  # of what was not asked, the pause goes on
                    trials.count(earned[i], self._rate() * self._seconds[i])

    def keep(self, sequences: list[int]) -> None:
        for source in self._sources:
            source.keep(sequences)

    def end(self) -> None:
        with ExitStack() as ending:  # each is told, whatever others raise
            for source in self._begun:
                ending.callback(source.end)

    def _taken(self, i: int, tree: GuessTree, depth: int, limits: Limits) -> GuessTree:
        """What can be verified of a source's tree."""
        if tree.tokens.max() >= self._vocabulary:
            raise ValueError(
                f"{self._name(i)} proposes token {tree.tokens.max()}, the model knows {self._vocabulary} tokens"
            )
        if tree.depths.max() > depth:
            tree = tree.part(np.flatnonzero(tree.depths <= depth))
        if limits.is_chain and (tree.parents != np.arange(-1, len(tree) - 1)).any():
            tree = tree.likeliest_chain()
        tree = tree.likeliest(limits.guesses)
        is_known = (tree.sources >= 0) & (tree.sources < len(Source))
        if not is_known.all():
            tree = replace(tree, sources=np.where(is_known, tree.sources, len(Source) + i))
        return tree

    def _merge(self, trees: dict[int, GuessTree], is_chain: bool) -> tuple[Node | int, GuessTree]:
        """One tree, and its root; or whose it is, where it is taken as it was proposed."""
        if len(trees) == 1:
            ((i, tree),) = trees.items()
            if self._sources[i].is_calibrated:
                return i, tree
        root = Node()
        for i, tree in trees.items():
            root.add(tree, i)
        tree = root.tree(self._ledger)
        return root, tree.likeliest_chain() if is_chain else tree

    def _settle(self, node: Node, emitted: list[int], accepted: int, earned: np.ndarray) -> None:
        """Count which claims came true along the emitted tokens, of which so many were accepted guesses."""
        for place, token in enumerate(emitted):
            for child in node.children.values():
                self._ledger.calibration(child.proposers).count(child.claim, child.token == token)
            if token not in node.children:
                break
            node = node.children[token]
            if place < accepted and len(node.proposers) == 1:  # nobody else would have had it
                earned[next(iter(node.proposers))] += 1

    def _name(self, i: int) -> str:
        return type(self._sources[i]).__name__

    @contextmanager
    def _timed(self, i: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[i] += time.perf_counter() - began
