"""The programs under examples/ do what they say, with the packaged model."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from lookahead import NgramPool

EXAMPLES = Path(__file__).parents[2] / "examples"
SCREEN = 50  # lines


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a program in an empty folder, and returns the files that it leaves."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments, lines=()):
        answers = iter(lines)

        def answer(prompt):
            print(prompt, end="")
            try:
                return next(answers)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr("builtins.input", answer)
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def test_the_page_lists_all_programs():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", page, re.M)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= SCREEN, path.name


def test_chat(run, capsys):
    first = run("chat.py", lines=["def read_lines(path):"])
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert capsys.readouterr().out.count(" tokens a step]") == 1
    learned = NgramPool.load("chat.pool").observations
    assert learned > 0
    again = run("chat.py", lines=["def read_lines(path):"])
    assert again["messages"][1]["content"]
    assert NgramPool.load("chat.pool").observations > learned


def test_batch(run):
    prompts = ["def read_lines(path):", "import os\n", "class Tree:\n", "def f(x):", "x = ["]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "id": text[:3]}) + "\n" for text in prompts))
    done = run("batch.py", "prompts.jsonl", "answers.jsonl")
    lines = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["id"]) for line in lines] == [(text, text[:3]) for text in prompts]
    assert all(line["answer"] for line in lines)
    assert done["model"].lookahead.stats.calls == 2  # batches of four and of one


def test_own_source(run, capsys):
    model = run("own_source.py")["model"]
    assert model.lookahead.last.accepted["Phrases"] > 5
    assert "unittest.main()" in capsys.readouterr().out


def test_notebook(capsys):
    """Its cells run, and the last line of each shows itself as it would there."""
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    names, shown = {}, []
    for cell in book["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            is_shown = isinstance(last, ast.Expr)
            exec(compile(ast.Module(body if is_shown else [*body, last], []), "cell", "exec"), names)
            if is_shown:
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    assert shown[1]._repr_html_().startswith("<iframe")
    assert shown[-1].calls >= 4
    assert capsys.readouterr().out.count(" tokens a step") == 3
