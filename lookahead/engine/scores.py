"""The scores that transformers' processors make of a row of logits.

The usual processors are done here by numpy (`NewTokensProcessor` says why).
"""

from collections.abc import Sequence

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


class Change:
    """What a processor does to the scores of one text."""

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> None:
        """Change the scores of the next token, float32 [vocabulary], in place. rule: of the text, and only of it."""
        raise NotImplementedError


class Hide(Change):
    """Sets the scores of some tokens to -inf, in short texts."""

    def __init__(self, tokens: torch.Tensor, length: int = FOREVER):
        """tokens: integers. length: of the prompt and the text."""
        self._tokens, self._length = tokens.flatten().long().numpy(), length

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> None:
        if rule.length < self._length:
            scores[_known(self._tokens, scores)] = -np.inf


class Penalize(Change):
    """Divides the scores of the tokens that a text has, or multiplies those that are negative."""

    def __init__(self, penalty: float, ignored: int = 0):
        """ignored: first tokens of the prompt that do not count."""
        self._penalty, self._seen = penalty, np.zeros(0, bool)  # by token, up to position _until
        self._until = ignored

    def apply(self, scores: np.ndarray, rule: NextTokenRule) -> None:
        if not len(self._seen):
            self._seen = np.zeros(len(scores), bool)
        if (begin := self._until) < rule.length:
            new = rule.new[begin - rule.width :] if begin >= rule.width else rule.ids[0, begin:].numpy()
            self._seen[_known(np.asarray(new), scores)] = True
            self._until = rule.length
        tokens = self._seen.nonzero()[0]
        found = scores[tokens]
        with np.errstate(all="ignore"):
            scores[tokens] = np.where(found < 0, found * self._penalty, found / self._penalty)


def _known(tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Those of the tokens that have a score."""
    return tokens[(tokens >= 0) & (tokens < len(scores))]


def changes(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor | Change]:
    """Return what does the same as these processors, one after the other, to the scores of a sequence on the CPU.

    processors: none keeps the scores that it returns.
    """
    return [_change_of(processor) or processor for processor in processors]


def _change_of(processor: LogitsProcessor) -> Change | None:
    length = FOREVER
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return _penalizes(processor)
    if type(processor) is MinLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.min_length
    elif type(processor) is MinNewTokensLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens
    elif type(processor) is SuppressTokensLogitsProcessor:
        tokens = processor.suppress_tokens
    else:
        return None
    return None if tokens.is_floating_point() else Hide(tokens, length)  # also if there are none


def _penalizes(processor: RepetitionPenaltyLogitsProcessor) -> Penalize | None:
    penalty, ignored = processor.penalty, getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor) and ignored.numel() == 1:
        ignored = int(ignored)
    if ignored is None:
        ignored = 0
    is_usual = isinstance(penalty, float) and isinstance(ignored, int) and ignored >= 0
    return Penalize(penalty, ignored) if is_usual else None


def changed(row: torch.Tensor, rule: NextTokenRule, through: Sequence[LogitsProcessor | Change]) -> torch.Tensor:
    """Return the scores of the next token after all changes, float32 [1, vocabulary].

    row: logits, [vocabulary], which stay as they are.
    """
    scores = _in_float32(row.to("cpu"))[None]  # generate() moves it to its ids
    for change in through:
        if isinstance(change, Change):
            change.apply(scores.numpy()[0], rule)
        elif isinstance(change, NewTokensProcessor):
            change.change(scores.numpy()[0], rule.new)
        else:
            scores = change(rule.ids, scores)
    return scores


def _in_float32(row: torch.Tensor) -> torch.Tensor:
    """Copy a row of logits."""
    if row.dtype != torch.bfloat16:
        return torch.from_numpy(row.numpy().astype(np.float32))
    wide = row.view(torch.uint16).numpy().astype(np.uint32)
    wide <<= 16  # numpy has no bfloat16, which is the upper half of a float32
    return torch.from_numpy(wide.view(np.float32))
