"""Guesses from a collection of texts: the right places are found, and the texts stay plain decoding's."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lossless import check_identical
from zoo import VOCABULARY, tiny_model

from lookahead import LookaheadConfig, PoolSource, RetrievalSource
from lookahead.guessing.source import Limits
from lookahead.sources.retrieval import LONGEST, MAX_PLACES
from lookahead.tools.loading import load

collections = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5).filter(any)


def proposed(source: RetrievalSource, text: list[int], depth: int = 8, guesses: int = 1000):
    return source.propose([text], Limits([depth], guesses, 0.0, False))[0]


def branches(tree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, tree.probabilities.tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(collections, st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 6))
def test_it_is_what_a_search_finds(texts, text, depth):
    """Against a search through every place: exactly the continuations of the longest suffix that occurs."""
    follows: set[tuple[int, ...]] = set()
    places = 0
    for length in range(min(len(text), LONGEST), 0, -1):
        wanted = text[-length:]
        found = [
            part[i + length : i + length + depth]
            for part in texts
            for i in range(len(part) - length + 1)
            if part[i : i + length] == wanted
        ]
        if found:
            places = len(found)
            follows = {tuple(rest[:n]) for rest in found for n in range(1, len(rest) + 1)}
            break
    actual = branches(proposed(RetrievalSource(texts), text, depth))
    if places <= MAX_PLACES:
        assert set(actual) == follows
    else:
        assert set(actual) <= follows
    firsts = [chance for path, chance in actual.items() if len(path) == 1]
    assert sum(firsts) <= 1


def test_what_follows_more_often_is_likelier():
    chances = branches(proposed(RetrievalSource([[7, 8, 1], [7, 8, 2], [7, 8, 2], [9]]), [5, 7, 8]))
    assert chances[2,] > chances[1,] > 0


def test_no_text_goes_on_into_the_next():
    assert branches(proposed(RetrievalSource([[1, 2], [3, 4]]), [1, 2])) == {}


@pytest.mark.parametrize("texts", [[], [[]], [[-1]], [[2**31]], [[3, -1, 4]]])
def test_what_is_no_collection_is_refused(texts):
    with pytest.raises(ValueError, match=r"0\.\.2\*\*31-1"):
        RetrievalSource(texts)


def test_files(tmp_path):
    _, tokenizer = load(None)
    file = tmp_path / "a.py"
    file.write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    source = RetrievalSource.of_files([file, file], tokenizer)
    ids = tokenizer(file.read_text()).input_ids
    assert len(source) == 2 * len(ids)
    assert proposed(source, ids[:4]).tokens.tolist()[: len(ids) - 4] == ids[4:12]


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_collection_that_holds_the_answer_is_copied_from(has_pool, do_sample):
    model = tiny_model("llama")
    prompt = torch.tensor([[random.Random(0).randrange(3, VOCABULARY) for _ in range(9)]])
    options = {"max_new_tokens": 60, "do_sample": do_sample, "temperature": 0.8}
    torch.manual_seed(5)
    answer = model.generate(prompt, **options)[0].tolist()
    noise = np.random.default_rng(0).integers(0, VOCABULARY, 5000).tolist()
    source = RetrievalSource([noise, answer])
    sources = [PoolSource(), source] if has_pool else source
    stats = check_identical(model, [prompt], options, LookaheadConfig(budget=12), 5, source=sources)
    assert stats.accepted["RetrievalSource"] > 30
    assert stats.tokens_per_step > 4


@pytest.mark.parametrize("text", [[1.5, 2], ["a"], [True], [[1]], 5])
def test_what_is_no_text_of_ids_is_named(text):
    with pytest.raises(ValueError, match="must be a sequence of token ids, not"):
        RetrievalSource([[1, 2], text])


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "latin").write_bytes("caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"))
    with pytest.raises(ValueError, match="latin is not UTF-8 text"):
        RetrievalSource.of_files([tmp_path / "latin"], load(None)[1])
