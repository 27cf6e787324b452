"""The line below a text that is being written to a terminal: how fast it comes."""

import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from lookahead.passes.costs import progress_bar
from lookahead.stats import Stats
from lookahead.wrapping import own_loop

ERASE = "\x1b[J"  # what stands behind and below the cursor
# Make room below, and come back to the column; keep the place; go to the line below.
BELOW, BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"
MOST, LEAST, ENOUGH = 24, 3, 0.3  # tokens that measure plain decoding, and seconds after which fewer are enough


class Meter:
    """How fast a text comes, from its first token on, so without the time of the prompt."""

    def __init__(self, stats: Callable[[], Stats | None], plain_rate: float | None = None):
        """stats: returns the statistics of the call. plain_rate: tokens a second of plain decoding, if it is known."""
        self._stats = stats
        self._plain_rate = plain_rate
        self._tokens = -1
        self._began = self._now = 0.0

    def count(self) -> None:
        """Count a token."""
        self._now = time.perf_counter()
        self._tokens += 1
        if not self._tokens:
            self._began = self._now

    def __str__(self) -> str:
        """The rates, on one line; "" before the second token."""
        if self._tokens < 1 or self._now <= self._began:
            return ""
        rate, stats = self._tokens / (self._now - self._began), self._stats()
        parts = [f"{rate:.{0 if rate >= 10 else 1}f} tokens/s"]
        if stats is not None and stats.sequence_steps:
            parts.append(f"{stats.tokens_per_step:.2f} tokens a step")
        if self._plain_rate is not None:
            parts.append(f"{rate / self._plain_rate:.1f} times plain")
        return ", ".join(parts)


def fitted(line: str) -> str:
    """Return as much of ``line`` as fits on one line, dimmed."""
    return click.style(line[: shutil.get_terminal_size().columns - 1], dim=True)


def below(line: str) -> str:
    """Return what shows ``line`` below the cursor's line, and leaves the cursor where it is."""
    return BELOW + fitted(line) + BACK


class _Clock(StoppingCriteria):
    """Takes the time of each token, and ends a text when there are enough of them."""

    def __init__(self, progress: Callable[[float], None]):
        self.times: list[float] = []
        self._progress = progress

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self._progress(len(self.times) / MOST)
        is_enough = len(self.times) >= LEAST and self.times[-1] - self.times[0] > ENOUGH
        return torch.full((len(input_ids),), is_enough, dtype=torch.bool, device=input_ids.device)


def measure_plain(model: PreTrainedModel, token: int) -> float:
    """Return the tokens a second of plain decoding, measured on a few tokens behind ``token``, without its kernels.

    model: wrapped or not. It is computed by its own code, as without a wrap.
    """
    ids = torch.tensor([[token]], device=model.device)
    with progress_bar("measuring plain decoding") as progress:
        clock = _Clock(progress)
        model.generate(  # type: ignore[operator]  # a method
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, min_new_tokens=MOST,
            stopping_criteria=StoppingCriteriaList([clock]), custom_generate=own_loop(model),
        )  # fmt: skip
    return 1 / statistics.median(after - before for before, after in zip(clock.times, clock.times[1:], strict=False))
