"""ONNX Runtime GenAI on the CPU, in float32 for any --dtype, and its n-gram speculation.

See protocol.py, and install.sh for the environment. Its own builder exports the model's folder (kept in
DIR/ortgenai/models; delete it when you like). Its kernels for CPUs have no bf16, so the texts are those of the same
weights in float32.

Methods:
plain  no speculation
ngram  the continuation of an earlier occurrence of the last 3 tokens; measured speed decides the number of guesses
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

from protocol import Answer, Decode, Request, arguments, converted, end_tokens, serve

SPECULATION = {"plain": {}, "ngram": {"ngram_size": 3, "max_draft_tokens": 8}}


def export(model: Path, folder: Path) -> None:
    """Raises RuntimeError with the builder's reason."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command = [*builder, "-i", model, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", Path(sys.prefix) / "cache"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(f"ONNX Runtime GenAI cannot export {model}: {said[-1]}")


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method not in SPECULATION:
        raise ValueError(f"--method has to be one of {', '.join(SPECULATION)}, got {chosen.method!r}")
    folder = converted(chosen.model, "onnx", Path(sys.prefix) / "models", lambda path: export(chosen.model, path))
    import onnxruntime_genai as genai

    speculation = SPECULATION[chosen.method]
    config = genai.Config(str(folder))
    session = {"intra_op_num_threads": chosen.threads}
    ends = {"eos_token_id": end_tokens(chosen.model)}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}, **ends}}))
    model = genai.Model(config)

    def decode(request: Request) -> Answer:
        (prompt,) = request.prompts
        sampling = {"do_sample": request.temperature > 0, "random_seed": request.seed}
        if request.temperature > 0:
            sampling |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        start = time.perf_counter()
        options = genai.GeneratorParams(model)
        options.set_search_options(max_length=len(prompt) + request.max_new_tokens, **sampling)
        options.set_speculative_options(**speculation)
        generator = genai.Generator(model, options)
        generator.append_tokens(prompt)
        ids: list[int] = []
        first_seconds = None
        while not generator.is_done():
            generator.generate_next_token()
            ids.append(int(generator.get_next_tokens()[0]))
            first_seconds = first_seconds or time.perf_counter() - start
        seconds = time.perf_counter() - start
        counts = generator.get_speculative_stats()
        if not speculation:
            return Answer([ids], seconds, len(ids) - 1, first_seconds=first_seconds)
        return Answer(
            [ids], seconds, counts["standard_fallback_steps"] + counts["target_forward_passes"] - 1,
            counts["draft_tokens_evaluated"], counts["draft_tokens_accepted"], first_seconds,
        )  # fmt: skip

    return decode, {name: version(name) for name in ("onnxruntime-genai", "onnxruntime", "transformers")}


if __name__ == "__main__":
    serve(load, arguments())
