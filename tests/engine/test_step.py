"""Layout of a step against the definition, position by position."""

import math
import random

import numpy as np
import pytest
import torch

from lookahead.guessing.window import JacobiWindow
from lookahead.passes.runner import Output, looked_through
from lookahead.step import Step, Visibility, hidden, lay_out, mask, pad
from ngram_pool import GuessTree, Origin


def random_tree(rng: random.Random, most: int = 12) -> GuessTree:
    nodes: list[tuple[int, int]] = []  # parent and token, no two alike
    n = rng.randint(0, most)
    while len(nodes) < n:
        node = rng.randint(-1, len(nodes) - 1), rng.randrange(50)
        if node not in nodes:
            nodes.append(node)
    return GuessTree.of([token for _, token in nodes], [parent for parent, _ in nodes], Origin.TEXT)


def random_step(rng: random.Random) -> tuple[Step, GuessTree, JacobiWindow | None]:
    tree = random_tree(rng)
    if rng.random() < 0.3:
        return lay_out(3, tree), tree, None
    window = JacobiWindow(rng.choice([1, 2, 5]), rng.choice([2, 3, 5]), [7, 8, 9])
    for _ in range(rng.randint(0, 6)):
        window.advance(np.array([rng.randrange(50) for _ in range(window.size)]), rng.randint(1, 3))
    return lay_out(3, tree, window.rows), tree, window


def visible_by_definition(step: Step, tree: GuessTree, window: JacobiWindow | None) -> np.ndarray:
    """Who sees whom among the step's tokens, read off the definition with loops."""
    sees = np.zeros((len(step), len(step)), bool)
    n = len(tree)
    for i in range(len(step)):
        sees[i, i] = sees[i, 0] = True
    for node in range(n):
        parent = tree.parents[node]
        while parent >= 0:
            sees[1 + node, 1 + parent] = True
            parent = tree.parents[parent]
    for row in range(len(window.rows) if window else 0):
        for column in range(window.size):
            me = 1 + n + row * window.size + column
            for other in range(column + 1):  # row 0 up to this column
                sees[me, 1 + n + other] = True
            for above in range(1, row + 1):  # this column of rows 1..row
                sees[me, 1 + n + above * window.size + column] = True
    return sees


@pytest.mark.parametrize("seed", range(50))
def test_layout(seed):
    step, tree, window = random_step(random.Random(seed))
    n = len(tree)
    assert step.guesses == n
    window_tokens = np.concatenate(window.rows).tolist() if window else []
    assert step.ids.tolist() == [3, *tree.tokens.tolist(), *window_tokens]
    assert (step.ancestors == visible_by_definition(step, tree, window)).all()
    assert step.depths[0] == 0
    assert (step.depths[1 : n + 1] == tree.depths).all()
    for row in range(len(window.rows) if window else 0):
        for column in range(window.size):
            assert step.depths[1 + n + row * window.size + column] == 1 + column + row


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(window=5), Visibility(chunk=4)])
def test_mask(seed, visibility):
    """A key is seen if it is committed or an ancestor, of the same sequence, and in sight of the layer at its position.

    Columns of the cache in which a sequence holds nothing, and what pads the shorter steps, are seen by nobody.
    """
    rng = random.Random(seed)
    steps = [random_step(rng)[0] for _ in range(rng.randint(1, 3))]
    lengths = [rng.randint(0, 15) for _ in steps]
    gaps = [max(lengths) - length for length in lengths]
    cached = np.array([[*range(length), *[-1] * gap] for length, gap in zip(lengths, gaps, strict=True)])
    ids, positions, ancestors = pad(steps, lengths, None)
    unseen = hidden(ancestors, positions, cached, visibility)
    result = mask(unseen, torch.float32, torch.device("cpu"))
    longest = max(map(len, steps))
    assert result.shape == (len(steps), 1, longest, max(lengths) + longest)
    for b, (step, length) in enumerate(zip(steps, lengths, strict=True)):
        assert ids[b, : len(step)].tolist() == step.ids.tolist()
        assert positions[b, : len(step)].tolist() == step.positions(length).tolist()
        for query in range(len(step)):
            for column in range(max(lengths) + longest):
                row = column - max(lengths)
                position = column if row < 0 else positions[b, row]
                related = column < length if row < 0 else row < len(step) and step.ancestors[query, row]
                in_sight = True
                if visibility.window is not None:
                    in_sight = positions[b, query] - position < visibility.window
                if visibility.chunk is not None:
                    in_sight = positions[b, query] // visibility.chunk == position // visibility.chunk
                expected = 0.0 if related and in_sight else torch.finfo(torch.float32).min
                assert result[b, 0, query, column] == expected, (seed, b, query, column)


def test_children_and_positions():
    tree = GuessTree.of([5, 7, 6], [-1, 0, -1], Origin.TEXT)
    step = lay_out(4, tree)
    assert step.children() == {(0, 5): 1, (1, 7): 2, (0, 6): 3}
    assert step.positions(10).tolist() == [10, 11, 12, 11]
    assert step.positions(10, last=11).tolist() == [10, 11, 11, 11]


def test_window_layout_is_cached_by_shape():
    from lookahead.step import _window_layout

    _window_layout.cache_clear()
    window = JacobiWindow(4, 3, [1])
    window.advance(np.arange(4), 1)
    for _ in range(10):
        lay_out(0, GuessTree.empty(), window.rows)
    assert _window_layout.cache_info().misses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pass_is_looked_through(dtype):
    """The likeliest tokens are those of `generate`, among equals, too; rows that leave a doubt have none."""
    for seed in range(50):
        torch.manual_seed(seed)
        logits = torch.randint(-3, 3, (9, 7)).to(dtype)
        found = looked_through(Output(logits))
        assert (found.argmax, found.has_nan) == (logits.float().argmax(-1).tolist(), False)
    logits[2, 3], logits[4, 1], logits[5], logits[6, 2] = math.nan, math.inf, -math.inf, -math.inf
    found = looked_through(Output(logits))
    assert found.has_nan
    assert [row for row, token in enumerate(found.argmax) if token == -1] == [2, 4, 5]
    logits[2, 3] = 0
    assert looked_through(Output(logits)).has_nan is False
