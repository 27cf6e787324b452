"""scripts/compare_servers.py, with a stand-in for llama.cpp."""

import contextlib
import json
import os
import sys

import click
import compare_servers as script
import openai
import pytest
from click.testing import CliRunner
from server_process import ENVIRONMENT, ROOT, running

from lookahead import DEMO_MODEL

PROMPTS = ["--prompts", str(ROOT / "benchmarks/prompts.jsonl"), "--limit", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The packaged model, with a chat template."""
    return script.with_tools(DEMO_MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def address(model):
    with running("-m", "lookahead", "serve", "--port", "0", "--model", str(model)) as address:
        yield address


def compare(*arguments, out):
    done = CliRunner().invoke(script.main, [*map(str, arguments), "--max-new-tokens", "8", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return json.loads(out.with_suffix(".json").read_text())["table"]


def test_servers_run_beside_each_other(model, tmp_path, monkeypatch):
    """The stand-in is the same server: its program is called as llama.cpp's is."""
    for name, says in (
        ("bin/python", 'echo "$3"'),
        ("build/bin/llama-server", f'exec {sys.executable} -m lookahead serve --model "$2" --port "$4"'),
    ):
        path = tmp_path / "llama" / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{says}\n")
        path.chmod(0o755)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    rows = compare(
        "turns", "--model", model, "--dtype", "float32", "--llama", tmp_path, "--servers", "lookahead;llama.cpp",
        "--tokens", 60, "--rounds", 1, out=tmp_path / "turns",
    )  # fmt: skip
    assert [row[:2] for row in rows] == [[name, turn] for name in ("lookahead", "llama.cpp") for turn in range(1, 6)]
    assert [row[4] for row in rows[:5]] == [row[4] for row in rows[5:]]
    assert all(0 < first <= seconds for _, _, first, seconds, _ in rows)


@pytest.fixture
def already_running(address, model, monkeypatch):
    @contextlib.contextmanager
    def all_running(names, *others):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
            yield [script.Server("lookahead", address, client, str(model))]

    monkeypatch.setattr(script, "all_running", all_running)


def test_each_part_writes_a_page(already_running, model, tmp_path):
    options = "--model", model, "--dtype", "float32", "--rounds", 1
    rows = compare("clients", *options, *PROMPTS, out=tmp_path / "clients")
    assert [row[:2] for row in rows] == [[count, "lookahead"] for count in (1, 4, 8)]
    schemas = "schemas", *options, *PROMPTS, "--answers", 1
    ((name, valid, tokens, passes, *times),) = compare(*schemas, out=tmp_path / "schemas")
    assert (name, valid, len(times)) == ("lookahead", "1 of 1", 2)
    assert tokens > 20
    assert 0 < passes < tokens
    ((*counts, _),) = compare(*schemas, "--no-times", out=tmp_path / "schemas")
    assert counts == [name, valid, tokens]
    rows = compare("predictions", *options, "--answers", 2, out=tmp_path / "predictions")
    assert [row[0] for row in rows] == ["left out", "given"]
    assert rows[0][2] == rows[1][2] > 0


def test_a_server_that_guesses_nothing_forced_writes_the_same(model, tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    names = "lookahead", "lookahead without forced guesses"
    rows = compare(
        "schemas", "--model", model, "--dtype", "float32", *PROMPTS, "--answers", 1, "--no-times",
        "--servers", ";".join(names), out=tmp_path / "schemas",
    )  # fmt: skip
    assert [row[:2] for row in rows] == [[name, "1 of 1"] for name in names]
    (with_forced, without) = (row[3] for row in rows)
    assert with_forced < without


def test_a_loop_with_tools_calls_in_each_turn(already_running, model, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TURNS", 2)
    ((name, seconds, tokens, calls),) = compare(
        "tools", "--model", model, "--dtype", "float32", "--rounds", 1, out=tmp_path / "tools"
    )
    assert (name, calls, tokens) == ("lookahead", 0, 0)  # eight tokens are no whole call, so it is left out
    assert seconds > 0


def test_a_loop_with_tools_writes_the_same_from_cold_prompts(model, tmp_path, monkeypatch):
    """Also in bfloat16."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr(script, "TURNS", 3)
    names = "lookahead", "lookahead without earlier texts"
    rows = compare(
        "tools", "--model", model, "--dtype", "bfloat16", "--rounds", 1, "--no-times", "--servers", ";".join(names),
        out=tmp_path / "tools",
    )  # fmt: skip
    assert [row[0] for row in rows] == [*names]
    assert rows[0][1:] == rows[1][1:]


def test_texts_that_differ_are_shown():
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    one = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    script.check_same("a", one, "b", [one[0], one[1] | {"tool_calls": [call | {"id": "b"}]}])
    for other in ({"content": "y"}, {"tool_calls": [call | {"function": {"name": "g", "arguments": "{}"}}]}):
        with pytest.raises(click.ClickException, match=r'texts differ: .* of a, .* of b, after .*"x"'):
            script.check_same("a", one, "b", [one[0], one[1] | other])
