import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from zoo import tiny_model

from lookahead import DEMO_MODEL
from lookahead.cli import StepStreamer, load, main

PROMPT = "def add(a, b):\n"


def run(*arguments, **options):
    return CliRunner().invoke(main, ["generate", *arguments], **options)


def test_generate_prints_the_models_own_text():
    result = run(PROMPT, "--max-new-tokens", "40")
    assert result.exit_code == 0, result.output
    model, tokenizer = load(None)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=40)[0, ids.shape[1] :], skip_special_tokens=True)
    assert result.stdout == expected + "\n"
    assert run(PROMPT, "--max-new-tokens", "40", "--no-stream").stdout == result.stdout


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "greedy"])
def test_compare(strategy):
    result = run(PROMPT, "--max-new-tokens", "40", "--temperature", "0.6", "--seed", "3", "--compare", "--stats",
                 "--strategy", strategy)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "times as fast; the texts are identical" in result.stdout
    assert "steps" in result.stderr


def test_json():
    result = run(PROMPT, "--max-new-tokens", "30", "--json", "--compare", "--window-size", "3", "--ngram-size", "2")
    answer = json.loads(result.stdout)
    assert answer["prompt"] == PROMPT
    assert answer["tokens"] == answer["stats"]["tokens"] == 30
    assert answer["plain"]["identical"] is True
    assert answer["stats"]["window_tokens"] > 0


def test_prompts_from_elsewhere(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    here = run(PROMPT, "--max-new-tokens", "10").stdout
    assert run("-", "--max-new-tokens", "10", input=PROMPT).stdout == here
    assert run("--prompt-file", str(file), "--max-new-tokens", "10").stdout == here


def test_sampling_options_reach_generate():
    greedy = run(PROMPT, "--max-new-tokens", "30").stdout
    sampled = run(PROMPT, "--max-new-tokens", "30", "--temperature", "1.5", "--top-k", "0", "--seed", "1").stdout
    assert sampled != greedy
    assert run(PROMPT, "--max-new-tokens", "30", "--temperature", "1.5", "--top-k", "1").stdout == greedy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT"),
        ([""], "empty"),
        ([PROMPT, "--model", "./no/such/folder"], "no/such/folder"),
        ([PROMPT, "--device", "nonsense"], "nonsense"),
        ([PROMPT, "--window-size", "-1"], "--window-size"),
        ([PROMPT, "--ngram-size", "1"], "--ngram-size"),
        ([PROMPT, "--budget", "-1"], "--budget"),
        ([PROMPT, "--temperature", "0"], "--temperature"),
        ([PROMPT, "--top-p", "1.5"], "--top-p"),
        (["word " * 3000], "shorten the prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_input_is_named_and_fails(arguments, message):
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_context_caps_the_length():
    model, tokenizer = load(None)
    context = model.config.max_position_embeddings
    prompt = "x"
    while len(tokenizer(prompt).input_ids) < context - 30:
        prompt += " = x\n"
    length = len(tokenizer(prompt).input_ids)
    assert length < context
    result = run(prompt, "--max-new-tokens", "500", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] <= context - length
    assert f"room for {context - length}" in result.stderr


def test_nan_logits_are_named(tmp_path):
    model = tiny_model("llama", vocab_size=4096)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    load(None)[1].save_pretrained(tmp_path)
    result = run(PROMPT, "--model", str(tmp_path))
    assert result.exit_code != 0
    assert "NaN" in result.stderr


def test_recurrent_models_are_refused(tmp_path):
    tiny_model("mamba", vocab_size=4096, state_size=4).save_pretrained(tmp_path)
    load(None)[1].save_pretrained(tmp_path)
    result = run(PROMPT, "--model", str(tmp_path))
    assert result.exit_code != 0
    assert "recurrent" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_in_mid_stream():
    command = [sys.executable, "-m", "lookahead", "generate", PROMPT, "--max-new-tokens", "900", "--temperature", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)  # it has begun
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_streamer_writes_whole_characters_and_colours_steps(monkeypatch, capsys):
    _, tokenizer = load(None)
    text = "naïve → 日本\n  done"
    ids = tokenizer(text).input_ids
    steps = iter(range(100))
    for colour in (False, True):
        streamer = StepStreamer(tokenizer, lambda: next(steps))
        streamer._colour = colour
        streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        written = capsys.readouterr().out
        if colour:
            assert "\x1b[" in written
        else:
            assert written == text + "\n"


def test_packaged_model_has_a_card():
    card = (DEMO_MODEL / "README.md").read_text()
    for word in ("PSF", "seed", "held-out loss", "steps"):
        assert word in card
