"""Write a model's text to standard output as it comes. A terminal gets colours and unbroken words."""

import shutil
import sys
import unicodedata
from collections.abc import Callable
from itertools import groupby

import click
from transformers import PreTrainedTokenizerBase

from lookahead.streaming import PieceStreamer, without_half_character

STEP_COLOURS = ("cyan", "yellow")  # for the tokens of even and odd steps
NO_CELL = ("Mn", "Me", "Cf")  # categories of characters that share the terminal cell of the character before


class StepStreamer(PieceStreamer):
    """Prints text as it comes. On a terminal, the tokens accepted in one step share a colour."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, step: Callable[[], int]):
        """step: returns the number of the current step."""
        super().__init__(tokenizer, self._print)
        self._step = step
        self._on_terminal = sys.stdout.isatty()

    def end(self) -> None:
        super().end()
        click.echo()

    def _print(self, text: str) -> None:
        _echo(self._coloured(text) if self._on_terminal else text)

    def _coloured(self, text: str) -> str:
        return click.style(text, fg=STEP_COLOURS[self._step() % len(STEP_COLOURS)])


class AnswerStreamer(StepStreamer):
    """Prints an answer in a chat: also keeps words on one line of a terminal, and drops half a character at the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, step: Callable[[], int]):
        super().__init__(tokenizer, step)
        self._words = WordWrap(_echo)

    def end(self) -> None:
        if piece := without_half_character(self._pieces.rest()):
            self._print(piece)
        self._words.flush()
        click.echo()

    def _print(self, text: str) -> None:
        if self._on_terminal:
            self._words.add(text, self._coloured)
        else:
            _echo(text)


class WordWrap:
    """Breaks lines between words, in text that comes in pieces.

    A word is held back until it is complete. The terminal breaks words that are longer than a line.
    """

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._column = 0  # number of cells written in this line
        self._gap = ""  # spaces before the word that is held back
        self._word = ""  # the word that is held back, with its colours
        self._width = 0  # number of cells that it takes

    def add(self, text: str, style: Callable[[str], str] = str) -> None:
        """Add ``text``. style: colours a part of it."""
        for kind, characters in groupby(text, _kind):
            part = "".join(characters)
            if kind == "narrow":
                self._word += style(part)
                self._width += sum(unicodedata.category(character) not in NO_CELL for character in part)
                continue
            self.flush()
            if kind == "space":
                self._gap += part
            elif kind == "newline":
                self._write(part)
                self._column, self._gap = 0, ""
            else:  # wide characters: a line may break between any two of them
                for character in part:
                    self._word, self._width = style(character), 2
                    self.flush()

    def flush(self) -> None:
        """Write the word that is held back. Call it at the end of a word."""
        if not self._word:
            return
        columns = shutil.get_terminal_size().columns
        begin = len((" " * self._column + self._gap).expandtabs())
        if begin + self._width > columns >= self._width:
            self._gap, begin = "\n", 0
        self._write(self._gap + self._word)
        end = begin + self._width
        self._column = end and (end - 1) % columns + 1  # a full line breaks before the next character
        self._gap, self._word, self._width = "", "", 0


def _kind(character: str) -> str:
    if character == "\n":
        return "newline"
    if character in " \t":
        return "space"
    return "wide" if unicodedata.east_asian_width(character) in "WF" else "narrow"


def _echo(text: str) -> None:
    click.echo(text, nl=False, color=True)  # text is only coloured for a terminal
