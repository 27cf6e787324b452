"""Models whose modules keep the blocks of a GGUF file: passes read them as they are."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from zoo import tiny_model

import lookahead
from lookahead.compat.gguf import gguf_class
from lookahead.cpu import gemm, operations
from lookahead.cpu.executor import Executor, Rows
from lookahead.cpu.products import Format, Linear
from lookahead.cpu.program import Program
from lookahead.passes.packed import packed_of

if gguf_class("GgufLinear") is None:
    pytest.skip("blocks are kept from transformers 5.24 on", allow_module_level=True)

from transformers.integrations.gguf import kernels
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME, dequantize, row_bytes
from transformers.integrations.gguf.utils import replace_with_gguf_modules

TYPES = {name: number for number, name in GGML_NAME.items()}
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82]}
"""Where numbers of half precision stand in a block."""
FORMS = sorted(HALVES.keys() - {"Q2_K"})
GREEDY = {"max_new_tokens": 24, "do_sample": False}


def made(name: str, outputs: int, inputs: int, size: float = 0.005) -> torch.Tensor:
    """Random blocks of a form, uint8 [outputs, bytes], with scales of about this size, some of them tiny."""
    blocks = torch.randint(0, 256, (outputs, row_bytes(TYPES[name], inputs)), dtype=torch.uint8)
    in_turn = blocks.view(-1, GGML_BLOCK[TYPES[name]][1])
    for place in HALVES[name]:
        halves = size * torch.randn(len(in_turn)) / (1 if name in ("Q4_0", "Q4_1", "Q8_0") else 32)
        halves[torch.rand(len(halves)) < 0.05] *= 1e-4  # below 2^-14
        in_turn[:, place : place + 2] = halves.half().view(torch.uint8).view(-1, 2)
    return blocks


def unpacked(name: str, blocks: torch.Tensor) -> torch.Tensor:
    return dequantize(blocks, TYPES[name]).view(len(blocks), -1)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(FORMS),
    outputs=st.integers(1, 60),
    inputs=st.integers(1, 14),
    rows=st.integers(1, 30),
    seed=st.integers(0, 999),
)
def test_products_with_blocks_are_those_with_their_numbers(name, outputs, inputs, rows, seed):
    """To the last bit."""
    note(f"{name=} {outputs=} {inputs=} {rows=} {seed=}")
    torch.manual_seed(seed)
    blocks = made(name, outputs, 256 * inputs)
    bias = torch.randn(outputs) if seed % 2 else None
    linear, plain = Linear(blocks, None, bias, blocks=Format[name]), Linear(unpacked(name, blocks), None, bias)
    assert (linear.outputs, linear.inputs) == (plain.outputs, plain.inputs)
    assert linear.is_served(torch.float32)
    assert not linear.is_served(torch.bfloat16)
    input = torch.randn(rows, linear.inputs)
    found, expected = gemm.multiply(input, [linear, plain])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_an_embedding_are_unpacked(name):
    blocks = made(name, 30, 512)
    values = [operations.Value(512) for _ in range(2)]
    embeds = [
        operations.Embed(values[0], blocks, 0.3, format=Format[name]),
        operations.Embed(values[1], unpacked(name, blocks), 0.3),
    ]
    head, ids = Linear(torch.eye(512)), torch.tensor([3, 29, 0, 3]).numpy()
    found, expected = (
        Executor(Program([embed, operations.Logits(value, head)])).run([Rows(ids, ids, [], [], [], 0)], {})[0]
        for embed, value in zip(embeds, values, strict=True)
    )
    assert torch.equal(found, expected)


def test_all_halves_are_read():
    """Also those that are too small for an exponent."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    blocks = torch.zeros(len(halves), 34, dtype=torch.uint8)
    blocks[:, :2] = halves.view(torch.uint8).view(-1, 2)
    blocks[:, 2] = 1
    (found,) = gemm.multiply(torch.eye(1, 32), [Linear(blocks, blocks=Format.Q8_0)])
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


def in_blocks(model, forms: list[str]):
    """Give a model's linear layers and its embedding random blocks of these forms in turn."""
    tied = model.config.tie_word_embeddings
    names = [
        name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
    ]
    plan = {f"{name}.weight": TYPES[forms[i % len(forms)]] for i, name in enumerate(names)}
    if tied:
        plan["lm_head.weight"] = plan["model.embed_tokens.weight"]
    for name, module in replace_with_gguf_modules(model, plan, kernels._gguf_kernel, torch.float32).items():
        inputs = getattr(module, "in_features", None) or module.embedding_dim
        blocks = made(GGML_NAME[plan[name]], len(module.weight), inputs)
        module.weight = torch.nn.Parameter(blocks, requires_grad=False)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.1)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("forms", [["Q4_K", "Q6_K"], ["Q8_0"], ["Q4_0", "Q5_K", "Q4_1"]], ids="-".join)
def test_texts_are_those_of_the_model_itself(family, forms):
    with kernel_for_cpus():
        model = in_blocks(tiny_model(family, **SIZES), forms)
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


def test_forms_that_our_kernels_do_not_read_are_left_to_the_model():
    with kernel_for_cpus():
        model = in_blocks(tiny_model("llama", **SIZES), ["Q8_0"])
        layer = model.model.layers[0].mlp.up_proj
        layer.ggml_type = TYPES["Q2_K"]
        blocks = made("Q2_K", layer.out_features, layer.in_features)
        layer.weight = torch.nn.Parameter(blocks, requires_grad=False)
        expected = model.generate(torch.arange(3, 12)[None], **GREEDY).tolist()
        lookahead.wrap(model)
        assert model.generate(torch.arange(3, 12)[None], **GREEDY).tolist() == expected
        assert "Q2_K, a form of GGUF that our kernels do not read" in model.lookahead.report()
