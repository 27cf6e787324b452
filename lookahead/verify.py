"""Verification: walk the guess tree by the rule that `generate` itself uses for the next token."""

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from lookahead.step import Step


class NextTokenRule:
    """Chooses tokens one by one as `GenerationMixin._sample` does for a batch of one, and says when to stop.

    The processors, the random generator, the stopping criteria and the streamer see every emitted token once, in
    order, on the true prefix: exactly what plain decoding shows them.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        keep_scores: bool = False,
        keep_logits: bool = False,
        streamer=None,
    ):
        """ids: int64 [1, n], the prompt."""
        self.ids = ids
        self.stopped = False
        self.scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keep_logits else None
        self._processors = processors
        self._criteria = criteria
        self._do_sample = do_sample
        self._streamer = streamer

    def emit(self, logits: torch.Tensor) -> int:
        """Choose, record and stream the next token, given the model's logits [vocabulary] after `ids`.

        Raises FloatingPointError if the logits leave no choice.
        """
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = raw
        for processor in self._processors:  # as LogitsProcessorList does, less its inspection of every signature
            scores = processor(self.ids, scores)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        if self._do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            if probabilities[0, 0].isnan():  # one NaN, or nothing but -inf, makes all of them NaN
                raise FloatingPointError(self._no_choice())
            chosen = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            chosen = torch.argmax(scores, dim=-1)
            if scores[0, chosen[0]].isnan():  # argmax ranks NaN highest
                raise FloatingPointError(self._no_choice())
        self.ids = torch.cat([self.ids, chosen[:, None]], dim=-1)
        self.stopped = bool(self._criteria(self.ids, self.scores).all())
        if self._streamer is not None:
            self._streamer.put(chosen.cpu())
        return chosen.item()

    def _no_choice(self) -> str:
        return (
            f"the scores of the token at position {self.ids.shape[1]} are NaN, or all -inf: the model's weights or a "
            "logits processor are at fault, or the dtype is too narrow"
        )


def walk(step: Step, logits: torch.Tensor, rule: NextTokenRule) -> tuple[list[int], list[int]]:
    """Emit tokens from the root on for as long as the tree guessed them, plus the one that it did not.

    logits: [T, vocabulary]. A guess is a point distribution, so drawing a token by the ordinary rule and looking for
    it in the tree accepts it with the probability that rejection sampling would (Leviathan et al. 2023, arXiv
    2211.17192, section 2.3).
    Returns the path (rows to commit, from the root's 0 on) and the emitted tokens, as many as the path has rows.
    """
    children = step.children()
    path, tokens = [0], []
    while True:
        token = rule.emit(logits[path[-1]])
        tokens.append(token)
        row = children.get((path[-1], token))
        if rule.stopped or row is None:
            return path, tokens
        path.append(row)
