"""The scripts that measure the pool do run, and count as they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def prompts(tmp_path):
    lines = [{"question_id": i, "category": f"c{i % 2}", "turns": [f"def f{i}(x):\n    return"]} for i in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(script: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_steps(prompts, tmp_path):
    done = run("measure_pool.py", "steps", "--prompts", prompts, "--budgets", "2,8", "--max-new-tokens", 24, "--out",
               tmp_path / "out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["budget"], r["pool"]) for r in results] == [(2, "fresh"), (2, "shared"), (8, "fresh"), (8, "shared")]
    assert all(1 <= r["tokens_per_step"] <= r["budget"] + 1 for r in results)
    assert all(sum(count for count, _, _ in r["reliability"]) > 0 for r in results)
    assert (tmp_path / "out.md").read_text().count("| 8 |") == 2
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_sources(prompts):
    done = run("measure_pool.py", "sources", "--prompts", prompts, "--budgets", "4", "--max-new-tokens", 16)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| text")]
    assert len(rows) == 8
    assert all("logits" not in row.split("|")[5] for row in rows if row.startswith("| text |"))


def test_soak_and_speed():
    done = run("measure_pool.py", "soak", "--steps", 200, "--memory-mb", 1)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 11
    done = run("measure_pool.py", "speed", "--memory-mb", 1, "--observations", 20_000)
    assert done.returncode == 0, done.stderr
    assert "guess, budget 64" in done.stdout


def test_suffix_trees_are_asked_for(prompts):
    """Where the package is missing, the script says so; where it is there, it runs."""
    done = run("compare_suffix.py", "--prompts", prompts, "--max-new-tokens", 16, "--corpus", 5000)
    if done.returncode:
        assert "pip install arctic-inference" in done.stderr
    else:
        assert "| chain | 16 | pool |" in done.stdout


def test_replay_counts_steps(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import compare_suffix

    class Perfect:
        """Guesses a chain of what comes, as long as the budget allows."""

        def __init__(self, answer):
            self.answer, self.learned = answer, []

        def start(self, prompt):
            self.prompt = len(prompt)

        def guess(self, text, budget, chain):
            coming = self.answer[len(text) - self.prompt :][:budget]
            return coming, list(range(-1, len(coming) - 1))

        def learn(self, text, new):
            self.learned += new

        def end(self):
            pass

    answer = list(range(100, 122))  # the first is the prefill's, 21 come in steps
    drafter = Perfect(answer)
    result = compare_suffix.replay(lambda: drafter, [("c", [1, 2, 3], answer)], budget=6, chain=True, shared=False)
    assert result["tokens_per_step"] == 21 / 3
    assert drafter.learned == answer
    assert compare_suffix.accepted([5, 6, 7], [-1, -1, 1], [6, 7, 8]) == 2
    assert compare_suffix.accepted([5, 6, 7], [-1, -1, 0], [6, 7, 8]) == 1
