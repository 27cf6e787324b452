"""The scores that transformers' processors make of a row of logits."""

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

FOREVER = 2**62


class Hide:
    """Sets the scores of some tokens to -inf, in short texts. transformers' code compares the vocabulary with them."""

    def __init__(self, tokens: torch.Tensor, length: int = FOREVER):
        """tokens: integers. length: of the prompt and the text."""
        self._tokens, self._length = tokens.flatten().long().numpy(), length

    def hide(self, scores: torch.Tensor, length: int) -> None:
        """Hide the tokens in the scores after a prompt and text of this length. scores: on the CPU, [1, vocabulary]."""
        if length < self._length:
            tokens = self._tokens
            scores.numpy()[0, tokens[(tokens >= 0) & (tokens < scores.shape[1])]] = -np.inf


def changes(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor | Hide]:
    """Return what does the same as these processors, one after the other, to the scores of a sequence on the CPU.

    processors: of transformers. So none keeps the scores that it returns.
    """
    return [_hides(processor) or processor for processor in processors]


def _hides(processor: LogitsProcessor) -> Hide | None:
    length = FOREVER
    if type(processor) is MinLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.min_length
    elif type(processor) is MinNewTokensLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens
    elif type(processor) is SuppressTokensLogitsProcessor:
        tokens = processor.suppress_tokens
    else:
        return None
    return None if tokens.is_floating_point() else Hide(tokens, length)  # also if there are none


def changed(row: torch.Tensor, rule: NextTokenRule, through: Sequence[LogitsProcessor | Hide]) -> torch.Tensor:
    """Return the scores of the next token after all changes, float32 [1, vocabulary].

    row: logits, [vocabulary], which stay as they are.
    """
    scores = row[None].to("cpu", torch.float32, copy=True)  # generate() moves it to its ids
    for change in through:
        if isinstance(change, Hide):
            change.hide(scores, rule.length)
        else:
            scores = change(rule.ids, scores)
    return scores
