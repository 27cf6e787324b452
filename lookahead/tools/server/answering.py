"""From tokens to what a client is told: text, parts of an answer, stop strings, probabilities, and how it has ended."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lookahead.extending import Stats, Step
from lookahead.sequences import NewTokensProcessor, RecordingStreamer
from lookahead.streaming import (
    BYTE_TOKEN,
    CONTEXT,
    UNDECODED,
    StopWhenAsked,
    TextPieces,
    without_half_character,
)
from lookahead.tools.server.parsing import TEXT, Call, Parser, Part, Trim
from lookahead.tools.server.thinking import ReasoningTokens
from ngram_pool import GuessTree

BYTES = 4  # tokens that a character may take
SEEN = {*range(33, 127), *range(161, 173), *range(174, 256)}
# What byte-level tokenizers (GPT-2's and later ones) write for each byte, in order.
LETTERS = "".join(chr(b if b in SEEN else 256 + sum(other not in SEEN for other in range(b))) for b in range(256))


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and its log probability, before temperature and what else only sampling reads.

    token: what it adds to a text. bytes: those of the text, joined, are those of its tokens.
    top_k: the most probable tokens and theirs. offset: characters of the answer before it; a token in the middle of a
        character stands where that character begins.
    """

    token: str
    bytes: bytes
    logprob: float
    top_k: tuple["Likelihood", ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Words:
    """A piece of an answer. kind: TEXT or REASONING. likelihoods: of the tokens up to its last one, if asked for."""

    kind: str
    text: str
    likelihoods: list[Likelihood]
    tokens: int
    """Of the answer, up to here."""
    reasoning: int
    """Those of them that are reasoning."""


@dataclass(frozen=True)
class End:
    """An answer is whole.

    reason: "stop" or "length". stop: the stop string that has ended it.
    tokens, reasoning, cached: of the answer; those of them that are reasoning; and of its prompt, those that earlier
        requests had left.
    """

    reason: str
    stop: str | None
    tokens: int
    reasoning: int
    cached: int


Piece = Words | Call | End


class Stop(StopWhenAsked):
    """Ends a text when it is asked to, or when a stop string is written.

    transformers' own criterion also finds a stop string that begins in the prompt. If the prompt ends with a line break
    and two of them are the stop string, it would end an answer that begins with one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: int, stops: tuple[str, ...], generation: GenerationConfig
    ):
        super().__init__()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stops = stops
        self._ends = ends_of(generation)
        self._reach = CONTEXT + BYTES * max(map(len, stops), default=0)  # tokens among which a stop string ends
        self.has_ended = False
        """Whether the model or a stop string has ended the text."""
        self.found: str | None = None
        """The stop string that has."""

    def ask(self) -> None:
        """End the text with its next token."""
        self.asked = True

    def ends(self, new: list[int]) -> bool:
        if self._stops:
            text = str(self._tokenizer.decode(new[-self._reach :], skip_special_tokens=True))
            if len(new) > self._reach:  # these tokens may begin with the end of a character
                text = text.lstrip(UNDECODED)
            self.found = first_stop(without_half_character(text), self._stops)
        self.has_ended = self.found is not None or new[-1] in self._ends
        return self.found is not None or super().ends(new)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.new_tensor([self.ends(input_ids[0, self._prompt :].tolist())], dtype=torch.bool)


def ends_of(generation: GenerationConfig) -> set[int]:
    """Return the tokens that end a text."""
    ends = generation.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


class Pieces:
    """Cuts an answer off before the first stop string, which is left out.

    Text that may be the beginning of a stop string is held back until more is known, and so is half a character, which
    is left out where the answer ends.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._kind, self._held = TEXT, ""
        self.stop: str | None = None
        """The stop string that was found."""

    def feed(self, kind: str, text: str) -> list[tuple[str, str]]:
        """Return what is certain, with its kind."""
        certain = self.release() if kind != self._kind else []  # reasoning and answer are no text together
        if self.stop is not None:
            return certain
        self._kind, text = kind, self._held + text
        whole = without_half_character(text)
        self.stop = first_stop(whole, self._stops)
        if self.stop is not None:
            end = text.find(self.stop)
        else:
            end = min(len(text) - undecided(text, self._stops), len(whole))
        self._held = "" if self.stop is not None else text[end:]
        return [*certain, (kind, text[:end])] if end else certain

    def release(self) -> list[tuple[str, str]]:
        """Return what was held back: the text of this kind has ended."""
        held, self._held = without_half_character(self._held), ""
        return [(self._kind, held)] if held else []


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the stop string that begins first; the first of those that begin together; None if there is none."""
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


def undecided(text: str, stops: tuple[str, ...]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


class Writer(RecordingStreamer):
    """A streamer that hands an answer on, piece by piece. Tokens that one step has written make one piece.

    With probabilities, each token makes one, so that a piece has those of its own tokens, however many a step writes;
    and also where an answer ends with its first call, so that the tokens after it do not count.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: Parser | None,
        stops: tuple[str, ...],
        probabilities: "Probabilities | None",
        send: Callable[[Piece], None],
        one_call: Callable[[], None] | None = None,
        goes_on: bool = False,
        is_cut: Callable[[], bool] = lambda: False,
    ):
        """one_call: what ends the text, if an answer ends with its first call. goes_on: as for `Trim`.
        is_cut: whether its length has cut the text that has ended.
        """
        self.stats: Stats | None = None
        """Of the call; None until lookahead decodes it."""
        self.has_read: Callable[[], None] = lambda: None
        """Is called when the prompt is read, and the first token is written."""
        self._end_text, self._is_cut = one_call, is_cut
        self._texts = TextPieces(tokenizer, with_special=parser is not None)
        self._parser = parser
        self._reasoning = ReasoningTokens(tokenizer) if parser is not None and parser.reasons else None
        self._pieces, self._trim = Pieces(stops), Trim(goes_on)
        self._probabilities = probabilities
        self._send = send
        self._fed: deque[tuple[int, int]] = deque([(0, 0)])  # characters given to pieces, and tokens that wrote them
        self._taken = 0  # characters that pieces have given back
        self._new: list[int] = []
        self._length = 0  # characters of the text of all tokens
        self._places: deque[tuple[int, int, int]] = deque()  # tokens, and where the text stands that each has a part of
        self._without_text: list[int] = []  # tokens that have the beginning of a character
        self._told = 0  # where the last part has ended
        self._has_prompt = False
        self.count = 0
        """Tokens of the answer."""
        self.text, self.calls = "", list[Call]()
        """What was sent, without reasoning."""

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:  # generate() puts the prompt first
            self._has_prompt = True
            return
        is_first = not (self.count or self._new)
        self._new += value.flatten().tolist()
        if self.stats is None or not self.count:  # a step writes more, or the prompt has written the first
            self._write()
        if is_first:
            self.has_read()

    def begin(self, names: list[str], stats: Stats) -> None:
        self.stats = stats

    def record(self, length: int, step: Step, tree: GuessTree, path: list[int], emitted: list[int]) -> None:
        self._write()

    def flush(self) -> None:
        """Hand on what a step has written before it failed: how much that is must not depend on where steps begin."""
        self._write()

    def end(self) -> None:
        self._write()
        rest = self._texts.rest()
        if self._reasoning is not None:
            self._reasoning.see(rest)
        self._hand_over(rest)
        if self._parser is not None:
            self._parts(self._parser.finish(self._is_cut()))
        self._words(self._pieces.release())

    def finish(self, stop: Stop, cached: int) -> End:
        """Return how the answer has ended. A stop string in a mark or a call is in no text."""
        reason = "stop" if stop.has_ended or self._has_its_call else "length"
        return End(reason, self._pieces.stop or stop.found, self.count, self.reasoning, cached)

    @property
    def is_whole(self) -> bool:
        """Whether neither a stop string nor a call has cut what was sent."""
        return self._pieces.stop is None and not self._has_its_call

    @property
    def reasoning(self) -> int:
        """Tokens of reasoning."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def _has_its_call(self) -> bool:
        return self._end_text is not None and bool(self.calls)

    def _write(self) -> None:
        new, self._new = self._new, []
        if new and self._probabilities is not None:
            self._probabilities.see(new[-1:])
        size = len(new) if self._probabilities is None and self._end_text is None else 1
        for at in range(0, len(new), size or 1):
            if self._has_its_call:
                return
            self.count += size
            if self._probabilities is not None:
                self._probabilities.place(self._length)
            text = self._text(new[at : at + size])
            if self._probabilities is not None and self._parser is not None:
                self._place(text)
            self._length += len(text)
            self._hand_over(text)

    def _place(self, text: str) -> None:
        """Note where the text of the newest token stands."""
        self._without_text.append(self.count - 1)
        if text:
            end = self._length + len(text)
            self._places += [(token, self._length, end) for token in self._without_text]
            self._without_text.clear()

    def _leave_out(self, begin: int, end: int) -> int:
        """Leave out the tokens between the last part and this one: those of marks, and of calls.

        Return how many tokens there are up to the end of this part: further ones may be those of a mark.
        """
        while self._places and self._places[0][2] <= begin:
            token, begins, _ = self._places.popleft()
            if begins >= self._told and self._probabilities is not None:
                self._probabilities.leave_out(token)
        self._told = end
        return max((token + 1 for token, begins, _ in self._places if begins < end), default=self.count)

    def _text(self, tokens: list[int]) -> str:
        """Return the text that tokens complete."""
        if self._reasoning is None:
            return self._texts.add(tokens)
        text = ""
        for token in tokens:
            piece = self._texts.add([token])
            self._reasoning.see(piece, token)
            text += piece
        return text

    def _hand_over(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._feed(TEXT, text, self.count)
        else:
            self._parts(self._parser.feed(text))

    def _parts(self, parts: list[Part]) -> None:
        if self._reasoning is not None and self._parser is not None:
            for begin, end in self._parser.reasoned:
                self._reasoning.add(begin, end)
            self._parser.reasoned.clear()
        places = iter([] if self._parser is None else self._parser.places)
        for part in parts:
            self._part(part, self.count if isinstance(part, Call) else self._leave_out(*next(places)))
        if self._parser is not None:
            self._parser.places.clear()

    def _part(self, part: Part, count: int) -> None:
        """count: tokens up to its end."""
        if self._has_its_call:
            return
        if not isinstance(part, Call):
            self._feed(*part, count)
            return
        self._words(self._pieces.release())
        if self._pieces.stop is None:
            self.calls.append(part)
            self._send(part)
            if self._end_text is not None:
                self._end_text()

    def _feed(self, kind: str, text: str, count: int) -> None:
        self._fed.append((self._fed[-1][0] + len(text), count))
        self._words(self._pieces.feed(kind, text))

    def _words(self, pieces: Sequence[tuple[str, str]]) -> None:
        for kind, text in pieces:
            self._taken += len(text)
            if self._parser is not None and not (text := self._trim.feed(kind, text)):
                continue
            if kind == TEXT:
                self.text += text
            self._send(Words(kind, text, self._likelihoods(), self.count, self.reasoning))

    def _likelihoods(self) -> list[Likelihood]:
        """Return those of the tokens that have written what is sent: what is held back may never be."""
        while self._fed[0][0] < self._taken - len(self._trim.blanks):
            self._fed.popleft()
        if self._probabilities is None:
            return []
        told = self._probabilities.told(self._fed[0][1])
        return list(dropwhile(lambda one: not one.token.strip(), told)) if self._trim.begins else told


class Probabilities(NewTokensProcessor):
    """Notes how probable each token of an answer was.

    It comes after penalties, and before what enforces a format or the end of reasoning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: int, count: int):
        """count: of the likeliest tokens that are named with each."""
        super().__init__(prompt)
        self._tokenizer, self._count = tokenizer, count
        # Decoders drop the space before a first word, so each token is decoded after another one.
        self._before: list[int] = tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._length = len(str(tokenizer.decode(self._before)))
        self._row: np.ndarray | None = None  # of the token that comes next
        self._told: list[Likelihood] = []  # of all tokens
        self._offsets: list[int] = []
        self._shown = 0  # tokens of which it was returned
        self._left_out = set[int]()

    def change(self, scores: np.ndarray, new: list[int]) -> None:
        self.see(new[-1:])
        with np.errstate(all="ignore"):  # of scores that are NaN, or all -inf
            below = scores - scores.max()
            self._row = below - np.log(np.exp(below).sum())

    def see(self, last: list[int]) -> None:
        """Note the last token, if it has not been noted."""
        if self._row is None or not last:
            return
        row, self._row = self._row, None
        token, *top_k = (self._likelihood(one, row[one]) for one in (last[0], *_top_k(row, self._count)))
        self._told.append(replace(token, top_k=tuple(top_k)))

    def _likelihood(self, token: int, logprob: float) -> Likelihood:
        text = str(self._tokenizer.decode([*self._before, token]))[self._length :]
        own, written = text.encode(errors="replace"), str(self._tokenizer.convert_ids_to_tokens(token))
        if UNDECODED in text and BYTE_TOKEN.fullmatch(written):
            own = bytes.fromhex(written[3:5])
        elif UNDECODED in text and not set(written) - set(LETTERS):
            own = bytes(map(LETTERS.index, written))
        return Likelihood(text, own, max(float(logprob), -9999.0))  # JSON has no infinity

    def place(self, offset: int) -> None:
        """Note where the next token stands: how many characters come before it."""
        self._offsets.append(offset)

    def leave_out(self, token: int) -> None:
        """Have a token, by its number, returned by nothing: no part of its text is told."""
        self._left_out.add(token)

    def told(self, count: int) -> list[Likelihood]:
        """Return what was noted of the first ``count`` tokens of the answer, but for what was returned before."""
        first, self._shown = self._shown, max(self._shown, count)
        return [
            replace(self._told[token], offset=self._offsets[token])
            for token in range(first, min(count, len(self._told)))
            if token not in self._left_out
        ]


def _top_k(row: np.ndarray, count: int) -> list[int]:
    """Return the places of the ``count`` largest numbers, the largest first; of equals, the first. row: [n]."""
    if not count:
        return []
    candidates = np.flatnonzero(row >= np.partition(row, -count)[-count])
    return candidates[np.argsort(-row[candidates], kind="stable")[:count]].tolist()


class Penalties(NewTokensProcessor):
    """Takes ``presence`` from the logit of each token that an answer has, and ``frequency`` for each time."""

    def __init__(self, prompt: int, presence: float, frequency: float):
        super().__init__(prompt)
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._counts, self._counted = np.zeros(0, np.float32), 0  # of each token, in so many tokens

    def change(self, scores: np.ndarray, new: list[int]) -> None:
        if not len(self._counts):
            self._counts = np.zeros(len(scores), np.float32)
        for token in new[self._counted :]:
            if token < len(scores):
                self._counts[token] += 1
        self._counted = len(new)
        tokens = self._counts.nonzero()[0]
        scores[tokens] = scores[tokens] - self._presence - self._frequency * self._counts[tokens]
