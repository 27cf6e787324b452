"""flashspec, a library for models of transformers, and its prompt lookup. See protocol.py and install.sh.

Methods:
lookup  the continuation of the latest earlier occurrence of the last 3 tokens or fewer, up to 6 guesses in each pass

The first pass computes the prompt and verifies the first guesses. It counts as the prefill, and the first token as
written when it ends.
"""

import os
import time
from argparse import Namespace
from importlib.metadata import version

from protocol import Answer, Decode, Request, arguments, end_tokens, serve

MOST_GUESSES = 6  # as its own default beside a draft model


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    if chosen.method != "lookup":
        raise ValueError(f"--method has to be lookup, got {chosen.method!r}")
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # torch reads this when it is imported
    import torch
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel
    from transformers import AutoModelForCausalLM

    ends, device, dtype = end_tokens(chosen.model), torch.device("cpu"), getattr(torch, chosen.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=dtype)  # its own way needs accelerate
    model = TargetModel(str(chosen.model), device, dtype, model=loaded)

    def decode(request: Request) -> Answer:
        (prompt,) = request.prompts
        sampling = SamplingConfig(gamma=MOST_GUESSES, temperature=request.temperature, seed=request.seed)
        one_source = {"drafter_strategy": "bandit", "bandit": BanditConfig(n_arms=1)}
        engine = SpeculativeEngine(
            FlashSpecConfig(device="cpu", sampling=sampling, **one_source), [NgramDrafter()], model
        )
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        said = engine.generate(ids, request.max_new_tokens, ends)
        seconds = time.perf_counter() - start
        steps = said.arm_steps
        drafted, accepted = sum(step.proposed for step in steps), sum(step.accepted for step in steps)
        text = said.output_ids[0, : said.n_tokens_generated].tolist()
        return Answer([text], seconds, len(steps) - 1, drafted, accepted, steps[0].seconds)

    return decode, {name: version(name) for name in ("flashspec", "torch", "transformers")}


if __name__ == "__main__":
    serve(load, arguments())
