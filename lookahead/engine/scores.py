"""The scores that transformers' processors make of a row of logits.

The usual processors are done here by numpy (`NewTokensProcessor` says why).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lookahead.engine.sampling import NewTokensProcessor, NextTokenRule

FOREVER = 2**62
HIDE = MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, SuppressTokensLogitsProcessor


class Change:
    """What a processor of transformers does to the scores of one text. Its settings are read each time, as it does."""

    def __init__(self, processor: LogitsProcessor):
        self.processor = processor

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> bool:
        """Change the scores of the next token, float32 [vocabulary], in place. rule: of the text, and only of it.

        Returns False, and changes nothing, if the processor must do it.
        """
        raise NotImplementedError


class Hide(Change):
    """Sets the scores of some tokens to -inf, in short texts."""

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> bool:
        processor, length = self.processor, FOREVER
        if isinstance(processor, SuppressTokensLogitsProcessor):
            tokens = processor.suppress_tokens
        else:
            tokens = processor.eos_token_id  # type: ignore[attr-defined]  # of both others
            if isinstance(processor, MinLengthLogitsProcessor):
                length = processor.min_length
            elif isinstance(processor, MinNewTokensLengthLogitsProcessor):
                length = processor.prompt_length_to_skip + processor.min_new_tokens
        if tokens.is_floating_point():  # also if there are none
            return False
        if rule.length < length:
            scores[_known(tokens.flatten().long().numpy(), scores)] = -np.inf
        return True


class Penalize(Change):
    """Divides the scores of the tokens that a text has by a penalty, or multiplies those that are negative."""

    def __init__(self, processor: LogitsProcessor):
        super().__init__(processor)
        self._ignored = self._until = 0
        self._seen = np.zeros(0, bool)  # by token, from position _ignored to _until
        self._knows_all = True  # whether these all have scores

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> bool:
        processor: Any = self.processor
        penalty, ignored = processor.penalty, _first_that_counts(processor)
        if ignored is None or not isinstance(penalty, float):
            return False
        if not len(self._seen) or ignored != self._ignored:
            self._seen, self._ignored, self._until = np.zeros(len(scores), bool), ignored, ignored
            self._knows_all = True
        if (begin := self._until) < rule.length:
            new = rule.new[begin - rule.width :] if begin >= rule.width else rule.ids[0, begin:].numpy()
            known = _known(tokens := np.asarray(new), scores)
            self._knows_all &= len(known) == len(tokens)  # otherwise it depends on the version what happens
            self._seen[known] = True
            self._until = rule.length
        if not self._knows_all:
            return False
        tokens, by = self._seen.nonzero()[0], np.float32(penalty)
        found = scores[tokens]
        with np.errstate(all="ignore"):
            scores[tokens] = np.where(found < 0, found * by, found / by)
        return True


def _first_that_counts(processor: Any) -> int | None:
    """The first position whose token a repetition penalty sees; None if it is no whole number."""
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor) and ignored.numel() == 1 and not ignored.is_floating_point():
        ignored = int(ignored)
    return 0 if ignored is None else ignored if isinstance(ignored, int) and ignored >= 0 else None


def _known(tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Those of the tokens that have a score."""
    return tokens[(tokens >= 0) & (tokens < len(scores))]


def changes(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor | Change]:
    """Return what does the same as these processors, one after the other, to the scores of a sequence on the CPU.

    processors: none keeps the scores that it returns.
    """
    return [_change_of(processor) for processor in processors]


def _change_of(processor: LogitsProcessor) -> LogitsProcessor | Change:
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return Penalize(processor)
    return Hide(processor) if type(processor) in HIDE else processor


def changed(row: torch.Tensor, rule: NextTokenRule, through: Sequence[LogitsProcessor | Change]) -> torch.Tensor:
    """Return the scores of the next token after all changes, float32 [1, vocabulary].

    row: logits, [vocabulary], which stay as they are.
    """
    scores = _in_float32(row.to("cpu"))[None]  # generate() moves it to its ids
    for change in through:
        if isinstance(change, Change):
            if not change.apply(scores.numpy()[0], rule):
                scores = change.processor(rule.ids, scores)
        elif isinstance(change, NewTokensProcessor):
            change.change(scores.numpy()[0], rule.new)
        else:
            scores = change(rule.ids, scores)
    return scores


def _in_float32(row: torch.Tensor) -> torch.Tensor:
    """Copy a row of logits."""
    if row.dtype == torch.bfloat16:  # the upper half of a float32, which numpy does not know
        wide = np.left_shift(row.view(torch.uint16).numpy(), 16, dtype=np.uint32)
        return torch.from_numpy(wide.view(np.float32))
    if row.dtype == torch.float32:
        return torch.from_numpy(row.numpy().copy())
    return row.to(torch.float32)
