"""Prompts: the user's own, and sets of prompts to measure with."""

import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import click

from lookahead.tools.files import TEXT, read_text, reading

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))  # of the Python that runs this
PROMPT_LINES = 24  # lines of a source file in a prompt
REMEDY = (
    'Give each line an object such as {"prompt": "a text"} or {"messages": [{"role": "user", "content": "a text"}]}'
)
MIN_SOURCE = 10_000  # bytes; smaller source files give no prompts


def given_prompt(prompt: str | None, prompt_file: TextIO | None) -> str:
    """Return the prompt of the command line: the text, standard input for "-", or the file.

    Raises UsageError unless exactly one of them is given and not empty, ClickException if it cannot be read.
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
    prompts = []
    for number, line in _lines(path):
        try:
            prompt = json.loads(line)
            _check_prompt(prompt)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise click.ClickException(
                f"{path}, line {number} is not in Spec-Bench's format (question_id, category, turns): {error!r}"
            ) from error
        prompts.append(prompt)
    if not prompts:
        raise click.ClickException(f"{path} holds no prompt")
    return prompts[:limit]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not empty, with their numbers. Raises ClickException if it cannot be read."""
    with reading(path):
        text = path.read_text(encoding=TEXT)
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would split at characters that JSON may contain
        if line.strip():
            yield number, line


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
    paths = sorted(path for path in STANDARD_LIBRARY.glob("*.py") if path.stat().st_size >= MIN_SOURCE)
    if not paths:
        raise click.ClickException("this Python lacks its standard library's source files as prompts: give --prompts")
    prompts = []
    for number in range(count):
        path = paths[number * len(paths) // count]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        start = max((len(lines) - PROMPT_LINES) * (number + 1) // (count + 1), 0)
        passage = "".join(lines[start : start + PROMPT_LINES])
        prompts.append({"question_id": f"{path.name}:{start + 1}", "category": "source", "turns": [passage]})
    return prompts


def up_to_its_end(text: list[int], eos_token_id: int | list[int] | None) -> list[int]:
    """Return ``text`` up to its first end token, which is included. The rest is a batch's padding."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))]


@dataclass(frozen=True)
class PromptLine:
    """A line of a file of prompts."""

    number: int
    """Number of the line, from 1."""
    content: str | list[dict]
    """A text, or messages for a chat template."""
    id: dict
    """The line's field that names the prompt, {"id": ...} or {"question_id": ...}; {} if it has none."""


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """Read a file of prompts. Each line holds an object with a prompt (a text), messages, or turns as in Spec-Bench, of
    which the first is used. Empty lines are skipped.

    Raises ClickException, naming the line, if it is anything else.
    """
    lines = []
    for number, line in _lines(path):
        try:
            fields = json.loads(line)
            content = _content(fields)
            name = next((name for name in ("id", "question_id") if name in fields), None)
            if name is not None:
                json.dumps(fields[name], allow_nan=False)  # the output repeats it
        except (ValueError, RecursionError) as error:
            raise click.ClickException(
                f"{path}, line {number}: {error or 'it is nested too deeply'}. {REMEDY}"
            ) from error
        lines.append(PromptLine(number, content, {name: fields[name]} if name else {}))
    if not lines:
        raise click.ClickException(f"{path} holds no prompt. {REMEDY}")
    return lines


def _content(fields: object) -> str | list[dict]:
    """Return the prompt of a line. Raises ValueError if there is none."""
    if not isinstance(fields, dict):
        raise ValueError("it is not an object")
    given = [name for name in ("prompt", "messages", "turns") if name in fields]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'neither prompt nor messages'}; it must have exactly one")
    content = fields[given[0]]
    if given == ["messages"]:
        if not isinstance(content, list) or not content or not all(map(_is_message, content)):
            raise ValueError("messages must be a list of objects with role and content, which are texts")
        texts = [message["content"] for message in content]
    else:
        if given == ["turns"]:
            content = content[0] if isinstance(content, list) and content else None
        if not isinstance(content, str) or not content:
            raise ValueError(f"{given[0]} must be a text that is not empty" + ", in a list" * (given == ["turns"]))
        texts = [content]
    for text in texts:
        text.encode()  # JSON allows half of a surrogate pair
    return content


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
