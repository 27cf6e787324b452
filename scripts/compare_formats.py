"""Compare the passes of answers in a JSON schema, with and without guesses of the tokens that the schema forces.

Each prompt asks for the same facts about a text. Answers are greedy and sampled, with a pool that is kept over all
prompts. Texts must be the same both ways. An answer is valid if it is JSON with the fields of the schema.

    python scripts/compare_formats.py --model M --prompts FILE.jsonl --dtype bfloat16 --out OUT
"""

import json
import sys
import time

import click
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from bench import cli
from bench.pages import command_line, heading, table, write_results
from lookahead import NgramPool, Sequences, unwrap, wrap
from lookahead.models.adapter import vocabulary_of
from lookahead.passes.environment import environment
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts
from lookahead.tools.server.answering import ends_of
from lookahead.tools.server.fields import Demand
from lookahead.tools.server.grammar import Grammars
from lookahead.tools.server.reading import Prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "main_topic": {"type": "string", "maxLength": 40},
        "category": {"enum": ["science", "history", "travel", "mathematics", "everyday life", "something else"]},
        "is_a_question": {"type": "boolean"},
        "people_mentioned": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
        "difficulty_from_1_to_5": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["main_topic", "category", "is_a_question", "people_mentioned", "difficulty_from_1_to_5"],
    "additionalProperties": False,
}
ASK = "Describe this request as JSON with the fields " + ", ".join(SCHEMA["properties"]) + ".\n\n"
MOST = 200  # most tokens of an answer


def answers(
    model: PreTrainedModel, grammars: Grammars, prompts: list[list[int]], temperature: float, guesses: bool
) -> tuple[list[list[int]], dict]:
    """Return the tokens of each answer, and the passes and time of all of them."""
    wrap(model, pool=NgramPool(16))
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature else {})
    sequences, texts, began = Sequences(model), [], time.perf_counter()
    for seed, ids in enumerate(prompts):
        text = grammars.text(Demand(SCHEMA), Prompt(ids, []), many=False)
        processor, source = grammars.enforce(grammars.compiled(text), len(ids))
        future = sequences.submit(
            torch.tensor([ids]), seed=seed, source=source if guesses else (), max_new_tokens=MOST,
            logits_processor=LogitsProcessorList([processor]), **sampling,
        )  # fmt: skip
        while sequences.step():
            pass
        texts.append(future.result()[0, len(ids) :].tolist())
    stats = model.lookahead.stats
    took = {"tokens": sum(map(len, texts)), "passes": stats.steps, "seconds": time.perf_counter() - began}
    unwrap(model)
    return texts, took


def is_valid(text: str) -> bool:
    try:
        return json.loads(text).keys() == SCHEMA["properties"].keys()
    except ValueError:
        return False


def page(where: dict, results: list[dict]) -> str:
    columns = ["temperature", "forced tokens", "valid answers", "tokens", "passes", "tokens/pass", "ms/token"]
    rows = [
        [
            f"{one['temperature']:g}", "guessed" if one["forced tokens"] else "",
            f"{one['valid']} of {where['prompts']}", one["tokens"], one["passes"], one["tokens"] / one["passes"],
            1e3 * one["seconds"] / one["tokens"],
        ]
        for one in results
    ]  # fmt: skip
    return f"{heading(where)}{table(columns, rows, 'rllrrrr')}\n"


@click.command(help=__doc__.split("\n")[0])
@cli.model
@cli.prompts
@cli.limit
@cli.dtype
@cli.temperatures
@click.option("--out", type=cli.OUT, required=True, help="Write OUT.md and OUT.json.")
def main(model_name, prompts_file, limit, dtype, temperatures, out) -> None:
    model, tokenizer = load(model_name, dtype, "cpu")
    grammars = Grammars(tokenizer, None, vocabulary_of(model), ends_of(model.generation_config))
    asked = [[{"role": "user", "content": ASK + one["turns"][0]}] for one in read_prompts(prompts_file, limit)]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    where = {"command": command_line(__file__), **environment(model), "prompts": len(prompts)}
    results, differ = [], 0
    for temperature in temperatures:
        before: list[list[int]] = []
        for guesses in (False, True):
            texts, took = answers(model, grammars, prompts, temperature, guesses)
            differ += sum(map(list.__ne__, before, texts))
            before = texts
            valid = sum(is_valid(tokenizer.decode(text, skip_special_tokens=True)) for text in texts)
            results.append({"temperature": temperature, "forced tokens": guesses, "valid": valid} | took)
            write_results(out, page(where, results), {"where": where, "results": results})
    if differ:
        sys.exit(f"{differ} texts differ")


if __name__ == "__main__":
    main()
