"""Steps of static shape against eager ones, and whole texts by them; captured for real where there is a GPU.

On a CPU the same code runs with another ``capture``: none at all, or one whose replay runs the function again.
"""

import copy
import gc
import pickle
import random
import re
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from test_lossless import check_identical, random_prompt
from test_step import random_step
from transformers import LogitsProcessor, LogitsProcessorList
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.cpu import operations as op
from lookahead.engine import call
from lookahead.engine.engine import Lookahead
from lookahead.models.cache import InPlaceLayer
from lookahead.models.families import UnknownModelError
from lookahead.passes import graphs
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.graphs import GraphRunner, StaticCache, StepGraphs, capture_cuda, static_program
from lookahead.passes.rounding import relative_error, tolerance
from lookahead.passes.runner import EagerRunner
from lookahead.passes.static import PART, StaticPass
from lookahead.step import lay_out
from ngram_pool import GuessTree

SERVED = [
    "llama", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "gptj", "opt", "mixtral",
    "qwen3_moe", "falcon", "olmo2", "cohere", "granite", "stablelm", "gpt_bigcode", "smollm3", "mistral",
    "gemma2", "gemma3_text", "gpt_oss", "cohere2", "deepseek_v3", "glm4_moe", "phimoe", "apertus", "bert",
    "hunyuan_v1_moe",
]  # fmt: skip
GREEDY = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
FIXED = LookaheadConfig(budget=16, window_size=0)  # step for step the same in every run
SAMPLED = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.8}


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")(test))


def again(function, device, beside):
    """A capture whose replay runs the function again."""
    return function


class Counting:
    """A capture that counts the graphs made, and their replays."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, function, device, beside):
        self.captured += 1

        def replay():
            self.replayed += 1
            return function()

        return replay


@contextmanager
def serving(step_graphs: StepGraphs):
    """Let every decoding call borrow the buffers after its prefill. Yields the caches lent, in their order."""
    lent: list[StaticCache] = []
    find_runner, lend = Lookahead.find_runner, StepGraphs.lend

    def find_runner_with_graphs(engine, model, *needs):
        return GraphRunner(step_graphs, find_runner(engine, model, *needs))

    def noted(self, cache, *needs):
        borrowed = lend(self, cache, *needs)
        if self is step_graphs and borrowed is not cache:
            lent.append(borrowed)
        return borrowed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookahead, "find_runner", find_runner_with_graphs)
        patch.setattr(StepGraphs, "lend", noted)
        yield lent


def runner_of(model) -> EagerRunner:
    return EagerRunner(model, find_adapter(model))


def prefilled(runner: EagerRunner, ids: torch.Tensor):
    cache = runner.adapter.make_cache(ids.shape[1])
    runner.prefill(ids, cache)
    return cache


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    return relative_error(a[0], b[0]) <= tolerance(torch.float32)


# --- a step


@pytest.mark.parametrize("part", [4, 512])
@pytest.mark.parametrize("capture", [None, again])
@pytest.mark.parametrize("model_type", SERVED)
@torch.no_grad()
def test_steps_give_eager_logits(model_type, capture, part, monkeypatch):
    """Over random trees, windows and accepted paths, through several sizes of the buffers, in parts and whole."""
    monkeypatch.setattr(graphs, "FIRST_CAPACITY", 16)
    monkeypatch.setattr("lookahead.passes.static.PART", part)
    monkeypatch.setattr("lookahead.passes.static.LONG_CONTEXT", 32)
    model = tiny_model(model_type)
    runner, rng = runner_of(model), random.Random(0)
    ids = random_prompt(rng, 30)
    eager, step_graphs = prefilled(runner, ids), StepGraphs(model, capture)
    with_graphs = GraphRunner(step_graphs, runner)
    static = with_graphs.begin(prefilled(runner, ids))
    assert isinstance(static, StaticCache)
    sizes = set()
    for _ in range(25):
        step = random_step(rng)[0]
        last = [static.lengths[0] + rng.randrange(8)]
        expected = runner.run([step], eager, last).logits
        logits = with_graphs.run([step], static, last).logits
        assert logits.shape == expected.shape
        assert agree(logits, expected)
        path = [0]
        while children := [row for row in range(1, step.guesses + 1) if step.parents[row] == path[-1]]:
            path.append(rng.choice(children))
        for cache in (eager, static):
            cache.commit([step], [path])
        assert static.lengths == eager.lengths
        sizes.add(step_graphs._buffers._keys.shape[2])
        for part, layer in zip(static.sequence(0).layers, eager.layers, strict=True):
            assert torch.allclose(part.keys, layer.keys, atol=1e-3)
            assert torch.allclose(part.values, layer.values, atol=1e-3)
    assert len(sizes) > 2


def test_columns_are_rounded_up_by_a_half_at_most():
    shown = [graphs._rounded_up(columns) for columns in range(1, 20000)]
    assert shown[:1024] == [graphs.FIRST_CAPACITY] * 1024
    assert all(columns <= count for columns, count in enumerate(shown, 1))
    assert all(2 * count <= 3 * columns for columns, count in enumerate(shown, 1) if columns > 1024)
    assert all(count % (2 * PART) == 0 for count in shown)
    assert len(set(shown)) == 10


@torch.no_grad()
def test_what_is_not_in_use_is_zero():
    """So an earlier overflow cannot spoil the sums of a later step, and no text is left over."""
    model, rng = tiny_model("llama"), random.Random(1)
    step_graphs, eager = StepGraphs(model, again), runner_of(model)
    for length in (40, 7):
        runner = GraphRunner(step_graphs, eager)
        static = runner.begin(prefilled(eager, torch.arange(3, 3 + length)[None]))
        buffers = step_graphs._buffers
        for _ in range(6):
            step = random_step(rng)[0]
            runner.run([step], static)
            buffers._keys[:, :, buffers.columns - 1] = torch.inf  # the last token's, padding aside
            keeps = len(step) > 1 and rng.random() < 0.7
            static.commit([step], [[0] if keeps else []])
            for buffer in (buffers._keys, buffers._values):
                assert buffer[:, :, : buffers.columns].isfinite().all()
                assert not buffer[:, :, buffers.columns :].any()
        runner.end()


@pytest.mark.parametrize("capture", [None, again])
@torch.no_grad()
def test_a_step_that_overflows_leaves_nothing_behind(capture, monkeypatch):
    """Decoding repeats such a step without its guesses; the repetition must not see them."""
    model = tiny_model("llama")
    overflown, prompt = [], random_prompt(random.Random(5))
    original = vars(StaticPass)["computed"]

    def computed(self, operation):
        if isinstance(operation, op.Append) and len(self.ids) > 4 and self.columns[0] < prompt.shape[1] + 9:  # a guess
            overflown.append(operation)
            self.values[operation.values][-1] = torch.inf
        return original.__get__(self)(operation)

    step_graphs = StepGraphs(model, capture)
    assert step_graphs._compared(find_adapter(model)) is None
    monkeypatch.setattr(StaticPass, "computed", computed)
    with serving(step_graphs), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it says nothing about a graph, either
        check_identical(model, [prompt], GREEDY, FIXED, seed=0)
    assert overflown


# --- whole texts


@pytest.mark.parametrize("capture", [None, again])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gptj", "mixtral", "qwen3"])
def test_texts_are_identical(model_type, capture):
    model, rng = tiny_model(model_type), random.Random(3)
    step_graphs, accepted = StepGraphs(model, capture), 0
    for options in (GREEDY, SAMPLED):
        for window_size in (0, 3):
            prompts, config = [random_prompt(rng)], LookaheadConfig(budget=16, window_size=window_size)
            eager = check_identical(model, prompts, options, config, seed=1)
            with serving(step_graphs) as lent:
                stats = check_identical(model, prompts, options, config, seed=1)
            assert len(lent) == 1
            assert (stats.steps, stats.tokens) == (eager.steps, eager.tokens)
            accepted += stats.accepted.total()
    assert accepted > 0
    assert bool(step_graphs._replays) == (capture is not None)


@pytest.mark.parametrize("capture", [None, again])
def test_buffers_grow_in_mid_text(capture, monkeypatch):
    monkeypatch.setattr(graphs, "FIRST_CAPACITY", 16)
    model = tiny_model("llama")
    step_graphs, rng = StepGraphs(model, capture), random.Random(7)
    shown = set()
    original = StepGraphs._run
    monkeypatch.setattr(StepGraphs, "_run", lambda self, *key: shown.add(key[1]) or original(self, *key))
    with serving(step_graphs):
        for longest in (10, 40, 10):
            options = {**GREEDY, "max_new_tokens": 120, "min_new_tokens": 120}
            check_identical(
                model, [random_prompt(rng, longest)], options, LookaheadConfig(budget=30, window_size=0), seed=1
            )
    assert {32, 64, 128} <= shown
    assert step_graphs._buffers._keys.shape[2] == 256
    assert len(step_graphs._replays) <= 8 * 5  # 16, 32, ... 256 columns


def test_graphs_of_buffers_that_moved_are_dropped(monkeypatch):
    """Whether they moved in mid-text or for a prompt; a real graph would go on reading and writing the old ones."""
    monkeypatch.setattr(graphs, "FIRST_CAPACITY", 16)

    def place() -> int:
        return step_graphs._buffers._keys.data_ptr()

    def capture(function, device, beside):
        captured_at = place()

        def replay():
            assert captured_at == place()
            return function()

        return replay

    model, rng = tiny_model("llama"), random.Random(7)
    step_graphs, sizes = StepGraphs(model, capture), set()
    with serving(step_graphs):
        # The second moves them for its prompt, the fourth in mid-text; the short ones would use the old graphs.
        for longest, new in ((4, 6), (70, 6), (4, 6), (100, 60), (4, 6)):
            options = {"max_new_tokens": new, "min_new_tokens": new}
            prompt = torch.tensor([[rng.randrange(3, 97) for _ in range(longest)]])
            check_identical(model, [prompt], options, FIXED, seed=1)
            sizes.add(step_graphs._buffers._keys.shape[2])
    assert sizes == {64, 128, 256}


def test_second_call_reuses_buffers_and_graphs():
    model, capture = tiny_model("llama"), Counting()
    step_graphs = StepGraphs(model, capture)
    places, prompts = [], [random_prompt(random.Random(seed)) for seed in (1, 1, 1, 1)]
    with serving(step_graphs):
        for prompt in prompts:
            check_identical(model, [prompt], GREEDY, FIXED, seed=0)
            places.append((step_graphs._buffers._keys.data_ptr(), capture.captured))
    assert places[1] == places[2] == places[3] == places[0]
    assert 0 < capture.captured == len(step_graphs._replays)
    assert capture.replayed > 20


def test_prompts_cache_is_given_back_early():
    """It would be a second copy of the buffers."""
    model = tiny_model("llama")
    step_graphs, dead = StepGraphs(model, None), []
    original = call.prefill

    def watched(*args):
        cache, logits = yield from original(*args)
        dead.append(weakref.ref(cache.layers[0]))
        return cache, logits

    class Look(LogitsProcessor):
        def __call__(self, input_ids, scores):
            gc.collect()
            alive.append(dead[0]() is not None)
            return scores

    alive: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "prefill", watched)
        lookahead.wrap(model, FIXED)
        with serving(step_graphs):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, logits_processor=LogitsProcessorList([Look()]))
    assert not any(alive)


def test_caches_handed_out_are_copies():
    model = tiny_model("llama")
    rng = random.Random(2)
    first, second = random_prompt(rng), random_prompt(rng)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "return_dict_in_generate": True}
    expected = model.generate(first, **options)
    longer = model.generate(first, max_new_tokens=40, min_new_tokens=40)
    lookahead.wrap(model, FIXED)
    step_graphs = StepGraphs(model, again)
    with serving(step_graphs) as lent:
        output = model.generate(first, **options)
        ours = output.past_key_values
        kept = [layer.keys.clone() for layer in ours.layers]
        for layer, theirs in zip(ours.layers, expected.past_key_values.layers, strict=True):
            assert type(layer) is InPlaceLayer
            assert torch.allclose(layer.keys, theirs.keys, atol=1e-3)
            assert torch.allclose(layer.values, theirs.values, atol=1e-3)
            for buffer in (step_graphs._buffers._keys, step_graphs._buffers._values):
                assert layer._keys.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        model.generate(second, **options)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(ours.layers, kept, strict=True))
        assert ours.get_seq_length() == first.shape[1] + 19
        more = model.generate(output.sequences, past_key_values=ours, max_new_tokens=20, min_new_tokens=20)
        assert more.tolist() == longer.tolist()
        assert ours.get_seq_length() == first.shape[1] + 39
        assert len(lent) == 3


class Fail(LogitsProcessor):
    def __init__(self, at: int):
        self.left = at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise ConnectionError
        return scores


def test_failure_gives_buffers_back():
    """They serve the next call, and the cache that was passed in holds what it held."""
    model = tiny_model("llama")
    ids = random_prompt(random.Random(4))
    expected = model.generate(ids, max_new_tokens=40, min_new_tokens=40)
    lookahead.wrap(model, FIXED)
    step_graphs = StepGraphs(model, again)
    with serving(step_graphs) as lent:
        output = model.generate(ids, max_new_tokens=15, min_new_tokens=15, return_dict_in_generate=True)
        cache, held = output.past_key_values, output.past_key_values.get_seq_length()
        options = {"past_key_values": cache, "max_new_tokens": 25, "min_new_tokens": 25}
        with pytest.raises(ConnectionError):
            model.generate(output.sequences, **options, logits_processor=LogitsProcessorList([Fail(9)]))
        assert cache.get_seq_length() == held
        assert step_graphs._lent is None
        assert model.generate(output.sequences, **options).tolist() == expected.tolist()
    assert len(lent) == 3
    with pytest.raises(RuntimeError, match="taken back"):
        step_graphs.forward(random_step(random.Random(0))[0], lent[0])


def test_only_one_call_has_the_buffers():
    """A nested call, and one in another thread, go without."""
    model = tiny_model("llama")
    rng = random.Random(6)
    outer, inner = random_prompt(rng), random_prompt(rng)
    expected = [model.generate(ids, **GREEDY).tolist() for ids in (outer, inner)]
    lookahead.wrap(model, FIXED)
    step_graphs, others = StepGraphs(model, again), []

    class Generate(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] in (outer.shape[1] + 10, outer.shape[1] + 30):
                others.append(model.generate(inner, **GREEDY).tolist())
                thread = threading.Thread(target=lambda: others.append(model.generate(inner, **GREEDY).tolist()))
                thread.start()
                thread.join()
            return scores

    with serving(step_graphs) as lent:
        assert (
            model.generate(outer, **GREEDY, logits_processor=LogitsProcessorList([Generate()])).tolist() == expected[0]
        )
        assert len(lent) == 1
        assert model.generate(inner, **GREEDY).tolist() == expected[1]
        assert len(lent) == 2
    assert others == [expected[1]] * 4


def test_batches_and_inference_mode():
    model = tiny_model("llama")
    rng = random.Random(8)
    with serving(StepGraphs(model, again)) as lent:
        check_identical(model, [random_prompt(rng), random_prompt(rng)], GREEDY, FIXED, seed=0)
        assert not lent
        prompt = [random_prompt(rng)]
        with torch.inference_mode():
            check_identical(model, prompt, SAMPLED, FIXED, seed=0)
        check_identical(model, prompt, SAMPLED, FIXED, seed=0)
        with torch.inference_mode():
            check_identical(model, prompt, SAMPLED, FIXED, seed=0)
        assert len(lent) == 3


# --- never silently wrong


def failing_from(number: int):
    made = []

    def capture(function, device, beside):
        made.append(function)
        if len(made) >= number:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function

    return capture


def repeating(function, device, beside):
    """A graph that took its inputs from Python: it is right once."""
    logits, _ = function()
    return lambda: (logits.clone(), {})


def shifted(function, device, beside):
    return lambda: (function()[0].roll(1, dims=0), {})


def perturbed(function, device, beside):
    def replay():
        logits = function()[0].clone()
        logits[-1, 5] += 0.5
        return logits, {}

    return replay


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (lambda: failing_from(1), "cannot be captured.*not permitted when stream is capturing"),
        (lambda: failing_from(2), "cannot be captured.*not permitted when stream is capturing"),
        (lambda: repeating, "does not give the logits of its pass"),
        (lambda: shifted, "does not give the logits of its pass"),
        (lambda: perturbed, "does not give the logits of its pass"),
    ],
    ids=["fails", "fails later", "repeating", "shifted", "perturbed"],
)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_falls_back_with_one_warning(capture, message, options):
    model = tiny_model("llama")
    step_graphs = StepGraphs(model, capture())
    with warnings.catch_warnings(record=True) as caught, serving(step_graphs) as lent:
        warnings.simplefilter("always")
        for seed in range(3):
            check_identical(
                model,
                [random_prompt(random.Random(seed))],
                options,
                LookaheadConfig(budget=30, window_size=0),
                seed=seed,
            )
    ours = [str(warning.message) for warning in caught if "CUDA graphs" in str(warning.message)]
    assert len(ours) == 1
    assert re.search(message, ours[0])
    assert len(lent) == 1
    assert not step_graphs._replays
    assert not step_graphs._buffers.is_initialized


def test_goes_without_where_memory_is_short(monkeypatch):
    def allocate(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs._GraphLayer, "_allocate", allocate)
    model = tiny_model("llama")
    step_graphs = StepGraphs(model, again)
    prompt = [random_prompt(random.Random(0))]
    with serving(step_graphs) as lent:
        with pytest.warns(UserWarning, match="not enough memory"):
            check_identical(model, prompt, GREEDY, FIXED, seed=0)
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
    assert not lent
    assert not step_graphs._free.locked()


def test_graphs_of_a_changed_model_are_dropped():
    """What a graph has of Python is as old as its capture; here the scale of the attention."""
    model = tiny_model("llama")
    attentions = [layer.self_attn for layer in model.model.layers]
    captured = []

    def capture(function, device, beside):
        scale = attentions[0].scaling
        captured.append(scale)

        def replay():
            now = attentions[0].scaling
            for attention in attentions:
                attention.scaling = scale
            logits = function()
            for attention in attentions:
                attention.scaling = now
            return logits

        return replay

    prompt = [random_prompt(random.Random(9))]
    with serving(StepGraphs(model, capture)) as lent:
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        for attention in attentions:
            attention.scaling *= 2
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        number = len(captured)
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        assert len(captured) == number
        assert len(lent) == 3
    assert len(set(captured)) == 2


def test_graphs_that_were_given_up_are_tried_again_once_the_model_has_changed():
    model, made = tiny_model("llama"), []

    def capture(function, device, beside):
        made.append(function)
        if len(made) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function

    step_graphs, prompt = StepGraphs(model, capture), [random_prompt(random.Random(9))]
    with serving(step_graphs) as lent:
        with pytest.warns(UserWarning, match="cannot be captured"):
            check_identical(model, prompt, GREEDY, FIXED, seed=0)
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        assert (len(lent), len(made)) == (1, 1)
        for layer in model.model.layers:
            layer.self_attn.scaling *= 2
        for _ in range(2):
            check_identical(model, prompt, GREEDY, FIXED, seed=0)
        assert len(lent) == 3
    assert len(made) - 1 == len(step_graphs._replays) > 0
    assert step_graphs.why_not is None


def test_graphs_of_replaced_weights_are_dropped():
    model, capture = tiny_model("llama"), Counting()
    step_graphs, prompt = StepGraphs(model, capture), [random_prompt(random.Random(9))]
    with serving(step_graphs):
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        before = capture.captured
        model.lm_head.weight.data = model.lm_head.weight.data * 1.000001
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        assert capture.captured > before
        kept = dict(step_graphs._replays)
        model.lm_head.weight.data.mul_(-1)  # in place: the graphs read it
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
        assert kept.items() <= step_graphs._replays.items()


@torch.no_grad()
def test_long_steps_are_not_captured():
    model, capture = tiny_model("llama", max_position_embeddings=2048), Counting()
    step_graphs = StepGraphs(model, capture)
    with serving(step_graphs):
        config = LookaheadConfig(budget=0, window_size=70, ngram_size=3)
        check_identical(model, [random_prompt(random.Random(1))], {"max_new_tokens": 300}, config, seed=0)
    assert all(rows <= graphs.MAX_ROWS for rows, _ in step_graphs._replays)
    assert 256 in step_graphs._inputs


# --- which models


def why_not(model) -> str | None:
    try:
        static_program(model, find_adapter(model))
    except UnknownModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma4_text", "attend to everything, or to a sliding window"),
        ("llama4_text", "attend to everything, or to a sliding window"),
        ("bloom", "mask and position_ids"),
        ("lfm2", "mask and position_ids"),
    ],
)
def test_models_that_graphs_do_not_serve(model_type, reason):
    model = tiny_model(model_type)
    assert reason in why_not(model)
    prompt = [random_prompt(random.Random(1))]
    with pytest.warns(UserWarning, match=reason), serving(StepGraphs(model, again)) as lent:
        check_identical(model, prompt, GREEDY, FIXED, seed=0)
    assert not lent


def test_what_a_graph_would_leave_out():
    model = tiny_model("llama")
    assert why_not(model) is None
    hook = model.model.layers[1].register_forward_hook(lambda *args: None)
    assert "LlamaDecoderLayer has a hook" in why_not(model)
    hook.remove()
    hook = model.model.register_forward_pre_hook(lambda *args: None)
    assert "LlamaModel has a hook" in why_not(model)
    hook.remove()
    model(torch.tensor([[3]]), output_hidden_states=True)  # transformers leaves hooks that then do nothing
    assert any(layer._forward_hooks for layer in model.model.layers)
    assert why_not(model) is None
    adapter = find_adapter(model)
    model.model.norm.to("meta")
    with pytest.raises(UnknownModelError, match="several devices"):
        static_program(model, adapter)


def test_models_of_accelerate_and_peft():
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    model = tiny_model("llama")
    accelerate.hooks.add_hook_to_module(model.model.layers[0], accelerate.hooks.ModelHook())
    assert "accelerate" in why_not(model)
    adapted = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM"))
    assert "peft" in why_not(adapted.get_base_model())


@torch.no_grad()
def test_weights_of_two_dtypes_are_not_captured():
    model = tiny_model("llama")
    model.model.norm.to(torch.float64)
    with pytest.raises(UnknownModelError, match="not all of one dtype"):
        static_program(model, find_adapter(tiny_model("llama")))


def test_passes_that_differ_from_the_models_are_not_used(monkeypatch):
    """They are compared before they serve a model."""
    original = vars(StaticPass)["computed"]

    def computed(self, operation):
        found = original.__get__(self)(operation)
        return found * 1.01 if isinstance(operation, op.Gate) else found

    monkeypatch.setattr(StaticPass, "computed", computed)
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="differ from plain decoding's"), serving(StepGraphs(model, again)) as lent:
        check_identical(model, [random_prompt(random.Random(1))], GREEDY, FIXED, seed=0)
    assert not lent


@torch.no_grad()
def test_hidden_states_are_those_of_the_model():
    """They are copies: the next pass does not change them."""
    model, rng = tiny_model("gemma2"), random.Random(3)
    runner, ids = EagerRunner(model, find_adapter(model), (0, 1, 2)), random_prompt(rng, 30)
    with_graphs = GraphRunner(StepGraphs(model, again), runner)
    eager, static, found = prefilled(runner, ids), with_graphs.begin(prefilled(runner, ids)), []
    for _ in range(4):
        step = random_step(rng)[0]
        expected, output = runner.run([step], eager).hidden_states, with_graphs.run([step], static).hidden_states
        found.append((expected, output))
        for cache in (eager, static):
            cache.commit([step], [[0]])
    for expected, output in found:
        assert output.keys() == expected.keys() == {0, 1, 2}
        assert all(agree(output[i], expected[i]) for i in output)


def test_positions_end_with_their_table():
    model = tiny_model("gpt2", max_position_embeddings=40)
    runner = runner_of(model)
    with_graphs = GraphRunner(StepGraphs(model, None), runner)
    static = with_graphs.begin(prefilled(runner, torch.arange(3, 42)[None]))
    with_graphs.run([lay_out(5, GuessTree.empty())], static)
    static.commit([lay_out(5, GuessTree.empty())], [[0]])
    with pytest.raises(IndexError, match="position 40 lies beyond the table of 40 positions"):
        with_graphs.run([lay_out(5, GuessTree.empty())], static)


def test_on_a_cpu_nothing_is_captured():
    """The default, where there is no GPU: one warning that says so."""
    model = tiny_model("llama")
    step_graphs = StepGraphs(model)
    with pytest.warns(UserWarning, match="device of type cpu"), serving(step_graphs) as lent:
        check_identical(model, [random_prompt(random.Random(1))], GREEDY, FIXED, seed=0)
    with warnings.catch_warnings(), serving(step_graphs):
        warnings.simplefilter("error")
        check_identical(model, [random_prompt(random.Random(1))], GREEDY, FIXED, seed=0)
    assert not lent


@torch.no_grad()
def test_autocast_goes_without():
    model = tiny_model("llama")
    runner = GraphRunner(StepGraphs(model, None), runner_of(model))
    cache = prefilled(runner, torch.tensor([[3, 4]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert runner.begin(cache) is cache
    assert runner.begin(cache) is not cache


def test_a_call_without_the_buffers_is_the_other_runners():
    """From its beginning to its end."""
    model, told = tiny_model("llama"), []

    class Told(EagerRunner):
        def begin(self, cache):
            told.append("begin")
            return super().begin(cache)

        def end(self):
            told.append("end")

    other = Told(model, find_adapter(model))
    cache, step_graphs = prefilled(other, torch.tensor([[3, 4]])), StepGraphs(model, None)
    with_buffers, without = GraphRunner(step_graphs, other), GraphRunner(step_graphs, other)
    assert with_buffers.begin(cache) is not cache
    assert told == []
    assert without.begin(cache) is cache
    assert told == ["begin"]
    without.end()
    assert told == ["begin", "end"]
    assert step_graphs._lent is not None
    with_buffers.end()
    assert told == ["begin", "end", "end"]
    assert step_graphs._lent is None


def test_copies_make_their_own():
    """A wrapped model carries its graphs, and can be copied and pickled."""
    model = tiny_model("llama")
    model.graphs = StepGraphs(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.graphs._model is copied
        assert copied.graphs._buffers is not model.graphs._buffers


# --- on a GPU


def on_gpu(model_type: str = "llama", dtype: torch.dtype = torch.float32):
    return tiny_model(model_type).to("cuda", dtype)


@needs_gpu
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gptj", "opt", "gemma2", "mixtral", "deepseek_v3"])
@torch.no_grad()
def test_captured_steps_give_eager_logits(model_type, monkeypatch):
    monkeypatch.setattr(graphs, "FIRST_CAPACITY", 16)
    model, rng = on_gpu(model_type), random.Random(0)
    runner, ids = runner_of(model), random_prompt(rng, 30).cuda()
    assert why_not(model) is None
    eager, step_graphs = prefilled(runner, ids), StepGraphs(model)
    with_graphs = GraphRunner(step_graphs, runner)
    static = with_graphs.begin(prefilled(runner, ids))
    for _ in range(40):
        step = random_step(rng)[0]
        expected = runner.run([step], eager).logits
        assert agree(with_graphs.run([step], static).logits, expected)
        for cache in (eager, static):
            cache.commit([step], [[0]])
    assert step_graphs._replays
    assert step_graphs._given_up is None


@needs_gpu
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gemma3_text", "qwen3_moe"])
def test_captured_texts_are_identical(model_type):
    model, rng = on_gpu(model_type), random.Random(3)
    step_graphs = StepGraphs(model)
    lookahead.wrap(model, FIXED)
    for options in (GREEDY, SAMPLED) * 2:
        ids = random_prompt(rng).cuda()
        texts = []
        for serve in (False, True):
            torch.manual_seed(0)
            with serving(step_graphs) if serve else nullcontext():
                texts.append(model.generate(ids, **options).tolist())
        assert texts[0] == texts[1]
    assert step_graphs._replays
    assert step_graphs._given_up is None


@needs_gpu
@torch.no_grad()
def test_replays_are_no_passes(monkeypatch):
    """A step that was captured and checked does not run the model's Python."""
    model = on_gpu()
    runner = GraphRunner(StepGraphs(model), runner_of(model))
    static = runner.begin(prefilled(runner, torch.tensor([[3, 4, 5]], device="cuda")))
    step, passes = random_step(random.Random(0))[0], []
    original = StepGraphs._pass
    monkeypatch.setattr(StepGraphs, "_pass", lambda self, *key: passes.append(key) or original(self, *key))
    counts = []
    for _ in range(6):
        runner.run([step], static)
        static.commit([step], [[0]])
        counts.append(len(passes))
    assert counts[0] == graphs.WARM_UP_RUNS + 2
    assert counts[1] == counts[-1] == counts[0] + 1


@needs_gpu
def test_failed_capture_leaves_the_device_usable(monkeypatch):
    """A pass that waits for the GPU cannot be captured; sampling goes on from the same state of the generator."""
    model = on_gpu()
    original = vars(StaticPass)["computed"]

    def waiting(self, operation):
        assert self.ids.sum().item() >= 0
        return original.__get__(self)(operation)

    monkeypatch.setattr(StaticPass, "computed", waiting)
    lookahead.wrap(model, FIXED)
    ids = random_prompt(random.Random(3)).cuda()
    torch.manual_seed(0)
    expected = model.generate(ids, **SAMPLED).tolist()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="cannot be captured"), serving(StepGraphs(model)):
        assert model.generate(ids, **SAMPLED).tolist() == expected
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    state = torch.cuda.get_rng_state()
    capture_cuda(lambda: torch.zeros(3, device="cuda"), torch.device("cuda"), None)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert model.generate(ids, **GREEDY).shape[1] == ids.shape[1] + 60


# --- as it is asked for


def test_the_configuration_asks_for_graphs():
    model = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, **GREEDY)
    lookahead.wrap(model, LookaheadConfig(cuda_graphs=True))
    with pytest.warns(UserWarning, match="device of type cpu"):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert model.lookahead.graphs is not None
    assert lookahead.wrap(tiny_model("llama")).lookahead.graphs is None
