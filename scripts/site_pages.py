"""Hooks for MkDocs: add pages from outside of docs/ to the site, and adapt links to them.

On the disk, docs/design.md links to ../benchmarks/README.md, as GitHub needs it. In the site, docs/ is the root, and
benchmarks/ is a folder below it.
"""

import os
import re
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CONTRIBUTING.md", "benchmarks/**/*.md", "benchmarks/**/*.png", "benchmarks/**/*.svg", "benchmarks/**/*.txt")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^()#\s]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files on the disk into links between pages. Links to other files become plain text."""
    source = Path(page.file.abs_src_path)
    begin = PurePosixPath(page.file.src_uri).parent

    def turned(link: re.Match) -> str:
        target = Path(os.path.normpath(source.parent / link[1]))
        if not target.exists():
            return link[0]  # not a link to a file, or a broken one, which MkDocs reports
        inside = target.is_relative_to(ROOT / "docs")
        name = target.relative_to(ROOT / "docs" if inside else ROOT).as_posix()
        if files.get_file_from_path(name) is None:
            return "](NOWHERE)"
        return f"]({os.path.relpath(name, begin)}{link[2] or ''})"

    return re.sub(r"(?<!!)\[([^\[\]]*)\]\(NOWHERE\)", r"\1", LINK.sub(turned, markdown))


# -- docstrings ------------------------------------------------------------------------------------------

TERM = re.compile(r"(\w+(?:, \w+)*): (.+)")


class Terms(griffe.Extension):
    """Shows the lines of docstrings that explain arguments ("name: meaning") as a list."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    """Turn lines "name: meaning" into list items. An indented line continues its item."""
    lines, in_list = [], False
    for line in docstring.splitlines():
        if term := TERM.fullmatch(line):
            lines += [""] * (not in_list) + [f"- **{term[1]}**: {term[2]}"]
            in_list = True
        elif in_list and line.strip() and not line.startswith(" "):
            lines += ["", line]
            in_list = False
        else:
            lines.append(line)
            in_list = in_list and bool(line.strip())
    return "\n".join(lines)
