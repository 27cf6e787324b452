"""The guess tree: candidate continuations merged by shared prefix."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np


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

    A parent precedes its children. Trees grown by a pool stand in depth-first order, likeliest child first, so that
    the likeliest path is contiguous from node 0 on.

    tokens: int64 [n].
    parents: int64 [n], a node's index or -1 for the root.
    depths: int64 [n], 1 for children of the root.
    probabilities: float64 [n], estimated probability that the node is accepted, never above its parent's; NaN where
        nothing estimated it.
    sources: int64 [n], the `Source` that each node is attributed to.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    probabilities: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls) -> "GuessTree":
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, np.empty(0), nothing)

    @classmethod
    def of(cls, tokens, parents, source: Source) -> "GuessTree":
        """Given guesses, parents first, without estimated probabilities."""
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        n = len(depths)
        tokens, parents, depths = (np.asarray(values, np.int64) for values in (tokens, parents, depths))
        return cls(tokens, parents, depths, np.full(n, np.nan), np.full(n, source, np.int64))

    @cached_property
    def ranking(self) -> np.ndarray:
        """Int64 [n], indices of the nodes, the likeliest first; of equally likely ones the earlier."""
        return np.argsort(-self.probabilities, kind="stable")

    def likeliest(self, count: int) -> "GuessTree":
        """The tree of the ``count`` likeliest nodes, in the order that they have here."""
        if count >= len(self):
            return self
        kept = np.sort(self.ranking[:count])  # parents first: none is likelier
        places = np.full(len(self) + 1, -1)  # the last is the root's, whose index is -1
        places[kept] = np.arange(count)
        return GuessTree(
            self.tokens[kept],
            places[self.parents[kept]],
            self.depths[kept],
            self.probabilities[kept],
            self.sources[kept],
        )

    @classmethod
    def chain(cls, tokens, source: Source) -> "GuessTree":
        """A single branch of given guesses."""
        return cls.of(tokens, range(-1, len(tokens) - 1), source)
