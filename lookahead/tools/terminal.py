"""Write a model's text to standard output as it comes. On a terminal, with colours, unbroken words and a live line."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

import click
import torch
from transformers import PreTrainedTokenizerBase

from lookahead.streaming import PieceStreamer, without_half_character
from lookahead.tools.live import ERASE, Meter, below, fitted, styled
from lookahead.tools.words import WordWrap
from ngram_pool.waiting import told_if_long

STEP_COLOURS = ("cyan", "yellow")  # for the tokens of even and odd steps


def is_full_terminal() -> bool:
    """Whether standard output is a terminal that can show colours and move its cursor."""
    usual = "" if os.name == "nt" else "dumb"  # Windows sets no TERM
    return sys.stdout.isatty() and os.environ.get("TERM", usual) != "dumb"


class StepStreamer(PieceStreamer):
    """Prints text as it comes. On a terminal that can show it, the tokens accepted in one step share a colour, and
    lines break between words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, step: Callable[[], int], meter: Meter | None = None):
        """step: returns the number of the current step. meter: what the live line shows; None: no live line."""
        super().__init__(tokenizer, self._print)
        self._step = step
        self._meter = meter
        self._on_terminal = is_full_terminal()
        self._parts: list[str] = []  # text to write, together with the live line
        self._words = WordWrap(self._parts.append)
        self._reading = ExitStack()  # closing it removes the message about a long prefill

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._reading.enter_context(told_if_long("reading the prompt"))
        else:
            self._reading.close()
            if self._meter is not None:
                self._meter.count()
        super().put(value)

    def end(self) -> None:
        """Write the rest. The last state of the live line stays, below the text."""
        self._reading.close()
        self._hand_over(self._rest())
        self._words.flush()
        self._parts.append("\n")
        if self._meter is not None and (line := str(self._meter)):
            self._parts.append(fitted(line) + "\n")
        self._show()

    def close(self) -> None:
        """Remove the live line if the text was interrupted."""
        self._reading.close()
        self._show()

    def _rest(self) -> str:
        return self._pieces.rest()

    def _print(self, text: str) -> None:
        if not self._on_terminal:
            _echo(text)
            return
        self._words.add(text, self._coloured)
        # At the edge, no live line: moving the cursor would make the terminal forget the pending line break.
        line = "" if self._meter is None or self._words.is_at_edge else str(self._meter)
        self._show(line)

    def _show(self, line: str = "") -> None:
        """Write the parts of the text that are ready, and the live line."""
        erased = "" if self._meter is None else ERASE
        _echo(erased + "".join(self._parts) + (below(line) if line else ""))
        self._parts.clear()

    def _coloured(self, text: str) -> str:
        return styled(text, fg=STEP_COLOURS[self._step() % len(STEP_COLOURS)])


class AnswerStreamer(StepStreamer):
    """Prints an answer in a chat, without half a character at its end."""

    def _rest(self) -> str:
        return without_half_character(super()._rest())


def _echo(text: str) -> None:
    click.echo(text, nl=False, color=True)  # text is only coloured for a terminal
