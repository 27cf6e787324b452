"""vLLM on the CPU with several requests at once, for scripts/benchmark_vllm.py. Methods are those of vllm_worker.py.

A line of stdin is {"prompts": [[...], ...], "concurrency": 8, "max_new_tokens": 128, "temperature": 0.6, "seed": 0,
"forget": true}, its answer {"ids": [[...], ...], "seconds": 0.1, "steps": null, "drafted": null, "accepted":
null}; all else is as protocol.py says.

concurrency   requests that the engine has at a time; where one ends, the next begins
seed          of all that is drawn: on the CPU, vLLM 0.32.0 fails at a request with a seed of its own where a prompt
              is read in chunks
forget        whether what the method has learned from earlier lines is dropped first
"""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from protocol import Answer, Request, arguments, end_tokens, serve
from vllm_worker import METHODS, engine, settle_environment, speculated, versions

MAX_REQUESTS = 64  # requests at a time


@dataclass(frozen=True)
class Batch:
    prompts: list[list[int]]
    concurrency: int
    max_new_tokens: int
    temperature: float
    seed: int
    forget: bool

    def __post_init__(self):
        if not isinstance(self.prompts, list) or not self.prompts:
            raise ValueError("prompts has to be a list of one prompt or more")
        for prompt in self.prompts:
            Request(prompt, self.max_new_tokens, self.temperature, self.seed)
        if type(self.concurrency) is not int or not 1 <= self.concurrency <= MAX_REQUESTS:
            raise ValueError(f"concurrency has to be an integer from 1 to {MAX_REQUESTS}, got {self.concurrency!r}")
        if type(self.forget) is not bool:
            raise ValueError(f"forget has to be true or false, got {self.forget!r}")


def load(chosen: Namespace) -> tuple[Callable[[Batch], Answer], dict[str, str]]:
    llm = engine(chosen, MAX_REQUESTS)
    import torch
    from vllm import SamplingParams, TokensPrompt

    ends = end_tokens(chosen.model)
    speculates = "speculative_config" in METHODS[chosen.method]

    def forget() -> None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.drafter = type(runner.drafter)(runner.vllm_config)

    def decode(batch: Batch) -> Answer:
        if batch.forget and speculates:
            forget()
        before = speculated(llm) if speculates else None
        engine = llm.llm_engine
        ids: dict[str, list[int]] = {}
        waiting = list(enumerate(batch.prompts))[::-1]
        torch.manual_seed(batch.seed)
        start = time.perf_counter()
        while len(ids) < len(batch.prompts):
            while waiting and len(batch.prompts) - len(waiting) - len(ids) < batch.concurrency:
                number, prompt = waiting.pop()
                options = SamplingParams(
                    temperature=batch.temperature, max_tokens=batch.max_new_tokens, top_k=0, top_p=1.0,
                    stop_token_ids=ends, ignore_eos=True, detokenize=False,
                )  # fmt: skip
                engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), options)
            for output in engine.step():
                if output.finished:
                    ids[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        counts = [after - then for after, then in zip(speculated(llm), before, strict=True)] if before else []
        return Answer([ids[str(number)] for number in range(len(ids))], seconds, None, *counts)

    decode(Batch([[1, 2, 3]] * 2, 2, 8, 0, 0, False))  # what the engine puts off until its first text
    return decode, versions()


if __name__ == "__main__":
    chosen = arguments()
    settle_environment(chosen.threads, cache_gib=1)  # every engine of the benchmark holds one
    serve(load, chosen, Batch)
