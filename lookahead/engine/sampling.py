"""Verification: tokens are chosen as `generate` chooses them, and guess trees are walked as far as they have guessed.

A guess is a point distribution. So to draw a token by the ordinary rule, and to look for it in the tree, accepts it
with the same probability as rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, section 2.3).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    MaxLengthCriteria,
    logits_process,
    stopping_criteria,
)

from lookahead.compat import tokens_that_end_stop_strings
from lookahead.cpu import choice
from lookahead.cpu.choice import Warp
from lookahead.engine.draws import KNOWN_DRAWS, Race
from lookahead.models.origin import is_own
from lookahead.passes.runner import Output
from lookahead.step import Step

# Callbacks that treat each sequence of a batch independently of the others. Not every version of transformers has all.
_PROCESSORS = (
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
)  # fmt: skip
_WARPERS = {  # the field of Warp that each sets
    getattr(logits_process, f"{name}LogitsWarper", None): field
    for name, field in (("Temperature", "temperature"), ("TopK", "top_k"), ("TopP", "top_p"))
}
_CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria")
BY_SEQUENCE = {
    getattr(module, name)
    for module, names in ((logits_process, _PROCESSORS), (stopping_criteria, _CRITERIA))
    for name in names
    if hasattr(module, name)
}


def goes_by_sequence(callback: object) -> bool:
    """Whether a processor or criterion is of BY_SEQUENCE, and does what transformers says."""
    return type(callback) in BY_SEQUENCE and is_own(type(callback).__call__)  # type: ignore[operator]  # it is called


def for_sequence(processor: LogitsProcessor, b: int) -> LogitsProcessor:
    """A processor of BY_SEQUENCE, for sequence ``b`` of the batch alone."""
    ignored = getattr(processor, "prompt_ignore_length", None)  # a repetition penalty keeps each sequence's padding
    if isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[b : b + 1]  # type: ignore[attr-defined]  # `ignored` shows that it exists
    return processor


class NewTokensCriterion(StoppingCriteria):
    """A criterion that looks at the tokens of one text, without its prompt, so that no tensor need be made of them."""

    def ends(self, new: list[int]) -> bool:
        """Whether a text ends with the last of its tokens. It is asked after each of them; it must not change them."""
        raise NotImplementedError


class Ends(NamedTuple):
    """What ends a sequence of the usual case."""

    length: int
    """Of prompt and text."""
    tokens: frozenset[int]
    own: list[NewTokensCriterion]
    asked: list[tuple[frozenset[int], StoppingCriteria]]
    """Criteria that can end a sequence with these tokens alone, so that they are asked behind no others."""


@dataclass(frozen=True)
class Settings:
    """Settings of a call of generate() that all its rules share."""

    do_sample: bool
    pad_token: int | None = None
    """Fills the sequences that have ended, until all have. None without an end-of-sequence criterion: plain decoding
    does not pad then, and every sequence goes on with tokens of its own."""
    keep_scores: bool = False
    keep_logits: bool = False
    streamer: BaseStreamer | None = None


class NextTokenRule:
    """Chooses the next token of each of its sequences, as `GenerationMixin._sample` does, and says when to stop.

    The processors, the random generator, the stopping criteria and the streamer see exactly what plain decoding of the
    same sequences shows them: every emitted token once, in order, after the true prefix.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        settings: Settings,
        draws: Sequence[torch.Generator] | Race | None = None,
    ):
        """ids: int64 [sequences, n], the prompts.

        draws: what draws the tokens, or those of each sequence; default: torch's own generator, for all.
        """
        self._ids = ids
        self._width = ids.shape[1]
        self._new: list[int] = []  # in the usual case, the emitted tokens, of which `_ids` may lack the last ones
        self.scores: tuple[torch.Tensor, ...] | None = () if settings.keep_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if settings.keep_logits else None
        self._unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.live = list(range(len(ids)))
        """Sequences that go on: those that have not ended; all, until these end, if somebody may see all scores."""
        self._processors = processors
        self._criteria = criteria
        self._settings = settings
        self._race: Race | None = draws if isinstance(draws, Race) else None
        own = [draws.generator] if isinstance(draws, Race) else draws
        self._generators: Sequence[torch.Generator | None] = own or [None]
        keeps = settings.keep_scores or settings.keep_logits
        sees_all = keeps or not all(map(goes_by_sequence, processors))
        # A sequence that has ended goes on with padding, as in plain decoding, where somebody may see its scores.
        self._drops_ended = settings.pad_token is not None and not sees_all
        # In the usual case, a token depends on the logits alone, and nobody else sees them.
        warp = _warp_of(processors) if settings.do_sample else None if processors else Warp()
        ends = _ends(criteria)
        is_usual = len(ids) == 1 and not sees_all and all(map(_asks_for_tokens, criteria))
        self._usual = (warp, ends) if is_usual and warp is not None and ends is not None else None
        self.takes_argmax = self._usual is not None and not settings.do_sample
        """Whether the next token is the one with the largest logit, and nobody else looks at the logits."""

    @property
    def ids(self) -> torch.Tensor:
        """Prompts and emitted tokens, int64 [sequences, n]."""
        if missing := self._new[self._ids.shape[1] - self._width :]:
            # Of the prompt's ids, which may be narrower, and these, torch makes int64.
            self._ids = torch.cat([self._ids, torch.tensor([missing], device=self._ids.device)], dim=-1)
        return self._ids

    def known_draws(self, count: int) -> np.ndarray | None:
        """Return the exponential variates that will choose the next tokens, float32 [n, vocabulary], n <= ``count``.

        A token's chance is divided by its variate, and the largest quotient is chosen. None if they are not known:
        in greedy decoding, before the first token, for several sequences in step, and off the CPU.
        """
        return self._race.ahead(min(count, KNOWN_DRAWS)) if self._race and self._race.vocabulary else None

    def emit(self, logits: torch.Tensor, row: int | None = None) -> list[int]:
        """Choose, record and stream the next token of every live sequence; return the tokens in the order of `live`.

        logits: [live, vocabulary], of the model, after `ids`.
        row: for a single live sequence. Its logits are then this row of [..., vocabulary], counted over all dimensions
            but the last.
        Raises FloatingPointError if the logits leave no choice: where generate() samples, it raises, too; greedily it
        writes the first token whose logit is NaN.
        """
        if self._usual is not None and (token := self._choose(logits, row or 0, self._usual[0])) is not None:
            self.record(token)
            return [token]
        if row is not None:
            logits = logits.flatten(0, -2)[row : row + 1]
        raw = logits.to(dtype=torch.float32, device=self.ids.device, copy=True)
        raw = self._with_ended(raw)
        scores = raw
        for processor in self._processors:  # as LogitsProcessorList does, which also inspects every signature
            scores = processor(self.ids, scores)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        token = self._choose(scores, 0, Warp()) if len(scores) == 1 else None
        if token is not None:
            chosen, no_choice = scores.new_tensor([token], dtype=torch.long), scores.new_tensor([False])
        elif self._settings.do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            no_choice = probabilities[:, 0].isnan()  # one NaN in a row, or nothing but -inf, makes all of it NaN
            probabilities.masked_fill_(no_choice[:, None], 1.0)  # on a GPU, multinomial would end the process
            pairs = zip(probabilities.chunk(len(self._generators)), self._generators, strict=True)
            chosen = torch.cat([torch.multinomial(part, 1, generator=own) for part, own in pairs]).squeeze(1)
        else:
            chosen = torch.argmax(scores, dim=-1)
            # argmax ranks NaN highest. One that a processor made, perhaps in `raw`, is a choice like any other, as it
            # is to generate().
            no_choice = scores.gather(1, chosen[:, None])[:, 0].isnan()
            no_choice &= self._with_ended(logits.isnan().any(dim=-1).to(self.ids.device))
        if self._settings.pad_token is not None and len(self.ids) > 1:
            chosen = chosen.where(self._unfinished, self._settings.pad_token)
        self._ids = torch.cat([self._ids, chosen[:, None]], dim=-1)
        self._unfinished = self._unfinished & ~self._criteria(self.ids, self.scores)
        # A criterion may write another token into the ids. Plain decoding reads it there, and streams the chosen one.
        of_each = [chosen, self._ids[:, -1], self._unfinished.long(), no_choice.long()]
        tokens, written, unfinished, spoiled = torch.stack(of_each).tolist()
        if any(spoiled):
            raise FloatingPointError(self._no_choice())
        emitted = [written[sequence] for sequence in self.live]
        if self._usual is not None:
            self._new += emitted
        if self._drops_ended or not any(unfinished):
            self._keep([sequence for sequence in self.live if unfinished[sequence]])
        if self._settings.streamer is not None:
            self._settings.streamer.put(torch.tensor(tokens, device="cpu"))
        return emitted

    def _with_ended(self, rows: torch.Tensor) -> torch.Tensor:
        """Add rows of zeros for the sequences that have ended, in their places. rows: one for each live sequence."""
        if len(self.live) == len(self.ids):
            return rows
        live = torch.tensor(self.live, device=rows.device)
        return rows.new_zeros(len(self.ids), *rows.shape[1:]).index_copy_(0, live, rows)

    def _keep(self, live: list[int]) -> None:
        self.live = live
        if not live and self._race is not None:
            self._race.end()

    def record(self, token: int) -> None:
        """Record and stream the next token of the only sequence, in the usual case, where it was chosen otherwise."""
        assert self._usual is not None
        _, ends = self._usual
        self._new.append(token)
        is_over = token in ends.tokens or self._width + len(self._new) >= ends.length
        for criterion in ends.own:  # all of them, for they may note what they see
            is_over |= criterion.ends(self._new)
        for tokens, asked in ends.asked:
            is_over = is_over or (token in tokens and asked(self.ids, None))  # type: ignore[arg-type]  # no scores
        if is_over:
            self._keep([])
        if self._settings.streamer is not None:
            self._settings.streamer.put(torch.tensor([token], device="cpu"))

    def _choose(self, logits: torch.Tensor, row: int, warp: Warp) -> int | None:
        """Choose the next token of a single sequence in one call; None if that is left to torch."""
        if not (self._ids.is_cpu and choice.serves(logits)):
            return None
        if not self._settings.do_sample:
            return choice.argmax(logits, row)
        if self._race is None and choice.can_draw():
            self._race = Race(self._generators[0])
        return self._race.choose(logits, warp, row) if self._race else None

    def _no_choice(self) -> str:
        return (
            f"the scores of the token at position {self.ids.shape[1] - 1} are NaN, or all -inf: the model's weights or "
            "a logits processor are at fault, or the dtype is too narrow"
        )


def walk(
    steps: Sequence[Step], output: Output, rules: Sequence[NextTokenRule]
) -> tuple[list[list[int]], list[list[int]]]:
    """Emit tokens as long as the trees have guessed them, and the first token of each sequence that was not guessed.

    steps: of all live sequences, rule by rule. output: of their pass.
    Returns the path of each sequence (rows to commit, beginning with the root's 0), and its emitted tokens, one for
    each row of the path.
    """
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    for rule in rules:
        start, count = len(paths), len(rule.live)
        mine, first = steps[start : start + count], output.first[start : start + count]
        if count == 1:
            walked = _walk_one(rule, mine[0], output, first[0])
        else:
            walked = _walk_in_step(rule, mine, output.logits, first)
        paths += walked[0]
        tokens += walked[1]
    return paths, tokens


def _walk_one(rule: NextTokenRule, step: Step, output: Output, first: int) -> tuple[list[list[int]], list[list[int]]]:
    """`walk` for a rule of which one sequence is live. first: the root's row."""
    children, path, tokens = step.children(), [0], []
    argmax = output.argmax if rule.takes_argmax else None  # then it need not look at the logits
    while True:
        at = first + path[-1]
        token = argmax[at] if argmax else -1
        if token >= 0:
            rule.record(token)
        else:
            (token,) = rule.emit(output.logits, at)
        tokens.append(token)
        row = children.get((path[-1], token))
        if row is None or not rule.live:
            return [path], [tokens]
        path.append(row)


def _walk_in_step(
    rule: NextTokenRule, steps: Sequence[Step], logits: torch.Tensor, first: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """`walk` for a rule whose sequences all go as far as each of them has guessed. first: the rows of their roots."""
    children, index = [step.children() for step in steps], {sequence: i for i, sequence in enumerate(rule.live)}
    paths: list[list[int]] = [[0] for _ in steps]
    tokens: list[list[int]] = [[] for _ in steps]
    while rule.live:
        at = [index[sequence] for sequence in rule.live]
        for i, token in zip(at, rule.emit(logits[[first[i] + paths[i][-1] for i in at]]), strict=True):
            tokens[i].append(token)
        at = [index[sequence] for sequence in rule.live]
        rows = [children[i].get((paths[i][-1], tokens[i][-1]), -1) for i in at]
        if -1 in rows:
            break
        for i, row in zip(at, rows, strict=True):
            paths[i].append(row)
    return paths, tokens


def _warp_of(processors: LogitsProcessorList) -> Warp | None:
    """Return what these processors do together; None if there are others, or they stand in another order."""
    names = [_WARPERS.get(type(processor), "") for processor in processors]
    is_usual = names == [name for name in _WARPERS.values() if name in names]
    drops = all(getattr(processor, "filter_value", -math.inf) == -math.inf for processor in processors)
    keeps_one = all(getattr(processor, "min_tokens_to_keep", 1) == 1 for processor in processors)
    if not (is_usual and drops and keeps_one):
        return None
    warp = Warp(**{name: getattr(processor, name) for name, processor in zip(names, processors, strict=True)})
    return warp if warp.top_k <= choice.MAX_TOP_K else None


def _asks_for_tokens(criterion: StoppingCriteria) -> bool:
    """Whether it is known by which tokens this ends a text."""
    return isinstance(criterion, NewTokensCriterion) or goes_by_sequence(criterion)


def _ends(criteria: StoppingCriteriaList) -> Ends | None:
    """Return what ends a sequence; None if other criteria have a say."""
    ends = Ends(2**62, frozenset(), [], [])
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria and criterion.max_length <= (
            criterion.max_position_embeddings or 2**62
        ):
            ends = ends._replace(length=min(ends.length, criterion.max_length))
        elif type(criterion) is EosTokenCriteria:
            ends = ends._replace(tokens=ends.tokens | set(criterion.eos_token_id.tolist()))
        elif isinstance(criterion, NewTokensCriterion):
            ends.own.append(criterion)
        elif (tokens := tokens_that_end_stop_strings(criterion)) is not None:
            ends.asked.append((tokens, criterion))
        else:  # also a length that makes transformers warn
            return None
    return ends
