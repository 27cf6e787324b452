"""Files that the user names: errors of reading and writing become messages that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click


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
def writing(path: Path) -> Iterator[None]:
    """Raise ClickException, naming ``path``, if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error}") from error


def read_text(file: TextIO) -> str:
    """Return all of a text file. Raises ClickException, naming the file, if it cannot be read."""
    with reading(file.name):
        text = file.read()
        text.encode()  # standard input lets other bytes through as surrogates
    return text
