"""lookahead tune: what it measures, keeps and draws."""

import json

import matplotlib.image
import pytest
from click.testing import CliRunner

from lookahead.passes import capabilities, costs, measuring, stored
from lookahead.passes.costs import RUNGS
from lookahead.tools import commands, tuning
from lookahead.tools.cli import main
from lookahead.tools.tuning import DENSE, FUSED, SPLIT, StepTimes


def tune(*arguments):
    return CliRunner().invoke(main, ["tune", "--seconds", "1", *arguments])


def test_tune_keeps_what_decoding_goes_by(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    result = tune("--contexts", "16,100,100000", "--threads", "1", "--picture", str(tmp_path / "times.png"))
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "context" in line]
    assert [line.split(",")[0].strip() for line in lines] == [FUSED] * 2 + [SPLIT] * 2 + [DENSE] * 2
    assert all(float(time) > 0 for line in lines for time in line.split()[4:])
    assert "100000" not in result.stdout  # beyond the model's context
    (kept,) = tmp_path.glob("step-costs/*.json")
    assert f"kept for decoding: {kept}" in result.stdout
    before = json.loads(kept.read_text())
    picture = matplotlib.image.imread(tmp_path / "times.png")
    assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[-1])[::97]}) > 3
    monkeypatch.setattr(measuring, "measure", None)  # a later process reads the file
    monkeypatch.setattr(costs, "_known", type(costs._known)())
    generated = CliRunner().invoke(main, ["generate", "def f():", "--max-new-tokens", "4"])
    assert generated.exit_code == 0, generated.output
    assert before["rungs"] == list(RUNGS)


def test_fused_passes_come_first(tmp_path, monkeypatch):
    """And are kept apart from those of a model that has none."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    for ways in ([FUSED, SPLIT, DENSE], [SPLIT, DENSE]):
        result = tune("--contexts", "16", "--threads", "1")
        assert result.exit_code == 0, result.output
        lines = [line for line in result.stdout.splitlines() if "context" in line]
        assert [line.split(",")[0].strip() for line in lines] == ways
        for module in (capabilities, tuning):
            monkeypatch.setattr(module, "fused_runner", lambda *_, **options: "not here")
    assert len(list(tmp_path.glob("step-costs/*.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "1,b"], "--contexts"),
        (["--contexts", "-4"], "--contexts"),
        (["--contexts", "100000"], "1024 positions"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_named(arguments, message):
    result = tune(*arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr(commands, "load", None)  # is found out before anything is measured
    result = tune("--picture", "x.png")
    assert result.exit_code != 0
    assert "pip install matplotlib" in result.output


def test_only_rows_timed_everywhere_are_shown():
    times = StepTimes({SPLIT: {8: {1: 1e-3, 2: 2e-3, 128: 9.0}}, DENSE: {8: {1: 1e-3, 2: 2e-3}}})
    assert times.rows() == [1, 2]
    assert "9000" not in times.table()
