"""Packed weights: the same function, the same weights to everybody who asks for them, and no more memory."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from accelerate import dispatch_model
from hypothesis import given, note, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead import LookaheadConfig
from lookahead.packing import PackedLinear, pack, unpack

DTYPES = [torch.float32, torch.bfloat16]


def small_llama(dtype: torch.dtype = torch.float32, tied: bool = True) -> LlamaForCausalLM:
    """Large enough for its layers to be packed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def logits(model, length: int = 9) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(length)[None]).logits


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to rounding."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if got.dtype == torch.float32 else 5e-2)


def packed_layers(model) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 70).map(lambda n: 8 * n + 3),
    outputs=st.integers(1, 70).map(lambda n: 8 * n + 5),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    contiguous=st.booleans(),
)
def test_a_packed_layer_computes_the_same(rows, inputs, outputs, bias, dtype, contiguous):
    note(f"{rows=} {inputs=} {outputs=} {bias=} {dtype=} {contiguous=}")
    torch.manual_seed(inputs)
    model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
    x = torch.randn(2, rows, inputs, dtype=dtype)
    x = x if contiguous else x.transpose(0, 1).contiguous().transpose(0, 1)
    weight = model[0].weight.detach().clone()
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if not bias else model[0].bias.double())
    with torch.no_grad(), mock.patch("lookahead.packing.LEAST_WEIGHTS", 0):
        got = pack(model)(x)
    assert packed_layers(model) == ["0"]
    assert got.dtype == dtype
    assert got.shape == (2, rows, outputs)
    torch.testing.assert_close(got.double(), expected, atol=1e-4 if dtype == torch.float32 else 3e-2, rtol=1e-2)
    assert torch.equal(unpack(model)[0].weight, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_everybody_else_sees_the_plain_weights(dtype, tied, tmp_path):
    model = small_llama(dtype, tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    figures = model.dtype, model.num_parameters(), model.get_memory_footprint()
    plain = logits(model)
    pack(model)
    assert len(packed_layers(model)) == 2 * 7 + 1
    packed = logits(model)
    assert_near(packed, plain)

    def holds_them(state) -> bool:
        return state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)

    assert holds_them(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert holds_them(loaded.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert packed_layers(copied) == packed_layers(model)
        assert torch.equal(logits(copied), packed)
        assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied
    assert (model.dtype, model.num_parameters(), model.get_memory_footprint()) == figures
    unpack(model)
    assert not packed_layers(model)
    assert holds_them(dict(model.state_dict()))
    assert all(weight.requires_grad for weight in model.parameters())
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_and_moved_weights_are_packed_anew(tied):
    model, other = pack(small_llama(tied=tied)), small_llama(tied=tied)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    model.load_state_dict(other.state_dict())
    assert_near(logits(model), logits(other))
    model.to(torch.bfloat16)
    assert packed_layers(model)
    model.to(torch.float16)  # has no packed form
    assert not packed_layers(model)
    model.to(torch.float32)
    assert all(weight.layout == torch.strided for weight in model.parameters())


def test_a_tied_weight_written_to_is_seen():
    model = pack(small_llama())
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1)
    packed = logits(model)
    assert_near(packed, logits(unpack(model)))


def test_no_gradient_is_lost_in_silence():
    model = pack(small_llama())
    out = model(torch.arange(9)[None], labels=torch.arange(9)[None])
    assert torch.equal(out.logits, logits(model))
    with pytest.raises(RuntimeError, match="unwrap"):
        out.loss.backward()


def test_autocast_and_other_dtypes_go_the_plain_way():
    model = small_llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain = logits(model)
        assert torch.equal(logits(pack(model)), plain)


def test_what_is_left_alone():
    model = small_llama()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = logits(adapted)
    pack(adapted)
    assert not any("base_layer" in name for name in packed_layers(adapted))
    assert any("o_proj" in name for name in packed_layers(adapted))
    assert_near(logits(adapted), expected)
    assert not packed_layers(pack(small_llama(torch.float16)))
    assert not packed_layers(pack(torch.nn.Sequential(torch.nn.Linear(16, 16))))


def test_layers_that_accelerate_drives_stay_plain():
    model = small_llama()
    expected = logits(model)
    driven = dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    pack(driven)
    assert_near(logits(driven), expected)
    hooked = [name for name, module in driven.named_modules() if hasattr(module, "_hf_hook")]
    assert "lm_head" in hooked
    assert not set(hooked) & set(packed_layers(driven))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrap_packs_and_unwrap_unpacks(dtype):
    model = small_llama(dtype)
    ids = torch.arange(9)[None]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    lookahead.wrap(model)
    assert packed_layers(model)
    if dtype == torch.float32:
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    lookahead.wrap(model, LookaheadConfig(pack_weights=False))
    assert not packed_layers(model)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected) or dtype != torch.float32
    lookahead.wrap(model, LookaheadConfig())
    assert packed_layers(lookahead.unwrap(model)) == []
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
