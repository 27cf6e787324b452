"""What a model can do: its adapter is read from the configuration, then tried out, once for each way of computing.

Configuration says what kind of layers there are; a probe (`probe`) then compares a branching step with plain decoding,
because a model may accept a custom mask and ignore it.
"""

import logging
from dataclasses import replace
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation
from lookahead.config import LookaheadConfig
from lookahead.cpu import products
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError
from lookahead.models.layers import is_compiled_by_user, looks_up_sdpa, read_config, state_layers
from lookahead.passes import compiled, probe
from lookahead.passes.runner import EagerRunner

logger = logging.getLogger(__name__)

_adapters: WeakKeyDictionary[PreTrainedModel, dict[tuple, ModelAdapter]] = WeakKeyDictionary()
_batches: WeakKeyDictionary[PreTrainedModel, dict[tuple, bool]] = WeakKeyDictionary()
_without_cache: WeakKeyDictionary[PreTrainedModel, dict[str | None, bool]] = WeakKeyDictionary()
_compiles: WeakKeyDictionary[PreTrainedModel, set[tuple]] = WeakKeyDictionary()


def find_adapter(model: PreTrainedModel, cpu_kernels: bool = True) -> ModelAdapter:
    """Adapter of ``model``, probed once for each attention implementation, as its passes will run.

    cpu_kernels: use kernels of our own on a CPU.
    Raises UnsupportedModelError where output identical to the model's own cannot be had.
    """
    known = _adapters.setdefault(model, {})
    way = _way(model, cpu_kernels)
    if way not in known:
        known[way] = _try_ways(model, cpu_kernels)
    return known[way]


def why_not_compiled(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Why passes of ``model`` are not compiled, or None: they are, and say what its own passes say.

    Probed once for each way of computing. The first reason is warned of, and holds from then on.
    """
    known, way = _compiles.setdefault(model, set()), _way(model, adapter.uses_kernels)
    if way not in known and compiled.why_not(model) is None:
        known.add(way)
        reason: str | None = "it does not take our attention"
        if adapter.splits_attention and adapter.takes_position_ids:
            reason = probe.compare_with_plain(compiled.CompiledRunner(model, adapter))
        if reason is not None:
            compiled.give_up(model, reason)
    return compiled.why_not(model)


def choose_runner(
    model: PreTrainedModel, config: LookaheadConfig, hidden_states: tuple[int, ...] = ()
) -> tuple[EagerRunner, str | None]:
    """The fastest runner that the settings ask for and that serves, and why passes are not compiled if they should be.

    hidden_states: layers whose output is wanted (`EagerRunner`), which compiled passes do not give.
    """
    adapter = find_adapter(model, config.cpu_kernels)
    reason = None
    if config.compile_passes and not hidden_states:
        reason = why_not_compiled(model, adapter)
        if reason is None:
            return compiled.CompiledRunner(model, adapter), None
    return EagerRunner(model, adapter, hidden_states), reason


def can_batch(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether sequences of several lengths can share a pass, probed once for each attention implementation."""
    known = _batches.setdefault(model, {})
    way = attention_implementation(model.config), adapter.uses_kernels
    if way not in known:
        runner = EagerRunner(model, adapter)
        known[way] = adapter.can_branch and probe.compare_with_plain(runner, sequences=2) is None
    return known[way]


def same_without_cache(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether plain passes over all of a text say what plain decoding on a cache does, probed once for each attention
    implementation. They do not where attention is not causal."""
    known = _without_cache.setdefault(model, {})
    implementation = attention_implementation(model.config)
    if implementation not in known:
        known[implementation] = probe.is_same_without_cache(model, adapter)
    return known[implementation]


def _way(model: PreTrainedModel, cpu_kernels: bool) -> tuple:
    """All that can change how a model computes while it lives."""
    has_products = cpu_kernels and products.are_installed(model)
    return attention_implementation(model.config), cpu_kernels, has_products, is_compiled_by_user(model)


def _try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    name = type(model).__name__
    adapter = replace(read_config(model), uses_kernels=cpu_kernels)
    if adapter.in_inference_mode and not probe.takes_inference_mode(model, adapter):
        adapter = replace(adapter, in_inference_mode=False)
    adapter = replace(adapter, row_dependence=probe.row_dependence(model, adapter))
    chain = replace(adapter, can_branch=False)
    ways = {"single chains": chain}
    if adapter.can_branch:
        ways = {"trees": adapter, **ways}
        if looks_up_sdpa(model) and not is_compiled_by_user(model):
            ways = {"split attention": replace(adapter, splits_attention=True), **ways}
    given_up: list[str] = []
    reason: str | None = None
    for what, way in ways.items():
        if way is chain and adapter.can_branch:
            logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
        reason = probe.compare_with_plain(EagerRunner(model, way))
        if reason is not None and cpu_kernels:
            without = replace(way, uses_kernels=False)
            if probe.compare_with_plain(EagerRunner(model, without)) is None:
                given_up.append(f"kernels of our own: {reason}")
                way, reason = without, None
        if reason is None:
            return replace(way, given_up=tuple(given_up))
        given_up.append(f"{what}: {reason}")
    implementation = attention_implementation(model.config)
    if not probe.is_causal(model, adapter):
        reason = "later tokens change the logits of earlier ones"
        remedy = "Loading it with is_decoder=True may make its attention causal"
    elif adapter.has_state:
        remedy = f"A state is kept by its layers {state_layers(adapter)}"
    else:
        others = [repr(other) for other in ("sdpa", "eager") if other != implementation]
        remedy = f"Loading it with attn_implementation={' or '.join(others)} may help"
    raise UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). {remedy}; its own "
        "generate() still works."
    )
