"""Layout of one step: its tokens, their positions, and what each of them sees.

    [ root | guess tree (verification branch) | window (lookahead branch) ]

The whole step is one forest below the root. L positions are committed. A token stands at position L + depth. It sees
the committed cache and its own ancestors, so positions and mask follow from the parents alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from ngram_pool import GuessTree

MAX_DEPTH = 64
"""Depth of a guess, at most. Attention of fused passes counts on it: NEAR in cpu/attention.h."""


@dataclass(frozen=True)
class Visibility:
    """Which of the earlier keys a query sees: all of them, a sliding window, or its own chunk."""

    window: int | None = None
    """A query at position p sees keys at positions above p - window."""
    chunk: int | None = None
    """A query at position p sees keys at positions p // chunk * chunk and later."""

    @cached_property
    def is_full(self) -> bool:
        """Whether every query sees all keys."""
        return self.window is None and self.chunk is None

    def hides(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return bool [batch, queries, keys], True where hidden, by positions [batch, n], unless it `is_full`."""
        queries, keys = queries[:, :, None], keys[:, None, :]
        if self.window is not None:
            return queries - keys >= self.window
        return queries // self.chunk != keys // self.chunk

    def hides_any(self, keys: np.ndarray, last: int) -> bool:
        """Whether a key may be hidden from a query up to position ``last``. keys: positions [batch, n]; -1 is a gap."""
        first = keys.min(initial=last)
        if first < 0:
            return True
        if self.window is not None:
            return last - first >= self.window
        return self.chunk is not None and last // self.chunk != first // self.chunk


@dataclass(frozen=True)
class Step:
    """The T tokens of one pass, a row each. Row 0 is the root, rows 1..guesses are the guess tree, the rest the window.

    ids, parents, depths: int64 [T]. The root's parent is -1.
    ancestors: bool [T, T]. Row i marks i and all its ancestors.
    guesses: rows of the guess tree.
    computed: first rows that earlier passes have computed. The next pass computes the others.
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
        """Map (row, token) to the row of the guess that continues this row with this token."""
        rows = slice(1, self.guesses + 1)
        keys = zip(self.parents[rows].tolist(), self.ids[rows].tolist(), strict=True)
        return dict(zip(keys, range(1, self.guesses + 1), strict=True))

    def positions(self, length: int, last: int | None = None) -> np.ndarray:
        """Return positions, int64 [T], when ``length`` positions are committed. None lies beyond ``last``.

        Only window tokens can lie beyond it; they are moved back. At worst this spoils an n-gram, while a position
        that plain decoding would never reach can crash a model.
        """
        positions = length + self.depths
        return positions if last is None else np.minimum(positions, max(last, length))


def grow(ids: Sequence[int], parents: Sequence[int], computed: int) -> Step:
    """Make a step of these rows, parents first. Earlier passes have computed the first ``computed`` of them."""
    forest = np.array(parents, np.int64)
    ancestors = _closure(forest)
    return Step(np.array(ids, np.int64), forest, ancestors.sum(1) - 1, ancestors, len(ids) - 1, computed)


def lay_out(root: int, tree: GuessTree, window: Sequence[np.ndarray] = ()) -> Step:
    """Make a step of the root, the guesses and the rows of a Jacobi window, int64 [W] each."""
    ids = np.array([root, *tree.tokens.tolist()])  # for so few, lists are faster than numpy
    parents, depths = np.array([-2, *tree.parents.tolist()]) + 1, np.array([0, *tree.depths.tolist()])
    ancestors = _closure(parents)
    if len(window):
        n = len(ids)
        w_parents, w_depths, w_ancestors = _window_layout(len(window[0]), len(window))
        ids = np.concatenate([ids, *window])
        parents = np.concatenate([parents, np.where(w_parents < 0, 0, w_parents + n)])
        depths = np.concatenate([depths, w_depths])
        tree_ancestors, ancestors = ancestors, np.zeros((len(ids), len(ids)), bool)
        ancestors[:n, :n], ancestors[n:, n:] = tree_ancestors, w_ancestors
        ancestors[n:, 0] = True
    return Step(ids, parents, depths, ancestors, len(tree.tokens))


def pad(
    steps: list[Step], lengths: list[int], last: list[int] | None, min_rows: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and positions, int64 [batch, T], and ancestors, bool [batch, T, C + T], of the steps of a batch.

    C rows of each step are computed already. T is the number of other rows of the longest step, at least ``min_rows``.
    Shorter steps are filled up with copies of their root that no other token sees. lengths, last: the arguments of
    `Step.positions`, for each sequence.
    """
    computed = steps[0].computed
    if len(steps) == 1 and len(steps[0]) - computed >= min_rows:  # the usual case: nothing is filled up
        step = steps[0]
        positions = step.positions(lengths[0], last[0] if last else None)
        return step.ids[None, computed:], positions[None, computed:], step.ancestors[None, computed:]
    shape = len(steps), max(min_rows, *(len(step) - computed for step in steps))
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


def hidden(ancestors: np.ndarray, positions: np.ndarray, cached: np.ndarray, visibility: Visibility) -> np.ndarray:
    """Return which keys each row must not see, bool [batch, T, seen + C + T].

    ancestors, positions: as `pad` returns them. If ``visibility`` hides any key, C must be 0.
    cached: position of each committed column that the layer's cache shows, int64 [batch or 1, seen]; -1 marks a gap.
    """
    found = ~ancestors
    if cached.shape[1]:
        cached = np.broadcast_to(cached, (len(positions), cached.shape[1]))
        gaps = np.broadcast_to(cached[:, None] < 0, (*positions.shape, cached.shape[1]))
        found = np.concatenate([gaps, found], axis=2)
    if visibility.is_full:
        return found
    return found | visibility.hides(positions, np.concatenate([cached, positions], axis=1))


def mask(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an additive mask [batch, 1, T, keys]: the dtype's minimum where a key is hidden, 0 elsewhere."""
    unseen = to_device(hidden, device)
    return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, torch.finfo(dtype).min)[:, None]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for the work that the device still has to do.

    When the copy returns, CUDA has read all memory that is not pinned. Of MPS this is not known.
    """
    return torch.from_numpy(array).to(device, non_blocking=device.type != "mps")


@lru_cache(maxsize=64)
def _window_layout(columns: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parents, depths and ancestors of a window (Fu et al. 2024, arXiv 2402.02057, section 3).

    Row 0 is a chain below the root. Each later row continues the one above it, column by column. Parent -1 is the root.
    """
    index = np.arange(rows * columns)
    row, column = index // columns, index % columns
    parents = np.where(row > 0, index - columns, column - 1)
    return parents, 1 + row + column, _closure(parents)


def _closure(parents: np.ndarray) -> np.ndarray:
    """Return bool [n, n] in which row i marks i and all its ancestors. Parents precede children; -1 is no node."""
    closure = np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            closure[node] = closure[parent]
        closure[node, node] = True
    return closure
