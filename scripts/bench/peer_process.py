"""A peer: another library's decoding, in a process and a Python environment of its own.

This is the side that asks; scripts/peers/protocol.py says how the two talk.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "peers"
PATIENCE = 10  # seconds that a process has to end once its stdin has


def worker_command(environments: Path, worker: str, model: str, dtype: str, threads: int, method: str) -> list[str]:
    """The command that starts a worker of scripts/peers, in the environment that install.sh made for its library."""
    library = worker.partition("_")[0]
    return [
        str(environments / library / "bin" / "python"), str(WORKERS / worker), "--model", model, "--dtype", dtype,
        "--threads", str(threads), "--method", method,
    ]  # fmt: skip


class PeerError(Exception):
    """The peer died, said that it cannot do what was asked, or took too long."""


class Peer:
    """One peer. Its process starts with the first request and is suspended between requests: it may not spin while
    something else is timed.

    After it died or took too long, the next request starts it anew; if it never got ready, every request fails alike.
    """

    def __init__(self, command: list[str], timeout: float):
        """timeout: seconds to get ready in, and to answer a request in."""
        self.versions: dict[str, str] = {}
        self._command = command
        self._timeout = timeout
        self._process: subprocess.Popen | None = None
        self._refusal: str | None = None

    def ask(self, request: dict) -> dict:
        """The answer. Raises PeerError with the reason if there is none."""
        if self._refusal:
            raise PeerError(self._refusal)
        if self._process is None:
            self._start()
        else:
            self._signal(signal.SIGCONT)
        answer = self._say(request)
        if "error" not in answer and not {"ids", "seconds"} <= answer.keys():
            self._fail(f"answered neither with ids and seconds nor with an error: {answer}")
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self, patience: float = PATIENCE) -> None:
        """End the process, by force after ``patience`` seconds."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._signal(signal.SIGKILL)  # also what it started and left behind
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._process = None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, open as long as the process runs
        self._unread = b""
        try:
            # In a group of its own, so that what it starts is suspended with it.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                preexec_fn=os.setpgrp, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )  # fmt: skip
        except OSError as error:
            self._refusal = f"could not be started: {error}"
            raise PeerError(self._refusal) from error
        try:
            hello = self._read()
            if "error" in hello:
                self._fail(hello["error"])
        except PeerError as error:
            self._refusal = str(error)
            raise
        self.versions = hello.get("versions", {})

    def _say(self, request: dict) -> dict:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail(self._obituary())
        return self._read()

    def _read(self) -> dict:
        """The next line of its stdout."""
        deadline = time.monotonic() + self._timeout
        stdout = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                self._fail(f"no answer within {self._timeout:g} s")
            piece = os.read(stdout, 2**16)
            if not piece:
                self._fail(self._obituary())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._fail(f"wrote what is no JSON object: {line[:100]!r}")
        return message

    def _obituary(self) -> str:
        """How it ended, and the last that it said of it."""
        try:
            status = f"ended with status {self._process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            status = "closed its output"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{status}: {said[-1]}" if said else status

    def _fail(self, reason: str) -> None:
        """Raises PeerError, and ends the process."""
        self.close(patience=0)
        raise PeerError(reason)
