"""The commands ``lookahead generate``, ``trace``, ``chat``, ``audit`` and ``tune``. Their options are in `cli`."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click
import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from lookahead import DEMO_MODEL
from lookahead.config import LookaheadConfig
from lookahead.engine.engine import GREEDY_TEMPERATURE, Lookahead
from lookahead.engine.recording import Recorder
from lookahead.guessing.bigrams import bigrams_file
from lookahead.models.adapter import context_length
from lookahead.passes import stored
from lookahead.passes.costs import RUNGS, step_costs
from lookahead.passes.environment import environment
from lookahead.passes.measuring import progress_bar
from lookahead.sources.layer_skip import find_skipped_layers
from lookahead.stats import Stats
from lookahead.streaming import inputs_of, render
from lookahead.tools.audit import audit as audit_prompts
from lookahead.tools.audit import first_difference, markdown
from lookahead.tools.bigrams import learn_bigrams
from lookahead.tools.chat import PLAIN_STOP, PLAIN_TEMPLATE, Conversation, converse
from lookahead.tools.contention import Span, watch, why_no_ratio
from lookahead.tools.files import explained, read_text, reading, write_whole, writing
from lookahead.tools.live import Meter, PlainDecoding, Share
from lookahead.tools.loading import bare_settings, check_tokens, decoding, load, load_wrapped
from lookahead.tools.prompts import given_prompt, read_prompts, source_prompts
from lookahead.tools.terminal import AnswerStreamer, StepStreamer, is_full_terminal
from lookahead.tools.trace import PlainTimes
from lookahead.tools.trace import trace as trace_steps
from lookahead.tools.tuning import time_steps
from lookahead.wrapping import engine_of, unwrap, wrap
from ngram_pool.waiting import seconds_saved, told_if_long

COMPARING = "decoding plainly for comparison"
SAMPLES = 4  # texts on which `tune` tries which layers to skip


class Decoded(NamedTuple):
    """A decoded text: its new ids, and the span that they took."""

    ids: list[int]
    span: Span

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.span.seconds


def generate(
    seed: int, strategy: str, stream: bool, as_json: bool, show_stats: bool, compare: bool, **shared: Any
) -> None:
    prompt, inputs, model, tokenizer, engine, options = _load_for_a_prompt(strategy=strategy, **shared)

    def decode(streamer: BaseStreamer | None = None) -> Decoded:
        torch.manual_seed(seed)
        span = watch(model.device)
        output = model.generate(**inputs, **options, streamer=streamer)  # type: ignore[operator]  # a method
        return Decoded(output[0, inputs.input_ids.shape[1] :].tolist(), span())

    streaming = stream and not as_json
    plain = None
    with decoding():
        if compare and engine:
            _prepare(engine, model)
        if streaming:
            compared = None if compare else _plain(model, tokenizer, engine)  # otherwise two ratios would be shown
            with closing(_streamers(StepStreamer, model, tokenizer, engine, compared)()) as streamer:
                ours = decode(streamer)
        else:
            with told_if_long("decoding"):
                ours = decode()
        if compare:
            _unwrap(model, options)
            with progress_bar(COMPARING) as progress:
                plain = decode(Share(progress, len(ours.ids)))

    stats = engine.last if engine else None
    text, count = tokenizer.decode(ours.ids, skip_special_tokens=True), len(ours.ids)
    if as_json:
        result: dict[str, Any] = {"prompt": prompt, "text": text, "tokens": count, "seconds": ours.span.seconds}
        result |= {"strategy": strategy, "stats": stats and stats.as_dict()}
        if plain:
            why = why_no_ratio(ours.span, plain.span)
            verdict = {"speedup": None if why else ours.rate / plain.rate, "why_no_speedup": why or None}
            result["plain"] = {"seconds": plain.span.seconds, **verdict, "identical": ours.ids == plain.ids}
        click.echo(json.dumps(result))
    else:
        if not streaming:
            click.echo(text)
        if show_stats:
            click.echo(str(stats) if stats else f"{count} tokens in {count - 1} steps: plain decoding", err=True)
        if plain:
            click.echo(_comparison(strategy, ours, plain, stats))
    if (saved := seconds_saved()) >= 1:
        click.echo(f"the next run starts {saved:.0f} s sooner: it reuses what this one has measured", err=True)


def trace(seed: int, strategy: str, compare: bool, out: Path, **shared: Any) -> None:
    if strategy == "plain":
        raise click.UsageError("--strategy plain has no steps to trace: leave it out, and give --compare")
    _, inputs, model, tokenizer, engine, options = _load_for_a_prompt(strategy=strategy, **shared)
    assert engine is not None  # the strategy is not plain
    with decoding():
        if compare:
            _prepare(engine, model)
        compared = None if compare else _plain(model, tokenizer, engine)
        with closing(_streamers(StepStreamer, model, tokenizer, engine, compared)()) as streamer:
            torch.manual_seed(seed)
            span = watch(model.device)
            traced = trace_steps(model, tokenizer, inputs, **options, streamer=streamer)
            ours = span()
        if compare:
            _unwrap(model, options)
            torch.manual_seed(seed)
            with progress_bar(COMPARING) as progress:
                plain, span = Recorder(Share(progress, len(traced.record.tokens))), watch(model.device)
                model.generate(**inputs, **options, streamer=plain)  # type: ignore[operator]  # a method
                why = why_no_ratio(ours, span())
            traced = replace(traced, plain=PlainTimes(plain.times, plain.tokens == traced.record.tokens, why))
    with writing(out):
        traced.save(out)
    count, stats = len(traced.record.tokens), traced.record.stats
    assert stats is not None
    click.echo(f"{count} tokens in {1 + stats.steps} passes; open {out} in a browser", err=True)


def chat(template_file: TextIO | None, seed: int, model_name: str | None, **shared: Any) -> None:
    model, tokenizer, engine, options = load_wrapped(model_name, **shared)
    if template_file is not None:
        tokenizer.chat_template = read_text(template_file)
    elif tokenizer.chat_template is None:
        if model_name is not None:
            raise click.UsageError(
                f"the tokenizer of {model_name!r} has no chat template: give --chat-template FILE, or a chat model as "
                "--model"
            )
        click.echo("note: the packaged model only continues Python code, up to two blank lines; give it some", err=True)
        tokenizer.chat_template = PLAIN_TEMPLATE
        options["stop_strings"] = [PLAIN_STOP]
    which = template_file.name if template_file else f"of {model_name!r}"
    with explained(f"the chat template {which} cannot render a message", Exception):  # templates raise any error
        if not render(tokenizer, [{"role": "user", "content": "Hello"}])["input_ids"].numel():
            raise ValueError("its result is empty")

    with decoding():
        plain = _plain(model, tokenizer, engine)
        make_streamer = _streamers(AnswerStreamer, model, tokenizer, engine, plain)
        torch.manual_seed(seed)
        converse(Conversation(model, tokenizer), make_streamer, engine.stats if engine else None, plain, **options)


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
    prompts = read_prompts(Path(prompts_file), count) if prompts_file else source_prompts(count or 16)
    model, tokenizer = load(model_name, dtype, device)
    assistant_model = None if assistant is None else load(assistant, dtype, device)[0]
    inputs = [tokenizer(prompt["turns"][0], return_tensors="pt").input_ids.to(model.device) for prompt in prompts]
    names = [str(prompt["question_id"]) for prompt in prompts]
    for name, ids in zip(names, inputs, strict=True):
        _check_length(ids.shape[1], model, f"the prompt {name}")
        with decoding():
            check_tokens(ids[0].tolist(), model, f"the prompt {name}")
    max_new_tokens = _fitting(max_new_tokens, max(ids.shape[1] for ids in inputs), model)
    with decoding(), click.progressbar(inputs, label="prompts", file=sys.stderr) as progress:
        tallies = audit_prompts(model, progress, max_new_tokens, temperature, assistant=assistant_model)
    where = environment(model)
    click.echo(", ".join(f"{name} {value}" for name, value in where.items()))
    click.echo(f"{len(prompts)} prompts, {max_new_tokens} new tokens each\n")
    click.echo(markdown(tallies, tokenizer, names))
    if out is not None:
        report = {"model": str(model_name or DEMO_MODEL.name), "environment": where, "temperature": temperature,
                  "max_new_tokens": max_new_tokens, "prompts": names,
                  "tallies": [tally.as_dict() for tally in tallies]}  # fmt: skip
        with writing(out):
            write_whole(out, json.dumps(report, indent=1) + "\n")
    ours = [tally for tally in tallies if tally.way == "lookahead"]
    if unexplained := sum(len(tally.unexplained) for tally in ours):
        raise click.ClickException(f"{unexplained} of lookahead's texts part where rounding does not explain it")
    parted = sum(len(tally.divergences) for tally in ours)
    click.echo(
        f"\n{parted} of lookahead's texts part from plain decoding's"
        + (", each at a near tie" if parted else "")
        + f"\n{sum(tally.by_guesses for tally in ours)} of lookahead's texts were changed by guesses (passes: "
        f"{ours[0].passes})"
    )


def tune(
    model_name: str | None,
    dtype: str,
    device: str,
    contexts: str,
    seconds: float,
    threads: int | None,
    picture: Path | None,
    layer_skip: bool,
    bigrams: bool,
    **settings: Any,
) -> None:
    if picture is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise click.UsageError("--picture needs matplotlib: pip install matplotlib") from error
    try:
        lengths = [int(length) for length in contexts.split(",")]
    except ValueError:
        lengths = [-1]
    if min(lengths) < 0:
        raise click.BadParameter(f"{contexts!r} is not a list of whole numbers", param_hint="--contexts")
    if threads:
        torch.set_num_threads(threads)
    model, tokenizer = load(model_name, dtype, device)
    fitting = [length for length in lengths if length + max(RUNGS) <= context_length(model)]
    if not fitting:
        raise click.BadParameter(
            f"none of {contexts!r} leaves room for a step within the model's {context_length(model)} positions",
            param_hint="--contexts",
        )
    with decoding():
        config = LookaheadConfig(**settings)
        runner = engine_of(wrap(model, config)).find_runner(model)
        span = watch(model.device)
        costs = step_costs(runner, anew=seconds / 3)
        with progress_bar("measuring passes") as progress:
            times = time_steps(model, fitting, 2 * seconds / 3, progress, config)
        if layer_skip:
            prompts = [tokenizer(prompt["turns"][0]).input_ids for prompt in source_prompts(SAMPLES)]
            with progress_bar("skipping layers") as progress, bare_settings(model):
                found = find_skipped_layers(runner, prompts, seconds, progress)
        why = why_no_ratio(span())
        if bigrams:
            with progress_bar("learning bigrams") as progress:
                learned = learn_bigrams(runner, tokenizer("\n").input_ids or [0], GREEDY_TEMPERATURE, progress)
    where = environment(model)
    click.echo(
        ", ".join(f"{name} {where[name]}" for name in ("processor", "threads", "dtype", "torch", "transformers"))
    )
    click.echo(times.table())
    if why:
        click.echo(f"{why}; decoding relies on these times, so measure them again when it is quiet", err=True)
    if costs.path is not None:
        with explained("cannot keep the times", OSError):
            stored.write(costs.path, costs.as_dict())
        click.echo(f"kept for decoding: {costs.path}")
    if layer_skip:
        click.echo(found)
        if not why:
            verdict = "" if found.gain > 1 else " (it does not pay)"
            click.echo(f"expected: {found.gain:.2f} times the tokens per second of steps without guesses{verdict}")
        with explained("cannot keep the layers", OSError):
            click.echo(f"kept for LayerSkipSource: {found.save(model)}")
    if bigrams:
        kept = bigrams_file(model)
        with explained("cannot keep the bigrams", OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            learned.save(kept)
        click.echo(f"{len(learned)} contexts kept for new pools: {kept}")
    if picture is not None:
        with explained(f"cannot draw {picture}", OSError, ValueError):  # ValueError: no such format of pictures
            title = f"{where['processor']}, {where['threads']} threads, {where['dtype']}"
            times.picture(picture, title, has_ratios=not why)


def _load_for_a_prompt(
    prompt: str | None, prompt_file: TextIO | None, as_chat: bool, system: str | None, **shared: Any
) -> tuple[str, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, Lookahead | None, dict]:
    """Return the prompt and its tokens, then what `load_wrapped` returns."""
    text = given_prompt(prompt, prompt_file)
    with reading("--system"):
        (system or "").encode()
    model, tokenizer, engine, options = load_wrapped(**shared)
    if as_chat or system is not None:
        if tokenizer.chat_template is None:
            name = repr(shared["model_name"]) if shared["model_name"] else "the packaged model"
            raise click.UsageError(
                f"the tokenizer of {name} has no chat template: leave out --chat and --system to continue the prompt, "
                "or give a chat model as --model"
            )
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        with explained("the chat template cannot render the prompt", Exception):  # templates raise any error
            inputs = BatchEncoding(inputs_of(tokenizer, messages, model.device))
    else:
        if tokenizer.chat_template is not None:
            click.echo("note: the prompt is continued as raw text; --chat sends it as a user's message", err=True)
        inputs = BatchEncoding(inputs_of(tokenizer, text, model.device))
    with decoding():  # a device may have no values
        check_tokens(inputs.input_ids[0].tolist(), model, "the prompt")
    options["max_new_tokens"] = _fitting(options["max_new_tokens"], inputs.input_ids.shape[1], model)
    return text, inputs, model, tokenizer, engine, options


def _unwrap(model: PreTrainedModel, options: dict) -> None:
    """Let the model decode plainly from now on. options: arguments of generate()."""
    unwrap(model)
    options.pop("assistant_model", None)


def _prepare(engine: Lookahead, model: PreTrainedModel) -> None:
    """Prepare the engine before a comparison, whose times should not include this."""
    start = time.perf_counter()
    engine.prepare(model)
    click.echo(f"prepared in {time.perf_counter() - start:.1f} s, which the times below leave out", err=True)


def _streamers(
    kind: type[StepStreamer],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    engine: Lookahead | None,
    plain: PlainDecoding | None,
) -> Callable[[], StepStreamer]:
    """Return a function that makes streamers of a kind, each for one text.

    engine: None if the model decodes plainly. plain: what a live line compares with. If a line is shown, it is
    measured now.
    """
    step = lambda: engine.last.steps if engine else 0  # noqa: E731
    if not is_full_terminal():
        return lambda: kind(tokenizer, step)
    rate = plain.rate() if plain else None
    return lambda: kind(tokenizer, step, Meter(lambda: engine.last if engine else None, rate, model.device))


def _plain(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, engine: Lookahead | None
) -> PlainDecoding | None:
    """What lookahead is compared with. engine: None if the model decodes plainly itself."""
    return PlainDecoding(model, (tokenizer("\n").input_ids or [0])[0]) if engine else None


def _fitting(max_new_tokens: int, length: int, model: PreTrainedModel) -> int:
    """Return ``max_new_tokens``, limited to what the model's context has room for after a prompt of this length."""
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


def _comparison(strategy: str, ours: Decoded, plain: Decoded, stats: Stats | None) -> str:
    index = first_difference(ours.ids, plain.ids)
    verdict = "the texts are identical" if index is None else f"THE TEXTS DIFFER from token {index} on"
    steps = f", {stats.tokens_per_step:.2f} tokens per step" if stats else ""
    ratio = why_no_ratio(ours.span, plain.span) or f"{ours.rate / plain.rate:.2f} times as fast"
    return (
        f"\n{strategy}: {len(ours.ids)} tokens in {ours.span.seconds:.2f} s, {ours.rate:.0f} tokens/s{steps}\n"
        f"plain: {len(plain.ids)} tokens in {plain.span.seconds:.2f} s, {plain.rate:.0f} tokens/s\n"
        f"{ratio}; {verdict}"
    )
