"""Models whose modules keep the blocks of a GGUF file, which passes read directly."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf_blocks import HALVES, Kind, random_blocks
from hypothesis import given, note, settings
from hypothesis import strategies as st
from zoo import tiny_model

import lookahead
from lookahead.compat.gguf import gguf_class
from lookahead.cpu import gemm, operations
from lookahead.cpu.executor import Executor, Rows
from lookahead.cpu.gguf import unpacked
from lookahead.cpu.products import Format, Linear
from lookahead.cpu.program import Program
from lookahead.passes.packed import packed_of

if gguf_class("GgufLinear") is None:
    pytest.skip("blocks are kept from transformers 5.24 on", allow_module_level=True)

from transformers.integrations.gguf import kernels
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize
from transformers.integrations.gguf.utils import replace_with_gguf_modules

TYPES = {name: number for number, name in GGML_NAME.items()}
FORMATS = [format for format in Format if format.is_in_blocks]
GREEDY = {"max_new_tokens": 24, "do_sample": False}


def made(name: str, outputs: int, inputs: int, extreme: float = 0.0) -> torch.Tensor:
    """Random blocks of a format, uint8 [outputs, bytes]. extreme: how many scales are tiny, huge or 0."""
    random = np.random.default_rng(int(torch.randint(2**31, ())))
    return torch.from_numpy(random_blocks(Kind[name], outputs, inputs, random, 0.02, extreme))


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    outputs=st.integers(1, 60),
    count=st.integers(1, 14),
    rows=st.sampled_from([*range(1, 30), 32, 33, 45, 70]),
    extreme=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 999),
)
def test_products_with_blocks_are_those_with_their_numbers(format, outputs, count, rows, extreme, seed):
    """To the last bit. count: of blocks in a row."""
    note(f"{format=} {outputs=} {count=} {rows=} {extreme=} {seed=}")
    torch.manual_seed(seed)
    blocks = made(format.name, outputs, format.block[0] * count, extreme)
    bias = torch.randn(outputs) if seed % 2 else None
    linear, plain = Linear(blocks, None, bias, format=format), Linear(unpacked(blocks, format), None, bias)
    assert plain.weight.isfinite().all()
    assert (linear.outputs, linear.inputs) == (plain.outputs, plain.inputs)
    assert linear.is_served(torch.float32)
    assert not linear.is_served(torch.bfloat16)
    input = torch.randn(rows, linear.inputs)
    found, expected = gemm.multiply(input, [linear, plain])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_rows_of_an_embedding_are_unpacked(format):
    blocks = made(format.name, 30, 512, extreme=0.1)
    values = [operations.Value(512) for _ in range(2)]
    embeds = [
        operations.Embed(values[0], blocks, 0.3, format=format),
        operations.Embed(values[1], unpacked(blocks, format), 0.3),
    ]
    head, ids = Linear(torch.eye(512)), torch.tensor([3, 29, 0, 3]).numpy()
    found, expected = (
        Executor(Program([embed, operations.Logits(value, head)])).run([Rows(ids, ids, [], [], [], 0)], {})[0]
        for embed, value in zip(embeds, values, strict=True)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_each_code_of_each_group_is_read(format):
    """Also each bit of scales and codes: blocks with one bit flipped hold what gguf says."""
    weights, size = format.block
    blocks = made(format.name, 1, weights).repeat(8 * size, 1)
    bits = torch.arange(8 * size)
    blocks[bits, bits // 8] ^= 2 ** (bits % 8).byte()
    expected = unpacked(blocks, format)
    is_known = expected.isfinite().all(1)  # a bit of a scale may make it infinite
    assert is_known.float().mean() > 0.9
    (found,) = gemm.multiply(torch.eye(weights), [Linear(blocks, format=format)])
    assert torch.equal(found.T[is_known], expected[is_known])


def test_all_halves_are_read():
    """Also those that are too small for an exponent."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    blocks = torch.zeros(len(halves), 34, dtype=torch.uint8)
    blocks[:, :2] = halves.view(torch.uint8).view(-1, 2)
    blocks[:, 2] = 1
    (found,) = gemm.multiply(torch.eye(1, 32), [Linear(blocks, format=Format.Q8_0)])
    assert torch.equal(found[0], halves.float())


@contextmanager
def kernel_for_cpus():
    """What a published kernel would do: transformers keeps blocks only where it finds one."""

    def multiply(weight, x, ggml_type, out_features):
        return x @ dequantize(weight, ggml_type).view(out_features, -1).T

    def multiply_experts(blocks, x, ids, ggml_type, out_features):
        full = dequantize(blocks, ggml_type).view(*blocks.shape[:2], -1)
        return torch.einsum("ni,nkoi->nko", x, full[ids.long()])

    before = kernels._gguf_kernel
    kernels._gguf_kernel = kernels.GgufKernel(
        SimpleNamespace(
            mul_mat_vec=multiply, mul_mat_id=multiply_experts, dequantize=None, get_rows=None, GEMV_TYPES=set(GGML_NAME)
        )
    )
    try:
        yield kernels._gguf_kernel
    finally:
        kernels._gguf_kernel = before


def in_blocks(model, formats: list[str]):
    """Give a model's linear layers and its embedding random blocks of these formats in turn."""
    tied = model.config.tie_word_embeddings
    names = [
        name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
    ]
    plan = {f"{name}.weight": TYPES[formats[i % len(formats)]] for i, name in enumerate(names)}
    of_experts = [name for name, module in model.named_modules() if name.endswith(".experts")]
    plan |= {
        f"{name}.{part}": TYPES[formats[i % len(formats)]]
        for name in of_experts
        for i, part in enumerate(("gate_up_proj", "down_proj"))
    }
    if tied:
        plan["lm_head.weight"] = plan["model.embed_tokens.weight"]
    for name, module in replace_with_gguf_modules(model, plan, kernels._gguf_kernel, torch.float32).items():
        if type(module) is gguf_class("GgufExperts"):
            part = name.rpartition(".")[2]
            experts, outputs, _ = getattr(module, part).shape
            inputs = module.hidden_dim if part == "gate_up_proj" else module.intermediate_dim
            blocks = made(GGML_NAME[plan[name]], experts * outputs, inputs).view(experts, outputs, -1)
            setattr(module, part, torch.nn.Parameter(blocks, requires_grad=False))
            continue
        inputs = getattr(module, "in_features", None) or module.embedding_dim
        blocks = made(GGML_NAME[plan[name]], len(module.weight), inputs)
        module.weight = torch.nn.Parameter(blocks, requires_grad=False)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.1)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


OF_FAMILIES = {
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_value_head_dim": 64,
    }
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *OF_FAMILIES])
@pytest.mark.parametrize(
    "formats",
    [["Q4_K", "Q6_K"], ["Q8_0"], ["Q4_0", "Q5_K", "Q4_1"], ["Q2_K", "IQ4_NL", "Q3_K", "IQ4_XS"]],
    ids="-".join,
)
def test_texts_are_those_of_the_model_itself(family, formats):
    with kernel_for_cpus():
        model = in_blocks(tiny_model(family, **SIZES, **OF_FAMILIES.get(family, {})), formats)
        prompts = [torch.randint(3, 97, (1, n)) for n in (1, 9, 70)]
        settings = [GREEDY, GREEDY | {"do_sample": True, "top_k": 20}]
        expected, found = [], []
        for texts in (expected, found):
            for i, prompt in enumerate(prompts):
                for kind in settings:
                    torch.manual_seed(i)
                    texts.append(model.generate(prompt, **kind).tolist())
            lookahead.wrap(model)
        assert found == expected
        assert "passes: fused" in model.lookahead.report()
        assert packed_of(model).copied_bytes == 0, "blocks are read where they are"


def test_a_block_that_was_written_to_is_seen_by_the_next_pass():
    with kernel_for_cpus():
        model = in_blocks(tiny_model("llama", **SIZES), ["Q4_K"])
        prompt = torch.arange(3, 12)[None]
        lookahead.wrap(model)
        before = model.generate(prompt, **GREEDY).tolist()
        model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0))  # torch does not count this
        after = model.generate(prompt, **GREEDY).tolist()
        assert before != after
        assert after == lookahead.unwrap(model).generate(prompt, **GREEDY).tolist()


def test_formats_that_our_kernels_do_not_read_are_left_to_the_model(monkeypatch):
    monkeypatch.setitem(HALVES, "IQ3_S", [0])
    with kernel_for_cpus():
        model = in_blocks(tiny_model("llama", **SIZES), ["Q8_0"])
        layer = model.model.layers[0].mlp.up_proj
        layer.ggml_type = TYPES["IQ3_S"]
        blocks = made("IQ3_S", layer.out_features, layer.in_features)
        layer.weight = torch.nn.Parameter(blocks, requires_grad=False)
        expected = model.generate(torch.arange(3, 12)[None], **GREEDY).tolist()
        lookahead.wrap(model)
        assert model.generate(torch.arange(3, 12)[None], **GREEDY).tolist() == expected
        assert "IQ3_S, a format of GGUF that our kernels do not read" in model.lookahead.report()
