"""Biases of attention by the positions of keys (ALiBi, Press et al. 2022, arXiv 2108.12409), for the rows of a step.

transformers computes them from a key's column in the cache. In a tree, and after the gaps of a batch, that is not its
position. So these functions replace transformers' own (`branching`). They call them for the biases of all positions,
and select that of each key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from lookahead.decoding_pass import current_pass
from lookahead.models.cache import LookaheadCache


class Places(NamedTuple):
    """The positions of the keys that the rows of a pass see."""

    keys: np.ndarray
    """int64 [batch, keys]; -1 in a gap."""
    rows: np.ndarray
    """int64 [batch, T]."""

    @property
    def last(self) -> int:
        """The last position."""
        return int(self.keys.max())


def places_in(cache: LookaheadCache, positions: np.ndarray) -> Places:
    """Return the places of a step's rows, and of the keys that they see in the first layer.

    positions: of the rows, int64 [batch, T].
    """
    cached = cache.in_place[0].positions_shown()
    keys = np.concatenate([np.broadcast_to(cached, (len(positions), cached.shape[1])), positions], axis=1)
    return Places(keys, positions)


def by_position(own: Callable, attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """``build_alibi_tensor`` of Bloom and Falcon: [batch * heads, 1, keys]. own: transformers' function."""
    if (places := _places()) is None:
        return own(attention_mask, num_heads, dtype)
    columns = torch.ones(1, places.last + 1, dtype=torch.long, device=attention_mask.device)
    keys = torch.from_numpy(places.keys.clip(min=0)).to(attention_mask.device)
    return own(columns, num_heads, dtype=dtype)[:, 0, keys].transpose(0, 1).flatten(0, 1)[:, None]


def by_distance(own: Callable, num_heads: int, sequence_length: int, *settings: Any, **named: Any) -> torch.Tensor:
    """``build_mpt_alibi_tensor``: [heads, T, keys]. Raises NotImplementedError for several sequences."""
    if (places := _places()) is None:
        return own(num_heads, sequence_length, *settings, **named)
    if len(places.keys) > 1:
        raise NotImplementedError("its biases are those of one sequence")
    biases = own(num_heads, places.last + 1, *settings, **named)  # the last one is that of the query itself
    keys, rows = (torch.from_numpy(one[0]).to(biases.device) for one in (places.keys, places.rows))
    return biases[:, 0, places.last + (keys - rows[:, None]).clamp(max=0)]


def _places() -> Places | None:
    decoding = current_pass()
    return None if decoding is None else decoding.places
