"""The comparison script: its table, its verdicts and its errors."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lookahead import DEMO_MODEL
from lookahead.audit import choice_scores, next_logits
from lookahead.verify import NextTokenRule

spec = importlib.util.spec_from_file_location("compare", Path(__file__).parents[1] / "scripts" / "compare.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


@pytest.fixture
def prompts(tmp_path):
    lines = [
        {"question_id": f"{category}-{i}", "category": category, "turns": [f"def f{i}(x):\n    return x\n\ndef"]}
        for category in ("code", "more")
        for i in range(2)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(compare.main, [str(argument) for argument in arguments])


def test_table(prompts, tmp_path):
    out = tmp_path / "results" / "run"
    result = run(
        "--prompts", prompts, "--methods", "lookahead,jacobi,prompt-lookup,assisted", "--assistant",
        DEMO_MODEL, "--max-new-tokens", 24, "--repeats", 2, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.with_suffix(".json").read_text())
    assert len(report["table"]) == 3 * 5, "one row a category and method, and one a method over all"
    for row in report["table"]:
        assert row["tokens_per_second"] > 0
        assert row["identical"] == row["prompts"]
        assert row["largest_margin"] is None
        if row["method"] == "greedy":
            assert row["speedup"] == row["tokens_per_step"] == 1
        if row["method"] == "lookahead":
            assert row["tokens_per_step"] > 1
    text = out.with_suffix(".md").read_text()
    assert "| overall | prompt-lookup |" in text
    assert "tokens per step" in text


def test_differences_are_found(prompts, tmp_path, monkeypatch):
    """A decoder that writes one wrong token is reported as different, with the margin at that place."""
    original = NextTokenRule.emit

    def emit(self, logits):
        if self.ids.shape[1] == 20:
            logits = logits.roll(1)
        return original(self, logits)

    monkeypatch.setattr(NextTokenRule, "emit", emit)
    out = tmp_path / "run"
    result = run("--prompts", prompts, "--methods", "lookahead", "--max-new-tokens", 24, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads(out.with_suffix(".json").read_text())["prompts"] if row["method"] == "lookahead"]
    assert all(row["difference"] is not None and row["margin"] > 0 for row in rows)


def test_a_shared_pool_is_kept(prompts):
    arguments = ["--prompts", prompts, "--methods", "lookahead", "--max-new-tokens", 24, "--repeats", 1, "--seed", 3]
    steps = []
    for extra in ([], ["--shared-pool"]):
        result = run(*arguments, *extra)
        assert result.exit_code == 0, result.output
        steps.append(int(result.output.split(" tokens in ")[1].split(" steps")[0]))
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "magic"),
        (["--methods", "assisted"], "--assistant"),
        (["--shared-pool"], "--repeats 1"),
    ],
)
def test_bad_options_are_named(prompts, arguments, message):
    result = run("--prompts", prompts, *arguments)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("line", ["not json", '{"turns": ["x"]}', '{"question_id": 1, "category": "a", "turns": []}'])
def test_bad_prompts_are_named_by_line(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n' + line + "\n")
    result = run("--prompts", path)
    assert result.exit_code != 0
    assert "line 2" in result.output


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_margin_is_that_of_the_draw(top_p):
    """With the generator's noise drawn again, the token that was drawn has the best score."""
    model, tokenizer = compare.load(None)
    inputs = tokenizer("def f(x):\n    return", return_tensors="pt")
    options = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": top_p, "max_new_tokens": 12}
    torch.manual_seed(5)
    ids = model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    rows = next_logits(model, inputs.input_ids, ids)
    best = [int(choice_scores(row, 0.9, 5, index, top_p).argmax()) for index, row in enumerate(rows)]
    assert best == ids
    margins = [compare.margin_at(model, inputs, ids, index, options, 5) for index in range(len(ids))]
    assert all(margin > 0 for margin in margins)


def test_first_difference():
    assert compare.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert compare.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert compare.first_difference([1, 2], [1, 2, 3]) == 2


def test_forward_counter_counts_this_model_alone():
    model = torch.nn.Linear(2, 2)
    with compare.ForwardCounter(model) as counter:
        model(torch.zeros(2))
        model(torch.zeros(2))
    model(torch.zeros(2))
    assert counter.passes == 2
