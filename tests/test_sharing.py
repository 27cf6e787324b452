"""Calls in several threads share their passes, and each writes what it writes alone."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from test_fused import FAMILIES, SIZES, sharp_model
from test_lossless import random_cases, random_prompt
from transformers import LogitsProcessor, LogitsProcessorList
from zoo import tiny_model

import lookahead
from lookahead import GuessSource, LookaheadConfig
from lookahead.engine import loop
from lookahead.guessing.pool import PoolSource
from lookahead.guessing.source import Needs
from lookahead.passes import sharing
from lookahead.passes.fused import FusedRunner
from lookahead.wrapping import own_loop

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def companies(monkeypatch):
    """How many calls have shared each pass."""
    found, together = [], sharing._run_together
    monkeypatch.setattr(sharing, "_run_together", lambda wanted: found.append(len(wanted)) or together(wanted))
    return found


def at_once(calls):
    """Make calls in threads of their own, and return their results."""
    start = threading.Barrier(len(calls))

    def one(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))


def written(model, ids, seed, **options):
    """seed: as `loop.run` takes one."""
    seeded = partial(loop.run, model.lookahead, own_loop(model), seeds=[seed])
    return model.generate(ids, **options, custom_generate=seeded).tolist()


@random_cases(30)
@given(
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    calls=st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 40), st.sampled_from([None, 0.7, 1.3])), min_size=2, max_size=5
    ),
    budget=st.sampled_from([0, 3, 16]),
)
def test_each_text_is_the_one_that_it_is_alone(family, dtype, calls, budget):
    """In bfloat16, too: what a row says does not depend on its company."""
    note(f"{family=} {dtype=} {calls=} {budget=}")
    model, _ = sharp_model(family, (4, 4, 16), 20, dtype)
    lookahead.wrap(model, LookaheadConfig(budget=budget))

    def call(seed, length, temperature):
        sampling = {"do_sample": temperature is not None} | ({"temperature": temperature} if temperature else {})
        ids = random_prompt(random.Random(seed))
        return partial(written, model, ids, seed, max_new_tokens=length, **sampling)

    alone = [call(*settings)() for settings in calls]
    assert at_once([call(*settings) for settings in calls]) == alone


def test_passes_are_shared(companies):
    model = lookahead.wrap(tiny_model("llama", **SIZES), LookaheadConfig(budget=2))
    prompts = [random_prompt(random.Random(seed)) for seed in range(4)]
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    model.generate(prompts[0], **options)
    assert not companies, "a call without company does not meet others"
    at_once([partial(model.generate, ids, **options) for ids in prompts])
    assert max(companies) > 1
    assert sum(companies) > 1.5 * len(companies)


def test_batches_and_single_texts_share_passes(companies):
    model = lookahead.wrap(
        tiny_model("qwen3", **SIZES, max_position_embeddings=512).bfloat16(), LookaheadConfig(budget=4)
    )
    ids = torch.cat([random_prompt(random.Random(3))] * 3)
    options = {"max_new_tokens": 300, "min_new_tokens": 300}
    calls = [partial(written, model, ids[:1], 5, do_sample=True, **options)]
    calls += [partial(model.generate, ids[:, :n], do_sample=False, **options) for n in (3, 4)]
    alone = [torch.as_tensor(call()) for call in calls]
    assert all(map(torch.equal, map(torch.as_tensor, at_once(calls)), alone))
    assert max(companies) > 1


class Wants(GuessSource):
    """Guesses like the pool, and wants hidden states, so that its calls share passes with no others."""

    needs = Needs(hidden_states=(1,))

    def propose(self, texts, limits):
        return PoolSource.propose(self._pool, texts, limits)

    def start(self, batch):
        self._pool = PoolSource()
        self._pool.start(batch)

    def observe(self, outcome):
        assert outcome.hidden_states[1].shape[0] == len(outcome.logits)


def test_calls_that_want_other_things_run_passes_of_their_own(monkeypatch):
    """As one call whose source wants hidden states beside one that has none: neither waits for the other for ever."""
    model = lookahead.wrap(tiny_model("llama", **SIZES), source=[PoolSource(), Wants()])
    ids, options = random_prompt(random.Random(1)), {"max_new_tokens": 60, "do_sample": False}
    expected = model.generate(ids, **options).tolist()
    init, numbers = FusedRunner.__init__, iter(range(99))

    def alternating(self, model, adapter, hidden_states=(), *args):
        init(self, model, adapter, hidden_states or ((2,) if next(numbers) % 2 else ()), *args)
        self.wants = self.requested

    monkeypatch.setattr(FusedRunner, "__init__", alternating)
    lookahead.wrap(model, source=PoolSource())
    for found in at_once([partial(model.generate, ids, **options)] * 4):
        assert found.tolist() == expected


def test_a_pass_that_fails_ends_its_calls_and_no_others(monkeypatch):
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids, options = random_prompt(random.Random(1)), {"max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False}
    expected = model.generate(ids, **options).tolist()
    together, failed = sharing._run_together, threading.Event()

    def fails_once(wanted):
        if len(wanted) > 1 and not failed.is_set():
            failed.set()
            raise MemoryError
        together(wanted)

    monkeypatch.setattr(sharing, "_run_together", fails_once)

    def call():
        try:
            return model.generate(ids, **options).tolist()
        except (MemoryError, RuntimeError) as error:
            return repr(error)

    found = at_once([call] * 3)
    assert failed.is_set()
    assert "MemoryError()" in found
    assert all(text in (expected, "MemoryError()") or "shared with others" in text for text in found)
    assert at_once([call] * 3) == [expected] * 3
    assert not model.lookahead._shared_passes.threads


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


class Sleeps(LogitsProcessor):
    def __call__(self, input_ids, scores):
        time.sleep(0.2)
        return scores


def test_a_slow_call_does_not_hold_up_others():
    """The others wait for a part of a pass at most."""
    model = lookahead.wrap(tiny_model("llama", **SIZES))
    ids, ended = random_prompt(random.Random(1)), []
    slow = {"max_new_tokens": 12, "min_new_tokens": 12, "logits_processor": LogitsProcessorList([Sleeps()])}
    calls = [lambda: (model.generate(ids, do_sample=False, **slow), ended.append("slow"))]
    calls += [lambda: (model.generate(ids, do_sample=False, max_new_tokens=30), ended.append("quick"))] * 2
    at_once(calls)
    assert ended == ["quick", "quick", "slow"]


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
    """Without guesses, for in bfloat16 these may change what the model's own code computes."""
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
        def propose(self, texts, limits):
            torch.rand(1)
            return PoolSource.propose(pool, texts, limits)

        def start(self, batch):
            pool.start(batch)

    pool = PoolSource()
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


def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.stdout.strip() == "wrong 0", done.stdout + done.stderr
