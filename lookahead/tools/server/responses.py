"""The form of responses: an answer is a list of items, each of which begins and ends in a stream."""

import time
from collections.abc import Iterator
from typing import Any

from lookahead.tools.server.answering import Piece, Words
from lookahead.tools.server.chats import probabilities
from lookahead.tools.server.forms import Form, event, new_name
from lookahead.tools.server.parsing import REASONING, TEXT, Call


class Response(Form):
    prefix = "resp_"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._items: list[dict] = []
        self._open: str | None = None  # kind of the last item, if it has not ended
        self._number = 0  # of the next event

    def object(self) -> dict:
        return self._response(self._status)

    def begin(self) -> Iterator[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def events(self, number: int, piece: Piece) -> Iterator[str]:
        if isinstance(piece, Words):
            if self._open != piece.kind:
                yield from self._close("completed")
                yield from self._begin_item(piece.kind)
            part = self._items[-1]["content"][0]
            part["text"] += piece.text
            if piece.kind == TEXT:
                logprobs = probabilities(piece.likelihoods)["content"]
                part["logprobs"] += logprobs
                yield self._of_item("response.output_text.delta", delta=piece.text, logprobs=logprobs)
            else:
                yield self._of_item("response.reasoning_text.delta", delta=piece.text)
        elif isinstance(piece, Call):
            yield from self._close("completed")
            name, call = self.answers[0].parts[-1]
            item = {"id": new_name("fc_"), "type": "function_call", "call_id": name, "name": call.name}
            self._items.append(item | {"arguments": "", "status": "in_progress"})
            yield self._item_event("added")
            yield self._of_item("response.function_call_arguments.delta", inside=False, delta=call.arguments)
            self._items[-1] |= {"arguments": call.arguments, "status": "completed"}
            more = {"arguments": call.arguments, "name": call.name}
            yield self._of_item("response.function_call_arguments.done", inside=False, **more)
            yield self._item_event("done")
        else:
            if self._open == REASONING:  # nothing has ended it
                yield from self._close(self._status)
            if self._open is None and not self.answers[0].calls:
                yield from self._begin_item(TEXT)
            yield from self._close(self._status)

    def end(self) -> Iterator[str]:
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def fail(self, message: str, status: int, param: str | None) -> Iterator[str]:
        error = {"code": "server_error" if status >= 500 else "invalid_prompt", "message": message}
        yield self._event("response.failed", response=self._response("failed") | {"error": error})

    @property
    def _status(self) -> str:
        end = self.answers[0].end
        return "incomplete" if end is not None and end.reason == "length" else "completed"

    def usage(self) -> dict:
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def _begin_item(self, kind: str) -> Iterator[str]:
        self._open = kind
        if kind == TEXT:
            item: dict[str, Any] = {"id": new_name("msg_"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_name("rs_"), "type": "reasoning", "summary": [], "content": []}
        self._items.append(item | {"status": "in_progress"})
        yield self._item_event("added")
        part = (
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if kind == TEXT
            else {"type": "reasoning_text", "text": ""}
        )
        self._items[-1]["content"] = [part]
        yield self._of_item("response.content_part.added", part=part)

    def _close(self, status: str) -> Iterator[str]:
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self._items[-1]
        (part,) = item["content"]
        if kind == TEXT:
            yield self._of_item("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        else:
            yield self._of_item("response.reasoning_text.done", text=part["text"])
        yield self._of_item("response.content_part.done", part=part)
        item["status"] = status
        yield self._item_event("done")

    def _item_event(self, what: str) -> str:
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=self._items[-1])

    def _of_item(self, kind: str, inside: bool = True, **more: Any) -> str:
        """inside: whether it is about a part of the item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **({"content_index": 0} if inside else {}), **more)

    def _event(self, kind: str, **more: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1} | more, kind)

    def _response(self, status: str) -> dict:
        response = {
            "id": self.name, "object": "response", "created_at": self.created, "model": self.model, "status": status,
            "output": self._items, "error": None, "instructions": None, "metadata": {}, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "temperature": None, "top_p": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        } | self.asked.told  # fmt: skip
        if status in ("completed", "incomplete"):
            response |= {"usage": self.usage(), "completed_at": int(time.time())}
        return response
