"""The form of chat completions, and of completions."""

from collections.abc import Iterator
from typing import Any

from lookahead.tools.server.answering import End, Likelihood, Piece, Words
from lookahead.tools.server.fields import Asked
from lookahead.tools.server.forms import Form, Whole, event
from lookahead.tools.server.parsing import REASONING, TEXT, Call
from lookahead.tools.server.reading import Prompt


class _OfChoices(Form):
    """Answers are choices, numbered. The last event of a choice has the usage, unless a later one has."""

    def _chunk(self, choices: list[dict]) -> dict:
        raise NotImplementedError

    def _told(self, choice: dict) -> str:
        chunk = self._chunk([choice])
        if self.asked.usage_always or (self.is_whole and not self.asked.usage_apart):
            chunk["usage"] = self.usage()
        elif self.asked.usage_apart:
            chunk["usage"] = None
        return event(chunk)

    def end(self) -> Iterator[str]:
        if self.asked.usage_apart:
            yield event(self._chunk([]) | {"usage": self.usage()})
        yield from super().end()


class Chat(_OfChoices):
    prefix = "chatcmpl-"

    def object(self) -> dict:
        choices = []
        for number, answer in enumerate(self.answers):
            message: dict[str, Any] = {"role": "assistant", "content": answer.text(), "refusal": None}
            if reasoning := answer.text(REASONING):
                message["reasoning_content"] = reasoning
            if answer.calls:
                message["tool_calls"] = [called(name, call) for name, call in answer.calls]
            choice = {"index": number, "message": message, "logprobs": None, "finish_reason": reason(answer)}
            if answer.likelihoods:
                choice["logprobs"] = probabilities(answer.likelihoods)
            choices.append(choice)
        return self._about("chat.completion") | {"choices": choices, "usage": self.usage()}

    def begin(self) -> Iterator[str]:
        for number in range(len(self.answers)):
            yield self._delta(number, {"role": "assistant", "content": ""})

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        answer = self.answers[number]
        if isinstance(piece, Words):
            named = {"content" if piece.kind == TEXT else "reasoning_content": piece.text}
            of_text = piece.likelihoods if piece.kind == TEXT else []
            more = {"logprobs": probabilities(of_text)} if of_text else {}
            yield self._delta(number, named, **more)
        elif isinstance(piece, Call):
            name, call = answer.parts[-1]
            yield self._delta(number, {"tool_calls": [{"index": len(answer.calls) - 1} | called(name, call)]})
        else:
            yield self._delta(number, {}, finish_reason=reason(answer))

    def _delta(self, number: int, delta: dict, **more: Any) -> str:
        return self._told({"index": number, "delta": delta, "finish_reason": None} | more)

    def _chunk(self, choices: list[dict]) -> dict:
        return self._about("chat.completion.chunk") | {"choices": choices}

    def _about(self, kind: str) -> dict:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}


class Completion(_OfChoices):
    prefix = "cmpl-"

    def __init__(self, asked: Asked, model: str, prompts: list[Prompt], count: int):
        super().__init__(asked, model, prompts, count)
        self._texts = [prompt.text for prompt in prompts for _ in range(count)]

    def object(self) -> dict:
        choices = []
        for number, answer in enumerate(self.answers):
            text = (self._texts[number] if self.asked.echoes else "") + answer.text()
            choice = {"text": text, "index": number, "logprobs": None, "finish_reason": reason(answer)}
            if answer.likelihoods:
                choice["logprobs"] = old_probabilities(answer.likelihoods)
            choices.append(choice)
        return self._chunk(choices) | {"usage": self.usage()}

    def begin(self) -> Iterator[str]:
        for number, text in enumerate(self._texts if self.asked.echoes else []):
            yield self._choice(number, text)

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        if isinstance(piece, Words):
            more = {"logprobs": old_probabilities(piece.likelihoods)} if piece.likelihoods else {}
            yield self._choice(number, piece.text, **more)
        elif isinstance(piece, End):
            yield self._choice(number, "", finish_reason=reason(self.answers[number]))

    def _choice(self, number: int, text: str, **more: Any) -> str:
        return self._told({"text": text, "index": number, "logprobs": None, "finish_reason": None} | more)

    def _chunk(self, choices: list[dict]) -> dict:
        about = {"id": self.name, "object": "text_completion", "created": self.created, "model": self.model}
        return about | {"choices": choices}


def reason(answer: Whole) -> str | None:
    """Return why an answer has ended, as OpenAI's clients read it."""
    if answer.end is None:
        return None
    return "tool_calls" if answer.calls and answer.end.reason == "stop" else answer.end.reason


def called(name: str, call: Call) -> dict:
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def probabilities(of: list[Likelihood]) -> dict:
    """Return probabilities as chat completions have them."""

    def one(of: Likelihood) -> dict:
        return {"token": of.token, "logprob": of.logprob, "bytes": list(of.bytes)}

    return {"content": [one(each) | {"top_logprobs": list(map(one, each.top_k))} for each in of]}


def old_probabilities(of: list[Likelihood]) -> dict:
    """Return probabilities as completions have them: with the likeliest tokens stands the written one, too. Of tokens
    with one text, the likeliest counts.
    """

    def text(of: Likelihood) -> str:
        if of.token.encode(errors="replace") == of.bytes:
            return of.token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in of.bytes)  # as OpenAI writes parts of a character

    return {
        "tokens": list(map(text, of)),
        "token_logprobs": [each.logprob for each in of],
        "top_logprobs": [{text(one): one.logprob for one in (each, *reversed(each.top_k))} for each in of],
        "text_offset": [each.offset for each in of],
    }
