"""What `generate` takes and returns, on a wrapped model."""

import pickle
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteria,
    TextIteratorStreamer,
    pipeline,
)
from zoo import END, VOCABULARY, tiny_model

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig, NgramPool, UnsupportedModelError
from lookahead.config import MAX_ROWS
from lookahead.passes.capabilities import find_adapter
from lookahead.tools.loading import load


@pytest.fixture
def model():
    return tiny_model("llama", seed=3)


@pytest.fixture
def ids():
    return torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def both(model, ids, **options):
    """(plain, by lookahead) from the same seed."""
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    lookahead.wrap(model, LookaheadConfig(window_size=3))
    torch.manual_seed(0)
    actual = model.generate(ids, **options)
    assert model.lookahead.last.steps > 0 or actual.shape[1] - ids.shape[1] <= 1
    lookahead.unwrap(model)
    return expected, actual


class TokenIs(StoppingCriteria):
    """Stops after a token, and notes every prefix that it was shown."""

    def __init__(self, token):
        self.token = token
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


class Recorder(LogitsProcessor):
    """A stateful processor: its effect depends on how often it was called."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        scores[:, len(self.prefixes) % VOCABULARY] += 2.0
        return scores


class ListStreamer:
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended = True


def test_nothing_is_emitted_past_a_stop(model, ids):
    """Every token of the text serves as a stop once; the criterion sees every emitted token, one by one."""
    text = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    lookahead.wrap(model)
    for token in sorted(set(text)):
        criterion = TokenIs(token)
        output = model.generate(ids, max_new_tokens=40, do_sample=False, stopping_criteria=[criterion])
        assert output[0, ids.shape[1] :].tolist() == text[: text.index(token) + 1]
        assert criterion.lengths == list(range(ids.shape[1] + 1, output.shape[1] + 1))
        eos = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=[END, token])
        assert eos.tolist() == output.tolist()


def test_stateful_processors_see_the_true_prefix_once(model, ids):
    ours, theirs = Recorder(), Recorder()
    expected = model.generate(ids, max_new_tokens=30, logits_processor=LogitsProcessorList([theirs]))
    lookahead.wrap(model)
    actual = model.generate(ids, max_new_tokens=30, logits_processor=LogitsProcessorList([ours]))
    assert actual.tolist() == expected.tolist()
    assert ours.prefixes == theirs.prefixes


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 30},
        {"max_length": 30.5},
        {"max_new_tokens": 2e1},
        {"max_new_tokens": torch.tensor(20), "do_sample": True},
        {"max_new_tokens": np.float64(20), "do_sample": True},
        {"max_new_tokens": 30, "min_new_tokens": 25},
        {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7, "top_k": 7, "min_p": 0.02},
        {"max_new_tokens": 30, "do_sample": True, "top_p": 0.8, "repetition_penalty": 1.2},
        {"max_new_tokens": 30, "bad_words_ids": [[5], [6, 7]]},
        {"max_new_tokens": 30, "suppress_tokens": [5, 6], "forced_eos_token_id": END},
        {"max_new_tokens": 30, "prefix_allowed_tokens_fn": lambda _, ids: [3 + (len(ids) + i) % 40 for i in range(9)]},
        {"max_new_tokens": 30, "use_cache": False},
    ],
    ids=lambda options: ",".join(options),
)
def test_options(model, ids, options):
    expected, actual = both(model, ids, **options)
    assert actual.tolist() == expected.tolist()


def test_scores_and_logits(model, ids):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    expected = model.generate(ids, max_new_tokens=25, **options)
    lookahead.wrap(model)
    actual = model.generate(ids, max_new_tokens=25, **options)
    assert type(actual) is type(expected)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert torch.allclose(
        model.compute_transition_scores(actual.sequences, actual.scores, normalize_logits=True),
        model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True),
        atol=1e-4,
    )


def test_streamer_gets_the_prompt_and_each_token(model, ids):
    theirs, ours = ListStreamer(), ListStreamer()
    model.generate(ids, max_new_tokens=30, streamer=theirs)
    lookahead.wrap(model)
    model.generate(ids, max_new_tokens=30, streamer=ours)
    assert ours.values == theirs.values
    assert ours.ended


def test_tokens_arrive_before_the_text_is_complete(model, ids):
    seen_at_steps = []

    class Watch(ListStreamer):
        def put(self, value):
            seen_at_steps.append(model.lookahead.last.steps)

    lookahead.wrap(model)
    model.generate(ids, max_new_tokens=30, min_new_tokens=30, streamer=Watch())
    assert seen_at_steps[2:] == sorted(seen_at_steps[2:])
    assert len(set(seen_at_steps)) > 3


def test_text_features_with_the_packaged_model():
    """Stop strings, a text streamer and a pipeline, with a tokenizer."""
    model, tokenizer = load(None)
    inputs = tokenizer("def add(a, b):\n    return", return_tensors="pt")
    options = {"max_new_tokens": 60, "stop_strings": ["\n\n", "self"], "tokenizer": tokenizer}
    expected = model.generate(**inputs, **options)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected_text = generator("import os\n", max_new_tokens=40, do_sample=False)
    lookahead.wrap(model)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = model.generate(**inputs, max_new_tokens=40, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    wrapped = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert wrapped("import os\n", max_new_tokens=40, do_sample=False) == expected_text
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    ],
)
def test_other_modes_go_to_the_model_with_one_warning(model, ids, options, words):
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=10, **options)
    lookahead.wrap(model)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=words) as caught:
        actual = model.generate(ids, max_new_tokens=10, **options)
    assert len([w for w in caught if "lookahead" in str(w.message)]) == 1
    sequences = [x.sequences if hasattr(x, "sequences") else x for x in (actual, expected)]
    assert sequences[0].tolist() == sequences[1].tolist()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lookahead")
        model.generate(ids, max_new_tokens=10, **options)


def test_a_model_that_assists_itself(model, ids):
    model = tiny_model("llama", num_hidden_layers=3)
    expected = model.generate(ids, max_new_tokens=10, assistant_early_exit=1)
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="assistant_early_exit"):
        assert model.generate(ids, max_new_tokens=10, assistant_early_exit=1).tolist() == expected.tolist()
    assert model.generate(ids, max_new_tokens=10).tolist() == expected.tolist()
    assert model.lookahead.last.steps > 0


def test_encoder_decoder_decodes_by_itself():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "t5", vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=5)
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="encoder-decoder"):
        assert model.generate(ids, max_new_tokens=5).tolist() == expected.tolist()


def test_wrap_twice_and_unwrap(model, ids):
    cls = type(model)
    expected = model.generate(ids, max_new_tokens=20)
    assert lookahead.wrap(model) is model
    engine = model.lookahead
    assert lookahead.wrap(model).lookahead is engine
    assert type(model).__mro__[2] is cls
    assert type(model).__name__ == cls.__name__
    assert isinstance(model, cls)
    assert model.generate(ids, max_new_tokens=20).tolist() == expected.tolist()
    lookahead.unwrap(lookahead.unwrap(model))
    assert type(model) is cls
    assert not hasattr(model, "lookahead")
    assert model.generate(ids, max_new_tokens=20).tolist() == expected.tolist()


def test_a_new_config_replaces_the_old(model, ids):
    """With all that was found out under it, but for the pool and the statistics."""
    engine = lookahead.wrap(model).lookahead
    model.generate(ids, max_new_tokens=20)
    assert engine.pace is not None
    assert engine.windows.trials is not None
    lookahead.wrap(model, LookaheadConfig(budget=6, window_size=3, ngram_size=4, cuda_graphs=True))
    with pytest.warns(UserWarning, match="CUDA graphs"):
        model.generate(ids, max_new_tokens=20)
    assert model.lookahead.last.window_tokens > 0
    lookahead.wrap(model, LookaheadConfig(budget=2, window_size=0))
    model.generate(ids, max_new_tokens=20)
    stats = model.lookahead.last
    assert stats.window_tokens == 0
    assert 0 < stats.guesses <= 2 * stats.steps
    now = model.lookahead
    assert [now.pace, now.windows.trials, now.graphs] == [None] * 3
    assert now.pool is engine.pool
    assert now.stats.calls == 3


def test_a_wrapped_model_is_saved_as_before(model, tmp_path):
    lookahead.wrap(model)
    model.save_pretrained(tmp_path)
    again = type(model).__mro__[2].from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert set(again.state_dict()) == set(model.state_dict())


def test_a_wrapped_model_can_be_copied(model, ids):
    expected = model.generate(ids, max_new_tokens=20)
    copy = deepcopy(lookahead.wrap(model))
    assert copy.generate(ids, max_new_tokens=20).tolist() == expected.tolist()
    assert copy.lookahead.stats.calls == 1
    assert model.lookahead.stats.calls == 0


def test_a_wrapped_model_can_be_pickled(model, ids):
    expected = model.generate(ids, max_new_tokens=20)
    again = pickle.loads(pickle.dumps(lookahead.wrap(model)))
    assert again.generate(ids, max_new_tokens=20).tolist() == expected.tolist()
    assert again.lookahead.stats.calls == 1
    assert type(lookahead.unwrap(again)) is type(lookahead.unwrap(model))


def test_decode_refuses_beams(model, ids):
    with pytest.raises(ValueError, match="num_beams=3"):
        model.generate(ids, num_beams=3, max_new_tokens=5, custom_generate=lookahead.decode)


def test_one_pool_for_the_life_of_the_wrap(model, ids):
    lookahead.wrap(model)
    torch.manual_seed(0)
    model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=True)
    first = model.lookahead.last
    torch.manual_seed(0)
    model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=True)
    second = model.lookahead.last
    assert second.steps < first.steps, "the second time, the pool knows the text"
    total = model.lookahead.stats
    assert (total.calls, total.steps, total.tokens) == (2, first.steps + second.steps, 80)


def test_models_in_threads_share_a_pool(ids):
    """Each writes its own text, whatever the others teach the pool meanwhile."""
    models = [tiny_model("llama", seed=seed) for seed in range(4)]
    expected = [model.generate(ids, max_new_tokens=60).tolist() for model in models]
    pool = NgramPool(0.05)
    for model in models:
        lookahead.wrap(model, pool=pool)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            texts = threads.map(lambda model: model.generate(ids, max_new_tokens=60).tolist(), models)
            assert list(texts) == expected
    pool.check_integrity()


def test_a_pool_of_another_vocabulary_is_refused(model, ids):
    pool = NgramPool(0.1)
    pool.learn([1, 2, VOCABULARY + 5])
    lookahead.wrap(model, pool=pool)
    with pytest.raises(ValueError, match=f"holds token {VOCABULARY + 5}.*another vocabulary"):
        model.generate(ids, max_new_tokens=5)


def test_statistics_add_up(model, ids):
    lookahead.wrap(model, LookaheadConfig(budget=16, window_size=4, ngram_size=3))
    output = model.generate(ids, max_new_tokens=60, min_new_tokens=60)
    stats = model.lookahead.last
    assert stats.tokens == output.shape[1] - ids.shape[1] == 60
    assert stats.tokens - 1 == stats.steps + stats.accepted.total()
    assert sum(n * count for n, count in stats.accepted_per_step.items()) == stats.accepted.total()
    assert stats.tokens_per_step == (stats.tokens - 1) / stats.steps
    assert 0 < stats.acceptance_rate == stats.accepted.total() / stats.guesses <= 1
    guesses, _, accepted = stats.deciles.sum(0).tolist()
    assert (guesses, accepted) == (stats.guesses, stats.accepted.total())
    for decile, (count, predicted, observed) in enumerate(stats.reliability):
        assert count == 0 or decile / 10 <= predicted <= (decile + 1) / 10
        assert 0 <= observed <= 1
    assert 0 <= stats.calibration_gap <= 1
    assert stats.draft_length == stats.guesses / stats.steps <= 16
    assert stats.window_tokens > 0
    assert set(stats.seconds) == {"guess", "forward", "verify", "commit", "learn"}
    assert "tokens per step" in str(stats)
    assert stats.as_dict()["tokens"] == 60


def test_jacobi_strategy_accepts(model, ids):
    expected = model.generate(ids, max_new_tokens=60, min_new_tokens=60)
    lookahead.wrap(model, LookaheadConfig(strategy="jacobi", budget=8))
    assert model.generate(ids, max_new_tokens=60, min_new_tokens=60).tolist() == expected.tolist()
    assert set(model.lookahead.last.accepted) == {"jacobi"}
    assert len(model.lookahead.pool) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"window_size": -1}, {"window_size": 1.5}, {"window_size": 100_000}, {"ngram_size": 1}, {"ngram_size": 10**6},
        {"budget": -3}, {"budget": 999_999_999}, {"budget": 999_999_999, "strategy": "jacobi"}, {"strategy": "magic"},
        *({"pack_weights": value} for value in ("yes", 2, 1, 0, 1.0, None)),
        *({name: value} for name in ("cpu_kernels", "cuda_graphs") for value in ("auto", "no", None)),
        *({"pool_memory_mb": value} for value in (0, -1, 1e-9, 1e9, float("inf"), float("nan"), "16", None, True)),
    ],
)  # fmt: skip
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.* (must be|is not)"):
        LookaheadConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": MAX_ROWS // 2, "window_size": MAX_ROWS // 4},
        {"budget": 0, "window_size": MAX_ROWS // 4, "ngram_size": 5},
        {"window_size": MAX_ROWS // 2, "ngram_size": 3},
    ],
)
def test_settings_that_make_passes_too_large_together_are_named(settings):
    """One column less, and there is room; plain Jacobi decoding has no window."""
    with pytest.raises(ValueError, match=f"budget=.*window_size=.*ngram_size=.*{MAX_ROWS}"):
        LookaheadConfig(**settings)
    LookaheadConfig(**settings | {"window_size": settings["window_size"] - 1})
    LookaheadConfig(**settings | {"strategy": "jacobi"})


def test_the_largest_passes_that_settings_allow(model, ids):
    """The text goes on being the model's own, and no pass has more rows than the settings were refused for."""
    expected = model.generate(ids, max_new_tokens=8)
    lookahead.wrap(model, LookaheadConfig(budget=1, window_size=(MAX_ROWS - 2) // 2))
    assert model.generate(ids, max_new_tokens=8).tolist() == expected.tolist()


def test_things_that_are_not_causal_lms():
    with pytest.raises(TypeError, match="Linear"):
        lookahead.wrap(torch.nn.Linear(2, 2))


def test_recurrent_models_that_forget_their_state_are_refused_by_layer():
    """Given several tokens at once, these start from nothing again."""
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedModelError, match=r"Its layers 0 \("):
        lookahead.wrap(mamba)
    jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "num_experts": 2}
    with pytest.raises(UnsupportedModelError, match=r"layers 0 \(linear_attention, LinearAttentionLayer\)"):
        lookahead.wrap(tiny_model("jamba", **jamba))


def test_a_mask_that_is_ignored_is_noticed(caplog):
    """An architecture that takes a custom mask and ignores it: seen at wrap time, decoded by chains, and right."""
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    expected = model.generate(ids, max_new_tokens=40)
    inner = model.model.forward

    def deaf(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.ndim == 4:
            attention_mask = None
        return inner(*args, attention_mask=attention_mask, **kwargs)

    model.model.forward = deaf
    model.__class__ = type("Deaf", (type(model),), {})  # an architecture of its own, not one that is patched
    lookahead.wrap(model, LookaheadConfig(window_size=4))
    assert "not honoured" in caplog.text
    assert not find_adapter(model).can_branch
    assert model.generate(ids, max_new_tokens=40).tolist() == expected.tolist()
    assert model.lookahead.last.accepted.total() > 0


def test_a_cache_that_is_ignored_is_refused():
    model = tiny_model("llama")
    inner = model.model.forward
    model.model.forward = lambda *args, cache=None, past_key_values=None, **kwargs: inner(*args, **kwargs)
    model.__class__ = type("Forgetful", (type(model),), {})
    with pytest.raises(UnsupportedModelError, match="cache"):
        lookahead.wrap(model)


def test_longrope_does_not_straddle_its_switch():
    """Across the length where phi3 changes its rotary factors, the model itself decodes; on either side, lookahead."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32, sliding_window=None)
    rng = random.Random(0)
    for prompt_length, by_lookahead in ((8, True), (20, False), (40, True)):
        ids = torch.tensor([[rng.randrange(3, 12) for _ in range(prompt_length)]])
        options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
        expected = model.generate(ids, **options)
        lookahead.wrap(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = model.generate(ids, **options)
        assert actual.tolist() == expected.tolist(), prompt_length
        assert any("rotary" in str(w.message) for w in caught) == (not by_lookahead)
        lookahead.unwrap(model)


def test_packaged_model_is_small():
    size = sum(path.stat().st_size for path in DEMO_MODEL.iterdir())
    assert size <= 12 * 2**20
