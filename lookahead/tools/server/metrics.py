"""Counts since the start, in Prometheus' text format (version 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from lookahead import Lookahead
from lookahead.tools.server.prefixes import Prefixes


class Histogram:
    """Counts values up to each of some bounds. bounds: ascending."""

    def __init__(self, *bounds: float):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """requests: by (path, status), and the number under way as "running"."""

    def __init__(self) -> None:
        self.requests: Counter = Counter()
        self.first_text = Histogram(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
        self.seconds = Histogram(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
        self.prompt_tokens = Histogram(32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
        self.answer_tokens = Histogram(8, 32, 128, 256, 512, 1024, 2048, 4096, 16384)


def exposition(engine: Lookahead | None, metrics: Metrics, prefixes: Prefixes) -> str:
    """Return all counts.

    engine: of the served model; None if it is not wrapped, which leaves the counts of lookahead out.
    """
    lines: list[str] = []

    def family(name: str, kind: str, says: str, samples: Mapping[str, float]) -> None:
        lines.extend([f"# HELP lookahead_{name} {says}", f"# TYPE lookahead_{name} {kind}"])
        lines.extend(f"lookahead_{name}{labels} {value:.12g}" for labels, value in samples.items())

    def labelled(label: str, counts: Mapping[str, float]) -> dict[str, float]:
        return {f'{{{label}="{text}"}}': count for text, count in counts.items()}

    def histogram(name: str, says: str, of: Histogram) -> None:
        total, samples = 0, {}
        for bound, count in zip((*of.bounds, "+Inf"), of.counts, strict=True):
            total += count
            samples[f'_bucket{{le="{bound}"}}'] = float(total)
        family(name, "histogram", says, samples | {"_sum": of.sum, "_count": float(total)})

    requests = metrics.requests.copy()
    ended = {f'{{path="{key[0]}",status="{key[1]}"}}': count for key, count in requests.items() if key != "running"}
    family("requests_total", "counter", "Requests that have ended.", ended)
    family("requests_running", "gauge", "Requests whose answers are not yet written.", {"": requests["running"]})
    histogram("first_text_seconds", "Time until an answer's first text.", metrics.first_text)
    histogram("request_seconds", "Time of requests that were answered.", metrics.seconds)
    histogram("prompt_length", "Tokens of prompts that were answered.", metrics.prompt_tokens)
    histogram("answer_length", "Tokens of answers.", metrics.answer_tokens)
    family("prompt_tokens_total", "counter", "Tokens of prompts.", {"": prefixes.prompt_tokens})
    family("cached_tokens_total", "counter", "Tokens of prompts that earlier requests have left.",
           {"": prefixes.cached_tokens})  # fmt: skip
    family("cache_bytes", "gauge", "Bytes of what earlier requests have left.", {"": prefixes.bytes})
    if engine is not None:
        with engine.lock:
            stats = engine.stats.as_dict()
        family("tokens_total", "counter", "Tokens written.", {"": stats["tokens"]})
        family("steps_total", "counter", "Passes after the prompts.", {"": stats["steps"]})
        family("guesses_total", "counter", "Guesses verified.", {"": stats["guesses"]})
        family("prefill_seconds_total", "counter", "Time spent on prompts.", {"": stats["prefill_seconds"]})
        family("tokens_per_step", "gauge", "Mean number of tokens that a step has written.",
               {"": stats["tokens_per_step"]})  # fmt: skip
        family("step_seconds_total", "counter", "Time spent in steps.", labelled("stage", stats["seconds"]))
        family("accepted_guesses_total", "counter", "Accepted guesses by the origin of their evidence.",
               labelled("source", stats["accepted"]))  # fmt: skip
        proposed = {name: counts["proposed"] for name, counts in stats["sources"].items()}
        family("source_proposed_guesses_total", "counter", "Guesses that a source proposed.",
               labelled("source", proposed))  # fmt: skip
        accepted = {name: counts["accepted"] for name, counts in stats["sources"].items()}
        family("source_accepted_guesses_total", "counter", "Accepted guesses that a source had proposed.",
               labelled("source", accepted))  # fmt: skip
    return "\n".join(lines) + "\n"
