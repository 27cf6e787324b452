"""A checkpoint may set what generate() returns or needs. Commands and the server still write the model's own text."""

import json
import os
import shutil
import threading

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from transformers import GenerationConfig

import lookahead
from lookahead import DEMO_MODEL
from lookahead.passes import stored
from lookahead.sequences import Sequences
from lookahead.tools import batch
from lookahead.tools.chat import PLAIN_TEMPLATE, Conversation
from lookahead.tools.cli import main
from lookahead.tools.loading import load, load_wrapped
from lookahead.tools.server.app import make_app

PROMPTS = ["x", "def main(argv):", "import os\n\n\ndef f", "x"]
FORMS = [
    {"return_dict_in_generate": True, "output_logits": True},
    {"stop_strings": ["return"]},
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"eos_token_id": []},
    {"forced_bos_token_id": 77},
]


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def checkpoint(folder, **settings) -> str:
    """The packaged model with these settings of generate()."""
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(folder)


def expected(settings: dict, prompt: str, seed: int, tokens: int) -> str:
    """What generate() writes after a prompt, as one text and without beams."""
    model, tokenizer = load(None)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    kept = {name: settings[name] for name in ("stop_strings", "do_sample", "forced_bos_token_id") if name in settings}
    if settings.get("eos_token_id") == []:
        model.generation_config.eos_token_id = None
    torch.manual_seed(seed)
    text = model.generate(ids, max_new_tokens=tokens, tokenizer=tokenizer, **kept)[0, ids.shape[1] :]
    return tokenizer.decode(text, skip_special_tokens=True)


@pytest.mark.parametrize("strategy", ["lookahead", "plain"])
@pytest.mark.parametrize("settings", FORMS, ids=lambda settings: next(iter(settings)))
def test_texts_are_the_models_own(settings, strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "best_size", lambda costs, stats, length, most: 4)
    model = checkpoint(tmp_path / "model", **settings)
    common = ["--model", model, "--max-new-tokens", "16", "--seed", "5", "--strategy", strategy]
    single = run("generate", PROMPTS[1], *common)
    assert single.exit_code == 0, single.output
    assert single.stdout == expected(settings, PROMPTS[1], 5, 16) + "\n"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    many = run("generate", "--prompts", prompts, "--out", tmp_path / "out.jsonl", *common)
    assert many.exit_code == 0, many.output
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert texts == [expected(settings, prompt, 5 + i, 16) for i, prompt in enumerate(PROMPTS)]
    assert ("without beams" in many.output) == ("num_beams" in settings)


@pytest.mark.parametrize("settings", FORMS[:5], ids=lambda settings: next(iter(settings)))
def test_a_chat_remembers_its_answers(settings, tmp_path):
    model, tokenizer, _, options = load_wrapped(
        checkpoint(tmp_path / "model", **settings), "auto", "cpu", None, "lookahead"
    )
    tokenizer.chat_template = PLAIN_TEMPLATE
    conversation = Conversation(model, tokenizer)
    answers = [conversation.answer(turn, 8, **options) for turn in ("def f():\n", "\nclass A:\n")]
    assert all(answers)
    assert [message["content"] for message in conversation.messages if message["role"] == "assistant"] == answers


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    model = checkpoint(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    tensors = load_file(tmp_path / "model/model.safetensors")
    cut = {name: each[:50].clone() if len(each) == config["vocab_size"] else each for name, each in tensors.items()}
    save_file(cut, tmp_path / "model/model.safetensors", {"format": "pt"})
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def main():"}\n')
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question_id": 1, "category": "x", "turns": ["def main():"]}\n')
    for arguments in (
        ["generate", "def main():"],
        ["generate", "--prompts", prompts, "--out", tmp_path / "out.jsonl"],
        ["audit", "--prompts", asked, "--max-new-tokens", "4"],
    ):
        result = run(*arguments, "--model", model)
        assert result.exit_code == 1, result.output
        assert "but the model knows 50 tokens: the tokenizer is another model's" in result.output


@pytest.mark.skipif(os.name == "nt", reason="pipes with names")
def test_whatever_can_be_written_to_is_written_to(tmp_path):
    """A pipe has no folder, and the folder of a file that is extended may be read-only."""
    fifo, found = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()))
    reader.start()
    result = run("trace", "def f", "--max-new-tokens", "4", "--out", fifo)
    reader.join()
    assert result.exit_code == 0, result.output
    assert "<html" in found[0]
    ends = os.pipe()
    reader = threading.Thread(target=lambda: found.append(os.fdopen(ends[0]).read()))
    reader.start()
    result = run("trace", "def f", "--max-new-tokens", "4", "--out", f"/dev/fd/{ends[1]}")
    os.close(ends[1])
    reader.join()
    assert result.exit_code == 0, result.output
    assert "<html" in found[1]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_file_in_a_sealed_folder_can_be_extended(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "sealed/out.jsonl"
    prompts.write_text('{"prompt": "def main():"}\n')
    out.parent.mkdir()
    out.touch()
    out.parent.chmod(0o500)
    try:
        result = run("generate", "--prompts", prompts, "--out", out, "--max-new-tokens", "4")
    finally:
        out.parent.chmod(0o700)
    assert result.exit_code == 0, result.output


def test_what_tune_cannot_keep_is_not_said_to_be_kept(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(stored, "FOLDER", blocked)
    result = run("tune", "--seconds", "1", "--contexts", "16")
    assert result.exit_code == 1
    assert "cannot keep the times" in result.output
    assert "kept for decoding" not in result.output


def test_a_finding_that_cannot_be_kept_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        stored.write(tmp_path / "kind/x.json", {"a": 1})
    assert not list((tmp_path / "kind").iterdir())


def test_a_finding_nested_too_deeply_is_none(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    assert stored.read(tmp_path / "x.json") is None


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_server_knows_a_checkpoints_stop_strings(is_wrapped, tmp_path):
    """Also one that decodes plainly. They end an answer as a request's do."""
    stops = ["return"]
    path = checkpoint(tmp_path / "model", stop_strings=stops, return_dict_in_generate=True)
    strategy = "lookahead" if is_wrapped else "plain"
    model, tokenizer, _, options = load_wrapped(path, "auto", "cpu", None, strategy)
    model.generation_config.update(**options)
    with TestClient(make_app(model, tokenizer, "x")) as client:
        request = {"model": "x", "prompt": PROMPTS[2], "max_tokens": 40, "temperature": 0}
        answer = client.post("/v1/completions", json=request).json()
    text, stop, _ = expected({"stop_strings": stops}, PROMPTS[2], 0, 40).partition("return")
    assert stop
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_submitted_text_may_have_stop_strings():
    model, tokenizer = load(None)
    ids = tokenizer(PROMPTS[2], return_tensors="pt").input_ids
    options = {"max_new_tokens": 40, "stop_strings": "return"}
    text = model.generate(ids, tokenizer=tokenizer, **options)
    texts = Sequences(lookahead.wrap(model))
    future = texts.submit(ids, tokenizer=tokenizer, **options)
    while texts.step():
        pass
    assert future.result().tolist() == text.tolist()
    settings = GenerationConfig(stop_strings="return", max_new_tokens=40)
    future = texts.submit(ids, tokenizer=tokenizer, generation_config=settings)
    while texts.step():
        pass
    assert future.result().tolist() == text.tolist()
    assert settings.stop_strings == "return"
    with pytest.raises(ValueError, match=r"stop_strings='return' need the tokenizer"):
        texts.submit(ids, **options)
    model.generation_config.stop_strings = "x"
    with pytest.raises(ValueError, match=r"generation_config.stop_strings='x' cannot be used here"):
        texts.submit(ids, tokenizer=tokenizer)
