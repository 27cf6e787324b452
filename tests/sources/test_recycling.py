"""Three published sources of guesses, in the benchmark: they are lossless, and propose what their papers say."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import VOCABULARY, tiny_model

import lookahead
from bench import recycling
from bench.recycling import (
    GOOSE_NODES,
    NGRAM,
    RACER_NODES,
    RECYCLED_DEPTH,
    RECYCLED_NODES,
    STATIC_TREE,
    Goose,
    GooseSource,
    Racer,
    RacerSource,
    TokenRecyclingSource,
    longest_match,
)
from lookahead import LookaheadConfig, NgramPool
from lookahead.guessing.source import Batch, Limits

NODES = {TokenRecyclingSource: RECYCLED_NODES, RacerSource: RACER_NODES, GooseSource: GOOSE_NODES}
LIMITS = Limits([100], 100, 0.0, False)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("source", NODES)
@settings(deadline=None, max_examples=12)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30),
    budget=st.sampled_from([1, 7, 80, "auto"]),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 5),
)
def test_texts_are_plain_decoding_s(model, source, prompt, budget, temperature, seed):
    inputs = torch.tensor([prompt, prompt[::-1]])
    options = {"max_new_tokens": 24, "do_sample": temperature > 0, "pad_token_id": 0, "eos_token_id": 3}
    options |= {"temperature": temperature, "top_k": 0} if temperature else {}
    texts = inputs[:1] if temperature else inputs  # a sampled batch draws otherwise

    def written() -> list:
        torch.manual_seed(seed)
        return model.generate(texts, attention_mask=torch.ones_like(texts), **options).tolist()

    plain = written()
    lookahead.wrap(model, LookaheadConfig(budget=budget, window_size=0), source=source())
    try:
        assert written() == plain
    finally:
        lookahead.unwrap(model)


@pytest.mark.parametrize("source", NODES)
def test_they_guess_what_repeats(model, source):
    lookahead.wrap(model, LookaheadConfig(budget=80, window_size=0), source=source())
    try:
        ids = torch.tensor([[5, 6, 7, 8]])
        options = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        stats = model.lookahead.last
    finally:
        lookahead.unwrap(model)
    assert stats.accepted[source.__name__] > 40, "the tiny model soon repeats itself"
    assert NODES[source] / 2 < stats.guesses / stats.steps <= NODES[source]


def begun(source, said: dict[int, list[int]]):
    guesser = source.start(Batch([[1]], 0.0, VOCABULARY, NgramPool()))
    guesser._said = said
    return guesser


def k_ary(tokens: int, k: int) -> dict[int, list[int]]:
    """Each token has its own k followers, so that a tree shows its shape."""
    return {t: [k * t + 1 + rank for rank in range(k)] for t in range(tokens)}


def paths_of(tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_the_shape_of_token_recycling_s_tree():
    assert len(STATIC_TREE) == RECYCLED_NODES
    (tree,) = begun(TokenRecyclingSource(), k_ary(10**4, 8)).propose([[9, 0]], LIMITS)
    assert len(tree) == RECYCLED_NODES
    assert tree.depths.max() == RECYCLED_DEPTH
    children = [int((tree.parents == node).sum()) for node in range(-1, len(tree))]
    assert children[0] == 7, "the root has the most"
    first, last = (int((tree.tokens == token).argmax()) for token in (1, 7))
    assert children[1 + first] > children[1 + last], "a better rank has more below it"


def test_unknown_tokens_end_branches():
    (tree,) = begun(TokenRecyclingSource(), {4: [5, 6], 6: [4]}).propose([[4]], LIMITS)
    assert sorted(paths_of(tree))[:3] == [(5,), (6,), (6, 4)]
    assert len(begun(TokenRecyclingSource(), {}).propose([[4]], LIMITS)[0]) == 0


def test_breadths_of_racer_s_logits_tree(monkeypatch):
    """Of four next tokens: the root's children have 4, 2, 1, 1; those of its first child 2, 1, 1, 1, and so on."""
    monkeypatch.setattr(recycling, "TOP_K", 4)
    monkeypatch.setattr(recycling, "RACER_NODES", 20)
    (tree,) = begun(RacerSource(), k_ary(1000, 4)).propose([[0]], LIMITS)
    below = {paths[:-1]: 0 for paths in paths_of(tree)}
    for path in paths_of(tree):
        below[path[:-1]] += 1
    assert below[()] == 4
    assert [below[token,] for token in (1, 2, 3, 4)] == [4, 2, 1, 1]
    assert [below[1, token] for token in (5, 6, 7, 8)] == [2, 1, 1, 1]
    assert [below[2, token] for token in (9, 10)] == [1, 1]
    assert below[3, 13] == 1
    assert len(tree) == 20


def test_racer_takes_the_most_frequent_continuations_first(monkeypatch):
    monkeypatch.setattr(recycling, "NGRAM", 4)
    monkeypatch.setattr(recycling, "RACER_NODES", 3)
    source = begun(RacerSource(), {})
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 5, 6, 1, 2]
    source.observe_prompt(text, torch.zeros(len(text), VOCABULARY), {})
    source._said = {2: [7]}
    (tree,) = source.propose([text], LIMITS)
    assert set(paths_of(tree)) == {(3,), (5,), (3, 9)}
    assert dict(zip(paths_of(tree), tree.probabilities.tolist(), strict=True))[3,] == pytest.approx(2 / 4)
    monkeypatch.setattr(recycling, "RACER_NODES", 63)
    (whole,) = source.propose([text], LIMITS)
    assert set(paths_of(whole)) == {(3,), (5,), (3, 9), (3, 8), (5, 6), (7,)}


def test_racer_learns_each_gram_once(model, monkeypatch):
    kept = []
    monkeypatch.setattr(Racer, "end", lambda self: kept.append(self._grams))
    lookahead.wrap(model, LookaheadConfig(budget=20, window_size=0), source=RacerSource())
    try:
        ids = torch.tensor([list(range(2, 25))])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0].tolist()
    finally:
        lookahead.unwrap(model)
    begins: Counter = Counter()
    for end in range(recycling.NGRAM, len(text)):  # the last token has not been a root
        begins[text[end - recycling.NGRAM]] += 1
    assert {token: node.times for token, node in kept[0].next.items()} == begins


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_longest_match_is_the_longest_and_latest(text):
    def matched(end: int) -> int:
        length = 0
        while length < min(end, NGRAM) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    length, end = max(((matched(end), end) for end in range(1, len(text))), default=(0, 0))
    followed = (text[end:] * GOOSE_NODES)[:GOOSE_NODES]
    assert longest_match(text) == ((followed, length) if length > 1 else ([], 0))


def test_goose_s_tree_is_deep_along_its_spine_and_wide_beside_it():
    source = begun(GooseSource(), k_ary(100, 8))
    text = [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 99, 70, 71]
    source._matches_right[2], source._matches_seen[2] = 1, 10
    (unsure,) = source.propose([text], LIMITS)
    source._matches_right[2] = 9
    (tree,) = source.propose([text], LIMITS)
    spine = tuple(text[2:])
    assert spine in paths_of(tree), "matches come true"
    assert spine not in paths_of(unsure)
    beside = [sum(token not in text for token in path) for path in paths_of(tree)]
    assert max(beside) < 5
    assert len(spine) < np.count_nonzero(beside) < GOOSE_NODES - len(spine)


def test_goose_learns_by_their_length_how_often_matches_come_true(model, monkeypatch):
    kept = []
    monkeypatch.setattr(Goose, "end", lambda self: kept.append((self._matches_right, self._matches_seen)))
    lookahead.wrap(model, LookaheadConfig(budget=20, window_size=0), source=GooseSource())
    try:
        ids = torch.tensor([[5, 6, 7, 8]])
        options = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        lookahead.unwrap(model)
    ((right, seen),) = kept
    assert right[NGRAM] / seen[NGRAM] > 0.65, "the tiny model soon repeats itself"
    assert seen[0] == right[0] * 2, "nothing was matched there"
