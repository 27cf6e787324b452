"""Prompts to measure with."""

import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))  # of the Python that runs this
PROMPT_LINES = 24  # of a source file that make a prompt
LEAST_SOURCE = 10_000  # bytes of a source file that prompts are taken from


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Raise ClickException that names ``path`` if it cannot be read, or not as UTF-8 text."""
    try:
        yield
    except UnicodeError as error:
        raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror or error}") from error


def read_prompts(path: Path, limit: int | None) -> list[dict]:
    """Prompts in Spec-Bench's JSONL format, at most ``limit``: dicts with question_id, category and turns.

    Raises ClickException that names the line if it is not of the format.
    """
    with readable(path):
        text = path.read_text(encoding="utf-8")
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also split at what JSON allows in strings
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
    """Raise ValueError, KeyError or TypeError unless it has an id, a category and turns that are texts."""
    prompt["category"], prompt["question_id"]
    turns = prompt["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("turns must be a list of texts")
    for turn in turns:
        turn.encode()  # JSON may name half of a surrogate pair


def source_prompts(count: int) -> list[dict]:
    """Passages of the Python standard library's source files, in the format of `read_prompts`; the same every time.

    Raises ClickException where the library was installed without its sources.
    """
    paths = sorted(STANDARD_LIBRARY.glob("*.py"))
    paths = [path for path in paths if path.stat().st_size >= LEAST_SOURCE]
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
    """``text`` up to and with its first end token; the rest is a batch's padding."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))]
