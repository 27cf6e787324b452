"""The shapes of published models: they fit in memory, have passes of one call, and are timed."""

import pytest
import time_shapes
import torch
from click.testing import CliRunner

from lookahead.models.families import HOMES


@pytest.mark.parametrize("name", time_shapes.SHAPES)
def test_a_shape_has_a_page_and_fits_in_4_gb(name):
    with torch.device("meta"):
        model = time_shapes.shaped(time_shapes.SHAPES[name], torch.bfloat16)
    assert type(model).__name__ in HOMES
    assert sum(weight.nbytes for weight in model.parameters()) <= 4e9


def test_rows_and_experts_differ(monkeypatch):
    monkeypatch.setattr(time_shapes, "DRAWN", 4999)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_local_experts": 4, "head_dim": 16}
    settings = {"model_type": "qwen3_moe", "vocab_size": 97, "num_hidden_layers": 1, **sizes}
    weights = time_shapes.shaped(settings, torch.float32).model.layers[0].mlp.experts.gate_up_proj
    assert len(weights.flatten(0, 1).unique(dim=0)) == weights.shape[0] * weights.shape[1]
    assert 0.015 < weights.std() < 0.025


def test_the_page(monkeypatch, tmp_path):
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    monkeypatch.setitem(time_shapes.SHAPES, "GPT-2", small | heads)
    done = CliRunner().invoke(
        time_shapes.main, ["--shapes", "GPT-2", "--seconds", "0.1", "--dtype", "float32", "--out", str(tmp_path / "x")]
    )
    assert done.exit_code == 0, done.output
    assert "| GPT-2 | all |" in (tmp_path / "x.md").read_text()
    assert (tmp_path / "x.json").exists()
