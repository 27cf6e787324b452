"""Run the Python blocks of a page, in order and in one namespace, in a temporary folder.

    .peers/clients/bin/python scripts/doc_blocks.py docs/recipes.md

If a block needs more than `make test` installs, a line above it says so, and names the target that runs it. This
command also runs the blocks of `make test-clients`.
"""

import os
import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import click

BLOCK = re.compile(r"(?:^\*([^*]+)\*\n\n)?^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CLIENTS = "run by `make test-clients`"


@dataclass(frozen=True)
class Block:
    code: str
    note: str  # the line in italics above it: what it needs, and which target runs it; or ""
    line: int  # where its code begins in the page

    def run(self, page: Path, names: dict) -> None:
        """Run it with ``names``. Errors name the page and the line."""
        exec(compile("\n" * (self.line - 1) + self.code, str(page), "exec"), names)


def blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(textwrap.dedent(found[3]), found[1] or "", text.count("\n", 0, found.start(3)) + 1)
        for found in BLOCK.finditer(text)
    ]


@click.command(help=__doc__.split("\n")[0])
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(page: Path) -> None:
    path, here, names = page.resolve(), Path.cwd(), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks(path):
                if not block.note or CLIENTS in block.note:
                    click.echo(f"{page}, line {block.line}", err=True)
                    block.run(path, names)
        finally:
            os.chdir(here)


if __name__ == "__main__":
    main()
