"""The stages of scripts/gpu.py. Each takes a plan and a report, and returns its page and its results."""

import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from shutil import which

ROOT = Path(__file__).parents[2]

Result = tuple[str, dict]


def environment(plan, report) -> Result:
    """What is installed, what is missing, and what the device can do. Imports nothing of lookahead."""
    asked = re.findall(r'^    "([\w-]+)([<>=][^"]*)",', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    rows = []
    for name, wanted in [*asked, ("triton", ""), ("safetensors", ""), ("tokenizers", ""), ("huggingface-hub", "")]:
        try:
            rows.append([name, wanted, metadata.version(name)])
        except metadata.PackageNotFoundError:
            rows.append([name, wanted, "missing"])
    results: dict = {"command": plan.command, "python": sys.version, "packages": rows}
    results["programs"] = {name: which(name) for name in ("nvcc", "g++", "clang++", "nvidia-smi")}
    for name, arguments in (
        ("nvidia-smi", ["nvidia-smi"]),
        ("memory", ["free", "-g"]),
        ("disk", ["df", "-h", "/tmp", "."]),
    ):
        if which(arguments[0]):
            results[name] = subprocess.run(arguments, capture_output=True, text=True, timeout=60).stdout
    report.write(_environment_page(results), results)  # before anything can fail
    import torch

    device = torch.device(plan.device)
    results["torch"] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(), "tf32": torch.backends.cuda.matmul.allow_tf32,
        "flash": torch.backends.cuda.flash_sdp_enabled(), "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    if device.type == "cuda":
        results["torch"]["properties"] = str(torch.cuda.get_device_properties(device))
        results["torch"]["free and total bytes"] = torch.cuda.mem_get_info(device)
    results["measured"] = _speeds(device, plan.is_small)
    results["imports"] = _imports()
    return _environment_page(results), results


def _speeds(device, is_small: bool) -> dict:
    """The rates that bound a pass: bytes copied and products made in a second."""
    import torch

    from bench.timing import waited

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    numbers = torch.ones(2**22 if is_small else 2**31, dtype=torch.uint8, device=device)
    size = 256 if is_small else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    target = torch.empty_like(numbers)
    copying = min(waited(lambda: target.copy_(numbers), device) for _ in range(6))
    product = min(waited(lambda: a @ b, device) for _ in range(6))
    small = torch.zeros(1, device=device)
    launch = statistics.median(waited(lambda: small.add_(1), device) for _ in range(50))
    number = statistics.median(waited(lambda: small.item(), device) for _ in range(50))
    return {
        "GB/s copied, read and written": 2 * numbers.nbytes / copying / 1e9,
        f"TFLOP/s of a product of {size} x {size}, {dtype}": 2 * size**3 / product / 1e12,
        "us to launch a kernel and wait for it": 1e6 * launch,
        "us to read a number": 1e6 * number,
    }


def _imports() -> dict[str, str]:
    """For each module that later stages need, "" or the error of its import."""
    found = {}
    for name in (
        "lookahead",
        "lookahead.tools.audit",
        "lookahead.passes.graphs",
        "benchmark",
        "ballast",
        "compare_batches",
    ):
        try:
            __import__(name)
            found[name] = ""
        except Exception as error:
            found[name] = repr(error)
    return found


def _environment_page(results: dict) -> str:
    from bench.pages import table

    parts = [f"`{results['command']}`", f"Python {results['python']}"]
    parts.append(table(["package", "asked for", "found"], results["packages"]))
    for name in ("programs", "torch", "measured", "imports"):
        if name in results:
            parts.append(table([name, ""], [[key, str(value)] for key, value in results[name].items()]))
    parts += [f"```\n{results[name].rstrip()}\n```" for name in ("nvidia-smi", "memory", "disk") if name in results]
    return "\n\n".join(parts)


def _run(arguments: list[str], report, note: str = "") -> Result:
    """Run a command of the repository as a stage of its own."""
    seconds = report.until - time.time()
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=seconds, errors="replace"
        )
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, status = _text(error.stdout) + _text(error.stderr), None
    end = "its time was over" if status is None else f"exit status {status}"
    text = f"`python {' '.join(arguments)}`: {end}\n\n{note}```\n{output[-6000:].rstrip()}\n```"
    return text, {"arguments": arguments, "status": status, "output": output}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def tests(plan, report) -> Result:
    """The tests that need a GPU; on a CPU, only one, because `make test` runs them all."""
    chosen = ["-k", "cpu and test_caches"]
    if plan.device.startswith("cuda"):
        chosen = ["-m", "gpu", "tests/test_graphs.py"]
    return _run(
        ["-m", "pytest", "-p", "no:cacheprovider", "-v", "--durations=10", "tests/test_gpu.py", *chosen], report
    )


def audit(plan, report) -> Result:
    """Where texts part in half precision, and whether rounding explains it."""
    model = ["--model", plan.model] if plan.model else []
    dtype = "float32" if plan.is_small else "bfloat16"
    sizes = ["--count", "1", "--max-new-tokens", "4"] if plan.is_small else ["--count", "16", "--max-new-tokens", "96"]
    options = ["--dtype", dtype, "--device", plan.device, "--temperature", "0.7", *sizes]
    return _run(
        ["-m", "lookahead", "audit", *model, *options, "--json", str(report.path.with_suffix(".all.json"))], report
    )


def batches(plan, report) -> Result:
    """Batches of several sizes against plain decoding of the same batches."""
    model = ["--model", plan.model] if plan.model else []
    sizes = ["--sizes", "1,2", "--limit", "2", "--max-new-tokens", "4"]
    if not plan.is_small:
        sizes = ["--sizes", "1,2,4,8,16,32", "--limit", "32", "--max-new-tokens", "64"]
    options = ["--prompts", str(_prompts_for(plan)), "--device", plan.device, "--dtype", _dtype(plan), "--repeats", "1"]
    return _run(["scripts/compare_batches.py", *model, *options, *sizes, "--out", str(report.path) + "-table"], report)


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
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 512},
}  # fmt: skip
"""SmolLM2-135M, and Llama 3.2 1B and 3B and 3.1 8B."""

SMALL_BALLAST = {"hidden_size": 512, "layers": 7, "intermediate_size": 1408}


def _dtype(plan) -> str:
    return "float32" if plan.device == "cpu" else "bfloat16"


def _random_llama(size: str, plan):
    """A Llama of random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[size], max_position_embeddings=2**17)
    with torch.device(plan.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, _dtype(plan))).eval()


def _ballasted(plan):
    """The plan's model with the size of 8B, which writes its texts; in a rehearsal, only a little larger."""
    from ballast import SHAPES as SIZES
    from ballast import ballast

    from lookahead.tools.loading import load

    model = load(plan.model, _dtype(plan), plan.device)[0]
    return ballast(model, **(SMALL_BALLAST if plan.is_small else SIZES["8B"]), max_position_embeddings=2**17)


def _prompts_for(plan) -> Path:
    """The file of prompts; in the chat template, if the model has one."""
    import json

    from lookahead.tools.loading import load_tokenizer
    from lookahead.tools.prompts import read_prompts

    tokenizer = load_tokenizer(plan.model)
    if tokenizer.chat_template is None:
        return plan.prompts
    lines = []
    for prompt in read_prompts(plan.prompts, None):
        chat = [{"role": "user", "content": prompt["turns"][0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        begin = tokenizer.bos_token
        if begin and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:  # it will be put there again
            text = text.removeprefix(begin)
        lines.append(json.dumps({**prompt, "turns": [text]}))
    path = plan.out / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- costs of passes --------------------------------------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LENGTHS = (256, 2048, 8192, 32768)
INDUCTOR_ROWS, INDUCTOR_LENGTH = (1, 16, 64), 2048  # each takes half a minute to compile
WARM_UPS = 4  # passes before the first that is timed: to capture a graph, and to check it twice
TIMED, SECONDS = 15, 0.4  # passes of a cell, at least 3, and seconds


def costs(plan, report, size: str) -> Result:
    """c(T, L): the time of a pass over T rows behind L positions, by every way to run it."""
    import torch

    from bench.pages import table
    from lookahead.passes.environment import environment as where

    shape = "small" if plan.is_small else size
    rows, lengths = ((1, 4, 16), (256,)) if plan.is_small else (ROWS, LENGTHS)
    model = _random_llama(shape, plan)
    results = {"environment": where(model), "shape": SHAPES[shape], "seconds": {}, "errors": {}}
    weights = sum(weight.nbytes for weight in model.parameters())

    def page() -> str:
        parts = [
            f"`{plan.command}`; " + ", ".join(f"{name} {value}" for name, value in results["environment"].items()),
            f"{shape}: {weights / 1e9:.2f} GB of weights. Milliseconds of a pass over T rows, its host time and the "
            "wait for the device included: the median of several, one after another.",
        ]
        for length in lengths:
            found = {way: cells[length] for way, cells in results["seconds"].items() if length in cells}
            shown = [count for count in rows if any(count in cells for cells in found.values())]
            if shown:
                lines = [[way, *(_ms(cells.get(count)) for count in shown)] for way, cells in found.items()]
                relative = [
                    [f"{way}, times T = 1", *(_ratio(cells.get(count), cells.get(1)) for count in shown)]
                    for way, cells in found.items()
                ]
                parts += [f"## L = {length}", table(["T", *map(str, shown)], lines + relative, "l" + "r" * len(shown))]
        parts += [f"- {way}: {error}" for way, error in results["errors"].items()]
        return "\n\n".join(parts)

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


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"


def _ratio(seconds: float | None, base: float | None) -> str:
    return "" if seconds is None or base is None else f"{seconds / base:.2f}"


def _all_costs(model, plan, rows, lengths) -> Iterator[tuple[str, int, Callable[[], Iterator[tuple[int, float]]]]]:
    """Every way to run passes with every length, the quick ones first."""
    from dataclasses import replace

    from lookahead.passes.capabilities import find_adapter, why_not_compiled
    from lookahead.passes.compiled import CompiledRunner
    from lookahead.passes.graphs import GraphRunner, StepGraphs, capture_cuda
    from lookahead.passes.runner import EagerRunner

    adapter = find_adapter(model)
    split, dense = EagerRunner(model, adapter), EagerRunner(model, replace(adapter, splits_attention=False))
    # Without a GPU nothing can be captured, but the same steps of fixed shape run.
    graphs = GraphRunner(StepGraphs(model, capture_cuda if plan.device.startswith("cuda") else None), split)
    runners = {f"eager, {'split attention' if adapter.splits_attention else 'as probed'}": split}
    runners |= {"our graphs": graphs, "eager, dense mask": dense}
    for length in lengths:
        for way, runner in runners.items():
            yield way, length, lambda runner=runner, length=length: _times(runner, rows, length)
    inductor_length = min(lengths, key=lambda length: abs(length - INDUCTOR_LENGTH))
    inductor_rows = rows[:1] if plan.is_small else INDUCTOR_ROWS
    yield "reduce-overhead", inductor_length, lambda: _inductor_times(model, inductor_rows, inductor_length)
    if why_not_compiled(model, adapter) is None:
        compiled = CompiledRunner(model, adapter)
        for length in lengths:
            yield "compile_passes", length, lambda length=length: _times(compiled, rows, length)


def _times(runner, rows, length: int) -> Iterator[tuple[int, float]]:
    """The number of rows and the seconds of a pass, for each of ``rows``."""
    import numpy as np

    from lookahead.models.adapter import vocabulary_of
    from lookahead.step import lay_out
    from ngram_pool import GuessTree, Source

    tokens = np.random.default_rng(0).integers(0, vocabulary_of(runner.model), max(rows) + 1)

    def run(count: int) -> None:
        step = lay_out(tokens[0], GuessTree.chain(tokens[1:count], Source.TEXT))
        runner.run([step], cache)
        cache.commit([step], [[]])

    cache = runner.adapter.make_cache(length + max(rows))
    run(2)
    cache.skip(length)
    cache = runner.begin(cache)
    try:
        for count in rows:
            yield count, _median(lambda count=count: run(count), runner.model.device)
    finally:
        runner.end()


def _inductor_times(model, rows, length: int) -> Iterator[tuple[int, float]]:
    """The same for torch.compile(mode="reduce-overhead") on a static cache, which makes CUDA graphs by itself."""
    import torch
    from transformers import StaticCache

    torch.compiler.reset()
    compiled = torch.compile(model.__call__, mode="reduce-overhead", dynamic=False)
    room = length + max(rows)
    for count in rows:
        cache = StaticCache(config=model.config, max_cache_len=room)
        ids = torch.ones(1, count, dtype=torch.long, device=model.device)
        positions = torch.arange(length, length + count, device=model.device)[None]
        mask = torch.zeros(1, 1, count, room, dtype=model.dtype, device=model.device)
        mask[..., length + count :] = torch.finfo(model.dtype).min
        model(input_ids=ids, past_key_values=cache)  # allocates

        def run(ids=ids, cache=cache, positions=positions, mask=mask) -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)
            compiled(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache)

        yield count, _median(run, model.device)


def _median(call: Callable[[], object], device) -> float:
    """The median time of a call, with the wait for the device."""
    from bench.timing import waited

    for _ in range(WARM_UPS):
        waited(call, device)
    times: list[float] = []
    while len(times) < 3 or (len(times) < TIMED and sum(times) < SECONDS):
        times.append(waited(call, device))
    return statistics.median(times)


# -- texts ------------------------------------------------------------------------------------------------------------

TEXT_METHODS = (
    "plain", "static-compiled", "prompt-lookup", "steps-of-one", "auto", "auto-shared", "auto-graphs",
    *(f"{way}-{budget}" for budget in (16, 32, 64, 127) for way in ("budget", "graphs")),
)  # fmt: skip
SMALL_TEXT_METHODS = ("plain", "prompt-lookup", "auto", "auto-graphs", "graphs-16")


def texts(plan, report, *kind: str) -> Result:
    """Texts by every method, from the model or its ballasted self, greedy or sampled: scripts/benchmark.py's table."""
    import benchmark

    from bench.benchmark_page import markdown
    from bench.corpora import tokenized_prompts
    from bench.methods import Subject
    from bench.speedups import summarise, title
    from bench.timing import decoding_options
    from lookahead import DEMO_MODEL
    from lookahead.passes.environment import environment as where
    from lookahead.tools.prompts import read_prompts

    temperature = 0.7 if "sampled" in kind else 0.0
    methods = list(SMALL_TEXT_METHODS if plan.is_small else TEXT_METHODS)
    limit, new_tokens = (1, 8) if plan.is_small else (12, 128)
    seen: Counter = Counter()
    by_turn = []  # the first of each category, then the second of each, because time may end early
    for prompt in read_prompts(_prompts_for(plan), None):
        by_turn.append((seen[prompt["category"]], prompt))
        seen[prompt["category"]] += 1
    prompts = [prompt for _, prompt in sorted(by_turn, key=lambda pair: pair[0])][:limit]
    name = plan.model or str(DEMO_MODEL)
    turns = [prompt["turns"][0] for prompt in prompts]  # in the chat template already
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
            "command": plan.command, **where(subject.plain), "peers": {}, "max_new_tokens": new_tokens, "repeats": 1,
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


def _generate(model, method: str, inputs, new_tokens: int):
    """Write a text by a method; return the engine, None if plain."""
    import lookahead
    from bench.methods import LOOKAHEAD

    if method != "plain":
        lookahead.wrap(model, lookahead.LookaheadConfig(**LOOKAHEAD[method]))
    model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return None if method == "plain" else model.lookahead


def _inputs(plan, device, length: int | None = None):
    """The first prompt; repeated or cut to ``length`` tokens."""
    import numpy as np

    from bench.methods import as_inputs
    from lookahead.tools.loading import load_tokenizer
    from lookahead.tools.prompts import read_prompts

    ids = load_tokenizer(plan.model)(read_prompts(_prompts_for(plan), 1)[0]["turns"][0]).input_ids
    return as_inputs(ids if length is None else np.resize(ids, length).tolist(), device)


def profile(plan, report) -> Result:
    """What a step does, of the ballasted model: kernels, launches, copies, waits, and what the device idles."""
    import torch
    from torch.profiler import ProfilerActivity

    import lookahead
    from bench.pages import table
    from lookahead.passes.environment import environment as where

    model = _ballasted(plan)
    is_cuda = plan.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    inputs, new_tokens = _inputs(plan, model.device), 6 if plan.is_small else 48
    results: dict = {"environment": where(model), "steps": {}, "errors": {}}

    def page() -> str:
        found = results["steps"]
        names = list(dict.fromkeys(name for row in found.values() for name in row["per step"]))
        lines = [[name, *(f"{row['per step'].get(name, 0):.3g}" for row in found.values())] for name in names]
        parts = [
            f"`{plan.command}`; " + ", ".join(f"{name} {value}" for name, value in results["environment"].items()),
            "By step. Times with the profiler are longer than those without.",
            table(["", *found], lines, "l" + "r" * len(found)),
        ]
        for method, row in found.items():
            parts += [f"## {method}", table(["kernel", "ms a step", "calls a step"], row["kernels"], "lrr")]
        parts += [f"- {method}: {error}" for method, error in results["errors"].items()]
        return "\n\n".join(parts)

    for method in PROFILED[:3] if plan.is_small else PROFILED:
        if not report.has_time:
            break
        try:
            _generate(model, method, inputs, new_tokens)  # warms up, captures and measures costs
            began = time.perf_counter()
            engine = _generate(model, method, inputs, new_tokens)
            plainly = time.perf_counter() - began
            steps = engine.last.steps if engine else new_tokens - 1
            per_step = {"tokens": (new_tokens - 1) / steps, "ms without the profiler": 1000 * plainly / steps}
            if engine:
                per_step |= {f"ms {stage}": 1000 * s / steps for stage, s in engine.last.seconds.items()}
            with torch.profiler.profile(activities=activities) as profiler:
                began = time.perf_counter()
                _generate(model, method, inputs, new_tokens)
                seconds = time.perf_counter() - began
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
    from torch.autograd import DeviceType

    busy: Counter = Counter()
    calls: Counter = Counter()
    api: Counter = Counter()
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
    """Most memory beyond the weights by context and method, against the bytes of keys and values; and too little."""
    import torch

    import lookahead
    from bench.pages import table
    from lookahead.passes.environment import environment as where

    model = _ballasted(plan)
    new_tokens, is_cuda = 4 if plan.is_small else 32, plan.device.startswith("cuda")
    config = model.config
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    results: dict = {"environment": where(model), "bytes of a position": per_position, "rows": []}

    def measured(method: str, length: int) -> list:
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        try:
            _generate(model, method, _inputs(plan, model.device, length), new_tokens)
            became = "graphs: off" if "graphs" in method and model.lookahead.graphs.why_not else "decoded"
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
    if is_cuda and report.has_time:  # too little for the buffers of graphs beside the cache
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(model.device).total_memory
        room = torch.cuda.memory_reserved() + 3 * per_position * lengths[-1]
        torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0), model.device)
        for method in ("budget-16", "graphs-16"):
            results["rows"].append(
                [*measured(method, lengths[-1])[:-1], "with three times the keys and values allowed"]
            )
            report.write(page(), results)
    return page(), results
