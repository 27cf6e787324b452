"""The trees of several sources as one, with their claims calibrated.

A claim is the probability that a source gives a guess if the guess's parent is accepted. A source speaks at a
node if it proposes any children of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ngram_pool import GuessTree
from ngram_pool.forks import Lock

BINS = 10  # of claims, equally wide
PRIOR = 8.0  # guesses that each bin starts with, accepted as often as claimed
MIN_CLAIM = 1e-6  # smaller claims count as this, so that there is no division by 0
FADE = 0.995  # factor by which a bin, or a mixture, fades with each guess that it counts


class Calibration:
    """The share of accepted guesses, by the size of claims."""

    def __init__(self) -> None:
        middles = (np.arange(BINS) + 0.5) / BINS
        self._claimed, self._accepted = PRIOR * middles, PRIOR * middles
        self._lock = Lock()

    def __call__(self, claim: float) -> float:
        """Return the probability that the guess is accepted once its parent is."""
        i = min(int(claim * BINS), BINS - 1)
        return min(claim * self._accepted[i] / self._claimed[i], 1.0)

    def count(self, claim: float, is_accepted: bool) -> None:
        i = min(int(claim * BINS), BINS - 1)
        with self._lock:
            self._claimed[i] = FADE * self._claimed[i] + max(claim, MIN_CLAIM)
            self._accepted[i] = FADE * self._accepted[i] + is_accepted


class Mixture:
    """The weights by which the claims of the sources that speak at a node are averaged.

    The weights follow the tokens that were emitted, by one step of expectation maximisation for each.
    """

    def __init__(self, speakers: frozenset[int]):
        self._belief = dict.fromkeys(speakers, 1.0)
        self._lock = Lock()

    def __call__(self, claims: dict[int, float]) -> float:
        """Return the claim of all speakers together."""
        return sum(self._belief[i] * claim for i, claim in claims.items()) / sum(self._belief.values())

    def count(self, claims: dict[int, float]) -> None:
        """Count an emitted token. claims: for each source that proposed it."""
        with self._lock:
            shares = {i: self._belief[i] * max(claim, MIN_CLAIM) for i, claim in claims.items()}
            total = sum(shares.values()) or 1.0
            self._belief = {i: FADE * belief + shares.get(i, 0.0) / total for i, belief in self._belief.items()}


class Experience:
    """The shares of accepted guesses of all sources, over all calls."""

    def __init__(self) -> None:
        self._calibrations: dict[tuple[frozenset[int], frozenset[int]], Calibration] = {}
        self._mixtures: dict[frozenset[int], Mixture] = {}

    def calibration(self, speakers: frozenset[int], proposers: frozenset[int]) -> Calibration:
        """Return the calibration of guesses that exactly these of the speakers propose: agreement raises
        probability."""
        known = self._calibrations.get((speakers, proposers))
        return known or self._calibrations.setdefault((speakers, proposers), Calibration())

    def mixture(self, speakers: frozenset[int]) -> Mixture:
        """Return the weights of these sources at nodes where exactly they speak."""
        return self._mixtures.get(speakers) or self._mixtures.setdefault(speakers, Mixture(speakers))


@dataclass
class Node:
    """A guess that one or more sources propose, or the common root of their trees."""

    token: int = -1
    claims: dict[int, float] = field(default_factory=dict)
    """By the index of each source that proposes it."""
    source: int = -1
    """Number of the source with the largest claim, as in `GuessTree.sources`."""
    children: dict[int, "Node"] = field(default_factory=dict)

    @property
    def speakers(self) -> frozenset[int]:
        """The sources that propose any of the children."""
        return frozenset().union(*(child.claims for child in self.children.values()))

    def add(self, tree: GuessTree, proposer: int) -> None:
        """Merge a tree below this root. proposer: the index of its source."""
        nodes: list[Node] = []
        chances = tree.probabilities.tolist()
        for token, parent, chance, source in zip(
            tree.tokens.tolist(), tree.parents.tolist(), chances, tree.sources.tolist(), strict=True
        ):
            above, before = (nodes[parent], chances[parent]) if parent >= 0 else (self, 1.0)
            claim = chance / before if before > 0 else 0.0
            node = above.children.setdefault(token, Node(token))
            if claim >= max(node.claims.values(), default=0.0):
                node.source = source
            node.claims[proposer] = claim
            nodes.append(node)

    def worth(self, experience: Experience) -> list[tuple[float, "Node"]]:
        """Return the children, each with its probability if this node is accepted, most likely last."""
        if not self.children:
            return []
        speakers = self.speakers
        mixture = experience.mixture(speakers)
        worth = [
            (experience.calibration(speakers, frozenset(child.claims))(mixture(child.claims)), child)
            for child in self.children.values()
        ]
        excess = max(sum(each for each, _ in worth), 1.0)  # at most one child is accepted: they add up to 1 at most
        return sorted(((each / excess, child) for each, child in worth), key=lambda pair: pair[0])

    def settle(self, token: int, experience: Experience) -> None:
        """Count that the text continued with this token."""
        speakers = self.speakers
        mixture = experience.mixture(speakers)
        for child in self.children.values():
            calibration = experience.calibration(speakers, frozenset(child.claims))
            calibration.count(mixture(child.claims), child.token == token)
        if len(speakers) > 1 and token in self.children:
            mixture.count(self.children[token].claims)

    def tree(self, experience: Experience) -> GuessTree:
        """Return the tree below this root with calibrated probabilities, depth-first, most likely child first."""
        rows: list[tuple[int, int, int, float]] = []  # token, parent, source, probability
        waiting: list[tuple[Node, int, float]] = [(self, -1, 1.0)]
        while waiting:
            node, parent, chance = waiting.pop()
            place = -1
            if node is not self:
                place = len(rows)
                rows.append((node.token, parent, node.source, chance))
            waiting += [(child, place, chance * each) for each, child in node.worth(experience)]
        return GuessTree.of(*zip(*rows, strict=True)) if rows else GuessTree.empty()

    def settle_along(self, emitted: list[int], accepted: int, experience: Experience) -> Iterator[int]:
        """Count accepted and rejected claims along the emitted tokens, of which ``accepted`` were guesses.

        Yields the sources that proposed an accepted guess, for each guess.
        """
        node = self
        for place, token in enumerate(emitted):
            node.settle(token, experience)
            if token not in node.children:
                break
            node = node.children[token]
            if place < accepted:
                yield from node.claims
