"""Step costs: measured, kept, followed. Times of passes are simulated where figures are asserted."""

import json
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import WhisperConfig, WhisperForCausalLM
from zoo import SETTINGS, VOCABULARY, tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.models.adapter import context_length
from lookahead.passes import capabilities, measuring, stored
from lookahead.passes.capabilities import choose_runner, find_adapter
from lookahead.passes.costs import RUNGS, StepCosts, step_costs
from lookahead.passes.graphs import GraphRunner, StepGraphs
from lookahead.passes.measuring import measure
from lookahead.passes.runner import EagerRunner


@pytest.fixture
def clock(monkeypatch):
    """A clock that only passes of a model move: 10 ms a pass, 1 a row, 0.01 a position held and 0.002 a row of it."""
    now = [0.0]
    original = EagerRunner.run

    def run(self, steps, cache, *others):
        rows, length = len(steps[0]), cache.lengths[0]
        now[0] += 10e-3 + 1e-3 * rows + length * (1e-5 + 2e-6 * (rows - 1))
        return original(self, steps, cache, *others)

    monkeypatch.setattr(EagerRunner, "run", run)
    monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def runner_of(model) -> EagerRunner:
    return EagerRunner(model, find_adapter(model))


def test_what_is_measured_is_what_passes_take(clock):
    model = tiny_model("llama", max_position_embeddings=4096)
    shares = []
    found = measure(runner_of(model), 3.0, shares.append)
    for rows, length in ((1, 0), (16, 0), (24, 0), (128, 0), (200, 0), (1, 3000), (16, 500), (40, 2000)):
        expected = 10e-3 + 1e-3 * rows + length * (1e-5 + 2e-6 * (rows - 1))
        assert found(rows, length) == pytest.approx(expected)
    assert found(np.array([1, 16]), 10).shape == (2,)
    assert shares == sorted(shares)
    assert shares[-1] > 0.8
    assert clock[0] < 3.2


def test_passes_that_are_too_long_are_extrapolated(clock):
    model = tiny_model("llama", max_position_embeddings=4096)
    runner = runner_of(model)
    before = clock[0]
    found = measure(runner, 0.05)
    assert clock[0] - before < 1.0  # two rounds up to 16 rows, where a whole one takes 0.5 s
    assert found(128, 0) == pytest.approx(138e-3)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_architecture_can_be_measured(name):
    model = tiny_model(name)
    found = measure(runner_of(model), 0.02)
    assert np.isfinite(found.seconds).all()
    assert (found.seconds > 0).all()
    assert (found.per_position >= 0).all()


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "zaya"])
def test_passes_over_states_go_on_from_some(name, monkeypatch):
    """On an empty cache, a row is a prompt: layers compute it in another form, which may take ten times as long."""
    original, seen = EagerRunner.run, []

    def run(self, steps, cache, *args):
        seen.append(all(any(states.values()) for states in (layer.has_previous_state for layer in with_state(cache))))
        return original(self, steps, cache, *args)

    def with_state(cache):
        return [layer for layer in cache.layers if hasattr(layer, "has_previous_state")]

    runner = runner_of(tiny_model(name))
    monkeypatch.setattr(EagerRunner, "run", run)
    measuring.time_passes(runner, [(1, 0), (4, 0)], 0.01)
    assert seen
    assert all(seen)


def test_costs_are_kept_and_found_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "new")
    model = tiny_model("llama")
    runner = runner_of(model)
    first = step_costs(runner)
    assert step_costs(runner) is first
    assert step_costs(runner_of(model)) is first
    assert first.path.parent == tmp_path / "new" / "step-costs"
    monkeypatch.setattr(measuring, "measure", None)  # nothing more is measured
    again = step_costs(runner_of(tiny_model("llama", seed=1)))
    assert again.seconds.tolist() == first.seconds.tolist()
    assert again.per_position.tolist() == first.per_position.tolist()
    assert capsys.readouterr().err == ""  # not a terminal


@pytest.mark.parametrize("change", ["dtype", "size", "threads", "kernels", "attention", "replayed"])
def test_what_costs_depend_on(change, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = tiny_model("llama", hidden_size=256)
    step_costs(runner_of(model))
    if change == "dtype":
        model = model.to(torch.bfloat16)
    elif change == "size":
        model = tiny_model("llama", hidden_size=256, intermediate_size=80)
    elif change == "attention":
        model.set_attn_implementation("eager")
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    runner = runner_of(model)
    if change == "kernels":
        runner = EagerRunner(model, replace(runner.adapter, uses_kernels=not runner.adapter.uses_kernels))
    step_costs(GraphRunner(StepGraphs(model), runner) if change == "replayed" else runner)
    assert len(list(tmp_path.glob("step-costs/*"))) == 2


def test_costs_depend_on_what_a_pass_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = lookahead.wrap(tiny_model("llama"))
    for quantized in (False, True):
        if quantized:
            quantize_(model, Int8WeightOnlyConfig())
        runner = choose_runner(model, LookaheadConfig())[0]
        assert runner.name == "fused"
        step_costs(runner)
    assert len(list(tmp_path.glob("step-costs/*"))) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": 1}', "nan", "other rungs", "negative"])
def test_a_torn_or_foreign_file_is_measured_anew(text, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = tiny_model("llama")
    path = step_costs(runner_of(model)).path
    held = json.loads(path.read_text())
    if text == "nan":
        held["seconds"][0] = float("nan")
    elif text == "other rungs":
        held["rungs"][-1] += 1
    elif text == "negative":
        held["per_position"][0] = -1.0
    path.write_text(json.dumps(held) if text in ("nan", "other rungs", "negative") else text)
    other = tiny_model("llama", seed=1)
    assert step_costs(runner_of(other)).path == path
    kept = json.loads(path.read_text())
    assert kept["rungs"] == list(RUNGS)
    assert min(kept["seconds"]) > 0


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "file")
    model = lookahead.wrap(tiny_model("llama"))
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=5).shape == (1, 7)


def test_a_session_that_finds_other_times_is_followed(tmp_path):
    """A machine that is half as fast as when it was measured, and at 8 rows a third."""
    path = tmp_path / "costs.json"
    found = StepCosts(10e-3 + 1e-3 * np.array(RUNGS), np.array([1e-6, 0.0]), path=path)
    found.save()
    before = path.read_text()
    found.follow(8, 100, float(found(8, 100)) * 1.1, 1e-3)
    found.save()
    assert path.read_text() == before  # no drift to speak of
    truth = StepCosts(2 * (10e-3 + 1e-3 * np.array(RUNGS)), np.array([1e-6, 0.0]))
    truth.seconds[3] *= 1.5
    rng = np.random.default_rng(0)
    for _ in range(600):
        rows, length = int(rng.choice([1, 6, 8, 12])), int(rng.integers(0, 1000))
        noise = rng.choice([1.0, 1.05, 0.95, 1.0, 10.0], p=[0.3, 0.3, 0.3, 0.09, 0.01])
        found.follow(rows, length, float(truth(rows, length)) * noise, 2e-3 + 1e-4 * (rows - 1))
    assert found(np.array([1, 8]), 100) == pytest.approx(truth(np.array([1, 8]), 100), rel=0.15)
    for rows in (1, 8, 12):
        assert found.between(rows) == pytest.approx(2e-3 + 1e-4 * (rows - 1), rel=0.15)
    assert found(64, 100) > 1.4 * (10e-3 + 64e-3)  # what was not run has followed, too
    found.save()
    assert json.loads(path.read_text())["seconds"] == found.seconds.tolist()


def test_a_pause_while_costs_were_measured_is_found_out(tmp_path):
    """Another program ran while sixteen rows were measured."""
    truth = StepCosts(10e-3 + 1e-3 * np.array(RUNGS), np.array([1e-6, 1e-7]))
    found = StepCosts(10e-3 + 1e-3 * np.array(RUNGS), np.array([1e-6, 5e-5]), path=tmp_path / "costs.json")
    found.save()
    rng = np.random.default_rng(0)
    for _ in range(1500):
        rows, length = int(rng.choice([1, 4, 8, 12])), int(rng.integers(50, 500))
        found.follow(rows, length, float(truth(rows, length)), 1e-3)
    for rows, length in ((1, 100), (8, 100), (8, 400), (16, 100), (16, 400)):
        assert float(found(rows, length)) == pytest.approx(float(truth(rows, length)), rel=0.4), (rows, length)
    found.save()
    assert json.loads(found.path.read_text())["per_position"] == found.per_position.tolist()


def test_decoding_follows_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = lookahead.wrap(tiny_model("llama"))
    ids = torch.tensor([[3, 4, 5, 3, 4]])
    model.generate(ids, max_new_tokens=4)
    pace = model.lookahead.pace
    pace.costs.seconds *= 50
    before = pace.costs.seconds.copy()
    model.generate(ids, max_new_tokens=60)
    assert (pace.costs.seconds < before).all()
    assert model.lookahead.pace is pace


def with_positions(name: str, positions: int):
    if name == "mpt":
        return tiny_model(name, max_seq_len=positions)
    if name == "gpt2":
        return tiny_model(name, n_positions=positions, max_position_embeddings=positions)
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        max_target_positions=positions, pad_token_id=2, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return WhisperForCausalLM(config).eval()


@pytest.mark.parametrize("positions", [17, 100, 448, 512])
@pytest.mark.parametrize("name", ["mpt", "gpt2", "whisper"])
def test_no_pass_goes_beyond_the_positions_of_a_model(name, positions):
    model = with_positions(name, positions)
    assert context_length(model) == positions
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options = {"max_new_tokens": positions - 5, "min_new_tokens": positions - 5, "do_sample": False}
    expected = model.generate(ids, **options)
    lookahead.wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("works", [True, False])
def test_costs_that_cannot_be_measured_are_assumed(works, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(ids, max_new_tokens=30)
    lookahead.wrap(model)
    original = measuring._pass

    def too_much(runner, cache, tokens):
        if len(tokens) > 2 or not works:
            raise torch.OutOfMemoryError("full")
        return original(runner, cache, tokens)

    monkeypatch.setattr(measuring, "_pass", too_much)
    with pytest.warns(UserWarning, match=r"could not be measured.*full"):
        actual = model.generate(ids, max_new_tokens=30)
    assert torch.equal(actual, expected)
    other = tiny_model("llama")
    with pytest.warns(UserWarning, match="could not be measured"):
        found = step_costs(runner_of(other))
    assert found(1, 0) == pytest.approx(11e-3 if works else 10e-3)
    assert (np.diff(found.seconds) > 0).all()
    assert found(1, 100) > found(1, 0)
    assert not list(tmp_path.iterdir())  # the next process tries again
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        step_costs(runner_of(model), anew=0.1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 8, 40, 128]), st.floats(1e-4, 1.0)), max_size=60))
def test_fewer_rows_never_cost_more_however_noisy_the_passes_are(passes):
    """Otherwise a rarely used number of rows would keep its time from a busy minute."""
    costs = StepCosts(np.linspace(1e-3, 1e-2, len(RUNGS)), np.zeros(2))
    for rows, seconds in passes:
        costs.follow(rows, 10, seconds)
        assert (np.diff(costs.seconds) >= 0).all()
        assert (costs.seconds > 0).all()
