"""The stages of scripts/gpu.py except the first. Each takes a plan and a report, and returns a page and results."""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import ballast
import benchmark
import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import lookahead
from bench.benchmark_page import markdown
from bench.corpora import tokenized_prompts
from bench.methods import LOOKAHEAD, Subject, as_inputs
from bench.pages import table
from bench.speedups import summarise, title
from bench.timing import decoding_options, waited, why_no_ratios
from lookahead.compat import CACHE
from lookahead.models.adapter import vocabulary_of
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.environment import environment
from lookahead.passes.graphs import GraphRunner, StepGraphs, capture_cuda
from lookahead.passes.measuring import skip
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from lookahead.tools.loading import load, load_tokenizer
from lookahead.tools.prompts import read_prompts
from ngram_pool import GuessTree, Origin

ROOT = Path(__file__).parents[2]

Result = tuple[str, dict]


def _run(arguments: list[str], report) -> Result:
    """Run a command of the repository as a stage."""
    seconds = report.until - time.time()
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=seconds, errors="replace"
        )
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, status = _text(error.stdout) + _text(error.stderr), None
    end = "its time was over" if status is None else f"exit status {status}"
    text = f"`python {' '.join(arguments)}`: {end}\n\n```\n{output[-6000:].rstrip()}\n```"
    return text, {"arguments": arguments, "status": status, "output": output}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def tests(plan, report) -> Result:
    """The tests that need a GPU; on a CPU, only one, because `make test` runs them all."""
    chosen = ["-k", "cpu and test_caches"]
    if plan.device.startswith("cuda"):
        chosen = ["-m", "gpu", "tests/exactness/test_graphs.py"]
    return _run(
        ["-m", "pytest", "-p", "no:cacheprovider", "-v", "--durations=10", "tests/exactness/test_gpu.py", *chosen],
        report,
    )


def audit(plan, report) -> Result:
    """Where texts part in half precision, and whether rounding explains it."""
    dtype = "float32" if plan.is_small else "bfloat16"
    sizes = ["--count", "1", "--max-new-tokens", "4"] if plan.is_small else ["--count", "4", "--max-new-tokens", "32"]
    options = ["--dtype", dtype, "--temperature", "0.7", *sizes, "--json", str(report.path.with_suffix(".all.json"))]
    return _run(["-m", "lookahead", "audit", *_on(plan), *options], report)


def batches(plan, report) -> Result:
    """Batches of several sizes against plain decoding of the same batches."""
    sizes = ["--sizes", "1,2", "--limit", "2", "--max-new-tokens", "4"]
    if not plan.is_small:
        sizes = ["--sizes", "1,8", "--limit", "8", "--max-new-tokens", "32"]
    options = ["--prompts", str(_prompts_for(plan)), "--dtype", _dtype(plan), "--repeats", "1", *sizes]
    return _run(["scripts/compare_batches.py", *_on(plan), *options, "--out", f"{report.path}-table"], report)


def _on(plan) -> list[str]:
    """Return the options that name the model and the device."""
    return [*(["--model", plan.model] if plan.model else []), "--device", plan.device]


# -- models -----------------------------------------------------------------------------------------------------------

_LLAMA_3 = {"vocab_size": 128256, "head_dim": 128, "num_key_value_heads": 8}
SHAPES = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "1B": {**_LLAMA_3, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
           "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "3B": {**_LLAMA_3, "hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192,
           "num_attention_heads": 24, "tie_word_embeddings": True},
    "8B": {**_LLAMA_3, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336,
           "num_attention_heads": 32},
    "small": {"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 256, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 512},
}  # fmt: skip
"""SmolLM2-135M, and Llama 3.2 1B and 3B and 3.1 8B."""

SMALL_BALLAST = {"hidden_size": 512, "layers": 7, "intermediate_size": 1408}


def _dtype(plan) -> str:
    return "float32" if plan.device == "cpu" else "bfloat16"


def _random_llama(size: str, plan):
    """Return a Llama of random weights, made on the device."""
    config = LlamaConfig(**SHAPES[size], max_position_embeddings=2**17)
    with torch.device(plan.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, _dtype(plan))).eval()


def _ballasted(plan):
    """Return a model that writes the texts of the plan's model. It has the size of 8B, in a rehearsal a small size."""
    model = load(plan.model, _dtype(plan), plan.device)[0]
    size = SMALL_BALLAST if plan.is_small else ballast.SHAPES["8B"]
    return ballast.ballast(model, **size, max_position_embeddings=2**17)


def _prompts_for(plan) -> Path:
    """Return the file of prompts, which are in the chat template if the model has one."""
    tokenizer = load_tokenizer(plan.model)
    if tokenizer.chat_template is None:
        return plan.prompts
    lines = []
    for prompt in read_prompts(plan.prompts, None):
        chat = [{"role": "user", "content": prompt["turns"][0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        begin = tokenizer.bos_token
        if begin and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:  # the tokenizer will add it again
            text = text.removeprefix(begin)
        lines.append(json.dumps({**prompt, "turns": [text]}))
    path = plan.out / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- costs of passes --------------------------------------------------------------------------------------------------

ROWS = (1, 4, 16, 32, 64, 128, 256)
LENGTHS = (256, 2048, 8192, 32768)
INDUCTOR_ROWS, INDUCTOR_LENGTH = (1, 16, 64), 2048  # each number of rows takes half a minute to compile
WARM_UPS = 4  # passes before the first timed one: to capture a graph, and to check it twice
TIMED, SECONDS = 15, 0.4  # most passes of a cell (at least 3), and most seconds


def costs(plan, report, size: str) -> Result:
    """c(T, L): the time of a pass over T rows after L positions, for every way to run it."""
    shape = "small" if plan.is_small else size
    rows, lengths = ((1, 4, 16), (256,)) if plan.is_small else (ROWS, LENGTHS)
    model = _random_llama(shape, plan)
    results = {"environment": environment(model), "shape": SHAPES[shape], "seconds": {}, "errors": {}}
    weights = sum(weight.nbytes for weight in model.parameters())

    def page() -> str:
        parts = [
            _head(plan, results),
            f"{shape}: {weights / 1e9:.2f} GB of weights. Milliseconds of a pass over T rows, including host time and "
            "the wait for the device: the median of several passes.",
        ]
        for length in lengths:
            found = {way: cells[length] for way, cells in results["seconds"].items() if length in cells}
            shown = [count for count in rows if any(count in cells for cells in found.values())]
            if shown:
                lines = [[way, *_in_units(0.001, cells, shown)] for way, cells in found.items()]
                lines += [[f"{way}, times T = 1", *_in_units(cells[1], cells, shown)] for way, cells in found.items()]
                parts += [f"## L = {length}", table(["T", *map(str, shown)], lines, "l" + "r" * len(shown))]
        return "\n\n".join([*parts, *_errors(results)])

    with torch.no_grad():
        for way, length, cells in _all_costs(model, plan, rows, lengths):
            if not report.has_time:
                break
            try:
                for count, seconds in cells():
                    results["seconds"].setdefault(way, {}).setdefault(length, {})[count] = seconds
                    if not report.has_time:
                        break
            except Exception as error:
                results["errors"][f"{way}, L = {length}"] = repr(error)[:500]
            report.write(page(), results)
    return page(), results


def _in_units(unit: float, seconds: dict[int, float], rows: list[int]) -> list[float | None]:
    return [seconds[count] / unit if count in seconds else None for count in rows]


def _head(plan, results: dict) -> str:
    return f"`{plan.command}`; " + ", ".join(f"{name} {value}" for name, value in results["environment"].items())


def _errors(results: dict) -> list[str]:
    return [f"- {what}: {error}" for what, error in results["errors"].items()]


def _all_costs(model, plan, rows, lengths) -> Iterator[tuple[str, int, Callable[[], Iterator[tuple[int, float]]]]]:
    """Yield every way to run passes, for every length; the quick ones first."""
    adapter = find_adapter(model)
    split, dense = EagerRunner(model, adapter), EagerRunner(model, replace(adapter, splits_attention=False))
    # Without a GPU, nothing can be captured, but the same steps of fixed shape run.
    graphs = GraphRunner(StepGraphs(model, capture_cuda if plan.device.startswith("cuda") else None), split)
    runners = {f"eager, {'split attention' if adapter.splits_attention else 'as probed'}": split}
    runners["our graphs"] = graphs
    if adapter.splits_attention:  # otherwise it is the same as the first
        runners["eager, dense mask"] = dense
    for length in lengths:
        for way, runner in runners.items():
            yield way, length, lambda runner=runner, length=length: _times(runner, rows, length)
    inductor_length = min(lengths, key=lambda length: abs(length - INDUCTOR_LENGTH))
    inductor_rows = rows[:1] if plan.is_small else INDUCTOR_ROWS
    yield "reduce-overhead", inductor_length, lambda: _inductor_times(model, inductor_rows, inductor_length)


def _times(runner, rows, length: int) -> Iterator[tuple[int, float]]:
    """Yield the number of rows and the seconds of a pass, for each of ``rows``."""
    tokens = np.random.default_rng(0).integers(0, vocabulary_of(runner.model), max(rows) + 1)

    def run(count: int) -> None:
        step = lay_out(tokens[0], GuessTree.chain(tokens[1:count], Origin.TEXT))
        runner.run([step], cache)
        cache.commit([step], [[]])

    cache = runner.adapter.make_cache(length + max(rows))
    run(2)
    skip(cache, length)
    cache = runner.begin(cache)
    try:
        for count in rows:
            yield count, _median(lambda count=count: run(count), runner.model.device)
    finally:
        runner.end()


def _inductor_times(model, rows, length: int) -> Iterator[tuple[int, float]]:
    """The same with torch.compile(mode="reduce-overhead") on a static cache, which makes CUDA graphs by itself."""

    torch.compiler.reset()
    compiled = torch.compile(model.__call__, mode="reduce-overhead", dynamic=False)
    room = length + max(rows)
    for count in rows:
        cache = StaticCache(config=model.config, max_cache_len=room)
        ids = torch.ones(1, count, dtype=torch.long, device=model.device)
        positions = torch.arange(length, length + count, device=model.device)[None]
        mask = torch.zeros(1, 1, count, room, dtype=model.dtype, device=model.device)
        mask[..., length + count :] = torch.finfo(model.dtype).min
        model(input_ids=ids, **{CACHE: cache})  # allocates

        def run(ids=ids, cache=cache, positions=positions, mask=mask) -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)
            compiled(input_ids=ids, position_ids=positions, attention_mask=mask, **{CACHE: cache})

        yield count, _median(run, model.device)


def _median(call: Callable[[], object], device) -> float:
    """Return the median time of a call, including the wait for the device."""
    for _ in range(WARM_UPS):
        waited(call, device)
    times: list[float] = []
    while len(times) < 3 or (len(times) < TIMED and sum(times) < SECONDS):
        times.append(waited(call, device))
    return statistics.median(times)


# -- texts ------------------------------------------------------------------------------------------------------------

TEXT_METHODS = ("plain", "prompt-lookup", "auto", "auto-graphs", "graphs-16")
SMALL_TEXT_METHODS = ("plain", "prompt-lookup", "auto", "auto-graphs", "graphs-16")


def texts(plan, report, *kind: str) -> Result:
    """Texts by every method, by the model or with its ballast, greedy or sampled: the table of scripts/benchmark.py."""
    temperature = 0.7 if "sampled" in kind else 0.0
    methods = list(SMALL_TEXT_METHODS if plan.is_small else TEXT_METHODS)
    limit, new_tokens = (1, 8) if plan.is_small else (12, 128)
    seen: Counter = Counter()
    by_turn = []  # the first of each category, then the second of each, because the time may not suffice for all
    for prompt in read_prompts(_prompts_for(plan), None):
        by_turn.append((seen[prompt["category"]], prompt))
        seen[prompt["category"]] += 1
    prompts = [prompt for _, prompt in sorted(by_turn, key=lambda pair: pair[0])][:limit]
    name = plan.model or str(lookahead.DEMO_MODEL)
    turns = [prompt["turns"][:1] for prompt in prompts]  # in the chat template already
    ids = tokenized_prompts(name, turns, [None], len(prompts), new_tokens, raw=True)[None]
    model = _ballasted(plan) if "ballasted" in kind else name
    subject = Subject(model, _dtype(plan), plan.device, methods, None, None, timeout=180)
    rows, failures = benchmark.measure(
        subject, ids, [prompt["category"] for prompt in prompts], methods, decoding_options(new_tokens, temperature), 1,
        report.path.name, lambda: not report.has_time,
    )  # fmt: skip
    cell = {"model": f"{Path(name).name}{', ballasted' * ('ballasted' in kind)}", "dtype": _dtype(plan)}
    cell |= {"temperature": temperature, "context": None, "reading": benchmark.reading(subject.plain)}
    cell |= {"table": summarise(rows, methods, failures), "prompts": rows}
    measured = len({row["prompt"] for row in rows})
    results = {
        "environment": {
            "command": plan.command, **environment(subject.plain), "peers": {}, "max_new_tokens": new_tokens,
            "repeats": 1, "why_no_ratios": why_no_ratios(),
            "prompts": f"{measured} of {len(ids)} prompts of {plan.prompts.name}: {title(cell)}",
        },
        "cells": [cell],
    }  # fmt: skip
    return markdown(results, []), results


# -- where the time of a step goes ------------------------------------------------------------------------------------

PROFILED = ("plain", "budget-16", "graphs-16", "budget-64", "graphs-64", "auto")
API_CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync",
             "cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
             "aten::_local_scalar_dense", "aten::item", "aten::copy_")  # fmt: skip
SHOWN = 15  # kernels


def _wrap_for(model, method: str):
    """Wrap a model for a method; return the engine, None if plain."""
    if method == "plain":
        return None
    return lookahead.wrap(model, lookahead.LookaheadConfig(**LOOKAHEAD[method])).lookahead


def _write(model, inputs, new_tokens: int) -> float:
    """Write a text; return its seconds."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    return waited(lambda: model.generate(**inputs, **options), model.device)


def _inputs(plan, device, length: int | None = None):
    """Return the first prompt, repeated or cut to ``length`` tokens."""
    ids = load_tokenizer(plan.model)(read_prompts(_prompts_for(plan), 1)[0]["turns"][0]).input_ids
    return as_inputs(ids if length is None else np.resize(ids, length).tolist(), device)


def profile(plan, report) -> Result:
    """The parts of the ballasted model's step: kernels, launches, copies, waits, and the device's idle time."""
    model = _ballasted(plan)
    is_cuda = plan.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    inputs, new_tokens = _inputs(plan, model.device), 6 if plan.is_small else 32
    results: dict = {"environment": environment(model), "steps": {}, "errors": {}}

    def page() -> str:
        found = results["steps"]
        names = list(dict.fromkeys(name for row in found.values() for name in row["per step"]))
        lines = [[name, *(f"{row['per step'].get(name, 0):.3g}" for row in found.values())] for name in names]
        parts = [
            _head(plan, results),
            "Figures by step, prefill included, of each method's third text. The first two warm up, capture, measure "
            "costs. Times with the profiler are longer than without.",
            table(["", *found], lines, "l" + "r" * len(found)),
        ]
        for method, row in found.items():
            parts += [f"## {method}", table(["kernel", "ms a step", "calls a step"], row["kernels"], "lrr")]
        return "\n\n".join([*parts, *_errors(results)])

    for method in PROFILED[:3] if plan.is_small else PROFILED:
        if not report.has_time:
            break
        try:
            engine = _wrap_for(model, method)
            plainly = [_write(model, inputs, new_tokens) for _ in range(3)][-1]
            steps = engine.last.steps if engine else new_tokens - 1
            per_step = {"tokens": (new_tokens - 1) / steps, "ms without the profiler": 1000 * plainly / steps}
            if engine:
                per_step |= {f"ms {stage}": 1000 * s / steps for stage, s in engine.last.seconds.items()}
            with torch.profiler.profile(activities=activities) as profiler:
                seconds = _write(model, inputs, new_tokens)
            results["steps"][method] = _by_step(profiler, per_step, steps, seconds, is_cuda)
            if is_cuda and method in ("budget-16", "graphs-16"):
                profiler.export_chrome_trace(str(report.path) + f"-{method}.trace.json.gz")
        except Exception as error:
            results["errors"][method] = repr(error)[:500]
        finally:
            lookahead.unwrap(model)
        report.write(page(), results)
    return page(), results


def _by_step(profiler, per_step: dict, steps: int, seconds: float, is_cuda: bool) -> dict:
    """Sum the events of a profile, prefill included, and divide by the steps."""
    busy, calls, api = Counter(), Counter(), Counter()
    for event in profiler.events():
        on_device = event.device_type == DeviceType.CUDA
        if on_device or not is_cuda:
            busy[event.name] += event.self_device_time_total if is_cuda else event.self_cpu_time_total
            calls[event.name] += 1
        if not on_device and event.name in API_CALLS:
            api[event.name] += 1
    per_step |= {"ms with the profiler": 1000 * seconds / steps}
    if is_cuda:
        per_step |= {"ms the device is busy": busy.total() / 1000 / steps}
        copies = {name: count for name, count in calls.items() if name.startswith(("Memcpy", "Memset"))}
        per_step |= {name: count / steps for name, count in copies.items()}
    per_step |= {"kernels": calls.total() / steps, **{name: count / steps for name, count in sorted(api.items())}}
    kernels = [
        [name[:90], f"{us / 1000 / steps:.4f}", f"{calls[name] / steps:.1f}"] for name, us in busy.most_common(SHOWN)
    ]
    return {"per step": per_step, "kernels": kernels}


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(plan, report) -> Result:
    """The peak of memory beyond the weights by context and method, and the bytes of keys and values; and what happens
    with too little memory."""
    model = _ballasted(plan)
    new_tokens, is_cuda = 4 if plan.is_small else 32, plan.device.startswith("cuda")
    config = model.config
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    results: dict = {"environment": environment(model), "bytes of a position": per_position, "rows": []}

    def measured(method: str, length: int) -> list:
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        try:
            engine = _wrap_for(model, method)
            _write(model, _inputs(plan, model.device, length), new_tokens)
            became = "graphs: off" if "graphs" in method and engine.graphs.why_not else "decoded"
        except torch.OutOfMemoryError as error:
            became = repr(error)[:200]
        finally:
            lookahead.unwrap(model)
        peak = (torch.cuda.max_memory_allocated() if is_cuda else 0) - before
        return [length, method, per_position * (length + new_tokens) / 2**20, peak / 2**20, became]

    def page() -> str:
        columns = ["context", "method", "keys and values, MiB", "most beyond the weights, MiB", "became"]
        return f"`{plan.command}`\n\n" + table(columns, results["rows"], "rlrrl")

    lengths = (64,) if plan.is_small else (256, 2048, 8192, 32768)
    for length in lengths:
        for method in ("plain", "budget-16", "graphs-16"):
            if report.has_time:
                results["rows"].append(measured(method, length))
                report.write(page(), results)
    if is_cuda and report.has_time:  # too little memory for the buffers of graphs in addition to the cache
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(model.device).total_memory
        room = torch.cuda.memory_reserved() + 3 * per_position * lengths[-1]
        torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0), model.device)
        for method in ("budget-16", "graphs-16"):
            became = "with three times the keys and values allowed"
            results["rows"].append([*measured(method, lengths[-1])[:-1], became])
            report.write(page(), results)
    return page(), results
