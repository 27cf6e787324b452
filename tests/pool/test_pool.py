"""The pool against a plain model of its content, and against everything that it must survive."""

import os
import random
import signal
import threading
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngram_pool import GuessTree, NgramPool, Origin, PoolFileError, contexts_of
from ngram_pool.pool import CHUNK, MAX_MEMORY_MB, MAX_NODES
from ngram_pool.table import (
    KINDS,
    LOGITS,
    LONGEST,
    MAX_VOTES,
    MULTIPLIERS,
    OUTSIDE,
    RATES,
    SALTS,
    SLOW_RATE,
    STEP,
    WIDTH,
    prior_credence,
)

assert Origin.LOGITS == LOGITS
PINNED = ["0x435f9d954dd2f8db", "0x8ba272d7a7f213c1", "0xe63374fa161a8ed7", "0xf17471f55e39db6e"]


class PlainPool:
    """The content and the guesses of an NgramPool, computed plainly with dictionaries that never forget."""

    def __init__(self):
        self.entries = {}
        self.belief, self.votes = prior_credence()

    @staticmethod
    def contexts(before: list[int]) -> list:
        """The context of each kind, or None where the text is too short for it."""
        known = []
        for token in reversed(before[-LONGEST:]):
            if token < 0:
                break
            known.append(token)
        return [(kind, *known[kind[0] : kind[1]]) if len(known) >= kind[1] else None for kind in KINDS]

    def observe(self, before: list[int], distribution: dict[int, float], source: int) -> None:
        for kind, context in zip(KINDS, self.contexts(before), strict=True):
            if context is None:
                continue
            entry = self.entries.setdefault(context, {"seen": 0, "rows": 0, "next": {}})
            rate = max(SLOW_RATE if kind[1] == 0 else RATES[source], 1 / (entry["seen"] + 1))
            entry["seen"] += 1
            entry["rows"] += source == Origin.LOGITS
            following = {token: weight * np.float32(1 - rate) for token, weight in entry["next"].items()}
            for token, probability in distribution.items():
                following[token] = following.get(token, np.float32(0)) + np.float32(rate * probability)
            entry["next"] = {token: weight for token, weight in following.items() if weight > 0}
            assert len(entry["next"]) <= WIDTH, "the plain pool has no rule for entries that overflow"

    def look_up(self, before: list[int]) -> tuple[list, float]:
        """[(cell of the belief table, belief, entry)] of the kinds that know the context, and the belief left over."""
        found, rest = [], 1.0
        for index, context in enumerate(self.contexts(before)):
            entry = self.entries.get(context)
            if entry is None:
                continue
            seen, rows, peak = entry["seen"], entry["rows"], max(entry["next"].values(), default=0)
            if rows == 0:
                amount = 0 if seen == 1 else 1 if seen < 5 else 2
            else:
                amount = 3 if rows == 1 else 4 if rows < 4 else 5
            cell = index, amount, sum(float(peak) > bound for bound in (0.4, 0.7, 0.95))
            told, of = self.belief[cell]
            found.append((cell, rest * told / of, entry))
            rest -= rest * told / of
        return found, rest

    def next(self, before: list[int]) -> dict[int, float]:
        found = self.look_up(before)[0]
        chances = {}
        for _, belief, entry in found:
            for token, weight in entry["next"].items():
                chances[token] = chances.get(token, 0.0) + belief * float(weight)
        others = max(1 - sum(chances.values()), 1e-9)
        for token in chances:
            vote = sum(self.votes[cell] for cell in self.voted(found, token))
            chances[token] *= np.exp(min(vote, MAX_VOTES))
        total = others + sum(chances.values())
        return {token: chance / total for token, chance in chances.items()}

    @staticmethod
    def voted(found: list, token: int) -> list[tuple]:
        """The cells of the table of votes that speak of a token."""
        cells = []
        for (kind, amount, _), _, entry in found:
            weight = float(entry["next"].get(token, 0))
            cells.append((kind, amount, sum(weight > bound for bound in (0, 0.15, 0.4, 0.7, 0.95))))
        return cells

    def calibrate(self, before: list[int], token: int) -> None:
        found, rest = self.look_up(before)
        for candidate, chance in self.next(before).items():
            for cell in self.voted(found, candidate):
                self.votes[cell] += STEP * ((candidate == token) - chance)
        credits = [belief * float(entry["next"].get(token, 0)) for _, belief, entry in found]
        total, left = sum(credits) + max(rest, 1e-9) * OUTSIDE, 1.0
        for (cell, _, _), credit in zip(found, credits, strict=True):
            self.belief[cell] = self.belief[cell] * (1 - 0.0005 * left) + np.array([credit / total, left])
            left = max(left - credit / total, 0.0)

    def check(self, tree: GuessTree, context: list[int], budget: int, floor: float) -> None:
        """Assert that ``tree`` is the best of its size below ``context``, with the right probabilities."""
        lines, rejected = [context], []
        parents = tree.parents.tolist()
        for node in [-1, *range(len(tree))]:
            line = context if node < 0 else [*lines[parents[node] + 1], int(tree.tokens[node])]
            if node >= 0:
                lines.append(line)
            joint = 1.0 if node < 0 else tree.probabilities[node]
            chances = self.next(line)
            children = {int(tree.tokens[n]): tree.probabilities[n] for n in range(len(tree)) if parents[n] == node}
            assert set(children) <= set(chances)
            for token, probability in children.items():
                assert probability == pytest.approx(joint * chances[token], rel=1e-3)
            rejected += [joint * chance for token, chance in chances.items() if token not in children]
        best_left = max(rejected, default=0.0)
        if len(tree) < budget:
            assert best_left <= floor * 1.001 + 1e-9, "there was something left worth guessing"
        elif len(tree):
            assert best_left <= tree.probabilities.min() * 1.001, "a better guess was left out"


TOKEN = st.integers(0, 5)
TEXT = st.lists(TOKEN, max_size=40)
SOURCE = st.sampled_from(list(Origin))
LEARN = st.one_of(
    st.tuples(st.just("text"), TEXT, SOURCE),
    st.tuples(st.just("ngrams"), st.lists(st.lists(TOKEN, min_size=3, max_size=3), max_size=5), SOURCE),
    st.tuples(st.just("next"), TEXT, st.lists(st.floats(0, 0.16), min_size=6, max_size=6), SOURCE),
    st.tuples(st.just("calibrate"), TEXT, TOKEN),
    st.tuples(st.just("follow"), TEXT, st.integers(0, 20)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LEARN, max_size=12), TEXT, st.integers(0, 40), st.sampled_from([0.0, 0.002, 0.1]))
def test_pool_is_what_a_plain_pool_would_be(actions, context, budget, floor):
    """Whatever is learned, the tree is the one of highest expected acceptance under the plain model."""
    pool, plain = NgramPool(8), PlainPool()
    for name, *arguments in actions:
        if name == "text":
            text, source = arguments
            pool.learn(text, source)
            for index, token in enumerate(text):
                plain.observe(text[:index], {token: 1.0}, source)
        elif name == "ngrams":
            ngrams, source = arguments
            pool.learn_ngrams(np.array(ngrams, int).reshape(-1, 3), source)
            for ngram in ngrams:
                for index, token in enumerate(ngram):
                    plain.observe(ngram[:index], {token: 1.0}, source)
        elif name == "next":
            text, probabilities, source = arguments
            row = ([-1] * LONGEST + text)[-LONGEST:]
            pool.learn_next([row], [range(6)], [probabilities], source)
            plain.observe(text, dict(enumerate(probabilities)), source)
        elif name == "follow":
            text, start = arguments
            pool.follow(text, start=start)
            for index in range(start, len(text)):
                plain.calibrate(text[:index], text[index])
            for index in range(start, len(text)):
                plain.observe(text[:index], {text[index]: 1.0}, Origin.TEXT)
        else:
            text, token = arguments
            pool.calibrate([([-1] * LONGEST + text)[-LONGEST:]], [[token]], [[1.0]])
            plain.calibrate(text, token)
    pool.check_integrity()
    assert len(pool) == len(plain.entries)
    tree = pool.guess(context, budget, floor, max_depth=12)
    if tree.depths.max(initial=0) < 12:
        plain.check(tree, context, budget, floor)
    assert pool.belief == pytest.approx(plain.belief[..., 0] / plain.belief[..., 1], rel=1e-3)
    assert pool._credence.votes == pytest.approx(plain.votes, abs=1e-4)


@pytest.mark.parametrize("seed", range(30))
def test_a_step_is_learned_at_once_as_in_parts(seed):
    """First the rows of the true text calibrate, then all rows are learned, then the tokens of the text."""
    rng = random.Random(seed)
    at_once, apart = NgramPool(0.1), NgramPool(0.1)
    for pool in (at_once, apart):
        learn_something(pool, random.Random(seed))
    text, parents, guesses, lines = random_text(rng, rng.randrange(25), 8), [], [], [[]]
    for guess in range(rng.randrange(12)):
        parents.append(rng.randrange(-1, guess))
        taken = [token for token, parent in zip(guesses, parents, strict=False) if parent == parents[-1]]
        guesses.append(rng.choice([token for token in range(16) if token not in taken]))
        lines.append([*lines[parents[-1] + 1], guesses[-1]])
    path = [0]
    while (below := [row for row in range(1, len(lines)) if parents[row - 1] + 1 == path[-1]]) and rng.random() < 0.8:
        path.append(rng.choice(below))
    emitted = [*lines[path[-1]], rng.randrange(16)]  # the last may be a guess, too, where a text ends
    tokens = [rng.sample(range(20), 4) for _ in lines]
    probabilities = np.array([[rng.choice([0, 0.1, 0.25]) for _ in range(4)] for _ in lines])
    contexts = np.array([([-1] * LONGEST + text + line)[-LONGEST:] for line in lines])
    before = apart.belief.copy()
    apart.calibrate(contexts[path], np.array(tokens)[path], probabilities[path])
    apart.learn_next(contexts, tokens, probabilities)
    recent = text[-LONGEST:]
    apart.learn(recent + emitted, Origin.TEXT, len(recent))
    at_once.learn_step(text, guesses, parents, tokens, probabilities, emitted)
    assert not np.array_equal(apart.belief, before), seed
    states = at_once.__getstate__(), apart.__getstate__()
    for one, other in zip(*(state.pop("_credence") + state.pop("_table") for state in states), strict=True):
        assert np.array_equal(one, other), (seed, text, guesses, parents, emitted)
    assert states[0] == states[1], seed


def random_text(rng: random.Random, length: int, vocabulary: int = 30) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(length)]


def learn_something(pool: NgramPool, rng: random.Random) -> None:
    pool.learn(random_text(rng, 200, 8), Origin.TEXT)
    contexts = np.array([random_text(rng, LONGEST, 8) for _ in range(9)])
    pool.calibrate(contexts, contexts[:, :1], np.ones((9, 1)))
    pool.learn_next(contexts, np.array([rng.sample(range(8), 4) for _ in range(9)]), np.full((9, 4), 0.25))
    pool.learn_ngrams(np.array([random_text(rng, 3, 8) for _ in range(4)]))


def same(a: GuessTree, b: GuessTree) -> bool:
    return all((x == y).all() for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_well_formed_and_deterministic(seed):
    """In a table small enough to evict all the time."""
    rng = random.Random(seed)
    pool, twin = NgramPool(0.05), NgramPool(0.05)
    for p in (pool, twin):
        source = random.Random(seed)
        for _ in range(5):
            learn_something(p, source)
        p.check_integrity()
    for _ in range(20):
        context, budget = random_text(rng, rng.randint(1, 12), 8), rng.choice([1, 2, 16, 60])
        chain, floor = rng.random() < 0.3, rng.choice([0.0, 0.05])
        tree = pool.guess(context, budget, floor, chain=chain)
        assert same(tree, twin.guess(context, budget, floor, chain=chain))
        assert len(tree) <= budget
        assert len({(p, t) for p, t in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) == len(tree)
        for node, parent in enumerate(tree.parents):
            assert parent < node
            assert tree.depths[node] == (tree.depths[parent] + 1 if parent >= 0 else 1)
            above = tree.probabilities[parent] if parent >= 0 else 1.0
            assert floor < tree.probabilities[node] <= above + 1e-6
        if chain:
            assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def test_depth_first_layout_puts_the_likeliest_path_first():
    pool = NgramPool(1)
    pool.learn_next([[1]], [[2, 3]], [[0.6, 0.4]])
    pool.learn_next([[1, 2]], [[4]], [[1.0]])
    pool.learn_next([[1, 3]], [[5]], [[1.0]])
    tree = pool.guess([1], 4, max_depth=2)
    assert tree.tokens.tolist() == [2, 4, 3, 5]
    assert tree.parents.tolist() == [-1, 0, -1, 2]


def test_memory_is_what_was_asked_for_and_stays_so():
    for memory_mb in (0.5, 3, 20):
        pool = NgramPool(memory_mb)
        asked = memory_mb * 2**20
        assert 0.95 * asked <= pool.nbytes <= asked
        before = pool.nbytes
        pool.learn(np.random.default_rng(0).integers(0, 1000, 50_000))
        assert pool.nbytes == before
        pool.check_integrity()


def test_a_long_passage_is_continued():
    """Text seen once is guessed again as far as the budget goes, and attributed to where it was seen."""
    passage = list(range(100, 140))
    pool = NgramPool(1)
    pool.learn(passage, Origin.PROMPT)
    tree = pool.guess(passage[:10], budget=16, chain=True)
    assert tree.tokens.tolist() == passage[10:26]
    assert tree.depths.tolist() == list(range(1, 17))
    assert set(tree.sources.tolist()) == {Origin.PROMPT}
    assert pool.guess(passage[:10], budget=16, max_depth=3, chain=True).tokens.tolist() == passage[10:13]


def test_long_texts_are_learned_in_chunks_without_a_seam():
    text = np.random.default_rng(0).integers(0, 10**6, CHUNK + 50)
    whole, parts = NgramPool(64), NgramPool(64)
    whole.learn(text)
    for end in range(1000, len(text) + 1000, 1000):
        parts.learn(text[max(end - 1000 - LONGEST, 0) : end], start=min(end - 1000, LONGEST))
    for at in (CHUNK - 3, CHUNK, CHUNK + 5, 1003):
        tree = whole.guess(text[at - 8 : at], 1)
        assert tree.tokens.tolist() == [text[at]]
        assert same(tree, parts.guess(text[at - 8 : at], 1))
    assert whole.observations == parts.observations == len(text)


def test_newer_evidence_outweighs_older():
    pool = NgramPool(1)
    for _ in range(6):
        pool.learn([1, 2], Origin.PROMPT)
    for _ in range(4):
        pool.learn([1, 3], Origin.PROMPT)
    assert pool.guess([1], 2, max_depth=1).tokens.tolist() == [3, 2]


def test_logits_rows_keep_their_likeliest_tokens():
    pool = NgramPool(1)
    tokens, probabilities = np.arange(12)[None], np.linspace(0.2, 0.01, 12)[None] / 1.3
    pool.learn_next(np.array([[40, 41]]), tokens, probabilities)
    assert sorted(pool.guess([40, 41], 20, max_depth=1).tokens.tolist()) == list(range(WIDTH))


def test_a_context_without_its_newest_token_speaks_where_that_is_new():
    """After a rejected guess, the model's predictions after it are evidence for the token that came instead."""
    pool = NgramPool(1)
    pool.learn_next([[7, 8, 1]], [[50]], [[1.0]])
    pool.learn([60, 61, 62])
    assert pool.guess([7, 8, 2], 1).tokens.tolist() == [50]


def test_eviction_forgets_the_least_recently_learned():
    pool = NgramPool(0.05)
    first = list(range(1000, 1010))
    pool.learn(first)
    assert pool.guess(first[:8], 1).tokens.tolist() == [1008]
    pool.learn(np.random.default_rng(0).integers(0, 900, 20_000))
    recent = list(range(2000, 2010))
    pool.learn(recent)
    pool.check_integrity()
    assert 1008 not in pool.guess(first[:8], 16).tokens
    assert pool.guess(recent[:8], 1).tokens.tolist() == [2008]


def test_belief_follows_what_is_accepted():
    """A kind of context that is always wrong loses belief, the one that is right wins it."""
    pool = NgramPool(1)
    before = pool.belief
    rng = random.Random(0)
    follows = random_text(rng, 20, 20)
    for _ in range(300):
        a, b = rng.randrange(20), rng.randrange(20)
        pool.calibrate([[a, b]], [[follows[b]]], [[1.0]])  # only the newest token matters
        pool.learn_next([[a, b]], [[follows[b]]], [[1.0]], Origin.TEXT)
        pool.learn_next([[a, b, rng.randrange(20)]], [[rng.randrange(20)]], [[1.0]], Origin.TEXT)
    change = (pool.belief - before).reshape(len(KINDS), -1)
    assert change[KINDS.index((1, 2))].min() < -0.02
    assert np.abs(change[KINDS.index((0, 16))]).max() == 0, "there were no contexts of sixteen tokens"


def test_probabilities_predict_acceptance():
    """On a Markov source with noise, guesses of each decile are right as often as they say."""
    rng = random.Random(0)
    follows = {(a, b): rng.sample(range(15), 3) for a in range(15) for b in range(15)}
    pool, text, rated = NgramPool(1), [1, 2], []
    for _ in range(6000):
        tree = pool.guess(text, 8, max_depth=1)
        chosen = rng.choices(follows[text[-2], text[-1]], (6, 3, 1))[0]
        rated += [(p, t == chosen) for p, t in zip(tree.probabilities, tree.tokens, strict=True)]
        pool.calibrate([text[-LONGEST:]], [[chosen]], [[1.0]])
        text.append(chosen)
        pool.learn(text[-LONGEST - 1 :], start=len(text[-LONGEST - 1 :]) - 1)
    predicted, accepted = np.array(rated[len(rated) // 2 :], float).T
    decile = np.minimum(predicted * 10, 9).astype(int)
    gaps = [
        abs(predicted[decile == d].mean() - accepted[decile == d].mean()) for d in range(10) if sum(decile == d) > 50
    ]
    assert len(gaps) >= 5
    assert np.mean(gaps) < 0.05


def test_orders_that_collide_in_no_way():
    """A shorter context must not answer for a longer one: the kinds are salted."""
    pool = NgramPool(1)
    pool.learn_next(np.array([[0, 0, 0, 0]]), np.array([[5]]), np.array([[1.0]]))
    assert len(pool) == sum(length <= 4 for _, length in KINDS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.learn([1, -2, 3]), "ids"),
        (lambda p: p.learn([1, 2**31]), "ids"),
        (lambda p: p.learn([1, 2**70]), "ids"),
        (lambda p: p.learn(np.array([2**64 - 1], np.uint64)), "ids"),
        (lambda p: p.learn([1.5, 2.0]), "ids"),
        (lambda p: p.learn(["a"]), "ids"),
        (lambda p: p.learn([[1, 2]]), "one sequence"),
        (lambda p: p.learn([1, 2], source=9), "9"),
        (lambda p: p.learn_ngrams([[1]]), "n-grams"),
        (lambda p: p.learn_ngrams([[1, -1]]), "ids"),
        (lambda p: p.follow([[1, 2]]), "one sequence"),
        (lambda p: p.follow([1, -5], start=1), "ids"),
        (lambda p: p.learn_next([[1]], [[2]], [[float("nan")]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2]], [[1.5]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2]], [[-0.1]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2, 3]], [[0.9, 0.9]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2, 3]], [[0.5]]), "contexts"),
        (lambda p: p.learn_next([[1], [2]], [[2]], [[0.5]]), "2 contexts"),
        (lambda p: p.learn_next([[2**31]], [[2]], [[0.5]]), "ids of contexts"),
        (lambda p: p.learn_next([[1]], [[-2]], [[0.5]]), "ids"),
        (lambda p: p.learn_next([[1]], [[2]], [[0.5]], source=-1), "Origin"),
        (lambda p: p.learn_next([[1]], [[2]], [[0.5]], source=[7]), "Origin"),
        (lambda p: p.calibrate([[1]], [[2]], [[float("inf")]]), "probabilities"),
        (lambda p: p.learn_next([[1]], [[2]], [[0.5]], source=1.9), "Origin"),
        (lambda p: p.learn_next([[1.5]], [[2]], [[0.5]]), "contexts"),
        (lambda p: p.learn_step([1], [2], [0], [[3], [4]], [[0.5], [0.5]], [5]), "parent"),
        (lambda p: p.learn_step([1], [2], [-2], [[3], [4]], [[0.5], [0.5]], [5]), "parent"),
        (lambda p: p.learn_step([1], [2], [-1], [[3]], [[0.5]], [5]), r"guesses \(1,\), .* tokens \(1, 1\)"),
        (lambda p: p.learn_step([1], [2], [-1, -1], [[3], [4]], [[0.5], [0.5]], [5]), "guesses"),
        (lambda p: p.learn_step([1], [], [], [3], [0.5], [5]), "guesses"),
        (lambda p: p.learn_step([1], [], [], [[3, 4]], [[0.5]], [5]), "guesses"),
        (lambda p: p.learn_step([-1], [], [], [[3]], [[0.5]], [5]), "ids"),
        (lambda p: p.learn_step([1], [-2], [-1], [[3], [4]], [[0.5], [0.5]], [5]), "ids"),
        (lambda p: p.learn_step([1], [2.5], [-1], [[3], [4]], [[0.5], [0.5]], [5]), "ids"),
        (lambda p: p.learn_step([1], [], [], [[2**31]], [[0.5]], [5]), "ids"),
        (lambda p: p.learn_step([1], [], [], [[3]], [[0.5]], [-5]), "ids"),
        (lambda p: p.learn_step([1], [], [], [[3]], [[float("nan")]], [5]), "probabilities"),
        (lambda p: p.learn_step([1], [], [], [[3]], [[1.5]], [5]), "probabilities"),
        (lambda p: p.guess([[1, 2]], 4), "one sequence"),
        (lambda p: p.guess([1, -5], 4), "ids"),
        (lambda p: p.guess([1, 2**40], 4), "ids"),
        (lambda p: p.guess([1], MAX_NODES + 1), "budget"),
        (lambda p: p.guess([1], 4, float("nan")), "min_probability"),
        (lambda p: NgramPool(0), "memory_mb"),
        (lambda p: NgramPool(-1), "memory_mb"),
        (lambda p: NgramPool(float("nan")), "memory_mb"),
        (lambda p: NgramPool(float("inf")), "memory_mb"),
        (lambda p: NgramPool(1e-9), "memory_mb"),
        (lambda p: NgramPool(1e9), "memory_mb"),
        (lambda p: NgramPool("16"), "memory_mb='16' must be a number"),
        (lambda p: NgramPool(None), "memory_mb"),
        (lambda p: NgramPool(True), "memory_mb"),
        (lambda p: NgramPool(0.1, vocabulary=7), "vocabulary=7"),
        (lambda p: NgramPool(0.1, vocabulary="\ud800"), "vocabulary"),
    ],
)
def test_bad_input_is_named(call, message):
    pool = NgramPool(0.1)
    with pytest.raises(ValueError, match=message):
        call(pool)
    pool.check_integrity()
    assert len(pool) == 0


def test_pools_that_the_machine_has_no_room_for_are_refused(tmp_path, monkeypatch):
    """Before anything is allocated: systems that promise more memory than they have would kill the process later."""
    NgramPool(2).save(tmp_path / "large.pool")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**8, "SC_PAGE_SIZE": 2**12}.get)
    NgramPool(1)
    for memory_mb in (2, MAX_MEMORY_MB):
        with pytest.raises(MemoryError, match=f"memory_mb={memory_mb}: no room"):
            NgramPool(memory_mb)
    with pytest.raises(PoolFileError, match=r"large.pool .* of this machine"):
        NgramPool.load(tmp_path / "large.pool")


def test_nothing_to_learn_is_no_error():
    pool = NgramPool(0.1)
    pool.learn([])
    pool.learn([1, 2], start=2)
    pool.follow([])
    pool.follow([1, 2], start=2)
    pool.learn_next(np.empty((0, 8), int), np.empty((0, 8), int), np.empty((0, 8)))
    pool.learn_next([[1]], np.empty((1, 0), int), np.empty((1, 0)))
    pool.calibrate(np.empty((0, 8), int), np.empty((0, 1), int), np.empty((0, 1)))
    pool.learn_ngrams(np.empty((0, 3), int))
    pool.learn_step([1], [], [], np.empty((1, 0), int), np.empty((1, 0)), [])
    for context, budget in (([], 5), ([1], 0), ([1], -3), ([1], 5)):
        assert len(pool.guess(context, budget)) == 0
    assert pool.largest_token == -1
    assert pool.most_confident() == []
    pool.learn([3])
    assert pool.guess([], 5, max_depth=1).tokens.tolist() == [3]
    assert len(pool.guess([1], 5, max_depth=0)) == 0
    assert len(pool.guess([1], 5, max_depth=-1)) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_type(dtype):
    pool, same_pool = NgramPool(0.1), NgramPool(0.1)
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    pool.learn_next(np.array([[1, largest]], dtype), np.array([[largest]], dtype), [[1.0]])
    same_pool.learn_next([[1, largest]], [[largest]], [[1.0]])
    assert same(pool.guess(np.array([1, largest], dtype), np.int32(2)), same_pool.guess([1, int(largest)], 2))
    assert pool.largest_token == largest


def test_the_largest_token_is_of_those_that_can_be_guessed():
    pool = NgramPool(0.1)
    pool.learn([900, 1, 2], start=1)
    pool.learn_next([[800]], [[5, 999]], [[1.0, 0.0]])
    assert pool.largest_token == 5


def test_belief_that_was_always_right_can_be_lost_again():
    pool = NgramPool(0.1)
    context = np.full((1, LONGEST), 3)
    pool.learn_next(context, [[4]], [[1.0]])
    for _ in range(60_000):
        pool.calibrate(context, [[4]], [[1.0]])
    pool.check_integrity()
    sure = pool.guess(context[0], 1).probabilities[0]
    for _ in range(3000):
        pool.calibrate(context, [[5]], [[1.0]])
    pool.check_integrity()
    assert pool.guess(context[0], 1).probabilities[0] < 0.5 < 0.9 < sure


def test_hashes_are_pinned():
    """Saved pools are of no use to a version that hashes otherwise: then `storage.VERSION` has to be raised."""
    assert [hex(constant) for constant in (MULTIPLIERS[0], MULTIPLIERS[-1], SALTS[0], SALTS[-1])] == PINNED


def test_negative_ids_in_contexts_stand_for_nothing():
    a, b = NgramPool(0.1), NgramPool(0.1)
    a.learn_next([[-1, 4]], [[5]], [[1.0]])
    b.learn_next([[9, -7, 4]], [[5]], [[1.0]])
    assert same(a.guess([4], 3), b.guess([4], 3))
    assert len(a) == len(b)


def test_a_copy_stands_on_its_own():
    pool = NgramPool(0.1)
    pool.learn([1, 2, 3])
    copy = deepcopy(pool)
    copy.learn([1, 9, 9, 1, 9, 9, 1, 9])
    assert pool.guess([1], 1).tokens.tolist() == [2]
    assert copy.guess([1], 1).tokens.tolist() == [9]
    copy.check_integrity()


def test_merging_adds_what_the_other_knows():
    ours, theirs = NgramPool(1), NgramPool(2)
    ours.learn([1, 2, 3] * 3)
    theirs.learn(list(range(50, 70)), Origin.FILE)
    theirs.learn([1, 2, 4] * 9)
    ours.merge(theirs)
    ours.check_integrity()
    tree = ours.guess(list(range(50, 60)), 4, chain=True)
    assert tree.tokens.tolist() == [60, 61, 62, 63]
    assert set(tree.sources.tolist()) == {Origin.FILE}
    assert ours.guess([1, 2], 2, max_depth=1).tokens.tolist() == [4, 3], "more was seen of 4"
    assert ours.largest_token == 69


def test_merging_keeps_the_stronger_evidence_where_room_is_short():
    ours, theirs = NgramPool(0.02), NgramPool(1)
    for _ in range(20):
        ours.learn([1, 2, 3, 4, 5, 6])
    theirs.learn(np.random.default_rng(0).integers(10, 10_000, 5000))
    ours.merge(theirs)
    ours.check_integrity()
    assert len(ours) > 0.9 * ours.capacity
    assert ours.guess([1, 2], 1).tokens.tolist() == [3]


def test_a_full_pool_takes_in_what_is_newer():
    """As when a night's pool takes in the day's: what the day saw once is not to be turned away for what is as rare."""
    base = NgramPool(0.05)
    base.learn(np.random.default_rng(0).integers(100, 900, 20_000))
    day = deepcopy(base)
    day.learn(range(2000, 2012))
    merged = deepcopy(base)
    merged.merge(day, base)
    merged.check_integrity()
    assert merged.guess(range(2000, 2008), 4, chain=True).tokens.tolist() == [2008, 2009, 2010, 2011]


def held(pool: NgramPool) -> dict:
    """Of each context, by its key: how often it was seen, and what follows it with which probability."""
    table = pool.__getstate__()["_table"]
    return {
        int(table.keys[entry]): (
            table.counts[entry].tolist(),
            {int(t): float(w) for t, w in zip(table.tokens[entry], table.weights[entry], strict=True) if w > 1e-6},
        )
        for entry in np.flatnonzero(table.keys)
    }


def assert_holds_alike(a: NgramPool, b: NgramPool) -> None:
    first, second = held(a), held(b)
    assert first.keys() == second.keys()
    for key, (counts, follows) in first.items():
        assert counts == second[key][0]
        assert follows == pytest.approx(second[key][1], abs=1e-4)
    assert a.belief == pytest.approx(b.belief, abs=1e-9)
    assert (a.observations, a.largest_token) == (b.observations, b.largest_token)


SHORT = st.lists(TOKEN, max_size=20)


def taught(text: list[int], start: NgramPool | None = None) -> NgramPool:
    pool = deepcopy(start) if start is not None else NgramPool(8)
    pool.learn(text)
    pool.calibrate(contexts_of(text, len(text))[:, :-1], np.array([text], int).T, np.ones((len(text), 1)))
    return pool


def merged(base: NgramPool, *others: NgramPool, since: NgramPool | None = None) -> NgramPool:
    pool = deepcopy(base)
    for other in others:
        pool.merge(other, since)
    pool.check_integrity()
    return pool


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(SHORT, st.lists(SHORT, min_size=2, max_size=5), st.randoms())
def test_the_order_of_merging_does_not_matter(text, texts, rng):
    base = taught(text)
    for since in (None, base):
        pools = [taught(text, since) for text in texts]
        forth = merged(base, *pools, since=since)
        rng.shuffle(pools)
        assert_holds_alike(forth, merged(base, *pools, since=since))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(SHORT, st.lists(SHORT, min_size=2, max_size=4))
def test_a_tree_of_merges_is_one_merge(text, texts):
    """Each node starts from the base and takes in its replicas; the root takes in the nodes, as if they were such."""
    base = taught(text)
    replicas = [taught(text, base) for text in texts]
    nodes = [merged(base, *replicas[half::2], since=base) for half in range(2)]
    assert_holds_alike(merged(base, *nodes, since=base), merged(base, *replicas, since=base))


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(SHORT, SHORT)
def test_merging_what_learned_nothing_changes_nothing(text, more):
    base = taught(text)
    busy = taught(more, base)
    assert_holds_alike(merged(base, base, busy, base, since=base), merged(base, busy, since=base))
    assert_holds_alike(merged(base, base, since=base), base)


def test_what_was_learned_since_is_what_a_merge_adds():
    """A base that is merged with every replica's pool would outweigh what each of them has learned."""
    base = NgramPool(1)
    for _ in range(3):
        base.learn([1, 2])
    replicas = [deepcopy(base) for _ in range(8)]
    for replica in replicas:
        replica.learn([1, 3])
    whole, new = merged(base, *replicas), merged(base, *replicas, since=base)
    key = next(key for key, (counts, follows) in held(base).items() if counts == [3, 0] and follows == {2: 1.0})
    assert held(whole)[key] == ([3 + 8 * 4, 0], pytest.approx({2: 27 / 35, 3: 8 / 35}, abs=1e-5))
    assert held(new)[key] == ([3 + 8, 0], pytest.approx({2: 3 / 11, 3: 8 / 11}, abs=1e-5))
    assert new.observations == 6 + 8 * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_merging_since_keeps_tables_sound_while_they_evict(seed, rounds):
    rng = random.Random(seed)
    base = NgramPool(0.05)
    learn_something(base, rng)
    for _ in range(rounds):
        replicas = [deepcopy(base) for _ in range(3)]
        for replica in replicas:
            for _ in range(rng.randint(0, 3)):
                learn_something(replica, rng)
        base = merged(base, *replicas, since=base)
    assert len(base.guess(random_text(rng, 8, 8), 8)) > 0


def test_pools_that_did_not_start_from_since_are_refused():
    base = taught([1, 2, 3, 4])
    later, other = taught([5, 6], base), taught([1, 2])
    for ours, theirs in ((base, other), (other, later)):
        before = held(ours)
        with pytest.raises(ValueError, match="cannot have started from it"):
            ours.merge(theirs, base)
        assert held(ours) == before


@pytest.mark.parametrize("memory_mb", [0.3, 8])
def test_merged_halves_guess_as_one_pool_does(memory_mb):
    """On a Markov source, with room for a part of the text and for all of it."""
    rng = random.Random(0)
    follows = {(a, b): rng.sample(range(40), 2) for a in range(40) for b in range(40)}
    text = [1, 2]
    while len(text) < 12_000:
        text.append(rng.choices(follows[text[-2], text[-1]], (9, 1))[0])
    learned, asked = text[:10_000], text[10_000:]
    one, half, other = (NgramPool(memory_mb) for _ in range(3))
    one.learn(learned)
    half.learn(learned[:5000])
    other.learn(learned[5000:])

    def right(pool: NgramPool) -> int:
        return sum(pool.guess(asked[at - 8 : at], 1).tokens.tolist() == [asked[at]] for at in range(8, len(asked)))

    alone, together = right(half), right(merged(half, other))
    assert together > alone
    assert together > 0.97 * right(one)


def test_pools_of_different_vocabularies_are_not_merged():
    ours, theirs = NgramPool(0.1, vocabulary="a"), NgramPool(0.1, vocabulary="b")
    with pytest.raises(ValueError, match="vocabularies a and b"):
        ours.merge(theirs)
    with pytest.raises(ValueError, match="vocabularies a and b"):
        ours.merge(ours, since=theirs)
    unknown = NgramPool(0.1)
    unknown.merge(ours)
    assert unknown.vocabulary == "a"


def test_threads_share_a_pool():
    """Learning, guessing, copying and merging at once, under load: no error, no torn entry, nothing lost."""
    pool, failures, learned = NgramPool(0.3), [], []

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            for turn in range(150):
                learn_something(pool, rng)
                tree = pool.guess(random_text(rng, 8), 64)
                assert (tree.parents < np.arange(len(tree))).all()
                if turn % 50 == 0:
                    copy = deepcopy(pool)
                    copy.check_integrity()
                    copy.merge(pool)
            learned.append(150 * (200 + 9 + 4 * 3))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.check_integrity()
    assert pool.observations == sum(learned)


def test_what_is_in_a_pool():
    pool = NgramPool(1)
    pool.learn([5, 6, 7, 8] * 20, Origin.FILE)
    pool.learn([1, 2, 3], Origin.TEXT)
    context, token, probability, seen = pool.most_confident(3)[0]
    assert [*context, token] in ([5, 6, 7, 8], [6, 7, 8, 5], [7, 8, 5, 6], [8, 5, 6, 7])
    assert seen >= 19
    assert probability == pytest.approx(1, abs=1e-3)
    assert pool.by_source()["file"] > pool.by_source()["text"] > 0 == pool.by_source()["jacobi"]


def test_contexts_of_a_text():
    rows = contexts_of([4, 5, 6], 2)
    assert rows.tolist() == [[-1] * (LONGEST - 2) + [4, 5], [-1] * (LONGEST - 3) + [4, 5, 6]]
    assert len(contexts_of([4, 5, 6], 0)) == 0


def test_an_interrupt_of_a_guess_reaches_the_caller():
    """It comes while a loop runs, and the loop's end makes no other error of it."""
    pool = NgramPool(1)
    pool.learn(np.random.default_rng(0).integers(0, 50, 5000))

    def guess_until_interrupted():
        threading.Timer(0.02, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        while True:
            pool.guess([1, 2, 3], 4096)

    for _ in range(10):
        with pytest.raises(KeyboardInterrupt):
            guess_until_interrupted()
    pool.check_integrity()
    assert len(pool.guess([1, 2, 3], 16)) == 16, "the lock is free"
