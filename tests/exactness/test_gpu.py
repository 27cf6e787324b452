"""The other tests' claims on a GPU. Each test also runs on the CPU, which shows that the test is right.

tests/exactness/test_graphs.py has those of CUDA graphs.
"""

import random
import threading
from contextlib import nullcontext

import pytest
import torch
from test_lossless import left_pad, random_prompt
from transformers import DynamicCache
from zoo import tiny_model

import lookahead
from lookahead import DraftModelSource, LookaheadConfig, PoolSource
from lookahead.passes.capabilities import find_adapter
from lookahead.sources.layer_skip import LayerSkipSource
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
@pytest.mark.filterwarnings("ignore:CUDA graphs do not serve")
def test_graphs(device):
    model, inputs = tiny_model("llama").to(device), {"input_ids": random_prompt(random.Random(9))}
    expected = [written(model, inputs, options) for options in (GREEDY, SAMPLED)]
    lookahead.wrap(model, LookaheadConfig(budget=12, window_size=0, cuda_graphs=True))
    assert [written(model, inputs, options) for options in (GREEDY, SAMPLED)] == expected
    report = model.lookahead.report()
    assert "passes: CUDA graphs" in report
    assert ("given up: CUDA graphs: " in report) == (device == "cpu"), report


@on_each_device
def test_automatic_budgets(device):
    """Costs are measured on the device, and chosen budgets write the same."""
    model, inputs = tiny_model("llama").to(device), {"input_ids": random_prompt(random.Random(11))}
    expected = written(model, inputs, GREEDY)
    lookahead.wrap(model)
    assert [written(model, inputs, GREEDY) for _ in range(3)] == [expected] * 3


@pytest.mark.long
@on_each_device
def test_threads_and_streams(device):
    """Four threads share a model and a pool; on a GPU, each computes in its own stream."""
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
def test_split_attention_is_used_on_a_cpu(device):
    model = tiny_model("llama").to(device, torch.bfloat16)
    assert find_adapter(model).splits_attention == (device == "cpu")
