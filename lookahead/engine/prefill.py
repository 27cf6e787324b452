"""Prefill: the prompts of a call, and the cache that holds them."""

import warnings
from collections.abc import Generator
from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from lookahead.compat import CACHE_ARGUMENTS, caches_nothing, dropped_mask_length, is_callers_own
from lookahead.guessing.combine import Combined
from lookahead.models.adapter import context_length
from lookahead.models.cache import AnyCache, LookaheadCache, copy_of_cache, counts_positions
from lookahead.passes.runner import EagerRunner, Output


@dataclass
class Prompt:
    """The prompt of one sequence."""

    text: list[int]
    """Tokens, including cached ones if they are known. Emitted tokens are added."""
    new: torch.Tensor
    """The part that is not cached yet, without padding: ids, int64 [1, n], or embeddings, [1, n, hidden]."""
    padding: int
    """Columns of padding to its left."""


def prompts_of(ids: torch.Tensor, generation: GenerationConfig, model_kwargs: dict) -> list[Prompt]:
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    new = ids if embeds is None else embeds
    if repeats_what_is_cached(ids, generation, model_kwargs):
        new = new[:, positions_in(cache_passed_in(model_kwargs)) :]
    prompts = []
    for b in range(len(ids)):
        padding = 0 if mask is None else int((mask[b] == 0).sum())
        text = ids[b, padding if mask is not None and mask.shape == ids.shape else 0 :].tolist()
        prompts.append(Prompt(text, new[b : b + 1, padding:], padding))
    return prompts


def repeats_what_is_cached(ids: torch.Tensor, generation: GenerationConfig, model_kwargs: dict) -> bool:
    """Whether the prompt begins with the content of the cache that was passed in; otherwise it follows that content."""
    mask = model_kwargs.get("attention_mask")
    # The mask covers the cache and the prompt. generate() may have dropped it, if it hid nothing.
    covered = dropped_mask_length(generation) if mask is None else mask.shape[-1]
    return model_kwargs.get("inputs_embeds") is not None or covered == ids.shape[1]


def outlives_call(cache: Cache | None, generation: GenerationConfig) -> bool:
    """Whether the caller may use this cache, which generate() hands to its loop, after the call."""
    return bool(generation.return_dict_in_generate) or is_callers_own(cache)


def cache_passed_in(model_kwargs: dict) -> Cache | None:
    """The cache that generate() was given, or has made; None with use_cache=False."""
    return next((model_kwargs[name] for name in CACHE_ARGUMENTS if model_kwargs.get(name) is not None), None)


def positions_in(cache: Cache | None) -> int:
    """Positions in a cache that was passed in; 0 if its layers keep only states, which do not tell."""
    return cache.get_seq_length() if cache is not None and counts_positions(cache) else 0


def has_new_layers(cache: Cache) -> bool:
    """Whether no layer has keys and values, or is to record its past. Layers that keep states do not show the first."""
    begun = [
        layer
        for layer in cache.layers
        if getattr(layer, "is_initialized", False) or getattr(layer, "record_past", False)
    ]
    return all(map(caches_nothing, begun))


def prefill(
    runner: EagerRunner,
    prompts: list[Prompt],
    source: Combined,
    cache: LookaheadCache | None,
    room: int,
    chunk_size: int | None,
) -> Generator[None, None, tuple[AnyCache, torch.Tensor]]:
    """Compute the prompts, and pass them to the source of guesses. Yields between passes.

    Each prompt has its own passes, without padding. Equal prompts are computed once.
    cache: holds the beginning of a single prompt, if anything does.
    room: positions beyond the prompts that the cache allocates at once.
    chunk_size: positions of a pass; default: the whole prompt.
    Returns the cache of the batch, and the logits after the prompts, [batch, vocabulary].
    """
    logits_to_keep, of_each = max(source.needs.prompt_logits, 1), room if runner.is_ragged or len(prompts) == 1 else 0
    caches: list[LookaheadCache] = []
    last: list[torch.Tensor] = []
    for b, prompt in enumerate(prompts):
        equal = next((i for i, other in enumerate(prompts[:b]) if torch.equal(prompt.new, other.new)), None)
        if equal is not None:
            caches.append(copy_of_cache(caches[equal]) if runner.is_ragged else caches[equal])
            last.append(last[equal])
            continue
        if caches:
            yield
        one = cache or runner.adapter.make_cache(prompt.new.shape[1] + of_each)
        output = yield from _read(runner, prompt.new, one, chunk_size, logits_to_keep)
        last.append(output.logits[-1].clone())  # before sources get the logits, to which they may write
        source.observe_prompt(prompt.text, output.logits, output.hidden_states)
        caches.append(one)
    longest = max(prompt.new.shape[1] for prompt in prompts)
    return runner.join(caches, longest + room), torch.stack(last)


def _read(
    runner: EagerRunner, new: torch.Tensor, cache: LookaheadCache, chunk_size: int | None, logits_to_keep: int
) -> Generator[None, None, Output]:
    """Compute the prompt of one sequence. Yields between passes. Arguments as for `prefill` and `EagerRunner`'s."""
    length, context = cache.lengths[0] + new.shape[1], context_length(runner.model)
    if length > context:
        warnings.warn(f"the prompt has {length} tokens, the model was made for {context}", stacklevel=2)
    outputs: list[Output] = []
    *before, last = new.split(chunk_size or new.shape[1], dim=1)
    for part, kept in [*((part, 1) for part in before), (last, logits_to_keep)]:  # of the others, logits are of no use
        if outputs:
            yield
        try:
            outputs.append(runner.prefill(part, cache, kept, as_steps=chunk_size is not None))
        except IndexError as error:  # beyond the end of a table of learned positions
            if length <= context:
                raise
            raise ValueError(f"the prompt has {length} tokens, the model's context is {context}: shorten it") from error
    hidden = {i: torch.cat([output.hidden_states[i] for output in outputs]) for i in runner.requested}
    return Output(outputs[-1].logits, hidden)
