"""Compare trees with chains in models whose layers keep a state: tokens a step, and the cost of passes.

Small random models write the same texts in both ways. Larger models, in published shapes, are only timed: fused passes
with unpacked weights, and the model's own code, with trees and with chains. If a chain is not accepted completely, the
states are restored; these times do not include that.

    python scripts/compare_trees.py --out OUT
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import click
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import lookahead
from bench import cli
from bench.pages import command_line, heading, show_results, table
from bench.timing import waited
from bench.tiny_models import random_model, tiny_config
from lookahead import LookaheadConfig
from lookahead.models import branching
from lookahead.passes import capabilities, verdicts
from lookahead.passes.environment import environment
from lookahead.passes.measuring import time_passes
from lookahead.passes.runner import EagerRunner

FAMILIES = (
    *("lfm2", "lfm2_moe", "lfm3", "qwen3_5_text", "qwen3_next", "olmo_hybrid", "lara_mini", "kimi_linear"),
    *("bailing_hybrid", "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"),
)
PROMPT = [17, 5, 42, 29, 8, 33, 11, 17, 5, 42, 29, 8, 33, 50, 23, 17, 5, 42]
TEXTS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.5, "top_k": 0}}
ROWS = 1, 8, 16
SHAPES = {
    "LFM2 350M": {
        **{"model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 4608, "block_auto_adjust_ff_dim": False},
        **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 65536},
        "layer_types": [["conv"] * 2, ["full_attention"]] * 5 + [["full_attention"]],
    },
    "Qwen3.5 0.8B": {
        **{"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True},
        "layer_types": [["linear_attention"] * 3, ["full_attention"]] * 6,
    },
    "Granite 4 350M-H": {
        **{"model_type": "granitemoehybrid", "hidden_size": 768, "shared_intermediate_size": 2048},
        **{"num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352},
        **{"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "num_local_experts": 0},
        **{"num_experts_per_tok": 0, "tie_word_embeddings": True},
        "layer_types": [["mamba"] * 7, ["attention"]] * 4,
    },
}


@contextmanager
def chains_alone(model: PreTrainedModel) -> Iterator[None]:
    """In this block, states are restored, as if the layers could not branch."""
    chains = patch.object(branching, "why_not", lambda model: "chains are asked for")
    with chains, patch.object(verdicts, "path_of", lambda *args: None):  # stored verdicts are not used
        capabilities._found.pop(model)
        yield
    capabilities._found.pop(model)


def tokens_per_step(model: PreTrainedModel, guesses: int, options: dict, texts: list[list[int]]) -> float:
    """Write four texts. Add them to ``texts`` if it is empty; otherwise raise RuntimeError if one differs."""
    lookahead.wrap(model, LookaheadConfig(budget=guesses, window_size=0))
    try:
        for seed in range(4):
            torch.manual_seed(seed)
            ids = torch.tensor([[*PROMPT, 3 + seed]])
            text = model.generate(ids, min_new_tokens=128, max_new_tokens=128, **options)[0].tolist()
            if len(texts) <= seed:
                texts.append(text)
            elif text != texts[seed]:
                raise RuntimeError(f"{type(model).__name__} has written another text")
        return model.lookahead.stats.tokens / model.lookahead.stats.steps
    finally:
        lookahead.unwrap(model)


def compare(family: str) -> list[dict]:
    model, rows = random_model(tiny_config(family)), []
    for name, options in TEXTS.items():
        texts: list[list[int]] = []
        row: dict = {"family": family, "texts": name}
        for guesses in (16, 64):
            row[f"tree, {guesses}"] = tokens_per_step(model, guesses, options, texts)
            with chains_alone(model):
                row[f"chain, {guesses}"] = tokens_per_step(model, guesses, options, texts)
        rows.append(row)
    return rows


def shaped(settings: dict, dtype: torch.dtype) -> PreTrainedModel:
    kinds = [kind for part in settings["layer_types"] for kind in part]
    config = AutoConfig.for_model(**settings | {"layer_types": kinds})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def time_rows(model: PreTrainedModel, name: str, seconds: float) -> dict:
    """Return the milliseconds of passes with our kernels, and of reading all weights once."""
    weights = [p for p in model.parameters() if p is not model.get_input_embeddings().weight]
    weights.append(model.get_output_embeddings().weight)
    read = lambda: [weight.detach().flatten().view(torch.int16).max() for weight in weights]  # noqa: E731
    reading = min(waited(read, model.device) for _ in range(3))
    row: dict = {"shape": name, "reading": reading * 1e3}
    with chains_alone(model):
        chains = EagerRunner(model, capabilities.find_adapter(model))
    assert not chains.adapter.can_branch
    adapter = capabilities.find_adapter(model)
    fused = capabilities.fused_runner(model, adapter)
    if isinstance(fused, str):
        raise click.ClickException(f"passes of {name} are not fused: {fused}")
    for way, runner in ("one call", fused), ("tree", EagerRunner(model, adapter)), ("chain", chains):
        times = time_passes(runner, [(rows, 0) for rows in ROWS], seconds)
        row |= {f"{way}, {rows}": times[rows, 0] * 1e3 for rows in ROWS}
    return row


@click.command(help=__doc__)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Time for the passes of a shape.")
@click.option("--dtype", default="bfloat16", type=click.Choice(cli.DTYPES[1:3]), show_default=True)
@click.option("--out", type=cli.OUT, help="Write OUT.md and OUT.json.")
def main(seconds: float, dtype: str, out: Path | None) -> None:
    texts = [row for family in FAMILIES for row in compare(family)]
    passes = []
    for name, settings in SHAPES.items():
        click.echo(name, err=True)
        model = shaped(settings, getattr(torch, dtype))
        passes.append(time_rows(model, name, seconds))
    where = {"command": command_line(__file__), **environment(model)}
    of_each = [table(list(rows[0]), map(dict.values, rows)) for rows in (texts, passes)]
    text = heading(where) + "\n\n".join(["Tokens a step:", of_each[0], "Milliseconds of a pass:", of_each[1]]) + "\n"
    show_results(out, text, {"environment": where, "texts": texts, "passes": passes})


if __name__ == "__main__":
    sys.exit(main())
