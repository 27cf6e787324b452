"""A file of answers that grows line by line. If its writer is killed, no answer is lost or written twice."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from lookahead.tools.files import writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # not a module there


def beginning(line: int, fingerprint: str) -> bytes:
    """Return the bytes with which the answer to a line of prompts begins.

    fingerprint: identifies everything that the answer depends on.
    """
    return json.dumps({"line": line, "fingerprint": fingerprint}).encode()[:-1]  # without the brace


@dataclass
class Answers:
    """An open file of answers: a JSON object on each line, in the order of the prompts. `answers` opens one."""

    _path: Path
    _file: BinaryIO
    _beginnings: Sequence[bytes]
    count: int = 0
    """Number of answers in the file. They belong to the first prompts."""

    def add(self, fields: dict) -> None:
        """Write the next answer. Once this returns, a killed process has not lost it."""
        line = self._beginnings[self.count] + b", " + json.dumps(fields).encode()[1:] + b"\n"
        with writing(self._path):
            while line:  # in one call, unless the disk is full
                line = line[self._file.write(line) :]
        self.count += 1

    def save(self) -> None:
        """Wait until the disk has all answers, so that they survive a loss of power."""
        if self._path.is_file():
            with writing(self._path):
                os.fsync(self._file.fileno())


@contextmanager
def answers(path: Path, beginnings: Sequence[bytes]) -> Iterator[Answers]:
    """Open a file of answers, new or begun by a process that has ended.

    An incomplete last line is removed. Meanwhile, no other process can open the file.
    beginnings: for each prompt, what `beginning` returns.

    Raises ClickException, and leaves the file unchanged, if a line is not an answer to the prompt of its number.
    """
    with writing(path):
        # Unbuffered, so that each line is written at once.
        file = open(path, "a+b" if path.is_file() or not path.exists() else "wb", buffering=0)  # noqa: SIM115
    with file:
        kept = Answers(path, file, beginnings)
        if path.is_file():
            _lock(file, path)
            with writing(path):
                file.seek(0)
                held = file.read()
                *lines, torn = held.split(b"\n")
                kept.count = len(lines)
                _check(path, lines, torn, beginnings)
                file.truncate(len(held) - len(torn))
            if torn:
                click.echo(f"note: the last line of {path} was incomplete; it is written anew", err=True)
        yield kept


def _check(path: Path, lines: list[bytes], torn: bytes, beginnings: Sequence[bytes]) -> None:
    """Raise ClickException unless the lines, and the beginning of an incomplete one, answer the first prompts."""
    for number, (line, known) in enumerate(zip([*lines, torn], beginnings, strict=False), 1):
        if not (line.startswith(known) if number <= len(lines) else known.startswith(line[: len(known)])):
            raise click.ClickException(
                f"{path}, line {number} does not answer this prompt with these settings: the prompts, the model, its "
                "dtype, the length, the sampling or the seed have changed, or the file is of another kind. Name "
                "another --out, or remove the file"
            )
    if len(lines) > len(beginnings) or (torn and len(lines) == len(beginnings)):
        raise click.ClickException(
            f"{path} holds more lines than there are prompts, {len(beginnings)}: name another --out, or remove it"
        )


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise click.ClickException(
            f"another process is writing to {path}: wait until it has ended, or name another --out"
        ) from error
    except (AttributeError, OSError):  # Windows and some network file systems have no locks
        return
