"""The live line on a terminal: it shows how fast the text above it is written."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from lookahead.compat.loops import own_loop
from lookahead.passes.measuring import progress_bar
from lookahead.stats import Stats
from lookahead.tools.contention import Span, watch, why_no_ratio

ERASE = "\x1b[J"  # erases from the cursor to the end of the screen
# BELOW scrolls if needed, saves the cursor and goes to the next line; BACK restores the cursor.
BELOW, BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"
LOOK_EVERY = 0.05  # seconds; reading the clocks of all threads takes about 0.3 ms
# Tokens that measure plain decoding: MOST of them, or at least LEAST if these took ENOUGH seconds.
MOST, LEAST, ENOUGH = 24, 3, 0.3


@dataclass(frozen=True)
class Rate:
    """How fast tokens came."""

    per_second: float
    span: Span
    """The time in which they came."""


class PlainDecoding:
    """The rate of a model's own generate(), as if it were not wrapped.

    It is measured on a few tokens when it is first needed, and again if the machine was busy then.
    """

    def __init__(self, model: PreTrainedModel, token: int):
        """token: the prompt of the measurement."""
        self._model, self._token = model, token
        self._rate: Rate | None = None

    def rate(self) -> Rate:
        if self._rate is None or why_no_ratio(self._rate.span):
            self._rate = measure_plain(self._model, self._token)
        return self._rate


def times_plain(ours: float, span: Span, plain: Rate) -> str:
    """Return ``ours`` (tokens per second in ``span``) as a multiple of the plain rate, or why there is no ratio."""
    return why_no_ratio(plain.span, span) or f"{ours / plain.per_second:.1f} times plain"


class Meter:
    """How fast a text comes, from its first token on. So the prefill does not count."""

    def __init__(
        self,
        stats: Callable[[], Stats | None],
        plain: Rate | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008  (it is a constant)
    ):
        """stats: returns the statistics of the call. plain: the rate to compare with. device: the model's."""
        self._stats = stats
        self._plain, self._device = plain, device
        self._tokens = -1
        self._began = self._now = 0.0
        self._last_span = Span()  # until the clocks were last read

    def count(self) -> None:
        """Count a token."""
        self._now = time.perf_counter()
        self._tokens += 1
        if not self._tokens:
            self._began = self._now
            self._span = watch(self._device)
        elif self._plain is not None and self._now - self._began - self._last_span.seconds > LOOK_EVERY:
            self._last_span = self._span()

    def __str__(self) -> str:
        """The rates, on one line; "" before the second token."""
        if self._tokens < 1 or self._now <= self._began:
            return ""
        rate, stats = self._tokens / (self._now - self._began), self._stats()
        parts = [f"{rate:.{0 if rate >= 10 else 1}f} tokens/s"]
        if stats is not None and stats.sequence_steps:
            parts.append(f"{stats.tokens_per_step:.2f} tokens a step")
        if self._plain is not None:
            parts.append(times_plain(rate, self._last_span, self._plain).split(":")[0])
        return ", ".join(parts)


def fitted(line: str) -> str:
    """Return ``line``, cut to the width of the terminal and dimmed."""
    return styled(line[: shutil.get_terminal_size().columns - 1], dim=True)


def styled(text: str, **style: Any) -> str:
    """Return ``text`` in the style that `click.style` gives it, unless the user wants none (no-color.org)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def below(line: str) -> str:
    """Return the characters that show ``line`` below the cursor's line and leave the cursor in place."""
    return BELOW + fitted(line) + BACK


class Share(BaseStreamer):
    """Reports the progress of a text that is not shown."""

    def __init__(self, progress: Callable[[float], None], length: int):
        """progress: called with the share done, 0 to 1. length: expected number of tokens."""
        self._progress, self._length = progress, length
        self._seen = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self._seen += 1
        self._progress(min(self._seen / self._length, 1.0))

    def end(self) -> None:
        pass


class _Clock(StoppingCriteria):
    """Records the time of each token, and ends the text when there are enough."""

    def __init__(self, progress: Callable[[float], None]):
        self.times: list[float] = []
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self._progress(len(self.times) / MOST)
        is_enough = len(self.times) >= LEAST and self.times[-1] - self.times[0] > ENOUGH
        return torch.full((len(input_ids),), is_enough, dtype=torch.bool, device=input_ids.device)


def measure_plain(model: PreTrainedModel, token: int) -> Rate:
    """Measure plain decoding on a few tokens after ``token``, by the model's own code without our kernels.

    model: wrapped or not.
    """
    ids = torch.tensor([[token]], device=model.device)
    with progress_bar("measuring plain decoding") as progress:
        clock, span = _Clock(progress), watch(model.device)
        model.generate(  # type: ignore[operator]  # a method
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, min_new_tokens=MOST,
            stopping_criteria=StoppingCriteriaList([clock]), custom_generate=own_loop(model),
        )  # fmt: skip
    between = statistics.median(after - before for before, after in zip(clock.times, clock.times[1:], strict=False))
    return Rate(1 / between, span())
