"""The guess tree: candidate continuations merged by shared prefix."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Source(IntEnum):
    """Where a piece of evidence came from; accepted tokens are attributed to it."""

    PROMPT = 0
    TEXT = 1
    LOGITS = 2
    JACOBI = 3


@dataclass(frozen=True)
class GuessTree:
    """n guessed tokens below the root (the last accepted token, which is not a node).

    Nodes stand in depth-first order, likeliest child first, so a parent precedes its children and the likeliest path
    is contiguous from node 0 on.

    tokens: int64 [n].
    parents: int64 [n], a node's index or -1 for the root.
    depths: int64 [n], 1 for children of the root.
    probabilities: float64 [n], estimated probability that the node is accepted; never above its parent's.
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
    def chain(cls, tokens, source: Source) -> "GuessTree":
        """A single branch of guesses without estimated probabilities (all 1)."""
        tokens = np.asarray(tokens, np.int64)
        n = len(tokens)
        return cls(tokens, np.arange(-1, n - 1), np.arange(1, n + 1), np.ones(n), np.full(n, source, np.int64))

    @classmethod
    def from_nodes(cls, nodes: list[tuple[int, int, float, int]]) -> "GuessTree":
        """Order ``nodes``, tuples (token, parent, probability, source) in which parents come first, depth-first."""
        if not nodes:
            return cls.empty()
        children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
        for index, node in enumerate(nodes):
            children[node[1]].append(index)  # children[-1] are the root's
        tokens, parents, depths, probabilities, sources = [], [], [], [], []
        stack = [(index, -1, 1) for index in reversed(children[-1])]
        while stack:
            index, parent, depth = stack.pop()
            token, _, probability, source = nodes[index]
            place = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            probabilities.append(probability)
            sources.append(source)
            stack.extend((child, place, depth + 1) for child in reversed(children[index]))
        return cls(
            np.array(tokens, np.int64),
            np.array(parents, np.int64),
            np.array(depths, np.int64),
            np.array(probabilities),
            np.array(sources, np.int64),
        )
