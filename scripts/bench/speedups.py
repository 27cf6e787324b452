"""The figures of each method, computed from a benchmark's calls."""

import statistics

import numpy as np

RESAMPLES = 2000
SPREAD = 0.9  # share of the resamples within an interval
OURS = "auto"  # the method whose time is compared with that of all others
STAGES = (  # an addition, the method without it, and the method with it
    ("our loop, without guesses", "plain", "steps-of-one"),
    ("products and attention", "steps-of-one-torch", "steps-of-one"),
    ("guesses", "steps-of-one", "auto"),
    ("guesses, with torch's products and attention", "steps-of-one-torch", "auto-torch"),
    ("the pool, instead of Token Recycling's tree", "token-recycling", "auto"),
    ("the pool, instead of RACER's tree", "racer", "auto"),
)


def seconds_per_token(rows: list[dict]) -> float:
    return sum(row["seconds"] for row in rows) / sum(row["tokens"] for row in rows)


def seconds_per_later_token(rows: list[dict]) -> float | None:
    """The same without the first token of each prompt. None if its time is unknown, or if there are no later tokens."""
    later = sum(row["tokens"] - 1 for row in rows)
    if not later or any(row["first_seconds"] is None for row in rows):
        return None
    return sum(row["seconds"] - row["first_seconds"] for row in rows) / later


def median_ratios(mine: list[dict], others: list[dict]) -> tuple[float, float | None]:
    """Return the time per token of ``mine``, divided by that of ``others``: the median over the prompts, which are the
    same.

    The second figure is for the tokens after the first, over prompts with both times; None if there are none.
    """
    pairs = [([a], [b]) for a, b in zip(mine, others, strict=True)]
    whole = statistics.median(seconds_per_token(a) / seconds_per_token(b) for a, b in pairs)
    paces = [(seconds_per_later_token(a), seconds_per_later_token(b)) for a, b in pairs]
    later = [a / b for a, b in paces if a is not None and b]
    return whole, statistics.median(later) if later else None


def _by_method(rows: list[dict]) -> dict[str, list[dict]]:
    return {method: [row for row in rows if row["method"] == method] for method in {row["method"] for row in rows}}


def gains(rows: list[dict]) -> list[dict]:
    """Return how many times as fast the median prompt is with each addition, for STAGES that were measured.

    rows: as for `summarise`.
    """
    by_method = _by_method(rows)
    found = []
    for what, before, after in STAGES:
        if {before, after} <= by_method.keys():
            whole, later = median_ratios(by_method[before], by_method[after])
            found.append({"what": what, "from": before, "to": after, "speedup": whole, "later_speedup": later})
    return found


def speedup_interval(base: list[dict], rows: list[dict], seed: int = 0) -> tuple[float, float]:
    """Bootstrap an interval of the speed-up of ``rows`` over ``base``, which hold the same prompts."""
    prompts = np.random.default_rng(seed).integers(0, len(rows), (RESAMPLES, len(rows)))

    def pace(rows: list[dict]) -> np.ndarray:
        seconds, tokens = (np.array([row[name] for row in rows])[prompts].sum(1) for name in ("seconds", "tokens"))
        return seconds / tokens

    low, high = np.quantile(pace(base) / pace(rows), [(1 - SPREAD) / 2, (1 + SPREAD) / 2])
    return float(low), float(high)


def agreement(rows: list[dict]) -> float:
    """Return the share of tokens before the first difference from plain decoding's text."""
    agreeing = sum(row["tokens"] if row["difference"] is None else row["difference"] for row in rows)
    return agreeing / sum(row["tokens"] for row in rows)


def step_seconds(rows: list[dict]) -> float | None:
    """Mean time of a step's forward pass; None if it was not measured."""
    steps = sum(row["steps"] or 0 for row in rows)
    if not steps or any(row["forward_seconds"] is None for row in rows):
        return None
    return sum(row["forward_seconds"] for row in rows) / steps


def summarise(rows: list[dict], methods: list[str], failures: dict[str, str]) -> list[dict]:
    """Return an entry for each method. rows: one for each prompt and method, from `benchmark.measure`, with plain's."""
    by_method = _by_method(rows)

    def quotient(figure, base: str, method: str) -> float | None:
        values = [figure(by_method[name]) if name in by_method else None for name in (base, method)]
        return None if None in values else values[0] / values[1]

    table = []
    for method in methods:
        if method in failures:
            table.append({"method": method, "failed": failures[method]})
            continue
        mine = by_method[method]
        pace, later = seconds_per_token(mine), seconds_per_later_token(mine)
        steps = None if any(row["steps"] is None for row in mine) else sum(row["steps"] for row in mine)
        tokens_per_step = sum(row["stepped"] for row in mine) / steps if steps else None
        one = "steps-of-one-torch" if method.endswith("-torch") else "steps-of-one"
        cost, later_speedup = quotient(step_seconds, method, one), quotient(seconds_per_later_token, one, method)
        measured = None not in (cost, later_speedup, tokens_per_step)
        firsts, owns = [row["first_seconds"] for row in mine], [row["own_seconds"] for row in mine]
        share, later_share = median_ratios(by_method[OURS], mine) if OURS in by_method else (None, None)
        table.append({
            "method": method,
            "ms_per_token": 1000 * pace,
            "ms_per_later_token": None if later is None else 1000 * later,
            "own_ms_per_token": None if None in owns else 1000 * sum(owns) / sum(row["tokens"] for row in mine),
            "our_share": share,
            "our_later_share": later_share,
            "tokens_per_second": 1 / pace,
            "speedup": seconds_per_token(by_method["plain"]) / pace,
            "interval": speedup_interval(by_method["plain"], mine),
            "speedup_over_one": quotient(seconds_per_token, "steps-of-one", method),
            "first_token_ms": None if None in firsts else 1000 * sum(firsts) / len(firsts),
            "tokens_per_step": tokens_per_step,
            "step_cost": cost,
            "efficiency": later_speedup / (tokens_per_step / cost) if measured else None,
            "identical": sum(row["difference"] is None for row in mine) if mine[0]["comparable"] else None,
            "agreement": agreement(mine) if mine[0]["comparable"] else None,
            "prompts": len(mine),
            "largest_margin": max((row["margin"] for row in mine if row["margin"] is not None), default=None),
        })  # fmt: skip
    return table


def title(cell: dict) -> str:
    """Name the dtype, temperature and context of a cell."""
    parts = [cell["dtype"], f"temperature {cell['temperature']:g}" if cell["temperature"] else "greedy"]
    return ", ".join(parts + ([f"context {cell['context']}"] if cell["context"] else []))
