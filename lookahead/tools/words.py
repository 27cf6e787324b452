"""Break the lines of a terminal between words, in text that comes in pieces.

The text may be Markdown, and people copy it from the terminal. So only lines of prose are broken, where Markdown takes
a line break for a space. All other lines (code, headings, quotes, tables, HTML) are left to the terminal. A table is
known by the bar that begins its first row, and HTML ends for us with the next empty line.
"""

import re
import shutil
import unicodedata
from collections.abc import Callable
from itertools import groupby

NO_CELL = ("Mn", "Me", "Cf")  # categories of characters that share the terminal cell of the character before
TAB = 8  # cells between a terminal's tab stops
# Control characters could change the terminal's state, so their pictures are shown instead.
SHOWN = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}
SHOWN |= dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")
SHOWN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}

MARKER = r"(?:[-+*]|\d{1,9}[.)])"  # of a list item
# Words that start a block at the beginning of a line: markers of lists, headings and quotes, rules, underlines, fences,
# tables, HTML.
BLOCK = r"(?:[-+*_=:|]+|#{1,6}|\d{1,9}[.)]|[<>|]\S*|`{3,}\S*|~{3,}\S*)(?!\S)"
# Lines that begin with a word of prose, or with a marker and such a word. A deeper indent may be code, a bracket may
# begin the definition of a link.
PROSE = re.compile(rf" {{0,3}}(?:{MARKER} {{1,4}})?(?!{BLOCK}|\[)\S")
FENCE = re.compile(rf"(?:[ \t>]|{MARKER}[ \t])*(`{{3,}}(?!.*`)|~{{3,}})")  # no backtick may follow one of backticks


class WordWrap:
    """Writes text and breaks lines of prose between words. The terminal breaks the rest at its edge.

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
        self._in_block = False  # whether this line may be of a table or of HTML

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
            else:  # wide characters, which stand in words of their own
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
        """Whether Markdown takes a line break for the gap before the word that is held back."""
        if self._fence or self._in_block or "|" in self._line + self._plain or self._line.endswith("\\"):
            return False
        # Two spaces count in code. Where there is no space, a line break would be one.
        return self._gap == " " and PROSE.match(self._line) is not None and not re.match(BLOCK, self._plain)

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
        begins = "|" in self._line or self._line.lstrip().startswith("<")
        self._in_block = bool(self._line) and (self._in_block or begins)
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
