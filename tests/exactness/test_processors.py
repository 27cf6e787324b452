"""Logits processors, of transformers and of users, in any order: the same texts and draws as in plain decoding."""

import random
import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
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
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EosTokenCriteria
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.engine import scores, torch_choice
from lookahead.engine.sampling import NewTokensCriterion, NewTokensProcessor, NextTokenRule, Settings
from lookahead.streaming import PieceStreamer
from lookahead.tools.server.answering import Penalties


def assert_same(model, run, budget=8):
    """`run` returns the same with lookahead as without."""
    expected = run()
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    try:
        assert run() == expected
        assert not model.lookahead.last.plain
    finally:
        lookahead.unwrap(model)


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

    assert_same(model, run, budget)


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 20},
        {"min_length": 20, "suppress_tokens": [5, 6]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"do_sample": True, "top_k": 0, "min_p": 0.05},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "stopping_criteria": StoppingCriteriaList([Listing()])},
        {"max_time": 1000.0, "min_new_tokens": 20},
    ],
    ids=["new", "hidden", "repetition", "min p", "warps", "criterion", "time"],
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


class Control(LogitsProcessor):
    """Sets a field of another processor or criterion, from a few values in turn."""

    def __init__(self, of, name, values):
        self.of, self.name, self.values, self.calls = of, name, values, 0

    def __call__(self, ids, scores):
        setattr(self.of, self.name, self.values[self.calls % len(self.values)])
        self.calls += 1
        return scores


class ControlAfter(Control, StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        super().__call__(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)


class ControlWhenShown(Control):
    """A streamer."""

    def put(self, ids):
        self(ids, None)

    def end(self):
        pass


FIELDS = {
    "temperature": (lambda: TemperatureLogitsWarper(1.0), [0.3, 3.0]),
    "top_k": (lambda: TopKLogitsWarper(3), [2, 90]),
    "top_p": (lambda: TopPLogitsWarper(0.9), [0.2, 1.0]),
    "min_p": (lambda: MinPLogitsWarper(0.1), [0.9, 0.0]),
    "suppress_tokens": (lambda: SuppressTokensLogitsProcessor([1]), [torch.arange(60), torch.arange(40, 97)]),
    "min_length": (lambda: MinLengthLogitsProcessor(99, list(range(80))), [0, 99]),
    "eos_token_id": (lambda: EosTokenCriteria(torch.tensor([1])), [torch.tensor([1]), torch.arange(40)]),
}


@pytest.mark.parametrize("by", [Control, ControlAfter, ControlWhenShown])
@pytest.mark.parametrize("field", list(FIELDS))
def test_fields_may_change_at_each_token(field, by):
    """For example, a temperature that goes by the text so far."""
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])

    def run():
        make, values = FIELDS[field]
        changed = make()
        control = by(changed, field, values)
        ends = [one for one in (changed, control) if isinstance(one, StoppingCriteria)]
        processors = [one for one in (control, changed) if isinstance(one, LogitsProcessor) and one not in ends]
        streamer = control if by is ControlWhenShown else None
        processors = [one for one in processors if one is not streamer]
        torch.manual_seed(1)
        ids_after = model.generate(
            ids, max_new_tokens=30, do_sample=True, top_k=0, logits_processor=LogitsProcessorList(processors),
            stopping_criteria=StoppingCriteriaList(ends), streamer=streamer,
        )  # fmt: skip
        return ids_after.tolist(), control.calls

    assert_same(model, run)


def of_no_grad(table):
    class Decorated(LogitsProcessor):
        @torch.no_grad()
        def __call__(self, ids, scores):
            return table[ids[0, -1]][None]

    return Decorated()


def of_a_module(table):
    module = torch.nn.Module()
    module.forward = lambda ids, scores: table[ids[0, -1]][None]
    return module


def of_a_mock(table):
    return mock.MagicMock(side_effect=lambda ids, scores: table[ids[0, -1]][None])


@pytest.mark.parametrize("make", [of_no_grad, of_a_module, of_a_mock])
def test_what_a_processor_returns_is_its_own(make):
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    table = torch.randn(97, 97, generator=torch.Generator().manual_seed(0))
    before = table.clone()

    def run():
        mine = LogitsProcessorList([make(table), MinNewTokensLengthLogitsProcessor(7, 8, list(range(90)))])
        return model.generate(ids, max_new_tokens=20, do_sample=False, logits_processor=mine).tolist()

    assert_same(model, run)
    assert torch.equal(table, before)


class Third(LogitsProcessor):
    def __call__(self, input_ids, scores, third=None):
        return scores


class Keywords(LogitsProcessor):
    def __call__(self, input_ids, scores, **kwargs):
        return scores


@pytest.mark.parametrize("kind", [Third, Keywords])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_processor_with_further_parameters_is_refused_as_by_generate(kind, draws, sequences):
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]]).repeat(sequences, 1)
    lookahead.wrap(model)
    with pytest.raises(ValueError, match="required parameters") as ours:
        model.generate(ids, max_new_tokens=4, do_sample=draws, logits_processor=[kind()])
    with pytest.raises(ValueError, match="required parameters") as plain:
        lookahead.unwrap(model).generate(ids, max_new_tokens=4, do_sample=draws, logits_processor=[kind()])
    assert str(ours.value) == str(plain.value)


ODD = {
    "no ends": lambda: MinLengthLogitsProcessor(20, []),
    "no new ends": lambda: MinNewTokensLengthLogitsProcessor(7, 20, []),
    "floats": lambda: MinLengthLogitsProcessor(20, torch.tensor([5.0, 6.0])),
    "halves": lambda: SuppressTokensLogitsProcessor([0.5, 1.5, 2.5, 3.5]),
    "one end": lambda: MinLengthLogitsProcessor(20, torch.tensor(5)),
    "bytes": lambda: MinLengthLogitsProcessor(20, torch.tensor([5, 6], dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", list(ODD))
def test_odd_fields(name):
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    stops = StoppingCriteriaList([EosTokenCriteria(torch.tensor(50))])  # a number

    def run():
        torch.manual_seed(0)
        mine = LogitsProcessorList([ODD[name]()])
        written = model.generate(ids, max_new_tokens=20, do_sample=True, logits_processor=mine, stopping_criteria=stops)
        return written.tolist()

    assert_same(model, run)


@pytest.mark.parametrize("patched", [torch.no_grad(), lambda call: call, lambda call: mock.MagicMock(side_effect=call)])
@pytest.mark.parametrize("kind", ["suppress", "length", "top k", "min p"])
def test_patched_classes_are_called(kind, patched, monkeypatch):
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    processor = MAKERS[kind]()
    call = patched(lambda *args: args[-1].roll(1, -1))
    monkeypatch.setattr(type(processor), "__call__", call)

    def run():
        torch.manual_seed(0)
        mine = LogitsProcessorList([processor])
        return model.generate(ids, max_new_tokens=20, do_sample=True, top_k=0, logits_processor=mine).tolist()

    assert_same(model, run)


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


@random_cases(200)
@given(
    prompt=st.lists(st.integers(0, 40), max_size=12),
    new=st.lists(st.integers(0, 30), max_size=6),
    penalty=st.floats(0.01, 20),
    ignored=st.one_of(st.none(), st.integers(0, 15), st.integers(0, 15).map(lambda n: torch.tensor([n]))),
    seed=st.integers(0, 2**32 - 1),
)
def test_repetitions_are_penalized_as_by_transformers(prompt, new, penalty, ignored, seed):
    """Bit for bit, token by token, also tokens that are not in the vocabulary."""
    drawn = np.random.default_rng(seed)
    settings = Settings(do_sample=False)
    ids = torch.tensor([prompt], dtype=torch.long)
    try:
        processor = RepetitionPenaltyLogitsProcessor(penalty, ignored)
    except ValueError:  # older transformers take no tensor
        processor = RepetitionPenaltyLogitsProcessor(penalty, int(ignored))
    rule = NextTokenRule(ids, LogitsProcessorList([processor]), StoppingCriteriaList(), settings)
    (change,) = scores.changes([processor])
    assert isinstance(change, scores.Penalize)
    for token in [*new, 0]:
        row = torch.tensor(drawn.normal(0, 10, 31) * drawn.choice([1, np.inf, np.nan, 1e38], 31), dtype=torch.float32)
        try:
            expected = processor(rule.ids, row[None])
        except RuntimeError as error:  # older transformers raise it for tokens that are not in the vocabulary
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                scores.changed(row, rule, [change])
            return
        with np.errstate(all="raise"):
            found = scores.changed(row, rule, [change])
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)) or torch.equal(
            found.nan_to_num(7.0), expected.nan_to_num(7.0)
        )
        rule.record(token)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logits_become_float32_as_by_torch(dtype):
    row = torch.randn(1000, dtype=torch.float64).to(dtype)
    row[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    copied = scores.changed(row, None, [])
    assert copied.dtype == torch.float32
    assert torch.equal(copied[0].nan_to_num(7.0), row.float().nan_to_num(7.0))
    copied += 1
    assert row[2] == -float("inf")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.3, "top_k": 20}])
@pytest.mark.parametrize("seed", range(3))
def test_a_processor_that_sees_new_tokens_writes_the_same_with_and_without_torch(options, seed):
    """Plain decoding calls it as transformers does, and lookahead without torch."""
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    called = []

    class Counting(Penalties):
        def change(self, scores, new):
            called.append(list(new))
            super().change(scores, new)

    def run():
        called.clear()
        torch.manual_seed(seed)
        mine = LogitsProcessorList([Counting(7, 0.5, 0.25)])
        text = model.generate(ids, max_new_tokens=20, do_sample=bool(options), logits_processor=mine, **options)
        assert called == [text[0, 7 : 7 + n].tolist() for n in range(len(called))]  # once before each token
        return text.tolist()

    assert_same(model, run)


class Raises(NewTokensCriterion):
    """Sets the penalty before each token."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def ends(self, new):
        self.of.penalty = 1 + len(new) / 10
        return False

    def __call__(self, input_ids, scores, **kwargs):
        self.ends(input_ids[0, 7:].tolist())
        return torch.zeros(1, dtype=torch.bool)


class RaisesToo(NewTokensProcessor):
    def __init__(self, of):
        super().__init__(7)
        self.of = of

    def change(self, scores, new):
        self.of.penalty = 1 + len(new) / 10


class Rewrites(StoppingCriteria):
    """Writes another token into the text, a few places back."""

    calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls % 6 == 0:
            input_ids[:, -3] = 9
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("ignored", [None, 3, 7, 9])
@pytest.mark.parametrize("how", ["criterion", "processor", "streamer", "pieces", "ids"])
def test_a_penalty_is_that_of_the_moment_and_of_the_text_as_it_is(how, ignored):
    """Whatever sets it, or writes to the text."""
    model, ids = tiny_model("gpt2", seed=1), torch.tensor([[74, 37, 82, 58, 22, 56, 37]])

    def run():
        penalty, options = RepetitionPenaltyLogitsProcessor(3.0 if how == "ids" else 1.0, ignored), {}
        processors = [penalty]
        if how == "criterion":
            options["stopping_criteria"] = StoppingCriteriaList([Raises(penalty)])
        elif how == "processor":
            processors = [RaisesToo(penalty), penalty]
        elif how == "streamer":
            options["streamer"] = TextStreamer(mock.MagicMock())
            options["streamer"].put = lambda tokens: setattr(penalty, "penalty", penalty.penalty + 0.2)
        elif how == "pieces":
            tokenizer = mock.MagicMock()
            tokenizer.decode = lambda ids, **options: "a " * len(ids)
            write = partial(setattr, penalty, "penalty")
            options["streamer"] = PieceStreamer(tokenizer, lambda piece: write(penalty.penalty + 0.2))
        else:
            options["stopping_criteria"] = StoppingCriteriaList([Rewrites()])
        mine = LogitsProcessorList(processors)
        return model.generate(ids, max_new_tokens=20, do_sample=False, logits_processor=mine, **options).tolist()

    assert_same(model, run)


def test_a_penalty_of_numpy_is_rounded_as_by_torch():
    processor = RepetitionPenaltyLogitsProcessor(np.float64(1.3))
    rule = NextTokenRule(
        torch.arange(97)[None], LogitsProcessorList([processor]), StoppingCriteriaList(), Settings(False)
    )
    row = torch.randn(97)
    assert torch.equal(scores.changed(row, rule, scores.changes([processor])), processor(rule.ids, row[None]))


def test_what_is_for_one_text_refuses_several():
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7], [7, 8, 9]])
    for wrapped in (False, True):
        if wrapped:
            lookahead.wrap(model)
        with pytest.raises(ValueError, match="is for one text, not for 2"):
            model.generate(ids, max_new_tokens=4, logits_processor=LogitsProcessorList([Penalties(3, 0.5, 0.5)]))
    lookahead.unwrap(model)


def test_a_list_of_ignored_lengths_is_that_of_the_batch():
    model, ids = known_model("llama", 1), torch.tensor([[5, 6, 7], [7, 8, 9]])
    processor = RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([1, 2, 3]))
    for wrapped in (False, True):
        if wrapped:
            lookahead.wrap(model)
        with pytest.raises(ValueError, match="Incompatible"):
            model.generate(ids, max_new_tokens=4, logits_processor=LogitsProcessorList([processor]))
    lookahead.unwrap(model)
