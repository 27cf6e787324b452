"""How long a model reasons: the mark that ends reasoning which has taken too long, and how many tokens it has."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from lookahead.sequences import NewTokensProcessor
from lookahead.streaming import TextPieces


@dataclass(frozen=True)
class Marks:
    """What stands before and after the reasoning in an answer, and whether the prompt ends with the first."""

    opens: str
    closes: str
    have_begun: bool


class LimitThinking(NewTokensProcessor):
    """Ends the reasoning of an answer when it has a number of tokens: the mark that closes it is the only choice then.

    What the answer reasons later, after marks of its own, counts, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: int, marks: Marks, most: int):
        """prompt: its tokens. most: tokens of reasoning, without marks."""
        super().__init__(prompt)
        self._texts = TextPieces(tokenizer, with_special=True)
        self._marks, self._left, self._followed = marks, most, 0  # tokens of the answer
        self._thinks, self._text = marks.have_begun, ""
        self._closing: list[int] = tokenizer(marks.closes, add_special_tokens=False).input_ids
        self._forced = list[int]()  # what is left to write of the mark

    def change(self, scores: np.ndarray, new: list[int]) -> None:
        for token in new[self._followed :]:
            self._follow(token)
        if self._thinks and self._left <= 0 and not self._forced:
            self._forced = list(self._closing)
        if self._forced:
            scores[:] = -np.inf
            scores[self._forced.pop(0)] = 0

    def _follow(self, token: int) -> None:
        self._followed += 1
        self._text += self._texts.add([token])
        self._left -= self._thinks
        while True:
            _, mark, rest = self._text.partition(self._marks.closes if self._thinks else self._marks.opens)
            if not mark:
                return
            self._thinks, self._text, self._forced = not self._thinks, rest, []


class ReasoningTokens:
    """Counts the tokens of an answer that its reasoning has characters of. Those of marks alone do not count."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._spans: deque[tuple[int, int]] = deque()  # characters of each token that may still count: begin and end
        self._length = 0  # of the text
        self._without_text = 0  # last tokens, which have the beginning of a character
        self.count = 0

    def see(self, text: str, token: int | None = None) -> None:
        """Note the next token, and the text that it has completed; without a token, the end of the text."""
        self._without_text += token is not None
        if not text:
            return
        end = between = self._length + len(text)
        own = "" if token is None or self._without_text < 2 else str(self._tokenizer.decode([token]))
        if own and len(own) < len(text) and text.endswith(own):  # the others have a text without this one
            between -= len(own)
            self._without_text -= 1
        self._spans += [(self._length, between)] * self._without_text
        if between < end:
            self._spans.append((between, end))
        self._length, self._without_text = end, 0

    def add(self, begin: int, end: int) -> None:
        """Count the tokens of some characters, which come after those of earlier calls."""
        while self._spans and self._spans[0][0] < end:
            self.count += self._spans.popleft()[1] > begin
