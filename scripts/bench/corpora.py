"""The prompts to decode, as token ids."""

import click
import numpy as np
from transformers import AutoConfig, AutoTokenizer

RANDOM_LENGTH = 64  # tokens of a random prompt


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocabulary, (count, RANDOM_LENGTH)).tolist()


def with_context(texts: list[list[int]], begin: list[int], length: int) -> list[list[int]]:
    """Return prompts of ``length`` tokens: each text after the texts that follow it (the first follows the last).

    begin: special tokens at the start of every prompt. A text that is too long loses its front.
    Raises ClickException if there is only one text.
    """
    if len(texts) < 2:
        raise click.ClickException("the other prompts' texts make up a context: give two prompts or more")
    prompts = []
    for number, text in enumerate(texts):
        text = text[-(length - len(begin)) :]
        missing = length - len(begin) - len(text)
        others = [token for other in texts[number + 1 :] + texts[:number] for token in other]
        if missing and not others:
            raise click.ClickException("the other prompts' texts make up a context, but they are empty")
        prompts.append(begin + (np.resize(others, missing).tolist() if missing else []) + text)
    return prompts


def tokenized_prompts(
    name: str, texts: list[str] | None, contexts: list[int | None], count: int, new_tokens: int
) -> dict[int | None, list[list[int]]]:
    """Return a model's prompts as token ids, for each context; without ``texts``, ``count`` prompts of random tokens.

    Raises ClickException if the model cannot be read, or has too few positions for such prompts.
    """
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(name) if texts is not None else None
    except Exception as error:  # the type depends on the hub's client and on the format
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
                f"{name} was made for {room} positions, but {what} and {new_tokens} new tokens are {longest}: "
                "lower --contexts or --max-new-tokens, or use another model"
            )
    return prompts
