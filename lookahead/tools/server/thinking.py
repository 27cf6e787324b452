"""How long a model reasons: what a chat template is told, and the mark that ends reasoning which has taken too long."""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from lookahead.streaming import TextPieces


@dataclass(frozen=True)
class Marks:
    """What stands before and behind the reasoning in an answer, and whether the prompt ends with the first."""

    opens: str
    closes: str
    have_begun: bool


class LimitThinking(LogitsProcessor):
    """Ends the reasoning of an answer when it has a number of tokens: the mark that closes it is the only choice then.

    What the answer reasons later, behind marks of its own, counts, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: int, marks: Marks, most: int):
        """prompt: its tokens. most: tokens of reasoning, without marks."""
        self._texts = TextPieces(tokenizer, with_special=True)
        self._marks, self._left, self._length = marks, most, prompt
        self._thinks, self._text = marks.have_begun, ""
        self._closing: list[int] = tokenizer(marks.closes, add_special_tokens=False).input_ids
        self._forced = list[int]()  # what is left to write of the mark

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._length :].tolist():
            self._follow(token)
        if self._thinks and self._left <= 0 and not self._forced:
            self._forced = list(self._closing)
        if not self._forced:
            return scores
        only = torch.full_like(scores, -float("inf"))
        only[:, self._forced.pop(0)] = 0
        return only

    def _follow(self, token: int) -> None:
        self._length += 1
        self._text += self._texts.add([token])
        self._left -= self._thinks
        while True:
            _, mark, rest = self._text.partition(self._marks.closes if self._thinks else self._marks.opens)
            if not mark:
                return
            self._thinks, self._text, self._forced = not self._thinks, rest, []
