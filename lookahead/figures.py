"""Statistics of decoding as plain values, and as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ngram_pool import Origin

if TYPE_CHECKING:
    from lookahead.stats import Stats


def as_dict(stats: "Stats", stages: Sequence[str]) -> dict:
    """Return everything as plain values, for JSON. stages: of a step, in order."""
    numbers = ("calls", "sequences", "steps", "sequence_steps", "tokens", "tokens_per_step", "draft_length",
               "acceptance_rate", "guesses", "window_tokens")  # fmt: skip
    return {
        "plain": stats.plain or None,
        **{name: getattr(stats, name) for name in numbers},
        "accepted": _accepted(stats),
        "sources": {name: vars(source) | {"rate": source.rate} for name, source in stats.sources.items()},
        "accepted_per_step": {str(n): count for n, count in sorted(stats.accepted_per_step.items())},
        "reliability": [
            dict(zip(("guesses", "predicted", "observed"), decile, strict=True)) for decile in stats.reliability
        ],
        "calibration_gap": stats.calibration_gap,
        "prefill_seconds": stats.prefill_seconds,
        "seconds": {stage: stats.seconds[stage] for stage in stages},
        "overhead": stats.overhead,
    }


def text(stats: "Stats", stages: Sequence[str]) -> str:
    """Return lines for a reader. stages: as for `as_dict`."""
    if stats.plain:
        return f"the model's own decoding: lookahead does not decode {stats.plain}"
    accepted = ", ".join(f"{name} {count}" for name, count in _accepted(stats).items())
    seconds = ", ".join(f"{stage} {1000 * stats.seconds[stage] / max(stats.steps, 1):.2f}" for stage in stages)
    sources = "".join(f"{line}\n" for line in stats.by_source())
    return (
        f"{stats.tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step\n"
        f"draft length {stats.draft_length:.1f}, acceptance rate {stats.acceptance_rate:.1%}; accepted: {accepted}\n"
        f"predicted and observed acceptance differ by {stats.calibration_gap:.3f}\n"
        f"{sources}"
        f"ms a step: {seconds}"
    )


def _accepted(stats: "Stats") -> dict[str, int]:
    """Accepted guesses by name, those of the pool's origins always."""
    return {origin.name.lower(): 0 for origin in Origin} | dict(stats.accepted)
