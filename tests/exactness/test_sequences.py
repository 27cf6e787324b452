"""Texts that are decoded at once, in one thread or in several, are those that each is alone."""

import copy
import gc
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from test_fused import FAMILIES, SIZES, sharp_model
from test_lossless import random_cases, random_prompt
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import BaseStreamer
from zoo import tiny_model

import lookahead
from lookahead import GuessSource, LookaheadConfig, sequences
from lookahead.compat.loops import own_loop
from lookahead.engine import loop
from lookahead.guessing.pool import PoolGuesser
from lookahead.guessing.source import Needs
from lookahead.passes import sharing
from ngram_pool import GuessTree

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent))),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def companies(monkeypatch):
    """How many texts have shared each pass."""
    found, as_one = [], sharing._run_as_one
    monkeypatch.setattr(
        sharing,
        "_run_as_one",
        lambda passes, *others: found.extend([len(passes)] * (len(passes) > 1)) or as_one(passes, *others),
    )
    return found


def together(model, calls, apart=0):
    """Decode these texts at once. calls: arguments of `submit`. apart: steps between two that begin.

    Returns the result of each, or its error.
    """
    sequences, waiting, futures = lookahead.Sequences(model), list(calls), []
    while waiting or len(sequences):
        if waiting:
            arguments = waiting.pop(0)
            futures.append(sequences.submit(arguments.pop("ids"), **arguments))
        for _ in range(apart or 1):
            sequences.step()
    return [future.exception() or future.result() for future in futures]


def at_once(calls):
    """Make each call in its own thread, and return the results."""
    start = threading.Barrier(len(calls))

    def one(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))


def finish(sequences):
    while sequences.step():
        pass


def written(model, ids, seed, **options):
    """What generate() writes alone. seed: as `loop.run` takes one."""
    seeded = partial(loop.run, model.lookahead, own_loop(model), seeds=[seed])
    return model.generate(ids, **options, custom_generate=seeded)


@random_cases(40)
@given(
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    calls=st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 40), st.sampled_from([None, 0.7, 1.3])), min_size=2, max_size=5
    ),
    budget=st.sampled_from([0, 3, 16]),
    apart=st.integers(0, 7),
    chunk_size=st.sampled_from([None, 3]),
)
def test_each_text_is_the_one_that_it_is_alone(family, dtype, calls, budget, apart, chunk_size):
    """In bfloat16, too: a row's logits do not depend on other rows."""
    note(f"{family=} {dtype=} {calls=} {budget=} {apart=} {chunk_size=}")
    model, _ = sharp_model(family, (4, 4, 16), 20, dtype)
    assume(chunk_size is None or model.generation_config.use_cache is not False)  # generate() refuses chunks without
    lookahead.wrap(model, LookaheadConfig(budget=budget))

    def arguments(seed, length, temperature):
        sampling = {"do_sample": temperature is not None} | ({"temperature": temperature} if temperature else {})
        ids = random_prompt(random.Random(seed))
        return {"ids": ids, "seed": seed, "max_new_tokens": length, "prefill_chunk_size": chunk_size} | sampling

    alone = [written(model, **arguments(*settings)) for settings in calls]
    found = together(model, [arguments(*settings) for settings in calls], apart)
    assert [text.tolist() for text in found] == [text.tolist() for text in alone]


OPTIONS = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}


def prompts(count):
    return [random_prompt(random.Random(seed)) for seed in range(count)]


def test_a_step_runs_one_pass_for_all(companies):
    model = lookahead.wrap(tiny_model("llama", **SIZES), LookaheadConfig(budget=2))
    together(model, [{"ids": ids, **OPTIONS} for ids in prompts(4)])
    assert max(companies) == 4
    assert sum(companies) > 3 * len(companies)


@pytest.mark.parametrize(("of_chunk", "of_step"), [(1, 5), (2, 3), (5, 1)])
def test_a_first_token_waits_for_twice_the_reading_of_prompts(monkeypatch, of_chunk, of_step):
    """By a clock that chunks and steps move on, while another text is written."""
    now, first = 0.0, {}
    go_on, run_together = sequences._Text.go_on, sequences.run_together

    def goes_on(text, output=None):
        nonlocal now
        now += of_chunk if output is None else 0
        go_on(text, output)

    def runs(passes, weights_may_change):
        nonlocal now
        now += of_step if passes else 0
        return run_together(passes, weights_may_change)

    class Notes(BaseStreamer):
        def __init__(self, number):
            self.number, self.puts = number, 0

        def put(self, value):
            self.puts += 1
            if self.puts == 2:  # the prompt comes first
                first[self.number] = now

        def end(self):
            pass

    monkeypatch.setattr(sequences, "perf_counter", lambda: now)
    monkeypatch.setattr(sequences._Text, "go_on", goes_on)
    monkeypatch.setattr(sequences, "run_together", runs)
    model = lookahead.wrap(tiny_model("llama", **SIZES), LookaheadConfig(budget=0))
    texts = lookahead.Sequences(model)
    texts.submit(prompts(1)[0], max_new_tokens=200, min_new_tokens=200, do_sample=False)
    while texts._texts == [] or texts._texts[0].is_reading:
        texts.step()
    texts.step()
    begun, lengths = now, [30, 5, 60, 3, 8, 100]
    for number, length in enumerate(lengths):
        ids = torch.arange(length)[None] % 90 + 3
        texts.submit(ids, max_new_tokens=9, do_sample=False, prefill_chunk_size=8, streamer=Notes(number))
    while len(first) < len(lengths):
        texts.step()
    reading = 0
    for number, length in enumerate(lengths):
        reading += of_chunk * -(-length // 8)
        assert first[number] - begun <= 2 * reading + of_step
    assert list(first) == sorted(first)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_without_fused_passes_take_turns(attention, companies):
    model = tiny_model("lfm2" if attention == "sdpa" else "llama", **SIZES)
    lookahead.wrap(model, LookaheadConfig(cpu_kernels=False))
    alone = [model.generate(ids, **OPTIONS) for ids in prompts(3)]
    found = together(model, [{"ids": ids, **OPTIONS} for ids in prompts(3)], apart=2)
    assert all(map(torch.equal, found, alone))
    assert not companies


def test_a_batch_shares_passes_with_single_texts(companies):
    model = lookahead.wrap(tiny_model("qwen3", **SIZES).bfloat16(), LookaheadConfig(budget=4))
    ids = torch.cat([random_prompt(random.Random(3))] * 3)
    calls = [{"ids": ids[:1], "seed": 5, "do_sample": True}, {"ids": ids}, {"ids": ids[:, :4]}]
    calls = [OPTIONS | call for call in calls]
    alone = [written(model, **{"seed": 5} | call) for call in calls[:1]]
    alone += [model.generate(call["ids"], **OPTIONS) for call in calls[1:]]
    assert all(map(torch.equal, together(model, calls), alone))
    assert max(companies) == 3


def test_what_the_model_decodes_itself_is_decoded():
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    calls = [{"ids": ids, **OPTIONS} for ids in prompts(2)]
    calls[1] |= {"cache_implementation": "static"}
    alone = [model.generate(ids, **OPTIONS) for ids in prompts(2)]
    with pytest.warns(UserWarning, match="cache_implementation='static'"):
        assert all(map(torch.equal, together(model, calls), alone))


def test_a_cache_that_is_passed_in_is_continued_and_handed_back():
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    texts = []
    for decode in (
        lambda ids, **options: model.generate(ids, **options),
        lambda ids, **o: together(model, [o | {"ids": ids}])[0],
    ):
        cache = DynamicCache(config=model.config)
        first = decode(prompts(1)[0], past_key_values=cache, **OPTIONS)
        assert cache.get_seq_length() == first.shape[1] - 1
        texts.append(decode(torch.cat([first, first[:, :3]], dim=1), past_key_values=cache, **OPTIONS))
    assert torch.equal(*texts)


class Knows(GuessSource):
    is_calibrated = is_free = True

    def __init__(self, text):
        self.text, self.asked = text, []

    def propose(self, texts, limits):
        self.asked.append(len(texts))
        at = len(texts[0])
        coming = self.text[at : at + min(limits.depths[0], limits.guesses)]
        return [GuessTree.of(coming, range(-1, len(coming) - 1), [0] * len(coming), [0.99] * len(coming))]


class Fails(LogitsProcessor):
    """Fails at the n-th token."""

    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no room")
        return scores


@pytest.mark.parametrize("after", [0, 5])
def test_a_text_that_fails_harms_only_itself(after):
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    alone = [model.generate(ids, **OPTIONS) for ids in prompts(3)]
    cache = DynamicCache(config=model.config)
    calls = [{"ids": ids, **OPTIONS} for ids in prompts(3)]
    calls[1] |= {"logits_processor": LogitsProcessorList([Fails(after)]), "past_key_values": cache}
    found = together(model, calls)
    assert isinstance(found[1], MemoryError)
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[2], alone[2])
    assert cache.get_seq_length() == 0
    lookahead.unwrap(model)  # no call is under way


def test_a_pass_that_fails_ends_its_texts_and_no_others(monkeypatch):
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    alone = [model.generate(ids, **OPTIONS).tolist() for ids in prompts(3)]
    as_one, sequences = sharing._run_as_one, lookahead.Sequences(model)
    futures = [sequences.submit(ids, **OPTIONS) for ids in prompts(3)]
    for _ in range(5):
        sequences.step()
    with monkeypatch.context() as patch:
        patch.setattr(sharing, "_run_as_one", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        assert not sequences.step()
    assert all(isinstance(future.exception(), MemoryError) for future in futures)
    assert sharing._run_as_one is as_one
    futures = [sequences.submit(ids, **OPTIONS) for ids in prompts(3)]
    finish(sequences)
    assert [future.result().tolist() for future in futures] == alone


@pytest.mark.parametrize("family", ["opt", "mpt", "gpt2"])
def test_a_text_that_makes_a_shared_pass_fail_fails_alone(family):
    """Each text that plain decoding writes is written, beside one that reaches the end of the model's positions."""
    sizes = {"max_seq_len": 64, "n_layers": 2} if family == "mpt" else {"max_position_embeddings": 64}
    model = tiny_model(family, **sizes)
    model.generation_config.eos_token_id = None
    ids = torch.arange(3, 18)[None]
    given = [(15, 40), (15, 200), (14, 51), (9, 50), (12, 20)]
    expected = []
    for length, count in given:
        try:
            expected.append(model.generate(ids[:, :length], max_new_tokens=count, do_sample=False).tolist())
        except (IndexError, RuntimeError, ValueError):
            expected.append(None)
    lookahead.wrap(model)
    found = together(model, [{"ids": ids[:, :n], "max_new_tokens": count, "do_sample": False} for n, count in given])
    assert expected.count(None) == 1
    assert [None if isinstance(text, Exception) else text.tolist() for text in found] == expected


@pytest.mark.parametrize("budget", [0, "auto"])
@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "mamba2", "qwen3_next", "falcon_h1"])
def test_no_text_goes_on_from_a_state_that_a_failed_pass_has_changed(family, budget):
    """A text chooses a token that the model does not know, so that a pass fails after it has begun. The others are as
    they are alone, or have the error, too."""

    def widened(ids, scores):
        return scores if ids.shape[1] < 20 else torch.cat([scores, scores.new_full((len(scores), 9), 99.0)], dim=1)

    model = tiny_model(family)
    ids = prompts(3)
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    alone = [model.generate(one, **options).tolist() for one in ids]
    calls = [{"ids": one, **options} for one in ids]
    calls[2]["logits_processor"] = LogitsProcessorList([widened])
    found = together(model, calls)
    assert isinstance(found[2], Exception)
    for text, expected in zip(found[:2], alone[:2], strict=True):
        assert isinstance(text, Exception) or text.tolist() == expected


def test_what_a_source_raises_as_it_ends_harms_no_other_text(caplog):
    class FailsAtLast(Knows):
        def end(self):
            raise ValueError("at its end")

    class Interrupts(BaseStreamer):
        def put(self, value):
            raise KeyboardInterrupt

    model, ids = lookahead.wrap(tiny_model("llama", **SIZES)), prompts(3)
    alone = model.generate(ids[1], **OPTIONS)
    sequences = lookahead.Sequences(model)
    source = FailsAtLast(alone[0].tolist())
    cancelled, other = (sequences.submit(ids[b], source=sources, **OPTIONS) for b, sources in ((0, source), (1, ())))
    sequences.step()
    sequences.cancel(cancelled)
    finish(sequences)
    assert isinstance(cancelled.exception(), CancelledError)
    assert torch.equal(other.result(), alone)
    assert "at its end" in caplog.text
    futures = [sequences.submit(ids[0], source=source, **OPTIONS), sequences.submit(ids[1], **OPTIONS)]
    sequences.step()
    futures.append(sequences.submit(ids[2], streamer=Interrupts(), **OPTIONS))
    with pytest.raises(KeyboardInterrupt):
        finish(sequences)
    assert all(isinstance(future.exception(), KeyboardInterrupt) for future in futures)
    assert not len(sequences)
    lookahead.unwrap(model)


def test_a_text_is_the_one_that_was_submitted():
    """Whatever the caller does with its arguments before the next step."""
    model, ids = lookahead.wrap(tiny_model("llama", **SIZES)), prompts(1)[0]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=[1])
    processors, words = LogitsProcessorList(), [[7]]
    expected_without = model.generate(ids, generation_config=settings, bad_words_ids=words).tolist()
    expected = model.generate(ids, generation_config=settings).tolist()
    sequences = lookahead.Sequences(model)
    given = ids.clone()
    futures = [
        sequences.submit(given, generation_config=settings),
        sequences.submit(given, max_new_tokens=5, do_sample=False, logits_processor=processors),
        sequences.submit(given, max_new_tokens=5, do_sample=False, attention_mask=(mask := torch.ones_like(ids))),
    ]
    without = sequences.submit(given, max_new_tokens=5, do_sample=False, eos_token_id=[1], bad_words_ids=words)
    given.fill_(3)
    words[0][0] = 8
    mask.zero_()
    settings.max_new_tokens, settings.eos_token_id[0] = 9, expected[0][-3]
    processors.append(Fails(0))
    finish(sequences)
    assert [future.result().tolist() for future in futures] == [expected] * 3
    assert without.result().tolist() == expected_without


def test_a_callback_may_close_what_calls_it():
    class Closes(BaseStreamer):
        left = 5

        def put(self, value):
            self.left -= 1
            if not self.left:
                with pytest.raises(RuntimeError, match="and no callback in it"):
                    sequences.step()
                sequences.close()

        def end(self):
            pass

    model = lookahead.wrap(tiny_model("llama", **SIZES))
    sequences = lookahead.Sequences(model)
    futures = [sequences.submit(prompts(1)[0], **OPTIONS)]
    futures.append(sequences.submit(prompts(1)[0], streamer=Closes(), **OPTIONS))
    finish(sequences)
    assert all(isinstance(future.exception(), CancelledError) for future in futures)
    assert not len(sequences)
    lookahead.unwrap(model)


def test_an_interrupt_ends_all_texts_and_leaves_the_model_usable():
    class Interrupts(BaseStreamer):
        left = 7

        def put(self, value):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def end(self):
            pass

    model = lookahead.wrap(tiny_model("llama", **SIZES))
    alone = [model.generate(ids, **OPTIONS) for ids in prompts(3)]
    sequences = lookahead.Sequences(model)
    futures = [sequences.submit(ids, **OPTIONS) for ids in prompts(2)]
    futures.append(sequences.submit(prompts(3)[2], streamer=Interrupts(), **OPTIONS))
    with pytest.raises(KeyboardInterrupt):
        finish(sequences)
    assert all(isinstance(future.exception(), KeyboardInterrupt) for future in futures)
    assert not len(sequences)
    assert all(map(torch.equal, together(model, [{"ids": ids, **OPTIONS} for ids in prompts(3)]), alone))
    lookahead.unwrap(model)


def test_texts_are_cancelled_at_any_time():
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids = prompts(4)
    expected = model.generate(ids[3], **OPTIONS)
    sequences = lookahead.Sequences(model)
    futures = [sequences.submit(one, prefill_chunk_size=2, **OPTIONS) for one in ids]
    sequences.cancel(futures[0])  # it has not begun
    sequences.step()
    sequences.cancel(futures[1])  # its prompt is being read
    for _ in range(20):
        sequences.step()
    sequences.cancel(futures[2])  # it is being written
    finish(sequences)
    for future in futures[:3]:
        with pytest.raises(CancelledError):
            future.result()
    assert torch.equal(futures[3].result(), expected)
    sequences.cancel(futures[3])
    sequences.submit(ids[0], **OPTIONS)
    sequences.step()
    sequences.close()
    assert not len(sequences)
    lookahead.unwrap(model)


def test_sources_of_a_text_guess_for_it_alone():
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids = prompts(2)
    alone = [model.generate(one, **OPTIONS) for one in ids]
    before = model.lookahead.stats.tokens
    source = Knows(alone[0][0].tolist())
    found = together(model, [{"ids": ids[0], "source": source, **OPTIONS}, {"ids": ids[1], **OPTIONS}])
    assert all(map(torch.equal, found, alone))
    assert source.asked
    assert set(source.asked) == {1}
    assert len(source.asked) < 30
    assert model.lookahead.stats.tokens == before + 120


def test_streamers_are_shown_prompt_and_tokens():
    class Keeps(BaseStreamer):
        def __init__(self):
            self.shown, self.has_ended = [], False

        def put(self, value):
            self.shown += value.flatten().tolist()

        def end(self):
            self.has_ended = True

    model, streamers = lookahead.wrap(tiny_model("llama", **SIZES)), [Keeps(), Keeps()]
    found = together(
        model,
        [{"ids": ids, "streamer": streamer, **OPTIONS} for ids, streamer in zip(prompts(2), streamers, strict=True)],
    )
    assert [text[0].tolist() for text in found] == [streamer.shown for streamer in streamers]
    assert all(streamer.has_ended for streamer in streamers)


def test_what_cannot_be_submitted_is_refused():
    model = tiny_model("llama", **SIZES)
    with pytest.raises(TypeError, match="is not wrapped"):
        lookahead.Sequences(model)
    lookahead.wrap(model)
    sequences = lookahead.Sequences(model)
    with pytest.raises(ValueError, match="takes no assistant_model"):
        sequences.submit(prompts(1)[0], assistant_model=model)
    for options, message in (({"num_beams": 2}, "num_beams=2"), ({"max_new_token": 3}, "max_new_token")):
        future = sequences.submit(prompts(1)[0], **options)
        assert not sequences.step()
        with pytest.raises(ValueError, match=message):
            future.result()
    within = []

    class Steps(BaseStreamer):
        def put(self, value):
            try:
                sequences.step()
            except RuntimeError as error:
                within.append(str(error))

        def end(self):
            pass

    together(model, [{"ids": prompts(1)[0], "streamer": Steps(), **OPTIONS}])
    future = sequences.submit(prompts(1)[0], streamer=Steps(), **OPTIONS)
    finish(sequences)
    assert future.result() is not None
    assert "no callback in it" in within[-1]


class Wants(GuessSource):
    """Guesses like the pool, and wants hidden states, so that its texts share passes with no others."""

    needs = Needs(hidden_states=(1,))

    def start(self, batch):
        return Wanting(batch.pool)


class Wanting(PoolGuesser):
    def observe_prompt(self, text, logits, hidden_states):
        return

    def observe(self, outcome):
        assert outcome.hidden_states[1].shape[0] == len(outcome.logits)


def test_texts_that_want_other_things_share_passes_among_themselves(companies):
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    alone = [model.generate(ids, **OPTIONS) for ids in prompts(4)]
    sources = [(), Wants(), (), Wants()]
    calls = [{"ids": ids, "source": source, **OPTIONS} for ids, source in zip(prompts(4), sources, strict=True)]
    assert all(map(torch.equal, together(model, calls), alone))
    assert set(companies) == {2}


class CallsAgain(LogitsProcessor):
    """Calls the model within a call."""

    def __init__(self, model, ids):
        self.model, self.ids, self.texts = model, ids, []

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 7 == 0:
            self.texts.append(self.model.generate(self.ids, max_new_tokens=5, do_sample=False).tolist())
        return scores


def test_a_call_within_a_call_does_not_wait_for_the_outer_one(companies):
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids, options = random_prompt(random.Random(1)), {"max_new_tokens": 40, "do_sample": False}
    expected, inner = model.generate(ids, **options).tolist(), model.generate(ids, max_new_tokens=5, do_sample=False)
    calls = CallsAgain(model, ids)
    assert model.generate(ids, **options, logits_processor=LogitsProcessorList([calls])).tolist() == expected
    assert calls.texts
    assert all(text == inner.tolist() for text in calls.texts)
    assert not companies


@pytest.mark.parametrize("change", ["data", "optimizer"])
def test_a_call_that_begins_after_a_change_does_not_take_what_others_have_read_before(change):
    """A call shares passes with one that began when the weights were others."""
    model = lookahead.wrap(tiny_model("llama", **SIZES), LookaheadConfig(pack_weights=True))
    ids = random_prompt(random.Random(1))
    model.generate(ids, max_new_tokens=3)
    begun, changed = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        def __call__(self, input_ids, scores):
            begun.set()
            changed.wait(60)
            return scores

    options = {"max_new_tokens": 300, "min_new_tokens": 300, "do_sample": False}
    with ThreadPoolExecutor(1) as threads:
        longer = threads.submit(model.generate, ids, logits_processor=LogitsProcessorList([Waits()]), **options)
        begun.wait(60)
        weight = model.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight.data[:] = -weight.data if change == "data" else weight.data
            if change == "optimizer":
                weight.neg_()
        changed.set()
        found = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
        longer.result()
    assert found == lookahead.unwrap(model).generate(ids, max_new_tokens=20, do_sample=False).tolist()


def test_calls_within_autocast_run_passes_of_their_own():
    """Without guesses, because in bfloat16 these may change the results of the model's own code."""
    model = lookahead.wrap(tiny_model("llama", **SIZES), LookaheadConfig(budget=0, window_size=0))
    ids, options = random_prompt(random.Random(1)), {"max_new_tokens": 60, "do_sample": False}

    def call(is_cast):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            return model.generate(ids, **options).tolist()

    casts = [True, False, True, False]
    alone = [call(is_cast) for is_cast in casts]
    for _ in range(3):
        assert at_once([partial(call, is_cast) for is_cast in casts]) == alone


def test_a_long_text_does_not_turn_the_heads_of_short_ones():
    """By longrope, the longest position of a pass chooses the frequencies of all."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = tiny_model("phi3", **SIZES, max_position_embeddings=1024, rope_parameters=rope)
    lookahead.wrap(model)
    torch.manual_seed(0)
    prompts = [torch.randint(3, 97, (1, length)) for length in (5, 90, 9)]
    calls = [partial(model.generate, ids, max_new_tokens=40, do_sample=False) for ids in prompts]
    alone = [call().tolist() for call in calls]
    assert "passes: fused" in model.lookahead.report()
    for _ in range(3):
        assert [text.tolist() for text in at_once(calls)] == alone


def test_batches_that_are_sampled_at_once_draw_other_numbers():
    """And what another thread draws meanwhile is not drawn again."""
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids = torch.cat([random_prompt(random.Random(1))] * 3)
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": True}
    torch.manual_seed(0)
    texts = [text.tolist() for text in at_once([partial(model.generate, ids, **options)] * 3)]
    assert len({str(text) for text in texts}) == 3
    torch.manual_seed(0)
    model.generate(ids, **options)
    left = torch.get_rng_state()

    class Draws(GuessSource):
        def start(self, batch):
            return Drawing(batch.pool)

    class Drawing(PoolGuesser):
        def propose(self, texts, limits):
            torch.rand(1)
            return super().propose(texts, limits)

    lookahead.wrap(model, source=Draws())
    torch.manual_seed(0)
    model.generate(ids, **options)
    assert not torch.equal(torch.get_rng_state(), left), "what was drawn meanwhile would be drawn again"


FORKED = """
import os, sys, threading, random, torch
from test_lossless import random_prompt
from zoo import tiny_model
import lookahead
torch.set_num_threads(1)
model = lookahead.wrap(tiny_model("llama", hidden_size=64, intermediate_size=64))
ids, go_on = random_prompt(random.Random(1)), True
expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
def decode():
    while go_on:
        model.generate(ids, max_new_tokens=50, do_sample=False)
threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads: thread.start()
wrong = 0
for _ in range(4):
    if (child := os.fork()) == 0:
        texts = []
        again = lambda: model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
        one = threading.Thread(target=lambda: texts.append(again()))
        one.start()
        one.join(30)
        os._exit(texts != [expected])
    wrong += os.waitpid(child, 0)[1] != 0
go_on = False
for thread in threads: thread.join()
print("wrong", wrong)
"""


@pytest.mark.long
def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.stdout.strip() == "wrong 0", done.stdout + done.stderr


class Mine(GuessSource):
    def propose(self, texts, limits):
        return [GuessTree.chain([5, 6]) for _ in texts]


class Other(Mine):
    pass


@dataclass
class Plain(Mine):
    """Without a hash."""


def test_a_wrap_with_other_sources_is_followed():
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    config = LookaheadConfig(budget=8, window_size=0)
    sequences = lookahead.Sequences(lookahead.wrap(model, config, source=lookahead.PoolSource()))
    gone = ref(first := Plain())
    for source in (first, [lookahead.PoolSource(), Other()], Other(), [Other(), Other()]):
        lookahead.wrap(model, config, source=source)
        future = sequences.submit(ids, source=Mine(), max_new_tokens=20, do_sample=False)
        finish(sequences)
        assert future.result().tolist() == expected
    assert list(model.lookahead.ledger.names)[-2:] == ["Other", "Other 2"]
    del first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"seed": 1.5}, ValueError, "seed=1.5 must be a whole number"),
        ({"seed": 2**64}, ValueError, "must be a whole number in"),
        ({"streamer": 5}, TypeError, "streamer=5 must be a streamer"),
        ({"input_ids": [[5, 6]]}, TypeError, "must be a tensor"),
        ({"input_ids": torch.tensor([5, 6])}, TypeError, "must be a tensor"),
        ({"source": 5}, TypeError, "source=5 is no source of guesses"),
        ({"source": [5]}, TypeError, "source=5 is no source of guesses"),
        ({"source": lookahead.RetrievalSource([[1, 500]])}, ValueError, "has token 500, but LlamaForCausalLM knows"),
    ],
)
def test_what_cannot_be_submitted_is_named_at_once(given, error, message):
    sequences = lookahead.Sequences(lookahead.wrap(tiny_model("llama")))
    with pytest.raises(error, match=message):
        sequences.submit(**{"input_ids": torch.tensor([[5, 6]]), **given})
    assert len(sequences) == 0


def test_any_whole_number_is_a_seed_and_any_object_a_streamer():
    class Listens:
        def put(self, ids):
            seen.append(ids.tolist())

        def end(self):
            seen.append("end")

    model, ids, seen = tiny_model("llama"), torch.tensor([[5, 6, 7]]), []
    sequences = lookahead.Sequences(lookahead.wrap(model))
    futures = [
        sequences.submit(ids, seed=seed, streamer=streamer, max_new_tokens=9, do_sample=True)
        for seed, streamer in ((7, None), (np.int64(7), Listens()))
    ]
    finish(sequences)
    assert futures[0].result().tolist() == futures[1].result().tolist()
    assert seen[-1] == "end"


def test_a_model_that_has_been_unwrapped_is_named():
    model = lookahead.wrap(tiny_model("llama"))
    sequences = lookahead.Sequences(model)
    future = sequences.submit(torch.tensor([[5, 6]]), max_new_tokens=5)
    lookahead.unwrap(model)
    finish(sequences)
    with pytest.raises(TypeError, match="LlamaForCausalLM is not wrapped"):
        future.result()
    with pytest.raises(TypeError, match="LlamaForCausalLM is not wrapped"):
        sequences.submit(torch.tensor([[5, 6]]))


class Widen(LogitsProcessor):
    """Scores tokens that the model does not know, and chooses one of them when the text has ``length`` tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        more = torch.full((len(scores), 3), -1e9)
        more[:, 1] = 1e9 if input_ids.shape[1] == self.length else -1e9
        return torch.cat([scores, more], dim=-1)


def test_a_token_that_the_model_does_not_know_fails_its_own_text_alone():
    """The pool that texts share does not learn it."""
    plain, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8] * 3])
    beside = [ids[:, begin:] for begin in range(4)]
    expected = [plain.generate(one, max_new_tokens=20, do_sample=False) for one in beside]
    for length in (15, 18, 19):
        model = lookahead.wrap(copy.deepcopy(plain), LookaheadConfig(budget=8, window_size=0))
        running = lookahead.Sequences(model)
        options = {"max_new_tokens": 12, "do_sample": False}
        odd = running.submit(ids, logits_processor=LogitsProcessorList([Widen(length)]), **options)
        others = [running.submit(one, max_new_tokens=20, do_sample=False) for one in beside]
        while running.step():
            pass
        assert isinstance(odd.exception(), IndexError)
        assert [other.result().tolist() for other in others] == [one.tolist() for one in expected]
        assert model.lookahead.pool.largest_token < plain.config.vocab_size
