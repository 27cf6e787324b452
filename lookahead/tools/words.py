"""Break the lines of a terminal between words, in text that comes in pieces.

The text may be Markdown, and people copy it from the terminal. So a line is not broken where a line break would change
the meaning of the Markdown. Lines in which every break matters (code, headings, tables, HTML) are left to the terminal.
A table is known by the bar that begins its first row.
"""

import re
import shutil
import unicodedata
from collections.abc import Callable
from itertools import groupby

NO_CELL = ("Mn", "Me", "Cf")  # categories of characters that share the terminal cell of the character before
TAB = 8  # cells between a terminal's tab stops
CODE = 4  # columns by which Markdown indents code, and between its tab stops
# Control characters could change the terminal's state, so their pictures are shown instead.
SHOWN = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}
SHOWN |= dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")
SHOWN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}

# Words that start a block at the beginning of a line: markers of lists, headings and quotes, rules, underlines, fences,
# tables, HTML.
BLOCK = re.compile(r"[-+*_=:|]+|#{1,6}|\d{1,9}[.)]|[<>|].*|`{3,}.*|~{3,}.*", re.DOTALL)
MARKER = r"(?:[-+*]|\d{1,9}[.)])"  # of a list item
PREFIX = rf"(?:[ \t>]|{MARKER}[ \t])*"  # of lines in quotes and list items
BARE = re.compile(PREFIX + r"(?:[-+*_=:#`~ \t]*|\d{1,9}[.)])")  # lines without text so far, and rules
VERBATIM = re.compile(PREFIX + r"(?:#{1,6}\s|<|`{3}|~{3})")  # headings, HTML and fences are left alone
FENCE = re.compile(PREFIX + r"(`{3,}(?!.*`)|~{3,})")  # around code; no backtick may follow a fence of backticks
INDENTED = re.compile(rf"(?:[ >]|{MARKER} )*(?: {{4}}|{MARKER}?\t)")  # may be code
# Items of a list that begin with text: the indent, the first marker, and those of lists that begin in the same line.
ITEM = re.compile(rf"([ \t]*)({MARKER} {{1,4}})(?:{MARKER} {{1,4}})*(?![ \t>]|{MARKER}(?:\s|$))")


class WordWrap:
    """Writes text and breaks lines between words. The terminal breaks words that are longer than a line.

    A word is held back until it is complete.
    """

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._column = 0  # number of cells written in this line of the terminal
        self._line = ""  # this line of the text, up to the gap
        self._gap = ""  # spaces before the word that is held back
        self._word = ""  # the word that is held back, with its colours
        self._plain = ""  # the same without colours
        self._fence = ""  # the fence that opened the current code block
        self._in_table = False  # whether this line may be a table row
        self._has_code = False  # whether a backtick stands in earlier lines of this paragraph
        self._inner = range(0)  # indents of an inner item of this list; a line that has another may be code

    @property
    def is_at_edge(self) -> bool:
        """Whether a line of the terminal is full. The terminal breaks it before the next character."""
        return self._column >= shutil.get_terminal_size().columns

    def add(self, text: str, style: Callable[[str], str] = str) -> None:
        """Add ``text``. style: colours a part of it."""
        for kind, characters in groupby(text.translate(SHOWN), _kind):
            part = "".join(characters)
            if kind == "narrow":
                self._word += style(part)
                self._plain += part
                continue
            self.flush()
            if kind == "space":
                self._gap += part
            elif kind == "newline":
                for _ in part:
                    self._end_line()
            else:  # wide characters: a line may break between any two of them
                for character in part:
                    self._word, self._plain = style(character), character
                    self.flush()

    def flush(self) -> None:
        """Write the word that is held back. Call it at the end of a word."""
        if not self._word:
            return
        columns, width = shutil.get_terminal_size().columns, sum(map(_cells, self._plain))
        start = len((" " * self._column + self._gap).expandtabs(TAB))
        gap = "\n" if start + width > columns >= width and self._may_break() else self._gap
        self._put(gap, gap, columns)
        self._put(self._word, self._plain, columns)
        self._line += self._gap + self._plain
        self._gap, self._word, self._plain = "", "", ""

    def _may_break(self) -> bool:
        """Whether Markdown keeps its meaning if a line break replaces the gap before the word that is held back."""
        line = self._line + self._gap + self._plain
        if self._fence or self._in_table or VERBATIM.match(line) or "|" in line:
            return False
        if INDENTED.match(line) and not self._is_inner_item(line):
            return False
        if BARE.fullmatch(self._line) or self._line.endswith("\\") or BLOCK.fullmatch(self._plain):
            return False
        return self._gap == " " or not (self._has_code or "`" in self._line)  # spaces count in code

    def _is_inner_item(self, line: str) -> bool:
        item = ITEM.match(line)
        return item is not None and _width(item[1]) in self._inner

    def _inner_of(self, line: str) -> range:
        """Indents of items within the item that ``line`` begins: from the text of the list's first item."""
        item = ITEM.match(line)
        if item is None:
            return range(0)
        first = self._inner.start if self._is_inner_item(line) else _width(item[1] + item[2])
        return range(first, _width(item[0]) + CODE)

    def _end_line(self) -> None:
        columns = shutil.get_terminal_size().columns
        # Spaces at the end of a line have a meaning in code, and two of them everywhere.
        if len(self._gap) > 1 or self._column < columns or not self._may_break():
            self._put(self._gap, self._gap, columns)
        self._put("\n", "\n", columns)
        if self._fence:
            if re.fullmatch(rf"[ \t>]*{self._fence}{self._fence[0]}*", self._line):
                self._fence = ""
        elif fence := FENCE.match(self._line):
            self._fence = fence[1]
        self._in_table = bool(self._line) and (self._in_table or "|" in self._line)
        self._has_code = bool(self._line) and (self._has_code or "`" in self._line)
        if self._line and (not INDENTED.match(self._line) or self._is_inner_item(self._line)):
            self._inner = self._inner_of(self._line)
        self._line, self._gap = "", ""

    def _put(self, text: str, plain: str, columns: int) -> None:
        if text:
            self._write(text)
        for character in plain:
            if character == "\n":
                self._column = 0
            elif character == "\t":  # stops at the edge
                self._column = max(min((self._column // TAB + 1) * TAB, columns - 1), self._column)
            else:
                cells = _cells(character)
                self._column = cells if self._column + cells > columns else self._column + cells


def _width(indent: str) -> int:
    return len(indent.expandtabs(CODE))


def _cells(character: str) -> int:
    if unicodedata.category(character) in NO_CELL:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _kind(character: str) -> str:
    if character == "\n":
        return "newline"
    if character in " \t":
        return "space"
    return "wide" if unicodedata.east_asian_width(character) in "WF" else "narrow"
