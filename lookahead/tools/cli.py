"""The ``lookahead`` command and its options. The commands are functions in other modules of this folder."""

import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lookahead import __version__
from lookahead.config import AUTO, MAX_NGRAM_SIZE, MAX_ROWS, LookaheadConfig
from lookahead.tools.listening import listen

DTYPES = ("float32", "bfloat16", "float16")
FILE = click.Path(exists=True, dir_okay=False)
SEEDS = click.IntRange(-(2**63), 2**64 - 1)  # torch takes these
MAX_PROMPTS = 100_000  # the audit keeps all results in memory

Decorator = Callable[[Callable], Callable]


class Program(click.Group):
    """A command that survives standard streams that are closed, full, or a pipe without a reader."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # closed; the next file that is opened would get its number
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        # As standard error does: file names may hold bytes that are not UTF-8.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a TextIOWrapper
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # of a standard stream, because commands handle the errors of files
            message = f"{error.filename or 'standard input or output'}: {error.strerror or error}"
        with suppress(OSError):
            click.echo(f"Error: {message}", err=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.close()  # drops unwritten text; otherwise Python would try to write it again at exit
        sys.exit(1)


@click.group(cls=Program)
@click.version_option(__version__, prog_name="lookahead")
def main() -> None:
    """Lossless lookahead decoding: a language model's own text in fewer steps."""


class AutoOr(click.IntRange):
    """A whole number, or ``auto``."""

    name = "integer or auto"

    def convert(  # type: ignore[override]  # click's returns int
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        return AUTO if value == AUTO else super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A finite number. Ranges alone accept infinity and NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class FileToWrite(click.Path):
    """A file, new or not, in a folder that exists and can be written to; or a device or a pipe."""

    def __init__(self, is_extended: bool = False) -> None:
        """is_extended: whether a file is written to, not replaced, so that its folder may be read-only."""
        super().__init__(dir_okay=False, readable=is_extended, writable=True, path_type=Path)
        self._is_extended = is_extended

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]  # of path_type
        if not value:
            self.fail("the name of the file is empty.", param, ctx)
        if os.path.exists(path) and (self._is_extended or not os.path.isfile(path)):
            return path
        if not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK):
            self.fail(f"{path}: its folder does not exist or cannot be written to.", param, ctx)
        return path


def _options(*options: Decorator) -> Decorator:
    """Combine several options into one decorator, for the commands that share them."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


def _not_empty(_context: click.Context, _option: click.Parameter, given: str | None) -> str | None:
    if given == "":
        raise click.BadParameter("the key is empty, so every request would match: leave it out, or give a key")
    return given


def _check_files() -> None:
    """Raise UsageError if the file that an option writes is that of another option, which would be lost."""
    context = click.get_current_context()
    options = {param.opts[0]: (param.type, context.params.get(param.name or "")) for param in context.command.params}
    files = {
        name: os.path.realpath(value.name if isinstance(kind, click.File) else value)
        for name, (kind, value) in options.items()
        if isinstance(kind, click.Path | click.File) and value and not isinstance(value, tuple)
    }
    for name, path in files.items():
        if not isinstance(options[name][0], FileToWrite) or (os.path.exists(path) and not os.path.isfile(path)):
            continue  # a device loses nothing
        for other, of_other in files.items():
            are_there = os.path.exists(path) and os.path.exists(of_other)
            if name != other and (os.path.samefile(path, of_other) if are_there else path == of_other):
                raise click.UsageError(f"{name} {options[name][1]} is the file of {other}: name another file")


def _run(module: str, command: str, options: dict[str, Any]) -> None:
    """Import the module of a command, which takes seconds, and call the command."""
    if module != "pool_commands":  # a pool may be read, and then replaced
        _check_files()
    from ngram_pool.waiting import told_if_long  # takes half a second itself

    with told_if_long("loading torch and transformers"):
        imported = import_module(f"lookahead.tools.{module}")
    getattr(imported, command)(**options)


model_options = _options(
    click.option("--model", "model_name", metavar="NAME_OR_PATH",
                 help="Causal LM to load; the packaged model by default."),
    click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True,
                 help="auto: float32 on the CPU, the checkpoint's dtype elsewhere."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps, ..."),
)  # fmt: skip
pass_options = _options(
    click.option("--cpu-kernels/--no-cpu-kernels", default=True, show_default=True,
                 help="On a CPU, compute products and attention with this package's kernels."),
    click.option("--pack-weights/--no-pack-weights", default=None,
                 callback=lambda _context, _option, given: AUTO if given is None else given,
                 help="On a CPU, read weights from a copy of the same numbers in fewer bits. Default: if it is small."),
)  # fmt: skip
decoding_options = _options(
    model_options,
    click.option("--do-sample/--no-do-sample", default=None,
                 help="Sample; the next four options imply it. Default: the model's setting."),
    click.option("--temperature", type=Finite(min=0), help="0 decodes greedily."),
    click.option("--top-k", type=click.IntRange(min=0)),
    click.option("--top-p", type=Finite(min=0, max=1, min_open=True)),
    click.option("--min-p", type=Finite(min=0, max=1)),
    click.option("--repetition-penalty", type=Finite(min=0, min_open=True)),
    click.option("--seed", type=SEEDS, default=0, show_default=True, help="Seed of sampling."),
    click.option("--strategy", type=click.Choice(["lookahead", "jacobi", "plain"]), default="lookahead",
                 show_default=True, help="plain: one token per step."),
    click.option("--budget", type=AutoOr(min=0, max=MAX_ROWS - 1), default=LookaheadConfig.budget, show_default=True,
                 help="Most guesses verified in a step."),
    click.option("--window-size", type=AutoOr(min=0, max=MAX_ROWS - 1), default=LookaheadConfig.window_size,
                 show_default=True, help="Columns W of the Jacobi window; 0 turns it off."),
    click.option("--ngram-size", type=AutoOr(min=2, max=MAX_NGRAM_SIZE), default=LookaheadConfig.ngram_size,
                 show_default=True, help="Length N of the window's n-grams."),
    click.option("--assistant", metavar="NAME_OR_PATH",
                 help="Draft model of the same vocabulary: one more source of guesses."),
    click.option("--mtp", is_flag=True,
                 help="Guess with the checkpoint's own multi-token-prediction layers, too."),
    pass_options,
)  # fmt: skip
pool_option = click.option("--pool", "pool_path", type=FILE, metavar="FILE",
                           help="Start from a saved pool; the file is not changed.")  # fmt: skip


prompt_options = _options(
    click.argument("prompt", required=False),
    click.option("--prompt-file", type=click.File(encoding="utf-8"), help="Read the prompt from a file."),
    click.option(
        "--chat",
        "as_chat",
        is_flag=True,
        help="Send the prompt as a user's message, in the model's chat template. Default: continue it as text.",
    ),
    click.option("--system", metavar="TEXT", help="System message: instructions to the model. Implies --chat."),
)
length_option = click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
template_option = click.option("--chat-template", "template_file", type=click.File(encoding="utf-8"), metavar="FILE",
                               help="Chat template (jinja); the tokenizer's own by default.")  # fmt: skip


@main.command()
@prompt_options
@decoding_options
@click.option(
    "--pool",
    "pool_path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Start from a saved pool. With --prompts, the pool is saved there at the end; the file may be new.",
)
@length_option
@click.option(
    "--prompts",
    "prompts_file",
    type=FILE,
    metavar="FILE.jsonl",
    help='Continue many prompts in batches. Each line is {"prompt": "..."} or {"messages": [...]}.',
)
@click.option("--out", type=FileToWrite(is_extended=True), metavar="FILE.jsonl",
              help="File for the texts of --prompts. If it holds some already, the rest is added.")  # fmt: skip
@click.option("--stream/--no-stream", default=True, show_default=True, help="Write tokens as they are accepted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--stats", "show_stats", is_flag=True, help="Print steps, acceptance and times to stderr.")
@click.option("--compare", is_flag=True, help="Also decode plainly; print the speed-up and whether the texts agree.")
def generate(prompts_file: str | None, out: Path | None, **options: Any) -> None:
    """Continue PROMPT (or - for standard input) by lookahead decoding. With --prompts and --out, continue many prompts.

    If the command is interrupted or killed, give it again: it continues where it stopped.
    """
    if prompts_file is None and out is None:
        _run("commands", "generate", options)
        return
    if prompts_file is None or out is None:
        raise click.UsageError("--prompts and --out belong together: give both, or a PROMPT alone")
    for name, value in (("PROMPT", options.pop("prompt")), ("--prompt-file", options.pop("prompt_file")),
                        ("--json", options.pop("as_json")), ("--compare", options.pop("compare")),
                        ("--chat", options.pop("as_chat")), ("--system", options.pop("system"))):  # fmt: skip
        if value:
            raise click.UsageError(f"{name} has no effect with --prompts: leave one of them out")
    options.pop("stream")
    _run("batch", "generate", {"prompts_file": prompts_file, "out": out, **options})


@main.command()
@prompt_options
@decoding_options
@pool_option
@length_option
@click.option("--compare", is_flag=True, help="Also decode plainly, and show the times of both.")
@click.option("--out", type=FileToWrite(), default="trace.html", show_default=True, metavar="FILE.html",
              help="Page to write; an existing file is replaced at the end.")  # fmt: skip
def trace(**options: Any) -> None:
    """Write a page that replays a text step by step. The text continues PROMPT (or - for standard input).

    The page needs no network. It holds the prompt and the text.
    """
    _run("commands", "trace", options)


@main.command()
@decoding_options
@pool_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="For each answer.")
@template_option
def chat(**options: Any) -> None:
    """Talk with a model. Each line of standard input is a turn; the history stays in the model's cache."""
    _run("commands", "chat", options)


@main.command()
@decoding_options
@pool_option
@template_option
@click.option("--host", default="localhost", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port.")
@click.option("--cache-mb", type=click.IntRange(min=0), default=1024, show_default=True,
              help="Memory for KV caches of earlier conversations, which are not computed again; 0: none.")  # fmt: skip
@click.option("--parallel", type=click.IntRange(1, 256), default=8, show_default=True,
              help="Most requests decoded at once. They share passes.")  # fmt: skip
@click.option("--name", help="Name of the model in requests; the value of --model by default.")
@click.option("--api-key", metavar="KEY", envvar="LOOKAHEAD_API_KEY", show_envvar=True, callback=_not_empty,
              help="Key that each request must give.")  # fmt: skip
@click.option(
    "--cors",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose pages may send requests, such as http://localhost:3000; * allows all. May be repeated.",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Largest body of a request; by default, 16 bytes for each token of the context, 1 to 8 MiB.",
)
def serve(host: str, port: int, **options: Any) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's APIs. All requests share one pool.

    Sampling options are the defaults of requests. Needs the extra `serve`.
    """
    _run("server", "serve", {"host": host, "sockets": listen(host, port), **options})


@main.command()
@model_options
@length_option
@click.option("--prompts", "prompts_file", type=FILE, metavar="FILE.jsonl",
              help="Prompts in Spec-Bench's format; passages of Python's standard library by default.")  # fmt: skip
@click.option("--count", type=click.IntRange(1, MAX_PROMPTS),
              help="How many prompts. Default: all of FILE.jsonl, or 16 passages.")  # fmt: skip
@click.option("--temperature", type=Finite(min=0), default=0.0, show_default=True,
              help="Above 0, also audit sampling, seeded by the prompt's number.")  # fmt: skip
@click.option("--assistant", metavar="NAME_OR_PATH", help="Draft model: also audit transformers' assisted decoding.")
@click.option("--json", "out", type=FileToWrite(), metavar="FILE", help="Write all measurements.")
def audit(**options: Any) -> None:
    """List where lookahead's texts differ from plain decoding's. The list says whether rounding explains it.

    The exit status is 1 if a difference is not a near tie; see docs/numerics.md.
    """
    _run("commands", "audit", options)


@main.command()
@model_options
@click.option(
    "--contexts",
    default="256,2048,8192",
    show_default=True,
    metavar="N,N,...",
    help="Positions in the cache before a pass. Lengths beyond the model's context are left out.",
)
@click.option("--seconds", type=Finite(1, 3600), default=30.0, show_default=True, help="Time to measure.")
@click.option("--threads", type=click.IntRange(1, os.cpu_count()), help="CPU threads; torch's number by default.")
@pass_options
@click.option("--picture", type=FileToWrite(), metavar="PNG", help="Also draw the times.")
@click.option("--layer-skip", is_flag=True,
              help="Also find which layers to skip for drafts (LayerSkipSource). Takes as long again.")  # fmt: skip
@click.option("--bigrams", is_flag=True,
              help="Also learn the top next tokens after each token, for the pools of later wraps.")  # fmt: skip
def tune(**options: Any) -> None:
    """Measure what steps cost on this machine. Later decoding with this model uses these costs."""
    _run("commands", "tune", options)


@main.group()
def pool() -> None:
    """Build, merge and show pools of n-grams. They learn from code, past answers and other pools."""


pool_files = click.argument("files", nargs=-1, required=True, type=FILE)
pool_out = click.option("--out", required=True, type=FileToWrite(), metavar="FILE",
                        help="Pool file to write; an existing pool is replaced at the end.")  # fmt: skip
tokenizer_option = click.option(
    "--model", "model_name", metavar="NAME_OR_PATH", help="Model whose tokenizer to use; the packaged one by default."
)


@pool.command()
@pool_files
@tokenizer_option
@pool_out
@click.option("--pool", "pool_path", type=FILE, metavar="FILE",
              help="Start from a saved pool, and keep its size; it may be --out.")  # fmt: skip
@click.option("--memory-mb", type=Finite(min=0, min_open=True),
              help="Size of a new pool in MiB, 64 by default; a token of new text takes up to 700 bytes.")  # fmt: skip
def build(**options: Any) -> None:
    """Learn FILES (text, UTF-8: code, past answers) into a pool."""
    _run("pool_commands", "build", options)


@pool.command()
@pool_files
@pool_out
@click.option("--since", "since_path", type=FILE, metavar="FILE",
              help="The pool that all FILES started from; only what they learned since is added.")  # fmt: skip
def merge(**options: Any) -> None:
    """Merge the pools FILES into one, which has the size of the first.

    To merge snapshots of replicas that all started from one pool, and count that pool only once:

    \b
    lookahead pool merge base.pool replica-*.pool --since base.pool --out base.pool
    """
    _run("pool_commands", "merge", options)


@pool.command()
@click.argument("path", type=FILE)
@tokenizer_option
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Contexts to list.")
def show(**options: Any) -> None:
    """Show what a pool holds. That is size, fill, origins of evidence, and the contexts whose next token is surest."""
    _run("pool_commands", "show", options)
