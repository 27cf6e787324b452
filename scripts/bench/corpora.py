"""The prompts to decode, as token ids."""

import collections
import itertools
from collections.abc import Sequence

import click
import jinja2
import numpy as np
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from lookahead.streaming import render

RANDOM_LENGTH = 64  # tokens of a random prompt
# The first part of Spec-Bench is MT-bench, with MT-bench's numbers and categories.
MT_BENCH = range(81, 161), ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MARK = "9f1c"  # a placeholder for a text in a chat template


def category_of(prompt: dict) -> str:
    """Return the part of Spec-Bench to which a prompt belongs; for other prompts, their own category."""
    numbers, categories = MT_BENCH
    is_mt_bench = prompt["question_id"] in numbers and prompt["category"] in categories
    return "mt-bench" if is_mt_bench else prompt["category"]


def first_of_each(prompts: list[dict], count: int) -> list[dict]:
    """Return the first ``count`` prompts of each category, in their order."""
    seen: collections.Counter = collections.Counter()
    kept = []
    for prompt in prompts:
        seen[category_of(prompt)] += 1
        if seen[category_of(prompt)] <= count:
            kept.append(prompt)
    return kept


def conversation(prompt: dict) -> list[str]:
    """Return a prompt's turns with the given replies between them; only the first turn if there are no replies.

    Raises ClickException if there is not one reply for each turn but the last.
    """
    first, *others = prompt["turns"]
    replies = prompt.get("replies", [])
    if replies and len(replies) != len(others):
        raise click.ClickException(f"prompt {prompt['question_id']} needs a reply for each of its turns but the last")
    return [first, *itertools.chain.from_iterable(zip(replies, others, strict=False))]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, said: Sequence[str], raw: bool) -> list[int]:
    """Return the tokens of alternate turns of a user and the model, in the model's chat template; with ``raw`` or
    without a template, of the texts joined by line breaks.

    Raises ClickException if the template refuses them.
    """
    if raw or tokenizer.chat_template is None:
        return tokenizer("\n\n".join(said)).input_ids
    roles = itertools.cycle(("user", "assistant"))
    try:
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        return render(tokenizer, messages)["input_ids"][0].tolist()
    except jinja2.TemplateError as error:
        raise click.ClickException(f"the chat template refuses a prompt: {error}; try --raw") from error


def around(tokenizer: PreTrainedTokenizerBase, raw: bool) -> tuple[list[int], list[int]]:
    """Return the tokens that `prompt_ids` adds before and after a text. Raises ClickException if it changes the
    text."""
    ids, bare = prompt_ids(tokenizer, [MARK], raw), tokenizer(MARK, add_special_tokens=False).input_ids
    for begin in range(len(ids)):
        if ids[begin : begin + len(bare)] == bare:
            return ids[:begin], ids[begin + len(bare) :]
    raise click.ClickException("the chat template changes the tokens of a text: give --raw with --contexts")


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, vocabulary, (count, RANDOM_LENGTH)).tolist()


def with_context(texts: list[list[int]], begin: list[int], length: int, end: Sequence[int] = ()) -> list[list[int]]:
    """Return prompts of ``length`` tokens: each text after the texts that follow it (the first follows the last).

    begin, end: tokens at the start and the end of every prompt. A text that is too long loses its front.
    Raises ClickException if there is only one text, or no room for any.
    """
    if len(texts) < 2:
        raise click.ClickException("a context consists of the other prompts' texts: give two prompts or more")
    room = length - len(begin) - len(end)
    if room < 1:
        raise click.ClickException(f"a context of {length} has no room beside the chat template: raise --contexts")
    prompts = []
    for number, text in enumerate(texts):
        text = text[-room:]
        missing = room - len(text)
        others = [token for other in texts[number + 1 :] + texts[:number] for token in other]
        if missing and not others:
            raise click.ClickException("a context consists of the other prompts' texts, but these are empty")
        prompts.append([*begin, *np.resize(others, missing).tolist(), *text, *end])
    return prompts


def tokenized_prompts(
    name: str, texts: list[list[str]] | None, contexts: list[int | None], count: int, new_tokens: int, raw: bool = False
) -> dict[int | None, list[list[int]]]:
    """Return a model's prompts as token ids, for each context; without ``texts``, ``count`` prompts of random tokens.

    texts: for each prompt, from `conversation`. With a context, its turns are joined to one text.
    raw: do not put the texts into the model's chat template.
    Raises ClickException if the model cannot be read, or has too few positions for such prompts.
    """
    try:
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        tokenizer = AutoTokenizer.from_pretrained(name) if texts is not None else None
    except Exception as error:  # its class depends on the hub's client and on the format
        raise click.ClickException(f"cannot read the model {name}: {error}") from error
    prompts: dict[int | None, list[list[int]]] = {}
    for length in contexts:
        if texts is None:
            prompts[None] = random_prompts(count, config.vocab_size)
        elif length is None:
            prompts[None] = [prompt_ids(tokenizer, said, raw) for said in texts]
        else:
            bare = tokenizer(["\n\n".join(said) for said in texts], add_special_tokens=False).input_ids
            begin, end = around(tokenizer, raw)
            prompts[length] = with_context(bare, begin, length, end)
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
