"""Callbacks, and other functions that generate()'s own loop calls, see and do the same as in plain decoding."""

import ast
import random
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from test_lossless import known_model, left_pad, random_cases, random_prompt
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import utils as loop
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, compat

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
GREEDY = {"max_new_tokens": 30, "do_sample": False}
SAMPLED = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7, "top_k": 20}
CONFIG = LookaheadConfig(budget=8)


class Noting:
    """Records its arguments. Its effect depends on how often it was called."""

    def __init__(self, kind):
        self.kind, self.seen = kind, []

    def note(self, ids):
        self.seen.append((ids.tolist(), ids.dtype))
        return len(self.seen)


class Processor(Noting, LogitsProcessor):
    def __call__(self, input_ids, scores):
        calls = self.note(input_ids)
        if self.kind == "mixes rows":  # as guidance by a second prompt in the same batch does
            return scores + 0.5 * scores.mean(dim=0)
        if self.kind == "writes ids" and calls % 4 == 2:
            input_ids[:, -1] = 5
        return scores


class Criterion(Noting, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        calls = self.note(input_ids)
        if self.kind == "writes ids" and calls % 5 == 3:
            input_ids[:, -1] = 7
        if self.kind == "ends rows":
            return (input_ids[:, -1] + calls) % 16 == 0
        if self.kind == "sees scores" and scores:
            return scores[-1].amax(-1) > 3.5
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamed(list):
    def put(self, value):
        self.append((value.tolist(), value.dtype, value.device.type))

    def end(self):
        self.append("end")


def written(model, inputs, options, seed=0):
    """The text, and the state of torch's generator after it."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = model.generate(**inputs, **options)
    return ids.tolist(), ids.dtype, torch.get_rng_state().tolist()


@random_cases(60)
@given(
    family=st.sampled_from(["llama", "gpt2", "gemma3_text", "lfm2"]),
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
    processor=st.sampled_from([None, "notes", "mixes rows", "writes ids"]),
    criterion=st.sampled_from([None, "notes", "writes ids", "ends rows", "sees scores"]),
    ends=st.sampled_from([None, 1, list(range(3, 20))]),
    temperature=st.sampled_from([None, 0.7, 1.3]),
    keeps=st.booleans(),
    narrow=st.booleans(),
    budget=st.sampled_from([0, 3, 16]),
    seed=st.integers(0, 2**31),
)
def test_callbacks_do_what_they_do_in_plain_decoding(
    family, prompt_seeds, processor, criterion, ends, temperature, keeps, narrow, budget, seed
):
    """Also those that write into the ids, or look at scores of other sequences, which may have ended."""
    note(f"{family=} {prompt_seeds=} {processor=} {criterion=} {ends=} {temperature=} {keeps=} {narrow=} {budget=}")
    model = known_model(family, 1)
    inputs = left_pad([random_prompt(random.Random(prompt_seed)) for prompt_seed in prompt_seeds])
    inputs["input_ids"] = inputs["input_ids"].int() if narrow else inputs["input_ids"]
    options = {"max_new_tokens": 25, "return_dict_in_generate": True, "output_scores": keeps, "output_logits": keeps}
    options |= {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    options |= {"eos_token_id": ends} if ends else {}

    def run():
        mine = [Processor(processor)] if processor else []
        ending = [Criterion(criterion)] if criterion else []
        streamer = Streamed()
        torch.manual_seed(seed)
        result = model.generate(
            **inputs, **options, logits_processor=LogitsProcessorList(mine),
            stopping_criteria=StoppingCriteriaList(ending), streamer=streamer,
        )  # fmt: skip
        seen = [one.seen for one in (*mine, *ending)]
        return result, (
            result.sequences.tolist(),
            result.sequences.dtype,
            seen,
            streamer,
            torch.get_rng_state().tolist(),
        )

    expected, theirs = run()
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    try:
        found, ours = run()
        assert not model.lookahead.last.plain
    finally:
        lookahead.unwrap(model)
    assert ours == theirs
    for name in ("scores", "logits") if keeps else ():
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, GREEDY | {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_narrow_ids_become_those_of_plain_decoding(options, dtype):
    model = tiny_model("llama")
    expected = written(model, {"input_ids": IDS.to(dtype)}, options)
    lookahead.wrap(model, CONFIG)
    assert written(model, {"input_ids": IDS.to(dtype)}, options) == expected
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SAMPLED | {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("family", ["llama", "bloom", "lfm2"])
def test_a_default_device_has_no_say(family, options, batch):
    """Nothing can be computed on the device "meta": all tensors of ours are made where they belong."""
    inputs = {"input_ids": IDS.expand(batch, -1)}
    model = tiny_model(family)
    with torch.device("meta"):
        plain = Streamed()
        expected = written(model, inputs, options), written(model, inputs, options | {"streamer": plain})
        lookahead.wrap(model, CONFIG)
        ours = Streamed()
        assert (written(model, inputs, options), written(model, inputs, options | {"streamer": ours})) == expected
    assert ours == plain
    assert model.lookahead.last.steps > 0


def test_every_tensor_that_is_made_names_its_device():
    makers = {"arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"}
    root = Path(lookahead.__file__).parent
    calls = [
        (path, node)
        for path in root.rglob("*.py")
        if "tools" not in path.relative_to(root).parts  # commands, in processes of their own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    ]
    assert len(calls) > 20
    lacking = [f"{path}:{call.lineno}" for path, call in calls if "device" not in {key.arg for key in call.keywords}]
    assert not lacking


def _rolled(function):
    return lambda self, ids, scores: function(self, ids, scores).roll(1, -1)


def _ending(function):
    return lambda self, ids, *args, **kwargs: function(self, ids, *args, **kwargs) | (ids.shape[1] > 20)


def _small(function):
    return lambda *args, **kwargs: function(*args, **kwargs).clamp(max=40)


IN_LOOP = [
    (LogitsProcessorList, "__call__", _rolled),
    (StoppingCriteriaList, "__call__", _ending),
    (TemperatureLogitsWarper, "__call__", _rolled),
    (TopKLogitsWarper, "__call__", _rolled),
    (EosTokenCriteria, "__call__", _ending),
    (MaxLengthCriteria, "__call__", _ending),
    (torch, "multinomial", _small),
    (torch, "argmax", _small),
    (torch.nn.functional, "softmax", lambda own: lambda *args, **kwargs: own(*args, **kwargs).roll(1, -1)),
    (
        GenerationMixin,
        "_has_unfinished_sequences",
        lambda own: lambda self, over, *args, **kwargs: own(self, over, *args, **kwargs) and torch.rand(1) > 0.1,
    ),
]
if hasattr(loop, "StopCheck"):
    IN_LOOP.append((loop.StopCheck, "__call__", lambda own: lambda self, *args: own(self, *args) or args[-1] > 20))


@pytest.mark.parametrize(("owner", "name", "changed"), IN_LOOP, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("batch", [1, 2])
def test_what_the_loop_calls_may_be_replaced(owner, name, changed, batch, monkeypatch):
    model, inputs = tiny_model("llama"), {"input_ids": IDS.expand(batch, -1)}
    usual = [written(model, inputs, options) for options in (GREEDY, SAMPLED)]
    lookahead.wrap(model, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, changed(getattr(owner, name)))
        found = [written(model, inputs, options) for options in (GREEDY, SAMPLED)]
        expected = [written(tiny_model("llama"), inputs, options) for options in (GREEDY, SAMPLED)]
    assert expected != usual, "it has an effect"
    assert found == expected
    assert [written(model, inputs, options) for options in (GREEDY, SAMPLED)] == usual
    assert model.lookahead.last.steps > 0


def test_a_criterion_may_allow_a_longer_text_than_the_settings():
    """It replaces that of generate(). Here the text goes on across the length at which rotary embeddings change."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [9.0] * 2}
    rope |= {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5, "factor": 4.0}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32, sliding_window=None)
    lookahead.wrap(model, CONFIG)
    for length, reason in ((70, "across the length"), (20, ""), (3, "")):
        options = {"stopping_criteria": [MaxLengthCriteria(length)], "max_new_tokens": 5, "eos_token_id": None}
        found = written(model, {"input_ids": IDS}, options)
        assert len(found[0][0]) == max(length, IDS.shape[1] + 1)
        assert reason in model.lookahead.last.plain
        assert bool(reason) == bool(model.lookahead.last.plain)
        lookahead.unwrap(model)
        assert found == written(model, {"input_ids": IDS}, options)
        lookahead.wrap(model, CONFIG)


@pytest.mark.parametrize("what", ["use_cache", "inputs_embeds", "logits_to_keep"])
def test_settings_that_change_what_a_model_reads_are_left_to_it(what):
    model = tiny_model("llama")
    options = {
        "use_cache": {"use_cache": False},
        "inputs_embeds": {"prefill_chunk_size": 3, "inputs_embeds": model.get_input_embeddings()(IDS[:, :3]).detach()},
        "logits_to_keep": {"logits_to_keep": torch.tensor([0])},
    }[what]

    def run():
        own = {compat.CACHE: DynamicCache(config=model.config)} if what == "use_cache" else {}
        return written(model, {"input_ids": IDS[:, :3] if what == "inputs_embeds" else IDS}, GREEDY | options | own)

    expected = run()
    lookahead.wrap(model, CONFIG)
    assert run() == expected
    assert what in model.lookahead.last.plain


@pytest.mark.parametrize("no_cache", [None, 0, ""])
def test_what_is_neither_true_nor_false_makes_a_cache_that_is_not_used(no_cache):
    """generate() makes one for every value but False, and then passes the whole text to it each time."""
    model = tiny_model("gpt_oss")
    expected = written(model, {"input_ids": IDS}, GREEDY | {"use_cache": no_cache})
    assert expected != written(model, {"input_ids": IDS}, GREEDY)
    lookahead.wrap(model, CONFIG)
    assert written(model, {"input_ids": IDS}, GREEDY | {"use_cache": no_cache}) == expected
    assert model.lookahead.last.plain == f"with use_cache={no_cache!r}"


def test_chunks_without_a_cache_are_refused_as_plain_decoding_refuses_them():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    with (
        pytest.warns(UserWarning, match="use_cache=False and prefill"),
        pytest.raises(ValueError, match="without a cache"),
    ):
        model.generate(IDS, use_cache=False, prefill_chunk_size=2, **GREEDY)


def test_texts_that_go_in_step_are_sampled_from_their_seeds():
    """Each of several that are submitted together, whatever draws meanwhile."""
    model = tiny_model("llama")
    prompts = torch.tensor([[5, 6, 7, 5, 6], [9, 3, 9, 3, 9], [8, 8, 4, 8, 8]])
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": True}

    def given(ids):
        return {**options, "logits_processor": LogitsProcessorList([Processor("notes")]), "input_ids": ids}

    alone = [written(model, given(prompt[None]), {}, 40 + b)[0][0] for b, prompt in enumerate(prompts)]
    sequences = lookahead.Sequences(lookahead.wrap(model, CONFIG))
    future = sequences.submit(seed=40, **given(prompts))
    while sequences.step():
        torch.rand(3)
    assert future.result().tolist() == alone


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), None])
@pytest.mark.parametrize("do_sample", [True, False])
def test_scores_that_allow_no_token_fail_as_in_plain_decoding(value, batch, do_sample):
    """The same error, the same criteria asked before it, and the same draws of torch's generator."""

    def at_last(ids, scores):
        return scores if ids.shape[1] < IDS.shape[1] + 6 else None if value is None else torch.full_like(scores, value)

    def asked(ids, scores):
        lengths.append(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)

    model, outcomes = known_model("llama", 1), []
    for wrapped in (False, True):
        if wrapped:
            lookahead.wrap(model)
        lengths = []
        torch.manual_seed(0)
        options = {
            "logits_processor": LogitsProcessorList([at_last]), "stopping_criteria": StoppingCriteriaList([asked]),
        }  # fmt: skip
        try:
            ending = model.generate(IDS.repeat(batch, 1), max_new_tokens=9, do_sample=do_sample, **options).tolist()
        except (RuntimeError, TypeError, AttributeError) as error:
            ending = type(error)
        outcomes.append((ending, lengths, torch.rand(1).item()))
    lookahead.unwrap(model)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("place", ["criterion", "processor", "streamer", "hook"])
def test_a_stop_iteration_is_raised_as_by_plain_decoding(place):
    """It ends generators and their users: the text would have ended well, with None or with a RuntimeError."""
    model = known_model("llama", 1)
    calls = []

    def stop(*given, **_):
        calls.append(given)
        if len(calls) == 5 or (place == "hook" and len(calls) < 5):
            raise StopIteration("mine")
        return given[-1] if place == "processor" else torch.zeros(len(given[0]), dtype=torch.bool)

    class Streamer(Streamed):
        put = staticmethod(stop)

    class After(Streamed):
        """Lets the next pass fail."""

        def put(self, value):
            super().put(value)
            if len(self) == 4:
                hooks.append(model.get_input_embeddings().register_forward_hook(stop))

    hooks, config = [], LookaheadConfig(budget=2, cpu_kernels=False)
    given = {
        "criterion": {"stopping_criteria": StoppingCriteriaList([stop])},
        "processor": {"logits_processor": LogitsProcessorList([stop])},
        "streamer": {"streamer": Streamer()},
        "hook": {"streamer": After()},
    }[place]
    lookahead.wrap(model, config)
    try:
        with pytest.raises(StopIteration, match="mine"):
            model.generate(IDS, **GREEDY, **given)
        if place != "hook":
            calls.clear()
            sequences = lookahead.Sequences(model)
            future = sequences.submit(IDS, **GREEDY, **given)
            while sequences.step():
                pass
            assert type(future.exception()) is RuntimeError  # asyncio would wait for a StopIteration for ever
            assert "StopIteration" in str(future.exception())
    finally:
        lookahead.unwrap(model)
        for hook in hooks:
            hook.remove()
