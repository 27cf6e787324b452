"""Budgets that follow the cost of a step: against brute force, in simulation, and in decoding."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from zoo import tiny_model

import lookahead
from lookahead import GuessSource, LookaheadConfig
from lookahead.engine.engine import default_sources
from lookahead.guessing.budget import (
    FIRST_PAUSE,
    FRUITLESS,
    MAX_GUESSES,
    TRIAL_STEPS,
    WAKING,
    Pace,
)
from lookahead.guessing.jacobi import WINDOW_SIZES, WindowSource
from lookahead.passes.costs import RUNGS, StepCosts
from ngram_pool import GuessTree, Origin


def costs_of(base: float, per_row: float, per_position: float = 0.0, overhead: float = 1e-9) -> StepCosts:
    """c(T, L) = base + per_row T + per_position L."""
    return StepCosts(base + per_row * np.array(RUNGS, float), np.array([per_position, 0.0]), overhead, 0.0)


def tree_of(probabilities: list[float]) -> GuessTree:
    """Children of the root, in any order."""
    n = len(probabilities)
    numbers = np.arange(n)
    return GuessTree(
        numbers, np.full(n, -1), np.ones(n, np.int64), np.array(probabilities, float), np.zeros(n, np.int64)
    )


@settings(max_examples=200, deadline=None)
@given(
    trees=st.lists(st.lists(st.floats(0, 1), max_size=20), min_size=1, max_size=4),
    seconds=st.lists(st.floats(1e-4, 1), min_size=len(RUNGS), max_size=len(RUNGS)),
    length=st.integers(0, 5000),
    window_rows=st.integers(0, 30),
    tokens=st.floats(1, 8),
    is_ragged=st.booleans(),
)
def test_the_chosen_budget_is_the_best(trees, seconds, length, window_rows, tokens, is_ragged):
    note(f"{trees=} {seconds=} {length=} {window_rows=} {tokens=} {is_ragged=}")
    pace = Pace(StepCosts(np.array(seconds), np.array([1e-6, 1e-7])))
    pace.count(tokens, 1, 0)

    def worth(counts: list[int]) -> float:
        gained = sum(sum(sorted(tree, reverse=True)[:n]) for tree, n in zip(trees, counts, strict=True))
        rows = len(trees) * (1 + window_rows) + (sum(counts) if is_ragged else len(trees) * max(counts))
        return gained - pace.rate() * float(pace.costs(rows, length, len(trees)) + pace.costs.between(rows))

    chosen = pace.choose([tree_of(tree) for tree in trees], length, window_rows, is_ragged)
    every = [[n] * len(trees) for n in range(max(map(len, trees)) + 1)]
    if is_ragged and len(trees) > 1:  # the likeliest of all trees, whatever their number
        ranked = sorted(((-p, b) for b, tree in enumerate(trees) for p in tree))
        every = [[sum(b == i for _, b in ranked[:n]) for i in range(len(trees))] for n in range(len(ranked) + 1)]
    assert worth(chosen) == pytest.approx(max(map(worth, every)), abs=1e-9)
    if len(trees) == 1:
        kept = [p for p in trees[0] if p > pace.least(length)]
        alone = pace.choose([tree_of(kept)], length, window_rows) if kept else [0]
        assert worth(alone) == pytest.approx(worth(chosen), abs=1e-9), "no guess below the least is taken"
    assert 8 <= pace.reach <= MAX_GUESSES


def test_a_row_that_costs_nothing_is_used_and_one_that_costs_a_step_is_not():
    guesses = [tree_of([0.9, 0.5, 0.2, 0.01])]
    assert Pace(costs_of(1.0, 0.0)).choose(guesses, 0, 0) == [4]
    assert Pace(costs_of(0.0, 1.0)).choose(guesses, 0, 0) == [0]
    assert Pace(costs_of(1.0, 0.3)).choose(guesses, 0, 0) == [2]  # 0.3 of 1.3 a row, at a token a step


def test_bad_luck_is_forgotten_where_rows_are_so_dear_that_it_stops_all_guesses():
    pace, guess, none = Pace(costs_of(1.0, 0.25)), tree_of([0.6]), tree_of([])
    assert pace.choose([guess], 0, 0) == [1]
    for _ in range(30):
        pace.count_guesses([guess], [[0]])
    assert pace.choose([guess], 0, 0) == [0]
    for _ in range(100):
        pace.count_guesses([none], [[0]])
    assert pace.choose([guess], 0, 0) == [1]


@given(verified=st.lists(st.integers(0, 127), min_size=1, max_size=30))
def test_the_guesses_looked_for_follow_those_that_were_worth_verifying(verified):
    pace = Pace(costs_of(1.0, 0.1))
    for guesses in verified:
        pace.count_guesses([tree_of([0.5] * guesses)], [[0]])
        assert min(2 * guesses + 8, MAX_GUESSES) <= pace.reach <= MAX_GUESSES
    for _ in range(9):  # the largest are forgotten within 9 steps
        pace.count_guesses([tree_of([0.5])], [[0]])
    assert pace.reach == 10


@pytest.mark.parametrize("per_row", [0.02, 0.4])
def test_no_fixed_budget_does_better_in_the_long_run(per_row):
    """A text with easy and hopeless passages, whose tokens are guessed right just as often as the guesses say."""
    rng = np.random.default_rng(0)
    easy = np.repeat(rng.random(400) < 0.4, rng.integers(5, 30, 400))
    chances = np.where(easy, rng.uniform(0.8, 0.99, len(easy)), rng.uniform(0.05, 0.4, len(easy)))
    right = rng.random(len(easy)) < chances
    costs = costs_of(1.0, per_row)

    def decode(choose, count=lambda tokens, rows: None) -> float:
        """Tokens per second."""
        at, seconds = 0, 0.0
        while at < len(easy) - 41:
            chain = np.cumprod(chances[at : at + 40])
            tree = GuessTree(np.arange(40), np.arange(-1, 39), np.arange(1, 41), chain, np.zeros(40, np.int64))
            chosen = tree.prune(choose(tree))
            accepted = int(np.cumprod(right[at : at + len(chosen)]).sum())
            count(1 + accepted, 1 + len(chosen))
            at, seconds = at + 1 + accepted, seconds + float(costs(1 + len(chosen), 0))
        return at / seconds

    pace = Pace(costs)
    rate = decode(lambda tree: pace.choose([tree], 0, 0)[0], partial(pace.count, length=0))
    fixed = [decode(lambda tree, budget=budget: budget) for budget in (0, 1, 2, 4, 8, 16, 32)]
    assert rate > 0.995 * max(fixed)


@pytest.mark.parametrize("per_row", [0.02, 4.0])
@pytest.mark.parametrize("factor", [1, 3])
def test_guesses_that_seem_too_dear_are_tried_now_and_then(per_row, factor):
    """Rows pay or not; they were measured right, or on a machine that was so busy that they seemed not to pay."""
    truth, chances = costs_of(1.0, per_row), np.cumprod(np.full(8, 0.7))
    tree = GuessTree(np.arange(8), np.arange(-1, 7), np.arange(1, 9), chances, np.zeros(8, np.int64))
    found, rng = costs_of(1.0, per_row), np.random.default_rng(0)
    found.seconds[1:] *= factor
    pace, verified, tokens, seconds = Pace(found), [], 0, 0.0
    assert (pace.choose([tree], 0, 0) == [0]) == (per_row > 0.5 or factor > 1)
    for _ in range(2000):
        guesses = pace.choose([tree], 0, 0)[0] if max(chances) > pace.least(0) or pace.doubts else 0
        accepted = min(int(rng.geometric(0.3)) - 1, guesses)
        took = float(truth(1 + guesses, 0))
        pace.count_guesses([tree.prune(guesses)], [list(range(1 + accepted))])
        pace.count(1 + accepted, 1 + guesses, 0)
        found.follow(1 + guesses, 0, took * rng.choice([0.95, 1.0, 1.05]))
        verified.append(guesses)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    if per_row < 0.5:
        assert np.mean(np.array(verified[-1000:]) > 0) > 0.99
    else:
        assert tokens / seconds > 0.98 / float(truth(1, 0))


def test_guesses_are_seldom_looked_for_where_none_comes_true():
    pace, guesses = Pace(costs_of(1.0, 0.1)), tree_of([0.1])
    rests = []
    for _ in range(FRUITLESS + 10 * WAKING):
        rests.append(pace.rests)
        pace.count_guesses([guesses], [[0]])
    assert not any(rests[:FRUITLESS])
    assert rests[FRUITLESS:] == [step % WAKING > 0 for step in range(FRUITLESS, len(rests))]
    pace.count_guesses([guesses], [[0, 1]])
    assert not pace.rests


class Asked(GuessSource):
    """Guesses token 1 or nothing, and notes whether it may guess."""

    is_free = True

    def __init__(self, guesses: bool):
        self.guesses = guesses
        self.may = []

    def propose(self, texts, limits):
        assert all(depth >= 0 for depth in limits.depths)
        self.may += [depth > 0 for depth in limits.depths]
        return [GuessTree.chain([1] if self.guesses else [], Origin.TEXT, 0.9) for _ in texts]


@pytest.mark.parametrize("guesses", [False, True])
def test_a_text_without_luck_is_the_same(guesses):
    """Steps look for guesses at first, and seldom after a while."""
    model, ids = tiny_model("llama"), torch.arange(3, 9)[None]
    options = {"max_new_tokens": 3 * FRUITLESS, "min_new_tokens": 3 * FRUITLESS, "do_sample": True, "temperature": 9.0}
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    source = Asked(guesses)
    lookahead.wrap(model, LookaheadConfig(window_size=0), source=source)
    torch.manual_seed(0)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    assert all(source.may[:FRUITLESS])
    if not guesses:
        assert sum(source.may[FRUITLESS:-1]) == pytest.approx(2 * FRUITLESS / WAKING, abs=2)


def windows(ngram_size: int | str = "auto") -> WindowSource:
    """The windows that are chosen by trial."""
    return default_sources(LookaheadConfig(ngram_size=ngram_size))[1]


def drive(source: WindowSource, earns: dict, steps: int) -> list:
    """Sizes that are on in each step, where a window earns ``earns[size]`` a step at a cost of 1."""
    seen = []
    for _ in range(steps):
        seen.append(source.size)
        source.trials.count(earns.get(source.size, 0.0), 1.0 if source.size else 0.0)
    return seen


def test_a_window_that_does_not_pay_is_hardly_ever_on():
    seen = drive(windows(), {}, 20_000)
    assert sum(size is not None for size in seen) / len(seen) < 0.01
    assert seen[: FIRST_PAUSE + 1] == [None] * FIRST_PAUSE + [WINDOW_SIZES[0]]


@pytest.mark.parametrize("best", range(len(WINDOW_SIZES)))
def test_the_largest_window_that_pays_is_kept(best):
    earns = {size: 2.0 if number <= best else 0.5 for number, size in enumerate(WINDOW_SIZES)}
    seen = drive(windows(), earns, 30_000)
    assert sum(size == WINDOW_SIZES[best] for size in seen) / len(seen) > 0.9


def test_a_window_that_ceases_to_pay_is_dropped():
    source = windows(ngram_size=3)
    seen = drive(source, {(4, 3): 2.0}, 3000)
    assert {size for size in seen if size} <= {(4, 3), (8, 3)}
    assert (4, 3) in drive(source, {(4, 3): 2.0}, 100)
    seen = drive(source, {}, 30_000)
    assert seen[-1] is None
    assert sum(size is not None for size in seen[-10_000:]) < 10 * TRIAL_STEPS


def test_likeliest_part_of_a_tree():
    rng = np.random.default_rng(1)
    for _, n in itertools.product(range(50), (1, 7, 30)):
        parents = np.array([rng.integers(-1, i) for i in range(n)])
        probabilities = np.zeros(n)
        for i, parent in enumerate(parents):
            above = 1.0 if parent < 0 else probabilities[parent]
            probabilities[i] = above * rng.choice([1.0, rng.random()])  # ties between a node and its parent, too
        depths = GuessTree.of(np.arange(n), parents).depths
        tree = GuessTree(rng.permutation(99)[:n], parents, depths, probabilities, rng.integers(0, 5, n))
        for count in (0, 1, n // 2, n, n + 3):
            part = tree.prune(count)
            assert len(part) == min(count, n)
            assert part.probabilities.sum() == pytest.approx(np.sort(probabilities)[::-1][:count].sum())
            paths = set()
            for tokens in (tree, part):
                line = {-1: ()}
                for i, parent in enumerate(tokens.parents.tolist()):
                    line[i] = (*line[parent], int(tokens.tokens[i]))
                    assert tokens.depths[i] == len(line[i])
                    assert parent < i
                paths = paths or set(line.values())
                assert set(line.values()) <= paths
