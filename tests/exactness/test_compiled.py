"""Compiled passes: the texts of plain decoding, over the families that compile, and a way back for the others."""

import random
import threading
import warnings
from unittest import mock

import pytest
import torch
from test_lossless import check_identical, random_prompt
from test_products import small_llama
from zoo import CHAIN_ONLY, SETTINGS, WITH_STATE, tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.cpu import products
from lookahead.models import attention
from lookahead.passes import capabilities, compiled
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.compiled import why_not_compiled

COMPILED = LookaheadConfig(compile_passes=True)
SAMPLED = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8}
GREEDY = {"max_new_tokens": 40, "do_sample": False}
USUAL = {"llama", "qwen3", "gemma3_text", "mistral", "gpt2", "olmo2"}


def compiles(model) -> bool:
    """Whether its passes are compiled, once they were tried."""
    return why_not_compiled(model, find_adapter(model)) is None


@pytest.fixture(autouse=True)
def no_fused_passes(monkeypatch):
    """Most of these models would run in one call, without a compiler."""
    monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")


@pytest.fixture
def traced(monkeypatch):
    """Passes are traced as ever, and what was traced runs as it is, which spares the compiler; counts its runs."""
    runs = []

    def compile_nothing(graph, inputs, options):
        return lambda *arguments: runs.append(1) or graph(*arguments)

    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor, "compile", compile_nothing)
    yield runs
    torch.compiler.reset()


@pytest.fixture
def two_programs():
    """No more are made of one code."""
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - CHAIN_ONLY - WITH_STATE))
def test_texts_are_identical(name, traced):
    """Whether a family compiles or not; the usual ones do."""
    model, rng = tiny_model(name), random.Random(name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        is_compiled = compiles(model)
    reasons = [str(w.message) for w in warned if "without compiled passes" in str(w.message)]
    assert is_compiled == (not reasons)
    assert is_compiled or name not in USUAL
    for options in (GREEDY, SAMPLED):
        traced.clear()
        config = LookaheadConfig(compile_passes=True, budget=12, window_size=rng.choice([0, 3]))
        stats = check_identical(model, [random_prompt(rng)], options, config, seed=rng.randrange(100))
        assert len(traced) == (stats.steps if is_compiled else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_the_real_compiler(dtype):
    model, rng = small_llama(dtype), random.Random(5)
    texts = []
    for config in (
        LookaheadConfig(budget=12, window_size=0),
        LookaheadConfig(budget=12, window_size=0, compile_passes=True),
    ):
        lookahead.wrap(model, config, lookahead.NgramPool(1))
        torch.manual_seed(3)
        texts.append(model.generate(torch.arange(1, 20)[None], **SAMPLED).tolist())
    assert compiles(model)
    assert products.are_installed(model)
    assert texts[0] == texts[1]
    if dtype == torch.float32:
        for options in (GREEDY, SAMPLED):
            check_identical(model, [random_prompt(rng)], options, COMPILED, seed=1)


def test_other_devices_are_told_of_graphs(monkeypatch):
    """Compiled passes multiply by kernels of our own, which a GPU cannot run."""
    model = tiny_model("llama")
    adapter = find_adapter(model)
    monkeypatch.setattr(compiled, "device_of", lambda model: torch.device("cuda"))
    with pytest.warns(UserWarning, match="without compiled passes: it is on a device of type cuda") as warned:
        reasons = [why_not_compiled(model, adapter) for _ in range(2)]
    assert all("cuda_graphs=True" in reason for reason in reasons)
    assert len(warned) == 1
    monkeypatch.undo()
    assert compiles(model)  # it is back on the CPU


def test_a_wrong_mask_is_noticed(traced, monkeypatch):
    attend = attention.attend_grouped
    monkeypatch.setattr(
        attention, "attend_grouped",
        lambda query, key, value, mask, *more: attend(query, key, value, None if mask is None else mask * 0, *more),
    )  # fmt: skip
    model = tiny_model("llama")
    assert not find_adapter(model).splits_attention  # noticed there already, so that nothing is compiled
    with pytest.warns(UserWarning, match="without compiled passes"):
        assert not compiles(model)


def test_a_wrong_cache_is_noticed(traced, monkeypatch):
    model = tiny_model("llama")
    assert find_adapter(model).splits_attention
    attend = attention.attend_grouped

    def forgetful(query, key, value, mask, *more):
        new = query.shape[2]
        return attend(query, key[:, :, -new:], value[:, :, -new:], mask[..., -new:], *more)

    monkeypatch.setattr(attention, "attend_grouped", forgetful)
    with pytest.warns(UserWarning, match="without compiled passes: custom masks, position_ids or cache are not honour"):
        assert not compiles(model)


def test_a_compiler_that_fails_costs_nothing_but_a_warning(monkeypatch):
    def broken(graph, inputs, options):
        raise OSError("no such compiler")

    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor, "compile", broken)
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs without compiled passes: torch.compile fails.*no such"):
        check_identical(model, [random_prompt(random.Random(0))], SAMPLED, COMPILED, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_identical(model, [random_prompt(random.Random(1))], GREEDY, COMPILED, seed=0)


def test_a_compiler_that_fails_later_on(traced):
    """A model that is changed between calls is traced anew, which may then fail."""
    model, prompt = tiny_model("llama"), random_prompt(random.Random(2))
    check_identical(model, [prompt], SAMPLED, COMPILED, seed=0)
    ran = []

    def hook(module, inputs, output):
        torch._dynamo.graph_break()  # as whatever cannot be traced does
        ran.append(1)

    model.model.layers[0].register_forward_hook(hook)
    with pytest.warns(UserWarning, match="without compiled passes"):
        check_identical(model, [prompt], SAMPLED, COMPILED, seed=0)
    assert ran


def test_changed_weights_change_the_text(traced):
    model, prompt = small_llama(), torch.tensor([[3, 1, 4, 1, 5]])
    check_identical(model, [prompt], GREEDY, COMPILED, seed=0)
    lookahead.wrap(model, COMPILED)
    before = model.generate(prompt, **GREEDY).tolist()
    other = {name: weight.roll(1, 0) for name, weight in model.state_dict().items()}
    model.load_state_dict(other)
    after = model.generate(prompt, **GREEDY).tolist()
    assert traced
    assert before != after
    assert after == lookahead.unwrap(model).generate(prompt, **GREEDY).tolist()


def test_wrapping_again_compiles_nothing_anew(traced):
    model, prompt = small_llama(), torch.arange(1, 10)[None]
    expected = model.generate(prompt, **GREEDY).tolist()
    with mock.patch.object(torch._inductor, "compile", side_effect=torch._inductor.compile) as compile:
        for _ in range(12):
            assert lookahead.wrap(model, COMPILED).generate(prompt, **GREEDY).tolist() == expected
            lookahead.unwrap(model)
    assert traced
    assert compile.call_count == 1


def test_many_models_compile_in_one_process(traced, two_programs):
    prompt = torch.arange(1, 10)[None]
    for _ in range(3):
        traced.clear()
        check_identical(small_llama(), [prompt], {**GREEDY, "max_new_tokens": 8}, COMPILED, seed=0)
        assert traced


@pytest.mark.filterwarnings("ignore:.*without compiled passes")
def test_a_model_that_changes_too_often_goes_without(traced, two_programs):
    """torch.compile makes but a few programs of one code."""
    model, prompt = small_llama(), torch.arange(1, 10)[None]
    given_up = []
    for name in ("ReLU", "GELU", "SiLU", "Tanh"):
        model.model.layers[0].mlp.act_fn = getattr(torch.nn, name)()
        check_identical(model, [prompt], GREEDY, COMPILED, seed=0)
        given_up.append(bool(compiled.why_not(model)))
    assert traced
    assert given_up == [False, False, True, True]


def test_an_input_that_a_hook_writes_to_is_multiplied_anew(traced):
    model, prompt = small_llama(), torch.arange(1, 10)[None]
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0].mul_(-1.5), None)[1])
    check_identical(model, [prompt], GREEDY, COMPILED, seed=0)
    assert traced


def test_batches_are_not_compiled(traced):
    model, prompt = tiny_model("llama"), random_prompt(random.Random(4))
    assert compiles(model)
    traced.clear()
    config = LookaheadConfig(compile_passes=True, budget=12, window_size=0)  # no costs are measured, alone and compiled
    check_identical(model, [prompt, prompt], GREEDY, config, seed=0)  # alike, so that both end at once
    assert not traced


def test_autocast_is_not_compiled(traced):
    model = tiny_model("llama")
    assert compiles(model)
    traced.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lookahead.wrap(model, COMPILED).generate(torch.tensor([[5, 6, 7]]), **GREEDY)
    assert not traced


def test_a_step_is_one_run_of_one_program(traced):
    """What torch.compile checks is looked at in the first pass of a call, and once for each number of rows."""
    model = small_llama()
    lookahead.wrap(model, LookaheadConfig(compile_passes=True, budget=4, window_size=0))
    assert compiles(model)
    checks = []
    for _ in range(3):
        traced.clear()
        model.lookahead.pool = lookahead.NgramPool(1)
        with mock.patch.object(compiled, "_compiled_pass", side_effect=compiled._compiled_pass) as checked:
            model.generate(torch.arange(1, 20)[None], **GREEDY)
        checks.append(checked.call_count)
        assert len(traced) == model.lookahead.last.steps > 5
    assert 1 <= checks[0] <= 1 + 2  # steps of four rows, which all short ones are padded to, and of five
    assert checks[1:] == [1, 1]


def test_layers_given_the_same_input_are_one_product(monkeypatch):
    found = []

    def count(graph, inputs, options):
        ours = [node for node in graph.graph.nodes if node.target is torch.ops.lookahead.products.default]
        found.append([len(node.args[1]) for node in ours])
        assert not any(node.target is torch._C._nn.linear for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor, "compile", count)
    monkeypatch.setattr(products, "MIN_WEIGHTS", 0)  # also of single keys and values
    assert compiles(lookahead.wrap(small_llama()))
    assert found == [[3, 1, 2, 1] * 2 + [1]]
    torch.compiler.reset()


def test_threads_have_caches_of_their_own(traced):
    model, rng = tiny_model("llama"), random.Random(6)
    prompts = [random_prompt(rng) for _ in range(4)]
    expected = [model.generate(prompt, **GREEDY).tolist() for prompt in prompts]
    lookahead.wrap(model, COMPILED)
    got: dict[int, list] = {}

    def decode(i: int) -> None:
        got[i] = model.generate(prompts[i], **GREEDY).tolist()

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == expected


def test_a_users_own_compiled_model_is_as_it_was():
    model, ids = small_llama(), torch.arange(1, 10)[None]
    expected = model(ids, labels=ids)
    lookahead.wrap(model)
    model.generate(ids, **GREEDY)
    torch.compiler.reset()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids)
    assert torch.equal(got.logits, expected.logits)
    got.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    torch.compiler.reset()


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model.layers[1]], ids=["all", "one layer"])
@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_its_user_compiles_writes_the_same(part, before, two_programs):
    """In its programs and, as they soon do not fit, without them."""
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    torch.compiler.reset()
    if before:
        part(model).compile(backend="eager", dynamic=True)
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=3))
    if not before:
        model.generate(ids, **options)
        part(model).compile(backend="eager", dynamic=True)
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.lookahead.last.accepted.total() > 0
    torch.compiler.reset()
