"""economize, a library for models of transformers, and its prompt lookup. See protocol.py and install.sh.

Methods:
lookup  the continuation of the first occurrence of the last 3 tokens or fewer, up to 7 guesses in each pass
"""

import os
import time
from argparse import Namespace
from importlib.metadata import version

from protocol import Answer, Decode, Request, arguments, end_tokens, serve

MOST_GUESSES = 7


class FirstToken:
    """A streamer that records the time of the first token, which is put after the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _ids) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method != "lookup":
        raise ValueError(f"--method has to be lookup, got {chosen.method!r}")
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # torch reads this when it is imported
    import economize
    import torch
    from economize.techniques.lookup import LookupConfig
    from transformers import AutoModelForCausalLM, GenerationConfig

    ends = end_tokens(chosen.model)
    plain = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=getattr(torch, chosen.dtype)).eval()
    plain.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else None)
    model = economize.apply(plain, LookupConfig())

    def decode(request: Request) -> Answer:
        (prompt,) = request.prompts
        sampling = {"temperature": request.temperature, "top_k": 0} if request.temperature > 0 else {}
        verifier = "rejection" if sampling else "greedy"
        results: list = []  # of economize's DecodeResult
        first = FirstToken()
        torch.manual_seed(request.seed)
        start = time.perf_counter()
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=request.max_new_tokens, do_sample=bool(sampling), **sampling,
            decoding=economize.DecodeConfig(cycle_length=1 + MOST_GUESSES, verifier=verifier), streamer=first,
            on_results=results.extend,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        drafted, accepted = (sum(counts[i] for counts in results[0].acceptance) for i in (0, 1))
        return Answer(
            [output[0, len(prompt) :].tolist()], seconds, results[0].cost_summary()["exact_calls"] - 1, drafted,
            accepted, first.times[1] - start,
        )  # fmt: skip

    return decode, {name: version(name) for name in ("economize", "torch", "transformers")}


if __name__ == "__main__":
    serve(load, arguments())
