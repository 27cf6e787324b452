"""Texts that a model writes to train its heads. They are stored in a file, to which later runs add."""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.tools.prompts import up_to_its_end

USER_TOKENS, ANSWER_TOKENS, CONTINUED_TOKENS = 64, 192, 256  # most tokens of each kind of text
PROMPT_TOKENS = (16, 128)  # least and most tokens of a passage that the model continues
LONGEST_PROMPT = 512  # most tokens of a given prompt, which are its last ones
WRITTEN_AT_ONCE = 64
TEMPERATURE = 0.7  # of answers and continuations, between greedy decoding and full sampling


@dataclass
class Text:
    ids: list[int]
    begin: int  # where the model's own writing begins


def read_texts(path: Path) -> list[Text]:
    """Read a file of `add_texts`. Raises ClickException, naming the line, if it has another format."""
    if not path.exists():
        return []
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            texts.append(Text(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise click.ClickException(f"{path}, line {number} is not a model's text: {error!r}") from error
    return texts


def tokens_written(texts: list[Text]) -> int:
    return sum(len(text.ids) - text.begin for text in texts)


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return the chat template's text before the user's turn, and between it and the answer; None without a
    template."""
    if not tokenizer.chat_template:
        return None
    mark = "<user's turn>"
    turn = [{"role": "user", "content": mark}]
    before, _, between = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition(mark)
    return before, between


@torch.inference_mode()
def written(model: PreTrainedModel, prompts: list[list[int]], most: int, temperature: float, top_k: int = 0) -> list:
    """Return the model's text after each prompt, up to and including an end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = model.generation_config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=True, temperature=temperature, top_k=top_k,
        top_p=1.0, repetition_penalty=1.0, pad_token_id=0 if first is None else first,
    )  # fmt: skip
    return [up_to_its_end(row, ends) for row in out[:, longest:].tolist()]


def some_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: list[str], rng: random.Random
) -> list[Text]:
    """Let the model write WRITTEN_AT_ONCE texts.

    given: prompts to choose from; without prompts, a chat model writes the user's turns, too.
    """

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    frame = chat_frame(tokenizer)
    prompts = []
    if frame is None:
        for text in rng.choices(given, weights=[len(text) for text in given], k=WRITTEN_AT_ONCE):
            begin = rng.randrange(max(len(text) - 8 * PROMPT_TOKENS[1], 0) + 1)
            passage = encoded(text[begin : begin + 8 * PROMPT_TOKENS[1]])
            prompts.append(passage[: rng.randint(*PROMPT_TOKENS)] or [0])
    elif given:
        turns = [encoded(text)[-LONGEST_PROMPT:] for text in rng.choices(given, k=WRITTEN_AT_ONCE)]
        prompts = [encoded(frame[0]) + turn + encoded(frame[1]) for turn in turns]
    else:
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        before, between = map(encoded, frame)
        turns = written(model, [before] * WRITTEN_AT_ONCE, USER_TOKENS, 1.0, 50)
        turns = [turn[:-1] if turn[-1] in ends else turn for turn in turns]
        prompts = [before + turn + between for turn in turns if turn]
    prompts.sort(key=len)
    answers = written(model, prompts, CONTINUED_TOKENS if frame is None else ANSWER_TOKENS, TEMPERATURE)
    texts = [Text(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    rng.shuffle(texts)  # so that held-out texts have all lengths
    return texts


def add_texts(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: list[str], tokens: int, seed: int
) -> list[Text]:
    """Let the model write until the file holds ``tokens`` tokens of its own."""
    texts = read_texts(path)
    if any(token >= model.get_input_embeddings().num_embeddings for text in texts for token in text.ids):
        raise click.ClickException(f"{path} has tokens that the model lacks: use another file for each model")
    start, before = time.perf_counter(), tokens_written(texts)
    while tokens_written(texts) < tokens:
        torch.manual_seed(seed + len(texts))
        new = some_texts(model, tokenizer, given, random.Random(seed + len(texts)))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(text)) + "\n" for text in new)
        texts += new
        have = tokens_written(texts)
        rate = (have - before) / (time.perf_counter() - start)
        left = max(tokens - have, 0) / rate
        click.echo(f"{have:,} tokens written, {rate:.0f} a second, {left / 60:.0f} minutes left")
    return texts
