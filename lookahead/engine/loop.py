"""The decoding loop: guess, lay out, run, verify, commit, learn, advance."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.utils import ModelOutput

from lookahead.config import AUTO, LookaheadConfig
from lookahead.cpu import native
from lookahead.engine.fallback import warn_plain, why_plain
from lookahead.engine.prefill import Prompt, cache_passed_in, compute, positions_in, prefill, prompts_of
from lookahead.engine.verify import BY_SEQUENCE, NextTokenRule, for_sequence, walk
from lookahead.guessing.budget import Pace, WindowTrials
from lookahead.guessing.strategies import JACOBI_SIZE, JacobiStrategy, PoolStrategy
from lookahead.models.adapter import Architecture, context_length
from lookahead.models.cache import LookaheadCache
from lookahead.passes.costs import step_costs, synchronize
from lookahead.passes.graphs import StepGraphs
from lookahead.passes.probe import inspect_model
from lookahead.stats import Stats
from ngram_pool import NgramPool
from ngram_pool.forks import Lock

GREEDY_TEMPERATURE = 0.5  # at which logits are learned where the next token is their argmax
ROOM = 4096  # positions beyond the prompt that a cache makes room for at once
MOST_REPLAYED = 8  # tokens computed again in a step; beyond, a step without guesses, which is accepted whole, ends it


@dataclass
class Lookahead:
    """What a wrapped model carries as ``model.lookahead``."""

    config: LookaheadConfig
    pool: NgramPool
    """Evidence, kept for the life of the wrap."""
    stats: Stats = field(default_factory=Stats)
    """All calls together."""
    last: Stats = field(default_factory=Stats)
    """The call that was begun last, in whatever thread, also while it runs."""
    pace: Pace | None = None
    """What budgets are chosen by, if they are."""
    trials: WindowTrials | None = None
    """The same of windows."""
    graphs: StepGraphs | None = None
    """CUDA graphs of the model, if they are asked for."""
    architecture: Architecture | None = None
    """How passes are made, as the last call found out."""
    lock: Lock = field(default_factory=Lock, repr=False)
    """Of all that calls in several threads write to here."""
    _running: int = 0  # calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way in this block."""
        with self.lock:
            self._running += 1
        try:
            yield
        finally:
            with self.lock:
                self._running -= 1

    @contextmanager
    def while_idle(self, what: str) -> Iterator[None]:
        """Keep calls from beginning in this block. Raises RuntimeError, saying ``what`` cannot be done, if one runs."""
        with self.lock:
            if self._running:
                raise RuntimeError(f"a model cannot be {what} while it decodes: wait until generate() has ended")
            yield

    def decode_plainly(self, model: PreTrainedModel, reason: str) -> None:
        """Say that the model's own decoding takes a call over, and why."""
        self.last = Stats(plain=reason)
        warn_plain(model, reason)

    def report(self) -> str:
        """How passes are made, by what the last call or the wrap found out, and what kept faster ways away."""
        if self.last.plain:
            return f"the model's own decoding: lookahead does not decode {self.last.plain}"
        way = self.architecture
        if way is None:
            return "nothing has been decoded yet"
        has_graphs = self.graphs is not None and self.graphs.why_not is None
        passes = "compiled" if way.is_compiled else "CUDA graphs" if has_graphs else "eager"
        attention = "in two parts" if way.two_part else "with a dense mask"
        missing = {name: native.why_missing(name) for name in native.KERNELS} if way.uses_kernels else {}
        served = [name for name, reason in missing.items() if reason is None]
        kernels = f"of our own on a CPU: {', '.join(served)}" if served else "torch's"
        lines = [
            f"passes: {passes}",
            f"attention: {way.config._attn_implementation}, {attention}",
            f"kernels: {kernels}",
            f"guesses: {'trees' if way.can_branch else 'single chains'}",
        ]
        reasons = list(way.given_up)
        reasons += [f"kernel {name}: {reason}" for name, reason in missing.items() if reason is not None]
        if self.graphs is not None and self.graphs.why_not is not None:
            reasons.append(f"CUDA graphs: {self.graphs.why_not}")
        lines += [f"given up: {reason}" for reason in reasons]
        for setting, gain in (("compile_passes", "compiled passes"), ("cpu_kernels", "kernels of our own on a CPU")):
            if not getattr(self.config, setting):
                lines.append(f"not asked for: {gain} ({setting}=True)")
        return "\n".join(lines)

    def __getstate__(self) -> dict:
        return vars(self) | {"_running": 0}


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    pool: NgramPool | None = None,
    **model_kwargs,
) -> torch.Tensor | ModelOutput:
    """Decode one call by lookahead: ``model.generate(**inputs, custom_generate=lookahead.decode)``.

    generate() prepares all arguments but two, which may be passed to it beside ``custom_generate``:
    lookahead_config: settings; the defaults if not given.
    pool: evidence to use and to add to; a fresh one if not given.
    transformers passes neither a streamer nor a tokenizer (for stop strings) to a custom_generate; `wrap` has both.

    Returns what generate() would: int64 [sequences, n], or a GenerateDecoderOnlyOutput.
    Raises UnsupportedModelError for a model that cannot be decoded so; ValueError for beam search, which generate()
    does not do where a custom_generate is given.
    """
    if generation_config.num_beams > 1:
        raise ValueError(
            f"custom_generate=lookahead.decode does not search with beams (num_beams={generation_config.num_beams}): "
            "call generate() without it"
        )
    config = lookahead_config or LookaheadConfig()
    engine = Lookahead(config, pool if pool is not None else NgramPool(config.pool_memory_mb))
    return run(
        engine, type(model)._sample, model, input_ids, logits_processor, stopping_criteria, generation_config,
        **model_kwargs,
    )  # fmt: skip


def run(
    engine: Lookahead,
    plain,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    **model_kwargs,
) -> torch.Tensor | ModelOutput:
    """Decode by lookahead, or by ``plain``, the model's own method of the same signature, with one warning why."""
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("the prompt is empty: give at least one token, such as the tokenizer's bos_token_id")
    if len(input_ids) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    with engine.call():
        reason = why_plain(model, input_ids, generation_config, synced_gpus, model_kwargs, engine.config)
        if reason is None:
            return _run(
                engine, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            )
        engine.decode_plainly(model, reason)
        return plain(
            model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
            **model_kwargs,
        )  # fmt: skip


def _run(
    engine: Lookahead,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer,
    model_kwargs: dict,
) -> torch.Tensor | ModelOutput:
    """A call that lookahead decodes."""
    wants_dict = generation_config.return_dict_in_generate
    keep = wants_dict and generation_config.output_scores, wants_dict and generation_config.output_logits
    rules = _rules(input_ids, logits_processor, stopping_criteria, generation_config, *keep, streamer)
    prompts = prompts_of(input_ids, generation_config, model_kwargs)
    theirs = cache_passed_in(model_kwargs)
    engine.last = stats = Stats(calls=1, sequences=len(input_ids))
    try:
        ids = _decode(model, engine, prompts, rules, stats, generation_config, theirs)
    finally:
        with engine.lock:
            engine.stats += stats
    if streamer is not None:
        streamer.end()
    if not wants_dict:
        return ids
    scores, logits = rules[0].scores, rules[0].logits  # where they are asked for, one rule emits all sequences
    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=logits, past_key_values=theirs)


def _rules(
    ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation: GenerationConfig,
    keep_scores: bool,
    keep_logits: bool,
    streamer,
) -> list[NextTokenRule]:
    """One rule for each sequence, which then goes at its own pace; or one for all of them, which then go in step.

    In step, as plain decoding goes, is what callbacks need that may look at the whole batch at once.
    """
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    at_own_pace = (
        len(ids) > 1
        and not (keep_scores or keep_logits or streamer is not None)
        and all(type(callback) in BY_SEQUENCE for callback in (*processors, *criteria))
        and (pads or all(type(criterion) is MaxLengthCriteria for criterion in criteria))
    )
    settings = {
        "do_sample": generation.do_sample,
        "pad_token": int(generation._pad_token_tensor) if pads else None,
        "keep_scores": keep_scores,
        "keep_logits": keep_logits,
        "streamer": streamer,
    }
    if not at_own_pace:
        return [NextTokenRule(ids, processors, criteria, **settings)]
    own = [LogitsProcessorList(for_sequence(processor, b) for processor in processors) for b in range(len(ids))]
    # A generator for each: what a sequence draws must not depend on how far the others get in a step.
    seeds = torch.randint(2**62, (len(ids),)).tolist() if generation.do_sample else []
    generators = [torch.Generator(ids.device).manual_seed(seed) for seed in seeds] or [None] * len(ids)
    return [
        NextTokenRule(ids[b : b + 1], own[b], criteria, generator=generators[b], **settings) for b in range(len(ids))
    ]


def _pad(ids: list[torch.Tensor], generation: GenerationConfig) -> torch.Tensor:
    """Ids of all sequences, [sequences, longest]; those that ended early are padded, as plain decoding does."""
    longest = max(group.shape[1] for group in ids)
    if all(group.shape[1] == longest for group in ids):
        return torch.cat(ids)
    pad = int(generation._pad_token_tensor)
    return torch.cat([torch.nn.functional.pad(group, (0, longest - group.shape[1]), value=pad) for group in ids])


def _strategy(
    model: PreTrainedModel, engine: Lookahead, architecture: Architecture, generation: GenerationConfig, stats: Stats
) -> PoolStrategy | JacobiStrategy:
    config = engine.config
    if config.strategy == "jacobi":
        return JacobiStrategy(JACOBI_SIZE if config.budget == AUTO else config.budget)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if engine.pool.largest_token >= vocabulary:
        raise ValueError(
            f"the pool holds token {engine.pool.largest_token}, the model knows {vocabulary} tokens: the pool was "
            "learned with another vocabulary; give one that was learned with this model's tokenizer"
        )
    temperature = (generation.temperature or 1.0) if generation.do_sample else GREEDY_TEMPERATURE
    pace = trials = None
    if config.goes_by_costs:
        costs = step_costs(model, architecture, replayed=config.cuda_graphs)
        fresh = Pace(costs)
        with engine.lock:
            if engine.pace is None or engine.pace.costs is not costs:
                engine.pace = fresh
            pace = engine.pace
    if config.window_size == AUTO:
        untried = WindowTrials(None if config.ngram_size == AUTO else config.ngram_size)
        with engine.lock:
            engine.trials = trials = engine.trials or untried
    return PoolStrategy(config, engine.pool, temperature, architecture, pace, trials, stats)


def _decode(
    model: PreTrainedModel,
    engine: Lookahead,
    prompts: list[Prompt],
    rules: list[NextTokenRule],
    stats: Stats,
    generation: GenerationConfig,
    theirs: Cache | None,
) -> torch.Tensor:
    """The loop. The last token of a text is the root of its next step.

    rules: one for each sequence, or one for all.
    theirs: the cache that was passed in. Where it outlives the call, it holds all of the text but the last token in the
    end, as plain decoding leaves it; if the call fails, what it held before.
    Returns the ids of all sequences (`_pad`).
    """
    config = engine.config
    architecture = engine.architecture = inspect_model(model, config.compile_passes, config.cpu_kernels)
    strategy = _strategy(model, engine, architecture, generation, stats)
    outlives = theirs is not None and (generation.return_dict_in_generate or getattr(theirs, "_is_user_defined", False))
    width = rules[0].ids.shape[1]
    new_tokens = generation.max_length - width
    room = min(new_tokens, ROOM) + strategy.largest_step
    held = positions_in(theirs)
    taken_over = architecture.take_over(theirs) if held else None
    cache = None
    with engine.lock:
        if config.cuda_graphs and engine.graphs is None:
            engine.graphs = StepGraphs(model)
    try:
        start = time.perf_counter()
        cache, logits = prefill(model, architecture, prompts, taken_over, room, generation.prefill_chunk_size, strategy)
        if engine.graphs is not None:
            cache = engine.graphs.lend(cache)
        begins = list(cache.lengths)
        # Plain decoding computes no positions beyond these.
        last = [min(begin + new_tokens - 2, context_length(model) - 1) for begin in begins]
        texts = [prompt.text for prompt in prompts]
        strategy.start(texts)
        rows = logits.split(len(rules[0].live))
        first = [token for rule, row in zip(rules, rows, strict=True) for token in rule.emit(row)]
        for text, token in zip(texts, first, strict=True):
            text.append(token)
        stats.tokens += len(first)
        stats.prefill_seconds += time.perf_counter() - start

        active = list(range(len(texts)))  # sequences that cache and strategy hold
        ended: dict[int, LookaheadCache] = {}
        spoiled = False
        while live := [number + sequence for number, rule in enumerate(rules) for sequence in rule.live]:
            if live != active:
                kept = [active.index(sequence) for sequence in live]
                if outlives:
                    ended |= {b: cache.sequence(i) for i, b in enumerate(active) if b not in live}
                cache.select(kept)
                strategy.select(kept)
                active = live
            contexts = [texts[b] for b in live]
            longest = [max(last[b] - length, 0) for b, length in zip(live, cache.lengths, strict=True)]
            if spoiled or len(cache.replay) > MOST_REPLAYED:
                longest = [0] * len(live)
            stats.steps += 1
            began, waited = time.perf_counter(), stats.seconds["forward"]  # until this step, for the forward pass
            with stats.time("guess"):
                steps, trees = zip(*strategy.guess(contexts, longest), strict=True)
            with stats.time("forward"):
                logits = architecture.forward(model, steps, cache, [last[b] for b in live])
                synchronize(logits.device)
            # A guess that overflows spoils rows that do not see it, too, for 0 x NaN is NaN: again, without guesses.
            spoiled = not spoiled and logits.shape[1] > 1 and bool(logits.amax().isnan())
            if spoiled:
                cache.commit(steps, [[] for _ in steps])
                continue
            with stats.time("verify"):
                paths, emitted = walk(steps, logits, rules)
            with stats.time("commit"):
                cache.commit(steps, paths)
            with stats.time("learn"):
                strategy.learn(contexts, steps, logits, paths, emitted)
            for text, tokens, step, tree, path in zip(contexts, emitted, steps, trees, paths, strict=True):
                text += tokens
                stats.count(step, tree, path)
            if strategy.pace:
                waited = stats.seconds["forward"] - waited
                rows, length = logits.shape[0] * logits.shape[1], max(map(len, contexts))
                strategy.pace.costs.follow(rows, length, waited, time.perf_counter() - began - waited)
        if strategy.pace:
            strategy.pace.costs.keep()
        ids = _pad([rule.ids for rule in rules], generation)
        if outlives:
            ended |= {b: cache.sequence(i) for i, b in enumerate(active)}
            caches = [ended[b] for b in range(len(texts))]
            for one, begin, new in zip(caches, begins, ids[:, width:], strict=True):
                lacks = len(new) - 1 - (one.lengths[0] - begin)  # what ended early, its end and the padding behind it
                if lacks:
                    compute(model, architecture, new[None, -1 - lacks : -1], one, None, 1)
            architecture.hand_over(model, caches, [prompt.padding for prompt in prompts], theirs)
    except BaseException:
        if taken_over is not None:
            taken_over.rewind(held)
        raise
    finally:
        if engine.graphs is not None:
            engine.graphs.take_back(cache)
    return ids
