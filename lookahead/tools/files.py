"""Files given by the user: errors of reading and writing become messages that name the file."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TextIO

import click

TEXT = "utf-8-sig"  # UTF-8, with or without the byte order mark that editors on Windows write


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise ClickException, naming ``path``, if it cannot be read or is not UTF-8 text."""
    try:
        yield
    except UnicodeError as error:
        raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def explained(words: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into a ClickException whose message begins with ``words``."""
    try:
        yield
    except errors as error:
        raise click.ClickException(f"{words}: {error}") from error


def writing(path: Path) -> AbstractContextManager[None]:
    """Raise ClickException, naming ``path``, if it cannot be written."""
    return explained(f"cannot write {path}", OSError)


def read_text(file: TextIO) -> str:
    """Return all of a text file. Raises ClickException, naming the file, if it cannot be read."""
    with reading(file.name):
        text = file.read().removeprefix("\ufeff")  # the byte order mark, if the file was not opened as TEXT
        text.encode()  # standard input lets other bytes through as surrogates
    return text


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, or UTF-8 text, atomically: readers see the old content or the new one. Raises OSError.

    Only its owner can read a new file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with open(handle, "wb") as file:
            file.write(data)
        if path.exists():
            os.chmod(beside, path.stat().st_mode & 0o777)
        os.replace(beside, path)
    finally:
        Path(beside).unlink(missing_ok=True)  # missing if it was renamed
