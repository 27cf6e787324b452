"""Prompts: the user's own, and sets of prompts to measure with."""

import json
import sys
import sysconfig
from pathlib import Path
from typing import TextIO

import click

from lookahead.tools.files import read_text, reading

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))  # of the Python that runs this
PROMPT_LINES = 24  # lines of a source file in a prompt
MIN_SOURCE = 10_000  # bytes; smaller source files give no prompts


def given_prompt(prompt: str | None, prompt_file: TextIO | None) -> str:
    """Return the prompt of the command line: the text, standard input for "-", or the file.

    Raises UsageError unless exactly one is given and it is not empty, ClickException if it cannot be read.
    """
    if prompt is not None and prompt_file is None:
        text = read_text(sys.stdin) if prompt == "-" else prompt
    elif prompt is None and prompt_file is not None:
        text = read_text(prompt_file)
    else:
        raise click.UsageError("give a PROMPT, - for standard input, or --prompt-file")
    with reading("PROMPT"):
        text.encode()
    if not text:
        raise click.UsageError("the prompt is empty: give at least one token of text")
    return text


def read_prompts(path: Path, limit: int | None) -> list[dict]:
    """Read at most ``limit`` prompts in Spec-Bench's JSONL format: dicts with question_id, category and turns.

    Raises ClickException, naming the line, if it has another format.
    """
    with reading(path):
        text = path.read_text(encoding="utf-8")
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would split at characters that JSON may contain
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
            _check_prompt(prompt)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise click.ClickException(
                f"{path}, line {number} is not of Spec-Bench's format (question_id, category, turns): {error!r}"
            ) from error
        prompts.append(prompt)
    if not prompts:
        raise click.ClickException(f"{path} holds no prompt")
    return prompts[:limit]


def _check_prompt(prompt: dict) -> None:
    """Raise ValueError, KeyError or TypeError unless it has an id, a category, and texts as turns."""
    prompt["category"], prompt["question_id"]
    turns = prompt["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("turns must be a list of texts")
    for turn in turns:
        turn.encode()  # JSON allows half of a surrogate pair


def source_prompts(count: int) -> list[dict]:
    """Return ``count`` passages of the Python standard library, always the same, in the format of `read_prompts`.

    Raises ClickException if this Python has no sources.
    """
    paths = sorted(STANDARD_LIBRARY.glob("*.py"))
    paths = [path for path in paths if path.stat().st_size >= MIN_SOURCE]
    if not paths:
        raise click.ClickException("this Python has no sources of its standard library to prompt with: give --prompts")
    prompts = []
    for number in range(count):
        path = paths[number * len(paths) // count]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        begin = max((len(lines) - PROMPT_LINES) * (number + 1) // (count + 1), 0)
        passage = "".join(lines[begin : begin + PROMPT_LINES])
        prompts.append({"question_id": f"{path.name}:{begin + 1}", "category": "source", "turns": [passage]})
    return prompts


def up_to_its_end(text: list[int], eos_token_id: int | list[int] | None) -> list[int]:
    """Return ``text`` up to its first end token, which is included. The rest is a batch's padding."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))]
