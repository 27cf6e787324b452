"""Models and tokenizers for the command line and the scripts, by name; what cannot be loaded is named."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lookahead import DEMO_MODEL


def load(
    name: str | None, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in eval mode and tokenizer; None is the packaged model.

    dtype: one of torch's by name; auto: float32 on the CPU, the checkpoint's own elsewhere.
    device: of torch, by name; auto: a GPU if there is one.
    Raises ClickException if they cannot be loaded.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if name is None:  # a moment's work; what takes longer shows its progress
        transformers.utils.logging.disable_progress_bar()
    with _loading(name, f"model on {device}"):
        if dtype == "auto":
            chosen = torch.float32 if torch.device(device).type == "cpu" else "auto"
        else:
            chosen = getattr(torch, dtype)
        tokenizer = AutoTokenizer.from_pretrained(_place(name))
        model = AutoModelForCausalLM.from_pretrained(_place(name), dtype=chosen)
        model = model.to(device).eval()  # type: ignore[arg-type]  # a decorator hides that it is a method
    return model, tokenizer


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """Tokenizer of a model; None is the packaged one. Raises ClickException if it cannot be loaded."""
    with _loading(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(_place(name))


def _place(name: str | None) -> str:
    if name == "":
        raise ValueError("the name is empty")
    return str(DEMO_MODEL) if name is None else name


@contextmanager
def _loading(name: str | None, what: str) -> Iterator[None]:
    """Turn any error into a ClickException that names the model."""
    try:
        yield
    except Exception as error:  # what is raised depends on the hub's client, the format and the device
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise click.ClickException(
            f"cannot load the {what} of {str(DEMO_MODEL if name is None else name)!r}: {reason}. Give --model a folder "
            "in Hugging Face format or the name of a causal LM on the hub, and --device a device of this machine."
        ) from error
