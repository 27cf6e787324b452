"""OpenVINO GenAI on the CPU: its pipeline with a scheduler, and its prompt lookup.

See protocol.py, and install.sh for the environment. optimum-intel exports the model's folder, uncompressed (kept in
DIR/openvino/models; delete it when you like). Passes and the cache are in --dtype, or in float32 on a processor without
instructions for bf16; by default the cache has 8 bits.

Methods:
plain          no speculation
prompt-lookup  the continuation of an earlier occurrence of the last 3 tokens or fewer, 5 guesses in each pass

`seconds` is wall-clock time. The time of the first token is the library's own account.
"""

import json
import os
import sys
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

from protocol import Answer, Decode, Request, arguments, converted, end_tokens, serve

METHODS = ("plain", "prompt-lookup")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
CACHE_GIB = 1
MOST_GUESSES, LONGEST_MATCH = 5, 3  # as in OpenVINO GenAI's sample of prompt lookup


def export(model: Path, folder: Path) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    # Without ov_config, models of a billion parameters and more would be exported in 8 bits.
    main_export(str(model), folder, task="text-generation-with-past", ov_config=OVConfig())


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method not in METHODS:
        raise ValueError(f"--method has to be one of {', '.join(METHODS)}, got {chosen.method!r}")
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # for the export
    folder = converted(chosen.model, "openvino", Path(sys.prefix) / "models", lambda path: export(chosen.model, path))
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    speculates = chosen.method == "prompt-lookup"
    config = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # so that a repeated prompt costs as much as the first time
    scheduler.max_num_batched_tokens = config["max_position_embeddings"]  # computes a prompt in one pass
    scheduler.cache_size = CACHE_GIB
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = PRECISIONS[chosen.dtype if has_bf16 else "float32"]
    pipeline = genai.LLMPipeline(
        folder, "CPU", scheduler_config=scheduler, INFERENCE_PRECISION_HINT=precision, KV_CACHE_PRECISION=precision,
        INFERENCE_NUM_THREADS=chosen.threads, **({"prompt_lookup": True} if speculates else {}),
    )  # fmt: skip
    ends = end_tokens(chosen.model)

    def decode(request: Request) -> Answer:
        (prompt,) = request.prompts
        options = genai.GenerationConfig()
        options.apply_chat_template = False
        options.max_new_tokens = request.max_new_tokens
        options.stop_token_ids = set(ends)
        if speculates:
            options.num_assistant_tokens, options.max_ngram_size = MOST_GUESSES, LONGEST_MATCH
        if request.temperature > 0:
            options.do_sample, options.temperature = True, request.temperature
            options.rng_seed = request.seed
        ids = np.array([prompt])
        start = time.perf_counter()
        said = pipeline.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), options)
        seconds = time.perf_counter() - start
        passes = said.perf_metrics.raw_metrics.token_infer_durations
        first = said.perf_metrics.get_ttft().mean / 1000
        return Answer([list(said.tokens[0])], seconds, len(passes) - 1, first_seconds=first)

    return decode, {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel", "transformers")}


if __name__ == "__main__":
    serve(load, arguments())
