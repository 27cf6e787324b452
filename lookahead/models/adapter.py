"""What a model's layers can do, and what a pass has to give them: masks, positions, a cache."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lookahead.compat import execution_device
from lookahead.models.cache import InPlaceLayer, LookaheadCache, SlidingLayer
from lookahead.step import Visibility, mask

CACHE_ARGUMENTS = ("past_key_values", "cache_params")


# What configurations call the number of positions that a model was made for, or has room for in its tables.
POSITION_LIMITS = (
    "max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len",
    "max_sequence_length", "n_positions", "n_ctx", "seq_length",
)  # fmt: skip


class UnsupportedModelError(ValueError):
    """The model cannot be decoded by lookahead; the message names the layer and the reason."""


@dataclass(frozen=True)
class ModelAdapter:
    """How to drive one model. Found by `passes.capabilities.find_adapter`."""

    config: PreTrainedConfig
    """Of the text part."""
    layers: tuple[Visibility | None, ...]
    """One a layer; None for a layer that caches no keys and values here: none at all, or a state."""
    mask_of: dict[str, Visibility] | None
    """Visibility by type of layer, where a model mixes types and takes a dict of masks; None where one serves all."""
    takes_position_ids: bool
    cache_argument: str = "past_key_values"
    """What the model's forward calls its cache."""
    has_state: bool = False
    """Some layers keep a state (recurrent, short convolution), which only tokens in their order can bring on."""
    can_branch: bool = True
    """False: a custom mask cannot be honoured, so guesses are a single chain and the window is empty."""
    in_inference_mode: bool = False
    """A pass leaves nothing behind but in our cache, so that it may take torch's cheaper way to call an operation: what
    is made in inference mode can be neither written to nor trained with afterwards."""
    splits_attention: bool = False
    """Whether attention that the model looks up as "sdpa" is `attention.attend` in a pass, which attends to the cache
    without a mask and to the step with one."""
    uses_kernels: bool = True
    """Whether kernels of our own may be used on a CPU (`products`, `tree_attention`)."""
    row_dependence: float = 0.0
    """Largest error, relative to the spread of a row of logits, that the other rows of a pass make in it; 0 where it is
    no more than rounding."""
    given_up: tuple[str, ...] = ()
    """Faster ways that were tried, and why they do not serve."""

    @property
    def can_grow(self) -> bool:
        """Whether one step may be computed by several passes: the rows of each see those of the passes before."""
        return self.can_branch and all(visibility in (None, Visibility()) for visibility in self.layers)

    def make_cache(self, expected_length: int = 0) -> LookaheadCache:
        """An empty cache of one sequence. expected_length: positions that the full layers make room for at once."""
        layers = []
        for theirs, visibility in zip(DynamicCache(config=self.config).layers, self.layers, strict=True):
            if visibility is None:
                layers.append(theirs)
            elif visibility.window is not None:
                layers.append(SlidingLayer(visibility.window))
            else:
                layers.append(InPlaceLayer(expected_length))
        return LookaheadCache(layers)

    def knows(self, cache: Cache) -> bool:
        """Whether `take_over` can read this cache: transformers' dynamic layers, ours, and states of the right kind."""
        ours = self.make_cache().layers
        return len(cache.layers) == len(ours) and all(
            type(theirs) is type(mine)
            or (isinstance(mine, InPlaceLayer) and type(theirs) in (DynamicLayer, DynamicSlidingWindowLayer))
            for mine, theirs in zip(ours, cache.layers, strict=True)
        )

    def take_over(self, cache: Cache) -> LookaheadCache:
        """What a cache of one sequence, passed in by the caller, holds.

        A full layer of ours is shared with ``cache``, for it can be rewound; everything else is copied.
        """
        ours = self.make_cache(cache.get_seq_length())
        layers = []
        for mine, theirs in zip(ours.layers, cache.layers, strict=True):
            if type(theirs) is InPlaceLayer:
                mine = theirs
            elif type(theirs) is type(mine):
                mine = copy.deepcopy(theirs)
            elif isinstance(mine, InPlaceLayer) and isinstance(theirs, DynamicLayer) and theirs.is_initialized:
                mine.update(theirs.keys, theirs.values)  # type: ignore[arg-type]  # tensors by now
                mine.starts = np.array([theirs.get_seq_length() - mine.columns])
            layers.append(mine)
        return LookaheadCache(layers, [cache.get_seq_length()])

    def masks(
        self,
        ancestors: np.ndarray,
        positions: np.ndarray,
        cache: LookaheadCache,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """What to pass as ``attention_mask`` (`step.mask`): of the step's own keys where all others are seen by all."""
        last = max(cache.lengths) + positions.shape[1]

        def mask_for(visibility: Visibility) -> torch.Tensor:
            layers = zip(cache.layers, self.layers, strict=True)
            cached = next(l for l, v in layers if v == visibility and isinstance(l, InPlaceLayer)).positions_shown()
            if self.splits_attention and not visibility.hides_any(cached, last):
                cached = cached[:, :0]
            return mask(ancestors, positions, cached, visibility, dtype, device)

        if self.mask_of is None:
            return mask_for(next(v for v in self.layers if v is not None))
        return {name: mask_for(visibility) for name, visibility in self.mask_of.items()}

    def mask_of_layers(self, masks: torch.Tensor | dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """`masks`, one for each layer; None for one that takes none."""
        if isinstance(masks, torch.Tensor):
            return [masks] * len(self.layers)
        return [masks.get(kind) for kind in self.config.layer_types]


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs belong; parameters that accelerate keeps elsewhere do not tell."""
    device = execution_device(model)
    if device is None and model.device.type == "meta":  # offloaded part by part
        device = execution_device(model.get_input_embeddings())
    return torch.device(device) if device is not None else model.device


def context_length(model: PreTrainedModel) -> int:
    """Positions that the model was made for, the least of what its configuration names; beyond any text if it does not
    say."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in POSITION_LIMITS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=2**62)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Tokens that the model knows."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[index, return-value]  # of a tensor
