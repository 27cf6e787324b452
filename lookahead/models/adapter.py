"""What a model's layers can do, and how a pass of them is run: masks, positions, cache."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lookahead.decoding_pass import decoding_pass
from lookahead.models.cache import InPlaceLayer, LookaheadCache, SlidingLayer
from lookahead.passes import compiled
from lookahead.step import Step, Visibility, lay_out, mask, pad
from ngram_pool import GuessTree

CACHE_ARGUMENTS = ("past_key_values", "cache_params")


# What configurations call the number of positions that a model was made for, or has room for in its tables.
POSITION_LIMITS = (
    "max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len",
    "max_sequence_length", "n_positions", "n_ctx", "seq_length",
)  # fmt: skip


class UnsupportedModelError(ValueError):
    """The model cannot be decoded by lookahead; the message names the layer and the reason."""


@dataclass(frozen=True)
class Architecture:
    """How to drive one model. Found by `inspect_model`."""

    config: PreTrainedConfig
    """Of the text part."""
    layers: tuple[Visibility | None, ...]
    """One a layer; None for a layer that caches no keys and values here: none at all, or a state."""
    mask_of: dict[str, Visibility] | None
    """Layer type to visibility where a model mixes types and takes a dict of masks; None where one mask serves all."""
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
    two_part: bool = False
    """Whether attention that the model looks up as "sdpa" is `attention.attend` in a pass, which it has to honour."""
    uses_kernels: bool = True
    """Whether kernels of our own may be used on a CPU (`products`, `tree_attention`)."""
    row_dependence: float = 0.0
    """Largest error, relative to the spread of a row of logits, that the other rows of a pass make in it; 0 where it is
    no more than rounding."""
    is_compiled: bool = False
    """The steps of single sequences run as `compiled` does."""
    given_up: tuple[str, ...] = ()
    """Faster ways that were tried, and why they do not serve."""

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
            elif theirs.is_initialized:
                mine.update(theirs.keys, theirs.values)
                mine.starts = np.array([theirs.get_seq_length() - mine.columns])
            layers.append(mine)
        return LookaheadCache(layers, [cache.get_seq_length()])

    def hand_over(
        self, model: PreTrainedModel, caches: list[LookaheadCache], paddings: list[int], cache: Cache
    ) -> None:
        """Put what the sequences' caches hold into ``cache``, each after its columns of padding."""
        whole = caches[0]
        if len(caches) > 1 or paddings[0]:
            whole = self.make_cache()
            whole.stack(caches, paddings)
        self._settle(model, whole)
        cache.layers = whole.layers

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
            layer = next(l for l, v in zip(cache.layers, self.layers, strict=True) if v == visibility)
            cached = layer.positions_shown()
            if self.two_part and not visibility.hides_any(cached, last):
                cached = cached[:, :0]
            return mask(ancestors, positions, cached, visibility, dtype, device)

        if self.mask_of is None:
            return mask_for(next(v for v in self.layers if v is not None))
        return {name: mask_for(visibility) for name, visibility in self.mask_of.items()}

    def forward(
        self, model: PreTrainedModel, steps: list[Step], cache: LookaheadCache, last: list[int] | None = None
    ) -> torch.Tensor:
        """One pass over a step of each sequence; logits [batch, T, vocabulary] on the model's device, in its dtype.

        T is the length of the longest step; what shorter ones are padded with says nothing.
        last: for each sequence, the position beyond which no window token is placed (`Step.positions`).
        """
        if cache.graphs is not None:
            return cache.graphs.forward(steps[0], cache, last[0] if last else None)
        device = device_of(model)
        compiles = self.is_compiled and len(steps) == 1 and len(steps[0]) <= compiled.MOST_ROWS
        compiles = compiles and not torch.is_autocast_enabled(device.type)
        ids, positions, ancestors = pad(steps, cache.lengths, last, compiled.LEAST_ROWS if compiles else 0)
        again = len(cache.replay)
        if again:
            ids = np.concatenate([[cache.replay], ids], axis=1)
            positions = np.concatenate([np.arange(cache.lengths[0] - again, cache.lengths[0])[None], positions], axis=1)
        tokens = torch.from_numpy(np.stack([ids, positions])).to(device)
        mode = torch.inference_mode() if self.in_inference_mode else nullcontext()
        cache.begin(tokens.shape[2])
        if compiles:
            with self.under_way(), mode:
                masks = self.masks(ancestors, positions, cache, model.dtype, device)
                logits = compiled.run(model, self.cache_argument, tokens[:, 0], cache, masks)
            return logits[:, : len(steps[0])]
        inputs = {self.cache_argument: cache, "use_cache": True}
        if self.takes_position_ids:
            inputs["position_ids"] = tokens[1]
        # Where chains are all that there is, the model's own mask serves, which the probe has found to be causal.
        if len(steps) > 1 or (self.can_branch and len(steps[0]) > 1):
            inputs["attention_mask"] = self.masks(ancestors, positions, cache, model.dtype, device)
        with self.under_way(), mode:
            return model(input_ids=tokens[0], **inputs).logits[:, again:]

    def under_way(self) -> AbstractContextManager[None]:
        """What calls of the model have to run in."""
        return decoding_pass(self.two_part, self.uses_kernels)

    def _settle(self, model: PreTrainedModel, cache: LookaheadCache) -> None:
        """Compute what the cache has to compute again, so that it holds all that was accepted."""
        if cache.replay:
            last = cache.replay.pop()
            cache.lengths[0] -= 1
            step = lay_out(last, GuessTree.empty())
            self.forward(model, [step], cache)
            cache.commit([step], [[0]])


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs belong; parameters that accelerate keeps elsewhere do not tell."""
    device = _execution_device(model)
    if device is None and model.device.type == "meta":  # offloaded part by part
        device = _execution_device(model.get_input_embeddings())
    return torch.device(device) if device is not None else model.device


def _execution_device(module: torch.nn.Module) -> torch.device | int | str | None:
    """Where accelerate's hook on a module brings its weights and inputs, if there is one that does."""
    hook = getattr(module, "_hf_hook", None)
    devices = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])]
    return next((device for device in devices if device is not None), None)


def context_length(model: PreTrainedModel) -> int:
    """Positions that the model was made for, the least of what its configuration names; beyond any text if it does not
    say."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in POSITION_LIMITS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=2**62)
