"""scripts/measure_pool.py runs, and counts what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_pool.py"


@pytest.fixture
def prompts(tmp_path):
    lines = [{"question_id": i, "category": f"c{i % 2}", "turns": [f"def f{i}(x):\n    return"]} for i in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_steps(prompts, tmp_path):
    done = run("steps", "--prompts", prompts, "--budgets", "2,8", "--max-new-tokens", 24, "--out",
               tmp_path / "out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["budget"], r["pool"]) for r in results] == [(2, "fresh"), (2, "shared"), (8, "fresh"), (8, "shared")]
    assert all(1 <= r["tokens_per_step"] <= r["budget"] + 1 for r in results)
    assert all(sum(count for count, _, _ in r["reliability"]) > 0 for r in results)
    assert (tmp_path / "out.md").read_text().count("| 8 |") == 2
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_speed():
    done = run("speed", "--memory-mb", 1, "--observations", 20_000)
    assert done.returncode == 0, done.stderr
    assert "guess, budget 64" in done.stdout
