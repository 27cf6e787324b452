"""One call of generate(): guess, lay out, run, verify, commit, learn, until all texts have ended."""

import time
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from lookahead import compat
from lookahead.decoding_pass import DecodingPass
from lookahead.engine.engine import Lookahead
from lookahead.engine.prefill import cache_passed_in, outlives_call, positions_in, prefill, prompts_of
from lookahead.engine.sampling import NextTokenRule, runs_code_of_users, walk
from lookahead.guessing.budget import Budget, average_length
from lookahead.guessing.combine import Combined, needs_of
from lookahead.guessing.pool import PoolAlone
from lookahead.guessing.source import Batch, Limits, Outcome
from lookahead.models.adapter import context_length, vocabulary_of
from lookahead.models.cache import LookaheadCache
from lookahead.models.state import state_of
from lookahead.passes.runner import Company, Output, Pass, looked_through
from lookahead.stats import DECILES, STAGES, Stats
from lookahead.step import MAX_DEPTH, Step, lay_out
from ngram_pool import GuessTree

if TYPE_CHECKING:
    from lookahead.engine.batch_draws import BatchDraws
    from lookahead.engine.callers_cache import CallersCache
    from lookahead.engine.recording import RecordingStreamer
    from lookahead.guessing.together import Together

ROOM = 4096  # most positions beyond the prompt that a cache allocates at once
# Tokens that a pass may compute again. If there are more, a step without guesses clears them: all its rows are
# accepted.
MAX_REPLAYED = 8
MIN_PROBABILITY = 0.002  # a less likely guess is not worth a row of the pass
# If states are restored, a rejection means computing accepted tokens again. So all of a chain must be likely.
MIN_PROBABILITY_WITH_STATE = 0.2

Decoding = Generator[Pass | None, Output, torch.Tensor | ModelOutput]
"""A running call. Yields each pass of a step and receives its output; yields None between passes of prefills."""


class Call:
    """One call of generate(), step by step. The last token of a text is the root of its next step."""

    def __init__(
        self,
        engine: Lookahead,
        model: PreTrainedModel,
        ids: torch.Tensor,
        generation: GenerationConfig,
        draft_model: PreTrainedModel | None,
        model_kwargs: dict,
        rules: list[NextTokenRule],
        draws: "BatchDraws | None",
        streamer: BaseStreamer | None,
        callbacks: Sequence[object],
    ):
        """rules: one for each sequence, or one for all. draws: what the rules draw from, if it must be finished.

        callbacks: called between passes.
        """
        self.stats = Stats(calls=1, sequences=len(ids))
        self._engine, self._rules, self._draws, self._streamer = engine, rules, draws, streamer
        self._cache_passed_in = theirs = cache_passed_in(model_kwargs)
        self._callers = _callers_cache(theirs, generation)
        self._width = ids.shape[1]
        self._new_tokens = generation.max_length - self._width
        self._generation = generation
        self._prompts = prompts_of(ids, generation, model_kwargs)
        self._texts = [prompt.text for prompt in self._prompts]
        sources = engine.sources
        if draft_model is not None:
            from lookahead.engine.assisted import sources_with  # other calls have no assistant model

            sources = sources_with(engine, draft_model)
        self._names = engine.ledger.names
        records = getattr(type(streamer), "records_steps", False)  # few calls need to import the class
        self._recorder: RecordingStreamer | None = streamer if records else None  # type: ignore[assignment]
        if self._recorder is not None:
            self._recorder.begin(self._names, self.stats)
        resting = engine.ledger.resting(self._new_tokens)
        needs = needs_of([source for i, source in enumerate(sources) if i not in resting])
        self._runner = engine.find_runner(model, needs)
        temperature = engine.temperature(generation)
        self._top_k = needs.top_k, temperature
        self._others_run = any(map(runs_code_of_users, (*callbacks, *sources)))  # between passes
        # What it may change, besides weights. Looking takes a millisecond.
        self._watched = state_of(model) if self._others_run else None
        pace = engine.find_pace(self._runner)
        self._budget = Budget(engine.max_guesses(len(ids), pace), pace, self._runner.is_ragged)
        self._source = Combined(sources, engine.ledger, self._budget, self.stats, resting)
        adapter = self._runner.adapter
        self._is_chain = not adapter.can_branch
        restores = adapter.has_state and not adapter.branches_states
        self._least = MIN_PROBABILITY_WITH_STATE if restores else MIN_PROBABILITY
        windows = engine.windows if adapter.can_branch else None
        self._trials = windows.trials if windows else None
        self._most_rows = 1 + self._budget.max_guesses + (windows.max_rows if windows else 0)  # of a sequence in a step
        self._batch = Batch(self._texts, temperature, vocabulary_of(model), engine.pool, pace is not None)
        self._asked: Together | PoolAlone  # in the current step
        self._rests = self._is_spoiled = self._is_changed = False
        self._company: Company | None = None  # of the last pass
        self._own_rows = 0  # in it
        self._length = 0  # of the texts before the current step, on average

    def decode(self) -> Decoding:
        """Return what generate() returns. First yields None; from then on it counts as a running call.

        A cache that was passed in and outlives the call ends as in plain decoding: with all of the text except the
        last token. If the call fails, the cache is unchanged.
        """
        with self._engine.call():
            yield None
            self._engine.last = self.stats
            try:
                ids = yield from self._write()
            finally:
                self._runner.end()
                self._source.end()
                self._budget.flush()
                self._engine.add(self.stats)
                if self._draws is not None:
                    self._draws.set_generator_after(max(rule.ids.shape[1] for rule in self._rules) - self._width)
            if self._streamer is not None:
                self._streamer.end()
            return self._result(ids)

    def _write(self) -> Generator[Pass | None, Output, torch.Tensor]:
        """Return the ids of all sequences, [sequences, longest]. Those that ended early are padded."""
        rules, callers = self._rules, self._callers
        try:
            yield from self._prefill(callers.adopt(self._runner.adapter, len(self._texts)) if callers else None)
            active = list(range(len(self._texts)))  # sequences that the cache holds
            while live := [number + sequence for number, rule in enumerate(rules) for sequence in rule.live]:
                if live != active:
                    if callers:
                        callers.collect({b: i for i, b in enumerate(active) if b not in live}, self._cache)
                    going_on = [active.index(b) for b in live]
                    self._cache.select(going_on)
                    self._source.select(going_on)
                    active = live
                yield from self._step(live)
            if self._budget.pace:
                self._budget.flush()
                self._budget.pace.costs.save()
            ids = _padded([rule.ids for rule in rules], self._generation)
            if callers:
                callers.collect({b: i for i, b in enumerate(active)}, self._cache)
                paddings = [prompt.padding for prompt in self._prompts]
                callers.fill(self._runner, self._starts, ids[:, self._width :], paddings)
            return ids
        except BaseException:
            if callers:
                callers.rewind()
            raise

    def _result(self, ids: torch.Tensor) -> torch.Tensor | ModelOutput:
        if not self._generation.return_dict_in_generate:
            return ids
        scores, logits = self._rules[0].scores, self._rules[0].logits  # if they are kept, one rule has all sequences
        return GenerateDecoderOnlyOutput(
            sequences=ids,  # type: ignore[arg-type]  # its fields are annotated as LongTensor and tuples of one tensor
            scores=scores,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            **{compat.CACHE: self._cache_passed_in},  # type: ignore[arg-type]
        )

    def _prefill(self, adopted: LookaheadCache | None) -> Generator[None]:
        """Compute the prompts and emit the first tokens."""
        began = time.perf_counter()
        self._source.start(self._batch)
        room = min(self._new_tokens, ROOM) + self._most_rows
        chunk_size = self._generation.prefill_chunk_size
        cache, logits = yield from prefill(self._runner, self._prompts, self._source, adopted, room, chunk_size)
        self._cache = self._runner.begin(cache)
        del cache  # its content may have been copied into buffers
        self._source.attach(self._runner.model, self._cache)
        self._starts = list(self._cache.lengths)
        # The last positions that plain decoding computes.
        most = context_length(self._runner.model) - 1
        self._last = [min(start + self._new_tokens - 2, most) for start in self._starts]
        rows = logits.split(len(self._rules[0].live))
        first = [token for rule, row in zip(self._rules, rows, strict=True) for token in rule.emit(row)]
        for text, token in zip(self._texts, first, strict=True):
            text.append(token)
        self.stats.tokens += len(first)
        self.stats.prefill_seconds += time.perf_counter() - began

    def _step(self, live: list[int]) -> Generator[Pass, Output]:
        """Guess, lay out, run, verify, commit, learn. live: sequences that have not ended."""
        if self._watched is not None and not self._watched.is_current(self._runner.model):
            self._leave_to_model()
        texts, last = [self._texts[b] for b in live], [self._last[b] for b in live]
        self.stats.steps += 1
        clock = time.perf_counter
        times = [clock()]
        limits, guessed = self._guess(texts, last)
        steps, chosen = self._lay_out(texts, limits, guessed)
        times.append(clock())
        output = yield Pass(self._runner, steps, self._cache, last, self._top_k, self._others_run)
        if not output.logits.is_cpu:
            output = looked_through(output)
        self._look_at(output, len(steps))
        times.append(clock())
        if self._is_spoiled:
            self._cache.commit(steps, [[] for _ in steps])
            self._add_times(times)
            return
        paths, emitted = walk(steps, output, self._rules)
        times.append(clock())
        self._cache.commit(steps, paths)
        times.append(clock())
        hidden, top_k, first = output.hidden_states, output.top_k, output.first
        outcome = Outcome(texts, steps, output.logits, paths, emitted, hidden, top_k, first)
        self._learn(outcome, chosen)
        times.append(clock())
        self._count(outcome, chosen, times)

    def _guess(self, texts: list[list[int]], last: list[int]) -> tuple[Limits, list[GuessTree]]:
        """Return all guesses for the next step, and their limits. last: as for `EagerRunner.run`."""
        budget, cache = self._budget, self._cache
        self._length = length = average_length(texts)
        self._rests = budget.rests
        depths = [0] * len(texts)
        if not (self._rests or self._is_spoiled or self._is_changed or len(cache.replay) > MAX_REPLAYED):
            for b, (stop, held) in enumerate(zip(last, cache.lengths, strict=True)):
                depths[b] = min(max(stop - held, 0), MAX_DEPTH)
        least = max(self._least, budget.least(len(texts), length)) if self._source.stands_alone else self._least
        rate = budget.pace.rate() if budget.pace else None
        draws = self._known_draws(depths) if self._generation.do_sample else []
        limits = Limits(depths, budget.limit(len(texts)), least, self._is_chain, rate, draws)
        windows, pool = self._source.windows, self._source.pool_alone
        if pool is not None and not (windows and (windows.size or (self._trials and self._trials.level))):
            self._asked = pool
            return limits, pool.propose(texts, limits)
        self._asked = self._source.together
        with DecodingPass(splits_attention=False, uses_kernels=self._runner.adapter.uses_kernels):
            return limits, self._asked.propose(texts, limits)

    def _lay_out(
        self, texts: list[list[int]], limits: Limits, guessed: list[GuessTree]
    ) -> tuple[list[Step], list[GuessTree]]:
        """Return a step for each sequence, and its guesses: those that pay."""
        windows = self._asked.look_ahead(limits)
        window_rows = max([sum(map(len, rows)) for rows in windows])
        others = self._company.rows - self._own_rows if self._company else 0  # as in the last pass
        chosen = self._budget.choose(guessed, self._length, window_rows, others)
        planned = zip(texts, chosen, windows, strict=True)
        return [lay_out(text[-1], tree, rows) for text, tree, rows in planned], chosen

    def _look_at(self, output: Output, sequences: int) -> None:
        """Note which calls shared the pass, and whether a guess has spoiled it, so that it must be repeated."""
        logits, self._company = output.logits, output.company
        self._own_rows = len(logits)
        # A guess that overflows also spoils rows that do not see it, for 0 x NaN is NaN. Repeat without guesses.
        can_be_spoiled = not self._is_spoiled and len(logits) > sequences
        has_nan = output.has_nan
        if can_be_spoiled and has_nan is None:
            has_nan = bool(logits.max().isnan())
        self._is_spoiled = can_be_spoiled and bool(has_nan)

    def _learn(self, outcome: Outcome, chosen: list[GuessTree]) -> None:
        """Pass the outcome to the sources, and count the tokens that the step gained."""
        self._asked.observe(outcome)
        paid, length = self._asked.paid_seconds, self._length
        self._budget.count(chosen, outcome, length, paid, self._rests, self._company)
        if self._trials and self._budget.pace:
            earned, cost = 0, 0.0
            if self._trials.level > 0:
                from lookahead.guessing.window import earned_and_paid  # most of the time, none is open

                earned, cost = earned_and_paid(self._budget, outcome, chosen, length)
            self._trials.count(earned, cost)

    def _count(self, outcome: Outcome, chosen: list[GuessTree], times: list[float]) -> None:
        """Add the emitted tokens to the texts, and the step to the statistics and to the costs of steps."""
        self._add_times(times)
        of_each = outcome.texts, outcome.emitted, outcome.steps, chosen, outcome.paths
        for text, tokens, step, tree, path in zip(*of_each, strict=True):
            if self._recorder is not None:
                self._recorder.record(len(text) - 1, step, tree, path, tokens)
            text += tokens
            _count_one(self.stats, step, tree, path, self._names)
        if self._budget.pace and not (self._rests or self._is_changed):
            length, in_pass, sequences = self._length, times[2] - times[1], len(outcome.steps)
            overhead = time.perf_counter() - times[0] - in_pass - self._asked.paid_seconds
            if (company := self._company) is not None:  # the time of other threads is no overhead of this call
                self._budget.time(company.rows, length, company.seconds, None, company.sequences)
            else:
                self._budget.time(len(outcome.logits), length, in_pass, max(overhead, 0.0), sequences)

    def _add_times(self, times: list[float]) -> None:
        """Add the times of the stages of a step. times: when each began, and when the last one ended."""
        for stage, (began, ended) in zip(STAGES, pairwise(times), strict=False):
            self.stats.seconds[stage] += ended - began  # type: ignore[assignment]  # of seconds

    def _leave_to_model(self) -> None:
        """Let the model's own code compute all further tokens one by one, because the tested model has changed."""
        self._is_changed, self._watched = True, None
        runner = self._runner
        self._runner, self._cache = runner.eager(self._cache)
        runner.end()

    def _known_draws(self, depths: list[int]) -> list[np.ndarray | None]:
        """Return the known draws of each live sequence, down to the depth of its guesses; [] if none are known."""
        live = [rule for rule in self._rules if rule.live]
        if len(live) < len(depths):  # sequences that go in step
            return []
        return [rule.known_draws(depth) for rule, depth in zip(live, depths, strict=True)]


def _callers_cache(theirs: Cache | None, generation: GenerationConfig) -> "CallersCache | None":
    """Return what represents generate()'s cache; None if that is empty and not used after the call."""
    outlives = outlives_call(theirs, generation)
    if theirs is None or not (outlives or positions_in(theirs)):
        return None
    from lookahead.engine.callers_cache import CallersCache  # other calls do not need it

    return CallersCache(theirs, outlives)


def _count_one(stats: Stats, step: Step, tree: GuessTree, path: list[int], names: Sequence[str]) -> None:
    """Count a step of one sequence. path: its accepted rows from 0, the root's, on; each emitted a token.

    names: the names to count accepted guesses under, by their number in ``tree.sources``.
    """
    stats.sequence_steps += 1
    stats.tokens += len(path)
    stats.guesses += step.guesses
    stats.window_tokens += len(step.ids) - 1 - step.guesses
    stats.accepted_per_step[len(path) - 1] += 1
    deciles = []
    for chance in tree.probabilities.tolist():  # there are few, and numpy would find cold caches
        deciles.append(decile := min(int(chance * DECILES), DECILES - 1))
        stats.deciles[decile, 0] += 1
        stats.deciles[decile, 1] += chance
    for row in path[1:]:
        stats.accepted[names[tree.sources[row - 1]]] += 1
        stats.deciles[deciles[row - 1], 2] += 1


def _padded(ids: list[torch.Tensor], generation: GenerationConfig) -> torch.Tensor:
    """Ids of all sequences, [sequences, longest]. Those that ended early are padded, as in plain decoding."""
    longest = max(group.shape[1] for group in ids)
    if all(group.shape[1] == longest for group in ids):
        return torch.cat(ids)
    pad = compat.pad_token(generation)
    return torch.cat([torch.nn.functional.pad(group, (0, longest - group.shape[1]), value=pad) for group in ids])
