"""The benchmark of vLLM's methods, with a toy as the engine."""

import json
import os
import sys

import benchmark_vllm
import pytest
from click.testing import CliRunner

TOY = """
import json, os, sys

method = sys.argv[sys.argv.index("--method") + 1]
built = "LOOKAHEAD_VLLM_POOL" in os.environ
print(json.dumps({"ready": True, "versions": {"toy": "1"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if method == "suffix":
        print(json.dumps({"error": "no trees here"}), flush=True)
        continue
    answer = {"ids": [[n, 2, 3, 4] for n in range(len(asked["prompts"]))], "seconds": 2.0,
              "drafted": None, "accepted": None}
    if method != "plain":
        answer |= {"drafted": 8, "accepted": 2 + 2 * built + 2 * (not asked["forget"]), "seconds": 1.0}
    if method == "ngram":
        answer["ids"][0][3] = 9
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "toy.py"}" "$@"\n')
    python.chmod(0o755)
    lines = [json.dumps({"question_id": n, "category": "c", "turns": [f"def f{n}"]}) for n in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.pool").write_bytes(b"")

    def invoke(*words):
        given = ["--prompts", tmp_path / "prompts.jsonl", "--peers", tmp_path, "--out", tmp_path / "out", *words]
        result = CliRunner().invoke(benchmark_vllm.main, list(map(os.fspath, given)))
        path = tmp_path / "out.json"
        return result, json.loads(path.read_text()) if path.exists() else None

    return invoke


def test_methods_are_compared(run, tmp_path):
    result, written = run("--pool", tmp_path / "a.pool", "--repeats", "2", "--concurrency", "1,4")
    assert result.exit_code == 0, result.output
    rows = {(row["concurrency"], row["method"]): row for row in written["table"]}
    assert len(rows) == len(written["table"]) == 2 * 8
    assert rows[4, "plain"]["tokens_per_second"] == 4
    assert rows[4, "plain"]["accepted_per_drafted"] is None
    assert rows[1, "lookahead"]["times_plain"] == 2
    assert rows[1, "lookahead"]["accepted_per_drafted"] == 0.25
    assert rows[1, "lookahead, again"]["accepted_per_drafted"] == 0.5
    assert rows[1, "lookahead, built pool"]["accepted_per_drafted"] == 0.5
    assert rows[1, "lookahead, built pool, again"]["accepted_per_drafted"] == 0.75
    assert rows[1, "ngram"]["identical"] == 2
    assert rows[1, "lookahead"]["identical"] == rows[1, "lookahead"]["texts"] == 4
    assert written["failures"] == {"suffix": "no trees here"}
    assert "suffix failed: no trees here" in result.output
    assert "| 4 | ngram | 8.0 | 8.0-8.0 | 2.00 | 1.00 | 0.25 | 0.25 | 2/4 |" in result.output


def test_repeats_that_differ_have_no_ratio():
    answer = {"ids": [[1] * 100], "drafted": None, "accepted": None}
    seconds = {"plain": [10.0, 10.5, 11.0], "ngram": [5.0, 5.0, 5.0], "suffix": [5.0, 6.0, 5.0], "lookahead": [5.0]}
    runs = {(1, method): [answer | {"seconds": each} for each in times] for method, times in seconds.items()}
    shown = {row["method"]: row["times_plain"] for row in benchmark_vllm.summarize(runs, greedy=True)}
    assert shown == {"plain": 1, "ngram": pytest.approx(2.1), "suffix": None, "lookahead": None}


def test_sampled_texts_are_not_compared(run):
    result, written = run("--methods", "ngram", "--temperature", "0.6", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in written["table"]] == ["plain", "ngram"] * 2
    assert all(row["identical"] is None for row in written["table"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--concurrency", "1,many"), "'many' is not a valid integer"),
        (("--methods", "magic"), "'magic' is not one of 'plain', 'ngram'"),
    ],
)
def test_bad_options_are_named(run, words, message):
    result, _ = run(*words)
    assert result.exit_code == 2
    assert message in result.output
