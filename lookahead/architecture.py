"""What a model's layers can do: whether it can branch, what masks it takes, which cache it needs.

Configuration says what kind of layers there are; a probe of a few tokens then compares a branching step with plain
forward passes, because a model may accept a custom mask and ignore it.
"""

import inspect
import logging
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead.cache import InPlaceLayer, LookaheadCache, SlidingLayer
from lookahead.step import Step, Visibility, lay_out
from lookahead.window import JacobiWindow
from ngram_pool import GuessTree, Source

logger = logging.getLogger(__name__)

# Largest error of a logits row of a branching step that passes for rounding, relative to the row's spread; 1e-4 in full
# precision, where 1e-6 is usual. A row that saw a wrong token or stood in a wrong place is off by far more. (A mixture
# of experts may route a row otherwise by rounding alone, so the noise that a model shows by itself counts too.)
HALF_PRECISION = {torch.bfloat16: 8e-2, torch.float16: 2e-2}


class UnsupportedModelError(ValueError):
    """The model cannot be decoded by lookahead; the message names the layer and the reason."""


@dataclass(frozen=True)
class Architecture:
    """How to drive one model. Found by `inspect_model`."""

    layers: tuple[Visibility | None, ...]
    """One a layer; None for a layer that keeps no cache of its own."""
    mask_of: dict[str, Visibility] | None
    """Layer type to visibility where a model mixes types and takes a dict of masks; None where one mask serves all."""
    takes_position_ids: bool
    can_branch: bool = True
    """False: a custom mask cannot be honoured, so guesses are a single chain and the window is empty."""

    def make_cache(self, expected_length: int = 0) -> LookaheadCache:
        """expected_length: positions that the full layers make room for at once."""
        layers = []
        for visibility in self.layers:
            if visibility is None:
                from transformers.cache_utils import DummyLayer  # not in all versions that are supported

                layers.append(DummyLayer())
            elif visibility.window is not None:
                layers.append(SlidingLayer(visibility.window))
            else:
                layers.append(InPlaceLayer(expected_length))
        return LookaheadCache(layers=layers)

    def masks(
        self, step: Step, positions: torch.Tensor, cache: LookaheadCache, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """What to pass as ``attention_mask``: None where the model's own causal mask is right."""
        if step.is_chain:
            return None
        length = cache.get_seq_length()

        def mask(visibility: Visibility) -> torch.Tensor:
            layer = next(l for l, v in zip(cache.layers, self.layers, strict=True) if v == visibility)
            return step.mask(positions, length, layer.seen(), visibility, dtype)

        if self.mask_of is None:
            return mask(next(v for v in self.layers if v is not None))
        return {name: mask(visibility) for name, visibility in self.mask_of.items()}

    def forward(
        self, model: PreTrainedModel, step: Step, cache: LookaheadCache, last_position: int | None = None
    ) -> torch.Tensor:
        """One pass over ``step``; logits [T, vocabulary] on the model's device and in its dtype.

        last_position: window tokens are not placed beyond it (`Step.positions`).
        """
        positions = torch.from_numpy(step.positions(cache.get_seq_length(), last_position)).to(model.device)
        inputs = {"position_ids": positions[None]} if self.takes_position_ids else {}
        return model(
            input_ids=torch.from_numpy(step.ids)[None].to(model.device),
            attention_mask=self.masks(step, positions, cache, model.dtype),
            past_key_values=cache,
            use_cache=True,
            **inputs,
        ).logits[0]


_inspected: WeakKeyDictionary[PreTrainedModel, tuple[str, Architecture]] = WeakKeyDictionary()


def inspect_model(model: PreTrainedModel) -> Architecture:
    """Architecture of ``model``, probed once for each attention implementation.

    Raises UnsupportedModelError where output identical to the model's own cannot be had.
    """
    implementation = model.config._attn_implementation
    known = _inspected.get(model)
    if known is None or known[0] != implementation:
        known = (implementation, _inspect(model))
        _inspected[model] = known
    return known[1]


def context_length(model: PreTrainedModel) -> int:
    """Positions that the model was made for; a number beyond any text where it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**62


def _inspect(model: PreTrainedModel) -> Architecture:
    name = type(model).__name__
    architecture = _read_config(model)
    implementation = model.config._attn_implementation
    if architecture.can_branch:
        reason = _probe(model, architecture)
        if reason is None:
            return architecture
        logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
    chain = replace(architecture, can_branch=False)
    reason = _probe(model, chain)
    if reason is None:
        return chain
    raise UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). "
        "Loading it with attn_implementation='sdpa' or 'eager' may help; its own generate() still works."
    )


def _read_config(model: PreTrainedModel) -> Architecture:
    """Kinds of layers, as the cache that transformers would make for this model tells them."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if getattr(model, "_is_stateful", False) or not hasattr(config, "num_hidden_layers"):
        kinds = sorted({kind for kind in types or () if not kind.endswith("attention") or "linear" in kind})
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state ({', '.join(kinds) or config.model_type} layers): it cannot be taken back "
            "to an accepted prefix, so no guess can be verified. Its own generate() still works."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    layers: list[Visibility | None] = []
    try:
        theirs = DynamicCache(config=config).layers
    except Exception as error:  # configurations that transformers' own cache does not know either
        raise UnsupportedModelError(f"{name} does not say what its layers cache: {error!r}") from error
    for index, layer in enumerate(theirs):
        kind = types[index] if types else "full_attention"
        if type(layer).__name__ == "DummyLayer":
            layers.append(None)
        elif type(layer) is DynamicLayer:
            layers.append(Visibility())
        elif type(layer) is DynamicSlidingWindowLayer:
            is_chunk = kind == "chunked_attention" or (not types and layer.sliding_window == chunk)
            layers.append(Visibility(chunk=chunk) if is_chunk else Visibility(window=layer.sliding_window))
        else:
            raise UnsupportedModelError(
                f"{name} has a layer that cannot be rolled back to an accepted prefix: layer {index}, {kind} "
                f"({type(layer).__name__}). Its own generate() still works."
            )
    can_branch = model.config._attn_implementation in ("sdpa", "eager") and not _has_alibi(config)
    mask_of = None
    if types and len({v for v in layers if v is not None}) > 1:
        mask_of = {kind: v for kind, v in zip(types, layers, strict=False) if v is not None}
    takes_position_ids = "position_ids" in inspect.signature(model.forward).parameters
    return Architecture(tuple(layers), mask_of, takes_position_ids, can_branch)


def _has_alibi(config) -> bool:
    """Whether keys are biased by their place in the cache, which for a tree is not their position."""
    attention = getattr(config, "attn_config", None)
    return bool(
        config.model_type in ("bloom", "mpt")
        or getattr(config, "alibi", False)
        or getattr(attention, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    )


@torch.no_grad()
def _probe(model: PreTrainedModel, architecture: Architecture) -> str | None:
    """Run a prompt, a step and a commit; compare each logits row with a plain pass. Returns what is wrong, or None."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, 16).tolist()
    prompt, root, after = tokens[:6], tokens[6], tokens[7]
    if architecture.can_branch:
        # The rejected sibling comes first, so that the accepted path has to be moved.
        tree = GuessTree.of(tokens[8:11], [-1, -1, 1], Source.TEXT)
        window = JacobiWindow(2, 3, tokens[11:])
        window.advance(np.array(tokens[11:13]), accepted=0)
        step, path = lay_out(root, tree, window), [0, 2, 3]
    else:
        step, path = lay_out(root, GuessTree.chain(tokens[8:11], Source.TEXT)), [0, 1]
    leaves = sorted(set(range(len(step))) - set(step.parents.tolist()))
    was_training = model.training
    model.eval()
    try:
        cache = architecture.make_cache()
        architecture.forward(model, lay_out(prompt[0], GuessTree.chain(prompt[1:], Source.PROMPT)), cache)
        logits = architecture.forward(model, step, cache)
        cache.commit(path)
        final = architecture.forward(model, lay_out(after, GuessTree.empty()), cache)
        lines = [np.flatnonzero(step.ancestors[leaf]) for leaf in leaves]
        cases = [([*step.ids[path], after], final)] + [(step.ids[line], logits[line]) for line in lines]
        worst = noise = 0.0
        for line, ours in cases:
            theirs = _plain_logits(model, [*prompt, *line])
            if theirs.isnan().any():
                return "the logits of a plain pass are NaN"
            worst = max(worst, _error(ours, theirs[-len(ours) :]))
            if model.dtype in HALF_PRECISION:  # how far two plain passes of other shapes are apart
                noise = max(noise, _error(_plain_logits(model, [*prompt, *line, after])[:-1], theirs))
    except Exception as error:  # whatever a model raises at a mask or cache that it was not written for
        return f"a step with {'branches' if architecture.can_branch else 'several tokens'} failed with {error!r}"
    finally:
        model.train(was_training)
    if worst <= max(HALF_PRECISION.get(model.dtype, 1e-4), 4 * noise):
        return None
    what = "custom masks, position_ids or cache are" if architecture.can_branch else "the cache is"
    return f"{what} not honoured, its logits differ from a plain pass by {worst:.1e} of their spread"


def _plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest distance of a row [rows, vocabulary] from its reference, relative to the spread of the reference."""
    logits, reference = logits.double(), reference.double().to(logits.device)
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return ((logits - reference).norm(dim=-1) / spread).nan_to_num(torch.inf).max().item()
