"""Layout of one step: which tokens go into the forward pass, where they stand, and what they see.

    [ root | guess tree (verification branch) | window (lookahead branch) ]

The whole step is one forest below the root. A token stands at position L + depth, L being the committed length, and
sees the committed cache and its own ancestors, nothing else. So positions and mask follow from the parents alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ngram_pool import GuessTree


@dataclass(frozen=True)
class Visibility:
    """What a kind of attention layer lets a query see besides causality: all, a sliding window, or its own chunk."""

    window: int | None = None
    """A query at position p sees keys at positions above p - window."""
    chunk: int | None = None
    """A query at position p sees keys at positions p // chunk * chunk and later."""

    def hides(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray | None:
        """Bool [batch, queries, keys] from positions [batch, queries] and [batch, keys], or None: nothing is hidden."""
        queries, keys = queries[:, :, None], keys[:, None, :]
        if self.window is not None:
            return queries - keys >= self.window
        if self.chunk is not None:
            return queries // self.chunk != keys // self.chunk
        return None

    def hides_any(self, keys: np.ndarray, last: int) -> bool:
        """Whether keys at positions int64 [batch, n], -1 in a gap, may be hidden from queries at up to ``last``."""
        first = keys.min(initial=last)
        if first < 0:
            return True
        if self.window is not None:
            return last - first >= self.window
        return self.chunk is not None and last // self.chunk != first // self.chunk


@dataclass(frozen=True)
class Step:
    """T tokens of one forward pass. Row 0 is the root; rows 1..guesses are the guess tree; then comes the window.

    ids, parents, depths: int64 [T]; the root's parent is -1.
    ancestors: bool [T, T], row i marks i and all its ancestors.
    guesses: number of guess-tree rows.
    computed: number of first rows that an earlier pass has computed. The next pass computes the others.
    """

    ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    ancestors: np.ndarray
    guesses: int
    computed: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def children(self) -> dict[tuple[int, int], int]:
        """{(row, token): row of the guess that continues this row with this token}."""
        rows = slice(1, self.guesses + 1)
        keys = zip(self.parents[rows].tolist(), self.ids[rows].tolist(), strict=True)
        return {key: row for row, key in enumerate(keys, 1)}

    def positions(self, length: int, last: int | None = None) -> np.ndarray:
        """Int64 [T] when ``length`` positions are committed; window tokens are not placed beyond ``last``.

        A window token moved back costs a guess; a position that plain decoding would never use can crash a model.
        """
        positions = length + self.depths
        return positions if last is None else np.minimum(positions, max(last, length))

    def contexts(self, text: list[int], length: int) -> np.ndarray:
        """Int64 [1 + guesses, length]: the last tokens up to the root and up to each guess; -1 where there is none.

        text: all tokens before the root, of which the last ``length`` matter.
        """
        tail = text[-length:]
        lines = [[-1] * (length - len(tail)) + tail]  # shifted by one: the first is that of the root's parent
        rows = slice(0, self.guesses + 1)
        for token, parent in zip(self.ids[rows].tolist(), self.parents[rows].tolist(), strict=True):
            lines.append([*lines[parent + 1][1:], token])
        return np.array(lines[1:], np.int64)


def grow(ids: Sequence[int], parents: Sequence[int], computed: int) -> Step:
    """A step of these rows, parents first, of which the first ``computed`` were part of an earlier pass."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    forest = np.array(parents, np.int64)
    return Step(np.array(ids, np.int64), forest, np.array(depths, np.int64), _closure(forest), len(ids) - 1, computed)


def lay_out(root: int, tree: GuessTree, window: Sequence[np.ndarray] = ()) -> Step:
    """Put the root, the guesses and the rows of a Jacobi window, int64 [W] each, into one step."""
    ids = np.concatenate([[root], tree.tokens])
    parents = np.concatenate([[-1], tree.parents + 1])
    depths = np.concatenate([[0], tree.depths])
    ancestors = _closure(parents)
    if len(window):
        n = len(ids)
        w_parents, w_depths, w_ancestors = _window_layout(len(window[0]), len(window))
        ids = np.concatenate([ids, *window])
        parents = np.concatenate([parents, np.where(w_parents < 0, 0, w_parents + n)])
        depths = np.concatenate([depths, w_depths])
        tree_ancestors, ancestors = ancestors, np.zeros((len(ids), len(ids)), bool)
        ancestors[:n, :n] = tree_ancestors
        ancestors[n:, n:] = w_ancestors
        ancestors[n:, 0] = True
    return Step(ids, parents, depths, ancestors, len(tree))


def pad(
    steps: list[Step], lengths: list[int], last: list[int] | None, least: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and positions [batch, T] and ancestors [batch, T, C + T] of the steps of a batch, from which C rows, the same
    number in each step, were computed before.

    T is the number of other rows of the longest step, or ``least``. lengths, last: for each sequence, as
    `Step.positions` takes them. A shorter step is filled up by copies of its root that no other token sees.
    """
    computed = steps[0].computed
    shape = len(steps), max(least, *(len(step) - computed for step in steps))
    ids, positions = np.empty(shape, np.int64), np.empty(shape, np.int64)
    ancestors = np.zeros((*shape, computed + shape[1]), bool)
    ancestors[:, :, computed:] = np.eye(shape[1], dtype=bool)
    for b, step in enumerate(steps):
        t = len(step) - computed
        ids[b, :t], ids[b, t:] = step.ids[computed:], step.ids[0]
        positions[b, :t] = step.positions(lengths[b], last[b] if last else None)[computed:]
        positions[b, t:] = lengths[b]
        ancestors[b, :t, : len(step)] = step.ancestors[computed:]
    return ids, positions, ancestors


def mask(
    ancestors: np.ndarray,
    positions: np.ndarray,
    cached: np.ndarray,
    visibility: Visibility,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Additive mask [batch, 1, T, seen + C + T]: 0 where a token is seen, the dtype's minimum elsewhere.

    ancestors: bool [batch, T, C + T] and positions: int64 [batch, T], as `pad` gives them. Where something hides keys
    by their positions, C must be 0.
    cached: int64 [batch or 1, seen], position of each committed column that the layer's cache shows, -1 in a gap.
    """
    cached = np.broadcast_to(cached, (len(positions), cached.shape[1]))
    gaps = np.broadcast_to(cached[:, None] < 0, (*positions.shape, cached.shape[1]))
    hidden = np.concatenate([gaps, ~ancestors], axis=2)
    out_of_sight = visibility.hides(positions, np.concatenate([cached, positions], axis=1))
    if out_of_sight is not None:
        hidden = hidden | out_of_sight
    unseen = torch.from_numpy(hidden).to(device)
    return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, torch.finfo(dtype).min)[:, None]


@lru_cache(maxsize=64)
def _window_layout(columns: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, depths and ancestors of a window (Fu et al. 2024, arXiv 2402.02057, section 3), -1 being the root.

    Row 0 is a chain below the root; each later row continues the one above it, column by column.
    """
    index = np.arange(rows * columns)
    row, column = index // columns, index % columns
    parents = np.where(row > 0, index - columns, column - 1)
    return parents, 1 + row + column, _closure(parents)


def _closure(parents: np.ndarray) -> np.ndarray:
    """Bool [n, n]: row i marks i and all its ancestors (parents precede children; -1 is outside)."""
    closure = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            closure[node] |= closure[parent]
    return closure
