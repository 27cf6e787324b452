"""Load models, tokenizers and pools for the command line and the scripts. Errors name what cannot be loaded."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_accelerate_available, is_gguf_available

from lookahead import DEMO_MODEL
from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Lookahead, default_sources
from lookahead.models.adapter import UnsupportedModelError, vocabulary_of
from lookahead.sources.mtp import MtpSource
from lookahead.vocabulary import vocabulary_fingerprint
from lookahead.wrapping import engine_of, wrap
from ngram_pool import NgramPool, PoolFileError
from ngram_pool.waiting import told_if_long

# Settings by which generate() returns something else than the ids of one text.
OTHER_RESULTS = (
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "num_return_sequences", "num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty",
)  # fmt: skip
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}  # options that imply --do-sample


def load(
    name: str | None, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer.

    name: folder, GGUF file or hub name; None: the packaged model. `load_gguf` loads GGUF files on a CPU in float32.
    dtype: name of a torch dtype; auto: float32 on the CPU, the checkpoint's dtype elsewhere.
    device: name of a torch device; auto: a GPU if there is one.
    Raises ClickException if they cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if name is None:  # the packaged model loads at once: a progress bar would only flicker
        transformers.utils.logging.disable_progress_bar()
    with told_if_long("loading the model"), _loading(name, f"model on {device}") as (place, file):
        if dtype == "auto" and torch.device(device).type == "cpu":
            dtype = "float32"
        tokenizer = AutoTokenizer.from_pretrained(place, **file)
        if file and (dtype, torch.device(device).type) == ("float32", "cpu"):
            from lookahead.tools.gguf import load_gguf  # not needed for other models

            model = load_gguf(Path(place) / file["gguf_file"])
        else:
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **file)
        if file:  # the name in the file is often that of a checkpoint in training
            model.config.name_or_path = file["gguf_file"]
        model = model.to(device).eval()  # type: ignore[arg-type]  # a decorator hides that it is a method
        _ask_for_one_text(model)
    return model, tokenizer


def _ask_for_one_text(model: PreTrainedModel) -> None:
    """Let generate() return the ids of one text, which is what commands and the server take from it.

    A checkpoint may set another form of the result, several texts, or a search for one.
    """
    settings = model.generation_config
    if (beams := settings.num_beams or 1) > 1:
        click.echo(f"note: the checkpoint sets num_beams={beams}; here, a text is decoded without beams", err=True)
    for name in OTHER_RESULTS:
        setattr(settings, name, None)
    if settings.eos_token_id == []:
        settings.eos_token_id = None


@contextmanager
def bare_settings(model: PreTrainedModel) -> Iterator[None]:
    """In this block, ignore the checkpoint's generation settings, except the special tokens."""
    own = model.generation_config
    first = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
    padding = first if own.pad_token_id is None else own.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=padding
    )
    try:
        yield
    finally:
        model.generation_config = own


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; None: the packaged model's. Raises ClickException if it cannot be loaded."""
    with told_if_long("loading the tokenizer"), _loading(name, "tokenizer") as (place, file):
        return AutoTokenizer.from_pretrained(place, **file)


def load_pool(path: str, vocabulary: str | None = None) -> NgramPool:
    """Call `NgramPool.load`. Raises ClickException if it fails."""
    try:
        with told_if_long(f"reading {path}"):
            return NgramPool.load(path, vocabulary)
    except PoolFileError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"cannot read the pool {path}: {error.strerror or error}. Give a file of `lookahead pool build`"
        ) from error


def check_pool(pool_path: str | None, strategy: str) -> None:
    """Raise UsageError if a pool is given, but the strategy does not use one."""
    if pool_path is not None and strategy != "lookahead":
        raise click.UsageError(f"--pool has no effect with --strategy {strategy}: leave one of them out")


def load_wrapped(
    model_name: str | None,
    dtype: str,
    device: str,
    pool_path: str | None,
    strategy: str,
    assistant: str | None = None,
    mtp: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Lookahead | None, dict]:
    """Load a model and wrap it with a command's options. The strategy "plain" does not wrap it.

    options: fields of LookaheadConfig, and arguments of model.generate(), None if not given.
    Returns the model, its tokenizer, its `Lookahead` (None: plain) and the arguments for model.generate().
    """
    check_pool(pool_path, strategy)
    for option, is_given in (("--assistant", assistant is not None), ("--mtp", mtp)):
        if is_given and strategy == "plain":
            raise click.UsageError(f"{option} has no effect with --strategy plain: leave one of them out")
    settings = {name: options.pop(name) for name in LookaheadConfig.__dataclass_fields__ if name in options}
    options = {name: value for name, value in options.items() if value is not None}
    if options.get("temperature") == 0:
        if options.get("do_sample"):
            raise click.UsageError("--temperature 0 does not sample: leave it or --do-sample out")
        options = {name: value for name, value in options.items() if name not in SAMPLING} | {"do_sample": False}
    elif options.keys() & SAMPLING:
        options.setdefault("do_sample", True)
    if strategy == "plain":
        model, tokenizer = load(model_name, dtype, device)
        return model, tokenizer, None, options | _stop_strings(model, tokenizer)
    try:
        config = LookaheadConfig(strategy=strategy, **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    model, tokenizer = load(model_name, dtype, device)
    pool = load_pool(pool_path, vocabulary_fingerprint(tokenizer)) if pool_path else None
    if assistant is not None:
        options["assistant_model"], its_tokenizer = load(assistant, dtype, device)
        if vocabulary_fingerprint(its_tokenizer) != vocabulary_fingerprint(tokenizer):
            raise click.UsageError(
                f"--assistant {assistant!r} has another vocabulary than the model: choose one with the same"
            )
    sources = None
    if mtp:
        try:
            sources = [*default_sources(config), MtpSource(model)]
        except ValueError as error:
            raise click.ClickException(f"--mtp: {error}") from error
    with decoding():
        engine = engine_of(wrap(model, config, pool, sources))
    return model, tokenizer, engine, options | _stop_strings(model, tokenizer)


def _stop_strings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The arguments of generate() for the checkpoint's stop strings, which need the tokenizer. The checkpoint's own
    setting goes, so that calls without these arguments have none.
    """
    settings = model.generation_config
    stops, settings.stop_strings = settings.stop_strings, None
    return {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}


def check_tokens(tokens: Sequence[int], model: PreTrainedModel, what: str) -> None:
    """Raise ClickException if the model does not know a token. what: they are, for example "the prompt"."""
    largest, known = max(tokens, default=-1), vocabulary_of(model)
    if largest >= known:
        raise click.ClickException(
            f"{what} has the token {largest}, but the model knows {known} tokens: the tokenizer is another model's"
        )


@contextmanager
def decoding() -> Iterator[None]:
    """Turn errors of wrapping and decoding into ClickException; exit with status 130 on an interrupt."""
    try:
        yield
    except UnsupportedModelError as error:
        raise click.ClickException(str(error)) from error
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises RuntimeError
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise click.ClickException(f"decoding failed: {reason}") from error
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        sys.exit(130)


@contextmanager
def _loading(name: str | None, what: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the folder or hub name of a model and, for a GGUF file, the arguments that name the file in the folder.

    Raises ClickException, naming the model, for any error in the block.
    """
    place = str(DEMO_MODEL) if name is None else name
    path = Path(place)
    try:
        if not place:
            raise ValueError("the name is empty")
        if path.suffix != ".gguf":
            yield place, {}
        elif is_gguf_available() and is_accelerate_available():
            from lookahead.compat.gguf import metadata_read_once  # not needed for other models

            with metadata_read_once():
                yield str(path.parent), {"gguf_file": path.name}
        else:
            raise ImportError("transformers needs gguf and accelerate for GGUF files: pip install gguf accelerate")
    except Exception as error:  # its class depends on the hub's client, the format and the device
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise click.ClickException(
            f"cannot load the {what} of {place!r}: {reason}. Give --model a folder in Hugging Face format, a GGUF file "
            "or the name of a causal LM on the hub, and --device a device of this machine."
        ) from error
