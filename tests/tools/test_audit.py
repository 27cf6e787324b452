"""`lookahead audit`: finds nothing where nothing is wrong, tells near ties from defects, and fails at a defect."""

import json
import os
import random
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from test_broken import DEFECTS, everyone_sees_everyone, one_draw_too_many, positions_by_row, prefix_hidden
from test_lossless import random_prompt
from test_products import small_llama
from zoo import tiny_model

import lookahead
from lookahead.cpu import products
from lookahead.passes import capabilities
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.fused import FusedRunner
from lookahead.passes.runner import EagerRunner
from lookahead.tools.audit import (
    GUESSING,
    Divergence,
    Tally,
    _judge,
    audit,
    choice_scores,
    first_difference,
    next_logits,
)
from lookahead.tools.cli import main
from lookahead.tools.loading import load
from lookahead.tools.prompts import source_prompts


def prompts(count: int) -> list[torch.Tensor]:
    rng = random.Random(1)
    return [random_prompt(rng) for _ in range(count)]


def of(tallies, way, decoding="greedy"):
    return next(tally for tally in tallies if (tally.way, tally.decoding) == (way, decoding))


def run(*arguments):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def test_nothing_parts_in_float32():
    model = tiny_model("llama")
    tallies = audit(model, prompts(6), 40, temperature=0.7)
    assert [(tally.decoding, tally.way) for tally in tallies] == [
        ("greedy", "plain"),
        ("greedy", "plain, whole text at once"),
        ("greedy", "lookahead"),
        ("greedy", "prompt lookup"),
        ("greedy", "batch of 4"),
        ("sampled", "plain"),
        ("sampled", "plain, whole text at once"),
        ("sampled", "lookahead"),
    ]
    for tally in tallies:
        assert not tally.divergences
        assert tally.prompts == 6
        assert tally.tokens == of(tallies, "plain", tally.decoding).tokens > 6
        assert tally.rms_error < 1e-5
        assert tally.by_guesses == 0
    assert not isinstance(model, lookahead.wrapping.LookaheadMixin)
    assert model.generation_config.pad_token_id == 2, "the model's own settings are back"


@pytest.mark.parametrize(
    ("kind", "count", "loudest", "runner"),
    [
        ("tiny", 12, 0.3, EagerRunner),
        ("small", 5, 1.5, EagerRunner),
        ("small", 5, 1.5, FusedRunner),
    ],
)
def test_half_precision_parts_at_near_ties_only(kind, count, loudest, runner, monkeypatch):
    """Enough prompts for bf16 to part somewhere; every place is explained, and no way of decoding rounds worse."""
    if runner is not FusedRunner:
        monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    monkeypatch.setattr("lookahead.tools.audit.GUESSING", replace(GUESSING, window_size=3))
    model = tiny_model("llama").to(torch.bfloat16) if kind == "tiny" else small_llama(torch.bfloat16)
    tallies = audit(model, prompts(count), 60, temperature=0.7)
    if kind != "tiny":
        wrapped = lookahead.wrap(model)
        assert type(wrapped.lookahead.find_runner(wrapped)) is runner
        assert products.served_layers(wrapped), "what was audited multiplies by our kernel"
    ours = [of(tallies, "lookahead"), of(tallies, "lookahead", "sampled")]
    assert sum(len(tally.divergences) for tally in ours) > 0, "nothing parted, so no verdict was tested"
    of_one_call = runner is FusedRunner
    for tally in ours:
        plain = of(tallies, "plain", tally.decoding)
        assert tally.passes.startswith("fused") is of_one_call
        assert not (tally.by_guesses and of_one_call)
        assert not tally.unexplained
        assert 0.5 < tally.rms_error / plain.rms_error < 2
        for divergence in tally.divergences:
            assert divergence.plain_token != divergence.other_token
            assert 0 <= divergence.margin <= divergence.noise < loudest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plant", [everyone_sees_everyone, positions_by_row, prefix_hidden], ids=lambda f: f.__name__)
def test_planted_defects_are_unexplained(plant, dtype, monkeypatch):
    model = tiny_model(DEFECTS[plant]).to(dtype)
    find_adapter(model)  # probed while all is well
    plant(monkeypatch)
    tallies = audit(model, prompts(8), 40)
    assert of(tallies, "lookahead").unexplained
    assert of(tallies, "lookahead").by_guesses, "they are of passes over several rows"
    assert not of(tallies, "prompt lookup").unexplained, "others have no part in the defect"


@pytest.mark.parametrize("size", [0.02, 1.0])
def test_wrong_logits_of_steps_are_unexplained(size, monkeypatch):
    """A model that errs in passes over several rows with a cache, in float32, by far less than bf16 would."""
    model = tiny_model("llama")
    find_adapter(model)  # before it goes wrong
    for runner in (EagerRunner, FusedRunner):
        run = runner.run

        def wrong(self, steps, *args, run=run):
            output = run(self, steps, *args)
            if len(steps[0]) > 1:
                noise = size * torch.randn(output.logits.shape[-1])
                return replace(output, logits=output.logits + noise, top_k=None)
            return output

        monkeypatch.setattr(runner, "run", wrong)
    tallies = audit(model, prompts(5), 40)
    assert of(tallies, "lookahead").unexplained
    assert of(tallies, "lookahead").rms_error > 100 * of(tallies, "plain").rms_error


def test_a_wrong_draw_is_unexplained(monkeypatch):
    """A generator that is consumed otherwise draws other tokens from the right logits."""
    model = tiny_model("llama")
    one_draw_too_many(monkeypatch)
    tallies = audit(model, prompts(6), 40, temperature=0.7)
    assert not of(tallies, "lookahead").divergences
    assert of(tallies, "lookahead", "sampled").unexplained


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.3])
def test_the_best_score_is_the_token_that_generate_takes(temperature):
    model, tokenizer = load(None)
    inputs = tokenizer("def f(x):\n    return", return_tensors="pt")
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    torch.manual_seed(7)
    text = model.generate(**inputs, **options, max_new_tokens=30)[0, inputs.input_ids.shape[1] :].tolist()
    state = torch.get_rng_state()
    rows = next_logits(model, inputs.input_ids, text)
    scores = [choice_scores(row, temperature, 7, index) for index, row in enumerate(rows)]
    assert [int(row.argmax()) for row in scores] == text
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


def test_a_text_that_just_ends_is_unexplained():
    tally = Tally("greedy", "lookahead", 1, 2)
    tally.divergences.append(_judge(0, 1, [5, None], torch.zeros(2, 9), [torch.zeros(2, 9)], torch.float32, 0.0))
    assert tally.unexplained
    (row,) = tally.as_dict()["divergences"]
    assert (row["position"], row["other_token"], row["margin"]) == (1, None, None)
    json.dumps(row, allow_nan=False)


def test_both_tokens_have_to_be_nearly_the_best():
    """Two tokens tied with each other, far below the best one, are no near tie."""
    row = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    noisy = row + torch.tensor([0.0, 0.01, -0.01, 0.0])
    assert not _judge(0, 0, [1, 2], row, [noisy], torch.bfloat16, 0.0).near_tie
    assert _judge(0, 0, [0, 1], row * 0.001, [noisy - row], torch.bfloat16, 0.0).near_tie


def test_nan_is_no_near_tie():
    assert not Divergence(0, 0, 1, 2, float("nan"), 0.0, 1.0).near_tie


def test_a_wrapped_model_is_refused():
    with pytest.raises(ValueError, match="unwrap"):
        audit(lookahead.wrap(tiny_model("llama")), prompts(1))


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_source_prompts_are_many_and_the_same_each_time():
    many = source_prompts(200)
    assert many == source_prompts(200)
    assert len({prompt["question_id"] for prompt in many}) == 200
    assert all(len(prompt["turns"][0]) > 100 for prompt in source_prompts(16))


def test_the_command(tmp_path):
    out = tmp_path / "audit.json"
    result = run("--count", 3, "--max-new-tokens", 24, "--temperature", 0.8, "--json", out)
    assert result.exit_code == 0, result.output
    assert "0 of lookahead's texts part" in result.stdout
    assert "| sampled | lookahead | 0/3 |" in result.stdout
    report = json.loads(out.read_text())
    assert report["environment"]["dtype"] == "float32"
    assert [tally["unexplained"] for tally in report["tallies"]] == [0] * 8
    assert len(report["prompts"]) == 3


def test_the_command_reads_prompts_and_has_an_assistant(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(
        json.dumps({"question_id": f"q{i}", "category": "c", "turns": [f"def f{i}(x):\n    return"]}) + "\n"
        for i in range(3)
    ))  # fmt: skip
    result = run("--prompts", path, "--count", 2, "--max-new-tokens", 12, "--assistant", lookahead.DEMO_MODEL)
    assert result.exit_code == 0, result.output
    assert "| greedy | assistant | 0/2 |" in result.stdout


def test_the_command_fails_at_a_defect(monkeypatch, tmp_path):
    """The packaged model, probed at every load; the defect comes in after that."""
    inspect = lookahead.wrapping.find_adapter

    def inspect_and_break(model, cpu_kernels):
        found = inspect(model, cpu_kernels)
        everyone_sees_everyone(monkeypatch)
        return found

    monkeypatch.setattr(lookahead.wrapping, "find_adapter", inspect_and_break)
    out = tmp_path / "audit.json"
    result = run("--count", 3, "--max-new-tokens", 40, "--json", out)
    assert result.exit_code == 1
    assert "UNEXPLAINED" in result.stdout
    assert "rounding does not explain" in result.stderr
    assert sum(tally["unexplained"] for tally in json.loads(out.read_text())["tallies"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--prompts", __file__], "line 1 is not in Spec-Bench's format"),
        (["--count", "0"], "--count"),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
        (["--model", "./no/such/model"], "no/such/model"),
    ],
)
def test_bad_input_is_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_file_of_prompts_is_not_replaced(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content := '{"question_id": 1, "category": "code", "turns": ["x"]}\n')
    os.link(path, tmp_path / "linked")
    for other in (path, tmp_path / "." / path.name, tmp_path / "linked"):
        ran = run("--prompts", path, "--json", other)
        assert ran.exit_code == 2
        assert f"--json {other} is the file of --prompts: name another file" in ran.output
    assert path.read_text() == content
