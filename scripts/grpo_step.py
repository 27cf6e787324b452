"""Time the steps of trl's GRPOTrainer (reinforcement learning), with lookahead and without.

    PYTHON=python3.11 sh scripts/peers/install.sh .peers clients   # an environment with trl; or: pip install trl
    .peers/clients/bin/python scripts/grpo_step.py --model M --dtype bfloat16 --prompts FILE.jsonl

Each step samples several answers to each prompt at temperature 1, rewards those that repeat little, and trains. The
training is repeated from the same weights and seed with each method in turn. Its first step does not count, because it
includes the probe and the measurement of costs. Samples are compared with those of the first training without
lookahead. In bfloat16, texts may part by rounding; after that, the weights differ, too.
"""

import copy
import statistics
import tempfile
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from types import MethodType
from typing import Any

import click
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

import lookahead
from bench import cli
from bench.pages import command_line, heading, show_results, table
from bench.timing import in_turn, load_for_batches
from lookahead.passes.environment import environment
from lookahead.tools.contention import Span, watch, why_no_ratio
from lookahead.tools.prompts import read_prompts, source_prompts, up_to_its_end

METHODS = "plain", "lookahead"


class Clock(TrainerCallback):
    """Times the steps of a trainer, and the calls of generate() in them."""

    def __init__(self, model: PreTrainedModel):
        self.steps: list[Span] = []
        self.calls: list[Span] = []
        self.texts: list[list[list[int]]] = []
        """For each call, the new tokens of each answer, up to its end."""
        self._model, self._whole = model, watch(model.device)
        model.generate = MethodType(self._generate, model)

    def _generate(self, model: PreTrainedModel, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        span = watch(model.device)
        output = type(model).generate(model, input_ids, **given)
        self.calls.append(span())
        ends = given["generation_config"].eos_token_id
        self.texts.append([up_to_its_end(text, ends) for text in output[:, input_ids.shape[1] :].tolist()])
        return output

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._whole = watch(self._model.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(self._whole())


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward answers by their share of different tokens."""
    return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    settings: dict,
    method: str,
    repeat: int,
) -> dict:
    """Train a copy of the model. Return the times and texts of its steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trained = copy.deepcopy(model)
    if method == "lookahead":
        lookahead.wrap(trained)
    clock = Clock(trained)
    with tempfile.TemporaryDirectory() as folder:
        chosen = GRPOConfig(folder, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
                            use_cpu=model.device.type == "cpu", bf16=False, temperature=1.0, **settings)  # fmt: skip
        data = Dataset.from_list(prompts)
        trainer = GRPOTrainer(trained, variety, args=chosen, train_dataset=data, processing_class=tokenizer)
        trainer.add_callback(clock)
        trainer.train()
    stats = trained.lookahead.stats if method == "lookahead" else lookahead.Stats()
    if method == "lookahead" and not stats.steps:
        raise click.ClickException(f"lookahead does not decode {trained.lookahead.last.plain}")
    return {"steps": clock.steps, "calls": clock.calls, "texts": clock.texts, "stats": stats}


def summary(method: str, trainings: list[dict], expected: list[list[list[int]]]) -> dict:
    """Return a row of the table. expected: the texts of each step of the first training without lookahead."""
    counted = [(training, step) for training in trainings for step in range(1, len(training["steps"]))]
    stats = lookahead.Stats()
    for training in trainings:
        stats += training["stats"]
    pairs = [
        (ours, theirs)
        for training in trainings
        for texts, others in zip(training["texts"], expected, strict=True)
        for ours, theirs in zip(texts, others, strict=True)
    ]
    return {
        "method": method,
        "tokens": statistics.fmean(sum(map(len, training["texts"][step])) for training, step in counted),
        "generating": statistics.median(training["calls"][step].seconds for training, step in counted),
        "step": statistics.median(training["steps"][step].seconds for training, step in counted),
        "tokens_per_pass": stats.tokens_per_step if stats.steps else 1.0,
        "identical": sum(ours == theirs for ours, theirs in pairs),
        "answers": len(pairs),
    }


def markdown(rows: list[dict], where: dict) -> str:
    plain, columns = rows[0], [
        "method", "tokens a step of GRPO", "s generating", "speed-up", "s a step of GRPO", "speed-up",
        "tokens a pass of a sequence", "identical answers",
    ]  # fmt: skip
    cells = [
        [row["method"], f"{row['tokens']:.0f}", *(
            value for name in ("generating", "step")
            for value in (row[name], None if where["note"] else plain[name] / row[name])
        ), row["tokens_per_pass"], f"{row['identical']}/{row['answers']}"]
        for row in rows
    ]  # fmt: skip
    return heading(where) + table(columns, cells, "lrrrrrrr") + "\n"


@click.command(help=__doc__.split("\n")[0])
@cli.model
@click.option("--prompts", "prompts_file", type=cli.FILE, help="In Spec-Bench's JSONL format. Default: some code.")
@cli.dtype
@cli.device
@cli.limit
@cli.repeats
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=2), help="Steps of a training.")
@click.option("--prompts-per-step", default=1, show_default=True, type=cli.COUNT)
@click.option("--samples", default=8, show_default=True, type=click.IntRange(min=2), help="Answers to each prompt.")
@cli.new_tokens
@click.option("--out", type=cli.OUT, help="Write OUT.json and OUT.md.")
def main(
    model_name, prompts_file, dtype, device, limit, repeats, steps, prompts_per_step, samples, max_new_tokens, out
) -> None:
    model, tokenizer = load_for_batches(model_name, dtype, device)
    given = read_prompts(prompts_file, limit) if prompts_file else source_prompts(limit or 8)
    texts = [prompt["turns"][0] for prompt in given]
    asked = [{"prompt": [{"role": "user", "content": text}] if tokenizer.chat_template else text} for text in texts]
    asked = list(islice(cycle(asked), max(len(asked), prompts_per_step)))
    settings = {
        "max_steps": steps, "per_device_train_batch_size": prompts_per_step * samples, "num_generations": samples,
        "max_completion_length": max_new_tokens,
    }  # fmt: skip
    trainings = in_turn(METHODS, repeats, 0, partial(train, model, tokenizer, asked, settings))
    expected = trainings["plain"][0]["texts"]
    rows = [summary(method, trainings[method], expected) for method in METHODS]
    every = [span for found in trainings.values() for training in found for span in training["steps"]]
    where = {"command": command_line(__file__), **environment(model), "trl": version("trl")}
    where["note"] = why_no_ratio(sum(every, Span()))
    text = markdown(rows, where)
    show_results(out, text, {"environment": where, "table": rows})


if __name__ == "__main__":
    main()
