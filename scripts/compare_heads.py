"""Compare trained heads, the pool, and both, by tokens per step and by time.

Each prompt begins with a fresh pool. Chat models get prompts in their chat template. The seed is the prompt's number.

    python scripts/compare_heads.py --model M --heads FOLDER --prompts FILE.jsonl --out OUT
"""

import statistics
from pathlib import Path

import click
from transformers import GenerationConfig, PreTrainedModel

import lookahead
from bench import cli
from bench.methods import as_inputs
from bench.pages import command_line, heading, table, write_results
from bench.timing import decoding_options, timed
from lookahead import (
    EagleSource,
    GuessSource,
    Lookahead,
    LookaheadConfig,
    MedusaSource,
    NgramPool,
    PoolSource,
)
from lookahead.passes.environment import environment
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts

COLUMNS = ["temperature", "sources", "tokens per step", "accepted", "asked", "ms per token", "plain", "equal texts"]


def heads_of(model: PreTrainedModel, folder: Path) -> GuessSource:
    """Raises ClickException if the folder holds heads of neither kind, or of another model."""
    errors = []
    for kind in (EagleSource, MedusaSource):
        try:
            return kind(model, folder)
        except (ValueError, FileNotFoundError) as error:
            errors.append(f"{kind.__name__}: {error}")
    raise click.ClickException("\n".join(errors))


def measure(
    model: PreTrainedModel, prompts: list[list[int]], options: dict, sources: list[GuessSource], guesses: int | str,
    expected: list[list[int]],
) -> dict:  # fmt: skip
    """Decode all prompts with these sources. expected: the plain texts.

    As with a model that stays wrapped, what is known of the sources' worth is kept from prompt to prompt.
    """
    total, seconds, equal = lookahead.Stats(), [], 0
    config = LookaheadConfig(budget=guesses)
    engine = Lookahead(config, NgramPool(config.pool_memory_mb), sources)
    for seed, (ids, plain) in enumerate(zip(prompts, expected, strict=True)):
        engine.pool = NgramPool(config.pool_memory_mb)
        lookahead.wrap(model, config, engine.pool, sources).lookahead = engine
        try:
            (text,), took = timed(model, as_inputs(ids, model.device), options, seed)
            total += engine.last
        finally:
            lookahead.unwrap(model)
        seconds.append(1000 * took / len(text))
        equal += text == plain
    asked = max((stats.asked for name, stats in total.sources.items() if name != "PoolSource"), default=None)
    return {
        "tokens_per_step": total.tokens_per_step, "acceptance": total.acceptance_rate, "milliseconds": seconds,
        "asked": None if asked is None else asked / total.steps, "equal": equal, "stats": total.as_dict(),
    }  # fmt: skip


@click.command(help=__doc__.split("\n")[0])
@cli.model
@click.option("--heads", type=cli.FOLDER, required=True, help="Folder of the heads.")
@cli.prompts
@cli.limit
@cli.dtype
@click.option("--temperature", "temperatures", type=cli.ListOf(click.FloatRange(min=0)), default="0,0.7",
              show_default=True, help="One or several; 0: greedy, no sampling.")  # fmt: skip
@cli.new_tokens
@click.option("--guesses", default="16", type=cli.WholeOr("auto", least=1), show_default=True, help="In each step.")
@click.option("--out", type=cli.OUT, required=True, help="Write OUT.md and OUT.json.")
def main(model_name, heads, prompts_file, limit, dtype, temperatures, max_new_tokens, guesses, out) -> None:
    model, tokenizer = load(model_name, dtype, "cpu")
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[0] if isinstance(ends, list) else ends
    )
    trained = heads_of(model, heads)
    texts = [prompt["turns"][0] for prompt in read_prompts(prompts_file, limit)]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids for text in texts]
    names = {"heads": [trained], "pool": [PoolSource()], "both": [PoolSource(), trained]}
    results, rows = [], []
    for temperature in temperatures:
        options = decoding_options(max_new_tokens, temperature)
        plain = [timed(model, as_inputs(ids, model.device), options, seed) for seed, ids in enumerate(prompts)]
        expected = [text for (text,), _ in plain]
        plain_ms = statistics.median(1000 * took / len(text) for (text,), took in plain)
        for name, sources in names.items():
            one = measure(model, prompts, options, sources, guesses, expected)
            results.append({"temperature": temperature, "sources": name, "plain": plain_ms} | one)
            asked = None if one["asked"] is None else f"{one['asked']:.0%}"
            milliseconds = statistics.median(one["milliseconds"])
            rows.append([
                temperature, name, one["tokens_per_step"], f"{one['acceptance']:.0%}", asked, milliseconds, plain_ms,
                f"{one['equal']} of {len(prompts)}",
            ])  # fmt: skip
            click.echo(", ".join(f"{column} {value}" for column, value in zip(COLUMNS, rows[-1], strict=True)))
    where = {"command": command_line(__file__), **environment(model), "prompts": len(prompts)}
    write_results(out, heading(where) + table(COLUMNS, rows, "rlrrrrrr") + "\n", {"where": where, "results": results})


if __name__ == "__main__":
    main()
