"""One of the processes that compute a model together: python tensor_parallel.py MODEL FOLDER RANK PROCESSES

It prints the texts of several calls, and the rows of every pass that it made, as JSON. With one process, the model is
whole.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from test_lossless import left_pad, random_prompt
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from zoo import tiny_model

import lookahead
from lookahead import DraftModelSource, LookaheadConfig, PoolSource

OPTIONS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8}}
FIXED = LookaheadConfig(budget=8, window_size=3, ngram_size=3)


@contextmanager
def watched(model) -> Iterator[list[int]]:
    """List the rows of each pass."""
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def main(path: str, folder: str, rank: int, processes: int) -> None:
    torch.set_num_threads(1)
    plan = {}
    if processes > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
        )
        plan["distributed_config"] = DistributedConfig(tp_size=processes, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plan).eval()
    rng = random.Random(2)
    prompts = [{"input_ids": random_prompt(rng)}, left_pad([random_prompt(rng) for _ in range(3)])]

    def texts() -> list:
        written = []
        for number, inputs in enumerate(prompts):
            for kind, options in OPTIONS.items():
                if len(inputs["input_ids"]) > 1 and kind == "sampled" and hasattr(model, "lookahead"):
                    continue  # other draws than plain decoding's
                torch.manual_seed(number)
                written.append(model.generate(**inputs, max_new_tokens=24, min_new_tokens=24, **options).tolist())
        return written

    torch.manual_seed(0)
    found = {"plain": texts()[:-1]}
    for name, config, source in (
        ("fixed", FIXED, None),
        ("auto", LookaheadConfig(), None),
        ("draft model", LookaheadConfig(), [PoolSource(), DraftModelSource(tiny_model("llama", seed=1))]),
    ):
        lookahead.wrap(model, config, source=source)
        with watched(model) as rows:
            found[name] = texts() + texts()
        found[f"rows, {name}"] = rows
        found[f"tokens per step, {name}"] = model.lookahead.stats.tokens_per_step
        lookahead.unwrap(model)
    print(json.dumps(found))
    if processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
