"""Verification: chooses tokens as `generate` does, and walks guess trees as far as they have guessed these.

A guess is a point distribution. So drawing a token by the ordinary rule and looking for it in the tree accepts it
with the same probability as rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, section 2.3).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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

from lookahead.cpu import choice
from lookahead.cpu.choice import Warp
from lookahead.cpu.top_k import MAX_COUNT
from lookahead.engine.draws import KNOWN_DRAWS, Race
from lookahead.models.origin import is_wholly_own
from lookahead.passes.runner import Output
from lookahead.step import Step

if TYPE_CHECKING:
    from lookahead.engine.scores import Change

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
    for name, field in (("Temperature", "temperature"), ("TopK", "top_k"), ("TopP", "top_p"), ("MinP", "min_p"))
}
_CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria")
BY_SEQUENCE = {
    getattr(module, name)
    for module, names in ((logits_process, _PROCESSORS), (stopping_criteria, _CRITERIA))
    for name in names
    if hasattr(module, name)
}


def goes_by_sequence(callback: object) -> bool:
    """Whether a processor or criterion is of BY_SEQUENCE and is transformers' own code, or sees one text by itself."""
    if isinstance(callback, NewTokensProcessor):
        return type(callback).__call__ is NewTokensProcessor.__call__
    return type(callback) in BY_SEQUENCE and is_wholly_own(type(callback).__call__)  # type: ignore[operator]  # called


def runs_code_of_users(called: Any) -> bool:
    """Whether a processor, criterion, streamer or source may run code that is neither ours nor transformers'."""
    records = getattr(type(called), "records_steps", False)
    if records and called.streamer is not None and runs_code_of_users(called.streamer):
        return True
    module = type(called).__module__
    is_known = goes_by_sequence(called) or isinstance(called, BaseStreamer)
    return not (module.startswith("lookahead.") or (is_known and module.startswith("transformers.")))


def _shows_to_users(streamer: Any) -> bool:
    """Whether a streamer may call code of a user, such as the function that a `PieceStreamer` hands its pieces to."""
    is_known = type(streamer).__module__.startswith(("transformers.", "lookahead.tools."))
    return not is_known or getattr(streamer, "streamer", None) is not None


def for_sequence(processor: LogitsProcessor, b: int, sequences: int) -> LogitsProcessor:
    """A processor of BY_SEQUENCE, for only sequence ``b`` of a batch of so many."""
    ignored = getattr(processor, "prompt_ignore_length", None)  # a repetition penalty keeps each sequence's padding
    if isinstance(ignored, torch.Tensor) and len(ignored) == sequences:  # of another length, it raises
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[b : b + 1]  # type: ignore[attr-defined]  # `ignored` shows it exists
    return processor


class NewTokensCriterion(StoppingCriteria):
    """A criterion for the tokens of one text, without its prompt, as a list instead of a tensor."""

    def ends(self, new: list[int]) -> bool:
        """Whether a text ends with the last of its tokens. It is called after each token, and must not change them."""
        raise NotImplementedError


class NewTokensProcessor(LogitsProcessor):
    """A processor for the scores of one text, which sees its tokens without the prompt, and computes without torch.

    torch computes with a vocabulary in several threads, and waits for one that has lost its core to another program.
    """

    def __init__(self, prompt: int):
        """prompt: its tokens, if `__call__` is used."""
        self._prompt, self._new = prompt, list[int]()

    def change(self, scores: np.ndarray, new: list[int]) -> None:
        """Change the scores of the next token, float32 [vocabulary], in place. It is called once before each token, and
        must not change ``new``."""
        raise NotImplementedError

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`change`, in the model's own decoding. Raises ValueError for several texts."""
        if len(scores) > 1:
            raise ValueError(f"{type(self).__name__} is for one text, not for {len(scores)}: submit each with its own")
        row = scores[0].to("cpu", torch.float32, copy=True)
        if input_ids.shape[1] < self._prompt + len(self._new):  # of another text
            self._new = []
        self._new += input_ids[0, self._prompt + len(self._new) :].tolist()
        self.change(row.numpy(), self._new)
        return row[None].to(scores.device)


class Ends(NamedTuple):
    """What ends a single sequence."""

    length: int
    """Of prompt and text."""
    tokens: frozenset[int]
    own: list[NewTokensCriterion]
    asked: list[tuple[frozenset[int], StoppingCriteria]]
    """Criteria that can end a sequence only with these tokens, so that they are called only after them."""


@dataclass(frozen=True)
class Settings:
    """Settings of a call of generate() that all its rules share."""

    do_sample: bool
    pad_token: int | None = None
    """Pads the sequences that have ended, until all have. None without an end-of-sequence criterion: plain decoding
    does not pad then, and every sequence continues with its own tokens."""
    keep_scores: bool = False
    keep_logits: bool = False
    streamer: BaseStreamer | None = None


class NextTokenRule:
    """Chooses the next token of each of its sequences, as `GenerationMixin._sample` does, and says when to stop.

    The processors, the random generator, the stopping criteria and the streamer see exactly the same as in plain
    decoding: every emitted token once, in order, after the true prefix.
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
        self.width = ids.shape[1]
        """Columns of the prompts."""
        self.new: list[int] = []
        """The emitted tokens of a single sequence, of which `_ids` may lack the last ones."""
        self.scores: tuple[torch.Tensor, ...] | None = () if settings.keep_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if settings.keep_logits else None
        self.unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self.live = list(range(len(ids)))
        """Sequences that continue: those that have not ended; if scores may be seen, all until the last has ended."""
        self.processors = processors
        self.criteria = criteria
        self.settings = settings
        self._race: Race | None = draws if isinstance(draws, Race) else None
        own = [draws.generator] if isinstance(draws, Race) else draws
        self.generators: Sequence[torch.Generator | None] = own or [None]
        keeps = settings.keep_scores or settings.keep_logits
        sees_all = keeps or not all(map(goes_by_sequence, processors))
        self.drops_ended = settings.pad_token is not None and not sees_all
        """Whether sequences leave when they have ended. If their scores may be seen, they continue with padding, as in
        plain decoding."""
        self._chooses = len(ids) == 1 and not sees_all and (ids.is_cpu or not processors)
        self.may_be_rewritten = not all(map(_asks_for_tokens, criteria))
        """Whether a criterion of a user sees the ids. It may write to them."""
        self._asks = self._chooses and not self.may_be_rewritten
        shows = settings.streamer is not None and _shows_to_users(settings.streamer)
        by_tokens = [x for x in (*processors, *criteria) if isinstance(x, (NewTokensProcessor, NewTokensCriterion))]
        self._is_watched = self._chooses and (shows or not self._asks or any(map(runs_code_of_users, by_tokens)))
        """Whether other code runs between tokens. It may set fields of processors and criteria."""
        self.shortcut = self._find_shortcut()
        """How a token of a single sequence is chosen without torch: what makes scores of its logits, and a warp. None
        if torch must choose it."""
        self.ends = self._read_ends()
        """What ends a single sequence; None if criteria must see the ids of each token."""
        self.takes_argmax = self.shortcut is not None and not (self.shortcut[0] or settings.do_sample)
        """Whether the next token is the argmax of the logits, and no other code sees them."""

    def _find_shortcut(self) -> "tuple[list[LogitsProcessor | Change], Warp] | None":
        return _choice_of(self.processors, self.settings.do_sample) if self._chooses else None

    def _read_ends(self) -> Ends | None:
        return _ends(self.criteria) if self._asks else None

    @property
    def length(self) -> int:
        """Of the prompt and the text of a single sequence."""
        return self.width + len(self.new)

    @property
    def ids(self) -> torch.Tensor:
        """Prompts and emitted tokens, int64 [sequences, n]."""
        if missing := self.new[self._ids.shape[1] - self.width :]:
            # Of the prompt's ids, which may be narrower, and these, torch makes int64.
            self._ids = torch.cat([self._ids, torch.tensor([missing], device=self._ids.device)], dim=-1)
        return self._ids

    def extend(self, chosen: torch.Tensor) -> None:
        """Add a token to each sequence. chosen: int64 [sequences]."""
        self._ids = torch.cat([self.ids, chosen[:, None]], dim=-1)

    def known_draws(self, count: int) -> np.ndarray | None:
        """Return the exponential variates that will choose the next tokens, float32 [n, vocabulary], n <= ``count``.

        The token with the largest probability / variate is chosen. None if the variates are unknown: in greedy
        decoding, before the first token, for several sequences that advance together, and off the CPU.
        """
        return self._race.ahead(min(count, KNOWN_DRAWS)) if self._race and self._race.vocabulary else None

    def emit(self, logits: torch.Tensor, row: int | None = None) -> list[int]:
        """Choose, record and stream the next token of every live sequence; return the tokens in the order of `live`.

        logits: [live, vocabulary], of the model, after `ids`.
        row: for a single live sequence. Its logits are then this row of [..., vocabulary], counted over all dimensions
            but the last.
        Raises RuntimeError, as generate() does, if a token is sampled and a score is NaN, or all are -inf.
        """
        scores = None
        if self._is_watched:
            self.shortcut = self._find_shortcut()
        if self.shortcut is not None:
            changes, warp = self.shortcut
            if changes:
                from lookahead.engine.scores import changed  # other texts have no such processors

                scores = changed(logits.flatten(0, -2)[row or 0], self, changes)
            token = self.choose(logits, row or 0, warp) if scores is None else self.choose(scores, 0, warp)
            if token is not None:
                return [self.record(token)]
        from lookahead.engine.torch_choice import emit  # most texts do not need it

        return emit(self, logits if row is None else logits.flatten(0, -2)[row : row + 1], scores)

    def select(self, live: list[int]) -> None:
        """Continue with only these sequences; the others have ended."""
        self.live = live
        if not live and self._race is not None:
            self._race.end()

    def record(self, token: int) -> int:
        """Record and stream the next token of a single sequence. Returns what then stands in the text."""
        if self._is_watched:
            self.ends = self._read_ends()
        if (ends := self.ends) is None:
            from lookahead.engine.torch_choice import record  # most texts do not need it

            return record(self, token)
        self.new.append(token)
        is_over = token in ends.tokens or self.width + len(self.new) >= ends.length
        for criterion in ends.own:  # all of them, for they may note what they see
            is_over |= criterion.ends(self.new)
        for tokens, asked in ends.asked:
            is_over = is_over or (token in tokens and asked(self.ids, None))  # type: ignore[arg-type]  # no scores
        if is_over:
            self.select([])
        if self.settings.streamer is not None:
            self.settings.streamer.put(torch.tensor([token], device="cpu"))
        return token

    def choose(self, logits: torch.Tensor, row: int, warp: Warp) -> int | None:
        """Choose the next token of a single sequence in one call; None if torch must choose it."""
        if not (self._ids.is_cpu and choice.serves(logits)):
            return None
        if not self.settings.do_sample:
            return choice.argmax(logits, row)
        if self._race is None and choice.can_draw():
            self._race = Race(self.generators[0])
        return self._race.choose(logits, warp, row) if self._race else None


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
        if not count:
            continue
        mine, first = steps[start : start + count], output.first[start : start + count]
        if count == 1:
            walked = _walk_one(rule, mine[0], output, first[0])
        else:
            from lookahead.engine.torch_choice import walk_in_step  # other sequences each go at their own pace

            walked = walk_in_step(rule, mine, output.logits, first)
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
            token = rule.record(token)
        else:
            (token,) = rule.emit(output.logits, at)
        tokens.append(token)
        row = children.get((path[-1], token))
        if row is None or not rule.live:
            return [path], [tokens]
        path.append(row)


def _warp_of(processors: Sequence[LogitsProcessor]) -> Warp | None:
    """Return what these processors do together; None if there are others, or if their order differs."""
    names = [_WARPERS.get(type(one), "") if goes_by_sequence(one) else "" for one in processors]
    is_usual = names == [name for name in _WARPERS.values() if name in names]
    drops = all(getattr(processor, "filter_value", -math.inf) == -math.inf for processor in processors)
    keeps_one = all(getattr(processor, "min_tokens_to_keep", 1) == 1 for processor in processors)
    if not (is_usual and drops and keeps_one):
        return None
    warp = Warp(**{name: getattr(processor, name) for name, processor in zip(names, processors, strict=True)})
    return warp if warp.top_k <= MAX_COUNT else None


def _choice_of(processors: LogitsProcessorList, draws: bool) -> "tuple[list[LogitsProcessor | Change], Warp]":
    """Return what makes scores of logits, as the first of these processors do, and a warp that stands for the rest.

    draws: whether tokens are drawn; otherwise the warp is that of all tokens.
    """
    first, warp = len(processors), Warp()
    for begin in range(len(processors) if draws else 0):
        if (found := _warp_of(processors[begin:])) is not None:
            first, warp = begin, found
            break
    if not first:
        return [], warp
    from lookahead.engine.scores import changes  # other texts have no such processors

    return changes(processors[:first]), warp


def whole(length: Any) -> int:
    """The number of tokens at which a text reaches a length. Callers may give any number, such as 1e3 or a tensor."""
    return math.ceil(min(max(length, 0), 2**62))


def _asks_for_tokens(criterion: StoppingCriteria) -> bool:
    """Whether it is known by which tokens this ends a text."""
    return isinstance(criterion, NewTokensCriterion) or goes_by_sequence(criterion)


def _ends(criteria: StoppingCriteriaList) -> Ends | None:
    """Return what ends a sequence; None if there are other criteria."""
    ends = Ends(2**62, frozenset(), [], [])
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria and criterion.max_length <= (
            criterion.max_position_embeddings or 2**62
        ):
            ends = ends._replace(length=min(ends.length, whole(criterion.max_length)))
        elif type(criterion) is EosTokenCriteria:
            ends = ends._replace(tokens=ends.tokens | set(criterion.eos_token_id.flatten().tolist()))
        elif isinstance(criterion, NewTokensCriterion):
            ends.own.append(criterion)
        else:
            from lookahead.compat.stop_strings import tokens_that_end_stop_strings  # other texts end without them

            tokens = tokens_that_end_stop_strings(criterion)
            if tokens is None:  # also a length that makes transformers warn
                return None
            ends.asked.append((tokens, criterion))
    return ends
