"""What a model can do. Its configuration suggests an adapter, and a probe tries it out once for each way of computing.

The configuration says what kinds of layers there are. The probe (`probe`) then compares a branching step with plain
decoding, because a model may accept a custom mask and ignore it.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation
from lookahead.config import LookaheadConfig
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError, device_of
from lookahead.models.families import UnknownModelError
from lookahead.models.layers import hides_in_cache_alone, looks_up_sdpa, read_config, state_layers, why_no_branches
from lookahead.models.state import state_of
from lookahead.passes import probe, verdicts
from lookahead.passes.fused import FusedRunner
from lookahead.passes.runner import EagerRunner
from ngram_pool.waiting import kept_for_later

logger = logging.getLogger(__name__)

# Of an adapter, for later processes.
_KEPT = "in_inference_mode", "can_branch", "branches_states", "splits_attention", "uses_kernels"
_MOST_FOUND = 32  # results that are kept for a model

_found: WeakKeyDictionary[PreTrainedModel, dict[tuple, Any]] = WeakKeyDictionary()


def once(model: PreTrainedModel, what: Hashable, cpu_kernels: bool, find: Callable[[], Any]) -> Any:
    """Return the result of ``find``, which is called once for each state of the model.

    cpu_kernels: whether our own kernels may be used.
    """
    found = _found.setdefault(model, {})
    key = what, cpu_kernels, attention_implementation(model.config), state_of(model).key
    if key not in found:
        found[key] = find()
        if len(found) > _MOST_FOUND:
            del found[next(iter(found))]
    return found[key]


def once_for_all(model: PreTrainedModel, what: str, cpu_kernels: bool, find: Callable[[], str | None]) -> str | None:
    """Return what is wrong, by ``find``; None if nothing is. Later processes are told that nothing is."""

    def find_or_read() -> str | None:
        path = verdicts.path_of(model, what, cpu_kernels)
        if verdicts.load(path) is None:
            with kept_for_later():
                wrong = find()
            if wrong is not None:
                return wrong
            verdicts.save(path, {})
        return None

    return once(model, what, cpu_kernels, find_or_read)


def find_adapter(model: PreTrainedModel, cpu_kernels: bool = True) -> ModelAdapter:
    """Return the adapter of ``model``, probed once for each way of computing.

    cpu_kernels: use our own kernels on a CPU.
    Raises UnsupportedModelError if lookahead cannot give the model's own output.
    """
    cpu_kernels = cpu_kernels and device_of(model).type == "cpu"
    try:
        return once(model, "adapter", cpu_kernels, lambda: _read_or_try_ways(model, cpu_kernels))
    except UnsupportedModelError as error:
        from lookahead.compat.versions import newer_than_tested

        raise UnsupportedModelError(f"{error} {newer_than_tested()}".rstrip()) from error


def choose_runner(
    model: PreTrainedModel,
    config: LookaheadConfig,
    hidden_states: tuple[int, ...] = (),
) -> tuple[EagerRunner, dict[str, str]]:
    """Return the fastest runner that the settings admit, and the reasons against faster ones, by what they are called.

    hidden_states: layers whose output is requested (`EagerRunner`).
    """
    adapter = find_adapter(model, config.cpu_kernels)
    reasons: dict[str, str] = {}
    if adapter.uses_kernels:
        fused = fused_runner(model, adapter, hidden_states, config.pack_weights)
        if isinstance(fused, FusedRunner):
            if size := fused.declined_bytes:
                reasons["weights in fewer bits"] = (
                    f"their copy would take {size / 1e9:.1f} GB (pack_weights=True makes it)"
                )
            return fused, reasons
        reasons["fused passes"] = fused
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
    except UnknownModelError as error:
        return str(error)
    wrong = once_for_all(model, "fused", True, lambda: probe.compare_with_plain(runner, trials=trials))
    return runner if wrong is None else wrong


def can_batch(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether sequences of different lengths can share a pass. Probed once for each state of the model."""
    if not adapter.can_branch:
        return False
    runner = EagerRunner(model, adapter)
    find = partial(probe.compare_with_plain, runner, sequences=2, also_long=not state_of(model).is_known)
    return once_for_all(model, "batch", adapter.uses_kernels, find) is None


def _read_or_try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    """Return the adapter that an earlier process has found, or that `_try_ways` finds."""
    path = verdicts.path_of(model, "adapter", cpu_kernels)
    known = verdicts.load(path)
    if known is not None and known.keys() == set(_KEPT):
        return replace(read_config(model, known["branches_states"]), **known)
    with kept_for_later():
        adapter = _try_ways(model, cpu_kernels)
    if not adapter.given_up and not adapter.row_dependence:
        verdicts.save(path, {name: getattr(adapter, name) for name in _KEPT})
    return adapter


def _try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    """Return the fastest adapter that passes the probe, or raise UnsupportedModelError."""
    name, state = type(model).__name__, state_of(model)
    given_up: list[str] = []
    if cpu_kernels and state.users and (reason := state.users.why_no_kernels()) is not None:
        cpu_kernels = False
        given_up.append(f"kernels of our own: {reason}")
    adapter = replace(read_config(model), uses_kernels=cpu_kernels, foreign=tuple(map(str, state.foreign)))
    if (adapter.has_state or adapter.biases_keys) and (reason := why_no_branches(model)) is not None:
        given_up.append(f"trees: {reason}")
    if adapter.can_branch and state.users and (reason := state.users.why_no_trees()) is not None:
        adapter = replace(adapter, can_branch=False)
        given_up.append(f"trees: {reason}")
    if adapter.in_inference_mode and not probe.takes_inference_mode(model, adapter):
        adapter = replace(adapter, in_inference_mode=False)
    trials: dict[tuple[bool, int], probe.Trial] = {}
    adapter = replace(adapter, row_dependence=probe.row_dependence(model, adapter, trials))
    ways = {}
    if adapter.can_branch:
        if looks_up_sdpa(model) and not state.is_compiled and device_of(model).type == "cpu":
            reason = state.why_not_split()
            if reason is None:
                ways["split attention"] = replace(adapter, splits_attention=True)
            else:
                given_up.append(f"split attention: {reason}")
        ways["trees"] = adapter
    if hides_in_cache_alone(model, adapter):
        reason = "its cache drops positions that its masks show"
    else:
        chains = replace(read_config(model, False), can_branch=False) if adapter.branches_states else adapter
        found = {name: getattr(adapter, name) for name in ("uses_kernels", "row_dependence", "foreign")}
        ways["single chains"] = replace(chains, can_branch=False, **found)
        reason = None
    for what, way in ways.items():
        if what == "single chains" and adapter.can_branch:
            logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, reason)
        compare = partial(probe.compare_with_plain, trials=trials, also_long=not state.is_known)
        reason = compare(EagerRunner(model, way))
        if reason is not None and cpu_kernels:
            without = replace(way, uses_kernels=False)
            if compare(EagerRunner(model, without)) is None:
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
    if state.foreign:
        remedy = f"It runs other code than transformers' ({state.foreign[0]})"
    raise UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). {remedy}; its own "
        "generate() still works."
    )
