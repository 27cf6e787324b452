"""Measure the n-gram pool: its speed, and tokens per step by budget.

    python scripts/measure_pool.py speed
    python scripts/measure_pool.py steps --model M --prompts FILE.jsonl

Tokens per step, (tokens - 1) / steps, do not depend on the clock: models run in float32 and sampling is seeded. They
are averaged over the categories. ``fresh`` gives each prompt a new pool; ``shared`` keeps one pool for all prompts.
"""

import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from itertools import count
from pathlib import Path

import click
import numpy as np
import torch
from transformers import AutoTokenizer, BatchEncoding, PreTrainedModel

import lookahead
from bench import cli
from bench.corpora import standard_library
from bench.pages import command_line, heading, table, write_results
from bench.timing import decoding_options, timed
from lookahead import LookaheadConfig, NgramPool, Stats
from lookahead.engine.planning import MIN_PROBABILITY
from lookahead.guessing.pool import TOP_K
from lookahead.passes.environment import environment
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts
from ngram_pool.kernels import LONGEST


def logits_rows(ids: np.ndarray, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return contexts from a text, tokens and probabilities; like a step's logits, they favour what followed there."""
    at = rng.integers(LONGEST, len(ids) - 1, rows)
    contexts = ids[at[:, None] - np.arange(LONGEST, 0, -1)]
    tokens = np.concatenate([ids[at, None], ids[rng.integers(0, len(ids), (rows, TOP_K - 1))]], axis=1)
    probabilities = np.sort(rng.dirichlet(np.ones(TOP_K), rows))[:, ::-1]
    return contexts, tokens, probabilities


def microseconds(call: Callable[[], object], repeats: int = 1000) -> float:
    return statistics.median(timeit.repeat(call, number=1, repeat=repeats)) * 1e6


@click.group()
def main() -> None:
    """Measure the n-gram pool."""


@main.command()
@click.option("--memory-mb", type=float, default=16, show_default=True)
@click.option("--observations", default=1_000_000, show_default=True, help="Tokens of text to learn beforehand.")
def speed(memory_mb, observations) -> None:
    """Microseconds of each operation, on one thread."""
    ids = standard_library(observations, AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL))
    rng = np.random.default_rng(0)
    pool = NgramPool(memory_mb)
    start = time.perf_counter()
    pool.learn(ids)
    learned = len(ids) / (time.perf_counter() - start)
    steps = [logits_rows(ids, 64, rng) for _ in range(50)]
    turn, text = count(), ids.tolist()

    def guess(budget: int, least: float) -> None:
        at = next(turn) * 7919 % (len(text) - LONGEST)
        pool.guess(text[at : at + LONGEST], budget, least)

    calls = {
        "learn_next, 64 rows x top 8, us": lambda: pool.learn_next(*steps[next(turn) % 50]),
        "calibrate, 3 rows x top 8, us": lambda: pool.calibrate(*(part[:3] for part in steps[next(turn) % 50])),
        "guess, budget 16, us": lambda: guess(16, MIN_PROBABILITY),
        "guess, budget 64, us": lambda: guess(64, MIN_PROBABILITY),
        "guess, budget 64, no least probability, us": lambda: guess(64, 0.0),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool"
        found = {
            "learn, tokens/s": f"{learned:,.0f}",
            **{name: f"{microseconds(call):.0f}" for name, call in calls.items()},
            "save, ms": f"{microseconds(lambda: pool.save(path), 5) / 1000:.0f}",
            "load, ms": f"{microseconds(lambda: NgramPool.load(path), 20) / 1000:.0f}",
            "table, bytes of those asked for": f"{pool.nbytes / (memory_mb * 2**20):.4f}",
            "contexts held": f"{len(pool):,} of {pool.capacity:,}",
        }
    for name, value in found.items():
        click.echo(f"{name:45} {value:>14}")


def decode_all(
    model: PreTrainedModel, inputs: list[BatchEncoding], categories: list[str], options: dict, budget: int, kind: str
) -> dict:
    """Decode prompts, each of a category, with fresh pools or a shared one (kind).

    Returns tokens per step, calibration on every second prompt, and accepted tokens by source.
    """
    lookahead.wrap(model, LookaheadConfig(budget=budget, window_size=0), NgramPool())
    by_category = {category: Stats() for category in categories}
    held_out = Stats()
    for number, category in enumerate(categories):
        if kind == "fresh":
            model.lookahead.pool = NgramPool()
        timed(model, inputs[number], options, number)
        by_category[category] += model.lookahead.last
        if number % 2:
            held_out += model.lookahead.last
        click.echo(f"\rbudget {budget}, {kind}, prompt {number + 1} of {len(inputs)} ", nl=False, err=True)
    total = model.lookahead.stats.as_dict()
    lookahead.unwrap(model)
    return {
        "budget": budget,
        "pool": kind,
        "tokens_per_step": statistics.mean(stats.tokens_per_step for stats in by_category.values()),
        **{name: total[name] for name in ("draft_length", "acceptance_rate", "accepted")},
        "calibration_gap": held_out.calibration_gap,
        "reliability": held_out.reliability,
    }


def draw(results: list[dict], path: Path) -> None:
    """Draw tokens per step by budget, and the reliability curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for pool, colour in (("fresh", "tab:blue"), ("shared", "tab:orange")):
        mine = [r for r in results if r["pool"] == pool]
        budgets = [r["budget"] for r in mine]
        left.plot(budgets, [r["tokens_per_step"] for r in mine], "o-", color=colour, label=f"{pool} pool")
        for r, alpha in zip(mine, np.linspace(0.25, 1, len(mine)), strict=True):
            curve = [(predicted, observed) for count, predicted, observed in r["reliability"] if count]
            label = f"{pool}, budget {r['budget']}" if r is mine[-1] else None
            right.plot(*zip(*curve, strict=True), "o-", ms=3, lw=1, color=colour, alpha=alpha, label=label)
    left.set(xlabel="budget (guesses a step)", ylabel="tokens per step", xscale="log", ylim=(1, None))
    left.set_xticks(budgets, [str(budget) for budget in budgets], minor=False)
    left.minorticks_off()
    left.set_title("Tokens per step", fontsize=10)
    right.plot([0, 1], [0, 1], color="grey", lw=0.8, ls="--")
    right.set(xlabel="predicted acceptance", ylabel="observed acceptance", xlim=(0, 1), ylim=(0, 1))
    right.set_title("Calibration (fainter: smaller budgets)", fontsize=10)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        axes.grid(alpha=0.2)
    figure.savefig(path)


@main.command()
@cli.model
@cli.prompts
@cli.limit
@click.option("--budgets", type=cli.ListOf(cli.COUNT), default="8,16,32,64", show_default=True)
@cli.temperature(0.6)
@cli.new_tokens
@click.option("--out", type=cli.OUT, help="Write OUT.md, OUT.json and OUT.svg.")
def steps(model_name, prompts_file, limit, budgets, temperature, max_new_tokens, out) -> None:
    """Tokens per step by budget, with fresh and shared pools; predicted against observed acceptance."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, "float32")
    prompts, options = read_prompts(prompts_file, limit), decoding_options(max_new_tokens, temperature)
    categories = [prompt["category"] for prompt in prompts]
    inputs = [
        tokenizer(prompt["turns"][0], return_tensors="pt", return_token_type_ids=False).to(model.device)
        for prompt in prompts
    ]
    results = [
        decode_all(model, inputs, categories, options, budget, kind)
        for budget in budgets for kind in ("fresh", "shared")
    ]  # fmt: skip
    text = table(
        ["budget", "pool", "tokens per step", "draft length", "acceptance rate", "calibration gap"],
        [[r["budget"], r["pool"], r["tokens_per_step"], r["draft_length"], f"{r['acceptance_rate']:.1%}",
          f"{r['calibration_gap']:.3f}"] for r in results],
    )  # fmt: skip
    for r in results:
        curve = ", ".join(f"{p:.2f} {o:.2f} ({n})" for n, p, o in r["reliability"])
        text += f"\n\nBudget {r['budget']}, {r['pool']}: predicted, observed (guesses): {curve}"
    click.echo("\n" + text)
    if out:
        where = {"command": command_line(__file__), **environment(model)}
        write_results(out, heading(where) + text + "\n", {"environment": where, "results": results})
        draw(results, out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
