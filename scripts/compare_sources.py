"""Compare sources of guesses, alone and together, by tokens per step and by time.

The n-gram pool runs alone in up to three ways: a fresh pool for each prompt, a fresh pool with the model's bigrams (if
`lookahead tune --bigrams` has stored them), and one pool for all prompts. Each other source runs alone and with a fresh
pool. If there are several, they also run all together. For each prompt, they run in turn; their order rotates from
prompt to prompt. Chat models get prompts in their chat template. The seed is the prompt's number.

    python scripts/compare_sources.py --model M --prompts FILE.jsonl --heads FOLDER --heads FOLDER --out OUT
    python scripts/compare_sources.py --model M --prompts FILE.jsonl --draft SMALL --temperature 0,0.7,1 --out OUT
    python scripts/compare_sources.py --model M --prompts FILE.jsonl --mtp --out OUT
    python scripts/compare_sources.py --model M --prompts FILE.jsonl --files NOTES --guesses 16,64 --out OUT
    python scripts/compare_sources.py --model M --prompts FILE.jsonl --published --guesses 16,64 --out OUT
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
from transformers import PreTrainedModel

import lookahead
from bench import cli
from bench.corpora import conversation, first_of_each, prompt_ids
from bench.methods import as_inputs, forget_settings, timed_by, twin_of
from bench.pages import command_line, heading, table, write_results
from bench.recycling import GooseSource, RacerSource, TokenRecyclingSource
from bench.timing import decoding_options, in_turn, timed, why_no_ratios
from lookahead import (
    DraftModelSource,
    EagleSource,
    GuessSource,
    LayerSkipSource,
    Lookahead,
    LookaheadConfig,
    MedusaSource,
    MtpSource,
    NgramPool,
    PoolSource,
    RetrievalSource,
)
from lookahead.guessing.bigrams import bigrams_file, new_pool
from lookahead.passes.environment import environment
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts

PLAIN, POOL, BIGRAMS, KEPT = "plain", "pool", "pool, bigrams", "pool, kept"
COLUMNS = (
    "sources", "tokens/step", "guesses/step", "accepted", "asked", "passes/step", "ms/token", "x plain", "x pool",
    "equal texts",
)  # fmt: skip


def heads_of(model: PreTrainedModel, folder: Path) -> GuessSource:
    """Return the source for a folder of heads. Raises ClickException if they are of neither kind, or of another
    model."""
    errors = []
    for kind in (EagleSource, MedusaSource):
        try:
            return kind(model, folder)
        except (ValueError, FileNotFoundError) as error:
            errors.append(f"{kind.__name__}: {error}")
    raise click.ClickException("\n".join(errors))


class Row:
    """Some sources of guesses, and their results.

    As in a model that stays wrapped, measurements of the sources are kept from prompt to prompt.
    """

    def __init__(
        self, sources: list[GuessSource], guesses: int | str, pool_of: Callable[[LookaheadConfig], NgramPool] | None
    ):
        """pool_of: makes a pool for each prompt; None: one pool for all prompts."""
        config, self._pool_of = LookaheadConfig(budget=guesses), pool_of
        self.engine = Lookahead(config, NgramPool(config.pool_memory_mb), sources)
        self.total, self.seconds, self.equal = lookahead.Stats(), [], 0

    def decode(self, model: PreTrainedModel, ids: list[int], options: dict, seed: int) -> tuple[list[int], float]:
        """Return the text of a prompt, and the seconds for it."""
        if self._pool_of is not None:
            self.engine.pool = self._pool_of(self.engine.config)
        (text,), took = timed_by(self.engine, model, as_inputs(ids, model.device), options, seed)
        return text, took


def empty_pool(config: LookaheadConfig) -> NgramPool:
    return NgramPool(config.pool_memory_mb)


def rows_of(model: PreTrainedModel, others: dict[str, GuessSource], guesses: int | str) -> dict[str, Row]:
    pool = PoolSource()
    rows = {POOL: Row([pool], guesses, empty_pool)}
    if bigrams_file(model).is_file():
        rows[BIGRAMS] = Row([pool], guesses, partial(new_pool, model))
    rows[KEPT] = Row([pool], guesses, None)
    for name, source in others.items():
        rows[name] = Row([source], guesses, empty_pool)
        rows[f"pool + {name}"] = Row([pool, source], guesses, empty_pool)
    if len(others) > 1:
        rows["all"] = Row([pool, *others.values()], guesses, empty_pool)
    return rows


def measure(
    model: PreTrainedModel, prompts: list[list[int]], options: dict, others: dict[str, GuessSource], guesses: list
) -> list[dict]:
    """Decode all prompts with each row of sources and each number of guesses; return a result for each combination."""
    rows = {(budget, name): row for budget in guesses for name, row in rows_of(model, others, budget).items()}
    plain_seconds: list[float] = []
    wrapped = twin_of(model)

    def call(ids: list[int], seed: int, key: tuple, _: int) -> tuple[list[int], float]:
        if key == PLAIN:
            (text,), took = timed(model, as_inputs(ids, model.device), options, seed)
            return text, took
        row = rows[key]
        text, took = row.decode(wrapped, ids, options, seed)
        if seed >= 0:
            row.total += row.engine.last
        return text, took

    keys = [PLAIN, *rows]
    for key in keys:  # builds kernels, measures step costs
        call(prompts[0], -1, key, 0)
    label = f"temperature {options.get('temperature', 0)}"
    with click.progressbar(list(enumerate(prompts)), label=label, file=sys.stderr) as progress:
        for seed, ids in progress:
            calls = in_turn(keys, 1, seed % len(keys), partial(call, ids, seed))
            ((expected, took),) = calls[PLAIN]
            plain_seconds.append(took / len(expected))
            for key, row in rows.items():
                ((text, took),) = calls[key]
                row.seconds.append(took / len(text))
                row.equal += text == expected
    results = []
    for (budget, name), row in rows.items():
        of_pool = rows[budget, POOL].seconds
        others_did = [stats for of, stats in row.total.sources.items() if of != "PoolSource"]
        results.append({
            "temperature": options.get("temperature", 0), "guesses": budget, "sources": name,
            "tokens_per_step": row.total.tokens_per_step, "guesses_per_step": row.total.draft_length,
            "acceptance": row.total.acceptance_rate,
            "asked": max(stats.asked for stats in others_did) / row.total.steps if others_did else None,
            "passes_per_step": sum(stats.passes for stats in others_did) / row.total.steps if others_did else None,
            "milliseconds": [1000 * each for each in row.seconds],
            "x_plain": sum(plain_seconds) / sum(row.seconds), "x_pool": sum(of_pool) / sum(row.seconds),
            "plain_milliseconds": [1000 * each for each in plain_seconds],
            "equal": row.equal, "prompts": len(prompts), "stats": row.total.as_dict(),
        })  # fmt: skip
    return results


def page(where: dict, results: list[dict]) -> str:
    """A table for each temperature and number of guesses."""
    why = where["note"]
    parts = [heading(where).rstrip()]
    for temperature, guesses in dict.fromkeys((one["temperature"], one["guesses"]) for one in results):
        rows = [one for one in results if (one["temperature"], one["guesses"]) == (temperature, guesses)]
        parts.append(f"## Temperature {temperature:g}, {guesses} guesses")
        parts.append(f"Plain decoding takes {statistics.mean(rows[0]['plain_milliseconds']):.1f} ms a token.")
        cells = [
            [
                one["sources"], one["tokens_per_step"], one["guesses_per_step"], f"{one['acceptance']:.0%}",
                None if one["asked"] is None else f"{one['asked']:.0%}", one["passes_per_step"],
                statistics.mean(one["milliseconds"]), *((None, None) if why else (one["x_plain"], one["x_pool"])),
                f"{one['equal']} of {one['prompts']}",
            ]
            for one in rows
        ]  # fmt: skip
        parts.append(table(list(COLUMNS), cells, "lrrrrrrrrr"))
    parts.append(
        "Times include the prompt. x plain and x pool: the sum of the times per token of plain decoding, or of the "
        "fresh pool,\ndivided by this row's. asked: share of the steps that asked the sources other than the pool. "
        "passes/step: those\nof the sources' own models or heads."
    )
    return "\n\n".join(parts) + "\n"


@click.command(help=__doc__.split("\n")[0])
@cli.model
@click.option("--heads", type=cli.FOLDER, multiple=True, help="Folder of trained heads. May be repeated.")
@click.option("--draft", metavar="NAME_OR_PATH", help="Draft model.")
@click.option("--files", type=cli.FOLDER, help="Folder of .txt files for RetrievalSource.")
@click.option("--layer-skip", is_flag=True, help="Draft with the layers that `lookahead tune --layer-skip` found.")
@click.option("--mtp", is_flag=True, help="The checkpoint's own multi-token-prediction layers.")
@click.option("--published", is_flag=True, help="Token Recycling, RACER and Goose (scripts/bench/recycling.py).")
@cli.prompts
@cli.limit
@cli.per_category
@cli.dtype
@cli.temperatures
@cli.new_tokens
@cli.guesses("16")
@click.option("--out", type=cli.OUT, required=True, help="Write OUT.md and OUT.json.")
def main(
    model_name, heads, draft, files, layer_skip, mtp, published, prompts_file, limit, per_category, dtype, temperatures,
    max_new_tokens, guesses, out,
) -> None:  # fmt: skip
    model, tokenizer = load(model_name, dtype, "cpu")
    forget_settings(model)
    others: dict[str, GuessSource] = {}
    for folder in heads:
        source = heads_of(model, folder)
        name = type(source).__name__.removesuffix("Source")
        others[name if name not in others else f"{name}, {folder}"] = source
    if draft:
        others["draft model"] = DraftModelSource(load(draft, dtype, "cpu")[0])
    if files:
        others["files"] = RetrievalSource.of_files(sorted(files.rglob("*.txt")), tokenizer)
    if layer_skip:
        others["layer skip"] = LayerSkipSource(model)
    if mtp:
        others["MTP"] = MtpSource(model)
    if published:
        others |= {"Token Recycling": TokenRecyclingSource(), "RACER": RacerSource(), "Goose": GooseSource()}
    chosen = read_prompts(prompts_file, limit)
    chosen = first_of_each(chosen, per_category) if per_category else chosen
    prompts = [prompt_ids(tokenizer, conversation(prompt), raw=False) for prompt in chosen]
    where = {"command": command_line(__file__), **environment(model), "prompts": len(prompts)}
    results: list[dict] = []
    for temperature in temperatures:
        results += measure(model, prompts, decoding_options(max_new_tokens, temperature), others, guesses)
        where["note"] = why_no_ratios()
        write_results(out, page(where, results), {"where": where, "results": results})


if __name__ == "__main__":
    main()
