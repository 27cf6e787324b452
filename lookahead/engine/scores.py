"""What processors make of the logits of a single sequence, before a warp (`choice.Warp`) stands for the others."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lookahead.engine.sampling import NextTokenRule
from lookahead.models.origin import is_own

FOREVER = 2**62


class Hide:
    """Hides tokens until a text has a length. transformers' code compares each token of the vocabulary with them."""

    def __init__(self, tokens: torch.Tensor, length: int = FOREVER):
        """tokens: int64 [n]. length: with the prompt."""
        self._tokens, self._length = tokens.flatten().numpy(), length

    def hide(self, scores: torch.Tensor, length: int) -> None:
        """Hide the tokens in the scores after a text of this length. scores: on the CPU, [1, vocabulary]."""
        if length < self._length:
            tokens = self._tokens
            scores.numpy()[0, tokens[(tokens >= 0) & (tokens < scores.shape[1])]] = -np.inf


def changes(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor | Hide]:
    """Return what does the same as these processors, one after the other, to the scores of a sequence on the CPU."""
    if not all(is_own(type(one).__call__) for one in processors):
        return list(processors)  # those of users may keep the scores that they return
    return [_hides(processor) or processor for processor in processors]


def _hides(processor: LogitsProcessor) -> Hide | None:
    if type(processor) is MinLengthLogitsProcessor:
        return Hide(processor.eos_token_id, processor.min_length)
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return Hide(processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens)
    if type(processor) is SuppressTokensLogitsProcessor:
        return Hide(processor.suppress_tokens.long())
    return None


def changed(row: torch.Tensor, rule: NextTokenRule, through: Sequence[LogitsProcessor | Hide]) -> torch.Tensor:
    """Return the scores of the next token after all changes, float32 [1, vocabulary].

    row: logits, [vocabulary], which stay as they are.
    """
    scores = row[None].to(torch.float32, copy=True)
    for change in through:
        if isinstance(change, Hide):
            change.hide(scores, rule.length)
        else:
            scores = change(rule.ids, scores)
    return scores
