"""``lookahead generate --prompts``: continue the prompts of a file in batches, and resume after an interrupt."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.compat.loops import own_loop
from lookahead.compat.stop_strings import as_criterion
from lookahead.engine import loop
from lookahead.engine.engine import Lookahead
from lookahead.models.adapter import context_length
from lookahead.passes.capabilities import can_batch
from lookahead.passes.costs import StepCosts, step_costs
from lookahead.stats import Stats
from lookahead.streaming import render
from lookahead.tools.answers import Answers, answers, beginning
from lookahead.tools.files import writing
from lookahead.tools.loading import check_pool, check_tokens, decoding, load_wrapped
from lookahead.tools.pool_commands import check_out
from lookahead.tools.prompts import PromptLine, read_prompt_lines, up_to_its_end
from lookahead.tools.sizes import best_size, fitting_size
from lookahead.vocabulary import vocabulary_fingerprint
from ngram_pool import NgramPool

SAVE_EVERY = 60.0  # seconds between two saves of the pool
# Settings of generate() by which a text does not depend on the padding before its prompt. With others, all prompts of a
# batch have one length.
IGNORE_PADDING = {
    "max_length", "max_new_tokens", "min_new_tokens", "max_time", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
    "decoder_start_token_id", "renormalize_logits", "remove_invalid_values", "suppress_tokens", "cache_implementation",
    "disable_compile", "num_assistant_tokens", "transformers_version", "_from_model_config", "tokenizer",
}  # fmt: skip
OFF = {
    **{"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "guidance_scale": 1.0},
    **{"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0},
}
"""Values with which other settings do nothing."""


@dataclass(frozen=True)
class Task:
    """A prompt to continue."""

    line: PromptLine
    ids: list[int]
    seed: int


def generate(
    prompts_file: str, out: Path, seed: int, strategy: str, show_stats: bool, pool_path: str | None, **shared: Any
) -> None:
    check_pool(pool_path, strategy)
    lines = read_prompt_lines(Path(prompts_file))
    pool_file = None if pool_path is None else Path(pool_path)
    if pool_file is not None:
        check_out(pool_file)
    known = pool_path if pool_file is not None and pool_file.exists() else None
    model, tokenizer, engine, options = load_wrapped(strategy=strategy, pool_path=known, **shared)
    if engine is not None:
        engine.pool.vocabulary = engine.pool.vocabulary or vocabulary_fingerprint(tokenizer)
    tasks = _tasks(lines, prompts_file, model, tokenizer, seed)
    settings = {name: value for name, value in options.items() if name not in ("assistant_model", "tokenizer")}
    settings |= {"model": model.config.name_or_path, "dtype": str(model.dtype)}
    begins = [beginning(task.line.number, _fingerprint(task, settings)) for task in tasks]
    texts = Texts(model, tokenizer, engine, options)
    with answers(out, begins) as kept, _saved(engine.pool if engine else None, pool_file) as save:
        if kept.count:
            click.echo(f"{kept.count} of {len(tasks)} texts are in {out} already", err=True)
        with decoding():
            try:
                _decode_all(texts, tasks, kept, save)
            except KeyboardInterrupt:
                click.echo(
                    f"\ninterrupted: {kept.count} of {len(tasks)} texts are in {out}; the same command continues there",
                    err=True,
                )
                sys.exit(130)
            finally:
                kept.save()
    click.echo(f"{out}: {len(tasks)} texts{texts.summary()}", err=True)
    if show_stats and engine:
        click.echo(str(engine.stats), err=True)


class Texts:
    """Decodes batches of prompts. Each text is what the model writes after its prompt alone, from the prompt's seed."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, engine: Lookahead | None, options: dict
    ):
        """options: arguments of generate(). engine: None if the model decodes plainly, one text at a time."""
        self.model, self._tokenizer, self._engine = model, tokenizer, engine
        self._options = dict(options)
        self._draft_model = self._options.pop("assistant_model", None)
        self._max_new_tokens = self._options.pop("max_new_tokens")
        settings = model.generation_config
        ends = settings.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        if settings.pad_token_id is None:  # any token will do: the mask hides it
            self._options["pad_token_id"] = self._ends[0] or 0
        given = settings.to_diff_dict() | self._options
        used = {name for name, value in given.items() if value is not None and value is not False}
        self._pads = all(name in IGNORE_PADDING or given[name] == OFF.get(name) for name in used)
        self._most = 1  # texts in a batch
        self._costs: StepCosts | None = None  # unknown until the first batch
        self.tokens, self.seconds = 0, 0.0

    def next_batch(self, tasks: list[Task]) -> list[Task]:
        """Return as many of the first ``tasks`` as are best decoded together."""
        context = context_length(self.model)
        first, *others = tasks[: self._size(tasks)]
        batch = [first]
        for task in others:
            longest = max(len(one.ids) for one in (*batch, task))
            if longest + self._max_new_tokens > context or not (self._pads or len(task.ids) == len(first.ids)):
                break
            batch.append(task)
        return batch

    def _size(self, tasks: list[Task]) -> int:
        engine = self._engine
        if engine is None:
            return 1
        if self._costs is None:
            runner = engine.find_runner(self.model)
            serves = can_batch(self.model, runner.adapter) and not runner.adapter.has_state
            longest = max(len(task.ids) for task in tasks) + self._max_new_tokens
            self._most = fitting_size(self.model, longest) if serves else 1
            self._costs = step_costs(runner)
        coming = tasks[: self._most]
        length = sum(len(task.ids) for task in coming) // len(coming) + self._max_new_tokens // 2
        return best_size(self._costs, engine.stats, length, min(self._most, len(tasks)))

    def halve(self, batch: list[Task]) -> None:
        """From now on, make batches at most half as large as this one, which did not fit into memory."""
        self._most = max(len(batch) // 2, 1)

    def decode(self, batch: list[Task]) -> list[dict]:
        """Return the fields of the answers of a batch."""
        began = time.perf_counter()
        width = max(len(task.ids) for task in batch)
        room = min(self._max_new_tokens, context_length(self.model) - width)
        paddings = [width - len(task.ids) for task in batch]
        ids = torch.tensor([[0] * padding + task.ids for padding, task in zip(paddings, batch, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(paddings)[:, None]).long()
        torch.manual_seed(batch[0].seed)  # used if the model's own loop decodes a single text
        output = self.model.generate(  # type: ignore[operator]  # a method
            ids.to(self.model.device), attention_mask=mask.to(self.model.device), max_new_tokens=room,
            **self._loop([task.seed for task in batch]), **as_criterion(self.model, self._options),
        )  # fmt: skip
        if len(batch) > 1 and self._engine and self._engine.last.plain:  # which samples all texts from one seed
            self._most, self.seconds = 1, self.seconds + time.perf_counter() - began
            return [self.decode([task])[0] for task in batch]
        answers = [self._answer(task, ids, room) for task, ids in zip(batch, output[:, width:].tolist(), strict=True)]
        self.tokens += sum(answer["tokens"] for answer in answers)
        self.seconds += time.perf_counter() - began
        return answers

    def _loop(self, seeds: list[int]) -> dict[str, Callable]:
        if self._engine is None:
            return {}
        seeded = partial(loop.run, self._engine, own_loop(self.model), draft_model=self._draft_model, seeds=seeds)
        return {"custom_generate": seeded}

    def _answer(self, task: Task, ids: list[int], room: int) -> dict:
        ids = up_to_its_end(ids, self._ends)  # type: ignore[arg-type]  # None is no token
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        is_cut = len(ids) == room and ids[-1] not in self._ends
        return {**task.line.id, "text": text, "tokens": len(ids), "finish_reason": "length" if is_cut else "stop"}

    def rate(self) -> str:
        """Tokens per second and per step, as text."""
        if not self.tokens:
            return ""
        stats = self._engine.stats if self._engine else Stats()
        per_step = f", {stats.tokens_per_step:.2f} tokens a step" if stats.sequence_steps else ""
        return f"{self.tokens / self.seconds:.0f} tokens/s{per_step}"

    def summary(self) -> str:
        return f"; {self.tokens:,} tokens in {self.seconds:.1f} s, {self.rate()}" if self.tokens else ""


def _decode_all(texts: Texts, tasks: list[Task], kept: Answers, save: Callable[[], None]) -> None:
    left = len(tasks) - kept.count
    bar: Any = click.progressbar(
        length=left, label="texts", file=sys.stderr, show_pos=True, item_show_func=lambda item: texts.rate()
    )
    with bar:
        while kept.count < len(tasks):
            batch = texts.next_batch(tasks[kept.count :])
            try:
                decoded = texts.decode(batch)
            except (torch.OutOfMemoryError, MemoryError):
                if len(batch) == 1:
                    raise
                texts.halve(batch)
                continue
            except (RuntimeError, ValueError) as error:
                numbers = " to ".join(dict.fromkeys(str(task.line.number) for task in (batch[0], batch[-1])))
                raise RuntimeError(f"line {numbers} of the prompts: {error}") from error
            for answer in decoded:
                kept.add(answer)
            bar.update(len(batch))
            save()


@contextmanager
def _saved(pool: NgramPool | None, path: Path | None) -> Iterator[Callable[[], None]]:
    """Save the pool at the end, also after an error or an interrupt. Yields a function that saves it if a save is due.

    path: None saves nothing.
    """
    saved = time.monotonic()

    def save(at_once: bool = False) -> None:
        nonlocal saved
        if pool is None or path is None or not (at_once or time.monotonic() - saved > SAVE_EVERY):
            return
        with writing(path):
            pool.save(path)
        saved = time.monotonic()

    try:
        yield save
    except BaseException:  # an error of the pool must not hide this one
        try:
            save(at_once=True)
        except click.ClickException as error:
            error.show()
        raise
    save(at_once=True)


def _tasks(
    lines: list[PromptLine], path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[Task]:
    """Tokenize the prompts. Raises ClickException, naming the line, for one that the model cannot continue."""
    context, tasks = context_length(model), []
    if tokenizer.chat_template is not None and any(isinstance(line.content, str) for line in lines):
        click.echo("note: texts are continued as raw text; messages go into the model's chat template", err=True)
    with click.progressbar(lines, label="reading", file=sys.stderr, hidden=len(lines) < 1000) as bar:
        for line in bar:
            where = f"{path}, line {line.number}"
            if isinstance(line.content, str):
                ids = tokenizer(line.content).input_ids
            else:
                try:
                    ids = render(tokenizer, line.content)["input_ids"][0].tolist()
                except Exception as error:  # templates raise any error
                    raise click.ClickException(
                        f"{where}: the tokenizer's chat template cannot render these messages: {error}. Give a text as "
                        "prompt, or a chat model as --model"
                    ) from error
            check_tokens(ids, model, f"{where}: the prompt")
            if not ids:
                raise click.ClickException(f"{where}: the prompt is empty: give at least one token of text")
            if len(ids) >= context:
                raise click.ClickException(
                    f"{where}: the prompt has {len(ids)} tokens, the model's context is {context}: shorten it, or "
                    "remove the line"
                )
            own = seed + line.number - 1
            tasks.append(Task(line, ids, own if own < 2**64 else own - 2**64))
    return tasks


def _fingerprint(task: Task, settings: dict) -> str:
    """Return a fingerprint of everything that a text depends on."""
    return xxhash.xxh3_64_hexdigest(json.dumps([task.ids, task.seed, settings], sort_keys=True, default=str).encode())
