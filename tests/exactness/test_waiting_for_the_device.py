"""How often a step makes the host wait for a GPU, counted on a device that computes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.long
def test_each_step_or_token_waits_once():
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, Path(__file__).parent)))}
    command = [sys.executable, str(TESTS / "counted_device.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kind, found in json.loads(done.stdout).items():
        # A step: the likeliest tokens, with what has overflowed, and what the pool learns from its logits.
        waits = 2 * found["steps"] + 1
        if kind in ("greedy, with a processor", "sampled"):
            # A token, in turn: itself, whether the text ends with it, and whether the scores left a choice.
            waits += found["tokens"]
        assert found["to host"] <= waits, (kind, found)
        assert found["waits"] <= found["to host"], (kind, found)
        # A step: its tokens with their positions, its mask, and the moves of what was accepted.
        assert found["to device"] <= 3 * found["steps"], (kind, found)
