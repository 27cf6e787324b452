"""The form of Anthropic's messages: an answer is a list of blocks, each of which begins and ends in a stream."""

import json
from collections.abc import Iterator
from typing import Any

from lookahead.tools.server.answering import Piece, Words
from lookahead.tools.server.fields import NO_THREAD
from lookahead.tools.server.forms import Form, characters, event
from lookahead.tools.server.parsing import TEXT, Call

KINDS = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


class Message(Form):
    prefix = "msg_"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._blocks = 0
        self._open: str | None = None  # kind of the last block, if it has not ended

    @staticmethod
    def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict:
        kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        more = {"details": {"error_code": code, "unsupported": [param]}} if code == NO_THREAD else {}
        return {"type": "error", "error": {"type": kind, "message": characters(message)} | more}

    def object(self) -> dict:
        blocks = [block(kind, part) for kind, part in self.answers[0].parts]
        return self._message(blocks, self.usage()) | self._stop()

    def begin(self) -> Iterator[str]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield event({"type": "message_start", "message": self._message([], usage)}, "message_start")

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        if isinstance(piece, Words):
            if self._open != piece.kind:
                yield from self._close()
                yield self._begin_block(block(piece.kind, ""))
                self._open = piece.kind
            delta = "text_delta" if piece.kind == TEXT else "thinking_delta"
            yield self._delta({"type": delta, delta.partition("_")[0]: piece.text})
        elif isinstance(piece, Call):
            yield from self._close()
            name, call = self.answers[0].parts[-1]
            yield self._begin_block(block(name, call) | {"input": {}})
            self._open = "call"
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield from self._close()
        else:
            yield from self._close()

    def end(self) -> Iterator[str]:
        yield event({"type": "message_delta", "delta": self._stop(), "usage": self.usage()}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def fail(self, message: str, status: int, param: str | None) -> Iterator[str]:
        yield event(self.error(message, status, param), "error")

    def ping(self) -> str:
        return event({"type": "ping"}, "ping")

    def usage(self) -> dict:
        return {
            "input_tokens": self.prompt_tokens - self.cached,
            "output_tokens": self.tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning},
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
        }

    def _message(self, blocks: list[dict], usage: dict) -> dict:
        about = {"id": self.name, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        return about | {"stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self) -> dict:
        (answer,) = self.answers
        assert answer.end is not None
        stop = None
        if answer.end.reason == "length":
            reason = "max_tokens"
        elif answer.calls:
            reason = "tool_use"
        else:
            stop = answer.end.stop
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _begin_block(self, begun: dict) -> str:
        self._blocks += 1
        kind = "content_block_start"
        return event({"type": kind, "index": self._blocks - 1, "content_block": begun}, kind)

    def _delta(self, delta: dict) -> str:
        kind = "content_block_delta"
        return event({"type": kind, "index": self._blocks - 1, "delta": delta}, kind)

    def _close(self) -> Iterator[str]:
        kind, self._open = self._open, None
        if kind is not None:
            yield event({"type": "content_block_stop", "index": self._blocks - 1}, "content_block_stop")


def block(kind: str, part: str | Call) -> dict:
    """Return a block of an answer. kind: TEXT, REASONING, or the name of a call."""
    if isinstance(part, Call):
        return {"type": "tool_use", "id": kind, "name": part.name, "input": json.loads(part.arguments)}
    return {"type": "text", "text": part} if kind == TEXT else {"type": "thinking", "thinking": part, "signature": ""}
