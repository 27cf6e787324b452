"""Train the small Llama of the package from scratch on the Python standard library.

The data are the ``.py`` files of the interpreter that runs this script (PSF License 2.0). One file in twenty, chosen by
the hash of its path, is held out to measure the loss. The output is a Hugging Face folder: config, bf16 weights,
byte-level BPE tokenizer, and a model card with the figures of the run.

    python scripts/train_demo_model.py --out lookahead/demo_model
"""

import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.training import descend, optimizers, standard_library

VOCABULARY = 4096
CONTEXT = 1024
END = "<|end|>"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=CONTEXT)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Return the ids of all texts as one int32 array, with the end token before each text."""
    end = tokenizer.eos_token_id
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    return np.concatenate([np.array([end, *encoding.ids], dtype=np.int32) for encoding in encodings])


def sequences(tokens: np.ndarray, rng: np.random.Generator, context: int = CONTEXT) -> Iterator[np.ndarray]:
    """Yield sequences of context + 1 ids forever; each epoch cuts at a new offset and shuffles the pieces."""
    while True:
        pieces = tokens[rng.integers(context) :]
        pieces = pieces[: len(pieces) // (context + 1) * (context + 1)].reshape(-1, context + 1)
        for index in rng.permutation(len(pieces)):
            yield pieces[index]


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, most: int | None = None) -> float:
    """Return the mean cross-entropy in nats per token, over at most ``most`` sequences of the held-out files."""
    pieces = torch.from_numpy(tokens[: len(tokens) // CONTEXT * CONTEXT]).long().view(-1, CONTEXT)[:most]
    with torch.autocast("cpu", torch.bfloat16):
        return sum(model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in pieces.split(8)) / len(pieces)


CARD = """---
license: psf-2.0
language: code
library_name: transformers
tags: [python, demonstration]
---
# lookahead demo model

A Llama of {parameters:.1f} million parameters (6 layers of 256, 4 heads, 2 KV heads, feed-forward 704, tied byte-level
BPE vocabulary of {vocabulary:,}, context {context:,}). It comes with the `lookahead` package, which so works offline.
It continues Python source code plausibly but understands nothing: it is for demonstrations and tests.

| | |
|---|---|
| data | the `.py` files of the CPython {python} standard library: {files:,} files, {tokens:.1f} million tokens |
| licence of the data | PSF License 2.0, (c) 2001-2023 Python Software Foundation; some modules add notices |
| held out | {held_files} of these files, chosen by the hash of their path |
| training | {steps:,} steps of {batch} x {context:,} tokens, {seen:.1f} million in all; bf16 autocast |
| optimizers | Muon for the matrices of the layers, AdamW for the rest; peak rate {rate} |
| seed | {seed} |
| held-out loss | {loss:.3f} nats per token |
| time | {minutes:.0f} minutes on {threads} CPU threads, torch {torch} |

Made by `python scripts/train_demo_model.py --steps {steps} --batch {batch} --rate {rate} --seed {seed}`.
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), default=Path("lookahead/demo_model"), show_default=True)
@click.option("--steps", default=1600, show_default=True)
@click.option("--batch", default=8, show_default=True, help=f"Sequences of {CONTEXT} tokens a step.")
@click.option("--rate", default=4e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, steps: int, batch: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    train, held_out = standard_library()
    random.Random(seed).shuffle(train)
    tokenizer = train_tokenizer(train)
    tokens, held_tokens = encode(tokenizer, train), encode(tokenizer, held_out)
    click.echo(f"{len(train)} files, {len(tokens):,} tokens; held out {len(held_out)}, {len(held_tokens):,} tokens")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    source = sequences(tokens, rng)

    @torch.compile
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def next_loss() -> torch.Tensor:
        return loss_of(torch.from_numpy(np.stack([next(source) for _ in range(batch)])).long())

    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1 or p is model.model.embed_tokens.weight]
    start = time.perf_counter()
    for step, loss, left in descend(model, optimizers(matrices, others, rate), steps, next_loss):
        if step % 20 == 0 or step == steps:
            held = f", held out {held_out_loss(model, held_tokens, 32):.3f}" if step % 200 == 0 else ""
            click.echo(f"step {step}/{steps}: loss {loss:.3f}{held}, {left:.0f} minutes left")

    minutes = (time.perf_counter() - start) / 60
    model.to(torch.bfloat16).eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = CARD.format(
        parameters=model.num_parameters() / 1e6, vocabulary=VOCABULARY, context=CONTEXT,
        python=platform.python_version(), files=len(train) + len(held_out), held_files=len(held_out),
        tokens=(len(tokens) + len(held_tokens)) / 1e6, steps=steps, batch=batch, seen=steps * batch * CONTEXT / 1e6,
        rate=rate, seed=seed, loss=held_out_loss(model, held_tokens), minutes=minutes,
        threads=torch.get_num_threads(), torch=torch.__version__,
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")
    click.echo(card)


if __name__ == "__main__":
    main()
