"""The ``lookahead`` command."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TextIO

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lookahead import DEMO_MODEL, __version__
from lookahead.architecture import UnsupportedModelError, context_length
from lookahead.audit import audit, first_difference, markdown
from lookahead.chat import PLAIN_STOP, PLAIN_TEMPLATE, Conversation, converse
from lookahead.config import AUTO, MOST_NGRAM_SIZE, MOST_ROWS, LookaheadConfig
from lookahead.costs import RUNGS, progress_bar, step_costs
from lookahead.decoding import Lookahead
from lookahead.inspection import inspect_model
from lookahead.measuring import environment, read_prompts, source_prompts
from lookahead.streaming import PieceStreamer, render
from lookahead.tuning import time_steps
from lookahead.vocabulary import vocabulary_fingerprint
from lookahead.wrapping import unwrap, wrap
from ngram_pool import NgramPool, PoolFileError, Source, storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
READ_AT_ONCE = 2**20  # characters of a file that are tokenized together
STEP_COLOURS = ("cyan", "yellow")  # of the tokens of even and odd steps


@click.group()
@click.version_option(__version__, prog_name="lookahead")
def main() -> None:
    """Lossless lookahead decoding: a language model's own text in fewer steps."""


class StepStreamer(PieceStreamer):
    """Prints text as it comes; on a terminal, tokens accepted in one step share a colour."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, step: Callable[[], int]):
        """step: the number of the step under way."""
        super().__init__(tokenizer, self._print)
        self._step = step
        self._colour = sys.stdout.isatty()

    def end(self) -> None:
        super().end()
        click.echo()

    def _print(self, text: str) -> None:
        if self._colour:
            text = click.style(text, fg=STEP_COLOURS[self._step() % len(STEP_COLOURS)])
        click.echo(text, nl=False, color=self._colour)
        sys.stdout.flush()


class AutoOr(click.IntRange):
    """A whole number of an option, or ``auto``."""

    name = "integer or auto"

    def convert(self, value, param, ctx) -> int | str:
        return AUTO if value == AUTO else super().convert(value, param, ctx)


def _options(*options):
    """One decorator for several options, for the commands that share them."""

    def decorate(command):
        return reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


model_options = _options(
    click.option("--model", "model_name", metavar="NAME_OR_PATH",
                 help="Causal LM to load; the packaged one by default."),
    click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True,
                 help="auto: float32 on the CPU, the checkpoint's own elsewhere."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps, ..."),
)  # fmt: skip
pass_options = _options(
    click.option("--cpu-kernels/--no-cpu-kernels", default=True, show_default=True,
                 help="On a CPU, compute products and attention by kernels of our own."),
    click.option("--compile-passes", is_flag=True, help="Compile the passes, which takes some seconds, then pays."),
)  # fmt: skip
decoding_options = _options(
    model_options,
    click.option("--do-sample/--no-do-sample", default=None,
                 help="Sample; the four options below imply it. Default: the model's own."),
    click.option("--temperature", type=click.FloatRange(min=0), help="0 does not sample."),
    click.option("--top-k", type=click.IntRange(min=0)),
    click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True)),
    click.option("--min-p", type=click.FloatRange(min=0, max=1)),
    click.option("--repetition-penalty", type=click.FloatRange(min=0, min_open=True)),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling."),
    click.option("--strategy", type=click.Choice(["lookahead", "jacobi", "plain"]), default="lookahead",
                 show_default=True, help="plain: one token a step."),
    click.option("--budget", type=AutoOr(min=0, max=MOST_ROWS - 1), default=LookaheadConfig.budget, show_default=True,
                 help="Most guesses verified in a step."),
    click.option("--window-size", type=AutoOr(min=0, max=MOST_ROWS - 1), default=LookaheadConfig.window_size,
                 show_default=True, help="Columns W of the Jacobi window; 0 turns it off."),
    click.option("--ngram-size", type=AutoOr(min=2, max=MOST_NGRAM_SIZE), default=LookaheadConfig.ngram_size,
                 show_default=True, help="Length N of the window's n-grams."),
    click.option("--pool", "pool_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                 help="Start from a saved pool; the file stays as it is."),
    pass_options,
)  # fmt: skip


def _prepare(
    model_name, dtype, device, strategy, budget, window_size, ngram_size, pool_path, cpu_kernels, compile_passes,
    do_sample, repetition_penalty, **sampling,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Lookahead | None, dict]:  # fmt: skip
    """Model, tokenizer, what the wrapped model carries (None: it decodes plainly) and options of generate()."""
    if pool_path and strategy != "lookahead":
        raise click.UsageError(f"--pool is of no use to --strategy {strategy}")
    model, tokenizer = load(model_name, dtype, device)
    if sampling["temperature"] == 0:
        if do_sample:
            raise click.UsageError("--temperature 0 does not sample: leave one of it and --do-sample out")
        do_sample, sampling = False, {}
    if do_sample is None and any(value is not None for value in sampling.values()):
        do_sample = True
    sampling |= {"do_sample": do_sample, "repetition_penalty": repetition_penalty}
    options = {name: value for name, value in sampling.items() if value is not None}
    if strategy == "plain":
        return model, tokenizer, None, options
    pool = _load_pool(pool_path, vocabulary_fingerprint(tokenizer)) if pool_path else None
    try:
        config = LookaheadConfig(
            strategy=strategy, budget=budget, window_size=window_size, ngram_size=ngram_size, cpu_kernels=cpu_kernels,
            compile_passes=compile_passes,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with _decoding():
        return model, tokenizer, wrap(model, config, pool).lookahead, options


@contextmanager
def _decoding() -> Iterator[None]:
    """Turn what decoding raises into a ClickException, and an interrupt into exit status 130."""
    try:
        yield
    except UnsupportedModelError as error:
        raise click.ClickException(str(error)) from error
    except (FloatingPointError, ValueError, torch.OutOfMemoryError) as error:
        raise click.ClickException(f"decoding failed: {error}") from error
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        sys.exit(130)


@main.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File(encoding="utf-8"), help="Read the prompt from a file.")
@decoding_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--stream/--no-stream", default=True, show_default=True, help="Write tokens as they are accepted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--stats", "show_stats", is_flag=True, help="Print steps, acceptance and times to stderr.")
@click.option("--compare", is_flag=True, help="Decode plainly too; print the speed-up and whether the texts agree.")
def generate(
    prompt, prompt_file, max_new_tokens, seed, strategy, stream, as_json, show_stats, compare, **shared
) -> None:
    """Continue PROMPT (or - for standard input) by lookahead decoding."""
    prompt = _read_prompt(prompt, prompt_file)
    model, tokenizer, engine, options = _prepare(strategy=strategy, **shared)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs.input_ids.shape[1]
    options["max_new_tokens"] = _fitting(max_new_tokens, length, model)

    def decode(streamer=None) -> tuple[list[int], float]:
        """New ids and the seconds they took."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = model.generate(**inputs, **options, streamer=streamer)
        ids = output[0, length:].tolist()
        return ids, time.perf_counter() - start

    streaming = stream and not as_json
    plain = None
    with _decoding():
        if compare and engine and engine.config.goes_by_costs:
            start = time.perf_counter()
            step_costs(model, inspect_model(model, engine.config.compile_passes))
            click.echo(f"made ready in {time.perf_counter() - start:.1f} s, which is no part of the times", err=True)
        ids, seconds = decode(_streamer(tokenizer, engine) if streaming else None)
        if compare:
            unwrap(model)
            click.echo("decoding plainly for comparison ...", err=True)
            plain = decode()

    stats = engine.last if engine else None
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if as_json:
        result = {"prompt": prompt, "text": text, "tokens": len(ids), "seconds": seconds, "strategy": strategy}
        result["stats"] = stats.as_dict() if stats else None
        if plain:
            speedup = len(ids) / seconds / (len(plain[0]) / plain[1])
            result["plain"] = {"seconds": plain[1], "speedup": speedup, "identical": ids == plain[0]}
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    if not streaming:
        click.echo(text)
    if show_stats:
        click.echo(str(stats) if stats else f"{len(ids)} tokens in {len(ids) - 1} steps: plain decoding", err=True)
    if plain:
        click.echo(_comparison(strategy, ids, seconds, *plain, stats))


@main.command()
@decoding_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of an answer.")
@click.option("--chat-template", "template_file", type=click.File(encoding="utf-8"), metavar="FILE",
              help="Template of the conversation (jinja); the tokenizer's own by default.")  # fmt: skip
def chat(template_file, max_new_tokens, seed, model_name, **shared) -> None:
    """Talk with a model, whose cache keeps the history from turn to turn. Each line of standard input is a turn."""
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

    def statistics() -> str:
        return str(engine.stats) if engine else "plain decoding: a token a step"

    torch.manual_seed(seed)
    with _decoding():
        converse(
            Conversation(model, tokenizer), lambda: _streamer(tokenizer, engine), statistics,
            max_new_tokens=max_new_tokens, **options,
        )  # fmt: skip


def _streamer(tokenizer: PreTrainedTokenizerBase, engine: Lookahead | None) -> StepStreamer:
    return StepStreamer(tokenizer, lambda: engine.last.steps if engine else 0)


@main.command("audit")
@model_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--prompts", "prompts_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE.jsonl",
              help="Prompts in Spec-Bench's format; passages of Python's standard library by default.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1),
              help="How many prompts. Default: all of FILE.jsonl, or 16 passages.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="Above 0, audit sampling besides, seeded by the prompt's number.")  # fmt: skip
@click.option("--assistant", metavar="NAME_OR_PATH", help="Draft model; audits transformers' assisted decoding too.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write everything that was measured.")  # fmt: skip
def audit_command(
    model_name, dtype, device, max_new_tokens, prompts_file, count, temperature, assistant, out
) -> None:  # fmt: skip
    """List where lookahead's texts part from plain decoding's, and whether rounding explains it.

    Exit status 1 if some place is no near tie. docs/numerics.md says what that means.
    """
    if out is not None:
        _check_folder("--json", out)
    model, tokenizer = load(model_name, dtype, device)
    assistant_model = load(assistant, dtype, device)[0] if assistant else None
    prompts = read_prompts(prompts_file, count) if prompts_file else source_prompts(count or 16)
    inputs = [
        tokenizer(prompt["turns"][0], return_tensors="pt").input_ids.to(model.device) for prompt in prompts
    ]  # fmt: skip
    names = [str(prompt["question_id"]) for prompt in prompts]
    for name, ids in zip(names, inputs, strict=True):
        _check_length(ids.shape[1], model, f"the prompt {name}")
    max_new_tokens = _fitting(max_new_tokens, max(ids.shape[1] for ids in inputs), model)
    with _decoding(), click.progressbar(inputs, label="prompts", file=sys.stderr) as progress:
        tallies = audit(model, progress, max_new_tokens, temperature, assistant=assistant_model)
    where = environment(model)
    click.echo(", ".join(f"{name} {value}" for name, value in where.items()))
    click.echo(f"{len(prompts)} prompts, {max_new_tokens} new tokens each\n")
    click.echo(markdown(tallies, tokenizer, names))
    if out is not None:
        report = {"model": str(model_name or DEMO_MODEL.name), "environment": where, "temperature": temperature,
                  "max_new_tokens": max_new_tokens, "prompts": names,
                  "tallies": [tally.as_dict() for tally in tallies]}  # fmt: skip
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ours = [tally for tally in tallies if tally.way == "lookahead"]
    unexplained = sum(len(tally.unexplained) for tally in ours)
    if unexplained:
        raise click.ClickException(f"{unexplained} of lookahead's texts part where rounding does not explain it")
    parted = sum(len(tally.divergences) for tally in ours)
    click.echo(
        f"\n{parted} of lookahead's texts part from plain decoding's" + (", each at a near tie" if parted else "")
    )


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


def _read_prompt(prompt: str | None, prompt_file) -> str:
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give a PROMPT, - for standard input, or --prompt-file")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    elif prompt == "-":
        prompt = _read(sys.stdin)
    if not prompt:
        raise click.UsageError("the prompt is empty: give at least one token of text")
    return prompt


def _read(file: TextIO) -> str:
    """All of a text file; a ClickException names it where it is not UTF-8."""
    try:
        text = file.read()
        text.encode()  # standard input may let bytes through as surrogates
    except UnicodeError as error:
        raise click.ClickException(f"{file.name} is not UTF-8 text: {error}") from error
    return text


def load(
    name: str | None, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in eval mode and tokenizer; None is the packaged model. Raises ClickException if they cannot be loaded."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if name is None:  # a moment's work; what takes longer shows its progress
        transformers.utils.logging.disable_progress_bar()
    with _loading(name, f"model on {device}"):
        chosen = DTYPES.get(dtype) or (torch.float32 if torch.device(device).type == "cpu" else "auto")
        tokenizer = AutoTokenizer.from_pretrained(name or DEMO_MODEL)
        model = AutoModelForCausalLM.from_pretrained(name or DEMO_MODEL, dtype=chosen).to(device).eval()
    return model, tokenizer


def _load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    with _loading(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name or DEMO_MODEL)


@contextmanager
def _loading(name: str | None, what: str) -> Iterator[None]:
    """Turn any error into a ClickException that names the model."""
    try:
        yield
    except Exception as error:  # what is raised depends on the hub's client, the format and the device
        reason = str(error).strip().split("\n")[0]
        raise click.ClickException(
            f"cannot load the {what} of {str(name or DEMO_MODEL)!r}: {reason}. Give --model a folder in Hugging Face "
            "format or the name of a causal LM on the hub, and --device a device of this machine."
        ) from error


def _load_pool(path: str, vocabulary: str | None = None) -> NgramPool:
    try:
        return NgramPool.load(path, vocabulary)
    except (PoolFileError, OSError) as error:
        raise click.ClickException(str(error)) from error


_whose_tokenizer = click.option(
    "--model", "model_name", metavar="NAME_OR_PATH", help="Whose tokenizer; the packaged model's by default."
)


@main.command()
@model_options
@click.option(
    "--contexts",
    default="256,2048,8192",
    show_default=True,
    metavar="N,N,...",
    help="Positions committed before the pass; those that the model has no room for are left out.",
)
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, show_default=True, help="To measure for.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's default if not given.")
@pass_options
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", help="Draw the times, too.")
def tune(model_name, dtype, device, contexts, seconds, threads, cpu_kernels, compile_passes, picture) -> None:
    """Measure what a step costs on this machine, keep it for decoding with this model, and show it."""
    if picture is not None:
        _check_folder("--picture", picture)
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
    with _decoding():
        wrap(model, LookaheadConfig(cpu_kernels=cpu_kernels))
    fitting = [length for length in lengths if length + max(RUNGS) <= context_length(model)]
    if not fitting:
        raise click.BadParameter(
            f"{contexts!r} leaves no room for a step within the model's {context_length(model)} positions",
            param_hint="--contexts",
        )
    costs = step_costs(model, inspect_model(model, compile_passes), anew=seconds / 3)
    with progress_bar("measuring passes") as progress:
        times = time_steps(model, fitting, 2 * seconds / 3, progress, compile_passes)
    where = environment(model)
    click.echo(
        ", ".join(f"{name} {where[name]}" for name in ("processor", "threads", "dtype", "torch", "transformers"))
    )
    click.echo(times.table())
    click.echo(f"kept for decoding: {costs.path}")
    if picture is not None:
        times.picture(picture, f"{where['processor']}, {where['threads']} threads, {where['dtype']}")


@main.group()
def pool() -> None:
    """Pools of n-grams on disk: start from a team's own code or past answers, share what replicas have learned."""


_out = click.option("--out", required=True, type=click.Path(dir_okay=False), metavar="FILE",
                    help="Pool file to write; a pool that stands there is replaced at the end.")  # fmt: skip


@pool.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_whose_tokenizer
@_out
@click.option("--pool", "pool_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="Start from a saved pool, and keep its size; it may be --out.")  # fmt: skip
@click.option("--memory-mb", type=click.FloatRange(min=0, min_open=True),
              help="Size of a new pool in MiB, 64 by default; a token of new text takes up to 700 bytes.")  # fmt: skip
def build(files, model_name, out, pool_path, memory_mb) -> None:
    """Learn FILES (text, UTF-8: code, past answers) into a pool."""
    if pool_path and memory_mb:
        raise click.UsageError("--memory-mb is for a new pool: one given by --pool keeps its size")
    _check_out(out)
    tokenizer = _load_tokenizer(model_name)
    if pool_path:
        learned = _load_pool(pool_path, vocabulary_fingerprint(tokenizer))
    else:
        try:
            learned = NgramPool(memory_mb or 64, vocabulary_fingerprint(tokenizer))
        except (ValueError, MemoryError) as error:
            raise click.UsageError(f"--memory-mb: {error}") from error
    tokens = 0
    with click.progressbar(length=sum(map(os.path.getsize, files)), label="learning", file=sys.stderr) as progress:
        for path in files:
            with open(path, encoding="utf-8") as file:
                try:
                    while lines := file.readlines(READ_AT_ONCE):
                        ids = tokenizer("".join(lines), add_special_tokens=False, verbose=False).input_ids
                        learned.learn(ids, Source.FILE)
                        tokens += len(ids)
                        progress.update(sum(len(line.encode()) for line in lines))
                except UnicodeDecodeError as error:
                    raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error
    _save(learned, out)
    click.echo(f"{out}: {tokens:,} tokens of {len(files)} files; {_size(learned)}")
    if len(learned) > 0.99 * learned.capacity:
        click.echo(
            "note: the pool overflowed, what was seen least made room; a larger --memory-mb keeps more", err=True
        )


@pool.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_out
@click.option("--since", "since_path", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="The pool that all FILES were loaded from: add only what they have learned since.")  # fmt: skip
def merge_command(files, out, since_path) -> None:
    """Merge the pools FILES into one of the size of the first.

    Snapshots of replicas that all started from one pool, without counting that again for each of them:

    \b
    lookahead pool merge base.pool replica-*.pool --since base.pool --out base.pool
    """
    if len(files) < 2:
        raise click.UsageError("give at least two FILES to merge")
    _check_out(out)
    merged = _load_pool(files[0])
    since = _load_pool(since_path, merged.vocabulary) if since_path else None
    with click.progressbar(files[1:], label="merging", file=sys.stderr) as progress:
        for path in progress:
            other = _load_pool(path, merged.vocabulary)
            try:
                merged.merge(other, since)
            except ValueError as error:
                raise click.ClickException(f"{path}: {error}") from error
    _save(merged, out)
    click.echo(f"{out}: {len(files)} pools; {_size(merged)}")


def _check_out(out: str) -> None:
    if os.path.exists(out) and os.path.getsize(out) and not storage.is_pool_file(out):
        raise click.UsageError(f"--out {out} is not a pool file, and would be lost")
    _check_folder("--out", out)


def _check_folder(option: str, path: str | Path) -> None:
    if not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK):
        raise click.UsageError(f"{option} {path}: its folder is missing or cannot be written to")


def _save(pool: NgramPool, out: str) -> None:
    try:
        pool.save(out)
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error}") from error


@pool.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@_whose_tokenizer
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Contexts to list.")
def show(path, model_name, top) -> None:
    """Say what is in a pool: its size, fill and sources, and the contexts whose next token is surest."""
    held = _load_pool(path)
    tokenizer = _load_tokenizer(model_name)
    vocabulary = vocabulary_fingerprint(tokenizer)
    click.echo(f"{path}: {_size(held)}")
    click.echo(f"{held.observations:,} observations; vocabulary {held.vocabulary or 'unknown'}")
    sources = ", ".join(f"{name} {count:,}" for name, count in held.by_source().items() if count)
    click.echo(f"next tokens by source: {sources or 'none'}")
    if held.vocabulary not in (None, vocabulary):
        click.echo(
            f"shown as ids: the vocabulary of {model_name or 'the packaged model'} is {vocabulary}; give --model"
        )
        tokenizer = None
    for context, token, probability, seen in held.most_confident(top):
        if tokenizer:
            context, token = tokenizer.decode(context), tokenizer.decode([token])
        click.echo(f"  {context!r} -> {token!r}  {probability:.3f} of {seen}")


def _size(held: NgramPool) -> str:
    return f"{len(held):,} contexts in {held.nbytes / 2**20:.1f} MiB, {len(held) / held.capacity:.0%} full"


def _comparison(strategy, ids, seconds, plain_ids, plain_seconds, stats) -> str:
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
