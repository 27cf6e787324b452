"""Logits processors, of transformers and of users, in any order: the same texts and draws as in plain decoding."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from test_lossless import known_model, left_pad, random_cases, random_prompt
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import lookahead
from lookahead import LookaheadConfig
from lookahead.engine import scores, torch_choice


class Noting(LogitsProcessor):
    """Records what it sees, keeps the scores, and changes them by the number of its calls."""

    def __init__(self):
        self.seen, self.kept = [], []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        self.kept.append((scores, scores.clone()))
        return scores + 0.1 * (len(self.seen) % 3) * torch.linspace(-1, 1, scores.shape[1])


class Listing(StoppingCriteria):
    """Records what it sees, and ends a text after some tokens."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, -1] % 13 == 0


class InPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] -= 1
        return scores


MAKERS = {
    "penalty": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "no repeat": lambda: NoRepeatNGramLogitsProcessor(3),
    "length": lambda: MinLengthLogitsProcessor(20, [1, 2, 3, 500]),
    "new": lambda: MinNewTokensLengthLogitsProcessor(5, 12, torch.tensor([2, 4])),
    "suppress": lambda: SuppressTokensLogitsProcessor([5, 6, 700, 90]),
    "noting": Noting,
    "in place": InPlace,
    "temperature": lambda: TemperatureLogitsWarper(0.7),
    "top k": lambda: TopKLogitsWarper(20),
    "top p": lambda: TopPLogitsWarper(0.8),
    "min p": lambda: MinPLogitsWarper(0.05),
    "typical": lambda: TypicalLogitsWarper(0.7),
}


@random_cases(80)
@given(
    family=st.sampled_from(["llama", "gpt2", "gemma3_text", "lfm2"]),
    names=st.lists(st.sampled_from(list(MAKERS)), max_size=6),
    ends=st.sampled_from([None, 1, [2, 4, 9]]),
    draws=st.booleans(),
    criterion=st.sampled_from([None, "user", "time"]),
    budget=st.sampled_from([0, 8, "auto"]),
    prompt_seed=st.integers(0, 2**31),
    seed=st.integers(0, 2**31),
)
def test_any_processors_in_any_order(family, names, ends, draws, criterion, budget, prompt_seed, seed):
    note(f"{family=} {names=} {ends=} {draws=} {criterion=} {budget=} {prompt_seed=} {seed=}")
    model, inputs = known_model(family, 1), left_pad([random_prompt(random.Random(prompt_seed))])
    options = {"max_new_tokens": 25, "do_sample": draws, "top_k": 0, "eos_token_id": ends}
    options |= {"max_time": 1000.0} if criterion == "time" else {}

    def run():
        mine = LogitsProcessorList(MAKERS[name]() for name in names)
        stops = StoppingCriteriaList([Listing()] if criterion == "user" else [])
        torch.manual_seed(seed)
        text = model.generate(**inputs, **options, logits_processor=mine, stopping_criteria=stops).tolist()
        noting = [one for one in mine if isinstance(one, Noting)]
        for first, second in (pair for one in noting for pair in one.kept):
            assert torch.equal(first, second), "scores that a processor keeps have changed"
        return text, [one.seen for one in [*noting, *stops]], torch.get_rng_state().tolist()

    expected = run()
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    try:
        assert run() == expected
        assert not model.lookahead.last.plain
    finally:
        lookahead.unwrap(model)


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 20},
        {"min_length": 20, "suppress_tokens": [5, 6]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"do_sample": True, "top_k": 0, "min_p": 0.05},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        {"logits_processor": LogitsProcessorList([InPlace()])},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "stopping_criteria": StoppingCriteriaList([Listing()])},
        {"max_time": 1000.0, "min_new_tokens": 20},
    ],
    ids=["new", "hidden", "repetition", "min p", "warps", "user", "criterion", "time"],
)
def test_torch_does_not_choose_after_processors(options, monkeypatch):
    """torch takes several times as long to choose a token as one call of ours."""
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    options = {"max_new_tokens": 20, "do_sample": False} | options
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    lookahead.wrap(model, LookaheadConfig(budget=8))
    monkeypatch.setattr(torch_choice, "emit", None)
    try:
        torch.manual_seed(0)
        assert torch.equal(model.generate(ids, **options), expected)
    finally:
        lookahead.unwrap(model)


@random_cases(200)
@given(
    tokens=st.lists(st.integers(-3, 40), min_size=1, max_size=8),
    length=st.integers(1, 12),
    least=st.integers(0, 12),
    prompt=st.integers(0, 6),
    values=st.lists(st.sampled_from([0.5, -2.0, float("nan"), float("inf"), -float("inf")]), min_size=1, max_size=30),
)
def test_tokens_are_hidden_as_by_transformers(tokens, length, least, prompt, values):
    """Also tokens that are not in the vocabulary."""
    row, ids = torch.tensor(values), torch.ones(1, length, dtype=torch.long)
    rule = SimpleNamespace(ids=ids, length=length)
    processors = [
        MinLengthLogitsProcessor(least, tokens),
        MinNewTokensLengthLogitsProcessor(prompt, least, tokens[:2]),
        SuppressTokensLogitsProcessor(tokens[2:]) if len(tokens) > 2 else SuppressTokensLogitsProcessor(tokens),
    ]
    for one in processors:
        (change,) = scores.changes([one])
        assert isinstance(change, scores.Hide)
        expected = one(ids, row[None].clone())
        assert torch.equal(scores.changed(row, rule, [change]).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(row.nan_to_num(7.0), torch.tensor(values).nan_to_num(7.0))


def test_patched_processors_are_called(monkeypatch):
    monkeypatch.setattr(SuppressTokensLogitsProcessor, "__call__", lambda self, ids, scores: scores + 1)
    (change,) = scores.changes([processor := SuppressTokensLogitsProcessor([1])])
    assert change is processor
