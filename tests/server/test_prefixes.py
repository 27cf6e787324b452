"""A prompt that goes on from an earlier text is not read again, and its answer is that of the whole prompt."""

import random

import pytest
import torch
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.compat import CACHE
from lookahead.extending import bytes_of
from lookahead.tools.server.prefixes import LEAST_SHARED, Prefixes

CONFIG = LookaheadConfig(budget=6, window_size=2, ngram_size=3)
GREEDY = {"do_sample": False, "return_dict_in_generate": True}


def prompt_of(ids):
    """A server's prompt hides no token, not even one that pads elsewhere."""
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def answer(model, prefixes, ids, new):
    """Return the text, and how many tokens of its prompt were cached, as the server calls generate()."""
    cache, cached = prefixes.take(ids)
    known = {} if cache is None else {CACHE: cache}
    text = model.generate(**prompt_of(ids), max_new_tokens=new, **GREEDY, **known).sequences[0].tolist()
    if cache is not None:
        prefixes.keep(text, cache)
    return text, cached


@settings(max_examples=40, deadline=None)
@example("mistral", False, 40_000, 629)
@example("mamba2", True, 40_000, 792)
@given(
    family=st.sampled_from(["llama", "mistral", "gemma3_text", "lfm2", "mamba2", "phi"]),
    wraps=st.booleans(),
    most=st.sampled_from([0, 40_000, 2**30]),
    seed=st.integers(0, 999),
)
def test_texts_are_those_of_the_whole_prompt(family, wraps, most, seed):
    note(f"{family=} {wraps=} {most=} {seed=}")
    plain, model = tiny_model(family), tiny_model(family)
    if wraps:
        lookahead.wrap(model, CONFIG)
    prefixes, rng = Prefixes(model, most), random.Random(seed)
    texts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 40))]]
    for _ in range(6):
        of = rng.choice(texts)
        ids = of[: rng.randint(1, len(of))] if rng.random() < 0.5 else of
        ids = ids + [rng.randrange(3, 97) for _ in range(rng.randint(0, 20))]
        new = rng.randint(1, 25)
        expected = plain.generate(**prompt_of(ids), max_new_tokens=new, **GREEDY).sequences[0].tolist()
        text, cached = answer(model, prefixes, ids, new)
        if cached and family not in ("lfm2", "mamba2") and not wraps:
            # transformers' own second turn is at times not the text of the whole prompt.
            known = DynamicCache(config=plain.config)
            with torch.no_grad():
                plain(torch.tensor([ids[:cached]]), **{CACHE: known})
            given = {**prompt_of(ids), CACHE: known}
            expected = plain.generate(**given, max_new_tokens=new, **GREEDY).sequences[0].tolist()
        assert text == expected
        assert cached < len(ids)
        assert prefixes.bytes == sum(bytes_of(kept.cache) for kept in prefixes._kept) <= most
        texts.append(text)


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "mamba2", "zaya"])
def test_the_next_turn_reads_what_is_new(family):
    model = lookahead.wrap(tiny_model(family), CONFIG)
    prefixes, ids = Prefixes(model, 2**30), list(range(3, 40))
    for turn in range(4):
        before = len(ids)
        ids, cached = answer(model, prefixes, [*ids, 5, 6, 7], 10)
        assert cached == (before - 1 if turn else 0)  # the last token written was not computed
    assert len(prefixes._kept) == 1


def test_two_conversations_that_begin_alike_go_on_side_by_side():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    prefixes, system = Prefixes(model, 2**30), list(range(3, 40))
    texts = [[*system, one] for one in (50, 60)]
    for turn in range(3):
        for i in range(2):
            texts[i], cached = answer(model, prefixes, [*texts[i], 5, 6], 10)
            assert cached == (len(texts[i]) - 13 if turn else len(system) * i)


def test_no_more_is_copied_than_is_shared():
    """Most prompts begin with the same system message: of a long text, they need the first columns alone."""
    prefixes = Prefixes(lookahead.wrap(tiny_model("llama"), CONFIG), 2**30)
    text, _ = answer(prefixes._model, prefixes, [3, 4] * 250, 5)
    copied, cached = prefixes.take([*text[:30], 9, 9])
    assert cached == 30
    assert 0 < bytes_of(copied) < bytes_of(prefixes._kept[0].cache) / 5
    assert prefixes.take([*text, 9], shares=True)[1] == len(text) - 1  # the other text is as it was


def test_the_oldest_goes_first_and_little_is_not_worth_a_copy():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    prefixes = Prefixes(model, 2**30)
    answer(model, prefixes, [3] * 30, 5)
    size = prefixes.bytes
    assert size == bytes_of(prefixes._kept[0].cache) > 0
    prefixes = Prefixes(model, 2 * size)
    for token in (3, 4, 5):
        answer(model, prefixes, [token] * 30, 5)
    assert [kept.text[0] for kept in prefixes._kept] == [4, 5]
    assert answer(model, prefixes, [4] * 30, 5)[1] == 29
    assert answer(model, prefixes, [5] * (LEAST_SHARED - 1) + [6] * 20, 5)[1] == 0
