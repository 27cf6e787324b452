"""On a GPU, what the other tests show on a CPU. Each test also runs on the CPU, which shows that the test is right.

tests/test_graphs.py has those of CUDA graphs.
"""

import random
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from test_attention import Layer, random_step
from test_lossless import left_pad, random_prompt
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from zoo import tiny_model

import lookahead
from lookahead import DraftModelSource, LookaheadConfig, PoolSource
from lookahead.decoding_pass import decoding_pass
from lookahead.guessing.layer_skip import LayerSkipSource
from lookahead.models import attention
from lookahead.passes.capabilities import find_adapter
from lookahead.tools.audit import audit

GREEDY = {"max_new_tokens": 40, "do_sample": False}
SAMPLED = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8}
FIXED = LookaheadConfig(budget=12, window_size=3, ngram_size=3)
MODELS = ["llama", "qwen2", "gemma", "gemma3_text", "mistral", "gpt2", "gptj", "opt", "mixtral", "llama4_text", "lfm2"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])


@pytest.fixture(autouse=True)
def full_precision():
    """Products of float32 must not be rounded to TF32, or other shapes of a pass would write other texts."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def written(model, inputs: dict, options: dict, **more) -> list[list[int]]:
    torch.manual_seed(0)
    return model.generate(
        **{name: value.to(model.device) for name, value in inputs.items()}, **options, **more
    ).tolist()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_two_parts_are_the_whole(device, dtype, head_dim, groups):
    """The error of split attention is about that of dense attention in the same dtype."""
    for seed, (held, guesses) in enumerate([(0, 5), (1, 0), (37, 12), (700, 24), (1500, 3)]):
        step = random_step(np.random.default_rng(seed), guesses, 0)
        torch.manual_seed(seed)
        new = len(step)
        query = torch.randn(1, new, 2 * groups, head_dim, device=device).to(dtype).transpose(1, 2)
        room = torch.randn(2, 1, 2, held + new + 5, head_dim, device=device).to(dtype)  # buffers are larger than used
        key, value = room[:, :, :, : held + new]
        own = torch.zeros(1, 1, new, new, dtype=dtype, device=device)
        own.masked_fill_(~torch.from_numpy(step.ancestors).to(device), torch.finfo(dtype).min)
        dense = torch.nn.functional.pad(own, (held, 0))
        exact, _ = sdpa_attention_forward(Layer(groups), query.double(), key.double(), value.double(), dense.double())
        usual, _ = sdpa_attention_forward(Layer(groups), query, key, value, dense)
        with decoding_pass(splits_attention=True, uses_kernels=False):
            out, _ = attention.attend(Layer(groups), query, key, value, own)
        error, usual_error = ((x.double() - exact).abs().max().item() for x in (out, usual))
        assert error <= 3 * usual_error + 8 * torch.finfo(dtype).eps, (held, guesses)


@on_each_device
@pytest.mark.parametrize("model_type", MODELS)
def test_texts_are_identical(device, model_type):
    model, rng = tiny_model(model_type).to(device), random.Random(model_type)
    prompts = [random_prompt(rng) for _ in range(3)]
    expected = [written(model, {"input_ids": ids}, options) for ids in prompts for options in (GREEDY, SAMPLED)]
    lookahead.wrap(model, FIXED)
    assert [written(model, {"input_ids": ids}, options) for ids in prompts for options in (GREEDY, SAMPLED)] == expected
    assert model.lookahead.stats.accepted.total() > 0


@on_each_device
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2"])
def test_batches_are_identical(device, model_type):
    model, rng = tiny_model(model_type).to(device), random.Random(3)
    inputs = left_pad([random_prompt(rng) for _ in range(5)])
    expected = written(model, inputs, GREEDY)
    lookahead.wrap(model, FIXED)
    assert written(model, inputs, GREEDY) == expected
    again = written(model, inputs, SAMPLED)
    assert written(model, inputs, SAMPLED) == again


@on_each_device
def test_caches_go_on(device):
    """A conversation on one cache, in which each turn repeats the text so far."""
    model, rng = tiny_model("llama").to(device), random.Random(5)
    turns = [random_prompt(rng) for _ in range(3)]

    def conversation() -> list[int]:
        cache, ids = DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long, device=device)
        for turn in turns:
            ids = torch.cat([ids, turn.to(device)], dim=1)
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        return ids.tolist()

    expected = conversation()
    lookahead.wrap(model, FIXED)
    assert conversation() == expected


@on_each_device
@pytest.mark.parametrize("source", ["draft model", "skipped layers"])
def test_sources_that_compute(device, source):
    model, small = tiny_model("llama").to(device), tiny_model("llama", seed=1).to(device)
    inputs = {"input_ids": random_prompt(random.Random(7))}
    expected = [written(model, inputs, options) for options in (GREEDY, SAMPLED)]
    drafts = DraftModelSource(small) if source == "draft model" else LayerSkipSource(model, [1])
    lookahead.wrap(model, FIXED, source=[PoolSource(), drafts])
    assert [written(model, inputs, options) for options in (GREEDY, SAMPLED)] == expected
    assert model.lookahead.stats.sources[type(drafts).__name__].proposed > 0


@on_each_device
@pytest.mark.parametrize("setting", ["compile_passes", "cuda_graphs"])
@pytest.mark.filterwarnings("ignore:CUDA graphs do not serve")
def test_faster_passes(device, setting):
    if (device, setting) == ("cpu", "compile_passes"):
        pytest.skip("tests/test_compiled.py has it")
    model, inputs = tiny_model("llama").to(device), {"input_ids": random_prompt(random.Random(9))}
    expected = [written(model, inputs, options) for options in (GREEDY, SAMPLED)]
    lookahead.wrap(model, LookaheadConfig(budget=12, window_size=0, **{setting: True}))
    assert [written(model, inputs, options) for options in (GREEDY, SAMPLED)] == expected
    report = model.lookahead.report()
    assert f"passes: {'compiled' if setting == 'compile_passes' else 'CUDA graphs'}" in report
    assert ("given up: " in report) == (device == "cpu"), report


@on_each_device
def test_automatic_budgets(device):
    """Costs are measured on the device, and chosen budgets write the same."""
    model, inputs = tiny_model("llama").to(device), {"input_ids": random_prompt(random.Random(11))}
    expected = written(model, inputs, GREEDY)
    lookahead.wrap(model)
    assert [written(model, inputs, GREEDY) for _ in range(3)] == [expected] * 3


@on_each_device
def test_threads_and_streams(device):
    """Four threads share a model and a pool; on a GPU, each computes in a stream of its own."""
    model, rng = tiny_model("llama").to(device), random.Random(13)
    prompts = [random_prompt(rng) for _ in range(4)]
    expected = [written(model, {"input_ids": ids}, GREEDY) for ids in prompts]
    lookahead.wrap(model, FIXED)
    texts: dict[int, list] = {}

    def write(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            texts[number] = model.generate(prompts[number].to(device), **GREEDY).tolist()

    if device == "cuda":
        torch.cuda.synchronize()  # the weights and the probe
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts.get(number) for number in range(4)] == expected


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parts_at_near_ties_alone(device, dtype):
    model, rng = tiny_model("llama", hidden_size=128).to(device, dtype), random.Random(15)
    prompts = [random_prompt(rng).to(device) for _ in range(6)]
    tallies = audit(model, prompts, 24)
    assert [d for tally in tallies for d in tally.divergences if not d.near_tie and tally.way == "lookahead"] == []


@on_each_device
def test_split_attention_is_used(device):
    """In the dtypes for which a GPU has a flash kernel, and in all on a CPU."""
    model = tiny_model("llama").to(device, torch.bfloat16)
    assert find_adapter(model).splits_attention
