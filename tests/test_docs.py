"""The pages under docs/ show what the code does."""

import re
from pathlib import Path

import pytest
import torch
from draw_design import rooms, step

import lookahead
from lookahead.tools.batch import READ_PADDING
from lookahead.tools.cli import main

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("draw", [rooms, step])
def test_drawings_are_those_of_the_code(draw):
    drawn = (DOCS / f"{draw.__name__}.svg").read_text(encoding="utf-8")
    assert drawn == draw(), "it has changed: python scripts/draw_design.py --out docs"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Run the example of a source on a corpus that holds the coming text; return its names, inputs and text."""
    source, use, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "sources.md").read_text(encoding="utf-8"), re.S)
    assert len(source.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(source, names)
    model = names["AutoModelForCausalLM"].from_pretrained(lookahead.DEMO_MODEL)
    tokenizer = names["AutoTokenizer"].from_pretrained(lookahead.DEMO_MODEL)
    inputs = tokenizer("def read_lines(path):", return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=60)[0]
    Path("corpus.txt").write_text("import os\n\n" + tokenizer.decode(text, skip_special_tokens=True))
    exec(use, names)
    return names, inputs, text


def test_the_example_of_a_source(example, capsys):
    names, inputs, text = example
    model = names["model"]
    assert torch.equal(model.generate(**inputs, max_new_tokens=60)[0], text)
    lookahead.wrap(model, source=names["file"])
    assert torch.equal(model.generate(**inputs, max_new_tokens=60)[0], text)
    assert model.lookahead.last.accepted["SuffixArray"] > 30
    assert model.lookahead.last.tokens_per_step > 2


@pytest.mark.parametrize(("number", "name"), [(2, "DraftModelSource"), (3, "LayerSkipSource")])
def test_the_examples_of_drafts(example, capsys, number, name):
    names, _, _ = example
    exec(re.findall(r"```python\n(.*?)```", (DOCS / "sources.md").read_text(encoding="utf-8"), re.S)[number], names)
    assert f"{name}: asked in" in capsys.readouterr().out


def test_the_example_of_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "trace.md").read_text(encoding="utf-8"), re.S)
    names: dict = {}
    exec(example, names)
    assert capsys.readouterr().out == names["trace"].text + "\n"
    assert Path("trace.html").read_text(encoding="utf-8") == names["trace"].html()


def test_the_page_of_commands_names_what_there_is():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    options = {name for command in main.commands.values() for option in command.params for name in option.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - {"--help"} <= options
    assert set(re.findall(r"lookahead ([a-z]+)", page)) <= {*main.commands}
    assert all(name.replace("_", " ") in page.replace("_", " ") for name in READ_PADDING)
