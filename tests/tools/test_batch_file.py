"""`lookahead generate --prompts`: each text is the one of its prompt alone, whatever interrupts the work."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import tiny_model

import lookahead
from bench.tiny_models import random_model, tiny_config
from lookahead.passes.costs import RUNGS, StepCosts
from lookahead.stats import Stats
from lookahead.tools import batch
from lookahead.tools.answers import answers, beginning
from lookahead.tools.cli import main
from lookahead.tools.loading import load
from lookahead.tools.sizes import SIZES, best_size, fitting_size
from ngram_pool import NgramPool

PROMPTS = ["def add(a, b):\n", "import", "class Stack:\n    def", "x = 1\n" * 20, "if __name__ == '__main__':\n", "def"]
TOKENS = 24
SAMPLING = ["--temperature", "0.7", "--seed", "11"]


def file_of_prompts(path: Path, prompts: list[str]) -> str:
    lines = [json.dumps({"id": f"p{number}", "prompt": prompt}) for number, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(*arguments, tokens=TOKENS):
    return CliRunner().invoke(main, ["generate", "--max-new-tokens", str(tokens), *map(str, arguments)])


def texts_of(path) -> list[str]:
    return [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]


def alone(arguments=(), prompts=PROMPTS) -> list[str]:
    """What `model.generate` writes after each prompt by itself."""
    model, tokenizer = load(None)
    options = {"do_sample": False}
    if "--temperature" in arguments:
        options = {"do_sample": True, "temperature": 0.7}
    if "--repetition-penalty" in arguments:
        options["repetition_penalty"] = 1.3
    texts = []
    for number, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        torch.manual_seed(11 + number)
        output = model.generate(ids, max_new_tokens=TOKENS, **options)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(output, skip_special_tokens=True))
    return texts


@pytest.fixture(scope="module")
def sampled() -> list[str]:
    return alone(SAMPLING)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return file_of_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS)


@pytest.mark.parametrize("size", [1, 4])
def test_texts_are_those_of_each_prompt_alone(size, prompts, sampled, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "best_size", lambda costs, stats, length, most: size)
    result = run("--prompts", prompts, "--out", tmp_path / "out", *SAMPLING)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [answer["text"] for answer in found] == sampled
    assert [(answer["line"], answer["id"]) for answer in found] == [(n + 1, f"p{n}") for n in range(len(PROMPTS))]
    assert {answer["finish_reason"] for answer in found if answer["tokens"] < TOKENS} <= {"stop"}


@pytest.mark.parametrize("arguments", [[], ["--repetition-penalty", "1.3"], ["--strategy", "plain", *SAMPLING]])
def test_greedily_with_a_penalty_and_plainly(arguments, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "best_size", lambda costs, stats, length, most: 8)
    decode, lengths = batch.Texts.decode, []

    def noted(self, tasks):
        lengths.append([len(task.ids) for task in tasks])
        return decode(self, tasks)

    monkeypatch.setattr(batch.Texts, "decode", noted)
    result = run("--prompts", prompts, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    assert texts_of(tmp_path / "out") == alone(arguments)
    if "--repetition-penalty" in arguments:  # it would count the padding
        assert all(len(set(together)) == 1 for together in lengths)
    assert (len(lengths) == 1) == (not arguments)


def test_the_end_of_a_text_in_a_batch(tmp_path, monkeypatch):
    """A text that ends early is the same, and says that it has ended by itself."""
    monkeypatch.setattr(batch, "best_size", lambda *_: 8)
    model, tokenizer = load(None)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    end = written[6]
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = file_of_prompts(tmp_path / "prompts", PROMPTS[:3])
    result = run("--prompts", file, "--out", tmp_path / "out", "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    first, *others = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert first["tokens"] == written.index(end) + 1
    assert first["finish_reason"] == "stop"
    assert first["text"] == tokenizer.decode(written[: first["tokens"]], skip_special_tokens=True)
    assert all(one["finish_reason"] == ("length" if one["tokens"] == TOKENS else "stop") for one in others)


SLOW = """
import pathlib, sys, time
from lookahead.passes import costs, stored
from lookahead.tools import batch
from lookahead.tools.cli import main
costs.SECONDS, stored.FOLDER = 0.02, pathlib.Path(sys.argv.pop(1))
batch.best_size = lambda *_: 2
decode = batch.Texts.decode
def slowly(self, tasks):
    answers = decode(self, tasks)
    time.sleep(0.3)
    return answers
batch.Texts.decode = slowly
main(sys.argv[1:])
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_has_lost_nothing(number, prompts, sampled, tmp_path, monkeypatch):
    out, pool = tmp_path / "out", tmp_path / "pool"
    command = ["generate", "--prompts", prompts, "--out", str(out), "--max-new-tokens", str(TOKENS), *SAMPLING,
               "--pool", str(pool)]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path), *command], stderr=subprocess.PIPE)
    end = time.monotonic() + 100
    while time.monotonic() < end and not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        time.sleep(0.02)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1].decode()
    before = out.read_bytes()
    held = before.count(b"\n")
    assert 2 <= held < len(PROMPTS)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"interrupted: {held} of 6 texts are in {out}" in errors
        assert "Traceback" not in errors
        assert NgramPool.load(pool).observations
    monkeypatch.setattr(batch, "best_size", lambda *_: 3)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert f"{held} of 6 texts are in {out} already" in result.stderr
    assert out.read_bytes().startswith(before)
    assert texts_of(out) == sampled


BEGINNINGS = [beginning(number, f"{number:016x}") for number in (1, 2, 4)]
FIELDS = [{"id": "ä\n", "text": "one\u2028"}, {"text": "two\n\ud800"}, {"text": ""}]


def write_all(path: Path) -> None:
    with answers(path, BEGINNINGS) as file:
        for fields in FIELDS[file.count :]:
            file.add(fields)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_is_continued(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "out"
    write_all(path)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with answers(path, BEGINNINGS) as file:
        assert file.count == whole[:cut].count(b"\n")
    assert path.read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]
    write_all(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes", "line 1 does not answer"),
        (b"my notes\n", "line 1 does not answer"),
        (BEGINNINGS[0] + b"}\nmy notes", "line 2 does not answer"),
        (BEGINNINGS[1] + b"}\n", "line 1 does not answer"),
        (b"\n", "line 1 does not answer"),
        (b"".join(one + b"}\n" for one in BEGINNINGS) + b"x", "more lines than there are prompts, 3"),
        (b"".join(one + b"}\n" for one in BEGINNINGS) + b"\n", "more lines than there are prompts, 3"),
    ],
)
def test_another_file_is_left_as_it_is(content, message, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(click.ClickException, match=message), answers(path, BEGINNINGS):
        pass
    assert path.read_bytes() == content


def test_other_settings_are_other_texts(prompts, tmp_path):
    first = ["--prompts", prompts, "--out", tmp_path / "out", "--strategy", "plain"]
    assert run(*first, tokens=2).exit_code == 0
    before = (tmp_path / "out").read_bytes()
    assert run(*first, tokens=2).exit_code == 0  # there is nothing left to do
    for tokens, others in ((3, []), (2, ["--temperature", "1"]), (2, ["--dtype", "bfloat16"]), (2, ["--seed", "1"])):
        result = run(*first, *others, tokens=tokens)
        assert result.exit_code == 1
        assert "line 1 does not answer this prompt with these settings" in result.stderr
    assert (tmp_path / "out").read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="locks")
def test_two_processes_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out"
    with answers(path, BEGINNINGS) as file:
        file.add(FIELDS[0])
        with pytest.raises(click.ClickException, match="another process is writing"), answers(path, BEGINNINGS):
            pass
        file.add(FIELDS[1])
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's")
def test_a_full_disk_is_named(prompts):
    result = run("--prompts", prompts, "--out", "/dev/full", "--strategy", "plain", tokens=2)
    assert result.exit_code == 1
    assert "cannot write /dev/full" in result.stderr


def test_the_pool_is_kept(prompts, tmp_path):
    pool = tmp_path / "pool"
    assert run("--prompts", prompts, "--out", tmp_path / "one", "--pool", pool, tokens=8).exit_code == 0
    first = NgramPool.load(pool)
    assert first.observations > 0
    assert first.vocabulary
    assert run("--prompts", prompts, "--out", tmp_path / "two", "--pool", pool, tokens=8).exit_code == 0
    assert NgramPool.load(pool).observations > first.observations
    before = pool.read_bytes()
    assert CliRunner().invoke(main, ["generate", "def", "--max-new-tokens", "4", "--pool", str(pool)]).exit_code == 0
    assert pool.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: "),
        ("5", "line 3: it is not an object"),
        ('{"prompt": "a", "id": 1e400}', "line 3: Out of range float values are not JSON compliant"),
        ('{"turns": ["a"], "question_id": [NaN]}', "line 3: Out of range float values are not JSON compliant"),
        ("{}", "line 3: it has neither prompt nor messages"),
        ('{"prompt": "a", "messages": []}', "line 3: it has prompt and messages"),
        ('{"prompt": ""}', "prompt must be a text that is not empty"),
        ('{"prompt": 5}', "prompt must be a text that is not empty"),
        ('{"prompt": "\\ud800"}', "line 3: "),
        ('{"messages": "hello"}', "messages must be a list of objects with role and content"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects with role and content"),
        ('{"turns": []}', "turns must be a text that is not empty, in a list"),
        ("[" * 100_000, "line 3: "),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 3: the tokenizer's chat template cannot render"),
        (json.dumps({"prompt": "word " * 3000}), "line 3: the prompt has "),
    ],
)
def test_bad_lines_are_named_before_anything_is_decoded(line, message, tmp_path):
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "x\u2028"}\n\n' + line + "\n", encoding="utf-8")
    result = run("--prompts", file, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.stderr
    assert f"{file}, line 3" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "{prompts}"], "--prompts and --out belong together"),
        (["x", "--out", "out"], "--prompts and --out belong together"),
        (["x", "--prompts", "{prompts}", "--out", "out"], "PROMPT has no effect with --prompts"),
        (["--json", "--prompts", "{prompts}", "--out", "out"], "--json has no effect with --prompts"),
        (["--compare", "--prompts", "{prompts}", "--out", "out"], "--compare has no effect with --prompts"),
        (["--prompts", "{prompts}", "--out", "{prompts}"], "is the file of --prompts"),
        (["--prompts", "{prompts}", "--out", "new", "--pool", "new"], "--out new is the file of --pool"),
        (["--prompts", "{prompts}", "--out", "out", "--pool", "{prompts}"], "is not a pool file, and would be lost"),
        (["--prompts", "{prompts}", "--out", "out", "--pool", "p", "--strategy", "plain"], "--pool has no effect"),
        (["--prompts", "{prompts}", "--out", "out", "--pool", "p", "--strategy", "jacobi"], "--pool has no effect"),
        (["x", "--pool", "no/such/pool"], "cannot read the pool no/such/pool"),
        (["--prompts", os.devnull, "--out", "out"], "holds no prompt"),
    ],
)
def test_bad_options_are_named(arguments, message, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*(argument.format(prompts=prompts) for argument in arguments))
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not Path("out").exists()


def test_chats_and_turns(tmp_path):
    model, tokenizer = load(None)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    lines = [{"messages": [{"role": "user", "content": "class Stack:"}]}, {"question_id": 7, "turns": ["class Stack:"]},
             {"prompt": "class Stack:"}]  # fmt: skip
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    result = run("--prompts", tmp_path / "prompts", "--out", tmp_path / "out", "--model", tmp_path / "model", tokens=8)
    assert result.exit_code == 0, result.output
    assert len(set(texts_of(tmp_path / "out"))) == 1
    assert json.loads((tmp_path / "out").read_text().splitlines()[1])["question_id"] == 7


def test_texts_up_to_the_end_of_the_context(tmp_path, monkeypatch):
    """A prompt that leaves less room than others is continued by itself, up to the last position."""
    monkeypatch.setattr(batch, "best_size", lambda *_: 8)
    tokenizer = load(None)[1]
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=40).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    contents = [tokenizer.decode(tokenizer("x = y\n" * 9).input_ids[:length]) for length in (5, 30, 7, 39)]
    lengths = [len(tokenizer(content).input_ids) for content in contents]
    file = file_of_prompts(tmp_path / "prompts", contents)
    result = run("--prompts", file, "--out", tmp_path / "out", "--model", tmp_path / "model", tokens=20)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["tokens"] for one in found if one["finish_reason"] == "length"]
    for one, length in zip(found, lengths, strict=True):
        assert one["tokens"] == min(20, 40 - length) or one["finish_reason"] == "stop"


def test_a_batch_without_room_in_memory_is_halved(prompts, sampled, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "best_size", lambda costs, stats, length, most: most)
    decode, sizes = batch.Texts.decode, []

    def without_room(self, tasks):
        sizes.append(len(tasks))
        if len(tasks) > 2:
            raise torch.OutOfMemoryError("no room")
        return decode(self, tasks)

    monkeypatch.setattr(batch.Texts, "decode", without_room)
    result = run("--prompts", prompts, "--out", tmp_path / "out", *SAMPLING)
    assert result.exit_code == 0, result.output
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    assert texts_of(tmp_path / "out") == sampled


def test_an_error_names_the_lines_and_keeps_what_was_written(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "best_size", lambda *_: 2)
    decode = batch.Texts.decode

    def faulty(self, tasks):
        if tasks[0].line.number == 5:
            raise RuntimeError("the scores are NaN")
        return decode(self, tasks)

    monkeypatch.setattr(batch.Texts, "decode", faulty)
    result = run("--prompts", prompts, "--out", tmp_path / "out", "--pool", tmp_path / "pool", *SAMPLING)
    assert result.exit_code == 1
    assert "decoding failed: line 5 to 6 of the prompts: the scores are NaN" in result.stderr
    assert len(texts_of(tmp_path / "out")) == 4
    assert NgramPool.load(tmp_path / "pool").observations


def costs_of(seconds) -> StepCosts:
    return StepCosts(
        np.array([seconds(rows) for rows in RUNGS], float), np.zeros(2), overhead=0.0, overhead_per_row=0.0
    )


def test_the_size_follows_the_costs():
    flat, linear = costs_of(lambda rows: 1.0), costs_of(lambda rows: float(rows))
    assert best_size(flat, Stats(), 100, 1000) == SIZES[-1]
    assert best_size(flat, Stats(), 100, 5) == 4
    assert best_size(linear, Stats(), 100, 1000) == 1
    sizes = [best_size(costs_of(lambda rows, a=a: a + rows), Stats(), 100, 1000) for a in (0.5, 4, 32, 256)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    slow_reads = StepCosts(flat.seconds, np.array([1.0, 0.0]), overhead=0.0, overhead_per_row=0.0)
    assert best_size(slow_reads, Stats(), 1000, 1000) < SIZES[-1]
    flat.overhead = 100.0  # each sequence takes long outside of the pass
    assert best_size(flat, Stats(), 100, 1000) == 1
    assert best_size(flat, Stats(sequence_steps=10), 100, 1000) == SIZES[-1]  # it was seen to take no time


def test_where_guesses_yield_much_batches_are_smaller():
    costs = costs_of(lambda rows: 4 + rows)
    costs.overhead = 1.0
    sizes = []
    for accepted in (0.1, 6.0):
        stats = Stats(sequences=1, sequence_steps=100, guesses=800, tokens=101 + int(100 * accepted))
        sizes.append(best_size(costs, stats, 0, 1000))
    assert sizes[1] < sizes[0]


def test_layers_that_share_keys_take_no_memory():
    assert fitting_size(random_model(tiny_config("gemma3n_text")), 100) >= 1


def test_seeds_of_lines_hold_where_the_models_own_decoding_serves(prompts, sampled, tmp_path):
    """A batch would be sampled from one seed. A checkpoint may ask for a cache that lookahead does not write to."""
    folder = tmp_path / "model"
    shutil.copytree(lookahead.DEMO_MODEL, folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"cache_implementation": "static"}))
    with pytest.warns(UserWarning, match="own decoding"):
        ran = run("--prompts", prompts, "--out", tmp_path / "out", "--model", folder, *SAMPLING)
    assert ran.exit_code == 0, ran.output
    assert texts_of(tmp_path / "out") == sampled
