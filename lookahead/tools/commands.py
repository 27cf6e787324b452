"""What the commands that decode do: ``lookahead generate``, ``chat``, ``audit`` and ``tune``."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from lookahead import DEMO_MODEL
from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Lookahead
from lookahead.models.adapter import UnsupportedModelError, context_length
from lookahead.passes.costs import RUNGS, progress_bar, step_costs
from lookahead.passes.environment import environment
from lookahead.stats import Stats
from lookahead.streaming import render
from lookahead.tools.audit import audit as audit_prompts
from lookahead.tools.audit import first_difference, markdown
from lookahead.tools.chat import PLAIN_STOP, PLAIN_TEMPLATE, Conversation, converse
from lookahead.tools.loading import load
from lookahead.tools.pool_commands import load_pool
from lookahead.tools.prompts import read_prompts, readable, source_prompts
from lookahead.tools.terminal import AnswerStreamer, StepStreamer
from lookahead.tools.tuning import time_steps
from lookahead.vocabulary import vocabulary_fingerprint
from lookahead.wrapping import engine_of, unwrap, wrap


def generate(
    prompt: str | None,
    prompt_file: TextIO | None,
    max_new_tokens: int,
    seed: int,
    strategy: str,
    stream: bool,
    as_json: bool,
    show_stats: bool,
    compare: bool,
    **shared: Any,
) -> None:
    """``lookahead generate``: the options are the command's."""
    prompt = _read_prompt(prompt, prompt_file)
    model, tokenizer, engine, options = _prepare(strategy=strategy, **shared)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs.input_ids.shape[1]
    options["max_new_tokens"] = _fitting(max_new_tokens, length, model)

    def decode(streamer: BaseStreamer | None = None) -> tuple[list[int], float]:
        """New ids and the seconds they took."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = model.generate(**inputs, **options, streamer=streamer)  # type: ignore[operator]  # a method
        ids = output[0, length:].tolist()
        return ids, time.perf_counter() - start

    streaming = stream and not as_json
    plain = None
    with _decoding():
        if compare and engine and engine.goes_by_costs:
            start = time.perf_counter()
            step_costs(engine.find_runner(model))
            click.echo(f"made ready in {time.perf_counter() - start:.1f} s, which is no part of the times", err=True)
        ids, seconds = decode(StepStreamer(tokenizer, _step_of(engine)) if streaming else None)
        if compare:
            unwrap(model)
            click.echo("decoding plainly for comparison ...", err=True)
            plain = decode()

    stats = engine.last if engine else None
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if as_json:
        result: dict[str, Any] = {"prompt": prompt, "text": text, "tokens": len(ids), "seconds": seconds}
        result |= {"strategy": strategy, "stats": stats.as_dict() if stats else None}
        if plain:
            speedup = len(ids) / seconds / (len(plain[0]) / plain[1])
            result["plain"] = {"seconds": plain[1], "speedup": speedup, "identical": ids == plain[0]}
        click.echo(json.dumps(result))
        return
    if not streaming:
        click.echo(text)
    if show_stats:
        click.echo(str(stats) if stats else f"{len(ids)} tokens in {len(ids) - 1} steps: plain decoding", err=True)
    if plain:
        click.echo(_comparison(strategy, ids, seconds, *plain, stats))


def chat(template_file: TextIO | None, max_new_tokens: int, seed: int, model_name: str | None, **shared: Any) -> None:
    """``lookahead chat``: the options are the command's."""
    model, tokenizer, engine, options = _prepare(model_name=model_name, **shared)
    if template_file is not None:
        tokenizer.chat_template = _read(template_file)
    elif tokenizer.chat_template is None:
        if model_name is not None:
            raise click.UsageError(
                f"the tokenizer of {model_name!r} has no chat template: give --chat-template FILE, or a --model that "
                "was made for chats"
            )
        click.echo("note: the packaged model only continues Python code, up to two blank lines; give it some", err=True)
        tokenizer.chat_template = PLAIN_TEMPLATE
        options["stop_strings"] = [PLAIN_STOP]
    try:
        if not render(tokenizer, [{"role": "user", "content": "Hello"}])["input_ids"].numel():
            raise ValueError("it renders nothing")
    except Exception as error:  # templates raise what they like
        which = template_file.name if template_file else f"of {model_name!r}"
        raise click.ClickException(f"the chat template {which} cannot render a message: {error}") from error

    torch.manual_seed(seed)
    with _decoding():
        converse(
            Conversation(model, tokenizer),
            lambda: AnswerStreamer(tokenizer, _step_of(engine)),
            lambda: engine.stats if engine else None,
            max_new_tokens=max_new_tokens,
            **options,
        )


def _step_of(engine: Lookahead | None) -> Callable[[], int]:
    """The number of the step under way."""
    return lambda: engine.last.steps if engine else 0


def audit(
    model_name: str | None,
    dtype: str,
    device: str,
    max_new_tokens: int,
    prompts_file: str | None,
    count: int | None,
    temperature: float,
    assistant: str | None,
    out: Path | None,
) -> None:
    """``lookahead audit``: the options are the command's."""
    prompts = read_prompts(Path(prompts_file), count) if prompts_file else source_prompts(count or 16)
    model, tokenizer = load(model_name, dtype, device)
    assistant_model = None if assistant is None else load(assistant, dtype, device)[0]
    inputs = [
        tokenizer(prompt["turns"][0], return_tensors="pt").input_ids.to(model.device) for prompt in prompts
    ]  # fmt: skip
    names = [str(prompt["question_id"]) for prompt in prompts]
    for name, ids in zip(names, inputs, strict=True):
        _check_length(ids.shape[1], model, f"the prompt {name}")
    max_new_tokens = _fitting(max_new_tokens, max(ids.shape[1] for ids in inputs), model)
    with _decoding(), click.progressbar(inputs, label="prompts", file=sys.stderr) as progress:
        tallies = audit_prompts(model, progress, max_new_tokens, temperature, assistant=assistant_model)
    where = environment(model)
    click.echo(", ".join(f"{name} {value}" for name, value in where.items()))
    click.echo(f"{len(prompts)} prompts, {max_new_tokens} new tokens each\n")
    click.echo(markdown(tallies, tokenizer, names))
    if out is not None:
        report = {"model": str(model_name or DEMO_MODEL.name), "environment": where, "temperature": temperature,
                  "max_new_tokens": max_new_tokens, "prompts": names,
                  "tallies": [tally.as_dict() for tally in tallies]}  # fmt: skip
        try:
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"cannot write {out}: {error}") from error
    ours = [tally for tally in tallies if tally.way == "lookahead"]
    unexplained = sum(len(tally.unexplained) for tally in ours)
    if unexplained:
        raise click.ClickException(f"{unexplained} of lookahead's texts part where rounding does not explain it")
    parted = sum(len(tally.divergences) for tally in ours)
    click.echo(
        f"\n{parted} of lookahead's texts part from plain decoding's" + (", each at a near tie" if parted else "")
    )


def tune(
    model_name: str | None,
    dtype: str,
    device: str,
    contexts: str,
    seconds: float,
    threads: int | None,
    cpu_kernels: bool,
    compile_passes: bool,
    picture: Path | None,
) -> None:
    """``lookahead tune``: the options are the command's."""
    if picture is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise click.UsageError("--picture needs matplotlib: pip install 'lookahead-decoding[bench]'") from error
    try:
        lengths = [int(length) for length in contexts.split(",")]
    except ValueError:
        lengths = [-1]
    if min(lengths) < 0:
        raise click.BadParameter(f"{contexts!r} is not a list of whole numbers", param_hint="--contexts")
    if threads:
        torch.set_num_threads(threads)
    model, _ = load(model_name, dtype, device)
    fitting = [length for length in lengths if length + max(RUNGS) <= context_length(model)]
    if not fitting:
        raise click.BadParameter(
            f"{contexts!r} leaves no room for a step within the model's {context_length(model)} positions",
            param_hint="--contexts",
        )
    with _decoding():
        config = LookaheadConfig(cpu_kernels=cpu_kernels, compile_passes=compile_passes)
        costs = step_costs(engine_of(wrap(model, config)).find_runner(model), anew=seconds / 3)
        with progress_bar("measuring passes") as progress:
            times = time_steps(model, fitting, 2 * seconds / 3, progress, config)
    where = environment(model)
    click.echo(
        ", ".join(f"{name} {where[name]}" for name in ("processor", "threads", "dtype", "torch", "transformers"))
    )
    click.echo(times.table())
    click.echo(f"kept for decoding: {costs.path}")
    if picture is not None:
        try:
            times.picture(picture, f"{where['processor']}, {where['threads']} threads, {where['dtype']}")
        except (OSError, ValueError) as error:  # a ValueError for a suffix that names no format of pictures
            raise click.ClickException(f"cannot draw {picture}: {error}") from error


def _prepare(
    model_name: str | None,
    dtype: str,
    device: str,
    strategy: str,
    budget: int | Literal["auto"],
    window_size: int | Literal["auto"],
    ngram_size: int | Literal["auto"],
    pool_path: str | None,
    cpu_kernels: bool,
    compile_passes: bool,
    do_sample: bool | None,
    repetition_penalty: float | None,
    **sampling: float | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Lookahead | None, dict]:
    """Model, tokenizer, what the wrapped model carries (None: it decodes plainly) and options of generate()."""
    if pool_path and strategy != "lookahead":
        raise click.UsageError(f"--pool is of no use to --strategy {strategy}")
    if sampling["temperature"] == 0:
        if do_sample:
            raise click.UsageError("--temperature 0 does not sample: leave one of it and --do-sample out")
        do_sample, sampling = False, {}
    if do_sample is None and any(value is not None for value in sampling.values()):
        do_sample = True
    sampling |= {"do_sample": do_sample, "repetition_penalty": repetition_penalty}
    options = {name: value for name, value in sampling.items() if value is not None}
    if strategy == "plain":
        return *load(model_name, dtype, device), None, options
    try:
        config = LookaheadConfig(
            strategy=strategy, budget=budget, window_size=window_size, ngram_size=ngram_size,
            cpu_kernels=cpu_kernels, compile_passes=compile_passes,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    model, tokenizer = load(model_name, dtype, device)
    pool = load_pool(pool_path, vocabulary_fingerprint(tokenizer)) if pool_path else None
    with _decoding():
        return model, tokenizer, engine_of(wrap(model, config, pool)), options


@contextmanager
def _decoding() -> Iterator[None]:
    """Turn what decoding raises into a ClickException, and an interrupt into exit status 130."""
    try:
        yield
    except UnsupportedModelError as error:
        raise click.ClickException(str(error)) from error
    except (
        FloatingPointError,
        MemoryError,
        RuntimeError,
        ValueError,
    ) as error:  # torch's are RuntimeError
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise click.ClickException(f"decoding failed: {reason}") from error
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        sys.exit(130)


def _fitting(max_new_tokens: int, length: int, model: PreTrainedModel) -> int:
    """``max_new_tokens``, or what the model's context leaves after a prompt of ``length`` tokens."""
    _check_length(length, model)
    context = context_length(model)
    if length + max_new_tokens <= context:
        return max_new_tokens
    click.echo(f"note: the model's context of {context} leaves room for {context - length} new tokens", err=True)
    return context - length


def _check_length(length: int, model: PreTrainedModel, what: str = "the prompt") -> None:
    context = context_length(model)
    if length == 0:
        raise click.UsageError(f"{what} is empty: give at least one token of text")
    if length >= context:
        raise click.UsageError(f"{what} has {length} tokens, the model's context is {context}: shorten the prompt")


def _read_prompt(prompt: str | None, prompt_file: TextIO | None) -> str:
    if prompt is not None and prompt_file is None:
        text = _read(sys.stdin) if prompt == "-" else prompt
    elif prompt is None and prompt_file is not None:
        text = _read(prompt_file)
    else:
        raise click.UsageError("give a PROMPT, - for standard input, or --prompt-file")
    with readable("PROMPT"):
        text.encode()
    if not text:
        raise click.UsageError("the prompt is empty: give at least one token of text")
    return text


def _read(file: TextIO) -> str:
    """All of a text file. Raises ClickException, which names it, if it cannot be read."""
    with readable(file.name):
        text = file.read()
        text.encode()  # standard input may let bytes through as surrogates
    return text


def _comparison(
    strategy: str, ids: list[int], seconds: float, plain_ids: list[int], plain_seconds: float, stats: Stats | None
) -> str:
    rates = len(ids) / seconds, len(plain_ids) / plain_seconds
    if ids == plain_ids:
        verdict = "the texts are identical"
    else:
        verdict = f"THE TEXTS DIFFER from token {first_difference(ids, plain_ids)} on"
    steps = f", {stats.tokens_per_step:.2f} tokens per step" if stats else ""
    return (
        f"\n{strategy}: {len(ids)} tokens in {seconds:.2f} s, {rates[0]:.0f} tokens/s{steps}\n"
        f"plain: {len(plain_ids)} tokens in {plain_seconds:.2f} s, {rates[1]:.0f} tokens/s\n"
        f"{rates[0] / rates[1]:.2f} times as fast; {verdict}"
    )
