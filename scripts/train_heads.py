"""Train heads that guess a model's next tokens, on texts that the model itself has written.

A model with a chat template answers given prompts, or also writes the user's turns (Magpie, arXiv 2406.08464). Another
model continues given prompts, or passages of the Python standard library. Texts are added to --texts until there are
enough, so later runs and several kinds of heads can use the same file. The model then computes the texts once. Its
hidden states are the heads' input; its top next tokens and their probabilities are the target. One text in twenty is
held out.

- medusa: each head is x + SiLU(W x + b) and a projection, initially the model's (arXiv 2401.10774).
- eagle: one layer that predicts the next feature, with the model's projection (arXiv 2401.15077).
- eagle3: one layer that reads three layers' outputs, with its own projection (arXiv 2503.01840).

Both kinds of EAGLE are trained as they will guess: in each step, they continue from their own features a few times
(EAGLE-3, section 3.2). If the model has more tokens than --vocabulary, the loss counts only the most frequent ones in
the texts, and medusa and eagle3 have no others.

    python scripts/train_heads.py --model lookahead/demo_model --kind eagle --out heads
    python scripts/train_heads.py --model M --kind medusa --texts heads/texts.jsonl --out heads-medusa

OUT can be read by `lookahead.MedusaSource` or `lookahead.EagleSource`. The model card has the figures of the run.
"""

import json
import time
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.own_texts import TEMPERATURE, add_texts, tokens_written
from bench.trained_heads import (
    EagleHead,
    Heads,
    MedusaHeads,
    agreement,
    layer_config,
    layers_read,
    new_heads,
    read_by,
    tokens_of_chain,
    tokens_of_heads,
    train,
)
from bench.training import standard_library
from lookahead.tools.prompts import read_prompts

HELD_OUT = 20  # one text in so many


def medusa_files(heads: MedusaHeads, tokens: torch.Tensor, vocabulary: int) -> tuple[str, dict, dict]:
    """Return the file's name, config.json and tensors: in the original layout, or vLLM's for a reduced vocabulary."""
    tensors = dict(heads.state_dict())
    if len(tokens) == vocabulary:
        return "medusa_lm_head.safetensors", {"medusa_num_heads": len(heads), "medusa_num_layers": 1}, tensors
    renamed = {"token_map": tokens}
    for h in range(len(heads)):
        for side in ("weight", "bias"):
            renamed[f"blocks.{h}.layers.0.{side}"] = tensors[f"{h}.0.linear.{side}"]
        renamed[f"lm_heads.{h}.weight"] = tensors[f"{h}.1.weight"]
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": len(heads), "num_hidden_layers": 1,
        "hidden_size": heads[0][1].in_features, "vocab_size": vocabulary, "truncated_vocab_size": len(tokens),
        "medusa_fc_bias": True,
    }  # fmt: skip
    return "model.safetensors", config, renamed


def eagle_files(model: PreTrainedModel, heads: EagleHead, tokens: torch.Tensor, vocabulary: int) -> tuple:
    """The same, in the original layout. The heads use the model's embedding and, for EAGLE, the model's projection."""
    tensors = dict(heads.state_dict())
    layer = layer_config(model)
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "rms_norm_eps", "num_hidden_layers", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    config = {name: getattr(layer, name) for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3" if heads.is_third else "LlamaForCausalLMEagle"],
        "model_type": "llama", "rope_theta": layer.rope_parameters["rope_theta"], "bias": False,
    }  # fmt: skip
    if heads.is_third:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers_read(model, "eagle3"))
        config["draft_vocab_size"] = len(tokens)
        if len(tokens) < vocabulary:
            tensors["d2t"] = tokens - torch.arange(len(tokens))
            tensors["t2d"] = torch.isin(torch.arange(vocabulary), tokens)
    return "model.safetensors", config, tensors


def write_heads(out: Path, model: PreTrainedModel, heads: Heads, tokens: torch.Tensor) -> None:
    """Write config.json and the tensors, floats in bf16."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if isinstance(heads, MedusaHeads):
        name, config, tensors = medusa_files(heads, tokens, vocabulary)
    else:
        name, config, tensors = eagle_files(model, heads, tokens, vocabulary)
    tensors = {key: (x.bfloat16() if x.is_floating_point() else x).contiguous() for key, x in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / name, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


CARD = """---
tags: [{kind}, speculative-decoding]
---
# {title} heads for {model}

Read by `lookahead.{source}(model, folder)`. Held out, the most likely token at each depth is the model's in {shares} of
the places whose tokens above it are right: {chain:.2f} tokens a step with one branch of guesses.

| | |
|---|---|
| parameters | {parameters:.1f} million |
| vocabulary | {tokens:,} of {vocabulary:,} tokens |
| data | {texts:,} texts, of which the model wrote {written:,} tokens at temperature {temperature}; {held} held out |
| training | {steps:,} steps of at most {rows:,} tokens; bf16 autocast |
| optimizers | Muon for matrices of layers, AdamW for the rest; peak rate {rate} |
| seed | {seed} |
| time | {reading:.0f} minutes to read the texts, {minutes:.0f} to train, on {threads} CPU threads, torch {torch} |
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "name", required=True, help="Folder or name of the model.")
@click.option("--kind", type=click.Choice(["medusa", "eagle", "eagle3"]), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--texts", type=click.Path(path_type=Path), help="File of the model's texts.  [default: OUT/texts.jsonl]")
@click.option("--tokens", default=200_000, show_default=True, help="Tokens that the model writes in all.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts for the model, in Spec-Bench's JSONL format.")
@click.option("--vocabulary", default=8192, show_default=True, help="Most tokens in the heads' vocabulary.")
@click.option("--steps", default=600, show_default=True, help="Steps of training; 0 only writes texts.")
@click.option("--batch", default=2048, show_default=True, help="Most tokens of a step.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
def main(
    name: str, kind: str, out: Path, texts: Path | None, tokens: int, prompts: Path | None, vocabulary: int, steps: int,
    batch: int, rate: float, seed: int,
) -> None:  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    out.mkdir(parents=True, exist_ok=True)
    given = [prompt["turns"][0] for prompt in read_prompts(prompts, None)] if prompts else []
    if not given and not tokenizer.chat_template:
        given = standard_library()[0]
    known = add_texts(texts or out / "texts.jsonl", model, tokenizer, given, tokens, seed)
    if not steps:
        return
    start = time.perf_counter()
    examples = read_by(model, known, layers_read(model, kind))
    reading = (time.perf_counter() - start) / 60
    held_out = examples[::HELD_OUT]
    examples = [example for i, example in enumerate(examples) if i % HELD_OUT]
    click.echo(f"{len(examples):,} texts and {len(held_out)} held out, read in {reading:.1f} minutes")

    torch.manual_seed(seed)
    size = model.get_output_embeddings().weight.shape[0]
    chosen = tokens_of_heads(known, size, vocabulary)
    place_of = torch.full((size,), -1).index_copy(0, chosen, torch.arange(len(chosen)))
    heads = new_heads(model, kind, chosen)
    start = time.perf_counter()
    train(heads, examples, held_out, place_of, steps, batch, rate, seed)
    minutes = (time.perf_counter() - start) / 60
    write_heads(out, model, heads, chosen)
    shares = agreement(heads, held_out, place_of)
    card = CARD.format(
        kind=kind, title={"medusa": "Medusa", "eagle": "EAGLE", "eagle3": "EAGLE-3"}[kind],
        model=Path(name).name, source="MedusaSource" if kind == "medusa" else "EagleSource",
        shares=", ".join(f"{share:.1%}" for share in shares), chain=tokens_of_chain(shares),
        parameters=sum(p.numel() for p in heads.parameters()) / 1e6, tokens=len(chosen), vocabulary=size,
        texts=len(known), written=tokens_written(known), temperature=TEMPERATURE,
        held=len(held_out), steps=steps, rows=batch, rate=rate, seed=seed, reading=reading, minutes=minutes,
        threads=torch.get_num_threads(), torch=torch.__version__,
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")
    click.echo(card)


if __name__ == "__main__":
    main()
