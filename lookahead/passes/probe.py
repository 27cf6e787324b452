"""Which layers a model has and whether they take what a step needs: `Architecture`s found and tried out.

Configuration says what kind of layers there are; a probe of a few tokens then compares a branching step with plain
decoding, one token a pass, because a model may accept a custom mask and ignore it.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lookahead.cpu import products
from lookahead.engine.prefill import compute
from lookahead.guessing.jacobi import JacobiWindow
from lookahead.models.adapter import (
    CACHE_ARGUMENTS,
    Architecture,
    UnsupportedModelError,
    device_of,
)
from lookahead.models.cache import InPlaceLayer, LookaheadCache
from lookahead.passes import compiled
from lookahead.step import Step, Visibility, lay_out
from ngram_pool import GuessTree, Source

logger = logging.getLogger(__name__)

# Largest error of a logits row that passes for rounding, relative to the row's spread: this, or four times what two
# plain passes of other shapes show. In full precision 1e-6 is usual. A row that saw a wrong token, stood in a wrong
# place or forgot a state is off by more. (A mixture of experts may route a row otherwise by rounding alone.)
ROUNDING = {torch.bfloat16: 8e-2, torch.float16: 2e-2}
FULL_PRECISION_ROUNDING = 1e-5

# Error of a middling row from which on it comes of no quantization: a cache is ignored, say.
GROSS = 0.2

_inspected: WeakKeyDictionary[PreTrainedModel, dict[tuple, Architecture]] = WeakKeyDictionary()
_batches: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
_without_cache: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()


def inspect_model(model: PreTrainedModel, compile_passes: bool = False, cpu_kernels: bool = True) -> Architecture:
    """Architecture of ``model``, probed once for each attention implementation, as its passes will run.

    compile_passes: compile them, where that can be done; a warning says why not.
    cpu_kernels: use kernels of our own on a CPU.
    Raises UnsupportedModelError where output identical to the model's own cannot be had.
    """
    known = _inspected.setdefault(model, {})
    has_products = cpu_kernels and products.are_installed(model)
    way = model.config._attn_implementation, cpu_kernels, has_products, _is_compiled(model)
    if way not in known:
        known[way] = _inspect(model, cpu_kernels)
    if not compile_passes:
        return known[way]
    compiled_way = *way, "compiled"
    if compiled_way not in known or (known[compiled_way].is_compiled and compiled.why_not(model)):
        known[compiled_way] = _compile(model, known[way])
    return known[compiled_way]


def _compile(model: PreTrainedModel, architecture: Architecture) -> Architecture:
    with_compiled = replace(architecture, is_compiled=True)
    reason = compiled.why_not(model)
    if reason is None:
        if not architecture.two_part or not architecture.takes_position_ids:
            reason = "it does not take our attention"
        else:
            reason = _probe(model, with_compiled)
        if reason is not None:
            compiled.give_up(model, reason)
        reason = compiled.why_not(model)  # compiling may have failed on the way, too
    if reason is None:
        return with_compiled
    return replace(architecture, given_up=(*architecture.given_up, f"compiled passes: {reason}"))


def can_batch(model: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether sequences of several lengths can share a pass, probed once for each attention implementation."""
    known = _batches.setdefault(model, {})
    way = model.config._attn_implementation, architecture.uses_kernels
    if way not in known:
        known[way] = architecture.can_branch and _probe(model, architecture, sequences=2) is None
    return known[way]


def same_without_cache(model: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether plain passes over all of a text say what plain decoding on a cache does, probed once for each attention
    implementation. They do not where attention is not causal."""
    known = _without_cache.setdefault(model, {})
    implementation = model.config._attn_implementation
    if implementation not in known:
        known[implementation] = _probe_without_cache(model, architecture)
    return known[implementation]


def _inspect(model: PreTrainedModel, cpu_kernels: bool) -> Architecture:
    name = type(model).__name__
    architecture = replace(_read_config(model), uses_kernels=cpu_kernels)
    if architecture.in_inference_mode and not _takes_inference_mode(model, architecture):
        architecture = replace(architecture, in_inference_mode=False)
    architecture = replace(architecture, row_dependence=_row_dependence(model, architecture))
    chain = replace(architecture, can_branch=False)
    ways = {"single chains": chain}
    if architecture.can_branch:
        ways = {"trees": architecture, **ways}
        if _looks_up_sdpa(model) and not _is_compiled(model):
            ways = {"attention in two parts": replace(architecture, two_part=True), **ways}
    given_up: list[str] = []
    reason = None
    for what, way in ways.items():
        if way is chain and architecture.can_branch:
            logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
        reason = _probe(model, way)
        if reason is not None and cpu_kernels:
            without = replace(way, uses_kernels=False)
            if _probe(model, without) is None:
                given_up.append(f"kernels of our own: {reason}")
                way, reason = without, None
        if reason is None:
            return replace(way, given_up=tuple(given_up))
        given_up.append(f"{what}: {reason}")
    implementation = model.config._attn_implementation
    if not _is_causal(model, architecture):
        reason = "later tokens change the logits of earlier ones"
        remedy = "Loading it with is_decoder=True may make its attention causal"
    elif architecture.has_state:
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
        can_branch=(
            model.config._attn_implementation in ("sdpa", "eager") and not _goes_by_columns(config) and not has_state
        ),
    )


def _changes_rope(config: PreTrainedConfig) -> bool:
    """Whether a pass may give the model other rotary frequencies, which it then keeps."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _is_compiled(model: PreTrainedModel) -> bool:
    """Whether somebody has compiled the model, or a part of it. What is compiled does not see that a pass is ours."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _looks_up_sdpa(model: PreTrainedModel) -> bool:
    """Whether modules of the model look up their attention with transformers, by the name "sdpa"."""
    configs = (getattr(module, "config", None) for module in model.modules())
    has_sdpa = any(getattr(config, "_attn_implementation", None) == "sdpa" for config in configs)
    return model._supports_attention_backend and has_sdpa


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


@contextmanager
def _as_in_generate(model: PreTrainedModel) -> Iterator[None]:
    """Without gradients and without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _takes_inference_mode(model: PreTrainedModel, architecture: Architecture) -> bool:
    """False where tensors of the model's own refuse it (weights quantized by some libraries do)."""
    try:
        with _as_in_generate(model), torch.inference_mode():
            _plain_logits(model, architecture, torch.zeros(1, 2, dtype=torch.long))
    except (torch.OutOfMemoryError, MemoryError):  # says nothing of the model
        raise
    except Exception:  # what else is wrong, the probe will say
        return False
    return True


def _row_dependence(model: PreTrainedModel, architecture: Architecture) -> float:
    """`Architecture.row_dependence`.

    Of several sequences, which no attention mixes, each is computed with the others and alone; one of them, where
    attention is causal, at once and one token a pass. (Not where a state is kept: scans and steps sum otherwise.) A row
    that a router sends elsewhere by rounding does not count: in full precision that hardly happens twice, in half
    precision not to most rows.
    """
    rng = np.random.default_rng(1)
    takes_turns = _is_causal(model, architecture) and not architecture.has_state
    found = []
    for _ in range(2):
        tokens = torch.from_numpy(rng.integers(0, _vocabulary(model), (4, 16)))
        try:
            with _as_in_generate(model):
                errors = _errors_beside_others(model, architecture, tokens)
                at_once = _errors_at_once(model, architecture, tokens[:1]) if takes_turns else errors[:0]
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # a model that takes no batches, or nothing: the probe will say
            return 0.0
        if len(at_once) and at_once.median() < GROSS:
            errors = torch.cat([errors, at_once])
        found.append((errors.median() if model.dtype in ROUNDING else errors.max()).item())
        if not found[-1] > ROUNDING.get(model.dtype, FULL_PRECISION_ROUNDING):
            return 0.0
    return max(found)


def _is_causal(model: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether what follows a token leaves its logits as they are, in a pass of the model's own."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, _vocabulary(model), (1, 12)))
    try:
        with _as_in_generate(model):
            logits = _plain_logits(model, architecture, tokens)
            tokens[0, 6:] = tokens[0, 6:].flip(0)
            other = _plain_logits(model, architecture, tokens)
    except Exception:  # no pass, so no answer: what the probe said stands, as it does where all is NaN
        return True
    if logits.isnan().any():
        return True
    return relative_error(other[0, :6], logits[0, :6]) <= ROUNDING.get(model.dtype, FULL_PRECISION_ROUNDING)


def _probe_without_cache(model: PreTrainedModel, architecture: Architecture) -> bool:
    """`same_without_cache`, by a prompt of 8 tokens and 4 more."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, _vocabulary(model), (1, 12)))
    with _as_in_generate(model):
        cache = DynamicCache(config=architecture.config)
        cached = [_plain_logits(model, architecture, tokens[:, :8], cache)[0, -1:]]
        cached += [_plain_logits(model, architecture, tokens[:, i : i + 1], cache, i)[0] for i in range(8, 12)]
        at_once = [_plain_logits(model, architecture, tokens[:, : i + 1])[0, -1:] for i in range(7, 12)]
        noise = _errors_beside_others(model, architecture, tokens.repeat(2, 1)).max().item()
    rounding = _rounding(model, max(noise, architecture.row_dependence))
    return relative_error(torch.cat(at_once), torch.cat(cached)) <= rounding


def _probe(model: PreTrainedModel, architecture: Architecture, sequences: int = 1) -> str | None:
    """What is wrong with decoding ``model`` so, or None: `_compare_with_plain`.

    sequences: in the batch; their prompts and accepted paths differ in length.
    """
    try:
        with _as_in_generate(model):
            return _compare_with_plain(model, architecture, sequences)
    except (torch.OutOfMemoryError, MemoryError):  # says nothing of the model
        raise
    except Exception as error:  # whatever a model raises at a mask or cache that it was not written for
        return f"a step with {'branches' if architecture.can_branch else 'several tokens'} failed with {error!r}"


def _compare_with_plain(model: PreTrainedModel, architecture: Architecture, sequences: int) -> str | None:
    """Run prompts, three steps and their commits; compare each row of logits with plain decoding."""
    tokens = np.random.default_rng(0).integers(0, _vocabulary(model), (sequences, 20))
    texts = [tokens[b, : 6 - 2 * b].tolist() for b in range(sequences)]
    plans = [_first_step(line, architecture.can_branch, b) for b, line in enumerate(tokens)]
    worst, lines = 0.0, []
    caches = [architecture.make_cache() for _ in range(sequences)]
    theirs = [DynamicCache(config=architecture.config) for _ in range(sequences)]  # of plain decoding
    for text, cache, their in zip(texts, caches, theirs, strict=True):
        prompt = torch.tensor([text], device=device_of(model))
        logits = compute(model, architecture, prompt, cache, None, len(text))
        if not _holds_rows_of(cache, logits):
            return "a pass leaves more or fewer positions in the cache than it has tokens"
        worst = max(worst, relative_error(logits, _plain_logits(model, architecture, prompt, their)[0]))
    cache = architecture.make_cache() if sequences > 1 else caches[0]
    if sequences > 1:
        cache.stack(caches)
    chain = lay_out(tokens[0, 17], GuessTree.chain(tokens[0, 18:19], Source.TEXT))  # is accepted whole
    rounds = [plans, [(chain, [0, 1])] * sequences, [(lay_out(tokens[0, 19], GuessTree.empty()), [0])] * sequences]
    for plan in rounds:
        steps, paths = [step for step, _ in plan], [path for _, path in plan]
        logits = architecture.forward(model, steps, cache)
        for b, (step, path) in enumerate(plan):
            expected, after = _plain_rows(model, architecture, step, theirs[b], len(texts[b]))
            if expected.isnan().any():
                return "the logits of a plain pass are NaN"
            worst = max(worst, relative_error(logits[b, : len(step)], expected))
            leaves = set(range(len(step))) - set(step.parents.tolist())
            lines += [[*texts[b], *step.ids[step.ancestors[leaf]]] for leaf in leaves]
            theirs[b] = after[path[-1]]
            texts[b] += step.ids[path].tolist()
        cache.commit(steps, paths)
    longest = max(map(len, lines))
    same_length = torch.tensor([[*line, *[0] * (longest - len(line))] for line in lines])
    noise = _errors_beside_others(model, architecture, same_length).max().item()
    if architecture.has_state:  # scans and steps sum otherwise
        at_once = _errors_at_once(model, architecture, same_length[-1:])
        noise = max(noise, at_once.max().item() if at_once.median() < GROSS else 0.0)
    if worst <= _rounding(model, max(noise, architecture.row_dependence)):
        return None
    what = "custom masks, position_ids or cache are" if architecture.can_branch else "the cache is"
    return f"{what} not honoured, its logits differ from plain decoding's by {worst:.1e} of their spread"


def _holds_rows_of(cache: LookaheadCache, logits: torch.Tensor) -> bool:
    """Whether the last pass put a column into every layer for each row of its logits [T, vocabulary]."""
    layers = [layer for layer in cache.layers if isinstance(layer, InPlaceLayer) and layer.is_initialized]
    return all(layer.columns - layer.base == len(logits) for layer in layers)


def _first_step(tokens: np.ndarray, can_branch: bool, b: int) -> tuple[Step, list[int]]:
    """The probe's first step for sequence ``b`` and its accepted path."""
    if not can_branch:
        return lay_out(tokens[6], GuessTree.chain(tokens[8:11], Source.TEXT)), [0, 1]
    # The rejected sibling comes first, so that the accepted path has to be moved.
    tree = GuessTree.of(tokens[8:11].tolist(), [-1, -1, 1], Source.TEXT)
    window = JacobiWindow(2, 3, tokens[11:].tolist())
    window.advance(tokens[11:13], accepted=0)
    return (lay_out(tokens[6], tree, window), [0, 2, 3]) if b == 0 else (lay_out(tokens[6], tree), [0])


def _vocabulary(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _rounding(model: PreTrainedModel, noise: float) -> float:
    """Largest error of a row that passes for rounding. noise: that of plain passes of other shapes."""
    return max(ROUNDING.get(model.dtype, FULL_PRECISION_ROUNDING), 4 * noise)


def _plain_logits(
    model: PreTrainedModel,
    architecture: Architecture,
    ids: torch.Tensor,
    cache: DynamicCache | None = None,
    begin: int = 0,
) -> torch.Tensor:
    """Logits [batch, n, vocabulary] of the model's own pass over ids [batch, n] from position ``begin`` on."""
    inputs = {"input_ids": ids.to(device_of(model)), "use_cache": cache is not None}
    if cache is not None:
        inputs[architecture.cache_argument] = cache
    if architecture.takes_position_ids:  # as generate() does; some would count from their padding token otherwise
        positions = torch.arange(begin, begin + ids.shape[1], device=device_of(model))
        inputs["position_ids"] = positions.expand(ids.shape)
    return model(**inputs).logits


def _plain_rows(
    model: PreTrainedModel, architecture: Architecture, step: Step, cache: DynamicCache, length: int
) -> tuple[torch.Tensor, list[DynamicCache]]:
    """Plain decoding of each line of a step, one token a pass, on a cache that holds ``length`` positions.

    Returns the logits [T, vocabulary], and for each row the cache that it leaves.
    """
    rows, caches = [], []
    for token, parent, depth in zip(step.ids.tolist(), step.parents.tolist(), step.depths.tolist(), strict=True):
        caches.append(copy.deepcopy(cache if parent < 0 else caches[parent]))
        rows.append(_plain_logits(model, architecture, torch.tensor([[token]]), caches[-1], length + depth)[0])
    return torch.cat(rows), caches


def _errors_beside_others(model: PreTrainedModel, architecture: Architecture, ids: torch.Tensor) -> torch.Tensor:
    """Error of each row (`_row_errors`) that comes of computing the sequences ids [batch, n] in one pass."""
    together = _plain_logits(model, architecture, ids)
    alone = torch.cat([_plain_logits(model, architecture, line[None]) for line in ids])
    return _row_errors(together.flatten(0, 1), alone.flatten(0, 1))


def _errors_at_once(model: PreTrainedModel, architecture: Architecture, ids: torch.Tensor) -> torch.Tensor:
    """Error of each row (`_row_errors`) that comes of computing the tokens ids [1, n] in one pass, not one by one."""
    at_once = _plain_logits(model, architecture, ids, DynamicCache(config=architecture.config))[0]
    cache = DynamicCache(config=architecture.config)
    single = [_plain_logits(model, architecture, token[None, None], cache, i)[0] for i, token in enumerate(ids[0])]
    return _row_errors(at_once, torch.cat(single))


def _row_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance of each row [rows, vocabulary] from its reference, relative to the spread of the reference."""
    logits, reference = logits.double(), reference.double().to(logits.device)
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return (logits - reference).norm(dim=-1) / spread


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest of the rows' errors (`_row_errors`); infinite where one is NaN."""
    return _row_errors(logits, reference).nan_to_num(torch.inf).max().item()
