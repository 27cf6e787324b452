import numpy as np
import pytest
import torch

from lookahead.guessing.source import Batch, Limits, Outcome
from lookahead.guessing.window import JacobiWindow
from lookahead.sources.jacobi import JacobiSource
from lookahead.step import lay_out
from ngram_pool import GuessTree, NgramPool


def numbered(row: int, columns: range) -> np.ndarray:
    """An output whose tokens tell their step and their position, so that n-grams can be read."""
    return np.array([1000 * row + column for column in columns])


@pytest.mark.parametrize("ngram_size", [2, 3, 4, 7])
@pytest.mark.parametrize("accepted", [1, 2, 5])
def test_ngrams_run_along_columns(ngram_size, accepted):
    """An n-gram is one column's tokens of N consecutive iterations, at N consecutive positions."""
    size = 8
    window = JacobiWindow(size, ngram_size, [9])
    position = 1  # of row 0, column 0, counted from an origin that stays
    window.rows = [numbered(0, range(position, position + size))]
    for iteration in range(1, 12):
        newest = position + len(window.rows)  # position that the output at column 0 speaks of
        output = numbered(iteration, range(newest, newest + size))
        first = [row.copy() for row in window.rows]
        ngrams = window.advance(output, accepted)
        if len(ngrams):
            assert ngrams.shape == (size, ngram_size)
            assert (ngrams == np.stack([*first, output], axis=1)).all()
        position += accepted
        assert len(window.rows) <= ngram_size - 1
        for r, row in enumerate(window.rows):
            assert len(row) == size
            kept = row[row != 9]
            assert (kept % 1000 == np.arange(position + r, position + r + len(kept))).all()
    assert len(window.rows) == ngram_size - 1


def test_window_leaves_the_global_generators_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    JacobiWindow(5, 3, [1, 2, 3]).advance(np.arange(5), 2)
    assert (np.random.get_state()[1] == before).all()


def test_jacobi_block_moves_on_by_what_was_accepted():
    def said(*tokens):
        return torch.nn.functional.one_hot(torch.tensor(tokens), 30).float()

    def propose(text, longest) -> GuessTree:
        (tree,) = source.propose([text], Limits([longest], guesses=4, min_probability=0.0, is_chain=False))
        return tree

    def guessed(text, longest):
        return propose(text, longest).tokens.tolist()

    def learn(text, logits, path, emitted):
        step = lay_out(text[-1], propose(text, 10))
        source.observe(Outcome([text], [step], logits, [path], [emitted]))

    batch = Batch([[1, 2, 9]], temperature=1.0, vocabulary=30, pool=NgramPool(0.01))
    source = JacobiSource(4).start(batch)
    assert guessed([9, 11], 10) == [9, 9, 9, 9]
    learn([9, 11], said(12, 13, 14, 15, 16), [0], [12])
    assert guessed([9, 11, 12], 10) == [13, 14, 15, 16]
    learn([9, 11, 12], said(13, 14, 25, 26, 27), [0, 1, 2], [13, 14, 25])
    assert guessed([25], 10) == [26, 27, 25, 25]
    assert guessed([25], 1) == [26]
