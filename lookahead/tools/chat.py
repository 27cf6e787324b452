"""A conversation whose history stays in the KV cache, and its loop on the command line."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.compat import CACHE
from lookahead.engine.recording import Recorder
from lookahead.models.adapter import context_length
from lookahead.models.passed_in import empty_cache
from lookahead.stats import Stats
from lookahead.streaming import StopWhenAsked, render, without_half_character
from lookahead.tools.audit import first_difference
from lookahead.tools.contention import Span, watch, why_no_ratio
from lookahead.tools.live import PlainDecoding, times_plain
from lookahead.tools.loading import check_tokens
from lookahead.tools.terminal import StepStreamer
from lookahead.tools.trace import trace_of

COMMAND = re.compile(r"/[a-z]+")
COMMANDS = """\
/system TEXT  instructs the model; without TEXT, removes the instructions
/reset        forgets the conversation, but not the instructions of /system
/stats        shows how fast the model writes, and how much of its context is in use
/trace FILE   writes a page that replays the last answer step by step; without FILE, trace.html
/help         lists these commands
/exit         leaves, as Ctrl-D does
Ctrl-C        stops an answer and keeps the part already written"""

# For models that only continue text, such as the packaged one: each message has its own lines.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if not message.content.endswith('\\n') %}{{ '\\n' }}{% endif %}{% endfor %}"
)
PLAIN_STOP = "\n\n\n"  # two blank lines, which end a definition in Python


class TurnRefusedError(ValueError):
    """A turn was refused, and the conversation is unchanged."""


class Conversation:
    """Messages, and a cache of the tokens that the model has read and written.

    Each turn renders all messages again, because templates may drop or change earlier ones. The cache keeps the prefix
    that it shares with the new rendering, and the model reads only the rest.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        """The tokenizer needs a chat template."""
        self.model = model
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        """Tokens of the last turn: the rendered messages, and the answer."""
        self.is_cut = False
        """Whether ``max_new_tokens`` ended the last answer."""
        self._cache: DynamicCache | None = None

    def answer(self, content: str, max_new_tokens: int, **options: Any) -> str:
        """Return the model's answer to ``content``, and add both to the messages.

        options: arguments of generate(). An incomplete character at the end of the answer is dropped.

        Raises TurnRefusedError if the context has no room, the template refuses the messages, or the turn is not UTF-8
        text. After any error, the messages are as they were before.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        _check_text(content)
        try:
            ids = render(self.tokenizer, messages)["input_ids"].to(self.model.device)
        except Exception as error:  # templates raise any error
            raise TurnRefusedError(f"the chat template cannot render this conversation: {error}") from error
        length, context = ids.shape[1], context_length(self.model)
        if length >= context:
            raise TurnRefusedError(
                f"the conversation would have {length} tokens, the model's context is {context}: /reset starts anew"
            )
        check_tokens(ids[0].tolist(), self.model, "this turn")
        cache = self._cache_for(ids[0].tolist())
        self._cache = None  # a pass that fails may leave more tokens in some layers than in others
        output = self.model.generate(  # type: ignore[operator]  # a method
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, context - length),
            **{"tokenizer": self.tokenizer, CACHE: cache, **options},
        )[0]
        self._cache, self.tokens = cache, output.tolist()
        # Clean-up would change the text, so that its tokens no longer match the cache in the next turn.
        text = self.tokenizer.decode(self.tokens[length:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = without_half_character(text)  # type: ignore[arg-type]  # one text
        self.is_cut = len(self.tokens) == length + max_new_tokens and not self._has_ended(
            text, options.get("stop_strings")
        )
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text

    def _has_ended(self, text: str, stop_strings: str | list[str] | None) -> bool:
        """Whether an answer ended by itself, with an end token or a stop string."""
        settings = self.model.generation_config
        ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        stops = stop_strings or settings.stop_strings or []
        return self.tokens[-1] in ends or any(stop in text for stop in ([stops] if isinstance(stops, str) else stops))

    def reset(self) -> None:
        """Forget all messages except the system's."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.tokens, self._cache, self.is_cut = [], None, False

    def instruct(self, content: str) -> None:
        """Set the system's message to ``content``; if that is empty, remove it.

        Raises TurnRefusedError if it is not UTF-8 text.
        """
        _check_text(content)
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": content}, *rest] if content else rest

    @property
    def is_full(self) -> bool:
        """Whether the last turn has filled the model's context."""
        return len(self.tokens) >= context_length(self.model)

    def _cache_for(self, ids: list[int]) -> DynamicCache | None:
        """Return a cache of the longest possible proper prefix of ``ids``; None to let generate() make a cache."""
        if self._cache is not None:
            held = self.tokens[: self._cache.get_seq_length()]
            shared = first_difference(held, ids[:-1])
            try:
                if shared is not None and shared < len(held):
                    self._cache.crop(shared - len(held))
                return self._cache
            except RuntimeError:  # recurrent layers, and sliding layers beyond their window, cannot be shortened
                pass
        return empty_cache(self.model)


@dataclass
class Throughput:
    """How fast the answers of a conversation came. Times begin at their first tokens, so prefills do not count."""

    tokens: int = 0
    seconds: float = 0.0
    span: Span = field(default_factory=Span)
    """All answers together, each from the beginning of its turn."""

    def add(self, record: Recorder, span: Span) -> None:
        """Add an answer."""
        if len(record.times) > 1:
            self.tokens += len(record.times) - 1
            self.seconds += record.times[-1] - record.times[0]
            self.span += span


def converse(
    conversation: Conversation,
    make_streamer: Callable[[], StepStreamer],
    stats: Stats | None,
    plain: PlainDecoding | None,
    **options: Any,
) -> None:
    """Answer each line of standard input. Ctrl-C stops an answer and keeps the part already written.

    make_streamer: returns the streamer that writes an answer.
    stats: the conversation's, updated by each answer; None if the model decodes plainly.
    plain: what /stats compares with; None: nothing.
    options: arguments of `Conversation.answer`.
    """
    if sys.stdin.isatty():
        click.echo("/help lists the commands, /exit or Ctrl-D leaves; Ctrl-C stops an answer", err=True)
    record, throughput = None, Throughput()  # of the last answer, and of all
    for line in _lines():
        command, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if not command:
            continue
        if command == "/exit":
            return
        if command == "/reset":
            conversation.reset()
            click.echo("the conversation starts anew", err=True)
        elif command == "/system":
            click.echo(_instruct(conversation, argument), err=True)
        elif command == "/stats":
            click.echo(in_plain_words(stats, len(conversation.tokens), context_length(conversation.model)))
            if plain is not None and throughput.tokens:
                with suppress(KeyboardInterrupt):  # while plain decoding is measured
                    click.echo(_compared(throughput, plain))
        elif command == "/trace":
            click.echo(_save_trace(record, conversation, Path(argument or "trace.html")), err=True)
        elif command == "/help":
            click.echo(COMMANDS, err=True)
        elif COMMAND.fullmatch(command):
            click.echo(f"no such command: {command}; /help lists them", err=True)
        else:
            record = _answer(conversation, line, make_streamer(), throughput, options) or record


def _check_text(content: str) -> None:
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise TurnRefusedError("this turn is not UTF-8 text") from error


def _instruct(conversation: Conversation, content: str) -> str:
    """Set the system's message, and return what the user is told."""
    try:
        conversation.instruct(content)
    except TurnRefusedError as error:
        return str(error)
    return "the model is instructed" if content else "the model has no instructions"


def in_plain_words(stats: Stats | None, held: int, context: int) -> str:
    """Return the text of /stats.

    stats: the conversation's; None if the model decodes plainly.
    held, context: tokens in use, and the model's context length.
    """
    if stats is None:
        lines = ["plain decoding: each pass through the model writes one token (a word or a part of one)"]
    elif not stats.tokens:
        lines = ["nothing has been written by lookahead yet"]
    else:
        passes = stats.calls + stats.steps
        lines = [
            f"{stats.tokens:,} tokens (words or parts of words) written in {passes:,} passes through the model: "
            f"{stats.tokens / passes:.1f} a pass on average"
        ]
    room = f" of {context:,}, {held / context:.0%}" if context < 2**62 else ""  # otherwise the model names no limit
    return "\n".join([*lines, f"tokens of context in use: {held:,}{room}"])


def _compared(throughput: Throughput, plain: PlainDecoding) -> str:
    """Compare the speed of the answers with plain decoding's, which is measured first if necessary."""
    ours, rate = throughput.tokens / throughput.seconds, plain.rate()
    ratio = times_plain(ours, throughput.span, rate)
    if why_no_ratio(throughput.span, rate.span):
        return ratio
    return f"{ratio}: {ours:.1f} tokens/s in the answers, {rate.per_second:.1f} by the model's own generate()"


def _save_trace(record: Recorder | None, conversation: Conversation, path: Path) -> str:
    """Write the trace of an answer, and return what the user is told. record: None: there is no answer."""
    if record is None:
        return "no answer to show yet: /trace shows the last one"
    if record.stats is None:
        return "plain decoding has no steps to show: start the chat without --strategy plain"
    try:
        trace_of(record, conversation.model, conversation.tokenizer).save(path)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        return f"cannot write {path}: {getattr(error, 'strerror', None) or error}; name another file: /trace FILE"
    return f"{len(record.tokens)} tokens in {1 + record.stats.steps} passes; open {path.resolve()} in a browser"


def _answer(
    conversation: Conversation, line: str, streamer: StepStreamer, throughput: Throughput, options: dict
) -> Recorder | None:
    """Answer a line, and add the answer to ``throughput``. Returns its record; None if there was no answer."""
    stop, record, span = StopWhenAsked(), Recorder(streamer), watch(conversation.model.device)
    try:
        with closing(streamer), _interrupted_by_ctrl_c(stop):
            conversation.answer(line, streamer=record, stopping_criteria=[stop], **options)
    except TurnRefusedError as error:
        click.echo(str(error), err=True)
    except KeyboardInterrupt:
        click.echo("\ninterrupted: this turn is forgotten", err=True)
    except (MemoryError, RuntimeError, ValueError) as error:
        if not sys.stdin.isatty():  # nobody is there who could go on
            raise
        click.echo(f"\ndecoding failed: {error or type(error).__name__}; this turn is forgotten", err=True)
    else:
        throughput.add(record, span())
        if stop.asked:
            click.echo("interrupted", err=True)
        if conversation.is_full:
            click.echo("the model's context is full: /reset starts anew", err=True)
        elif conversation.is_cut and not stop.asked:
            limit = options["max_new_tokens"]
            click.echo(f"the answer was cut off after {limit} tokens: --max-new-tokens raises the limit", err=True)
        return record
    return None


@contextmanager
def _interrupted_by_ctrl_c(stop: StopWhenAsked) -> Iterator[None]:
    """Let Ctrl-C end the answer between two passes, so that the cache stays intact. A second Ctrl-C does not wait."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input without line ends. A terminal shows a prompt and allows editing."""
    if not sys.stdin.isatty():
        # Bytes that are not UTF-8 become surrogates, so that only the turn that has them is refused.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # a TextIOWrapper
        for number, line in enumerate(sys.stdin):
            yield line.removeprefix("\ufeff" if number == 0 else "").rstrip("\n")  # as files.TEXT reads
        return
    with suppress(ImportError):  # missing on some platforms
        import readline  # noqa: F401  (adds editing and a history to `input`)
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D leaves", err=True)
