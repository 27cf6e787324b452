"""A model that two processes compute together writes what one process writes, and both make the same guesses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo import tiny_model

TESTS = Path(__file__).parents[1]
SECONDS = 600  # processes that disagree about a pass wait for each other for ever


def run(model: Path, folder: Path, caches: list[Path]) -> list[dict]:
    """Run the processes of tensor_parallel.py, each with its cache; return what each of them has found."""
    processes = len(caches)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, Path(__file__).parent)))}
    variables |= {"WORLD_SIZE": str(processes), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, TESTS / "tensor_parallel.py", model, folder, str(rank), str(processes)],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank), "XDG_CACHE_HOME": str(caches[rank])},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen3"])
def test_two_processes_are_as_one(model_type, tmp_path):
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": False}
    tiny_model(model_type, **sizes).save_pretrained(tmp_path / "model")
    caches = [tmp_path / str(rank) for rank in range(2)]
    (whole,) = run(tmp_path / "model", tmp_path, caches[:1])
    found = run(tmp_path / "model", tmp_path, caches)
    for name in ("fixed", "auto", "draft model"):
        for one in found:
            assert one[name] == whole["plain"] * 2
            assert one[f"rows, {name}"] == found[0][f"rows, {name}"]
            assert one[f"tokens per step, {name}"] > 1.2
