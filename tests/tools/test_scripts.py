"""The scripts import only public names of the packages; their tables are markdown."""

import ast
import sys
from pathlib import Path

import pytest

from bench.pages import command_line, table

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMAND_LINE = [f"lookahead.tools.{name}" for name in ("cli", "commands", "pool_commands", "chat", "terminal")]


def forbidden(source: str) -> list[str]:
    """Return the names that ``source`` imports but must not."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name for name in names if name.split(".")[0] in ("lookahead", "ngram_pool")]
    private = [name for name in ours if any(part.startswith("_") and part != "__version__" for part in name.split("."))]
    return private + [name for name in ours if any(f"{name}.".startswith(f"{module}.") for module in COMMAND_LINE)]


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: path.stem)
def test_scripts_import_what_is_public(path):
    assert forbidden(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from lookahead.tools.cli import AutoOr",
        "from lookahead.tools import commands",
        "def late():\n    import lookahead.tools.chat as chat",
        "from ngram_pool.reference import _hash",
        "from lookahead._inner import name",
    ],
)
def test_other_imports_are_found(source):
    assert len(forbidden(source)) == 1


def test_tables():
    rows = [["a | b", 1.005, None], ["c", 2, "3.0"]]
    assert table(["x", "y", "z"], rows, "lr").splitlines() == [
        "| x | y | z |",
        "| --- | ---: | --- |",
        "| a \\| b | 1.00 |  |",
        "| c | 2 | 3.0 |",
    ]


def test_a_page_gives_the_command_with_the_instructions_that_were_forbidden(monkeypatch):
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--out", "a folder/x"])
    command = "python scripts/benchmark.py --out 'a folder/x'"
    assert command_line("/where/it/is/benchmark.py") == command
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert command_line("benchmark.py") == f"ONEDNN_MAX_CPU_ISA=AVX512_CORE {command}"
