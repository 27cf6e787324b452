"""Time passes in the shapes of published models, and the time in which memory streams the weights that they read.

Weights are random. Of large models, only a few layers and the same share of the vocabulary are built, so layers and
lm_head keep their proportion. Passes are fused, and timed as in `lookahead tune`. Passes over several rows read more
experts: the average number of different ones if each row chooses at random.

    python scripts/time_shapes.py --out OUT
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import click
import torch
from benchmark import bytes_read, reading
from compare_trees import SHAPES as WITH_STATES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, initialization

from bench import cli
from bench.pages import command_line, heading, show_results, table
from lookahead.config import AUTO
from lookahead.passes.capabilities import find_adapter, fused_runner
from lookahead.passes.environment import environment
from lookahead.passes.measuring import time_passes
from lookahead.tools.contention import Span, watch, why_no_ratio

ROWS = 1, 8, 16, 64
EVERY_EXPERT = 10**6  # rows of a pass that reads all experts
DRAWN = 2**20 + 7  # random numbers, which are repeated. No width divides this, so rows and experts differ
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
# Settings that are not the defaults. layers: how many are built, of how many.
SHAPES: dict[str, dict] = {
    "GPT-2": {"model_type": "gpt2"},
    "Phi-2": {
        **{"model_type": "phi", "layers": (16, 32), "hidden_size": 2560, "intermediate_size": 10240},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    },
    "GLM-4 9B": {"model_type": "glm4", "layers": (5, 40)},
    "Gemma 4 E2B": {
        **{"model_type": "gemma4_text", "layers": (14, 35), "num_kv_shared_layers": 8, "use_double_wide_mlp": True},
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_key_value_heads": 1, "final_logit_softcapping": 30.0},
        "layer_types": [SLIDING * 4, FULL] * 2 + [SLIDING * 3, FULL],
    },
    "Qwen3-MoE 30B-A3B": {"model_type": "qwen3_moe", "layers": (2, 48), "head_dim": 128, "norm_topk_prob": True},
    "gpt-oss-20b": {"model_type": "gpt_oss", "layers": (2, 24), "num_local_experts": 32},
    **WITH_STATES,
}
NOTES = """

- layers: number of layers built, of the published model's.
- bits a weight: of the weights that passes read, which may be packed (`pack_weights`).
- MB read: weights of a pass over one row in the model's dtype, without embeddings and experts that are not chosen.
- ms to read them: the time in which the same threads add up as many numbers in sequence, in the same run.
- x reading: the time of a pass, divided by the time to read the weights of its rows once.
"""
COPIED = {"gpt-oss-20b"}
"""Models with transposed weights: the copy that passes need is so large that only `pack_weights=True` makes it."""


@contextmanager
def quick_draws() -> Iterator[None]:
    """In this block, transformers fills weights with repeated random numbers. Drawing all of them would take
    minutes."""
    drawn = torch.randn(DRAWN)

    def fill(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> torch.Tensor:
        numbers = (drawn * std + mean).to(tensor.dtype)
        with torch.no_grad():
            for part in tensor.view(-1).split(DRAWN):
                part.copy_(numbers[: len(part)])
        return tensor

    with patch.object(initialization, "normal_", fill):
        yield


def shaped(settings: dict, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of an entry of SHAPES."""
    settings = dict(settings)
    built, of = settings.pop("layers", (1, 1))
    if built < of:
        settings["num_hidden_layers"] = built
        settings["vocab_size"] = AutoConfig.for_model(settings["model_type"]).vocab_size * built // of
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    if "layer_types" in settings:
        settings["layer_types"] = [kind for part in settings["layer_types"] for kind in part]
    config = AutoConfig.for_model(**settings, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with quick_draws():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def time_shape(name: str, model: PreTrainedModel, seconds: float) -> dict:
    """Return the seconds of passes and of reading, and the bytes read, by rows of a pass."""
    runner = fused_runner(model, find_adapter(model), packs=name in COPIED or AUTO)
    if isinstance(runner, str):
        raise click.ClickException(f"passes of {name} are not fused: {runner}")
    span, before = watch(model.device), reading(model)
    times = time_passes(runner, [(rows, 0) for rows in ROWS], seconds)
    streamed = min(before, reading(model), key=lambda read: read["seconds"])
    pace = streamed["seconds"] / streamed["bytes"]
    size = {rows: bytes_read(model, rows) for rows in ROWS}
    return {
        "shape": name,
        "layers": SHAPES[name].get("layers"),
        "parameters": model.num_parameters(),
        "bits": 8 * model.dtype.itemsize * runner.weight_bytes / bytes_read(model, EVERY_EXPERT),
        "bytes": size,
        "reading": {rows: size[rows] * pace for rows in ROWS},
        "seconds": {rows: times[rows, 0] for rows in ROWS},
        "span": span(),
    }


def markdown(shapes: list[dict], where: dict) -> str:
    columns = ["shape", "layers", "parameters, 10^6", "bits a weight", "MB read", "ms to read them"]
    for rows in ROWS:
        columns += [f"ms, {rows} row{'s' * (rows > 1)}", "x reading"]
    cells = []
    for shape in shapes:
        layers = "all" if shape["layers"] is None else "{} of {}".format(*shape["layers"])
        row: list = [shape["shape"], layers, shape["parameters"] // 10**6, shape["bits"]]
        row += [round(shape["bytes"][1] / 1e6), 1e3 * shape["reading"][1]]
        for rows in ROWS:
            taken = shape["seconds"][rows]
            row += [1e3 * taken, None if where["note"] else taken / shape["reading"][rows]]
        cells.append(row)
    return heading(where) + table(columns, cells, "llrrrr" + "rr" * len(ROWS)) + NOTES


@click.command(help=__doc__.split("\n")[0])
@click.option("--shapes", type=cli.ListOf(click.Choice(list(SHAPES))), default=",".join(SHAPES), help="Default: all.")
@click.option("--seconds", type=float, default=12.0, show_default=True, help="Time for the passes of a shape.")
@click.option("--dtype", default="bfloat16", type=click.Choice(cli.DTYPES[1:3]), show_default=True)
@click.option("--out", type=cli.OUT, help="Write OUT.md and OUT.json.")
@torch.no_grad()
def main(shapes: list[str], seconds: float, dtype: str, out: Path | None) -> None:
    found: list[dict] = []
    where: dict = {"command": command_line(__file__)}
    for name in shapes:
        start = time.perf_counter()
        model = shaped(SHAPES[name], getattr(torch, dtype))
        found.append(time_shape(name, model, seconds))
        where |= environment(model)
        del model  # before the next one is built
        click.echo(f"{name}: {time.perf_counter() - start:.0f} s", err=True)
    where["note"] = why_no_ratio(sum((shape["span"] for shape in found), Span()))
    show_results(out, markdown(found, where), {"environment": where, "shapes": found})


if __name__ == "__main__":
    main()
