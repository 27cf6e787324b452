"""The guess tree: candidate continuations merged by shared prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

Ints = Sequence[int] | np.ndarray


class Origin(IntEnum):
    """The origin of evidence in a pool. An accepted token is counted for the origin of its guess.

    A source of guesses is something else: an object that proposes trees, such as a pool as a whole.
    """

    PROMPT = 0
    TEXT = 1
    LOGITS = 2
    JACOBI = 3
    FILE = 4


@dataclass(frozen=True)
class GuessTree:
    """n guessed tokens below the root (the last accepted token, which is not a node).

    A pool lays out its trees depth-first, most likely child first. So the most likely path is contiguous from node 0.

    tokens: int64 [n].
    parents: int64 [n], the index of an earlier node, or -1 for the root. The children of a node have distinct tokens.
    depths: int64 [n], 1 for children of the root.
    probabilities: float64 [n], the estimated probability that the node is accepted, at most its parent's.
    sources: int64 [n], the `Origin` that an accepted node is credited to; -1: the source of guesses that proposes it.

    Raises ValueError, naming the node, for a tree that breaks these rules.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    probabilities: np.ndarray
    sources: np.ndarray

    def __post_init__(self) -> None:
        n = len(self.tokens)
        shapes = {x.shape for x in (self.tokens, self.parents, self.depths, self.probabilities, self.sources)}
        if shapes != {(n,)}:
            raise ValueError(f"the arrays of a guess tree must be of one length, not of shapes {shapes}")
        if not n:
            return
        places = np.arange(n)
        self._check((self.parents >= -1) & (self.parents < places), "parent", self.parents, "an earlier node, or -1")
        self._check(self.tokens >= 0, "token", self.tokens, "0 or more")
        chances = self.probabilities
        above = np.where(self.parents < 0, 1.0, chances[self.parents])
        is_sound = (chances >= 0) & (chances <= above)  # false for NaN
        self._check(is_sound, "probability", chances, "a number from 0 to its parent's, or to 1 below the root")
        below = np.where(self.parents < 0, 0, self.depths[self.parents]) + 1
        self._check(self.depths == below, "depth", self.depths, "its parent's depth plus 1")
        order = np.lexsort((self.tokens, self.parents))
        is_repeated = np.zeros(n, bool)
        is_repeated[order[1:]] = (np.diff(self.tokens[order]) == 0) & (np.diff(self.parents[order]) == 0)
        self._check(~is_repeated, "token", self.tokens, "different from its siblings' tokens")

    @staticmethod
    def _check(is_sound: np.ndarray, name: str, values: np.ndarray, wanted: str) -> None:
        if not is_sound.all():
            node = int(np.argmin(is_sound))
            raise ValueError(f"node {node} of a guess tree has {name} {values[node]}: it must be {wanted}")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> "GuessTree":
        nothing = np.empty(0, np.int64)
        return cls.trusted(nothing, nothing, nothing, np.empty(0), nothing)

    @classmethod
    def trusted(cls, *arrays: np.ndarray) -> "GuessTree":
        """Make a tree of arrays that are known to follow the rules, without checks, which would slow each step down."""
        tree = object.__new__(cls)
        vars(tree).update(zip(cls.__dataclass_fields__, arrays, strict=True))
        return tree

    @classmethod
    def of(cls, tokens: Ints, parents: Ints, source: ArrayLike = -1, probabilities: ArrayLike = 1.0) -> "GuessTree":
        """Make a tree of these guesses, parents first. source, probabilities: one for all nodes, or one for each."""
        parents = np.asarray(parents, np.int64)
        depths = np.ones(len(parents), np.int64)
        for node, parent in enumerate(parents.tolist()):
            if 0 <= parent < node:
                depths[node] = depths[parent] + 1
        tokens, n = np.asarray(tokens, np.int64), len(parents)
        sources, probabilities = np.asarray(source, np.int64), np.asarray(probabilities, float)
        return cls(tokens, parents, depths, _of_all(probabilities, n), _of_all(sources, n))

    @classmethod
    def chain(cls, tokens: Ints, source: ArrayLike = -1, probabilities: ArrayLike = 1.0) -> "GuessTree":
        """Make a tree of a single branch."""
        return cls.of(tokens, np.arange(-1, len(tokens) - 1), source, probabilities)

    @cached_property
    def ranking(self) -> list[int]:
        """The nodes' indices, most likely first; among equally likely nodes, the earlier first."""
        return sorted(range(len(self.tokens)), key=self.probabilities.tolist().__getitem__, reverse=True)

    def prune(self, count: int) -> "GuessTree":
        """Return the tree of the ``count`` most likely nodes, in the same order."""
        if count >= len(self.tokens):
            return self
        if count <= 0:
            return GuessTree.empty()
        return self.part(sorted(self.ranking[:count]))  # parents are included, being at least as likely

    def likeliest_chain(self) -> "GuessTree":
        """Return the branch that takes the most likely child at each node."""
        kept: list[int] = []
        while True:
            children = np.flatnonzero(self.parents == (kept[-1] if kept else -1))
            if not len(children):
                return self.part(kept)
            kept.append(int(children[self.probabilities[children].argmax()]))

    def follow(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, the tree guesses along one branch."""
        node = -1
        for place, token in enumerate(tokens):
            children = np.flatnonzero((self.parents == node) & (self.tokens == token))
            if not len(children):
                return place
            node = int(children[0])
        return len(tokens)

    def part(self, kept: Ints) -> "GuessTree":
        """Return the tree of the nodes ``kept``, in ascending order. They include each node's parent."""
        nodes = np.asarray(kept, np.int64)
        places = {-1: -1} | dict(zip(nodes.tolist(), range(len(nodes)), strict=True))
        parents = np.array(list(map(places.__getitem__, self.parents[nodes].tolist())), np.int64)
        chances = self.probabilities[nodes]
        return GuessTree.trusted(self.tokens[nodes], parents, self.depths[nodes], chances, self.sources[nodes])


def _of_all(values: np.ndarray, count: int) -> np.ndarray:
    return np.full(count, values) if values.ndim == 0 else values
