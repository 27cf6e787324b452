"""What a model's layers support, and the masks, positions and caches of passes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from lookahead.compat import CACHE, execution_device
from lookahead.models.cache import InPlaceLayer, LookaheadCache
from lookahead.step import Visibility, mask

# Settings that give the number of positions that a model was made for, or that its tables have room for.
POSITION_LIMITS = (
    "max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len",
    "max_sequence_length", "n_positions", "n_ctx", "seq_length",
)  # fmt: skip


class UnsupportedModelError(ValueError):
    """Lookahead cannot decode this model. The message gives the reason."""


@dataclass(frozen=True)
class ModelAdapter:
    """How to run one model. `passes.capabilities.find_adapter` finds it."""

    config: PreTrainedConfig
    """The configuration of the text part."""
    layers: tuple[Visibility | None, ...]
    """One entry for each layer. None: the layer caches no keys and values of its own; it may keep a state."""
    mask_of: dict[str, Visibility | None] | None
    """Visibility by type of layer, if the model takes a dict of masks; None if one mask serves all layers."""
    takes_position_ids: bool
    cache_argument: str = CACHE
    """Name of the cache among the arguments of the model's forward."""
    has_state: bool = False
    """Some layers keep a state (recurrent, short convolution), which must see all tokens in their order."""
    branches_states: bool = False
    """These layers can compute the rows of a step as a tree (`models.branching`). If not, their states are restored
    after a rejection, and the accepted tokens computed again."""
    biases_keys: bool = False
    """Attention is biased by a key's column in the cache, in steps by its position (`models.biases`)."""
    can_branch: bool = True
    """False: the model ignores or refuses a custom mask. Guesses are then a single chain, without a window."""
    in_inference_mode: bool = False
    """Passes run in torch's inference mode, which is cheaper. Tensors made in it can be neither written to nor trained
    with later, so a pass must leave nothing behind except in our cache."""
    splits_attention: bool = False
    """Passes use `attention.attend` in place of "sdpa": the cache then needs no mask, only the step does."""
    uses_kernels: bool = True
    """Our own kernels may be used on a CPU (`gemm`, `tree_attention`)."""
    row_dependence: float = 0.0
    """Largest error that the other rows of a pass make in a row of logits, relative to the spread of that row; 0 if it
    is only rounding."""
    foreign: tuple[str, ...] = ()
    """Code of passes that neither torch nor transformers defines. No other code may replace it."""
    given_up: tuple[str, ...] = ()
    """Faster ways of computing that were tried, and why each failed."""

    @property
    def can_grow(self) -> bool:
        """Whether several passes can compute one step. The rows of each pass see those of earlier passes."""
        return self.can_branch and self.sees_all_up_to is None and not (self.has_state or self.biases_keys)

    @cached_property
    def sees_all_up_to(self) -> int | None:
        """The length up to which every layer sees all keys; None: at any length."""
        hiding = [visibility for visibility in self.layers if visibility is not None and not visibility.is_full]
        return min((visibility.window or visibility.chunk or 0 for visibility in hiding), default=None)

    @cached_property
    def kinds(self) -> dict[Visibility, list[int]]:
        """The layers that cache their own keys and values, by what they see."""
        found: dict[Visibility, list[int]] = {}
        for index, visibility in enumerate(self.layers):
            if visibility is not None:
                found.setdefault(visibility, []).append(index)
        return found

    def make_cache(self, expected_length: int = 0) -> LookaheadCache:
        """Make an empty cache of one sequence, with room for ``expected_length`` positions in its full layers."""
        layers: list[Any] = []
        usual: Iterable[Any] = repeat(None, len(self.layers))
        if self.branches_states or None in self.layers:  # else each layer is one of ours
            usual = DynamicCache(config=self.config).layers
        for theirs, visibility in zip(usual, self.layers, strict=True):
            if self.branches_states and isinstance(theirs, LinearAttentionLayer):
                from lookahead.models.recurrence import StateAndKeysLayer, StateLayer  # other models need none

                states = theirs.number_of_states
                layers.append(StateAndKeysLayer(states, expected_length) if visibility else StateLayer(states))
            elif visibility is None:
                layers.append(theirs)
            elif visibility.window is not None:
                from lookahead.models.sliding import SlidingLayer  # other models need none

                layers.append(SlidingLayer(visibility.window))
            else:
                layers.append(InPlaceLayer(expected_length))
        return LookaheadCache(layers)

    def masks(
        self,
        ancestors: np.ndarray,
        positions: np.ndarray,
        cache: LookaheadCache,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Make the model's ``attention_mask`` for a step, one for each type of layer in `mask_of`.

        If attention is split and hides no cached key, only the step's own keys are covered.
        """
        found = cache.hidden(ancestors, positions, self.kinds, self.splits_attention)
        if self.mask_of is None:
            return mask(found[next(v for v in self.layers if v is not None)], dtype, device)
        masks = {visibility: mask(of_kind, dtype, device) for visibility, of_kind in found.items()}
        return {name: masks[visibility] if visibility else None for name, visibility in self.mask_of.items()}


def device_of(model: PreTrainedModel) -> torch.device:
    """The device of the model's inputs. Its parameters may be elsewhere if accelerate moves them."""
    device = execution_device(model)
    if device is None and model.device.type == "meta":  # accelerate offloads it part by part
        device = execution_device(model.get_input_embeddings())
    return torch.device(device) if device is not None else model.device


def context_length(model: PreTrainedModel) -> int:
    """Positions that the model was made for: the smallest limit in its configuration, or 2**62 if there is none."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in POSITION_LIMITS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=2**62)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of token ids that the model can read."""
    weight = getattr(model.get_input_embeddings(), "weight", None)  # missing if there are several tables
    return model.config.get_text_config(decoder=True).vocab_size if weight is None else weight.shape[0]
