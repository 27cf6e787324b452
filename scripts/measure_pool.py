"""Measure the n-gram pool: its speed, what its guesses are worth, which source earns what, and whether it stays flat.

    python scripts/measure_pool.py speed
    python scripts/measure_pool.py steps --model M --prompts FILE.jsonl
    python scripts/measure_pool.py sources --model M --prompts FILE.jsonl --pool P
    python scripts/measure_pool.py soak

Tokens per step, (tokens - 1) / steps, do not depend on the clock: sampling is seeded, in float32. They are the mean of
the categories. ``fresh`` gives each prompt a new pool, ``shared`` one pool to all of them in turn.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import click
import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from bench import cli
from bench.corpora import standard_library
from bench.pages import report, table
from bench.timing import decoding_options, microseconds, prompt_and_answer
from lookahead import LookaheadConfig, NgramPool, Stats
from lookahead.engine.planning import MIN_PROBABILITY
from lookahead.guessing.pool import TOP_K
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts
from ngram_pool.kernels import LONGEST

MakePool = Callable[[], NgramPool]


def logits_rows(ids: np.ndarray, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contexts from a text, and distributions that favour what followed there: as a step's logits might say."""
    at = rng.integers(LONGEST, len(ids) - 1, rows)
    contexts = ids[at[:, None] - np.arange(LONGEST, 0, -1)]
    tokens = np.concatenate([ids[at, None], ids[rng.integers(0, len(ids), (rows, TOP_K - 1))]], axis=1)
    probabilities = np.sort(rng.dirichlet(np.ones(TOP_K), rows))[:, ::-1]
    return contexts, tokens, probabilities


@click.group()
def main() -> None:
    """Measure the n-gram pool."""


@main.command()
@click.option("--memory-mb", type=float, default=16, show_default=True)
@click.option("--observations", default=1_000_000, show_default=True, help="Tokens of text learned beforehand.")
def speed(memory_mb, observations) -> None:
    """Microseconds of each operation, one thread."""
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


class TextPool(NgramPool):
    """A pool to which logits say nothing."""

    def learn_next(self, *_) -> None:
        pass


def run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[dict], options: dict, budget: int,
    window: tuple[int, int], shared: bool, make: MakePool,
) -> dict:  # fmt: skip
    """Decode all prompts; tokens per step, calibration on every second prompt, and accepted tokens by source."""
    config = LookaheadConfig(budget=budget, window_size=window[0], ngram_size=window[1])
    lookahead.wrap(model, config, make())
    categories: dict[str, Stats] = {}
    held_out = Stats()
    for number, prompt in enumerate(prompts):
        if not shared:
            model.lookahead.pool = make()
        prompt_and_answer(model, tokenizer, prompt, options, number)
        stats = categories.setdefault(prompt["category"], Stats())
        stats += model.lookahead.last
        if number % 2:
            held_out += model.lookahead.last
        click.echo(f"\r  budget {budget}, prompt {number + 1} of {len(prompts)} ", nl=False, err=True)
    total = model.lookahead.stats.as_dict()
    lookahead.unwrap(model)
    return {
        "budget": budget,
        "pool": "shared" if shared else "fresh",
        "tokens_per_step": statistics.mean(stats.tokens_per_step for stats in categories.values()),
        "draft_length": total["draft_length"],
        "acceptance_rate": total["acceptance_rate"],
        "calibration_gap": held_out.calibration_gap,
        "reliability": held_out.reliability,
        "accepted": total["accepted"],
    }


def run_all(
    setups: dict[str, tuple[tuple[int, int], MakePool]], model_name: str | None, prompts_file: Path, limit: int | None,
    budgets: list[int], temperature: float, max_new_tokens: int,
) -> list[dict]:  # fmt: skip
    """`run` of each setup (a name, with window and pool) at each budget, with fresh pools and with a shared one."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, "float32")
    prompts, options = read_prompts(prompts_file, limit), decoding_options(max_new_tokens, temperature)
    results = []
    for name, (window, make) in setups.items():
        click.echo(f"\n{name}", err=True)
        for budget in budgets:
            for shared in (False, True):
                found = run(model, tokenizer, prompts, options, budget, window, shared, make)
                results.append({"sources": name, **found})
    return results


def draw(results: list[dict], path: Path) -> None:
    """Tokens per step by budget, and the reliability curves, as a picture."""
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
    left.set_title("What guesses are worth", fontsize=10)
    right.plot([0, 1], [0, 1], color="grey", lw=0.8, ls="--")
    right.set(xlabel="predicted acceptance", ylabel="observed acceptance", xlim=(0, 1), ylim=(0, 1))
    right.set_title("Calibration (fainter: smaller budgets)", fontsize=10)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        axes.grid(alpha=0.2)
    figure.savefig(path)


def with_decoding_options(command: Callable) -> Callable:
    budgets = click.option("--budgets", type=cli.ListOf(cli.COUNT), default="8,16,32,64", show_default=True)
    out = click.option("--out", type=cli.OUT, help="Write OUT.md, OUT.json and, for steps, OUT.svg.")
    return cli.model(cli.prompts(cli.limit(budgets(cli.temperature(0.6)(cli.new_tokens(out(command)))))))


@main.command()
@with_decoding_options
def steps(out: Path | None, **options) -> None:
    """Tokens per step by budget, for fresh and shared pools, and how far predicted acceptance is from observed."""
    results = run_all({"text, logits": ((0, 3), NgramPool)}, **options)
    text = table(
        ["budget", "pool", "tokens per step", "draft length", "acceptance rate", "calibration gap"],
        [[r["budget"], r["pool"], r["tokens_per_step"], r["draft_length"], f"{r['acceptance_rate']:.1%}",
          f"{r['calibration_gap']:.3f}"] for r in results],
    )  # fmt: skip
    for r in results:
        curve = ", ".join(f"{p:.2f} {o:.2f} ({n})" for n, p, o in r["reliability"])
        text += f"\n\nBudget {r['budget']}, {r['pool']}: predicted, observed (guesses): {curve}"
    report(__file__, "Tokens per step by budget", text, results, out)
    if out:
        draw(results, out.with_suffix(".svg"))


@main.command()
@with_decoding_options
@click.option("--pool", "pool_path", type=click.Path(exists=True), help="A pool built from files, as the last source.")
def sources(out: Path | None, pool_path: str | None, **options) -> None:
    """Tokens per step as one source after the other is added."""
    setups: dict[str, tuple[tuple[int, int], MakePool]] = {
        "text": ((0, 3), TextPool),
        "text, logits": ((0, 3), NgramPool),
        "text, logits, Jacobi 4 x 3": ((4, 3), NgramPool),
        "text, logits, Jacobi 15 x 4": ((15, 4), NgramPool),
    }
    if pool_path:
        setups["text, logits, files"] = (0, 3), lambda: NgramPool.load(pool_path)
    results = run_all(setups, **options)
    text = table(
        ["sources", "budget", "pool", "tokens per step", "accepted by source"],
        [[r["sources"], r["budget"], r["pool"], r["tokens_per_step"],
          ", ".join(f"{source} {count}" for source, count in r["accepted"].items() if count)] for r in results],
    )  # fmt: skip
    report(__file__, "What each source of evidence earns", text, results, out)


@main.command()
@click.option("--steps", "total", default=1_000_000, show_default=True)
@click.option("--memory-mb", type=float, default=16, show_default=True)
def soak(total, memory_mb) -> None:
    """Steps (guess, calibrate, learn) on random and real tokens in turn: memory and time of a guess, ten times."""
    real = standard_library(1_000_000, AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL))
    rng = np.random.default_rng(0)
    texts = [real, rng.integers(0, 2**31 - 1, 1_000_000), rng.integers(0, 300, 1_000_000)]
    pools = [logits_rows(text, 20_000, rng) for text in texts]
    pool = NgramPool(memory_mb)
    click.echo(f"{'steps':>10} {'us a guess':>10} {'us a step':>10} {'resident MiB':>12} {'table MiB':>9}")
    guesses, begun = [], time.perf_counter()
    for step in range(1, total + 1):
        kind = step % len(texts)
        text, rows = texts[kind], pools[kind]
        at = int(rng.integers(LONGEST, len(text) - 4))
        context = text[at - LONGEST : at].tolist()
        start = time.perf_counter()
        pool.guess(context, 16, MIN_PROBABILITY)
        guesses.append(time.perf_counter() - start)
        first = int(rng.integers(0, 20_000 - 17))
        contexts, tokens, probabilities = (part[first : first + 17] for part in rows)
        pool.calibrate(contexts[:2], tokens[:2], probabilities[:2])
        pool.learn_next(contexts, tokens, probabilities)
        pool.learn(text[at - LONGEST : at + 2], start=LONGEST)
        if step % max(total // 10, 1) == 0:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            spent = (time.perf_counter() - begun) / max(total // 10, 1) * 1e6
            guess = statistics.median(guesses) * 1e6
            click.echo(f"{step:>10,} {guess:>10.1f} {spent:>10.0f} {resident:>12.0f} {pool.nbytes / 2**20:>9.2f}")
            guesses, begun = [], time.perf_counter()
    pool.check_integrity()


if __name__ == "__main__":
    main()
