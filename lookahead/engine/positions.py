"""Positions of prompts: lookahead supports those that count the tokens that a mask does not hide."""

import torch
from transformers import GenerationConfig


def why_plain(
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    held: int,
    sequences: int,
    length: int,
    generation: GenerationConfig,
) -> str | None:
    """Why lookahead does not decode prompts with these ``position_ids``, or None if it does.

    mask: [sequences, length], or None if it hides nothing. held: positions that are cached. length: of the prompt, with
    these.
    """
    # generate() makes a row of positions for each row of the mask, even if it drops the mask.
    if positions.ndim == 2 and len(positions) not in (1, sequences):
        return "with position_ids, or an attention_mask, for another number of sequences than the prompt has"
    if not _are_usual(positions, mask, held, length, generation.prefill_chunk_size):
        return "with position_ids other than the usual"
    return None


def _are_usual(
    positions: torch.Tensor, mask: torch.Tensor | None, held: int, length: int, chunk_size: int | None
) -> bool:
    """Whether ``position_ids`` count the visible tokens of the prompt.

    The first pass reads the last columns: one for each token that is not cached. If it reads the prompt in chunks, it
    counts columns from the first on. Each later token has the position after the last one.
    chunk_size: `prefill_chunk_size`. Other arguments as for `why_plain`.
    """
    if positions.ndim == 3:  # of time, height and width, which only images tell apart
        return all(_are_usual(one, mask, held, length, chunk_size) for one in positions)
    count = length - held
    if positions.ndim != 2 or positions.shape[1] < count or (chunk_size and positions.shape[1] != length):
        return False
    read = positions[:, -count:]
    if mask is None:
        return torch.equal(read, torch.arange(held, length, device=read.device).expand_as(read))
    seen, usual = (x.to(read.device)[:, -count:] for x in (mask.bool(), mask.long().cumsum(-1) - 1))
    return mask.shape[1] == length and torch.equal(read.expand_as(seen)[seen], usual[seen])
