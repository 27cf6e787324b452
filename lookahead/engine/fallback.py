"""What is left to the model's own decoding, and why."""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from lookahead import compat
from lookahead.config import LookaheadConfig
from lookahead.engine.prefill import cache_passed_in, positions_in, repeats_what_is_cached
from lookahead.models.adapter import CACHE_ARGUMENTS, UnsupportedModelError, context_length
from lookahead.passes.capabilities import can_batch, find_adapter, same_without_cache
from lookahead.vocabulary import vocabulary_fingerprint

# Attributes of configurations, by model type, that say up to which length attention sees all keys. Beyond it, these
# models choose keys in a way that differs between their own passes of different shapes.
DENSE_UP_TO = {"doge": "keep_window_size", "dots3_note_text": "index_topk"}

# What generate() hands to its loop that this one replaces or has no use for; anything else is meant for the model.
KNOWN_ARGUMENTS = {
    *CACHE_ARGUMENTS, "attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "position_ids",
    "tokenizer", "use_cache",
}  # fmt: skip

ASSISTED_ARGUMENTS = ("inputs_tensor", "tokenizer", "assistant_tokenizer")
"""What generate() hands to assisted decoding alone, beside the assistant model."""

# Settings that make assisted decoding something else than guesses of an assistant model.
OTHER_ASSISTANCE = (
    "assistant_early_exit", "assistant_ensemble_weight", "prompt_lookup_num_tokens", "speculation_type", "use_mtp",
)  # fmt: skip

_warned: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def warn_plain(model: PreTrainedModel, reason: str) -> None:
    """Warn, once for each reason and model, that the model's own decoding takes over."""
    told = _warned.setdefault(model, set())
    if reason not in told:
        told.add(reason)
        warnings.warn(f"lookahead does not decode {reason}: the model's own decoding does.", stacklevel=2)


def why_plain(
    model: PreTrainedModel,
    ids: torch.Tensor,
    generation: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict,
    config: LookaheadConfig,
) -> str | None:
    """What about this call lookahead does not cover, or None."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models"
    if synced_gpus:
        return "with synced_gpus"
    if model.training:  # dropout draws anew in every pass
        return "in training mode (model.eval() ends it)"
    if "prepare_inputs_for_generation" in vars(model):  # a prompt-tuned PEFT model puts its inputs in that way
        return "with a prepare_inputs_for_generation that replaces the model's"
    if generation.cache_implementation not in (None, "dynamic"):
        return f"with cache_implementation={generation.cache_implementation!r}"
    if generation.return_dict_in_generate and (generation.output_attentions or generation.output_hidden_states):
        return "with output_attentions or output_hidden_states"
    for name, value in model_kwargs.items():
        is_absent = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in KNOWN_ARGUMENTS and not is_absent:
            return f"with {_described(name, value)}"
    adapter = find_adapter(model, cpu_kernels=config.cpu_kernels)
    if adapter.row_dependence and not config.allow_row_dependent:
        return (
            f"a model whose logits depend on the other rows of a pass (by {adapter.row_dependence:.1e} of their "
            "spread), as activations quantized in each pass make them; LookaheadConfig(allow_row_dependent=True) lets "
            "it, at the price of texts that part"
        )
    if model_kwargs.get("use_cache") is False and not same_without_cache(model, adapter):
        return "with use_cache=False a model that writes another text then"
    if len(DynamicCache(config=adapter.config).layers) != len(adapter.layers):  # as assistant_early_exit does
        return "with another number of layers than the model had"
    if len(ids) > 1 and not can_batch(model, adapter):
        return "batches of a model whose guesses are single chains"
    embeds = model_kwargs.get("inputs_embeds")
    cache, mask = cache_passed_in(model_kwargs), model_kwargs.get("attention_mask")
    held, new = positions_in(cache), (ids if embeds is None else embeds).shape[1]
    if adapter.cache_argument == "cache_params" and compat.is_callers_own(cache):
        return "on a cache of states alone, which do not say how much of the prompt they hold"
    if cache is not None and (type(cache) is not DynamicCache or (held and not adapter.knows(cache))):
        return f"on past_key_values of type {type(cache).__name__} with these layers"
    if held and len(ids) > 1:
        return "batches on past_key_values that are passed in"
    whole = not held or repeats_what_is_cached(ids, generation, model_kwargs)
    if held >= new and whole:
        return "on past_key_values that hold all of the prompt"
    # generate() drops a mask of ones, and says how long it was.
    covered = (len(ids), compat.dropped_mask_length(generation)) if mask is None else tuple(mask.shape)
    if covered[1:] != (None,) and covered != (len(ids), new if whole else held + new):
        return "with an attention_mask that is not of the prompt's shape"
    if mask is not None:
        seen = mask.bool()
        if not torch.equal(mask, seen.to(mask.dtype)):
            return "with an attention_mask of other values than 0 and 1"
        if not seen[:, -1].all() or (seen[:, :-1] & ~seen[:, 1:]).any():
            return "with an attention_mask that hides more than padding to the left"
        if not seen.all() and (held or adapter.has_state):
            return "with padding, on past_key_values or in a model that keeps a state"
    positions = model_kwargs.get("position_ids")
    # generate() makes a row of them for each row of a mask, also of one that it drops.
    if positions is not None and positions.ndim == 2 and len(positions) not in (1, len(ids)):
        return "with position_ids, or an attention_mask, of another number of sequences than the prompt"
    if not _are_usual(positions, mask, held):
        return "with position_ids other than the usual"
    length = (0 if whole else held) + new  # of the prompt
    end = length + generation.max_length - ids.shape[1]
    dense = getattr(adapter.config, DENSE_UP_TO.get(adapter.config.model_type, ""), None)
    if dense is not None and end > dense:
        return f"beyond {dense} positions, from which on the model's attention drops keys by the shape of a pass"
    if _switches_rope(model, len(ids), length, end):
        return "across the length at which the model's rotary embedding changes"
    return None


def why_no_draft_model(assistant: object, generation: GenerationConfig, arguments: dict) -> str | None:
    """Why an assistant model is no source of guesses here, or None.

    arguments: those of ASSISTED_ARGUMENTS that were given.
    """
    for name in OTHER_ASSISTANCE:
        if getattr(generation, name, None):
            return f"with {name}"
    if not isinstance(assistant, PreTrainedModel) or assistant.config.is_encoder_decoder:
        return f"with an assistant model of class {type(assistant).__name__}"
    tokenizers = [arguments.get(name) for name in ("tokenizer", "assistant_tokenizer")]
    if all(tokenizers) and len({vocabulary_fingerprint(tokenizer) for tokenizer in tokenizers if tokenizer}) > 1:
        return "with an assistant model of another vocabulary"
    try:
        find_adapter(assistant)
    except UnsupportedModelError as error:
        return f"with this assistant model ({error})"
    return None


def _described(name: str, value: Any) -> str:
    """What an input of the model is, in words."""
    if name == "mm_encoder_outputs":  # what generate() makes of images and videos, by kind
        return " and ".join(f"{kind}s" for kind in value)
    if name.startswith(("pixel_values", "image")):
        return f"{'videos' if 'video' in name else 'images'} ({name})"
    return f"the model input {name}"


def _are_usual(positions: torch.Tensor | None, mask: torch.Tensor | None, held: int) -> bool:
    """Whether ``position_ids`` count what the mask shows, over all of the prompt or what is not cached of it."""
    if positions is None or positions.numel() == 0:
        return True
    if mask is None:
        count = positions.shape[-1]
        return any(
            torch.equal(positions, torch.arange(begin, begin + count, device=positions.device).expand_as(positions))
            for begin in (0, held)
        )
    if positions.ndim != 2 or positions.shape[-1] > mask.shape[-1]:
        return False
    seen = mask.to(positions.device).bool()[:, -positions.shape[-1] :]
    usual = (mask.to(positions.device).long().cumsum(-1) - 1)[:, -positions.shape[-1] :]
    return torch.equal(positions[seen], usual[seen])


def _switches_rope(model: PreTrainedModel, batch: int, prompt: int, end: int) -> bool:
    """Whether rotary frequencies change on the way, at a length that the positions of a whole pass decide together.

    A step of a longrope model may not straddle it, nor a batch, of whichever kind, have sequences on both sides.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        return batch > 1 and end > context_length(model)
    if rope.get("rope_type") != "longrope":
        return False
    switch = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return switch is not None and (prompt <= switch or batch > 1) and switch < end
