"""Passes of several calls that run as one.

A pass takes little longer than reading its weights, for one text or several. The bits of a row do not depend on the
other rows (docs/numerics.md).
"""

import time
from collections.abc import Hashable, Sequence
from itertools import accumulate

from lookahead.models.cache import SeparateCaches, caches_in
from lookahead.passes.runner import Company, Output, Pass


def run_together(passes: Sequence[Pass], others_ran: bool = True) -> list[Output | Exception]:
    """Run the passes of several calls in as few passes as possible. Return the output or the error of each.

    If a shared pass fails, each of its calls runs alone, so that only the one that made it fail has the error. All have
    it if one of them keeps a state that the failed pass may have changed.

    others_ran: as for `EagerRunner.run`, in addition to the passes' own.

    The call that began last runs the shared pass, because its program of the model is the newest.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, wanted in enumerate(passes):
        company = wanted.runner.company
        groups.setdefault(i if company is None else (company, wanted.top_k[0]), []).append(i)
    found: dict[int, Output | Exception] = {}
    for group in groups.values():
        together = [passes[i] for i in group]
        others = others_ran or any([one.others_ran for one in together])
        found |= zip(group, _outputs_of(together, others), strict=True)
    return [found[i] for i in range(len(passes))]


def _outputs_of(together: list[Pass], others_ran: bool) -> Sequence[Output | Exception]:
    try:
        return _run_as_one(together, others_ran)
    except Exception as error:
        if len(together) == 1 or any(map(_may_change_states, together)):
            return [error] * len(together)
    from lookahead.models.rewinding import drop_step  # few passes fail

    for one in together:
        for cache in caches_in(one.cache):
            drop_step(cache)
    return [output for one in together for output in _outputs_of([one], others_ran)]


def _run_as_one(together: list[Pass], others_ran: bool) -> list[Output]:
    """Run these passes as one. They are in the order in which their calls have begun."""
    if len(together) == 1:
        (one,) = together
        return [one.runner.run(one.steps, one.cache, one.last, one.top_k, others_ran)]
    steps = [step for one in together for step in one.steps]
    each = [caches_in(one.cache) for one in together]
    temperatures = [one.top_k[1] for one in together for _ in one.steps]
    last = [position for one in together for position in one.last]
    began = time.perf_counter()
    newest = together[-1]
    caches = SeparateCaches([cache for caches in each for cache in caches])
    joint = newest.runner.run(steps, caches, last, (newest.top_k[0], temperatures), others_ran)
    company = Company(len(joint.logits), len(steps), time.perf_counter() - began)
    stops = [*joint.first[1:], len(joint.logits)]
    return [
        _part(joint, joint.first[stop - len(one.steps) : stop], stops[stop - 1], company)
        for one, stop in zip(together, accumulate(len(one.steps) for one in together), strict=True)
    ]


def _may_change_states(one: Pass) -> bool:
    """Whether the pass itself changes a state, which it does for a root alone: there is nothing to choose from."""
    return any(len(step) == 1 and cache.states_at for step, cache in zip(one.steps, caches_in(one.cache), strict=True))


def _part(joint: Output, first: Sequence[int], stop: int, company: Company) -> Output:
    """Return the part of the output that belongs to one call. first: the rows of its roots."""
    rows = slice(first[0], stop)
    top_k = None if joint.top_k is None else (joint.top_k[0][rows], joint.top_k[1][rows])
    return Output(
        joint.logits[rows],
        {i: states[rows] for i, states in joint.hidden_states.items()},
        [row - first[0] for row in first],
        None if joint.has_nan else joint.has_nan,
        top_k,
        None if joint.argmax is None else joint.argmax[rows],
        company,
    )
