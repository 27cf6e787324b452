"""Products by our kernel equal the formula in passes of the decoding loop; elsewhere they are the model's own."""

import copy
import gc
import multiprocessing
import pickle
import threading
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from hypothesis import given, note, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import SETTINGS, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.cpu import gemm, native, products
from lookahead.cpu.products import DecodingLinear, Format, Linear, installed, served_layers
from lookahead.decoding_pass import DecodingPass
from lookahead.passes.graphs import StepGraphs
from ngram_pool import GuessTree

DTYPES = [torch.float32, torch.bfloat16]
GREEDY = {"max_new_tokens": 20, "do_sample": False}
ON_CPU = {"model": "cpu", "lm_head": "cpu"}


def small_llama(dtype: torch.dtype = torch.float32, tied: bool = True) -> LlamaForCausalLM:
    """Large enough for its layers to be multiplied by our kernel."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def kernels_pass():
    """What a pass of the decoding loop runs in."""
    return DecodingPass(splits_attention=False, uses_kernels=True)


_stack = ExitStack()


@pytest.fixture(autouse=True)
def _ends_passes():
    with _stack:
        yield


def install(model) -> None:
    """Until the test ends, the model's layers are what they are in a pass."""
    _stack.enter_context(installed(served_layers(model)))


def logits(model, length: int = 9, in_a_pass: bool = False) -> torch.Tensor:
    with torch.no_grad():
        if not in_a_pass:
            return model(torch.arange(length)[None]).logits
        with kernels_pass():
            return model(torch.arange(length)[None]).logits


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to rounding."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if got.dtype == torch.float32 else 5e-2)


@pytest.fixture
def multiplied(monkeypatch):
    """Numbers of weights that our kernel was given, a call each."""
    calls = []
    multiply = gemm.multiply
    monkeypatch.setattr(
        gemm,
        "multiply",
        lambda input, linears: calls.append(len(linears)) or multiply(input, linears),
    )
    return calls


def test_there_is_a_kernel_for_each_dtype():
    assert set(products.kernels()) == set(DTYPES), native.why_missing()


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 40) | st.sampled_from([63, 65, 90]),
    strides=st.integers(1, 9) | st.sampled_from([24, 49, 96]),  # tiles go along long inputs part by part
    outputs=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    with_bias=st.booleans(),
    scaled=st.sampled_from(["", "by output", "by group"]),
    strided=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_products_are_what_the_formula_says(rows, strides, outputs, with_bias, scaled, strided, dtype, seed):
    note(f"{rows=} {strides=} {outputs=} {with_bias=} {scaled=} {strided=} {dtype=} {seed=}")
    torch.manual_seed(seed)
    inputs = strides * products.STRIDE[dtype]
    linears = [random_linear(n, inputs, dtype, with_bias, scaled) for n in outputs]
    input = (
        torch.randn(inputs, 1, rows).to(dtype).permute(1, 2, 0) if strided else torch.randn(1, rows, inputs).to(dtype)
    )
    row = seed % max(rows, 1)
    ones = gemm.multiply(input[:, row : row + 1], linears)
    for got, one, linear in zip(gemm.multiply(input, linears), ones, linears, strict=True):
        assert torch.equal(got[:, row : row + 1], one)  # a row is rounded as it is alone
        scales, weight = 1, linear.weight.double()
        if scaled == "by output":
            scales = linear.scales.double()
        elif scaled:  # rounded to a weight of the input's dtype
            weight = (linear.weight.unflatten(1, (linear.scales.shape[1], -1)) * linear.scales[..., None]).flatten(1)
            weight = weight.to(dtype).double()
        added = 0 if linear.bias is None else linear.bias.double()
        product = input.double() @ weight.T * scales
        assert got.shape == (1, rows, len(linear.weight))
        assert got.dtype == dtype
        error = 1e-7 * (4 + inputs) * (input.double().abs() @ weight.abs().T * scales + abs(added))
        if dtype == torch.bfloat16:  # half of the last bit of what comes out; with scales of outputs, of each result
            error += 2**-8 * ((product + added).abs() + (2 * product.abs() if scaled == "by output" else 0))
        assert ((got.double() - product - added).abs() <= error).all()


def test_torch_and_our_kernel_take_the_matrix_unit_in_turn():
    """Each sets it up as it wants it. torch takes it for products in bf16 where there is one."""
    weight, input, few = (torch.randn(n, 64).bfloat16() for n in (96, 200, 5))
    theirs, ours = torch.nn.functional.linear(input, weight), gemm.multiply(few, [Linear(weight)])[0]
    for _ in range(20):
        assert torch.equal(gemm.multiply(few, [Linear(weight)])[0], ours)
        assert torch.equal(torch.nn.functional.linear(input, weight), theirs)


def random_linear(outputs, inputs, dtype, with_bias, scaled):
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    if not scaled:
        return Linear(torch.randn(outputs, inputs).to(dtype), None, bias)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    if scaled == "by output":
        return Linear(weight, (torch.rand(outputs) / 128).to(dtype), bias, format=Format.BYTES)
    strides = inputs // products.STRIDE[dtype]
    divisors = [n for n in (1, 2, 3, strides) if strides % n == 0]
    groups = divisors[torch.randint(len(divisors), ())]
    return Linear(weight, torch.rand(outputs, groups) / 128, bias, format=Format.GROUPED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_in_its_row(dtype):
    input, weight = torch.randn(14, 64).to(dtype), torch.randn(70, 64).to(dtype)
    input[3, 5] = torch.nan
    input[9, 0] = torch.inf
    (got,) = gemm.multiply(input, [Linear(weight)])
    assert got[3].isnan().all()
    assert not got[9].isfinite().any()
    assert got[[*range(3), *range(4, 9), *range(10, 14)]].isfinite().all()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_architecture_computes_the_same(name, monkeypatch):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 0)
    model = tiny_model(name)
    plain = logits(model)
    install(model)
    assert torch.equal(logits(model), plain), "outside of a pass, the layers are torch's"
    assert_near(logits(model, in_a_pass=True), plain)
    _stack.close()
    assert not any(isinstance(module, DecodingLinear) for module in model.modules())


@pytest.mark.parametrize("slow", [(), (torch.bfloat16,)])
def test_prompts_are_multiplied_where_torch_is_slow(slow, multiplied, monkeypatch):
    monkeypatch.setattr(gemm, "SLOW_IN_TORCH", slow)
    model = small_llama(torch.bfloat16)
    plain = logits(model, gemm.MAX_ROWS + 1)
    install(model)
    assert_near(logits(model, gemm.MAX_ROWS + 1, in_a_pass=True), plain)
    assert bool(multiplied) == bool(slow)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(gemm.MANY_ROWS - 2, gemm.MANY_ROWS + 70),
    strides=st.integers(1, 8),
    outputs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    bias=st.booleans(),
    at_once=st.sampled_from([1, 1000, gemm.AT_ONCE]),
    seed=st.integers(0, 99),
)
def test_many_rows_are_rounded_once(rows, strides, outputs, bias, at_once, seed):
    note(f"{rows=} {strides=} {outputs=} {bias=} {at_once=} {seed=}")
    torch.manual_seed(seed)
    input = torch.randn(1, rows, 32 * strides).bfloat16()
    linears = [
        Linear(torch.randn(n, 32 * strides).bfloat16(), None, torch.randn(n).bfloat16() if bias else None)
        for n in outputs
    ]
    with mock.patch.multiple(gemm, SLOW_IN_TORCH=(torch.bfloat16,), AT_ONCE=at_once):
        got = gemm.multiply(input, linears)
    for linear, product in zip(linears, got, strict=True):
        exact = input.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        assert product.shape == exact.shape
        assert product.dtype == torch.bfloat16
        rounding = exact.abs() * 2**-8 + 1e-5 * (32 * strides)  # half a unit of bf16, and sums in float32
        assert ((product.double() - exact).abs() <= rounding).all()


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=12),
    outputs=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    inference=st.booleans(),
)
def test_layers_get_each_its_own(calls, outputs, bias, dtype, inference):
    """Whichever is called, in whatever order, with whatever of two inputs, its weight replaced meanwhile or not."""
    note(f"{calls=} {outputs=} {bias=} {dtype=} {inference=}")
    torch.manual_seed(len(calls))
    names = ("q_proj", "k_proj", "v_proj")
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(64, n, bias=bias, dtype=dtype) for name, n in zip(names, outputs, strict=True)}
    )
    inputs = [torch.randn(2, 5, 64, dtype=dtype) for _ in range(2)]
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mock.patch.object(products, "MIN_WEIGHTS", 0):
        layers = served_layers(model)
    with mode, kernels_pass(), installed(layers):
        for number, x, replaced in calls:
            layer = model[names[number]]
            if replaced:
                with torch.inference_mode(False):
                    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
            x = inputs[x]
            if replaced:
                x = x + 1
            expected = functional.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), expected, atol=5e-2, rtol=2e-2)


def test_each_layer_is_one_product(multiplied):
    model = small_llama()
    install(model)
    logits(model, in_a_pass=True)
    assert multiplied == [1] * 11, "two layers of each attention are too small"


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_written_to_in_between_is_multiplied_anew(inference):
    mlp, input = small_llama().model.layers[0].mlp, torch.randn(3, 256)
    install(mlp)
    mlp.up_proj.register_forward_pre_hook(lambda layer, inputs: inputs[0].neg_())
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode, kernels_pass():
        input = input.clone()
        expected = functional.linear(input, mlp.gate_proj.weight), functional.linear(-input, mlp.up_proj.weight)
        assert_near(mlp.gate_proj(input), expected[0])
        assert_near(mlp.up_proj(input), expected[1])


def test_one_layer_under_two_names():
    layer = torch.nn.Linear(256, 256)
    model, input = torch.nn.ModuleDict({"q_proj": layer, "k_proj": layer}), torch.randn(3, 256)
    install(model)
    with torch.no_grad(), kernels_pass():
        expected = functional.linear(input, layer.weight, layer.bias)
        assert_near(model["q_proj"](input), expected)
        assert_near(model["k_proj"](input), expected)


def test_threads_share_layers():
    model = small_llama()
    install(model)
    expected = {length: logits(model, length, in_a_pass=length % 2 == 0) for length in range(2, 12)}
    got: dict[int, list[torch.Tensor]] = {length: [] for length in expected}

    def compute(length: int) -> None:
        got[length] += [logits(model, length, in_a_pass=length % 2 == 0) for _ in range(10)]

    threads = [threading.Thread(target=compute, args=(length,)) for length in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, results in got.items():
        assert len(results) == 10
        assert all(torch.equal(result, expected[length]) for result in results), f"{length=}"


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = torch.arange(9)[None]
    hidden = model.model(ids).last_hidden_state
    aside = functional.linear(hidden, model.lm_head.weight).logsumexp(-1).sum()  # as trl's GRPOTrainer takes them
    (model(ids, labels=ids).loss + aside).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_the_unwrapped_model(training, tied):
    model = small_llama(tied=tied).train(training)
    expected = gradients(model)
    lookahead.wrap(model)
    with mock.patch.object(model, "training", False):
        model.generate(torch.arange(9)[None], **GREEDY)
    got = gradients(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_an_optimizer_made_meanwhile_goes_on_after_the_wrap():
    model, plain = small_llama(), small_llama()
    before = dict(model.named_parameters())
    lookahead.wrap(model)
    optimizers = [torch.optim.AdamW(it.parameters(), 0.01) for it in (model, plain)]
    for wraps in (True, False):
        for it, optimizer in zip((model, plain), optimizers, strict=True):
            gradients(it)
            optimizer.step()
        if wraps:
            model.to("cpu")
            model.generate(torch.arange(9)[None], **GREEDY)
            lookahead.unwrap(model)
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert got is before[name]
        assert torch.equal(got, expected), name


WRITES = [
    lambda weight, other: weight.data.copy_(other),
    lambda weight, other: setattr(weight, "data", other),
    lambda weight, other: weight.data.__setitem__(slice(3, 9), 1.0),
    lambda weight, other: weight.detach().view(-1).mul_(-1),
    lambda weight, other: weight.detach().numpy().fill(0.01),
    lambda weight, other: torch._foreach_mul_([weight], -1.0),
    lambda weight, other: torch.utils.swap_tensors(weight, torch.nn.Parameter(other, requires_grad=False)),
]


@pytest.mark.parametrize("write", WRITES)
def test_whatever_is_written_to_a_weight_is_seen_by_the_next_call(write):
    model, ids = small_llama(), torch.arange(9)[None]
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=0))
    model.generate(ids, **GREEDY)
    for layer in (model.lm_head, model.model.layers[0].mlp.gate_proj, model.model.layers[1].self_attn.k_proj):
        with torch.no_grad():
            write(layer.weight, torch.randn_like(layer.weight))
        got = model.generate(ids, **GREEDY)
        with mock.patch.object(model, "lookahead", copy.copy(model.lookahead)):
            expected = copy.deepcopy(lookahead.unwrap(copy.deepcopy(model))).generate(ids, **GREEDY)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_nobody_else_sees_a_difference(dtype, tied, tmp_path):
    model = small_llama(dtype, tied)
    weights = dict(model.named_parameters())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plain = logits(model)
    lookahead.wrap(model, pool=NgramPool(0.01))
    in_a_pass = logits(model, in_a_pass=True)
    assert_near(in_a_pass, plain)

    def is_as_before(of) -> bool:
        state = of.state_dict()
        return state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)

    assert torch.equal(logits(model), plain)
    assert is_as_before(model)
    model.save_pretrained(tmp_path)
    assert is_as_before(LlamaForCausalLM.from_pretrained(tmp_path))
    torch.save(model, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), whole):
        assert is_as_before(copied)
        assert torch.equal(logits(copied, in_a_pass=True), in_a_pass)
        assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied
    lookahead.unwrap(model)
    assert dict(model.named_parameters()).items() == weights.items()
    assert all(weight is weights[name] for name, weight in model.named_parameters())
    assert is_as_before(model)
    assert torch.equal(logits(model), plain)


def send_text(model, sender) -> None:
    sender.send(model.generate(torch.arange(9)[None], **GREEDY).tolist())


def test_a_spawned_process_takes_a_wrapped_model():
    model = lookahead.wrap(small_llama(), pool=NgramPool(0.01))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=send_text, args=(model, sender))
    process.start()
    sender.close()
    assert receiver.poll(120)
    assert receiver.recv() == lookahead.unwrap(model).generate(torch.arange(9)[None], **GREEDY).tolist()
    process.join(60)


def test_adapters_are_added_trained_and_merged():
    """By PEFT, on a wrapped model."""
    model, plain, ids = small_llama(), small_llama(), torch.arange(9)[None]
    lookahead.wrap(model)
    adapted: list = []
    expected: list[dict] = []
    for it in (model, plain):
        torch.manual_seed(1)
        adapted.append(get_peft_model(it, LoraConfig(target_modules=["q_proj", "gate_proj"], init_lora_weights=False)))
        adapted[-1].train()(ids, labels=ids).loss.backward()
        expected.append({name: weight.grad for name, weight in adapted[-1].named_parameters() if weight.requires_grad})
        adapted[-1].eval()
    assert expected[0]
    assert all(torch.equal(expected[0][name], expected[1][name]) for name in expected[1])
    texts = [it.generate(input_ids=ids, **GREEDY) for it in adapted]
    assert torch.equal(*texts)
    merged = [it.merge_and_unload() for it in adapted]
    states = [it.state_dict() for it in merged]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert torch.equal(*(it.generate(ids, **GREEDY) for it in merged))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("offload", [cpu_offload, lambda model: dispatch_model(model, ON_CPU, force_hooks=True)])
def test_layers_whose_weights_accelerate_brings(offload, before, multiplied):
    model, ids = small_llama(tied=False), torch.arange(9)[None]
    expected = model.generate(ids, **GREEDY)
    if before:
        offload(model)
    lookahead.wrap(model)
    if not before:
        model.generate(ids, **GREEDY)
        offload(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    lookahead.unwrap(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_what_the_kernel_does_not_take_is_torchs(multiplied):
    model = small_llama()
    expected = logits(model)
    install(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, in_a_pass=True)
    logits(small_llama(torch.float16), in_a_pass=True)
    with DecodingPass(splits_attention=False, uses_kernels=True):
        model(torch.arange(9)[None])  # gradients are wanted
    with torch.no_grad(), DecodingPass(splits_attention=False, uses_kernels=False):
        assert torch.equal(model(torch.arange(9)[None]).logits, expected)
    assert not multiplied


def test_code_that_a_user_compiles_has_torchs_products(multiplied):
    """Wherever it is traced and run. It cannot be traced through ours."""
    mlp, input = small_llama().model.layers[0].mlp, torch.randn(1, 3, 256)
    torch.compiler.reset()
    with torch.no_grad(), kernels_pass():
        expected = mlp(input)
        install(mlp)
        assert torch.equal(torch.compile(mlp, backend="eager", fullgraph=True)(input), expected)
        assert not multiplied
        mlp(input)
    assert multiplied
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_setting_turns_them_on_and_off(dtype, multiplied):
    model, ids = small_llama(dtype), torch.arange(9)[None]
    # So that the model's own code reads the prompt.
    embedded = GREEDY | {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    expected = model.generate(**embedded)
    for setting in (True, False, True):
        lookahead.wrap(model, LookaheadConfig(cpu_kernels=setting))
        multiplied.clear()
        got = model.generate(**embedded)
        assert bool(multiplied) == setting
        assert torch.equal(got, expected) or dtype != torch.float32
        assert ("kernels: lookahead's" in model.lookahead.report()) == setting
    lookahead.unwrap(model)
    multiplied.clear()
    assert torch.equal(model.generate(**embedded), expected)
    assert not multiplied


def test_a_kernel_that_computes_something_else_is_found_by_the_probe(monkeypatch):
    def wrong(input, linears, multiply=gemm.multiply):
        return [product * 1.01 for product in multiply(input, linears)]

    monkeypatch.setattr(gemm, "multiply", wrong)
    model, ids = small_llama(), torch.arange(9)[None]
    expected = model.generate(ids, **GREEDY)
    lookahead.wrap(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert "lookahead's kernels: custom masks, position_ids or cache are not honoured" in model.lookahead.report()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_wrapped_model_is_freed_as_soon_as_nobody_holds_it(graphs):
    """Without the collector of cycles, which does not know how much memory hangs on one."""
    gc.disable()
    try:
        for number in range(2):  # generate() itself keeps something of the first one
            model = lookahead.wrap(small_llama())
            if graphs:
                model.lookahead.graphs = StepGraphs(model)
            model.generate(torch.arange(3, 9)[None], max_new_tokens=8, do_sample=False)
            held = [weakref.ref(model), *map(weakref.ref, model.parameters())]
            del model
            assert number == 0 or not any(reference() is not None for reference in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_no_module_use_the_kernel_in_the_decoding_loop(multiplied, dtype, with_bias):
    torch.manual_seed(0)
    input, weight = torch.randn(3, 256, dtype=dtype), torch.randn(300, 256, dtype=dtype)
    bias = torch.randn(300, dtype=dtype) if with_bias else None
    expected = functional.linear(input, weight, bias)
    assert torch.equal(gemm.linear(input, weight, bias), expected)
    with DecodingPass(splits_attention=False, uses_kernels=False):
        assert torch.equal(gemm.linear(input, weight, bias), expected)
    assert not multiplied
    with torch.no_grad(), DecodingPass(splits_attention=False, uses_kernels=True):
        assert_near(gemm.linear(input, weight, bias), expected)
        assert multiplied == [1]
        assert torch.equal(gemm.linear(input, weight[:9], None), functional.linear(input, weight[:9]))
        assert torch.equal(gemm.linear(input.double(), weight.double()), input.double() @ weight.double().T)
    assert multiplied == [1]


@pytest.mark.parametrize("uses_kernels", [False, True])
def test_sources_compute_with_the_kernel_if_the_model_does(multiplied, uses_kernels):
    """The source multiplies in each step with a weight that is nobody's layer."""
    seen = []

    class Multiplies(lookahead.GuessSource):
        def propose(self, texts, limits):
            before = len(multiplied)
            gemm.linear(torch.ones(1, 512), torch.ones(128, 512))
            seen.append(len(multiplied) - before)
            return [GuessTree.empty() for _ in texts]

    model = small_llama()
    lookahead.wrap(model, LookaheadConfig(cpu_kernels=uses_kernels), source=Multiplies())
    model.generate(torch.arange(4, 12)[None], max_new_tokens=6, do_sample=False)
    assert seen == [int(uses_kernels)] * len(seen)
    assert seen
