"""The form of an answer: what the APIs of OpenAI and Anthropic have in common. Each has a module of its own."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lookahead.tools.server.answering import End, Likelihood, Piece, Words
from lookahead.tools.server.fields import Asked
from lookahead.tools.server.parsing import TEXT, Call
from lookahead.tools.server.reading import Prompt

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_name(prefix: str = "", length: int = 24) -> str:
    return prefix + "".join(secrets.choice(CHARACTERS) for _ in range(length))


def name_of_call() -> str:
    return new_name(length=9)  # some chat templates take names of nine letters and digits alone


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict:
    """Return an error as OpenAI's clients read it. param: the field at fault. code: of the fault."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    named = None if param is None else characters(param)
    return {"error": {"message": characters(message), "type": kind, "param": named, "code": code}}


def characters(text: str) -> str:
    """Return a text that may quote what is no character as one that can be sent."""
    return text.encode(errors="backslashreplace").decode()


def event(said: dict, name: str | None = None) -> str:
    """Return a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(said)}\n\n"


@dataclass
class Whole:
    """An answer so far. parts: texts with their kinds, and calls with their names, in order. reasoning: its tokens."""

    parts: list[tuple[str, Any]] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    tokens: int = 0
    reasoning: int = 0
    end: End | None = None

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Words):
            if self.parts and self.parts[-1][0] == piece.kind:
                self.parts[-1] = piece.kind, self.parts[-1][1] + piece.text
            else:
                self.parts.append((piece.kind, piece.text))
            self.likelihoods += piece.likelihoods if piece.kind == TEXT else []
            self.tokens, self.reasoning = piece.tokens, piece.reasoning
        elif isinstance(piece, Call):
            self.parts.append((name_of_call(), piece))
        else:
            self.end, self.tokens, self.reasoning = piece, piece.tokens, piece.reasoning

    def text(self, kind: str = TEXT) -> str:
        return "".join(part for of, part in self.parts if of == kind)

    @property
    def calls(self) -> list[tuple[str, Call]]:
        """Calls, with their names."""
        return [(name, part) for name, part in self.parts if isinstance(part, Call)]


class Form:
    """Writes the answers to one request, as one object or as events."""

    prefix = ""  # of its name

    def __init__(self, asked: Asked, model: str, prompts: list[Prompt], count: int):
        """count: of answers to each prompt."""
        self.asked, self.model = asked, model
        self.name, self.created = new_name(self.prefix), int(time.time())
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.answers = [Whole() for _ in range(len(prompts) * count)]
        self._count = count

    @staticmethod
    def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict:
        return error_body(message, status, param, code)

    @property
    def is_whole(self) -> bool:
        return all(answer.end is not None for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def reasoning(self) -> int:
        """Those of them that are reasoning."""
        return sum(answer.reasoning for answer in self.answers)

    @property
    def cached(self) -> int:
        """Tokens of all prompts that earlier requests have left. Of several answers to one, the first counts."""
        return sum(answer.end.cached for answer in self.answers[:: self._count] if answer.end is not None)

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def object(self) -> dict:
        """Return the whole answer."""
        raise NotImplementedError

    def begin(self) -> Iterator[str]:
        """Yield the events before any piece."""
        yield from ()

    def add(self, number: int, piece: Piece) -> Iterator[str]:
        """Yield the events of a piece of an answer. All of them must be taken."""
        answer = self.answers[number]
        answer.add(piece)
        yield from self.events(number, piece)
        if self.asked.streams:
            answer.likelihoods.clear()  # they were sent, and take far more than the text

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        raise NotImplementedError

    def end(self) -> Iterator[str]:
        """Yield the events after all pieces."""
        yield "data: [DONE]\n\n"

    def fail(self, message: str, status: int, param: str | None) -> Iterator[str]:
        """Yield the events that end a stream in the middle."""
        yield event(self.error(message, status, param))

    def ping(self) -> str:
        """Return what shows that a stream is alive. Clients pass over it."""
        return ": ping\n\n"
