"""Lengths at which passes of a few models change, so that lookahead decodes only some of their texts."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lookahead.config import MAX_ROWS
from lookahead.models.adapter import ModelAdapter, context_length
from lookahead.models.layers import ropes_of
from lookahead.models.origin import code_of
from lookahead.models.sliding import hides_in_cache_alone

# By model type, the attribute of its configuration with the length up to which attention sees all keys. Beyond it,
# these models choose keys, and their own passes of different shapes choose differently.
DENSE_UP_TO = {"doge": "keep_window_size", "dots3_note_text": "index_topk"}


def why_plain(
    model: PreTrainedModel, adapter: ModelAdapter, ids: torch.Tensor, is_padded: bool, held: int, prompt: int, stop: int
) -> str | None:
    """Why lookahead does not decode texts of these lengths, or None if it does.

    ids: [sequences, n]. is_padded: whether they have padding. held: cached positions. prompt: its positions, with
    these. stop: the most positions of the text.
    """
    if _counts_rows(adapter.config, stop) and (is_padded or ids.device.type != "cpu"):
        return "with padding, or on a GPU, at positions where the model scales queries by their row in a pass"
    dense = getattr(adapter.config, DENSE_UP_TO.get(adapter.config.model_type, ""), None)
    if dense is not None and stop > dense:
        return f"beyond {dense} positions, where the shape of a pass decides which keys the model's attention sees"
    window = adapter.sees_all_up_to
    if window is not None and stop > window and hides_in_cache_alone(model, adapter):
        return f"beyond the {window} positions of a window that the model's cache has and its masks ignore"
    if _switches_rope(model, len(ids), prompt, stop) or _drops_cache(model, held or prompt, stop):
        return "across the length at which the model's rotary embedding changes"
    return None


def _counts_rows(config: PreTrainedConfig, stop: int) -> bool:
    """Whether queries grow by their row in a pass (Llama 4), which counts guesses and padding as positions."""
    return getattr(config, "attn_temperature_tuning", False) and stop + MAX_ROWS > config.floor_scale


def _drops_cache(model: PreTrainedModel, first: int, stop: int) -> bool:
    """Whether the model's class drops a cache that is shorter than a length once the text is longer (Phi-3, Phi-4).

    first: positions that are computed at once, or were before.
    """
    switch = getattr(model.config, "original_max_position_embeddings", None)
    if switch is None or not first <= switch < stop:
        return False
    prepare: Any = model.prepare_inputs_for_generation
    code = code_of(inspect.unwrap(prepare))
    return code is not None and "original_max_position_embeddings" in code.co_names


def _switches_rope(model: PreTrainedModel, batch: int, prompt: int, stop: int) -> bool:
    """Whether rotary frequencies change within this call. The longest position of a pass decides for all its rows.

    So no step of a longrope model may straddle that length, and no batch may have sequences on both sides of it.
    """
    config = model.config.get_text_config(decoder=True)
    for rope in ropes_of(model):
        if rope.get("rope_type") == "dynamic" and batch > 1 and stop > context_length(model):
            return True
        if rope.get("rope_type") == "longrope":
            switch = rope.get("original_max_position_embeddings")
            switch = switch or getattr(config, "original_max_position_embeddings", None)
            if switch is not None and (prompt <= switch or batch > 1) and switch < stop:
                return True
    return False
