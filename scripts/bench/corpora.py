"""What is decoded and learned: prompts as token ids, and text of Python's standard library."""

import click
import numpy as np
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from lookahead.tools.prompts import STANDARD_LIBRARY

RANDOM_TOKENS = 64  # of a random prompt


def standard_library(count: int, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The first ``count`` tokens of Python's standard library, in the order of its files' names."""
    ids: list[int] = []
    for path in sorted(STANDARD_LIBRARY.glob("*.py")):
        ids += tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= count:
            return np.array(ids[:count])
    return np.resize(ids, count)


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocabulary, (count, RANDOM_TOKENS)).tolist()


def with_context(texts: list[list[int]], begin: list[int], length: int) -> list[list[int]]:
    """Prompts of ``length`` tokens: before each text stand those that follow it; after the last, the first follows.

    begin: special tokens that every prompt begins with. A text that is too long is cut at its front.
    Raises ClickException if there is only one text.
    """
    if len(texts) < 2:
        raise click.ClickException("a context is made of the other prompts' texts: give two prompts or more")
    prompts = []
    for number, text in enumerate(texts):
        text = text[-(length - len(begin)) :]
        missing = length - len(begin) - len(text)
        others = [token for other in texts[number + 1 :] + texts[:number] for token in other]
        if missing and not others:
            raise click.ClickException("a context is made of the other prompts' texts, which are empty")
        prompts.append(begin + np.resize(others, missing).tolist() + text if missing else begin + text)
    return prompts


def tokenized_prompts(
    name: str, texts: list[str] | None, contexts: list[int | None], count: int, new_tokens: int
) -> dict[int | None, list[list[int]]]:
    """Token ids of a model's prompts, for each context; without ``texts``, ``count`` prompts of random tokens.

    Raises ClickException if the model cannot be read, or was not made for such long prompts.
    """
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(name) if texts is not None else None
    except Exception as error:  # what is raised depends on the hub's client and the format
        raise click.ClickException(f"cannot read the model {name}: {error}") from error
    if texts is None:
        prompts = {None: random_prompts(count, config.vocab_size)}
    else:
        whole = tokenizer(texts).input_ids
        bare = tokenizer(texts, add_special_tokens=False).input_ids
        begin = whole[0][: len(whole[0]) - len(bare[0])]
        prompts = {length: whole if length is None else with_context(bare, begin, length) for length in contexts}
    room = getattr(config, "max_position_embeddings", None)
    for context, ids in prompts.items():
        longest = max(map(len, ids)) + new_tokens
        if room is not None and longest > room:
            what = f"a context of {context}" if context else f"a prompt of {longest - new_tokens}"
            raise click.ClickException(
                f"{name} was made for {room} positions, {what} and {new_tokens} new tokens are {longest}: "
                "give less of --contexts or --max-new-tokens, or another model"
            )
    return prompts
