"""Programs: a family's page computes the same as the model, and the C++ the same as the reference."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given, note, settings
from hypothesis import strategies as st
from test_fused import FAMILIES, LEFT_OUT, MIXTURES, STATES, VARIANTS
from test_lossless import random_cases
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next
from zoo import as_loaded, tiny_model

from lookahead.compat import forward_arguments
from lookahead.cpu import blocks, native
from lookahead.cpu.executor import Executor, Rows
from lookahead.cpu.experts import Experts
from lookahead.cpu.operations import Add, Embed, Keep, Logits, Norm, Products, Value
from lookahead.cpu.products import Linear
from lookahead.cpu.program import Program
from lookahead.cpu.reference import Reference, State
from lookahead.cpu.states import Convolve, Places
from lookahead.models.families import HOMES, page_for, page_of
from lookahead.models.families.around import AROUND
from lookahead.models.families.lfm2 import Lfm3
from lookahead.passes.rounding import relative_error

ROOT = Path(__file__).parents[2]


GROWING = {"floor_scale": 3, "attn_scale": 0.4, "no_rope_layers": [0, 1]}  # queries, from the third position on


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in FAMILIES), *VARIANTS, ("llama4_text", GROWING)]
)
def test_a_page_says_what_the_model_computes(family, settings):
    model = tiny_model(family, **settings)
    for parameter in model.parameters():  # norms and biases, too
        parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # of prompts alone
            module.time_step_limit = 0.0, float("inf")
    page, ids = page_of(model), torch.arange(3, 12)
    program, positions = page.program(), torch.arange(len(ids))
    rotary = {name: page.rotary_tables(torch.zeros(1), positions[None], name) for name in program.rotaries}
    hidden = {layer: positions[:, None] < positions for layer in program.caches}
    for layer, unseen in hidden.items():
        if (window := page.windows()[layer]) is not None:
            unseen |= positions[:, None] - positions >= window
        if "chunked_attention" in (getattr(model.config, "layer_types", None) or [])[layer : layer + 1]:
            unseen |= positions[:, None] // zoo.WINDOW != positions // zoo.WINDOW
    caches = program.caches.items()
    empty = {layer: tuple(torch.zeros(heads, 0, size) for size in sizes) for layer, (heads, *sizes) in caches}
    found = Reference(program, ids, positions, rotary, empty, hidden, states_before(program))
    of_generate = {"position_ids": positions[None]} if "position_ids" in forward_arguments(model) else {}
    if not page.reads_prompts:  # the model sees them in both directions, but for a mask
        mask = torch.zeros(len(ids), len(ids)).masked_fill(hidden[0], torch.finfo(torch.float32).min)
        of_generate["attention_mask"] = mask[None, None]
    with torch.no_grad():  # without positions, decoders of RoBERTa's kind would begin with others
        expected = model(ids[None], output_hidden_states=True, **of_generate)
    assert relative_error(found.logits, expected.logits[0]) < 1e-5
    for i, states in enumerate(expected.hidden_states):
        states = states.flatten(0, -3) if states.ndim == 3 else states[:, 0]  # one state of a token, or several
        assert relative_error(found.outputs[i], states.transpose(0, 1).flatten(1)) < 1e-5


def states_before(program: Program) -> dict[int, State]:
    """Of each layer that keeps one, before any token."""
    return {
        layer: State(torch.zeros(shape.channels, shape.columns), torch.zeros(shape.of_state))
        for layer, shape in program.states.items()
    }


def test_all_families_have_been_tried():
    pages = {name: page_for(name) for name in HOMES}
    assert [page.__name__ + page.suffix for page in pages.values()] == list(pages)
    missing = set() if "lfm3" in CONFIG_MAPPING else {Lfm3}  # in older transformers
    models = {family: tiny_model(family) for family in [*FAMILIES, *LEFT_OUT]}
    tried = {type(page_of(model)) for model in models.values() if type(model).__name__ not in AROUND}
    assert tried == set(pages.values()) - missing
    for family in {*MIXTURES, *STATES}:  # of which transformers keeps parts in float32
        program = page_of(as_loaded(models[family], torch.bfloat16)).program()
        assert program.dtype == torch.bfloat16
        assert program.mixed is None, family


@pytest.mark.skipif(not hasattr(modeling_qwen3_next, "causal_conv1d_update"), reason="needs another transformers")
@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 3).map(lambda n: 32 * n),
    taps=st.integers(2, 5),
    rows=st.integers(1, 9),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, "silu", "gelu", "gelu_new", "relu2"]),
    dtypes=st.sampled_from([[torch.float32] * 2, [torch.bfloat16] * 2, [torch.bfloat16, torch.float32]]),
)
def test_a_convolution_rounds_where_that_of_transformers_rounds(width, taps, rows, has_bias, activation, dtypes):
    """Weights in float32 take inputs in bf16. Until the activation is applied, nothing is rounded then."""
    note(f"{width=} {taps=} {rows=} {has_bias=} {activation=} {dtypes=}")
    dtype, of_weights = dtypes
    torch.manual_seed(taps + rows)
    weight, embedding = torch.randn(width, taps).to(of_weights), torch.randn(rows, width).to(dtype)
    bias = torch.randn(width).to(of_weights) if has_bias else None
    held = torch.randn(width, taps - 1).to(dtype)
    x, out = Value(width), Value(width)
    named = {None: "identity", "relu2": "relu_squared"}.get(activation, activation)
    convolve = Convolve(x, out, weight, 0, bias, activation=named)
    program = Program([Embed(x, embedding), convolve, Keep(out, 0), Logits(out, Linear(torch.eye(width).to(dtype)))])
    ids, inputs = np.arange(rows), held.clone()
    places = Places(inputs.data_ptr(), 0, taps - 1, 0, 0)
    one = Rows(ids, ids, [(0, 0, 0, 0)], [0], [(None, [0])], 0, parents=ids - 1, states=[places])
    _, kept, *_ = Executor(program).run([one], {}, outputs=(0,))
    expected = torch.stack(
        [
            modeling_qwen3_next.causal_conv1d_update(row[None, :, None], held[None], weight, bias, activation)[0, :, 0]
            for row in embedding
        ]
    )
    assert torch.equal(inputs, held)
    assert relative_error(kept[0], expected) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert dtype == torch.float32 or (kept[0] != expected).sum() <= 2 + 0.02 * expected.numel()


def test_random_programs_are_computed_as_the_reference_says():
    """`make test-native` runs more of them, under sanitizers."""
    environment = os.environ | {
        "KERNELS": str(native.FOLDER),
        "CAPABILITY": native.CAPABILITY,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "native")]),
    }
    command = [sys.executable, str(ROOT / "scripts" / "native" / "fuzz.py"), "60", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "60 programs from 0 on: nothing found" in done.stdout, done.stdout + done.stderr


def test_threads_meet_six_times_a_layer():
    program = page_of(tiny_model("llama", num_hidden_layers=3)).program()
    assert sum(Executor(program)._operations["meets"]) == 6 * 3


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (5, 2), (70, 3)])
def test_a_pass_finds_the_digests_of_the_weights_that_it_reads(dtype, rows, threads):
    x, y, z = Value(64), Value(130), Value(192)
    linears = [Linear(torch.randn(n, 64).to(dtype)) for n in (130, 192, 700)]
    made = [Embed(x, torch.randn(9, 64).to(dtype)), Products(x, tuple(linears[:2]), (y, z)), Logits(x, linears[2])]
    executor, ids = Executor(Program(made), digested={0, 2}), np.arange(rows) % 9
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            executor.run([Rows(ids, ids, [], [], [], 0)], {}, top_k=(1, 2))
    finally:
        torch.set_num_threads(before)
    assert [digest.tobytes() for digest in executor.digests[[0, 2]]] == list(map(blocks.digest_of, linears[::2]))
    assert not executor.digests[1].any()


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize(("count", "top_k"), [(5, 1), (32, 4), (64, 1), (128, 2), (128, 8)])
def test_of_equal_experts_those_are_chosen_that_topk_takes(dtype, count, top_k):
    torch.manual_seed(count + top_k)
    x, out = Value(32), Value(32)
    router = Linear(torch.randn(count, 32).sign().to(dtype))  # whose products are few numbers
    experts = [Linear(torch.randn(shape).to(dtype)) for _ in range(count) for shape in ((32, 32), (32, 32))]
    flags = {"is_sigmoid": True, "rounds_steps": True, "rounds_ranks": True, "epsilon": 1e-6}
    embedding = torch.nn.functional.one_hot(torch.arange(32)).to(dtype)
    made = [Embed(x, embedding), Experts(x, out, (router, *experts), top_k, "relu", True, False, **flags)]
    program, ids = Program([*made, Logits(out, Linear(torch.randn(64, 32).to(dtype)))]), np.arange(32)
    logits, *_ = Executor(program).run([Rows(ids, ids, [], [], [], 0)], {})
    expected = Reference(program, torch.arange(32), torch.arange(32), {}, {}, {}).logits
    assert relative_error(logits, expected) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_a_value_does_not_take_the_place_of_one_that_is_still_read():
    """As where attention and MLP both read the hidden states before either is added."""
    width = Value(32)
    x, attended, more, both = (Value(32) for _ in range(4))
    linear = Linear(torch.eye(32))
    made = [
        Embed(x, torch.randn(9, 32)),
        Products(x, (linear,), (attended,)),
        Add(x, both, attended),
        Norm(x, width, torch.ones(32), 1e-5, size=32),
        Products(width, (linear,), (more,)),
        Add(both, out := Value(32), more),
        Logits(out, linear),
    ]
    ids = np.arange(5)
    logits, *_ = Executor(Program(made)).run([Rows(ids, ids, [], [], [], 0)], {})
    expected = made[0].weight[:5]
    expected = 2 * expected + nn.functional.rms_norm(expected, (32,), eps=1e-5)
    assert relative_error(logits, expected) < 1e-5


def test_each_table_of_positions_bounds_a_text():
    """Of a later embedding, too, as in RoCBert and HRM."""
    x, y, out, words = Value(32), Value(32), Value(32), torch.randn(9, 32)
    later = Embed(y, words, of_positions=torch.randn(7, 32), offset=2)
    made = [Embed(x, words), later, Add(x, out, y), Logits(out, Linear(torch.eye(32)))]
    assert Program(made).positions == 5
    assert Program([made[0], made[-1]]).positions is None


@random_cases(60)
@given(
    before=st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=1, max_size=6),
    rows=st.sampled_from([1, 3, 17]),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(native.FLOATS),
)
def test_layers_of_any_number_of_outputs_are_shared_out_together(before, rows, threads, dtype):
    """Rows of indexed weights lie together from the first of each layer on, wherever a thread's share begins."""
    note(f"{before=} {rows=} {threads=} {dtype=}")
    torch.manual_seed(rows)
    ids, torch_threads = np.arange(rows) % 9, torch.get_num_threads()
    linears = [Linear(torch.randn(count, 128).bfloat16().to(dtype)) for count, _ in [*before, (64, True)]]
    are_indexed = [*(is_indexed for _, is_indexed in before), True]
    packed = [
        blocks.pack(linear, dtype) if is_indexed and blocks.can_index(dtype) else linear
        for linear, is_indexed in zip(linears, are_indexed, strict=True)
    ]
    x, outs = Value(128), tuple(Value(linear.outputs) for linear in linears)
    embed = Embed(x, torch.randn(9, 128).to(dtype))
    made = [embed, Products(x, tuple(packed), outs), Logits(outs[-1], Linear(torch.eye(64).to(dtype)))]
    torch.set_num_threads(threads)
    try:
        logits, *_ = Executor(Program(made)).run([Rows(ids, ids, [], [], [], 0)], {})
    finally:
        torch.set_num_threads(torch_threads)
    expected = embed.weight[ids].double() @ linears[-1].weight.double().T
    assert relative_error(logits, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
