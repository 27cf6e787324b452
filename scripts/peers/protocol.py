"""How a peer, which runs in a Python environment of its own, is asked to decode: JSON lines over its stdin and stdout.

    PYTHON NAME_worker.py --model FOLDER --dtype float32|bfloat16 --threads N --method NAME

The worker loads the model and writes {"ready": true, "versions": {...}}, or {"error": "..."} and exits with 1. Then it
answers each line of stdin, {"ids": [...], "max_new_tokens": 128, "temperature": 0.6, "seed": 0}, with a line {"ids":
[...], "seconds": 0.1, "steps": 40, "drafted": null, "accepted": null}, or {"error": "..."}, until stdin ends:

ids        the new tokens, with the token that ended the text if one did
seconds    wall-clock time of the decoding, prefill included
steps      forward passes after prefill
drafted    tokens guessed and accepted, or null where the method does not count them
accepted

What libraries print goes to stderr. This file needs nothing but the standard library.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One text to continue: ids of the prompt, tokens at most, temperature (0 is greedy), seed."""

    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int

    def __post_init__(self):
        if not self.ids or any(type(token) is not int or token < 0 for token in self.ids):
            raise ValueError("ids has to be a list of one token id or more")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens has to be an integer of 1 or more, got {self.max_new_tokens!r}")
        if type(self.temperature) not in (int, float) or not self.temperature >= 0:
            raise ValueError(f"temperature has to be a number of 0 or more, got {self.temperature!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed has to be an integer, got {self.seed!r}")


@dataclass(frozen=True)
class Answer:
    ids: list[int] | list[list[int]]  # of one text, or of a batch
    seconds: float
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None


Decode = Callable[[Request], Answer]


def arguments() -> argparse.Namespace:
    """What the command line says: model (a folder), dtype, threads, method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16"])
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--method", required=True)
    chosen = parser.parse_args()
    if chosen.threads < 1:
        parser.error(f"--threads has to be 1 or more, got {chosen.threads}")
    if not (chosen.model / "config.json").is_file():
        parser.error(f"--model has to be a folder with a config.json, got {chosen.model}")
    return chosen


def end_tokens(model: Path) -> list[int]:
    """Ids of the tokens that end a text, as generate() finds them: in generation_config.json, else in config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def serve(
    load: Callable[[argparse.Namespace], tuple[Decode, dict[str, str]]],
    chosen: argparse.Namespace,
    read: Callable[..., Request] = Request,
) -> None:
    """Load the peer chosen, which gives its decoding and its versions, and answer requests until stdin ends.

    read: what makes a request of a line's object; one that is not a Request is for a decoding that takes such.
    """
    # Libraries print to file descriptor 1, also from C; from here on that is stderr.
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
            answer = decode(read(**json.loads(line)))
        except Exception as error:
            complain(error)
        else:
            say(vars(answer))
