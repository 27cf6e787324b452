"""The ballast script: a bigger model that computes the same function, and its errors."""

import ballast as script
import pytest
import torch
from ballast import SHAPES, ballast, departure
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from zoo import tiny_model

from lookahead import DEMO_MODEL

IDS = torch.tensor([[5, 11, 3, 60, 7, 7, 42, 19, 80, 2, 33, 91]])
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def trained(seed=0, **changes):
    """A random Llama with norms, biases and an eps that matter."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = tiny_model("llama", seed, **{**sizes, "rms_norm_eps": 1e-2, "initializer_range": 0.04, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def size_of(model):
    config = model.config
    return {
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
    }


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def greedy(model, ids=IDS):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)[0].tolist()


@pytest.mark.parametrize("layers", [3, 5, 8])
def test_depth_alone_is_exact(layers):
    model = trained(tie_word_embeddings=True)
    big = ballast(model, **{**size_of(model), "layers": layers})
    assert len(big.model.layers) == layers
    assert torch.equal(logits(big), logits(model))
    writes = [layer.self_attn.o_proj.weight.any().item() for layer in big.model.layers]
    assert sum(writes) == len(model.model.layers)
    assert writes[-1], "the last trained layer is the last layer: the first layers alone are not the model"


@st.composite
def growths(draw):
    """Draw settings of a trained model, and a size that it fits into."""
    head_dim = draw(st.sampled_from([2, 8]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    new_group = draw(st.integers(1, 5))
    new_kv_heads = kv_heads * -(-group // new_group) + draw(st.integers(0, 2))
    heads, new_heads = kv_heads * group, new_kv_heads * new_group
    hidden = heads * draw(st.integers(2, 6))
    new_hidden = -(-hidden // new_heads) * new_heads + new_heads * draw(st.integers(0, 6))
    layers, intermediate = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    changes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    size = {
        "hidden_size": new_hidden,
        "layers": layers + draw(st.integers(0, 3)),
        "intermediate_size": intermediate + draw(st.integers(0, 30)),
        "heads": new_heads,
        "kv_heads": new_kv_heads,
    }
    return changes, size


@settings(max_examples=60, deadline=None)
@given(growth=growths(), seed=st.integers(0, 99))
def test_same_function(growth, seed):
    changes, size = growth
    model = trained(seed, **changes)
    big = ballast(model, **size, seed=seed)
    assert size_of(big) == size
    assert departure(big, model, IDS) < 1e-5
    assert greedy(big) == greedy(model)
    with torch.no_grad():
        states = big(IDS, output_hidden_states=True).hidden_states
    assert len(states) == size["layers"] + 1
    for state in states:
        assert not state[..., model.config.hidden_size :].any()
        assert state[..., : model.config.hidden_size].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "new_heads", "new_kv_heads"),
    [(4, 2, 12, 4), (4, 2, 12, 6), (4, 2, 8, 8), (6, 2, 8, 4), (4, 1, 6, 2), (4, 4, 12, 4)],
)
def test_heads_keep_their_kv_head(heads, kv_heads, new_heads, new_kv_heads):
    model = trained(num_attention_heads=heads, num_key_value_heads=kv_heads)
    big = ballast(model, 48, 2, 48, heads=new_heads, kv_heads=new_kv_heads)
    small, large = model.model.layers[0].self_attn, big.model.layers[0].self_attn

    def heads_of(projection):
        return projection.weight[:, :24].unflatten(0, (-1, 8))

    queries, keys = heads_of(large.q_proj), heads_of(large.k_proj)
    for head, query in enumerate(heads_of(small.q_proj)):
        (place,) = [j for j in range(new_heads) if torch.equal(queries[j], query)]
        key = heads_of(small.k_proj)[head // (heads // kv_heads)]
        assert torch.equal(keys[place // (new_heads // new_kv_heads)], key)


def test_ballast_is_neither_zero_nor_tiny():
    """Weights that read the hidden state have an ordinary scale in extra layers, rows and columns."""
    model = trained()
    big = ballast(model, 96, 4, 192)
    for layer in big.model.layers:
        for name, module in layer.named_modules():
            if name.endswith(READERS):
                extra = module.weight[-32:]
                assert extra.abs().min() > torch.finfo(extra.dtype).tiny
                assert 0.03 < extra.std() < 0.05
                assert 0.03 < module.weight[:, 24:].std() < 0.05
    assert not torch.equal(big.model.layers[0].mlp.up_proj.weight, big.model.layers[2].mlp.up_proj.weight)


def test_seed():
    model = trained()
    one, same, other = (ballast(model, 48, 3, 64, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [True, False])
def test_dtype_and_tying_are_kept(tied):
    model = trained(tie_word_embeddings=tied).to(torch.bfloat16)
    big = ballast(model, 96, 2, 48, max_position_embeddings=512)
    assert {parameter.dtype for parameter in big.parameters()} == {torch.bfloat16}
    assert (big.lm_head.weight is big.model.embed_tokens.weight) is tied
    assert torch.equal(big.model.norm.weight[:24], model.model.norm.weight / 2), "a power of four is exact"
    assert (big.config.max_position_embeddings, model.config.max_position_embeddings) == (512, 256)
    assert not big.training


def test_shapes_have_the_parameters_of_their_names():
    def parameters(hidden_size, layers, intermediate_size, heads, kv_heads, vocabulary=4096):
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=intermediate_size, num_key_value_heads=kv_heads, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM(config).num_parameters()

    counts = {name: parameters(**shape) for name, shape in SHAPES.items()}
    for name, count in (("360M", 360e6), ("1B", 1e9), ("3B", 3e9)):
        assert parameters(**SHAPES[f"smollm2-{name}"], vocabulary=49152) == pytest.approx(count, rel=0.04)
    assert counts["80M"] == pytest.approx(80e6, rel=0.02)
    assert counts["135M"] == pytest.approx(135e6, rel=0.02)
    assert counts["360M"] == pytest.approx(360e6, rel=0.02)
    assert counts["1B"] == pytest.approx(1e9, rel=0.02)
    llama_3_vocabulary = 2 * 128256 * 4096
    assert counts["8B"] - 4096 * 4096 + llama_3_vocabulary == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 16}, "hidden_size=16 is less than the model's 24"),
        ({"hidden_size": 0, "heads": None}, "hidden_size=0 is less"),
        ({"layers": 1}, "layers=1 is less"),
        ({"intermediate_size": 47}, "intermediate_size=47 is less"),
        ({"heads": 2}, "heads=2 is less"),
        ({"kv_heads": 1}, "kv_heads=1 is less"),
        ({"max_position_embeddings": 255}, "max_position_embeddings=255 is less"),
        ({"hidden_size": 36, "heads": None}, "hidden_size=36 is not a multiple of 8.* or give heads"),
        ({"hidden_size": 26}, "hidden_size=26 is not a multiple of 4"),
        ({"hidden_size": 40, "heads": 5, "kv_heads": None}, "heads=5 is not a multiple of 2.* or give kv_heads"),
        ({"hidden_size": 40, "heads": 5, "kv_heads": 3}, "heads=5 is not a multiple of 3"),
        (
            {"heads": 6, "kv_heads": 3, "trained": {"num_attention_heads": 6}},
            "kv_heads=3 are too few: with 2 heads to a KV head instead of 3, the trained 2 take 4; give as many",
        ),
        (
            {
                "max_position_embeddings": 512,
                "trained": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            },
            "rotary embedding of type 'dynamic': leave it at 256",
        ),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    change = dict(change)
    model = trained(**change.pop("trained", {}))
    size = {**size_of(model), **change}
    with pytest.raises(ValueError, match=message):
        ballast(model, **size)


@pytest.mark.parametrize("model_type", ["mistral", "gpt2"])
def test_other_models_are_refused(model_type):
    with pytest.raises(ValueError, match=f"{model_type}.*give a LlamaForCausalLM"):
        ballast(tiny_model(model_type), 64, 4, 96)


def run(*arguments):
    return CliRunner().invoke(script.main, [str(argument) for argument in arguments])


SMALL = ("--hidden-size", 320, "--layers", 7, "--intermediate-size", 800, "--kv-heads", 5)


def test_command_line(tmp_path):
    out = tmp_path / "big"
    result = run(*SMALL, "--dtype", "float32", "--context", 4096, "--out", out)
    assert result.exit_code == 0, result.output
    assert "logits differ" in result.output
    big, model = AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    model.float()
    assert f"{big.num_parameters():,}, torch.float32" in result.output
    assert big.config.max_position_embeddings == 4096
    ids = AutoTokenizer.from_pretrained(out)("def main():\n", return_tensors="pt").input_ids
    assert greedy(big, ids) == greedy(model, ids)
    again = run(*SMALL, "--out", out)
    assert again.exit_code == 2
    assert "is not empty: name a new folder" in again.output


def test_nothing_is_written_unless_the_function_is_the_same(tmp_path, monkeypatch):
    def altered(model, **size):
        big = ballast(model, **size)
        with torch.no_grad():
            big.model.layers[-1].self_attn.o_proj.weight.normal_(0, 0.02)
        return big

    monkeypatch.setattr(script, "ballast", altered)
    result = run(*SMALL, "--dtype", "float32", "--out", tmp_path / "big")
    assert result.exit_code == 1
    assert "the function is not the same, and nothing was written" in result.output
    assert not (tmp_path / "big").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --size, or --hidden-size and --layers and --intermediate-size"),
        (("--hidden-size", 320, "--layers", 7), "give --size, or --intermediate-size"),
        (("--size", "80M", "--layers", 1), "layers=1 is less than the model's"),
    ],
)
def test_command_line_errors(options, message, tmp_path):
    result = run(*options, "--out", tmp_path / "big")
    assert result.exit_code != 0
    assert message in result.output
    assert not (tmp_path / "big").exists()
