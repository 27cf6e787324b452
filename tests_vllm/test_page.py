"""The programs of docs/vllm.md do what the page says. Run by `make test-vllm`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from test_server import server

ROOT = Path(__file__).parents[1]


def programs() -> list[str]:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    found = re.findall(r"run by `make test-vllm`\.\*\n\n```python\n(.*?)```", page, re.S)
    assert len(found) == page.count("```python")
    return found


def run(program: Path, code: str, **variables: str) -> str:
    program.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program(tmp_path):
    written = run(tmp_path / "generate.py", programs()[0], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    accepted = re.search(r"num_accepted_tokens (\d+)", written)
    assert accepted, written
    assert int(accepted[1]) > 20


def test_the_client(tmp_path):
    code = programs()[1]
    with server(tmp_path / "log") as (address, _):
        assert len(run(tmp_path / "client.py", code.replace("http://127.0.0.1:8000", address))) > 100
