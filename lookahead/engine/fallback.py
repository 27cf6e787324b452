"""Calls that lookahead leaves to the model's own decoding, and the reasons."""

from itertools import repeat

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from lookahead import compat
from lookahead.config import LookaheadConfig
from lookahead.engine.prefill import (
    cache_passed_in,
    has_new_layers,
    outlives_call,
    positions_in,
    repeats_what_is_cached,
)
from lookahead.models.adapter import UnsupportedModelError
from lookahead.models.layers import changes_rope
from lookahead.models.origin import Foreign, is_own
from lookahead.models.state import state_of
from lookahead.passes.capabilities import can_batch, find_adapter

# Arguments of generate()'s loop that lookahead handles, or does not need. All others are inputs of the model.
KNOWN_ARGUMENTS = {
    *compat.CACHE_ARGUMENTS, "attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "position_ids",
    "tokenizer", "use_cache",
}  # fmt: skip

# Settings by which attention may change at some length (`limits`), besides windows and rotary embeddings.
LIMITING = {"attn_temperature_tuning", "index_topk", "keep_window_size", "original_max_position_embeddings"}

# What the loop of generate() chooses tokens by, besides processors and criteria: where it stands, and its name there.
CHOOSING = (
    (LogitsProcessorList, "__call__"), (StoppingCriteriaList, "__call__"), *compat.STOP_CHECKS,
    (torch, "multinomial"), (torch, "argmax"), (torch.nn.functional, "softmax"),
)  # fmt: skip


def why_plain(
    model: PreTrainedModel,
    ids: torch.Tensor,
    generation: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict,
    config: LookaheadConfig,
    is_tested: bool,
) -> str | None:
    """Why lookahead does not decode this call, or None if it does.

    is_tested: whether the model was tested when it was wrapped. If not, UnsupportedModelError is raised for one that
    lookahead cannot decode.
    """
    if model.config.is_encoder_decoder:
        return "encoder-decoder models"
    if synced_gpus:
        return "with synced_gpus"
    if "prepare_inputs_for_generation" in vars(model):  # as in a prompt-tuned PEFT model
        return "with a prepare_inputs_for_generation that replaces the model's"
    if generation.cache_implementation not in (None, "dynamic"):
        return f"with cache_implementation={generation.cache_implementation!r}"
    if generation.return_dict_in_generate and (generation.output_attentions or generation.output_hidden_states):
        return "with output_attentions or output_hidden_states"
    for name, value in model_kwargs.items():
        is_absent = value is None or value is False or (isinstance(value, dict) and not value)
        is_known = name in KNOWN_ARGUMENTS and not (name == "logits_to_keep" and isinstance(value, torch.Tensor))
        if not (is_known or is_absent):
            from lookahead.engine.plain import described  # calls with a reason load it anyway

            return f"with {described(name, value)}"
    if (replaced := state_of(model).why_plain() or _replaced_in_loop()) is not None:
        return replaced
    if modes := compat.modes_of_users():  # fused passes and our kernels run no operations of torch
        return f"under a torch function or dispatch mode ({', '.join(modes)})"
    try:
        adapter = find_adapter(model, cpu_kernels=config.cpu_kernels)
    except UnsupportedModelError as error:
        if not is_tested:
            raise
        return f"a model that was changed after it was wrapped ({error})"
    if adapter.row_dependence and not config.allow_row_dependent:
        return (
            f"a model whose logits depend on the other rows of a pass (by {adapter.row_dependence:.1e} of their "
            "spread), for example because activations are quantized in each pass; with "
            "LookaheadConfig(allow_row_dependent=True) it is decoded, but writes other texts"
        )
    uses_cache = model_kwargs.get("use_cache", True)
    if not uses_cache and uses_cache is not False:  # generate() then makes a cache, and adds the whole text each time
        return f"with use_cache={uses_cache!r}"
    in_training, has_no_cache = bool(state_of(model).in_training), not uses_cache
    prepares = state_of(model).prepares
    if in_training or has_no_cache or prepares:
        from lookahead.passes import conditions  # other calls have none to try

        if in_training and (change := conditions.what_training_changes(model, adapter)) is not None:
            return f"in training mode, in which {change} (model.eval() ends it)"
        if has_no_cache and cache_passed_in(model_kwargs) is not None:
            return "with use_cache=False, on a cache"  # to which each pass adds the whole text anew
        if has_no_cache and (changes_rope(model) or not conditions.same_without_cache(model, adapter)):
            return "a model that writes another text with use_cache=False"
        if prepares and not conditions.gives_usual_inputs(model, adapter, generation):
            return f"a model that gives its passes other inputs than the usual ({prepares})"
    if len(ids) > 1 and not can_batch(model, adapter):
        why = "steps take one sequence" if adapter.can_branch else "guesses are single chains"
        return f"batches of a model whose {why}"
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is not None and generation.prefill_chunk_size:  # generate() reads all of them again for each chunk
        return "with inputs_embeds and prefill_chunk_size"
    if has_no_cache and generation.prefill_chunk_size:  # generate() refuses it
        return "with use_cache=False and prefill_chunk_size"
    cache, mask = cache_passed_in(model_kwargs), model_kwargs.get("attention_mask")
    held, new = positions_in(cache), (ids if embeds is None else embeds).shape[1]
    is_new = not held and (cache is None or has_new_layers(cache))
    if cache is not None and (not is_new or compat.is_callers_own(cache) or type(cache) is not DynamicCache):
        from lookahead.models.passed_in import why_plain as why_not_on  # other calls begin with an empty one

        if (reason := why_not_on(model, adapter, cache, held, is_new, len(ids))) is not None:
            return reason
    is_full = not held or repeats_what_is_cached(ids, generation, model_kwargs)
    if held >= new and is_full:
        return "on a cache that holds the whole prompt"
    # generate() drops a mask of ones, and keeps its length.
    covered = (len(ids), compat.dropped_mask_length(generation)) if mask is None else tuple(mask.shape)
    if covered[1:] != (None,) and covered != (len(ids), new if is_full else held + new):
        return "with an attention_mask that is not of the prompt's shape"
    hiding = None if mask is None or bool((mask == 1).all()) else mask
    is_shared = prepares and outlives_call(cache, generation)
    if is_shared and not conditions.leaves_positions(model, adapter, hiding is not None):
        return f"with a cache that outlives the call, in a model with other positions than the usual ({prepares})"
    if hiding is not None:
        from lookahead.engine.padding import why_plain as why_not_masked  # other calls hide nothing

        if (reason := why_not_masked(model, adapter, hiding, held, generation)) is not None:
            return reason
    positions, length = model_kwargs.get("position_ids"), (0 if is_full else held) + new  # of the prompt
    if positions is not None and (hiding is not None or not _count_columns(positions, len(ids), length)):
        from lookahead.engine.positions import why_plain as why_not_from  # other calls count from the first column on

        if (reason := why_not_from(positions, hiding, held, len(ids), length, generation)) is not None:
            return reason
    stop = length + generation.max_length - ids.shape[1]
    is_limited = adapter.sees_all_up_to is not None or any(map(hasattr, repeat(adapter.config), LIMITING))
    if is_limited or changes_rope(model):
        from lookahead.engine.limits import why_plain as why_not_at  # other models decode alike at any length

        return why_not_at(model, adapter, ids, hiding is not None, held, length, stop)
    return None


def _replaced_in_loop() -> str | None:
    """Why the loop of generate(), which chooses tokens by functions of torch and transformers, is not as they say."""
    for owner, name in CHOOSING:
        if not is_own(found := getattr(owner, name)):
            place = f"{getattr(owner, '__module__', 'torch')}.{getattr(owner, '__qualname__', owner.__name__)}.{name}"
            return f"a model whose cache or loop was replaced ({Foreign(place, found)})"
    return None


def _count_columns(positions: torch.Tensor, sequences: int, length: int) -> bool:
    """Whether ``position_ids`` are those that generate() makes for prompts of this length, without padding."""
    usual = torch.arange(length, device=positions.device).expand(sequences, -1)
    return positions.shape == usual.shape and torch.equal(positions, usual)
