"""The decoding loop: guess, lay out, run, verify, commit, learn."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.utils import ModelOutput

from lookahead import compat
from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Lookahead
from lookahead.engine.fallback import why_plain
from lookahead.engine.planning import StepPlanner
from lookahead.engine.prefill import cache_passed_in, positions_in, prefill, prompts_of
from lookahead.engine.recording import Recorder
from lookahead.engine.sampling import BY_SEQUENCE, NextTokenRule, Settings, for_sequence
from lookahead.engine.verify import walk
from lookahead.guessing.bigrams import new_pool
from lookahead.guessing.budget import Budget
from lookahead.guessing.combine import Combined, needs_of
from lookahead.guessing.source import Batch, GuessSource, Outcome
from lookahead.models.adapter import UnsupportedModelError, context_length, vocabulary_of
from lookahead.models.cache import LookaheadCache
from lookahead.models.state import looked_at, state_of
from lookahead.passes.costs import synchronize
from lookahead.stats import Stats
from lookahead.step import MAX_DEPTH
from ngram_pool import NgramPool

ROOM = 4096  # positions beyond the prompt that a cache allocates at once, at most
# Tokens that a pass may compute again. If there are more, a step without guesses clears them: it is accepted whole.
MAX_REPLAYED = 8


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    pool: NgramPool | None = None,
    source: GuessSource | Sequence[GuessSource] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | ModelOutput:
    """Decode one call by lookahead: ``model.generate(**inputs, custom_generate=lookahead.decode)``.

    generate() prepares all arguments but three, which it passes on:
    lookahead_config: settings.
    pool: evidence to use and to add to; default: a new pool, as for `wrap`.
    source: one source of guesses, or several; default: the pool and its Jacobi window.
    transformers passes neither a streamer nor a tokenizer (for stop strings) to a custom_generate. `wrap` has both.

    Returns the same as generate(): int64 [sequences, n], or a GenerateDecoderOnlyOutput.
    Raises UnsupportedModelError for a model that lookahead cannot decode. Raises ValueError for beam search, which
    generate() does not do with a custom_generate.
    """
    if generation_config.num_beams > 1:
        raise ValueError(
            f"custom_generate=lookahead.decode does not search with beams (num_beams={generation_config.num_beams}): "
            "call generate() without it"
        )
    config = lookahead_config or LookaheadConfig()
    engine = Lookahead(config, pool if pool is not None else new_pool(model, config), source)
    return run(
        engine, compat.sampling_loop(model), model, input_ids, logits_processor, stopping_criteria, generation_config,
        **model_kwargs,
    )  # fmt: skip


def run(
    engine: Lookahead,
    plain: Callable,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    draft_model: PreTrainedModel | None = None,
    seeds: Sequence[int] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | ModelOutput:
    """Decode by lookahead; or by ``plain``, the model's own method of the same signature, with one warning.

    draft_model: one more source of guesses.
    seeds: a seed for each sequence. It is then sampled as it would be alone after ``torch.manual_seed(seed)``, whatever
        else is in the batch. No effect if the sequences go in step, or ``plain`` decodes.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("the prompt is empty: give at least one token, such as the tokenizer's bos_token_id")
    if len(input_ids) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    with engine.call():
        with looked_at(model):
            reason = _why_plain(engine, model, input_ids, generation_config, synced_gpus, model_kwargs)
            if reason is None:
                rules = _rules(input_ids, logits_processor, stopping_criteria, generation_config, streamer, seeds)
                engine.fit_pool(model)
                recorder = streamer if isinstance(streamer, Recorder) else None
                callbacks = [*logits_processor, *stopping_criteria, *filter(None, [streamer])]
                call = _Call(
                    engine, model, input_ids, generation_config, draft_model, model_kwargs, recorder, callbacks
                )
        if reason is not None:
            engine.decode_plainly(model, reason)
            return plain(
                model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
                **model_kwargs,
            )  # fmt: skip
        engine.last = call.stats
        try:
            ids = call.decode(rules)
        finally:
            engine.add(call.stats)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return ids
        scores, logits = rules[0].scores, rules[0].logits  # if they are kept, one rule has all sequences
        return GenerateDecoderOnlyOutput(
            sequences=ids,  # type: ignore[arg-type]  # its fields are annotated as LongTensor and tuples of one tensor
            scores=scores,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            **{compat.CACHE: call.cache_passed_in},  # type: ignore[arg-type]
        )


def _why_plain(
    engine: Lookahead,
    model: PreTrainedModel,
    ids: torch.Tensor,
    generation: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict,
) -> str | None:
    """Why lookahead does not decode this call, or None if it does. Raises UnsupportedModelError if it never could."""
    try:
        return why_plain(model, ids, generation, synced_gpus, model_kwargs, engine.config)
    except UnsupportedModelError as error:
        if engine.adapter is None:
            raise
        return f"a model that was changed after it was wrapped ({error})"


def _rules(
    ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation: GenerationConfig,
    streamer: BaseStreamer | None,
    seeds: Sequence[int] | None,
) -> list[NextTokenRule]:
    """One rule for each sequence, so that each goes at its own pace; or one rule for all, so that they go in step.

    Plain decoding goes in step. Callbacks that may look at the whole batch at once need that.
    seeds: as for `run`.
    """
    wants_dict = generation.return_dict_in_generate
    keeps = wants_dict and generation.output_scores, wants_dict and generation.output_logits
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    at_own_pace = (
        (len(ids) > 1 or seeds is not None)
        and not (any(keeps) or streamer is not None)
        and all(type(callback) in BY_SEQUENCE for callback in (*processors, *criteria))
        and (pads or all(type(criterion) is MaxLengthCriteria for criterion in criteria))
    )
    pad_token = compat.pad_token(generation) if pads else None
    settings = Settings(generation.do_sample, pad_token, *keeps, streamer)
    if not at_own_pace:
        return [NextTokenRule(ids, processors, criteria, settings)]
    own = [LogitsProcessorList(for_sequence(processor, b) for processor in processors) for b in range(len(ids))]
    # Each sequence has a generator, so that its draws do not depend on how far the others get in a step.
    generators: list[torch.Generator | None] = [None] * len(ids)
    if generation.do_sample:
        seeds = torch.randint(2**62, (len(ids),)).tolist() if seeds is None else seeds
        generators = [torch.Generator(ids.device).manual_seed(seed) for seed in seeds]
    return [NextTokenRule(ids[b : b + 1], own[b], criteria, settings, generators[b]) for b in range(len(ids))]


def _padded(ids: list[torch.Tensor], generation: GenerationConfig) -> torch.Tensor:
    """Ids of all sequences, [sequences, longest]. Those that ended early are padded, as in plain decoding."""
    longest = max(group.shape[1] for group in ids)
    if all(group.shape[1] == longest for group in ids):
        return torch.cat(ids)
    pad = compat.pad_token(generation)
    return torch.cat([torch.nn.functional.pad(group, (0, longest - group.shape[1]), value=pad) for group in ids])


def _runs_code_of_users(called: object) -> bool:
    """Whether a processor, criterion, streamer or source may do what neither we nor transformers have written."""
    if type(called) is Recorder and called.streamer is not None:
        return _runs_code_of_users(called.streamer)
    module = type(called).__module__
    is_known = type(called) in BY_SEQUENCE or isinstance(called, BaseStreamer)
    return not (module.startswith("lookahead.") or (is_known and module.startswith("transformers.")))


class _Call:
    """One call of generate(), step by step. The last token of a text is the root of its next step."""

    def __init__(
        self,
        engine: Lookahead,
        model: PreTrainedModel,
        ids: torch.Tensor,
        generation: GenerationConfig,
        draft_model: PreTrainedModel | None,
        model_kwargs: dict,
        recorder: Recorder | None,
        callbacks: Sequence[object],
    ):
        """callbacks: what the call's loop calls between passes."""
        self.stats = Stats(calls=1, sequences=len(ids))
        self.cache_passed_in = cache_passed_in(model_kwargs)
        self._width = ids.shape[1]
        self._new_tokens = generation.max_length - self._width
        self._generation = generation
        self._prompts = prompts_of(ids, generation, model_kwargs)
        self._texts = [prompt.text for prompt in self._prompts]
        sources = engine.sources_with(draft_model)
        self._names = engine.ledger.names
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(self._names, self.stats)
        resting = engine.ledger.resting(self._new_tokens)
        needs = needs_of([source for i, source in enumerate(sources) if i not in resting])
        self._runner = engine.find_runner(model, needs)
        temperature = engine.temperature(generation)
        self._runner.likeliest = needs.likeliest, temperature
        # What users' code may change between passes, besides weights. Looking takes a millisecond.
        self._watched = state_of(model) if any(map(_runs_code_of_users, (*callbacks, *sources))) else None
        self._pace = engine.find_pace(self._runner)
        self._budget = Budget(engine.max_guesses(len(ids), self._pace), self._pace, self.stats)
        self._source = Combined(sources, engine.ledger, self._budget, self.stats, resting)
        self._planner = StepPlanner(self._source, self._budget, engine.windows, self._runner.adapter)
        self._batch = Batch(self._texts, temperature, vocabulary_of(model), engine.pool, self._pace is not None)
        self._is_spoiled = self._is_changed = False

    def decode(self, rules: list[NextTokenRule]) -> torch.Tensor:
        """Return the ids of all sequences, [sequences, longest]. Those that ended early are padded.

        rules: one for each sequence, or one for all.
        A cache that was passed in and outlives the call ends as plain decoding leaves it: with all of the text but the
        last token. If the call fails, the cache holds what it held before.
        """
        theirs = self.cache_passed_in
        held = positions_in(theirs)
        taken_over = self._runner.adapter.take_over(theirs) if theirs is not None and held else None
        outlives = theirs if self._generation.return_dict_in_generate or compat.is_callers_own(theirs) else None
        ended: dict[int, LookaheadCache] = {}  # by sequence, for a cache that outlives the call
        try:
            self._prefill(rules, taken_over)
            active = list(range(len(self._texts)))  # sequences that the cache holds
            while live := [number + sequence for number, rule in enumerate(rules) for sequence in rule.live]:
                if live != active:
                    kept = [active.index(b) for b in live]
                    if outlives is not None:
                        ended |= {b: self._cache.sequence(i) for i, b in enumerate(active) if b not in live}
                    self._cache.select(kept)
                    self._planner.keep(kept)
                    active = live
                self._step(rules, live)
            self._budget.end()
            if self._pace:
                self._pace.costs.keep()
            ids = _padded([rule.ids for rule in rules], self._generation)
            if outlives is not None:
                ended |= {b: self._cache.sequence(i) for i, b in enumerate(active)}
                self._hand_over([ended[b] for b in range(len(self._texts))], ids, outlives)
            return ids
        except BaseException:
            if taken_over is not None:
                taken_over.rewind(held)
            raise
        finally:
            self._runner.end()
            self._source.end()
            self._budget.end()

    def _prefill(self, rules: list[NextTokenRule], taken_over: LookaheadCache | None) -> None:
        """Compute the prompts and emit the first tokens."""
        began = time.perf_counter()
        self._source.start(self._batch)
        room = min(self._new_tokens, ROOM) + self._planner.max_rows
        chunk_size = self._generation.prefill_chunk_size
        cache, logits = prefill(self._runner, self._prompts, self._source, taken_over, room, chunk_size)
        self._cache = self._runner.begin(cache)
        del cache  # its content may have been copied into buffers
        self._source.attach(self._runner.model, self._cache)
        self._begins = list(self._cache.lengths)
        # The last positions that plain decoding computes.
        most = context_length(self._runner.model) - 1
        self._last = [min(begin + self._new_tokens - 2, most) for begin in self._begins]
        rows = logits.split(len(rules[0].live))
        first = [token for rule, row in zip(rules, rows, strict=True) for token in rule.emit(row)]
        for text, token in zip(self._texts, first, strict=True):
            text.append(token)
        self.stats.tokens += len(first)
        self.stats.prefill_seconds += time.perf_counter() - began

    def _step(self, rules: list[NextTokenRule], live: list[int]) -> None:
        """Guess, lay out, run, verify, commit, learn. live: sequences that have not ended."""
        if self._watched is not None and not self._watched.is_current(self._runner.model):
            self._leave_to_model()
        stats, cache = self.stats, self._cache
        texts, last = [self._texts[b] for b in live], [self._last[b] for b in live]
        depths = [min(max(end - length, 0), MAX_DEPTH) for end, length in zip(last, cache.lengths, strict=True)]
        rests = self._budget.rests
        if self._is_spoiled or rests or self._is_changed or len(cache.replay) > MAX_REPLAYED:
            depths = [0] * len(live)
        stats.steps += 1
        began, before = time.perf_counter(), stats.seconds["forward"]
        with stats.time("guess"):
            steps, trees = self._planner.plan(texts, depths, self._known_draws(rules, depths))
        with stats.time("forward"):
            output = self._runner.run(steps, cache, last)
            logits = output.logits
            # A guess that overflows also spoils rows that do not see it, for 0 x NaN is NaN. Repeat without guesses.
            self._is_spoiled = not self._is_spoiled and logits.shape[1] > 1 and output.has_nan
            if not logits.is_cpu:
                synchronize(logits.device)  # where the line above has not waited already
        if self._is_spoiled:
            cache.commit(steps, [[] for _ in steps])
            return
        with stats.time("verify"):
            paths, emitted = walk(steps, logits, rules, output.likeliest)
        with stats.time("commit"):
            cache.commit(steps, paths)
        with stats.time("learn"):
            self._planner.learn(Outcome(texts, steps, logits, paths, emitted, output.hidden_states, output.likeliest))
        for text, tokens, step, tree, path in zip(texts, emitted, steps, trees, paths, strict=True):
            if self._recorder is not None:
                self._recorder.record(len(text) - 1, step, tree, path, tokens)
            text += tokens
            stats.count(step, tree, path, self._names)
        if self._pace and not (rests or self._is_changed):
            in_pass = stats.seconds["forward"] - before
            rows, length = logits.shape[0] * logits.shape[1], max(map(len, texts))
            overhead = time.perf_counter() - began - in_pass - self._source.paid_seconds
            self._budget.time(rows, length, in_pass, max(overhead, 0.0))

    def _leave_to_model(self) -> None:
        """Let the model's own code compute all further tokens one by one: it is no longer what was tried."""
        self._is_changed, self._watched = True, None
        runner = self._runner
        self._runner, self._cache = runner.eager(self._cache)
        runner.end()

    @staticmethod
    def _known_draws(rules: list[NextTokenRule], depths: list[int]) -> list[np.ndarray | None]:
        """Return the known draws of each live sequence, down to the depth of its guesses; [] if none are known."""
        live = [rule for rule in rules if rule.live]
        if len(live) < len(depths):  # sequences that go in step
            return []
        return [rule.known_draws(depth) for rule, depth in zip(live, depths, strict=True)]

    def _hand_over(self, caches: list[LookaheadCache], ids: torch.Tensor, theirs: Cache) -> None:
        """Move the content of the sequences' caches, each behind its padding, into the cache that was passed in."""
        for cache, begin, new in zip(caches, self._begins, ids[:, self._width :], strict=True):
            lacks = len(new) - 1 - (cache.lengths[0] - begin)  # the end of a text that ended early, and its padding
            if lacks:
                self._runner.read(new[None, -1 - lacks : -1], cache)
        paddings = [prompt.padding for prompt in self._prompts]
        whole = caches[0]
        if len(caches) > 1 or paddings[0]:
            whole = self._runner.adapter.make_cache()
            whole.stack(caches, paddings)
        self._runner.settle(whole)
        theirs.layers = whole.layers
