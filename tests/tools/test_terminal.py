"""Terminal output: words stay whole, Markdown keeps its meaning, and a live line is below the text."""

import os
import re
import unicodedata
from itertools import cycle

import click
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lookahead.stats import Stats
from lookahead.tools import live
from lookahead.tools.contention import Span
from lookahead.tools.live import Meter, Rate, Share, measure_plain
from lookahead.tools.loading import load
from lookahead.tools.terminal import StepStreamer
from lookahead.tools.words import WordWrap
from lookahead.wrapping import unwrap, wrap

MARKDOWN = MarkdownIt("commonmark").enable("table")
PARTS = [
    "- ", "1. ", "# ", "> ", "```", "```py\n", "~~~", "\n", "\n\n", "    ", "  ", " word", "a ", " be", "`", "**",
    " | ", "\n| --- | --- |\n", "===", "---", "<div>", "\\", " 1986. ", " ", "*", "\t",
]  # fmt: skip


class Screen:
    """A terminal of a few rows: what it shows, with the lines that have left it at the top."""

    def __init__(self, columns: int, rows: int = 4):
        self.columns, self.rows = columns, rows
        self.cells = [[""]]  # of each line; the first holds what combines with nothing
        self.row = self.column = 0  # of the cursor; rows are counted from the first line ever shown
        self.saved = 0, 0  # row within the screen, and column
        self.breaks = []  # lines that the terminal broke itself

    @property
    def lines(self) -> list[str]:
        return ["".join(line) for line in self.cells]

    @property
    def top(self) -> int:
        return max(len(self.cells) - self.rows, 0)

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\x1b.|[^\x1b]", text):
            if len(part) == 1:
                self._put(part)
                continue
            if not part.endswith(("m", "J")):  # a terminal that moves its cursor forgets to break a full line
                self.column = min(self.column, self.columns - 1)
            if part == "\x1bD":
                self._down()
            elif part == "\x1b[A":
                self.row = max(self.row - 1, self.top)
            elif part == "\x1b[B":
                self.row = min(self.row + 1, len(self.cells) - 1)
            elif part == "\x1b7":
                self.saved = self.row - self.top, self.column
            elif part == "\x1b8":
                self.row, self.column = self.top + self.saved[0], self.saved[1]
            elif part == "\x1b[J":
                del self.cells[self.row][1 + self.column :]
                self.cells[self.row + 1 :] = [[""] for _ in self.cells[self.row + 1 :]]
            else:
                assert re.fullmatch(r"\x1b\[\d+m", part), part

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.cells):
            self.cells.append([""])

    def _put(self, character: str) -> None:
        if character in "\r\n":
            self.column = 0
            if character == "\n":
                self._down()
            return
        width = cells(character)
        if self.column + width > self.columns:
            self._down()
            self.breaks.append(self.row)
            self.column = 0
        line = self.cells[self.row]
        line += [" "] * (1 + self.column + width - len(line))
        if width:
            line[1 + self.column : 1 + self.column + width] = [character, ""][:width]
        else:
            line[self.column] += character
        self.column += width


def cells(text: str) -> int:
    return sum(2 if c == "日" else 0 if unicodedata.combining(c) else 1 for c in text)


def of_size(patch, columns: int, rows: int = 24) -> None:
    patch.setattr("shutil.get_terminal_size", lambda fallback=None: os.terminal_size((columns, rows)))


def wrapped(pieces: list[str], columns: int, style=str) -> str:
    written: list[str] = []
    words = WordWrap(written.append)
    with pytest.MonkeyPatch.context() as patch:
        of_size(patch, columns)
        for piece in pieces:
            words.add(piece, style)
        words.flush()
    return "".join(written)


@given(st.lists(st.text(st.sampled_from("aä日e\u0301 \n."), max_size=30), max_size=8), st.integers(2, 30))
@settings(max_examples=300, deadline=None)
def test_words_stay_whole_at_the_terminals_edge(pieces, columns):
    """Whatever the pieces and the colours: the same words, and none broken that fits on a line."""
    screen = Screen(columns)
    colours = cycle(["cyan", "yellow"])
    screen.write(wrapped(pieces, columns, lambda part: click.style(part, fg=next(colours))))
    text = "".join(pieces)
    assert "".join(screen.lines).replace(" ", "") == re.sub(r"\s", "", text)
    words = re.split(r"[ \n]|(?<=日)|(?=日)", text) + re.findall(r"^ *(?:日|[^ \n日]*)", text, re.MULTILINE)
    longest = max(map(cells, words))  # indented words, too
    if longest <= columns and not re.search(r"^ {4}|  ", text, re.MULTILINE):  # code, and what may be within code
        for row in screen.breaks:  # within words, the terminal breaks: a line break of ours would be a space
            assert "日" in screen.lines[row - 1].split(" ")[-1] + screen.lines[row].split(" ")[0]
    for line in text.split("\n"):  # a line that fits is as it was
        if cells(line.rstrip()) <= columns:
            assert line.rstrip() in [shown.rstrip() for shown in screen.lines]


def said(markdown: str) -> list[str]:
    """The rendered Markdown of a text. White space counts only in code blocks."""
    parts = re.split(r"(<pre>.*?</pre>)", MARKDOWN.render(markdown), flags=re.DOTALL)
    return [part if i % 2 else re.sub(r"\s+", " ", part) for i, part in enumerate(parts)]


@given(st.lists(st.sampled_from(PARTS), max_size=25), st.integers(4, 24))
@example(["- ", "1. ", "1. ", "1. ", "    ", "a "], 4)
@example(["* a\n", "    *     a b"], 4)
@example(["1.   a\n\n", "    * a b"], 4)
@settings(max_examples=600, deadline=None, derandomize=True)  # of a million texts ten are missed
def test_a_wrapped_text_says_the_same_in_markdown(pieces, columns):
    pieces = [*pieces, "\n"]
    assume(not re.search(r"^[^|\n]+\|.*\n\| ---", "".join(pieces), re.MULTILINE))  # a first row without its bar
    assert said(wrapped(pieces, columns)) == said("".join(pieces))


def test_lines_that_are_left_alone():
    code = "```python\nprint('a long line of code', 'with many words', 'stays')\n```\n"
    heading = "## A heading that is longer than the terminal is wide\n"
    row = "| a table | with a row | that is longer | than that |\n"
    for text in (code, heading, row, "- " + code, "> " + code, "    an indented line of code, which is long, too\n"):
        assert wrapped([text], 20) == text
    assert wrapped(["a piece of code: `a   b`\n"], 20) == "a piece of code: `a   b`\n"
    assert wrapped(["- a\n  - b\n    - one two\n  - one two\n"], 8) == "- a\n  - b\n    - one two\n  - one\ntwo\n"
    assert wrapped(["- one two three four five\n"], 12) == "- one two\nthree four\nfive\n"
    assert wrapped(["a walk in 1986. Then we\n"], 14) == "a walk in 1986. Then we\n"  # 1986. would begin a list


def test_a_terminal_that_changes_its_size(monkeypatch):
    shown = []
    words = WordWrap(shown.append)
    for columns in (12, 6, 12):
        of_size(monkeypatch, columns)
        words.add("one two three ")
    assert "".join(shown) == "one two\nthree\none\ntwo\nthree one\ntwo three"


def test_a_model_cannot_command_the_terminal():
    assert wrapped(["a\x1b[2J\r\nb\x07\x9b1m\x7f\tc\n"], 40) == "a␛[2J\nb␇\N{REPLACEMENT CHARACTER}1m␡\tc\n"


class FakeTokenizer:
    """Each token is a character."""

    clean_up_tokenization_spaces = False

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def convert_ids_to_tokens(self, token):
        return chr(token)


@given(st.booleans(), st.text(st.sampled_from("ab日 \n"), max_size=60), st.integers(8, 20), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_live_line_stands_below_the_text(is_code, text, columns, is_ended):
    """For any text, the screen is the same as without the line, and the line is below it."""
    text = "```\n" * is_code + text
    bare, screen = Screen(columns), Screen(columns)
    bare.write(wrapped([*text], columns))
    with pytest.MonkeyPatch.context() as patch:
        of_size(patch, columns)
        patch.setattr("sys.stdout.isatty", lambda: True)
        patch.setenv("TERM", "xterm")
        patch.setattr("lookahead.tools.terminal._echo", screen.write)
        patch.setattr(Meter, "__str__", lambda self: "LIVE, AND LONGER THAN THE SCREEN IS WIDE")
        streamer = StepStreamer(FakeTokenizer(), lambda: 0, Meter(lambda: None))
        streamer.put(torch.tensor([[1, 2]]))
        line = "LIVE, AND LONGER THAN THE SCREEN IS WIDE"[: columns - 1]
        for character in text:
            streamer.put(torch.tensor([ord(character)]))
            shown = [number for number, shown in enumerate(screen.lines) if "L" in shown]
            if screen.column < columns:
                assert shown == [screen.row + 1]
                assert screen.lines[screen.row + 1] == line
        if not is_ended:
            streamer.close()
            assert "L" not in "".join(screen.lines)
            return
        streamer.end()
    *lines, last, rest = screen.lines
    assert (last, rest) == (line, "")
    assert [shown.rstrip() for shown in lines] == [shown.rstrip() for shown in bare.lines]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_and_a_dumb_terminal_get_the_text_alone(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    streamer = StepStreamer(FakeTokenizer(), lambda: 0)
    for value in ([[1, 2]], *([ord(character)] for character in "long words\x1b here")):
        streamer.put(torch.tensor(value))
    streamer.end()
    streamer.close()
    assert capsys.readouterr().out == "long words\x1b here\n"


def test_a_user_may_want_no_colours(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    streamer = StepStreamer(FakeTokenizer(), lambda: 0)
    for value in ([[1, 2]], *([ord(character)] for character in "some words")):
        streamer.put(torch.tensor(value))
    streamer.end()
    assert capsys.readouterr().out == "some words\n"


def test_rates(monkeypatch):
    now = iter([10.0, 10.5, 10.5, 11.0])
    monkeypatch.setattr(live.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(live, "watch", lambda device: Span)
    stats = Stats()
    meter = Meter(lambda: stats, Rate(2.0, Span()))
    meter.count()
    assert str(meter) == ""
    meter.count()
    assert str(meter) == "2.0 tokens/s, 1.0 times plain"
    meter.count()
    stats.tokens, stats.sequences, stats.sequence_steps = 7, 1, 4
    assert str(meter) == "4.0 tokens/s, 1.50 tokens a step, 2.0 times plain"
    meter.count()
    assert str(meter) == "3.0 tokens/s, 1.50 tokens a step, 1.5 times plain"


@given(st.integers(1, 50), st.integers(1, 80))
def test_the_share_that_is_written(known, written):
    """Of a text that may be longer or shorter than the one that its length was taken from."""
    shares: list[float] = []
    streamer = Share(shares.append, known)
    streamer.put(torch.zeros(1, 7))
    for token in range(written):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert shares == [min(token / known, 1) for token in range(1 + written)]


def test_plain_decoding_is_measured_as_it_is():
    """By the model's own code, whether it is wrapped or not, and without a trace in the wrap's statistics."""
    model, _ = load(None)
    passes = []
    hook = model.register_forward_hook(lambda module, args, output: passes.append(output.logits.shape[1]))
    assert measure_plain(model, 5).per_second > 1
    wrap(model)
    passes.clear()
    assert measure_plain(model, 5).per_second > 1
    assert 2 < len(passes) <= live.MOST
    assert set(passes) == {1}
    assert not model.lookahead.stats.steps
    hook.remove()
    unwrap(model)
