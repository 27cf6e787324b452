"""The parts of an answer: reasoning, text, and calls of tools, as the model's response template tells them apart."""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lookahead.compat.parsing import unread

TEXT, REASONING = "text", "reasoning"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of it in response templates


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model has written. arguments: JSON of an object."""

    name: str
    arguments: str


Part = tuple[str, str] | Call  # TEXT or REASONING and a piece of it, or a call


def response_template(tokenizer: PreTrainedTokenizerBase, ends: Iterable[str]) -> dict | None:
    """Return the response template of a tokenizer, or one of the usual form that its chat template writes.

    ends: tokens that end an answer.
    None if the tokenizer has none, and its chat template knows neither reasoning nor calls in such a form: answers are
    then text.
    """
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return own
    writes = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    fields: dict[str, dict] = {}
    if "</think>" in writes:
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>", "content": "text"}
    if "<tool_call>" in writes and "<function=" in writes:
        fields["tool_calls"] = {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    elif "<tool_call>" in writes:
        fields["tool_calls"] = {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    anchor = _before_answers(tokenizer).partition("<think>")[0]
    if not fields or not anchor:
        return None
    fields["content"] = {"close": sorted(ends), "content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


def reasoning_marks(template: dict | None) -> tuple[str, str] | None:
    """Return what opens and what closes reasoning by a response template; None if that is not two texts."""
    fields = (template or {}).get("fields", {})
    marks = [(fields[name].get("open"), fields[name].get("close")) for name in REASONING_FIELDS if name in fields]
    return marks[0] if marks and all(isinstance(mark, str) and mark for mark in marks[0]) else None


def _before_answers(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes before an answer; "" if that cannot be told."""
    asked = [{"role": "user", "content": "x"}]
    try:
        without, whole = (
            str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=add))
            for add in (False, True)
        )
    except Exception:  # templates raise errors of many kinds
        return ""
    return whole[len(without) :] if whole.startswith(without) else ""


class Parser:
    """Parses an answer as it comes. What transformers' parser fails at is handed on as text.

    The parts are the same however the answer is cut into pieces.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special: Collection[str],
        template: dict,
        prompt: str,
        tools: list[Any] | None,
    ):
        """special: tokens that are not shown. prompt: what stands before the answer, for a chat template may have begun
        it.
        """
        any_special = "|".join(map(re.escape, special)) or r"(?!)"
        self._tokenizer, self._unseen = tokenizer, re.compile(any_special)
        self._units = re.compile(rf"{any_special}|\w+|.", re.DOTALL)
        self._parser: Any = tokenizer.get_response_parser(template, prefix=prompt, tools=tools)  # None: it has failed
        self._held = ""  # what no part has shown yet
        self._fed, self._read = 0, -len(unread(self._parser))  # characters, and those that its events have told of
        self.reasons = any(name in template.get("fields", {}) for name in REASONING_FIELDS)
        """Whether answers have reasoning."""
        self.reasoned: list[tuple[int, int]] = []
        """Where the reasoning of the parts so far stands in the text: begin and end. Whoever takes them clears it."""
        self.places: list[tuple[int, int]] = []
        """Where the texts of the parts so far stand: begin and end of each. Whoever takes the parts clears it."""
        self._may_fail = False  # whether a part has begun that is read when it ends
        self._calls = False  # whether a call has begun
        self._quoted = self._escaped = False  # whether a text of its JSON has, and whether a backslash came last in it
        calls = template.get("fields", {}).get("tool_calls", {})
        self._closing = str(calls.get("close"))[0] if calls.get("content") == "json" else None
        """The first character of the mark after a call."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that ``text`` continues or completes. It may hold special tokens."""
        # An error, or a call that cannot be read, takes all that was fed at once with it. So little is.
        return [part for unit in self._units.findall(text) for part in self._feed(unit)]

    def _feed(self, text: str) -> list[Part]:
        self._held += text
        self._fed += len(text)
        if self._parser is None:
            return self._as_text()
        try:
            events = self._parser.feed(self._without_mark(text))
        except Exception:  # parsers raise errors of many kinds
            return self._as_text()
        parts = self._parts(events, text)
        if self._parser is not None and not self._may_fail:
            self._held = unread(self._parser)
        return parts

    def _without_mark(self, unit: str) -> str:
        """Escape what might be the mark after a call, in a text of its JSON: transformers' parser looks for nothing
        else. The JSON means the same.
        """
        if not self._calls:
            self._quoted = self._escaped = False
        elif self._escaped:
            self._escaped = False
        elif self._quoted and unit == self._closing:
            return f"\\u{ord(unit):04x}"
        else:
            self._quoted ^= unit == '"'
            self._escaped = self._quoted and unit == "\\"
        return unit

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return what was held back. The text may end in the middle of a part.

        is_cut: whether its length has cut it. A call that it has cut is left out: in part it is neither a text for
        people nor a call to be made, even where its arguments so far can be read.
        """
        if self._parser is None:
            return []
        held = unread(self._parser)
        try:
            _, events = self._parser.finalize()
        except Exception:  # as above
            return [] if is_cut and self._calls else self._as_text()
        if is_cut:
            of_call = [event["type"] for event in events if event.get("field") == "tool_calls"]
            if not held or of_call != ["region_close"]:  # what was held is not the mark that closes it
                events = [event for event in events if event.get("field") != "tool_calls"]
            if any(token in held for token in getattr(self._tokenizer, "get_added_vocab", dict)()):
                # It is the beginning of a mark such as <tool_call><function=f>: no text has such a token.
                events = [event for event in events if event.get("text") != held]
        return self._parts(events, "")

    def _parts(self, events: list[dict], text: str) -> list[Part]:
        """text: what was fed last."""
        parts: list[Part] = []
        begin, self._read = self._read, self._fed - len(unread(self._parser))
        for number, event in enumerate(events):
            name, is_clean = event.get("field"), event["type"] == "region_chunk" and not event.get("dirty")
            self._calls = name == "tool_calls" and event["type"] != "region_close"
            if event["type"] == "region_close" and name == "tool_calls":
                if not _is_call(event.get("value")):
                    return parts + self._as_text()
                parts.append(_call(event["value"]["function"]))
            elif is_clean and (name in REASONING_FIELDS or name == "content"):
                shown = self._unseen.sub("", event["text"])
                at = self._read - len(event["text"]) if number else begin  # marks stand before and after it
                place = at, at + len(event["text"])
                if name != "content":
                    self.reasoned.append(place)
                if shown:
                    parts.append((TEXT if name == "content" else REASONING, shown))
                    self.places.append(place)
            if event["type"] == "region_close" and self._may_fail:
                self._held = text
            self._may_fail = event["type"] != "region_close" and not is_clean
        return parts

    def _as_text(self) -> list[Part]:
        place = self._fed - len(self._held), self._fed
        self._parser, text, self._held = None, self._unseen.sub("", self._held), ""
        self.places += [place] if text else []
        return [(TEXT, text)] if text else []


class Trim:
    """Leaves out the blanks around the reasoning and the text of an answer, which the marks around them leave.

    Those between two parts of a kind stay: clients join the parts.
    """

    def __init__(self, goes_on: bool = False) -> None:
        """goes_on: whether the prompt has begun the first part, which may then go on with a blank."""
        self._goes_on = goes_on
        self._begun = set[str]()  # kinds of which anything was shown
        self._blanks = dict[str, str]()  # those that are held back, of each kind
        self.blanks = ""
        """Those of the last kind: they may be the last ones."""
        self.begins = False
        """Whether the last text was the first of its kind: the blanks before it are left out."""

    def feed(self, kind: str, text: str) -> str:
        """Return what is certain of a text of this kind."""
        if self._goes_on:
            self._goes_on = False
            self._begun.add(kind)
        text = self._blanks.get(kind, "") + text
        self.begins = kind not in self._begun
        if self.begins:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks[kind] = self.blanks = text[len(shown) :]
        if shown:
            self._begun.add(kind)
        return shown


def _is_call(value: Any) -> bool:
    """Return whether this is a tool call of which an answer can be made."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    try:  # JSON has no NaN, and UTF-8 no half of a surrogate pair
        json.dumps([function["name"], arguments], ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return isinstance(arguments, dict)


def _call(function: dict) -> Call:
    arguments = function["arguments"]
    return Call(function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
