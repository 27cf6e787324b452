"""Which layers a model has and whether they take what a step needs: `Architecture`s found and tried out.

Configuration says what kind of layers there are; a probe of a few tokens then compares a branching step with plain
forward passes, because a model may accept a custom mask and ignore it.
"""

import inspect
import logging
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead import attention, compiled
from lookahead.architecture import (
    CACHE_ARGUMENTS,
    Architecture,
    UnsupportedModelError,
    device_of,
    implementation_of,
)
from lookahead.cache import InPlaceLayer, LookaheadCache
from lookahead.step import Step, Visibility, lay_out
from lookahead.window import JacobiWindow
from ngram_pool import GuessTree, Source

logger = logging.getLogger(__name__)

# Largest error of a logits row that passes for rounding, relative to the row's spread: this, or four times what two
# plain passes of other shapes show. In full precision 1e-6 is usual. A row that saw a wrong token, stood in a wrong
# place or forgot a state is off by more. (A mixture of experts may route a row otherwise by rounding alone.)
ROUNDING = {torch.bfloat16: 8e-2, torch.float16: 2e-2}
FULL_PRECISION_ROUNDING = 1e-5

_inspected: WeakKeyDictionary[PreTrainedModel, dict[str | tuple[str, str], Architecture]] = WeakKeyDictionary()
_batches: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


def inspect_model(model: PreTrainedModel, compile_passes: bool = False) -> Architecture:
    """Architecture of ``model``, probed once for each attention implementation.

    compile_passes: compile them, where that can be done; a warning says why not.
    Raises UnsupportedModelError where output identical to the model's own cannot be had.
    """
    known = _inspected.setdefault(model, {})
    implementation = implementation_of(model)
    if implementation not in known:
        known[implementation] = _inspect(model)
    if not compile_passes:
        return known[implementation]
    if (implementation, "compiled") not in known:
        known[implementation, "compiled"] = _compile(model, known[implementation])
    return known[implementation, "compiled"]


def _compile(model: PreTrainedModel, architecture: Architecture) -> Architecture:
    with_compiled = replace(architecture, is_compiled=True)
    if not architecture.two_part or not architecture.takes_position_ids:
        reason = "it does not take our attention"
    else:
        reason = _probe(model, with_compiled)
    if reason is None and not compiled.gave_up(model):
        return with_compiled
    if reason is not None:
        compiled.give_up(model, reason)
    return architecture


def can_batch(model: PreTrainedModel) -> bool:
    """Whether sequences of several lengths can share a pass, probed once for each attention implementation."""
    known = _batches.setdefault(model, {})
    implementation = implementation_of(model)
    if implementation not in known:
        architecture = inspect_model(model)
        known[implementation] = architecture.can_branch and _probe(model, architecture, sequences=2) is None
    return known[implementation]


def _inspect(model: PreTrainedModel) -> Architecture:
    name = type(model).__name__
    architecture = _read_config(model)
    implementation = implementation_of(model)
    if architecture.can_branch:
        configs = _configs_with_sdpa(model)
        if configs:
            in_parts = replace(architecture, two_part=configs)
            if _probe(model, in_parts) is None:
                return in_parts
        reason = _probe(model, architecture)
        if reason is None:
            return architecture
        logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
    chain = replace(architecture, can_branch=False)
    reason = _probe(model, chain)
    if reason is None:
        return chain
    if architecture.has_state:
        remedy = f"A state is kept by its layers {_state_layers(architecture)}"
    else:
        others = [repr(other) for other in ("sdpa", "eager") if other != implementation]
        remedy = f"Loading it with attn_implementation={' or '.join(others)} may help"
    raise UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). {remedy}; its own "
        "generate() still works."
    )


def _state_layers(architecture: Architecture) -> str:
    """Indices, type and class of the layers that keep a state."""
    types = getattr(architecture.config, "layer_types", None) or [architecture.config.model_type] * 2**10
    kinds: dict[str, list[str]] = {}
    for index, layer in enumerate(architecture.make_cache().layers):
        if not isinstance(layer, InPlaceLayer):
            kinds.setdefault(f"{types[index]}, {type(layer).__name__}", []).append(str(index))
    return "; ".join(f"{', '.join(indices)} ({kind})" for kind, indices in kinds.items())


def _read_config(model: PreTrainedModel) -> Architecture:
    """Kinds of layers, as the cache that transformers would make for this model tells them."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    arguments = inspect.signature(model.forward).parameters
    cache_argument = next((argument for argument in CACHE_ARGUMENTS if argument in arguments), None)
    try:
        theirs = DynamicCache(config=config).layers
    except Exception as error:  # configurations that transformers' own cache does not know either
        raise UnsupportedModelError(
            f"{name} does not say what its layers cache: {error!r}. Its own generate() still works."
        ) from error
    if cache_argument is None or not theirs:
        raise UnsupportedModelError(
            f"{name} keeps what its {config.model_type} layers remember in a cache of its own, which cannot be "
            "taken back to an accepted prefix, so no guess can be verified. Its own generate() still works."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    layers: list[Visibility | None] = []
    for index, layer in enumerate(theirs):
        kind = types[index] if types else "full_attention"
        if type(layer) is DynamicLayer:
            layers.append(Visibility())
        elif type(layer) is DynamicSlidingWindowLayer:
            is_chunk = kind == "chunked_attention" or (not types and layer.sliding_window == chunk)
            layers.append(Visibility(chunk=chunk) if is_chunk else Visibility(window=layer.sliding_window))
        else:
            layers.append(None)
    has_state = any(
        visibility is None and type(layer).__name__ != "DummyLayer"
        for visibility, layer in zip(layers, theirs, strict=True)
    )
    mask_of = None
    if types and len({v for v in layers if v is not None}) > 1:
        mask_of = {kind: v for kind, v in zip(types, layers, strict=False) if v is not None}
    return Architecture(
        config,
        tuple(layers),
        mask_of,
        takes_position_ids="position_ids" in arguments,
        cache_argument=cache_argument,
        has_state=has_state,
        in_inference_mode=not has_state and not _changes_rope(config),
        can_branch=(implementation_of(model) in ("sdpa", "eager") and not _goes_by_columns(config) and not has_state),
    )


def _changes_rope(config: PreTrainedConfig) -> bool:
    """Whether a pass may give the model other rotary frequencies, which it then keeps."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _configs_with_sdpa(model: PreTrainedModel) -> tuple[PreTrainedConfig, ...]:
    """Configurations of the modules that look up their "sdpa" attention with transformers; parts have their own."""
    if not model._supports_attention_backend:
        return ()
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    sdpa = ("sdpa", attention.NAME)
    return tuple(c for c in configs.values() if getattr(c, "_attn_implementation", None) in sdpa)


def _goes_by_columns(config) -> bool:
    """Whether attention depends on a key's column in the cache, which for a tree is not its position.

    The probe would see a bias by distance (ALiBi), but not a window that is longer than its few tokens.
    """
    attention = getattr(config, "attn_config", None)
    return bool(
        config.model_type in ("bloom", "mpt")
        or getattr(config, "alibi", False)
        or getattr(attention, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
        or (config.model_type == "gpt_neo" and "local" in config.attention_layers)
    )


@torch.no_grad()
def _probe(model: PreTrainedModel, architecture: Architecture, sequences: int = 1) -> str | None:
    """Run prompts, three steps and their commits; compare each row of logits with a plain pass.

    sequences: in the batch; their prompts and accepted paths differ in length.
    Returns what is wrong, or None.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (sequences, 20))
    texts = [tokens[b, : 6 - 2 * b].tolist() for b in range(sequences)]
    plans = [_first_step(line, architecture.can_branch, b) for b, line in enumerate(tokens)]
    was_training = model.training
    model.eval()
    try:
        caches = [architecture.make_cache() for _ in range(sequences)]
        for text, cache in zip(texts, caches, strict=True):
            prefill = lay_out(text[0], GuessTree.chain(text[1:], Source.PROMPT))
            logits = architecture.forward(model, [prefill], cache)
            if not _holds_rows_of(cache, logits):
                return "a pass leaves more or fewer positions in the cache than it has tokens"
            cache.commit([prefill], [list(range(len(prefill)))])
        cache = architecture.make_cache() if sequences > 1 else caches[0]
        if sequences > 1:
            cache.stack(caches)
        chain = lay_out(tokens[0, 17], GuessTree.chain(tokens[0, 18:19], Source.TEXT))  # is accepted whole
        rounds = [plans, [(chain, [0, 1])] * sequences, [(lay_out(tokens[0, 19], GuessTree.empty()), [0])] * sequences]
        worst = noise = 0.0
        for plan in rounds:
            steps, paths = [step for step, _ in plan], [path for _, path in plan]
            logits = architecture.forward(model, steps, cache)
            for b, (step, path) in enumerate(plan):
                for leaf in set(range(len(step))) - set(step.parents.tolist()):
                    line = np.flatnonzero(step.ancestors[leaf])
                    theirs = _plain_logits(model, architecture, [*texts[b], *step.ids[line]])
                    if theirs.isnan().any():
                        return "the logits of a plain pass are NaN"
                    worst = max(worst, relative_error(logits[b, line], theirs[-len(line) :]))
                    longer = _plain_logits(model, architecture, [*texts[b], *step.ids[line], 0])[:-1]
                    noise = max(noise, relative_error(longer, theirs))
                texts[b] += step.ids[path].tolist()
            cache.commit(steps, paths)
    except (torch.OutOfMemoryError, MemoryError):  # says nothing of the model
        raise
    except Exception as error:  # whatever a model raises at a mask or cache that it was not written for
        return f"a step with {'branches' if architecture.can_branch else 'several tokens'} failed with {error!r}"
    finally:
        model.train(was_training)
    if worst <= max(ROUNDING.get(model.dtype, FULL_PRECISION_ROUNDING), 4 * noise):
        return None
    what = "custom masks, position_ids or cache are" if architecture.can_branch else "the cache is"
    return f"{what} not honoured, its logits differ from a plain pass by {worst:.1e} of their spread"


def _holds_rows_of(cache: LookaheadCache, logits: torch.Tensor) -> bool:
    """Whether the last pass put a column into every layer for each row of its logits [batch, T, vocabulary]."""
    layers = [layer for layer in cache.layers if isinstance(layer, InPlaceLayer) and layer.is_initialized]
    return all(layer.columns - layer.base == logits.shape[1] for layer in layers)


def _first_step(tokens: np.ndarray, can_branch: bool, b: int) -> tuple[Step, list[int]]:
    """The probe's first step for sequence ``b`` and its accepted path."""
    if not can_branch:
        return lay_out(tokens[6], GuessTree.chain(tokens[8:11], Source.TEXT)), [0, 1]
    # The rejected sibling comes first, so that the accepted path has to be moved.
    tree = GuessTree.of(tokens[8:11].tolist(), [-1, -1, 1], Source.TEXT)
    window = JacobiWindow(2, 3, tokens[11:].tolist())
    window.advance(tokens[11:13], accepted=0)
    return (lay_out(tokens[6], tree, window), [0, 2, 3]) if b == 0 else (lay_out(tokens[6], tree), [0])


def _plain_logits(model: PreTrainedModel, architecture: Architecture, ids: list[int]) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([ids], device=device_of(model))}
    if architecture.takes_position_ids:  # as generate() does; some would count from their padding token otherwise
        inputs["position_ids"] = torch.arange(len(ids), device=device_of(model))[None]
    return model(**inputs, use_cache=False).logits[0]


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest distance of a row [rows, vocabulary] from its reference, relative to the spread of the reference."""
    logits, reference = logits.double(), reference.double().to(logits.device)
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return ((logits - reference).norm(dim=-1) / spread).nan_to_num(torch.inf).max().item()
