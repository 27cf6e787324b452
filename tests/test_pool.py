import random
import threading
from copy import deepcopy

import numpy as np
import pytest

from ngram_pool import GuessTree, NgramPool, Source
from ngram_pool.pool import LONGEST, ORDERS, WIDTH


def random_text(rng: random.Random, length: int, vocabulary: int = 30) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(length)]


def test_memory_is_what_was_asked_for_and_stays_so():
    for memory_mb in (0.5, 3, 20):
        pool = NgramPool(memory_mb)
        asked = memory_mb * 2**20
        assert 0.95 * asked <= pool.nbytes <= asked
        before = pool.nbytes
        pool.learn(np.random.default_rng(0).integers(0, 1000, 20_000))
        assert pool.nbytes == before
        pool.check_integrity()


def test_a_long_passage_is_continued():
    """Text seen once is guessed as one chain when it comes again, as far as the budget goes."""
    passage = list(range(100, 140))
    pool = NgramPool(1)
    pool.learn(passage, Source.PROMPT)
    tree = pool.guess(passage[:10], budget=16)
    assert tree.tokens.tolist() == passage[10:26]
    assert tree.parents.tolist() == list(range(-1, 15))
    assert tree.depths.tolist() == list(range(1, 17))
    assert set(tree.sources.tolist()) == {Source.PROMPT}
    assert pool.guess(passage[:10], budget=16, max_depth=3).tokens.tolist() == passage[10:13]
    assert len(pool.guess([999], budget=16)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_well_formed_and_deterministic(seed):
    rng = random.Random(seed)
    pool, twin = NgramPool(0.2), NgramPool(0.2)
    for p in (pool, twin):
        source = random.Random(seed)
        for _ in range(5):
            p.learn(random_text(source, 200, 8), Source.TEXT)
            contexts = np.array([random_text(source, LONGEST, 8) for _ in range(9)])
            tokens = np.array([source.sample(range(8), 4) for _ in range(9)])
            p.learn_next(contexts, tokens, np.full((9, 4), 0.25))
            p.learn_ngrams(np.array([random_text(source, 3, 8) for _ in range(4)]))
        p.check_integrity()
    for _ in range(20):
        context, budget = random_text(rng, rng.randint(1, 12), 8), rng.choice([1, 2, 16, 60])
        chain, floor = rng.random() < 0.3, rng.choice([0.0, 0.05])
        tree = pool.guess(context, budget, floor, chain=chain)
        again = twin.guess(context, budget, floor, chain=chain)
        assert all((a == b).all() for a, b in zip(vars(tree).values(), vars(again).values(), strict=True))
        assert len(tree) <= budget
        assert len({(p, t) for p, t in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) == len(tree)
        for node, parent in enumerate(tree.parents):
            assert parent < node
            assert tree.depths[node] == (tree.depths[parent] + 1 if parent >= 0 else 1)
            above = tree.probabilities[parent] if parent >= 0 else 1.0
            assert floor < tree.probabilities[node] <= above + 1e-6
        if chain:
            assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def test_the_best_subtree_is_found():
    """Among all continuations, the budget takes the likeliest: compared with growing everything."""
    rng = random.Random(0)
    pool = NgramPool(1)
    pool.learn(random_text(rng, 2000, 5))
    everything = pool.guess([1, 2, 3], budget=400, max_depth=4)
    best = sorted(everything.probabilities, reverse=True)[:20]
    assert sorted(pool.guess([1, 2, 3], budget=20, max_depth=4).probabilities, reverse=True) == pytest.approx(best)


def test_depth_first_layout_puts_the_likeliest_path_first():
    tree = GuessTree.from_nodes([(5, -1, 0.5, 0), (6, -1, 0.4, 0), (7, 0, 0.3, 0), (8, 1, 0.2, 0)])
    assert tree.tokens.tolist() == [5, 7, 6, 8]
    assert tree.parents.tolist() == [-1, 0, -1, 2]


def test_learning_in_pieces_is_learning_at_once():
    """Observations of one context merge in order, whether they come in one call or in many."""
    text = random_text(random.Random(1), 300, 6)
    whole, pieces = NgramPool(1), NgramPool(1)
    whole.learn(text)
    for end in range(2, len(text) + 1):
        recent = text[max(0, end - LONGEST - 1) : end]
        pieces.learn(recent, start=len(recent) - 1)
    for context in (text[:4], text[50:58], text[-8:]):
        a, b = whole.guess(context, 8), pieces.guess(context, 8)
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.probabilities == pytest.approx(b.probabilities, rel=1e-3)


def test_newer_evidence_outweighs_older():
    pool = NgramPool(1)
    for _ in range(3):
        pool.learn([1, 2], Source.PROMPT)
    for _ in range(3):
        pool.learn([1, 3], Source.PROMPT)
    assert pool.guess([1], 2).tokens.tolist() == [3, 2]


def test_logits_rows_keep_their_likeliest_tokens():
    pool = NgramPool(1)
    tokens, probabilities = np.arange(12)[None], np.linspace(0.2, 0.01, 12)[None] / 1.3
    pool.learn_next(np.array([[40, 41]]), tokens, probabilities)
    assert sorted(pool.guess([40, 41], 20, max_depth=1).tokens.tolist()) == list(range(WIDTH))


def test_ngrams_teach_every_prefix():
    pool = NgramPool(1)
    pool.learn_ngrams(np.array([[1, 2, 3]]))
    tree = pool.guess([1], 2)
    assert tree.tokens.tolist() == [2, 3]
    assert set(tree.sources.tolist()) == {Source.JACOBI}


def test_eviction_forgets_the_oldest():
    pool = NgramPool(0.05)
    first = list(range(1000, 1010))
    pool.learn(first)
    assert len(pool.guess(first[:8], 1)) == 1
    pool.learn(np.random.default_rng(0).integers(0, 900, 20_000))
    recent = list(range(2000, 2010))
    pool.learn(recent)
    pool.check_integrity()
    assert len(pool.guess(first[:8], 1)) == 0
    assert pool.guess(recent[:8], 1).tokens.tolist() == [2008]


def test_orders_that_collide_in_no_way():
    """A shorter context must not answer for a longer one: the orders are salted."""
    pool = NgramPool(1)
    pool.learn_next(np.array([[0, 0, 0, 0]]), np.array([[5]]), np.array([[1.0]]))
    assert len(pool) == sum(order <= 4 for order in ORDERS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.learn([1, -2, 3]), "ids"),
        (lambda p: p.learn([1, 2**31]), "ids"),
        (lambda p: p.learn_ngrams([[1]]), "n-grams"),
        (lambda p: p.learn_next([[1]], [[2]], [[float("nan")]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2]], [[1.5]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2, 3]], [[0.5]]), "contexts"),
        (lambda p: p.learn_next([[1], [2]], [[2]], [[0.5]]), "2 contexts"),
        (lambda p: NgramPool(0), "memory_mb"),
    ],
)
def test_bad_input_is_named(call, message):
    pool = NgramPool(0.1)
    with pytest.raises(ValueError, match=message):
        call(pool)
    pool.check_integrity()
    assert len(pool) == 0


def test_nothing_to_learn_is_no_error():
    pool = NgramPool(0.1)
    pool.learn([])
    pool.learn([1])
    pool.learn_next(np.empty((0, 8), int), np.empty((0, 8), int), np.empty((0, 8)))
    pool.learn_ngrams(np.empty((0, 3), int))
    assert len(pool) == 0
    assert len(pool.guess([], 5)) == 0
    assert len(pool.guess([1], 0)) == 0


def test_a_copy_stands_on_its_own():
    pool = NgramPool(0.1)
    pool.learn([1, 2, 3])
    copy = deepcopy(pool)
    copy.learn([1, 9, 9])
    assert pool.guess([1], 1).tokens.tolist() == [2]
    assert copy.guess([1], 1).tokens.tolist() == [9]
    copy.check_integrity()


def test_threads_share_a_pool():
    pool = NgramPool(0.3)
    failures = []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for _ in range(30):
                pool.learn(random_text(rng, 50))
                pool.guess(random_text(rng, 8), 16)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.check_integrity()
