"""The pages that commands write: the command, tables of its results, and JSON."""

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import click

INSTRUCTIONS = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"  # environment variables that limit the instruction set


def command_line(script: str) -> str:
    """Return the command that started this process, with the environment variables INSTRUCTIONS.

    script: its ``__file__``.
    """
    settings = [f"{name}={os.environ[name]}" for name in INSTRUCTIONS if name in os.environ]
    return " ".join([*settings, shlex.join(["python", f"scripts/{Path(script).name}", *sys.argv[1:]])])


def table(columns: list[str], rows: Iterable[Iterable], align: str = "") -> str:
    """Return a markdown table. Floats show two decimals, None is an empty cell.

    align: a letter for each column, r to the right; all to the left by default.
    """
    rules = ["---:" if letter == "r" else "---" for letter in align.ljust(len(columns), "l")]
    lines = [columns, rules, *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "\\|")


def heading(where: dict) -> str:
    """Return the heading of a page: the command in ``where``, then everything else that the results depend on."""
    rest = ", ".join(f"{name} {value}" for name, value in where.items() if name != "command" and value != "")
    return f"`{where['command']}`\n\n{rest}\n\n"


def show_results(out: Path | None, text: str, results: dict) -> None:
    """Show a page. If ``out`` is given, also `write_results`."""
    click.echo(text)
    if out is not None:
        write_results(out, text, results)


def write_results(out: Path, text: str, results: dict) -> None:
    """Write OUT.md and then OUT.json, each atomically, and create their folder.

    out: the name may end in ``.md``, and may have other dots.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stem = str(out).removesuffix(".md")
    for suffix, content in ((".md", text), (".json", json.dumps(results, indent=1, default=str) + "\n")):
        new = Path(f"{stem}{suffix}.new")
        new.write_text(content, encoding="utf-8")
        new.replace(f"{stem}{suffix}")
