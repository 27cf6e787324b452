"""The pages that commands write: how they were called, and tables of what they found."""

import json
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import numpy as np
import torch


def command_line(script: str) -> str:
    """How this process was called. script: the ``__file__`` of the command."""
    return shlex.join(["python", f"scripts/{Path(script).name}", *sys.argv[1:]])


def table(columns: list[str], rows: Iterable[Iterable], align: str = "") -> str:
    """Rows of cells as a markdown table; floats show two decimals, None is an empty cell.

    align: a letter a column, r to the right; all to the left if not given.
    """
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(columns), "l")]
    lines = [columns, rules, *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def heading(where: dict) -> str:
    """The head of a page: the command of ``where``, and below it all else that the figures depend on."""
    rest = ", ".join(f"{name} {value}" for name, value in where.items() if name != "command")
    return f"`{where['command']}`\n\n{rest}\n\n"


def write_results(out: Path, text: str, results: dict) -> None:
    """Write OUT.md and OUT.json, and the folder that they go to."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")


def report(script: str, title: str, text: str, results: list[dict], out: Path | None) -> None:
    """Print the text of a page; with ``out`` write it to OUT.md, and everything behind it to OUT.json."""
    click.echo("\n" + text)
    if out:
        command = command_line(script)
        versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
        page = f"# {title}\n\n    {command}\n\n{versions}\n\n{text}\n"
        write_results(out, page, {"command": command, "results": results})
