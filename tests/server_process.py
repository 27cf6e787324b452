"""A server in a process of its own, for tests that ask it by HTTP alone."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIXED = ["--budget", "8", "--window-size", "4", "--ngram-size", "3"]  # so that no time goes into measuring steps
SERVE = ["-m", "lookahead", "serve", "--port", "0", *FIXED]
# One thread, as in the tests' process: sums are then rounded in the same order.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def running(*command: str, stop: int = signal.SIGINT):
    """Run a server in a process of its own; yield its address. Its process must end half a minute after ``stop``."""
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    with process:
        said, address = [], None
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    address = found[1]
                    break
            assert address, "".join(said)
            threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()  # keeps the pipe empty
            yield address
        finally:
            process.send_signal(stop)
            try:
                status = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            assert status in (0, -stop), "".join(said)


def connect(address: str) -> http.client.HTTPConnection:
    place = urllib.parse.urlsplit(address)
    return http.client.HTTPConnection(place.hostname, place.port, timeout=60)


def ask(address: str, path: str, **body: object) -> tuple[int, dict]:
    """Return the status and the JSON of the answer to a request."""
    with contextlib.closing(connect(address)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.load(answer)
