"""Prompts: the tokens that the model reads of a request, with those that it has written in earlier turns."""

import hashlib
import inspect
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from threading import Lock
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.extending import can_be_cut, context_length, empty_cache
from lookahead.streaming import CONTEXT
from lookahead.tools.audit import first_difference
from lookahead.tools.server.answering import ends_of
from lookahead.tools.server.fields import Asked, RefusedError, Wishes
from lookahead.tools.server.parsing import Call, Parser, reasoning_marks, response_template
from lookahead.tools.server.prefixes import LEAST_SHARED
from lookahead.tools.server.thinking import Marks
from lookahead.vocabulary import special_tokens

if TYPE_CHECKING:
    from lookahead.tools.server.grammar import Grammars

MOST_WRITTEN = 2**24  # bytes of conversations
A_TOKEN, A_TEXT = 4, 512  # bytes that a token takes, and what stands around those of a conversation
LONG = 16  # characters for each token of the context, of which a text with more is read first
TELLING = 16  # characters of a message that stand in a prompt by no chance
MARK = "q7x"  # is in no template
CUT = 16  # tokens at the end of a text that another one may have where the text goes on


@dataclass(frozen=True)
class Prompt:
    """What the model reads before an answer.

    text: of the prompt of a completion.
    predicted: tokens of the text that the client expects.
    has_parts: whether answers have parts, which a `Parser` tells apart.
    goes_on: whether an answer goes on with a text that the prompt has begun.
    tools: that the model may call.
    ends: tokens of its beginnings that other prompts are likely to share, ascending, where caches cannot be cut back.
    marks: of reasoning, where answers have any. thought: its tokens, at most; None: as many as it likes.
    thinks: whether an answer may begin to reason; what a prompt has begun goes on.
    conversation: a chat's, if the answer is to be found again.
    """

    ids: list[int]
    predicted: list[int]
    text: str = ""
    has_parts: bool = False
    goes_on: bool = False
    tools: list[Any] | None = None
    ends: tuple[int, ...] = ()
    marks: Marks | None = None
    thought: int | None = None
    thinks: bool = True
    conversation: "Conversation | None" = None


@dataclass(frozen=True)
class Conversation:
    """digest: of the messages before an answer. rendered: of their text."""

    digest: bytes
    rendered: bytes

    def with_answer(self, text: str, calls: Sequence[Call]) -> bytes:
        """Return the digest of the messages with an answer, as clients send it back."""
        made = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls]
        message = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
        return next(digests([message], self.digest))


def size_of_text(ids: Sequence[int]) -> int:
    """Return the bytes that `Written` takes for a conversation of these tokens."""
    return A_TEXT + A_TOKEN * len(ids)


class Written:
    """What the model has read and written in earlier turns, by the digest of the conversation that clients send back.

    Chat templates do not write an answer as the model has: other blanks in calls, no reasoning, other tokens for the
    same text. So the tokens are kept. What was not used for longest goes first.
    """

    def __init__(self, most: int = MOST_WRITTEN):
        """most: bytes."""
        self._most = most
        self._texts: OrderedDict[bytes, tuple[array, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def keep(self, conversation: bytes, rendered: bytes, ids: list[int]) -> None:
        """Keep a prompt and its answer. rendered: digest of the prompt's text."""
        with self._lock:
            if conversation in self._texts:
                self._bytes -= size_of_text(self._texts.pop(conversation)[0])
            self._texts[conversation] = array("i", ids), rendered
            self._bytes += size_of_text(ids)
            while self._bytes > self._most:
                self._bytes -= size_of_text(self._texts.popitem(last=False)[1][0])

    def find(self, conversation: bytes) -> tuple[list[int], bytes] | None:
        """Return what `keep` was given."""
        with self._lock:
            if conversation not in self._texts:
                return None
            self._texts.move_to_end(conversation)
            ids, rendered = self._texts[conversation]
            return ids.tolist(), rendered


class Reader:
    """Reads prompts by a model's tokenizer and chat template. Only one thread may use it, for these are not shared."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, written: Written):
        self.tokenizer = tokenizer
        self._written = written
        self._end_tokens = ends_of(model.generation_config)  # type: ignore[arg-type]  # a model that generates has one
        self._special = special_tokens(tokenizer).values()
        self._ends = {str(tokenizer.decode([token])): token for token in sorted(self._end_tokens)}
        self._template = response_template(tokenizer, self._ends) if tokenizer.chat_template else None
        self._marks = reasoning_marks(self._template)
        cache = empty_cache(model)
        self._keeps_beginnings = cache is not None and not can_be_cut(cache)
        # Others, such as Mistral's own, write tokens without a text.
        self._context = context_length(model)
        self._writes_text = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template

    @property
    def reserved(self) -> set[str]:
        """Names that a request must not give a variable of a chat template: they are arguments."""
        of_templates = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
        of_its_own = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        return of_templates | of_its_own | {"messages", "conversations", "load_audio_from_video"}

    def read(self, asked: Asked, wishes: Wishes) -> list[Prompt]:
        """Return the prompts of a request. Raises RefusedError if they cannot be read, or if tools have no place."""
        try:
            predicted = self._encode(wishes.prediction[: LONG * self._context]) if wishes.prediction else []
            if asked.messages is None:
                return [self._plain(prompt, predicted) for prompt in asked.prompts]
            asked, most = self._told_how_to_think(asked, wishes.thought)
            prompt = self._chat(asked, asked.messages or [], predicted)
            thinks = asked.variables.get("enable_thinking", asked.thinks) is not False
            return [replace(prompt, marks=self._marks_after(prompt.ids), thought=most, thinks=thinks)]
        except RefusedError:
            raise
        except Exception as error:  # templates raise errors of many kinds
            raise RefusedError(f"the prompt cannot be read: {type(error).__name__}: {error}") from error

    def grammars(self, vocabulary: int) -> "Grammars":
        """Return what makes grammars for the answers of a model with so many logits."""
        from lookahead.tools.server.grammar import Grammars  # llguidance is loaded for those who ask for it

        return Grammars(self.tokenizer, self._template, vocabulary, self._end_tokens)

    def parser(self, prompt: Prompt) -> Parser | None:
        """Return what tells the parts of an answer apart; None if it is one text."""
        if not prompt.has_parts or self._template is None:
            return None
        return Parser(
            self.tokenizer, self._special, self._template, str(self.tokenizer.decode(prompt.ids)), prompt.tools
        )

    def _told_how_to_think(self, asked: Asked, most: int | None) -> tuple[Asked, int | None]:
        """Return the request with variables for the chat template, and the tokens of reasoning, at most.

        What no variable can say is said by the length of the reasoning, if that is none. Where neither the chat
        template nor the answers know of reasoning, there is none, whatever is asked for.
        """
        variables = dict[str, Any]()
        knows = {name for name in ("enable_thinking", "reasoning_effort") if self._takes(name)}
        if asked.thinks is not None and "enable_thinking" in knows:
            variables["enable_thinking"] = asked.thinks
        says_no = asked.thinks is False and "enable_thinking" in knows
        if asked.effort is not None and "reasoning_effort" in knows and not says_no:
            variables["reasoning_effort"] = asked.effort
        if asked.thinks is False and not knows and self._marks is not None:
            most = 0
        if most and knows and self._marks is None:
            raise RefusedError(
                "thinking must have no budget_tokens: the model may reason, but its answers do not mark where",
                "thinking",
            )
        return replace(asked, variables=variables | asked.variables), most

    def _takes(self, name: str) -> bool:
        """Whether the chat template has such a variable."""
        templates = self.tokenizer.chat_template
        return name in str(templates) or name in inspect.signature(self.tokenizer.apply_chat_template).parameters

    def _marks_after(self, prompt: list[int]) -> Marks | None:
        if self._marks is None:
            return None
        opens, closes = self._marks
        last = str(self.tokenizer.decode(prompt[-CONTEXT:]))
        return Marks(opens, closes, last.rstrip().endswith(opens))

    def _plain(self, prompt: str | list[int], predicted: list[int]) -> Prompt:
        if isinstance(prompt, str):
            self._check_length(prompt)
            return Prompt(self.tokenizer(prompt).input_ids, predicted, prompt)
        return Prompt(prompt, predicted, str(self.tokenizer.decode(prompt)))

    def _chat(self, asked: Asked, messages: list[dict], predicted: list[int]) -> Prompt:
        goes_on = asked.continues and bool(messages[-1]["content"].strip())
        if not self._writes_text:
            read: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=asked.tools,
                add_generation_prompt=not asked.continues,
                continue_final_message=asked.continues,
                return_dict=True,
                **asked.variables,
            )
            ids = read["input_ids"]
            return Prompt(ids, predicted, "", True, goes_on, asked.tools)
        how = not asked.continues, asked.continues
        try:
            rendered = self._render(asked, messages, asked.tools, *how)
        except Exception:  # it may want roles to alternate
            if len(turns := one_a_turn(messages)) == len(messages):
                raise
            messages = turns
            rendered = self._render(asked, messages, asked.tools, *how)
        self._check_that_all_is_read(asked, messages, rendered)
        if asked.tools and rendered == self._render(asked, messages, None, *how):
            raise RefusedError("tools must be left out, because the model's chat template knows none", "tools")
        *_, digest = known = list(digests(messages))
        conversation = None if asked.continues else Conversation(digest, _digest(rendered))
        ids = self._with_written(asked, messages, rendered, known) or self._encode(rendered)
        ends = self._shared(asked, messages, rendered, ids) if self._keeps_beginnings and not asked.continues else ()
        return Prompt(ids, predicted, "", True, goes_on, asked.tools, ends, conversation=conversation)

    def _check_that_all_is_read(self, asked: Asked, messages: list[dict], rendered: str) -> None:
        """Raise RefusedError for a message that the chat template passes over. rendered: what it makes of all.

        Those of the model may be: templates leave out reasoning, and words beside calls. So may a system message at the
        beginning: some write it before the last question alone, so that it is missing after the results of tools.
        """
        own = ("assistant", "system")
        of_others = [i for i, one in enumerate(messages) if one["role"] not in (own if i == 0 else own[:1])]
        texts = {i: messages[i]["content"].strip() for i in of_others}
        unseen = [i for i, text in texts.items() if text and (len(text) < TELLING or text not in rendered)]
        if not unseen:
            return
        marks = {i: f"{MARK}{i}{MARK}" for i in unseen}  # a template may write a text otherwise, such as in JSON
        marked = [one | {"content": one["content"] + marks.get(i, "")} for i, one in enumerate(messages)]
        try:
            with_marks = self._render(asked, marked, asked.tools, not asked.continues, asked.continues)
        except Exception:  # templates raise errors of many kinds
            return
        for i, mark in marks.items():
            if mark not in with_marks:
                raise RefusedError(
                    f"the model's chat template passes over a message of the role {messages[i]['role']!r}, which "
                    f"begins with {messages[i]['content']!r:.40}: give it another role or place, or leave it out"
                )

    def _shared(self, asked: Asked, messages: list[dict], rendered: str, ids: list[int]) -> tuple[int, ...]:
        """Return how many tokens another prompt shares, if its first question is another one, and if it goes on from
        another answer.
        """
        first = next((i for i, one in enumerate(messages) if one["role"] != "system"), 0)
        question = {"role": "user", "content": "b" if messages[first]["content"].startswith("a") else "a"}
        try:
            other = self._encode(self._render(asked, [*messages[:first], question], asked.tools))
            answered = self._render(
                asked, [*messages, {"role": "assistant", "content": "a"}], asked.tools, begins=False
            )
        except Exception:  # templates raise errors of many kinds
            return ()
        after = rendered[len(commonprefix([rendered, answered])) :]  # noqa: RUF071  (they are no paths)
        own = self._encode(after)
        last = len(ids) - max(len(own), 1)
        if ids[len(ids) - len(own) :] != own or last < 1:
            return ()
        system = first_difference(ids, other) or 0
        return (system, last) if LEAST_SHARED <= system < last else (last,)

    def _with_written(self, asked: Asked, messages: list[dict], rendered: str, known: list[bytes]) -> list[int] | None:
        """Return the tokens of a conversation, with those of the last answer in it that is kept; None if none is.

        Its text up to the end of that answer must be what the chat template made of it then. The tokens of the answer,
        and of what stands before it, take the place of that text.
        """
        for index in reversed(range(1, len(messages) - asked.continues)):
            if messages[index]["role"] != "assistant" or (found := self._written.find(known[index])) is None:
                continue
            ids, before = found
            prompt = self._render(asked, messages[:index], asked.tools)
            said_before = self._render(asked, messages[:index], asked.tools, begins=False)
            if _digest(prompt) != before or not (prompt.startswith(said_before) and rendered.startswith(said_before)):
                return None
            shared = len(commonprefix([prompt, rendered]))  # noqa: RUF071  (they are no paths)
            said = json.dumps(messages[index], ensure_ascii=False)
            ends = [(at, end) for end in self._ends if (at := rendered.find(end, shared)) >= 0]
            if not ends or any(end in prompt[len(said_before) :] or end in said for end in self._ends):
                return None
            at, end = min(ends)
            if ids[-1] in self._end_tokens:
                return ids + self._encode(rendered[at + len(end) :]) if ids[-1] == self._ends[end] else None
            return ids + self._encode(rendered[at:])
        return None

    def _render(
        self,
        asked: Asked,
        messages: list[dict],
        tools: list[Any] | None,
        begins: bool = True,
        continues: bool = False,
    ) -> str:
        """begins, continues: whether the model's next message follows, or the last one goes on."""
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=begins, continue_final_message=continues, tokenize=False,
                **asked.variables,
            )
        )  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _check_length(self, text: str) -> None:
        """Raise RefusedError for a text whose beginning alone is too long: a tokenizer takes 200 bytes a character."""
        begin = LONG * self._context
        if len(text) > begin and len(self.tokenizer(text[:begin]).input_ids) - CUT >= self._context:
            raise too_long(f"{self._context} or more", self._context)


def too_long(tokens: object, context: int) -> RefusedError:
    """Return the error of a prompt that has no token, or too many. Agents shorten a conversation by the words of it."""
    if not tokens:
        return RefusedError(f"the prompt is empty: give 1 to {context - 1} tokens")
    return RefusedError(
        f"prompt is too long: {tokens} tokens > {context - 1} maximum; this model's maximum context length is "
        f"{context} tokens, with at least one of the answer",
        code="context_length_exceeded",
    )


def one_a_turn(messages: list[dict]) -> list[dict]:
    """Return messages of which those of one role that follow each other are one. Results of tools stay apart."""
    turns: list[dict] = []
    for message in messages:
        if not turns or message["role"] != turns[-1]["role"] or message["role"] not in ("system", "user", "assistant"):
            turns.append(message)
            continue
        texts = [text for text in (turns[-1]["content"], message["content"]) if text]
        calls = [*turns[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
        turns[-1] = turns[-1] | {"content": "\n".join(texts)} | ({"tool_calls": calls} if calls else {})
    return turns


def digests(messages: list[dict], before: bytes = b"") -> Iterator[bytes]:
    """Yield a digest of each message and all before it. Blanks around a text, and names of calls, do not count.

    before: digest of earlier messages.
    """
    digest = before
    for message in messages:
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        said = [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]
        digest = hashlib.sha256(digest + json.dumps(said, sort_keys=True).encode()).digest()
        yield digest


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
