"""Another part of transformers' architectures every day; scripts/architectures.py tries them all.

LOOKAHEAD_FAMILIES=llama,bart names the model types to test instead.
"""

import datetime
import json
import os

import architectures
import pytest
from click.testing import CliRunner

from bench.tiny_models import random_model, tiny_config
from lookahead.engine.sampling import NextTokenRule

PARTS = 40  # days until all families had their turn


def families() -> list[str]:
    named = os.environ.get("LOOKAHEAD_FAMILIES")
    return named.split(",") if named else architectures.FAMILIES[datetime.date.today().toordinal() % PARTS :: PARTS]


@pytest.mark.parametrize("family", families())
def test_family_of_the_day(family):
    """A family is identical or refused, never wrong."""
    row = architectures.check(family)
    assert row["result"] != "wrong", f"{row}; LOOKAHEAD_FAMILIES={family} repeats this"


def test_wrong_texts_are_found(monkeypatch):
    original = NextTokenRule.emit

    def emit(self, logits, *row):
        return original(self, logits.roll(1) if self.ids.shape[1] == 40 else logits, *row)

    monkeypatch.setattr(NextTokenRule, "emit", emit)
    row = architectures.check("llama")
    assert row["result"] == "wrong"
    assert f"token {40 - len(architectures.PROMPT)} " in row["reason"]


def test_errors_of_lookahead_alone_are_wrong(monkeypatch):
    monkeypatch.setattr(NextTokenRule, "emit", lambda self, logits, *row: [][0])
    row = architectures.check("llama")
    assert row["result"] == "wrong"
    assert "IndexError" in row["reason"]


def test_a_model_whose_own_generate_fails_is_not_ours_to_fail():
    model = random_model(tiny_config("llama"))
    model.model.layers[0].register_forward_pre_hook(lambda *_: [][0])
    row = architectures.check_model("llama", model)
    assert row["result"] == "not built"
    assert row["reason"] == "its own generate fails: IndexError: list index out of range"


def test_a_family_that_hangs_is_ended():
    row = architectures.check_alone("gpt2", seconds=0.001)
    assert row["result"] == "wrong"
    assert "0.001 s" in row["reason"]


@pytest.mark.long
def test_page(tmp_path):
    out = tmp_path / "page.md"
    done = CliRunner().invoke(architectures.main, ["--only", "gpt2,bart,cpmant", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.with_suffix(".json").read_text())["families"]
    assert [row["model_type"] for row in rows] == ["bart", "cpmant", "gpt2"]
    for row, guesses in ((rows[0], "chain"), (rows[2], "tree")):
        assert row["result"] == "identical"
        assert row["guesses"] == guesses
        assert row["accepted"] > 0
        assert row["different_tokens"] > 1
    page = out.read_text()
    assert architectures.summary(rows) in page
    assert "identical 2 (1 by trees, 1 by chains)" in page
    assert f"| gpt2 | GPT2LMHeadModel | full | tree | {rows[2]['passes']} | identical |" in page


def test_unknown_families_are_named():
    result = CliRunner().invoke(architectures.main, ["--only", "llama,magic"])
    assert result.exit_code != 0
    assert "magic" in result.output
