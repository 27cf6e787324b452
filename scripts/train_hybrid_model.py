"""Train a small hybrid with a multi-token-prediction layer, from scratch, on the Python standard library.

The layers are Qwen3.5's: three with the gated delta rule, then one with full attention. One more layer takes the last
layer's output and the next token, and predicts the token after that (DeepSeek-V3, arXiv 2412.19437, section 2.2). Both
are trained together. The data are those of `train_demo_model.py`. The output is a folder like Qwen3.5's, with the
additional layer's tensors under `mtp.`.

    python scripts/train_hybrid_model.py --tokenizer lookahead/demo_model --out hybrid
"""

import json
import random
import time
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from train_demo_model import encode, sequences
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpLayer

from bench.training import descend, optimizers, standard_library
from lookahead.compat import CACHE

WEIGHT = 0.3  # of the additional layer's loss
PASSAGE = 500  # characters of a prompt
PUBLISHED = {  # names of the layer's parts in Qwen3.5's files
    "eh_proj.": "fc.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "post_norm.": "norm.",
    "mtp_block.": "layers.0.",
}  # fmt: skip


def new_model(tokenizer) -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4,
        linear_num_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True, mtp_num_hidden_layers=1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip


def new_mtp_layer(model: Qwen3_5ForCausalLM) -> MtpLayer:
    layer = model.model.layers[-1]
    made = MtpLayer(model.config, type(layer), type(layer.input_layernorm), len(model.model.layers) - 1)
    made.apply(model._init_weights)
    return made


def losses(model: Qwen3_5ForCausalLM, mtp: MtpLayer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropies of the model and of the layer, in nats. ids: [batch, tokens]."""
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        said = model.get_input_embeddings()(ids[:, 1:-1])
        positions = torch.arange(1, ids.shape[1] - 1)[None]
        further = mtp(
            said, states[:, :-1], attention_mask=None, position_ids=positions,
            position_embeddings=model.model.rotary_emb(said, positions.expand(3, 1, -1)), **{CACHE: None},
        )  # fmt: skip
        logits = model.lm_head(torch.cat([states, further], 1)).float()
    first, second = logits.split([states.shape[1], further.shape[1]], 1)
    return cross_entropy(first.flatten(0, 1), ids[:, 1:].flatten()), cross_entropy(
        second.flatten(0, 1), ids[:, 2:].flatten()
    )


def write_prompts(path: Path, texts: list[str], count: int = 48) -> None:
    """Write passages from the middle of texts, as prompts in Spec-Bench's format."""
    long = [text for text in texts if len(text) > 4 * PASSAGE]
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(long[:: max(1, len(long) // count)][:count]):
            passage = text[len(text) // 2 :][:PASSAGE]
            file.write(json.dumps({"question_id": number, "category": "python", "turns": [passage]}) + "\n")


@click.command(help=__doc__.split("\n")[0])
@click.option("--tokenizer", "tokenizer_name", required=True, help="Folder of the tokenizer.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=1600, show_default=True)
@click.option("--batch", default=8, show_default=True, help="Sequences a step.")
@click.option("--context", default=1024, show_default=True, help="Tokens of a sequence.")
@click.option("--rate", default=4e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
def main(tokenizer_name: str, out: Path, steps: int, batch: int, context: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    train, held_out = standard_library()
    random.Random(seed).shuffle(train)
    tokens, held = encode(tokenizer, train), torch.from_numpy(encode(tokenizer, held_out)).long()
    held = held[: len(held) // context * context].view(-1, context)[:: len(held) // context // 64 + 1]
    model = new_model(tokenizer)
    mtp = new_mtp_layer(model)
    both = torch.nn.ModuleList([model, mtp])
    click.echo(f"{len(tokens):,} tokens; {sum(p.numel() for p in both.parameters()) / 1e6:.1f} million parameters")
    source = sequences(tokens, rng, context)

    def next_loss() -> torch.Tensor:
        ids = torch.from_numpy(np.stack([next(source) for _ in range(batch)])).long()
        first, second = losses(model, mtp, ids)
        return first + WEIGHT * second

    matrices = [p for layers in (model.model.layers, mtp) for p in layers.parameters() if p.ndim == 2]
    others = [p for p in both.parameters() if p.ndim != 2 or p is model.model.embed_tokens.weight]
    start = time.perf_counter()
    for step, loss, left in descend(both, optimizers(matrices, others, rate), steps, next_loss):
        if step % 20 == 0 or step == steps:
            click.echo(f"step {step}/{steps}: loss {loss:.3f}, {left:.0f} minutes left")
    with torch.no_grad():
        parts = [torch.stack(losses(model, mtp, ids)) for ids in held.split(8)]
    first, second = torch.stack(parts).mean(0).tolist()
    click.echo(
        f"held-out loss {first:.3f} nats per token, {second:.3f} for the multi-token-prediction layer, "
        f"{(time.perf_counter() - start) / 60:.0f} minutes"
    )

    both.to(torch.bfloat16).eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in mtp.state_dict().items():
        (part,) = (part for part in PUBLISHED if name.startswith(part))
        tensors["mtp." + name.replace(part, PUBLISHED[part], 1)] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    write_prompts(out / "prompts.jsonl", held_out)


if __name__ == "__main__":
    main()
