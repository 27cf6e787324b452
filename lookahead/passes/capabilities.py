"""What a model can do. Its configuration suggests an adapter, and a probe tries it out once for each way of computing.

The configuration says what kinds of layers there are. The probe (`probe`) then compares a branching step with plain
decoding, because a model may accept a custom mask and ignore it.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation, newer_than_tested
from lookahead.config import LookaheadConfig
from lookahead.cpu import products
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError, device_of
from lookahead.models.decoder import UnknownDecoderError
from lookahead.models.layers import is_compiled_by_user, looks_up_sdpa, read_config, state_layers
from lookahead.passes import compiled, probe
from lookahead.passes.fused import FusedRunner
from lookahead.passes.runner import EagerRunner

logger = logging.getLogger(__name__)

_found: WeakKeyDictionary[PreTrainedModel, dict[tuple, Any]] = WeakKeyDictionary()


def _once(model: PreTrainedModel, key: tuple, find: Callable[[], Any]) -> Any:
    """Return the result of ``find``, which is called once for each model and key."""
    found = _found.setdefault(model, {})
    if key not in found:
        found[key] = find()
    return found[key]


def find_adapter(model: PreTrainedModel, cpu_kernels: bool = True) -> ModelAdapter:
    """Return the adapter of ``model``, probed once for each way of computing.

    cpu_kernels: use our own kernels on a CPU.
    Raises UnsupportedModelError if lookahead cannot give the model's own output.
    """
    try:
        return _once(model, ("adapter", *_way(model, cpu_kernels)), lambda: _try_ways(model, cpu_kernels))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error} {newer_than_tested()}".rstrip()) from error


def why_not_compiled(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Say why passes of ``model`` are not compiled; None if they are, and their logits are right.

    Probed once for each way of computing. The first failure is final, with a warning.
    """
    if compiled.why_not(model) is None:
        _once(model, ("compiled", *_way(model, adapter.uses_kernels)), lambda: _try_compiled(model, adapter))
    return compiled.why_not(model)


def choose_runner(
    model: PreTrainedModel, config: LookaheadConfig, hidden_states: tuple[int, ...] = ()
) -> tuple[EagerRunner, dict[str, str]]:
    """Return the fastest runner that the settings admit, and the reasons against faster ones, by what they are called.

    hidden_states: layers whose output is requested (`EagerRunner`). Compiled passes cannot return it.
    """
    adapter = find_adapter(model, config.cpu_kernels)
    reasons: dict[str, str] = {}
    if adapter.uses_kernels and device_of(model).type == "cpu":
        fused = fused_runner(model, adapter, hidden_states, config.pack_weights)
        if isinstance(fused, FusedRunner):
            if size := fused.declined_bytes:
                reasons["weights in fewer bits"] = (
                    f"their copy would take {size / 1e9:.1f} GB (pack_weights=True makes it)"
                )
            return fused, reasons
        reasons["fused passes"] = fused
    if config.compile_passes and not hidden_states:
        reason = why_not_compiled(model, adapter)
        if reason is None:
            return compiled.CompiledRunner(model, adapter), reasons
        reasons["compiled passes"] = reason
    return EagerRunner(model, adapter, hidden_states), reasons


def fused_runner(
    model: PreTrainedModel,
    adapter: ModelAdapter,
    hidden_states: tuple[int, ...] = (),
    packs: bool | Literal["auto"] = False,
    trials: dict[tuple[bool, int], probe.Trial] | None = None,
) -> FusedRunner | str:
    """Return a runner of fused passes, probed once for each way of computing; or the reason why there is none.

    packs: `LookaheadConfig.pack_weights`. trials: as for `probe.compare_with_plain`.
    """
    try:
        runner = FusedRunner(model, adapter, hidden_states, packs)
    except UnknownDecoderError as error:
        return str(error)
    wrong = _once(model, ("fused", *_way(model, True)), lambda: probe.compare_with_plain(runner, trials=trials))
    return runner if wrong is None else wrong


def can_batch(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether sequences of different lengths can share a pass. Probed once for each attention implementation."""
    if not adapter.can_branch:
        return False
    key = "batch", attention_implementation(model.config), adapter.uses_kernels
    return _once(model, key, lambda: probe.compare_with_plain(EagerRunner(model, adapter), sequences=2)) is None


def same_without_cache(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether plain passes over the whole text give the logits of plain decoding on a cache, as causal attention does.

    Probed once for each attention implementation.
    """
    key = "no cache", attention_implementation(model.config)
    return _once(model, key, lambda: probe.is_same_without_cache(model, adapter))


def _way(model: PreTrainedModel, cpu_kernels: bool) -> tuple:
    """All that can change how a model computes during its life."""
    has_products = cpu_kernels and products.are_installed(model)
    return attention_implementation(model.config), cpu_kernels, has_products, is_compiled_by_user(model)


def _try_compiled(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Give compiled passes up unless their logits are right."""
    reason: str | None = "it does not take our attention"
    if adapter.splits_attention and adapter.takes_position_ids:
        reason = probe.compare_with_plain(compiled.CompiledRunner(model, adapter))
    if reason is not None:
        compiled.give_up(model, reason)


def _try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    """Return the fastest adapter that passes the probe, or raise UnsupportedModelError."""
    name = type(model).__name__
    adapter = replace(read_config(model), uses_kernels=cpu_kernels)
    if adapter.in_inference_mode and not probe.takes_inference_mode(model, adapter):
        adapter = replace(adapter, in_inference_mode=False)
    adapter = replace(adapter, row_dependence=probe.row_dependence(model, adapter))
    ways = {}
    if adapter.can_branch:
        if looks_up_sdpa(model) and not is_compiled_by_user(model):
            ways["split attention"] = replace(adapter, splits_attention=True)
        ways["trees"] = adapter
    ways["single chains"] = replace(adapter, can_branch=False)
    trials: dict[tuple[bool, int], probe.Trial] = {}
    given_up: list[str] = []
    reason: str | None = None
    for what, way in ways.items():
        if what == "single chains" and adapter.can_branch:
            logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
        reason = probe.compare_with_plain(EagerRunner(model, way), trials=trials)
        if reason is not None and cpu_kernels:
            without = replace(way, uses_kernels=False)
            if probe.compare_with_plain(EagerRunner(model, without), trials=trials) is None:
                given_up.append(f"kernels of our own: {reason}")
                way, reason = without, None
        if reason is None:
            fused_runner(model, way, trials=trials)  # is probed now, so that the first text need not wait
            return replace(way, given_up=tuple(given_up))
        given_up.append(f"{what}: {reason}")
    implementation = attention_implementation(model.config)
    if not probe.is_causal(model, adapter):
        reason = "later tokens change the logits of earlier ones"
        remedy = "Loading it with is_decoder=True may make its attention causal"
    elif adapter.has_state:
        remedy = f"Its layers {state_layers(adapter)} keep a state"
    else:
        others = [repr(other) for other in ("sdpa", "eager") if other != implementation]
        remedy = f"Loading it with attn_implementation={' or '.join(others)} may help"
    raise UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). {remedy}; its own "
        "generate() still works."
    )
