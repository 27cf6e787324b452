"""How another library, in its own Python environment, is asked to decode: JSON lines over stdin and stdout.

    PYTHON NAME_worker.py --model FOLDER --dtype float32|bfloat16 --threads N --method NAME [--requests N]

The worker loads the model and writes {"ready": true, "versions": {...}}. If it cannot, it writes {"error": "..."} and
exits with 1. Then it reads requests from stdin, one a line, until stdin ends:

prompts         token ids of one prompt or more, [[...], ...]
max_new_tokens  most tokens to write for each prompt
temperature     0 is greedy
seed            of all draws
concurrency     prompts to decode at a time, at most --requests; when one ends, the next begins (default 1)
forget          whether the method first drops what it learned from earlier requests (default false)

It answers each request with one line, {"error": "..."} or:

ids            new tokens of each prompt, including the token that ended the text, if any: [[...], ...]
seconds        wall-clock time of the decoding, prefill included
steps          forward passes after the prefill; null for several prompts
drafted        guessed tokens, null if the method does not count them
accepted       accepted tokens, likewise
first_seconds  seconds until the first token was there, null if unknown or for several prompts
own_seconds    the seconds by the library's own account, null if it gives none

Output of libraries goes to stderr. This file needs only the standard library.
"""

import argparse
import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _check(right: bool, name: str, what: str, value: object) -> None:
    if not right:
        raise ValueError(f"{name} has to be {what}, got {value!r:.100}")


@dataclass(frozen=True)
class Request:
    """Prompts to continue. Raises ValueError for an invalid field."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float
    seed: int
    concurrency: int = 1
    forget: bool = False

    def __post_init__(self):
        _check(isinstance(self.prompts, list) and self.prompts, "prompts", "a list of one prompt or more", self.prompts)
        for ids in self.prompts:
            right = ids and all(type(token) is int and token >= 0 for token in ids)
            _check(right, "a prompt", "a list of one token id or more", ids)
        for name in ("max_new_tokens", "concurrency"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 1, name, "an integer of 1 or more", value)
        right = type(self.temperature) in (int, float) and self.temperature >= 0
        _check(right, "temperature", "a number of 0 or more", self.temperature)
        _check(type(self.seed) is int, "seed", "an integer", self.seed)
        _check(type(self.forget) is bool, "forget", "true or false", self.forget)


@dataclass(frozen=True)
class Answer:
    ids: list[list[int]]
    seconds: float
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    first_seconds: float | None = None
    own_seconds: float | None = None


Decode = Callable[[Request], Answer]


def arguments() -> argparse.Namespace:
    """Read the command line: model (a folder), dtype, threads, method, requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16"])
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--method", required=True)
    parser.add_argument("--requests", default=1, type=int, help="Most prompts decoded at a time.")
    chosen = parser.parse_args()
    for name in ("threads", "requests"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} has to be 1 or more, got {getattr(chosen, name)}")
    if not (chosen.model / "config.json").is_file():
        parser.error(f"--model has to be a folder with a config.json, got {chosen.model}")
    return chosen


def end_tokens(model: Path) -> list[int]:
    """Return the ids that end a text, as generate() does: from generation_config.json, or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def converted(model: Path, kind: str, folder: Path, convert: Callable[[Path], None]) -> Path:
    """Return a model in the library's own format, made by ``convert`` if it is not in ``folder`` yet.

    convert: writes the given file or folder. kind: the end of its name. Changed weights are converted again.
    """
    files = [(path.name, path.stat()) for path in sorted(model.glob("*.safetensors"))]
    weights = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    digest = hashlib.sha256(repr((str(model.resolve()), weights)).encode()).hexdigest()[:12]
    path = folder / f"{model.resolve().name}-{digest}-{kind}"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        convert(unfinished)
        unfinished.rename(path)
    return path


def serve(load: Callable[[argparse.Namespace], tuple[Decode, dict[str, str]]], chosen: argparse.Namespace) -> None:
    """Call ``load``, which returns the decoding function and the versions, and answer requests until stdin ends."""
    # Libraries, and C code in them, print to file descriptor 1. So it becomes stderr, and `out` is the real stdout.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    def complain(error: Exception) -> None:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})

    try:
        decode, versions = load(chosen)
    except Exception as error:
        complain(error)
        sys.exit(1)
    say({"ready": True, "versions": versions})
    for line in sys.stdin:
        try:
            say(vars(decode(Request(**json.loads(line)))))
        except Exception as error:
            complain(error)
