"""Packed weights: the same function, the same weights to everybody who asks for them, and no more memory."""

import copy
import pickle
import threading
from unittest import mock

import pytest
import torch
from accelerate import dispatch_model
from hypothesis import given, note, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import SETTINGS, tiny_model

import lookahead
from lookahead import LookaheadConfig, packing
from lookahead.packing import PackedLinear, Product, pack, unpack

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


@pytest.fixture
def products(monkeypatch):
    """Inputs of the products that packed layers have asked for."""
    inputs = []
    multiply = Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda self, input: inputs.append(input) or multiply(self, input))
    return inputs


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_architecture_computes_the_same(name):
    model = tiny_model(name)
    plain = logits(model)
    with mock.patch("lookahead.packing.LEAST_WEIGHTS", 0):
        assert_near(logits(pack(model)), plain)
    assert packed_layers(model)
    assert torch.equal(logits(unpack(model)), plain)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12),
    outputs=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_layers_packed_together_give_each_its_own(calls, outputs, bias, dtype):
    """Whichever is called, in whatever order, with whatever of two inputs."""
    note(f"{calls=} {outputs=} {bias=} {dtype=}")
    torch.manual_seed(len(calls))
    names = ("q_proj", "k_proj", "v_proj")
    layers = [torch.nn.Linear(40, n, bias=bias, dtype=dtype) for n in outputs]
    model = torch.nn.ModuleDict(dict(zip(names, layers, strict=True)))
    inputs = [torch.randn(2, 5, 40, dtype=dtype) for _ in range(2)]
    with torch.no_grad(), mock.patch("lookahead.packing.LEAST_WEIGHTS", 0):
        expected = [[layer(x) for x in inputs] for layer in layers]
        pack(model)
        assert len({layer._product for layer in layers}) == 1
        for layer, x in calls:
            torch.testing.assert_close(layers[layer](inputs[x]), expected[layer][x], atol=2e-2, rtol=2e-2)


def test_layers_given_the_same_input_are_one_product(products):
    model = pack(small_llama())
    logits(model)
    assert len(products) == 2 * 4 + 1
    products.clear()
    model(torch.arange(9)[None])  # with gradients wanted
    assert len(products) == 2 * 4 + 1
    product = model.model.layers[0].self_attn.q_proj._product
    assert product._parts == packing._NO_PARTS  # nothing is kept beyond the pass


def test_threads_share_layers_packed_together():
    model = pack(small_llama())
    expected = {length: logits(model, length) for length in range(2, 12)}
    got: dict[int, list[torch.Tensor]] = {length: [] for length in expected}

    def compute(length: int) -> None:
        got[length] += [logits(model, length) for _ in range(10)]

    threads = [threading.Thread(target=compute, args=(length,)) for length in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, results in got.items():
        assert len(results) == 10
        assert all(torch.equal(result, expected[length]) for result in results), f"{length=}"


def test_a_bias_that_is_changed_or_replaced_is_seen():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 256) for name in ("q_proj", "k_proj", "v_proj")})
    pack(model)
    x, q_proj, k_proj = torch.randn(3, 256), model["q_proj"], model["k_proj"]
    with torch.no_grad():
        before = q_proj(x), k_proj(x)
        k_proj.bias += 1
        q_proj.bias = torch.nn.Parameter(q_proj.bias + 2)
        torch.testing.assert_close(q_proj(x), before[0] + 2)
        torch.testing.assert_close(k_proj(x), before[1] + 1)


def test_a_packed_weight_reads_as_the_plain_one_and_is_not_written_to():
    model = small_llama()
    before = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    weight = pack(model).model.layers[0].self_attn.k_proj.weight
    assert (weight.shape, weight.dtype, weight.device) == (before.shape, before.dtype, before.device)
    assert torch.equal(weight, before)
    assert torch.equal(weight.data.double() @ before.double().T, before.double() @ before.double().T)
    assert weight.tolist() == weight.detach().cpu().numpy().tolist() == before.tolist()
    assert torch.equal(before.new_empty(before.shape).copy_(weight), before)
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 0


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.copy_(weight.clone()),
        lambda weight: weight.data.zero_(),
        lambda weight: setattr(weight, "data", torch.zeros(128, 256)),
        lambda weight: weight.data.__setitem__((slice(None), 3), 5.0),
        lambda weight: weight.__setitem__(slice(3, 9), 1.0),
        lambda weight: weight.__setitem__(weight > 0, 1.0),
        lambda weight: weight.data[3].copy_(torch.ones(256)),
        lambda weight: weight.view(-1).mul_(2),
        lambda weight: weight.T.zero_(),
        lambda weight: weight.chunk(2)[0].zero_(),
        lambda weight: torch._foreach_mul_([torch.ones(1), weight], -1.0),
        lambda weight: torch.mul(weight, 2, out=weight),
        lambda weight: torch.nn.utils.vector_to_parameters(torch.ones(128 * 256), [weight]),
        lambda weight: torch.nn.init.normal_(weight),
    ],
)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_packed_weight_is_not_written_to(write, grouped):
    attention = small_llama().model.layers[0].self_attn
    layer = attention.k_proj
    with mock.patch("lookahead.packing.LEAST_WEIGHTS", 0):
        pack(attention if grouped else torch.nn.ModuleList([layer]))
    assert len(layer._product.rows) == (3 if grouped else 1)
    before = layer.weight.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="unwrap"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer, other: layer.register_parameter("weight", other),
        lambda layer, other: layer._parameters.__setitem__("weight", other),
        lambda layer, other: torch.utils.swap_tensors(layer.weight, other),
    ],
)
def test_a_weight_put_into_its_place_is_multiplied_with(replace):
    model = small_llama()
    layer, other = model.model.layers[0].mlp.gate_proj, torch.nn.Parameter(torch.randn(320, 256), requires_grad=False)
    expected, input = other.clone(), torch.randn(3, 256)
    pack(model)
    with torch.no_grad():
        there = {"weight": torch.zeros(320, 256)}
        assert not torch.func.functional_call(layer, there, input).any()
        replace(layer, other)
        assert_near(layer(input), input @ expected.T)


def test_an_optimizer_goes_on_after_a_wrap():
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    parameters, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    unpack(pack(model))
    assert all(parameters[name] is weight for name, weight in model.named_parameters())
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    assert not any(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_what_is_frozen_meanwhile_stays_frozen():
    model = pack(small_llama())
    assert model.num_parameters(only_trainable=True) == model.num_parameters()
    model.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0
    model.model.layers[1].requires_grad_(True)
    copied = copy.deepcopy(model)
    for of in (unpack(model), unpack(copied)):
        assert not any(weight.requires_grad for weight in of.model.layers[0].parameters())
        assert all(weight.requires_grad for weight in of.model.layers[1].parameters())


def test_unpacked_in_inference_mode_it_can_be_trained():
    model = pack(small_llama())
    with torch.inference_mode():
        unpack(model)
    model.load_state_dict(small_llama().state_dict())
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_one_layer_under_two_names():
    layer = torch.nn.Linear(256, 256)
    model, input = torch.nn.ModuleDict({"q_proj": layer, "k_proj": layer}), torch.randn(3, 256)
    with torch.no_grad():
        expected = layer(input)
        pack(model)
        assert_near(model["q_proj"](input), expected)
        assert_near(model["k_proj"](input), expected)


def test_an_input_written_to_in_between_is_multiplied_anew(products):
    mlp, input = small_llama().model.layers[0].mlp, torch.randn(3, 256)
    with torch.no_grad():
        expected = mlp.gate_proj(input), mlp.up_proj(-input)
        pack(mlp)
        assert_near(mlp.gate_proj(input), expected[0])
        assert_near(mlp.up_proj(input.neg_()), expected[1])
    assert len(products) == 2


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


@pytest.mark.parametrize("inference", [False, True])
def test_a_tied_weight_written_to_without_a_trace_is_seen_by_the_next_call(inference):
    ids = torch.arange(9)[None]
    with torch.inference_mode(inference):
        model = lookahead.wrap(small_llama())
        before = model.generate(ids, max_new_tokens=20, do_sample=False)
        weight = model.model.embed_tokens.weight
        weight.data[before[0, 12]] *= -1
        after = model.generate(ids, max_new_tokens=20, do_sample=False)
        assert not torch.equal(after, before)
        weight.data = weight.data.roll(1, 0)
        last = model.generate(ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(last, lookahead.unwrap(model).generate(ids, max_new_tokens=20, do_sample=False))
    assert not torch.equal(last, after)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_replaced_weight_is_seen(compiled):
    model = pack(small_llama())
    run = torch.compile(model, backend="eager") if compiled else model
    before = logits(run)
    q_proj = model.model.layers[0].self_attn.q_proj
    q_proj.weight = torch.nn.Parameter(-q_proj.weight)
    model.set_input_embeddings(torch.nn.Embedding(300, model.config.hidden_size))
    model.tie_weights()
    assert len(packed_layers(model)) == 2 * 7 + 1
    packed = logits(run)
    assert not torch.allclose(packed, before)
    assert_near(packed, logits(unpack(model)))
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_no_gradient_is_lost_in_silence():
    model = pack(small_llama())
    out = model(torch.arange(9)[None], labels=torch.arange(9)[None])
    assert torch.equal(out.logits, logits(model))
    with pytest.raises(RuntimeError, match="unwrap"):
        out.loss.backward()
    layer, input = torch.nn.Linear(256, 512), torch.randn(3, 256)
    head = torch.nn.Linear(512, 2)
    with pytest.raises(RuntimeError, match="unwrap"):
        head(pack(layer)(input)).sum().backward()
    layer.requires_grad_(False)
    head(layer(input)).sum().backward()
    assert head.weight.grad is not None


def test_autocast_and_other_dtypes_go_the_plain_way():
    model = small_llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain = logits(model)
        assert torch.equal(logits(pack(model)), plain)


def test_what_is_exported_has_the_plain_weights(tmp_path):
    layer, input = torch.nn.Linear(256, 512), torch.ones(3, 256)
    with torch.no_grad():
        expected = layer(input)
        torch.export.save(torch.export.export(pack(layer), (input,)), tmp_path / "exported.pt2")
        unpack(layer)
        packing._products[0] = pack(torch.nn.Linear(256, 512))._product  # as another process may have it
        torch.testing.assert_close(torch.export.load(tmp_path / "exported.pt2").module()(input), expected)


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
