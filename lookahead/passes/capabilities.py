"""What a model can do. Its configuration suggests an adapter, and a probe tries it out once for each way of computing.

The configuration says what kinds of layers there are. The probe (`probe`) then compares a branching step with plain
decoding, because a model may accept a custom mask and ignore it.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation
from lookahead.config import LookaheadConfig
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError, device_of
from lookahead.models.families import UnknownModelError
from lookahead.models.kept import OfModels
from lookahead.models.layers import read_config
from lookahead.models.state import state_of
from lookahead.passes import verdicts
from lookahead.passes.fused import FusedRunner
from lookahead.passes.runner import EagerRunner
from ngram_pool.waiting import kept_for_later

if TYPE_CHECKING:
    from lookahead.passes.probe import Trial

# Of an adapter, for later processes.
_KEPT = "in_inference_mode", "can_branch", "branches_states", "splits_attention", "uses_kernels"
_MOST_FOUND = 32  # results that are kept for a model

_found = OfModels[dict[tuple, Any]]()


class _Refusal(str):
    """The words of an UnsupportedModelError. The error itself would keep the model, by its traceback."""


def once(model: PreTrainedModel, what: Hashable, cpu_kernels: bool, find: Callable[[], Any]) -> Any:
    """Return the result of ``find``, which is called once for each state of the model.

    cpu_kernels: whether our own kernels may be used.
    Raises UnsupportedModelError if ``find`` did.
    """
    found = _found.setdefault(model, {})
    key = what, cpu_kernels, attention_implementation(model.config), state_of(model).key
    if key not in found:
        try:
            found[key] = find()
        except UnsupportedModelError as error:
            found[key] = _Refusal(error)
        if len(found) > _MOST_FOUND:
            del found[next(iter(found))]
    result = found[key]
    if isinstance(result, _Refusal):
        raise UnsupportedModelError(str(result))
    return result


def forget_refusals(model: PreTrainedModel) -> None:
    """Let what refused the model be tried again: something may have been mended that its state does not show."""
    found = _found.get(model) or {}
    for key in [key for key, result in found.items() if isinstance(result, _Refusal)]:
        del found[key]


def what_is_wrong(model: PreTrainedModel, what: str, cpu_kernels: bool, find: Callable[[], str | None]) -> str | None:
    """Return what ``find`` says is wrong; None if nothing is. That nothing is wrong is stored for later processes."""

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
    Raises UnsupportedModelError if lookahead would change the model's output.
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
    """Return the fastest runner that the settings allow, and the reasons against faster ones, by their names.

    hidden_states: layers whose output is requested (`EagerRunner`).
    """
    adapter = find_adapter(model, config.cpu_kernels)
    reasons: dict[str, str] = {}
    if adapter.uses_kernels:
        fused = fused_runner(model, adapter, hidden_states, config.pack_weights)
        if isinstance(fused, FusedRunner):
            if size := fused.declined_bytes:
                reasons["packed weights"] = f"their copy would take {size / 1e9:.1f} GB (pack_weights=True makes it)"
            return fused, reasons
        reasons["fused passes"] = fused
    return EagerRunner(model, adapter, hidden_states), reasons


def fused_runner(
    model: PreTrainedModel,
    adapter: ModelAdapter,
    hidden_states: tuple[int, ...] = (),
    packs: bool | Literal["auto"] = False,
    trials: "dict[tuple[bool, int], Trial] | None" = None,
) -> FusedRunner | str:
    """Return a runner of fused passes, probed once for each way of computing; or the reason why there is none.

    packs: `LookaheadConfig.pack_weights`. trials: as for `probe.compare_with_plain`.
    """
    try:
        runner = FusedRunner(model, adapter, hidden_states, packs)
    except UnknownModelError as error:
        return str(error)
    wrong = what_is_wrong(model, "fused", True, partial(_compare_with_plain, runner, trials=trials))
    return runner if wrong is None else wrong


def can_batch(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether sequences of different lengths can share a pass. Probed once for each state of the model."""
    if not adapter.can_branch:
        return False
    runner = EagerRunner(model, adapter)
    find = partial(_compare_with_plain, runner, sequences=2, also_long=not state_of(model).is_known)
    return what_is_wrong(model, "batch", adapter.uses_kernels, find) is None


def _compare_with_plain(runner: EagerRunner, **options: Any) -> str | None:
    """`probe.compare_with_plain`."""
    from lookahead.passes import probe  # not needed if an earlier process has probed the model

    return probe.compare_with_plain(runner, **options)


def _read_or_try_ways(model: PreTrainedModel, cpu_kernels: bool) -> ModelAdapter:
    """Return the adapter that an earlier process has found, or that `ways.try_ways` finds."""
    path = verdicts.path_of(model, "adapter", cpu_kernels)
    known = verdicts.load(path)
    if known is not None and known.keys() == set(_KEPT):
        return replace(read_config(model, known["branches_states"]), **known)
    from lookahead.passes.ways import try_ways  # not needed if an earlier process has found the adapter

    with kept_for_later():
        adapter = try_ways(model, cpu_kernels)
    if not adapter.given_up and not adapter.row_dependence:
        verdicts.save(path, {name: getattr(adapter, name) for name in _KEPT})
    return adapter
