"""The decoding loop: guess, lay out, run, verify, commit, learn, advance."""

import inspect
import time
import warnings
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from lookahead.architecture import Architecture, context_length, inspect_model
from lookahead.cache import LookaheadCache
from lookahead.config import LookaheadConfig
from lookahead.stats import Stats
from lookahead.strategies import JacobiStrategy, PoolStrategy
from lookahead.verify import NextTokenRule, walk
from ngram_pool import NgramPool

GREEDY_TEMPERATURE = 0.5  # at which logits are learned where the next token is their argmax
ROOM = 4096  # positions beyond the prompt that a cache makes room for at once

# What generate() hands to its loop that this one replaces or has no use for; anything else is meant for the model.
KNOWN_ARGUMENTS = {
    "past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", "tokenizer",
}  # fmt: skip


@dataclass
class Lookahead:
    """What a wrapped model carries as ``model.lookahead``."""

    config: LookaheadConfig
    pool: NgramPool
    """Evidence, kept for the life of the wrap."""
    stats: Stats = field(default_factory=Stats)
    """All calls together."""
    last: Stats = field(default_factory=Stats)
    """The last call, also while it runs."""


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

    Returns what generate() would: int64 [1, n], or a GenerateDecoderOnlyOutput.
    Raises UnsupportedModelError for a model that cannot be decoded so.
    """
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
    reason = _why_plain(model, input_ids, generation_config, synced_gpus, model_kwargs)
    if reason is not None:
        warn_plain(reason)
        return plain(
            model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
            **model_kwargs,
        )  # fmt: skip
    returns_dict = generation_config.return_dict_in_generate
    rule = NextTokenRule(
        input_ids,
        logits_processor,
        stopping_criteria,
        do_sample=generation_config.do_sample,
        keep_scores=returns_dict and generation_config.output_scores,
        keep_logits=returns_dict and generation_config.output_logits,
        streamer=streamer,
    )
    mask = model_kwargs.get("attention_mask")
    prompt = input_ids[0] if mask is None else input_ids[0, mask[0].bool()]  # padding is nothing to the model
    engine.last = stats = Stats(calls=1)
    try:
        cache = _decode(model, engine, prompt.tolist(), rule, stats, generation_config)
    finally:
        engine.stats += stats
    if streamer is not None:
        streamer.end()
    if not returns_dict:
        return rule.ids
    return GenerateDecoderOnlyOutput(sequences=rule.ids, scores=rule.scores, logits=rule.logits, past_key_values=cache)


def _strategy(
    model: PreTrainedModel, engine: Lookahead, architecture: Architecture, generation: GenerationConfig
) -> PoolStrategy | JacobiStrategy:
    if engine.config.strategy == "jacobi":
        return JacobiStrategy(engine.config.budget)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if engine.pool.largest_token >= vocabulary:
        raise ValueError(
            f"the pool holds token {engine.pool.largest_token}, the model knows {vocabulary} tokens: the pool was "
            "learned with another vocabulary; give one that was learned with this model's tokenizer"
        )
    temperature = (generation.temperature or 1.0) if generation.do_sample else GREEDY_TEMPERATURE
    return PoolStrategy(engine.config, engine.pool, temperature, architecture.can_branch)


def _decode(model, engine: Lookahead, text: list[int], rule: NextTokenRule, stats: Stats, generation: GenerationConfig):
    """The loop. ``text`` holds the prompt and grows by what is emitted; its last token is the root of each step.

    Returns the cache, which holds all of the text but its last token, as plain decoding leaves it.
    """
    architecture = inspect_model(model)
    strategy = _strategy(model, engine, architecture, generation)
    end = generation.max_length - rule.ids.shape[1] + len(text)  # length at which max_length is reached
    last_position = min(end - 2, context_length(model) - 1)  # of what plain decoding would ever compute
    cache = architecture.make_cache(min(end, len(text) + ROOM) + engine.config.largest_step)

    start = time.perf_counter()
    logits = _prefill(model, architecture, text, cache, generation.prefill_chunk_size, strategy.prefill_logits)
    strategy.start(text, logits)
    text.append(rule.emit(logits[-1]))
    stats.tokens += 1
    stats.prefill_seconds += time.perf_counter() - start

    while not rule.stopped:
        longest = max(last_position - cache.get_seq_length(), 0)
        stats.steps += 1
        with stats.time("guess"):
            step, tree = strategy.guess(text, longest)
        with stats.time("forward"):
            logits = architecture.forward(model, step, cache, last_position)
        with stats.time("verify"):
            path, emitted = walk(step, logits, rule)
        with stats.time("commit"):
            cache.commit(path)
        with stats.time("learn"):
            strategy.learn(text, step, logits, path, emitted)
        text += emitted
        stats.count(step, tree, path)
    return cache


def _prefill(
    model, architecture: Architecture, text: list[int], cache: LookaheadCache, chunk_size: int | None, keep: int
) -> torch.Tensor:
    """Fill the cache with the prompt; logits [k, vocabulary] of its last positions, at most ``keep``."""
    context = context_length(model)
    if len(text) > context:
        warnings.warn(f"the prompt has {len(text)} tokens, the model was made for {context}", stacklevel=2)
    ids = torch.tensor([text], device=model.device)
    limits = {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for chunk in ids.split(chunk_size or len(text), dim=1):
        begin = cache.get_seq_length()
        inputs = {"input_ids": chunk, "past_key_values": cache, "use_cache": True, **limits}
        if architecture.takes_position_ids:
            inputs["position_ids"] = torch.arange(begin, begin + chunk.shape[1], device=model.device)[None]
        try:
            logits = model(**inputs).logits[0, -keep:]
        except IndexError as error:  # a table of learned positions is at its end
            if len(text) <= context:
                raise
            raise ValueError(
                f"the prompt has {len(text)} tokens, the model's context is {context}: shorten it"
            ) from error
    return logits


_warned: set[str] = set()


def warn_plain(reason: str) -> None:
    """Warn, once for each reason, that the model's own decoding takes over."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"lookahead does not decode {reason}: the model's own decoding does.", stacklevel=2)


def _why_plain(model, input_ids, generation: GenerationConfig, synced_gpus: bool, model_kwargs: dict) -> str | None:
    """What about this call lookahead does not cover, or None."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models"
    if input_ids.shape[0] != 1:
        return "batches of more than one sequence"
    if synced_gpus:
        return "with synced_gpus"
    if generation.cache_implementation not in (None, "dynamic"):
        return f"with cache_implementation={generation.cache_implementation!r}"
    if generation.return_dict_in_generate and (generation.output_attentions or generation.output_hidden_states):
        return "with output_attentions or output_hidden_states"
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        return "on past_key_values that are passed in"
    for name, value in model_kwargs.items():
        if name not in KNOWN_ARGUMENTS and value is not None and value is not False:
            return f"with the model input {name}"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and (mask.ndim != 2 or mask.shape != input_ids.shape or not mask[0, -1]):
        return "with an attention_mask that hides the last token or is not of the prompt's shape"
    if positions is not None:
        seen = torch.ones_like(input_ids) if mask is None else mask.long()
        usual = (seen.cumsum(-1) - 1).to(positions.device)
        if positions.shape != usual.shape or not (positions == usual)[seen.bool().to(positions.device)].all():
            return "with position_ids other than the usual"
    if _switches_rope(model, input_ids.shape[1], generation.max_length):
        return "across the length at which the model's rotary embedding changes"
    return None


def _switches_rope(model, prompt_length: int, max_length: int) -> bool:
    """Whether a longrope model goes from its short to its long factors on the way; a step may not straddle that."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return False
    switch = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return switch is not None and prompt_length <= switch < max_length
