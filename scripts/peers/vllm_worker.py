"""vLLM on the CPU, and its draft-free speculative methods. See protocol.py, and install.sh for the environment.

Methods (for all of them, vLLM compiles the model, which is its default, and caches the result):
plain          no speculation
sgl            the same, with SGLang's kernels for AMX (VLLM_CPU_SGL_KERNEL)
ngram          prompt lookup, set up as in vLLM's documentation
suffix         Arctic Inference's suffix trees, only of the current prompt and answer
suffix-shared  the same, also of earlier answers
lookahead      this package's pool, kept from prompt to prompt; it starts from the file LOOKAHEAD_VLLM_POOL if set
"""

import json
import os
import sys
import time
from argparse import Namespace
from importlib.metadata import version

from protocol import Answer, Decode, Request, arguments, end_tokens, serve

OPENMP = os.path.join(sys.prefix, "lib", "libiomp5.so")
SUFFIX = {"method": "suffix", "num_speculative_tokens": 32}
SPECULATION = {
    "plain": None,
    "sgl": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "suffix": {**SUFFIX, "suffix_decoding_max_cached_requests": 0},
    "suffix-shared": SUFFIX,
    "lookahead": {"method": "custom_class", "model": "lookahead.vllm.PoolProposer", "num_speculative_tokens": 16},
}


def settle_environment(threads: int, cache_gib: int, sgl: bool) -> None:
    """Restart this program with the environment variables that vLLM needs from the start."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    wanted = {
        # vLLM warns that speculative decoding is much slower with another OpenMP, and needs this one preloaded. Its
        # threads spin for 5 ms and then sleep, as in processes that vLLM starts itself.
        "LD_PRELOAD": preloaded if OPENMP in preloaded else f"{OPENMP}:{preloaded}".rstrip(":"),
        "KMP_BLOCKTIME": "5",
        "OMP_NUM_THREADS": str(threads),
        # vLLM guesses n-grams with one thread of numba. With more, OpenMP would rebuild its team of threads between
        # numba's regions and torch's, and a step would take three times as long.
        "NUMBA_NUM_THREADS": "1",
        # The engine runs in this process: no messages between processes, and nothing polls while idle.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_SGL_KERNEL": str(int(sgl)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def repair_temperatures() -> None:
    """Make speculative sampling apply the temperature.

    The CPU kernel of vLLM 0.32.0 casts temperatures to integers and writes the expanded ones to a copy. So logits are
    divided by uninitialised memory: hardly any guess is accepted, and the text is not the model's.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = expand


def speculated(llm: "vllm.LLM") -> tuple[int, int]:  # noqa: F821, imported late
    """Return the tokens guessed and accepted so far by a method that speculates."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return tuple(int(values[f"vllm:spec_decode_num_{name}_tokens"]) for name in ("draft", "accepted"))


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method not in SPECULATION:
        raise ValueError(f"--method has to be one of {', '.join(SPECULATION)}, got {chosen.method!r}")
    if not os.path.isfile(OPENMP):
        raise FileNotFoundError(f"{OPENMP} is missing: make the environment with install.sh")
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    if chosen.method == "sgl" and not torch.cpu._is_amx_tile_supported():
        raise ValueError("SGLang's kernels need AMX, which this processor lacks: vLLM would run without them")
    repair_temperatures()
    speculation = SPECULATION[chosen.method]
    context = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    llm = LLM(
        model=str(chosen.model), dtype=chosen.dtype, max_model_len=context, max_num_seqs=chosen.requests,
        max_num_batched_tokens=max(context, 2048),  # computes a prompt in one pass
        enable_prefix_caching=False,  # so that a repeated prompt costs as much as the first time
        skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=False, speculative_config=speculation,
    )  # fmt: skip
    engine = llm.llm_engine
    ends = end_tokens(chosen.model)
    passes: list[None] = []
    llm.apply_model(lambda model: model.register_forward_pre_hook(lambda *_: passes.append(None)) and None)

    def decode(request: Request) -> Answer:
        if request.concurrency > chosen.requests:
            raise ValueError(f"concurrency is {request.concurrency}, but --requests {chosen.requests}")
        if request.forget and speculation:
            runner = engine.model_executor.driver_worker.worker.model_runner
            runner.drafter = type(runner.drafter)(runner.vllm_config)
        before = speculated(llm) if speculation else None
        alone = len(request.prompts) == 1
        # On the CPU, vLLM 0.32.0 fails for a request with its own seed if a prompt is computed in chunks, which happens
        # with several prompts at a time. These draw from torch's generator.
        seed = request.seed if alone else None
        ids: dict[int, list[int]] = {}
        waiting = list(enumerate(request.prompts))[::-1]
        torch.manual_seed(request.seed)
        passes.clear()
        first_seconds = None
        start = time.perf_counter()
        while len(ids) < len(request.prompts):
            while waiting and len(request.prompts) - len(waiting) - len(ids) < request.concurrency:
                number, prompt = waiting.pop()
                options = SamplingParams(
                    temperature=request.temperature, seed=seed, max_tokens=request.max_new_tokens, top_k=0, top_p=1.0,
                    stop_token_ids=ends, ignore_eos=True, detokenize=False,
                )  # fmt: skip
                engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), options)
            for output in engine.step():
                first_seconds = first_seconds or time.perf_counter() - start
                if output.finished:
                    ids[int(output.request_id)] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        counts = [after - then for after, then in zip(speculated(llm), before, strict=True)] if before else []
        steps, first_seconds = (len(passes) - 1, first_seconds) if alone else (None, None)
        texts = [ids[number] for number in sorted(ids)]
        return Answer(texts, seconds, steps, *(counts or (None, None)), first_seconds)

    several = min(chosen.requests, 2)
    decode(Request([[1, 2, 3]] * several, 8, 0, 0, several))  # warm-up: the engine delays some work to its first text
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    versions["vllm-cpu"] += ", repaired to apply the temperature when it speculates"
    return decode, versions


if __name__ == "__main__":
    chosen = arguments()
    # benchmark_vllm.py keeps an engine for each method, benchmark.py one that serves long contexts.
    settle_environment(chosen.threads, 4 if chosen.requests == 1 else 1, sgl=chosen.method == "sgl")
    serve(load, chosen)
