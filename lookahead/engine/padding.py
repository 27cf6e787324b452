"""Attention masks of prompts: lookahead supports those that mask left padding."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from lookahead.models.adapter import ModelAdapter
from lookahead.models.state import state_of
from lookahead.passes.conditions import hides_padding, loop_gives_usual_inputs

COLUMNS = 3  # of padding, in the trial


def why_plain(
    model: PreTrainedModel, adapter: ModelAdapter, mask: torch.Tensor, held: int, generation: GenerationConfig
) -> str | None:
    """Why lookahead does not decode prompts with this mask, or None if it does.

    mask: [sequences, n], not all 1. held: positions in a cache that was passed in.
    """
    seen = mask.bool()
    if not torch.equal(mask, seen.to(mask.dtype)):
        return "with an attention_mask that has values other than 0 and 1"
    if not seen[:, -1].all() or (seen[:, :-1] & ~seen[:, 1:]).any():
        return "with an attention_mask that masks more than left padding"
    if held or (adapter.has_state and not hides_padding(model, adapter)):
        return "with padding, on a cache or in a model whose states include padding"
    takes_columns = not (adapter.takes_position_ids or adapter.has_state)  # states were tried above
    goes_by_columns = state_of(model).users is not None or takes_columns
    if goes_by_columns and not loop_gives_usual_inputs(model, adapter, generation, COLUMNS):
        return "with padding, which changes the text of this model"
    parts = model.get_decoder().modules()  # others read images, which may see all of themselves
    if any(getattr(part, "is_causal", True) is False for part in parts):
        return "with padding, in a model whose attention is set to see later tokens"  # it does so without a mask
    if adapter.has_state and generation.prefill_chunk_size:  # one column is read as text
        return "with padding and prefill_chunk_size, in a model that keeps states"
    return None
