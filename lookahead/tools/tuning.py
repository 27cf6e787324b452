"""The measurements of `lookahead tune`: times of passes by rows, context and kind of attention."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.passes.capabilities import find_adapter, fused_runner
from lookahead.passes.costs import RUNGS
from lookahead.passes.fused import FusedRunner
from lookahead.passes.measuring import time_passes
from lookahead.passes.runner import EagerRunner
from lookahead.tools.files import write_whole

FUSED, SPLIT, DENSE = "fused", "split", "dense mask"
LINES = {FUSED: "-", SPLIT: "--", DENSE: ":"}


@dataclass
class StepTimes:
    """Times of passes of one model."""

    seconds: dict[str, dict[int, dict[int, float]]]
    """Seconds by way (FUSED, SPLIT or DENSE), context and rows."""

    def rows(self) -> list[int]:
        """Return the numbers of rows that were timed in all ways and contexts."""
        timed = [set(by_rows) for by_context in self.seconds.values() for by_rows in by_context.values()]
        return sorted(set.intersection(*timed))

    def table(self) -> str:
        """Return the times in milliseconds as a text table."""
        rows = self.rows()
        lines = [f"{'ms a pass over':>24} {' '.join(f'{n:>7}' for n in rows)} rows"]
        for way, by_context in self.seconds.items():
            for context, by_rows in by_context.items():
                times = " ".join(f"{1000 * by_rows[n]:7.2f}" for n in rows)
                lines.append(f"{way:>10}, context {context:>5} {times}")
        return "\n".join(lines)

    def picture(self, path: Path, title: str, has_ratios: bool = True) -> None:
        """Draw the times, and how many tokens a pass must yield to break even with passes over one row.

        Raises ImportError without matplotlib (extra ``bench``), ValueError if matplotlib has no format for the path's
        suffix.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(title, fontsize=10)
        left, *ratios = figure.subplots(1, 1 + has_ratios, squeeze=False)[0]
        rows = self.rows()
        for way, by_context in self.seconds.items():
            for number, (context, by_rows) in enumerate(by_context.items()):
                times = [1000 * by_rows[n] for n in rows]
                style = {"color": f"C{number}", "ls": LINES[way], "marker": "o", "ms": 3}
                left.plot(rows, times, label=f"context {context:,}, {way}", **style)
                for right in ratios:
                    right.plot(rows, [time / times[0] for time in times], **style)
        left.set(xlabel="rows T of a pass", ylabel="ms", xscale="log", ylim=(0, None))
        for right in ratios:
            right.set(xlabel="rows T of a pass", ylabel="tokens per step to break even, c(T) / c(1)", xscale="log")
        for axes in (left, *ratios):
            axes.set_xticks(rows, [str(n) for n in rows])
            axes.minorticks_off()
            axes.grid(alpha=0.2)
        left.legend(frameon=False, fontsize=8)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=150, format=path.suffix[1:] or "png")
        write_whole(path, drawn.getvalue())


def time_steps(
    model: PreTrainedModel,
    contexts: list[int],
    seconds: float,
    progress: Callable[[float], None],
    config: LookaheadConfig,
) -> StepTimes:
    """Time passes of up to 128 rows at these contexts, in each way that the model supports.

    contexts: committed positions. seconds: time to measure. progress: called with the share done, 0 to 1.
    """
    adapter = find_adapter(model, config.cpu_kernels)
    ways: dict[str, EagerRunner] = {}
    fused = fused_runner(model, adapter, packs=config.pack_weights)
    if isinstance(fused, FusedRunner):
        ways[FUSED] = fused
    if adapter.splits_attention:
        ways[SPLIT] = EagerRunner(model, adapter)
    ways[DENSE] = EagerRunner(model, replace(adapter, splits_attention=False))
    plan = [(rows, context) for context in contexts for rows in RUNGS]
    found: dict[str, dict[int, dict[int, float]]] = {}
    for number, (way, runner) in enumerate(ways.items()):

        def part(share: float, done: int = number) -> None:
            progress((done + share) / len(ways))

        times = time_passes(runner, plan, seconds / len(ways), part)
        found[way] = {c: {n: times[n, c] for n in RUNGS if (n, c) in times} for c in contexts}
    return StepTimes(found)
