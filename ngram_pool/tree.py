"""The guess tree: candidate continuations merged by shared prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

Ints = Sequence[int] | np.ndarray
"""A sequence of them: ids of tokens, places in a tree."""


class Source(IntEnum):
    """Where a piece of evidence came from; accepted tokens are attributed to it."""

    PROMPT = 0
    TEXT = 1
    LOGITS = 2
    JACOBI = 3
    FILE = 4


@dataclass(frozen=True)
class GuessTree:
    """n guessed tokens below the root (the last accepted token, which is not a node).

    Trees grown by a pool stand in depth-first order, likeliest child first, so that the likeliest path is contiguous
    from node 0 on.

    tokens: int64 [n].
    parents: int64 [n], the index of an earlier node, or -1 for the root. No two children of a node have the same token.
    depths: int64 [n], 1 for children of the root.
    probabilities: float64 [n], estimated probability that the node is accepted, never above its parent's.
    sources: int64 [n], the `Source` that each node is attributed to; -1: whoever proposes it.

    Raises ValueError for anything else, naming the node.
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
        is_sound = (chances >= 0) & (chances <= above)  # not of a NaN
        self._check(is_sound, "probability", chances, "a number from 0 to its parent's, or to 1 below the root")
        below = np.where(self.parents < 0, 0, self.depths[self.parents]) + 1
        self._check(self.depths == below, "depth", self.depths, "its parent's and 1")
        order = np.lexsort((self.tokens, self.parents))
        is_repeated = np.zeros(n, bool)
        is_repeated[order[1:]] = (np.diff(self.tokens[order]) == 0) & (np.diff(self.parents[order]) == 0)
        self._check(~is_repeated, "token", self.tokens, "another one than those of its siblings")

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
        """Of arrays that keep all rules for certain, so that nothing is checked: a step has no time for it."""
        tree = object.__new__(cls)
        vars(tree).update(zip(cls.__dataclass_fields__, arrays, strict=True))
        return tree

    @classmethod
    def of(cls, tokens: Ints, parents: Ints, source: ArrayLike = -1, probabilities: ArrayLike = 1.0) -> "GuessTree":
        """Given guesses, parents first. source, probabilities: of all nodes, or of each."""
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
        """A single branch of given guesses."""
        return cls.of(tokens, np.arange(-1, len(tokens) - 1), source, probabilities)

    @cached_property
    def ranking(self) -> np.ndarray:
        """Int64 [n], indices of the nodes, the likeliest first; of equally likely ones the earlier."""
        return np.argsort(-self.probabilities, kind="stable")

    def likeliest(self, count: int) -> "GuessTree":
        """The tree of the ``count`` likeliest nodes, in the order that they have here."""
        if count >= len(self):
            return self
        return self.part(np.sort(self.ranking[:count]))  # parents first: none is likelier

    def likeliest_chain(self) -> "GuessTree":
        """The branch that takes the likeliest child at each node."""
        kept: list[int] = []
        while True:
            children = np.flatnonzero(self.parents == (kept[-1] if kept else -1))
            if not len(children):
                return self.part(np.array(kept, np.int64))
            kept.append(int(children[self.probabilities[children].argmax()]))

    def part(self, kept: np.ndarray) -> "GuessTree":
        """The tree of these nodes, int64 [k], rising, with each its parent."""
        places = np.full(len(self) + 1, -1)  # the last is the root's, whose index is -1
        places[kept] = np.arange(len(kept))
        return GuessTree.trusted(
            self.tokens[kept],
            places[self.parents[kept]],
            self.depths[kept],
            self.probabilities[kept],
            self.sources[kept],
        )


def _of_all(values: np.ndarray, count: int) -> np.ndarray:
    return np.full(count, values) if values.ndim == 0 else values
