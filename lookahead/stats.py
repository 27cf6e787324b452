"""Counts and times of a call, or of all calls of a wrap."""

import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DECILES = 10
STAGES = ("guess", "forward", "verify", "commit", "learn")


@dataclass
class SourceStats:
    """What a source of guesses did."""

    asked: int = 0
    """Steps in which it was asked."""
    passes: int = 0
    """Passes of its own model or heads in these steps."""
    proposed: int = 0
    """Guesses proposed that could have been verified."""
    accepted: int = 0
    """Accepted guesses that it had proposed, alone or with others."""
    earned: int = 0
    """Estimated tokens that the steps would not have written without it: the guesses of the other sources are
    followed along the text as far as the step went."""
    seconds: float = 0.0
    """Wall-clock time that it took to propose and to observe."""

    @property
    def rate(self) -> float:
        """Tokens gained per second of the source's own time."""
        return self.earned / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        passes = f"{self.passes} passes, " if self.passes else ""
        return (
            f"asked in {self.asked} steps, {passes}{self.proposed} guesses, {self.accepted} accepted, "
            f"{self.earned} by it alone in {self.seconds:.3f} s: {self.rate:.0f} a second"
        )

    def __iadd__(self, other: "SourceStats") -> "SourceStats":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Stats:
    """Counts and times of decoding. The statistics of several calls add up."""

    plain: str = ""
    """Why the model's own decoding served this call, or "". Nothing else is counted then."""
    calls: int = 0
    """Calls decoded by lookahead."""
    sequences: int = 0
    """Sequences decoded. Each sequence of a batch counts."""
    steps: int = 0
    """Passes after the prefill."""
    sequence_steps: int = 0
    """Steps, each counted once for every sequence in it."""
    tokens: int = 0
    """Tokens emitted, including the one that each sequence's prefill yields."""
    guesses: int = 0
    """Guesses verified."""
    window_tokens: int = 0
    """Tokens of the Jacobi window computed."""
    accepted: Counter = field(default_factory=Counter)
    """Accepted guesses. The pool's are counted by the origin of their evidence: prompt, text, logits, jacobi or file;
    those of another source by the name of its class, with a 2 appended for a second one of that class."""
    sources: dict[str, SourceStats] = field(default_factory=dict)
    """What each source of guesses did, by the same names."""
    accepted_per_step: Counter = field(default_factory=Counter)
    """Number of steps by the number of guesses that they accepted."""
    deciles: np.ndarray = field(default_factory=lambda: np.zeros((DECILES, 3)))
    """Float64 [10, 3]: for guesses with an estimated probability of 0 to 0.1, 0.1 to 0.2, ..., how many there were, the
    sum of their probabilities, and how many were accepted."""
    prefill_seconds: float = 0.0
    """Wall-clock time of prefills, which `seconds` does not include."""
    seconds: Counter = field(default_factory=Counter)
    """Wall-clock time of the steps by stage: guess, forward, verify, commit, learn. Forward contains the wait for
    an accelerator."""
    trace: Any = field(default=None, repr=False, compare=False)
    """The `Trace` of the call, if `lookahead.trace` has made one. Sums of calls have none."""

    @property
    def tokens_per_step(self) -> float:
        """tau: the mean number of tokens that a step emits for a sequence; 1 is plain decoding."""
        return (self.tokens - self.sequences) / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def draft_length(self) -> float:
        """gamma: the mean number of guesses that a step verifies for a sequence."""
        return self.guesses / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """alpha: accepted guesses / verified guesses."""
        return self.accepted.total() / self.guesses if self.guesses else 0.0

    @property
    def reliability(self) -> list[tuple[int, float, float]]:
        """The reliability curve, for each decile of probability: (guesses, mean predicted, observed acceptance)."""
        return [
            (int(n), predicted / max(n, 1), accepted / max(n, 1)) for n, predicted, accepted in self.deciles.tolist()
        ]

    @property
    def calibration_gap(self) -> float:
        """Mean distance between predicted and observed acceptance, over the deciles that have guesses."""
        gaps = [abs(predicted - observed) for n, predicted, observed in self.reliability if n]
        return sum(gaps) / len(gaps) if gaps else 0.0

    @property
    def overhead(self) -> float:
        """Share of the steps' time spent outside the model's passes."""
        total = self.seconds.total()
        return 1 - self.seconds["forward"] / total if total else 0.0

    def source(self, name: str) -> SourceStats:
        """Return the statistics of the source of this name, for adding counts."""
        return self.sources.setdefault(name, SourceStats())

    def __iadd__(self, other: "Stats") -> "Stats":
        for name, value in vars(other).items():
            if name == "trace":
                continue
            if name == "sources":
                for source, stats in value.items():
                    ours = self.source(source)
                    ours += stats
            elif isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)
        return self

    def as_dict(self) -> dict:
        """Return everything as plain values, for JSON."""
        from lookahead import figures  # they are counted more often than shown

        return figures.as_dict(self, STAGES)

    def by_source(self) -> list[str]:
        """Return a line for each source that has proposed something."""
        return [f"{name}: {source}" for name, source in self.sources.items() if source.proposed]

    def __str__(self) -> str:
        from lookahead import figures  # they are counted more often than shown

        return figures.text(self, STAGES)

    def _repr_html_(self) -> str:
        """For notebooks: the page of the trace; without a trace, the text of ``print``."""
        return f"<pre>{html.escape(str(self))}</pre>" if self.trace is None else self.trace._repr_html_()
