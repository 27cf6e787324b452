"""A peer: another library that decodes in its own process and Python environment.

This is the client's side; scripts/peers/protocol.py describes the protocol.
"""

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from bench.timing import time_limit

WORKERS = Path(__file__).parents[1] / "peers"
PATIENCE = 10  # seconds that a process has to end after its stdin was closed


def worker_command(
    environments: Path, library: str, model: str, dtype: str, threads: int, method: str, requests: int = 1
) -> list[str]:
    """Return the command that starts a library's worker, in the environment that scripts/peers/install.sh made."""
    return [
        str(environments / library / "bin" / "python"), str(WORKERS / f"{library}_worker.py"), "--model", model,
        "--dtype", dtype, "--threads", str(threads), "--method", method, "--requests", str(requests),
    ]  # fmt: skip


class PeerError(Exception):
    """The peer died, reported an error, or took too long."""


class Peer:
    """One peer. Its process starts with the first request, and is suspended between requests, so that its threads do
    not spin while something else is timed.

    If it dies or takes too long, the next request restarts it. If it never got ready, all later requests fail, too.
    """

    def __init__(self, command: list[str], timeout: float):
        """timeout: seconds to get ready, and to answer a request."""
        self.versions: dict[str, str] = {}
        self._command = command
        self._timeout = timeout
        self._process: subprocess.Popen | None = None
        self._refusal: str | None = None

    def ask(self, prompts: list[list[int]], options: dict, seed: int, **batch) -> dict:
        """Return the answer to a request. Raises PeerError with the reason if there is none.

        options: of generate(), from `decoding_options`. batch: further fields of the request.
        """
        if self._refusal:
            raise PeerError(self._refusal)
        if self._process is None:
            self._start()
        else:
            self._signal(signal.SIGCONT)
        request = {"prompts": prompts, "max_new_tokens": options["max_new_tokens"], "seed": seed, **batch}
        request["temperature"] = options.get("temperature", 0.0)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail(self._obituary())
        answer = self._read()
        if "error" not in answer and not {"ids", "seconds"} <= answer.keys():
            self._fail(f"answered without ids, seconds or an error: {answer}")
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
        self._signal(signal.SIGKILL)  # also ends child processes that are left
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._process = None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, open as long as the process runs
        try:
            # In its own process group, so that child processes are suspended, too.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                preexec_fn=os.setpgrp, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )  # fmt: skip
            hello = self._read()
            if "error" in hello:
                self._fail(hello["error"])
        except (OSError, PeerError) as error:
            self._refusal = str(error) if isinstance(error, PeerError) else f"could not be started: {error}"
            raise PeerError(self._refusal) from error
        self.versions = hello.get("versions", {})

    def _read(self) -> dict:
        """Read the next line of its stdout."""
        try:
            with time_limit(self._timeout):
                line = self._process.stdout.readline()
        except TimeoutError:
            self._fail(f"no answer within {self._timeout:g} s")
        if not line.endswith(b"\n"):
            self._fail(self._obituary())
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._fail(f"wrote no JSON object, but {line[:100]!r}")
        return message

    def _obituary(self) -> str:
        """Return how the process ended, with the last line of its stderr."""
        try:
            status = f"ended with status {self._process.wait(PATIENCE)}"
        except subprocess.TimeoutExpired:
            status = "closed its output"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{status}: {said[-1]}" if said else status

    def _fail(self, reason: str) -> None:
        """End the process and raise PeerError."""
        self.close(patience=0)
        raise PeerError(reason)
