"""Tries the ways in which a model could be decoded, and chooses the fastest that gives the model's own logits."""

import logging
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation, looks_up_attention
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.layers import read_config
from lookahead.models.sliding import hides_in_cache_alone
from lookahead.models.state import state_of
from lookahead.passes import capabilities, probe
from lookahead.passes.runner import EagerRunner

logger = logging.getLogger(__name__)


def try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    """Return the fastest adapter that passes the probe, or raise UnsupportedModelError."""
    name, state = type(model).__name__, state_of(model)
    given_up: list[str] = []
    if cpu_kernels and state.users and (reason := state.users.why_no_kernels()) is not None:
        cpu_kernels = False
        given_up.append(f"lookahead's kernels: {reason}")
    adapter = replace(read_config(model), uses_kernels=cpu_kernels, foreign=tuple(map(str, state.foreign)))
    if adapter.has_state or adapter.biases_keys:
        from lookahead.models import branching  # other models do not need it

        if (reason := branching.why_not(model)) is not None:
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
        if _looks_up_sdpa(model) and not state.is_compiled and device_of(model).type == "cpu":
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
        against_trees = reason if what == "single chains" and adapter.can_branch else None
        compare = partial(probe.compare_with_plain, trials=trials, also_long=not state.is_known)
        reason = compare(EagerRunner(model, way))
        if reason is not None and cpu_kernels:
            without = replace(way, uses_kernels=False)
            if compare(EagerRunner(model, without)) is None:
                given_up.append(f"lookahead's kernels: {reason}")
                way, reason = without, None
        if reason is None:
            if against_trees is not None:
                logger.warning("%s: %s. Guesses will be a single chain, without a Jacobi window.", name, against_trees)
            capabilities.fused_runner(model, way, trials=trials)  # probed now, so that the first text need not wait
            return replace(way, given_up=tuple(given_up))
        given_up.append(f"{what}: {reason}")
    from lookahead.passes.refusal import refusal  # other models can be decoded

    raise refusal(model, adapter, reason)


def _looks_up_sdpa(model: PreTrainedModel) -> bool:
    """Whether any module of the model asks transformers for the attention named "sdpa"."""
    configs = (getattr(module, "config", None) for module in model.modules())
    has_sdpa = any(attention_implementation(config) == "sdpa" for config in configs)
    looks_up = looks_up_attention(model) or "ALL_ATTENTION_FUNCTIONS" in state_of(model).names
    return looks_up and has_sdpa
