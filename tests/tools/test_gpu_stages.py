"""`make gpu` runs completely without a GPU, keeps each stage's results, and resumes where it stopped."""

import json
import multiprocessing.forkserver
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "scripts")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "scripts/gpu.py", "--device", "cpu", "--small", "--out", tmp_path, *arguments]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def imports_once(monkeypatch):
    """Stages are forked from one process that has imported what they need, which spares most of their time."""
    multiprocessing.forkserver._forkserver._stop()  # that of another test, with another environment
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu_stages"])
    with monkeypatch.context() as patch:
        patch.setattr(gpu.multiprocessing, "get_context", lambda _: context)
        yield
    multiprocessing.forkserver._forkserver._stop()


@pytest.mark.long
def test_all_stages(run, imports_once, tmp_path):
    """But the tests, which run beside this one anyway."""
    stages = [stage for stage in gpu.SMALL_STAGES if stage != "tests"]
    options = ["--device", "cpu", "--small", "--out", tmp_path, "--minutes", "20", "--stages", ",".join(stages)]
    done = CliRunner().invoke(gpu.main, list(map(str, options)))
    output = done.output
    assert done.exit_code == 0, output
    page = (tmp_path / "all.md").read_text()
    for stage in stages:
        assert f"- {stage}: complete (" in page, output
        assert f"# {stage}\n" in page
        assert json.loads((tmp_path / f"{stage}.json").read_text())["is_complete"]
    costs = json.loads((tmp_path / "costs-8B.json").read_text())["seconds"]
    assert list(costs) == ["eager, split attention", "our graphs", "eager, dense mask", "reduce-overhead"]
    texts = json.loads((tmp_path / "texts-ballasted-greedy.json").read_text())["cells"][0]["table"]
    assert all(row["identical"] == 1 for row in texts)
    before = (tmp_path / "profile.json").stat().st_mtime
    assert run()[0] == 0
    assert (tmp_path / "profile.json").stat().st_mtime == before, "what is complete is not done again"


def failing(plan, report, *kind):
    report.write("half", {"half": 1})
    raise ValueError("planted")


def hanging(plan, report, *kind):
    report.write("half", {"half": 1})
    time.sleep(1000)


def planted(name, plan, limit):
    {"tests": failing, "profile": hanging}[name](plan, gpu.Report(plan.out / name, time.time() + limit))


@pytest.mark.parametrize(("stage", "what"), [("tests", "failed with exit status 1"), ("profile", "its time was over")])
def test_what_a_stage_wrote_stays(stage, what, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu, "run_stage", planted)
    monkeypatch.setattr(gpu.multiprocessing, "get_context", lambda _: gpu.multiprocessing.context.ForkContext())
    plan = gpu.Plan(None, gpu.PROMPTS, "cpu", True, tmp_path, "command")
    assert what in gpu.in_own_process(stage, plan, 2)
    assert json.loads((tmp_path / f"{stage}.json").read_text()) == {"is_complete": False, "half": 1}
    page = gpu.join_pages(tmp_path, {stage: what})
    assert what in page
    assert "half" in (tmp_path / "all.md").read_text()
    assert ("planted" in (tmp_path / "all.md").read_text()) == (stage == "tests")


def test_no_such_stage(run):
    status, output = run("--stages", "cost")
    assert status == 2
    assert "no such stage: cost; there are environment" in output
