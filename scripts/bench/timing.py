"""How calls are made and timed: from a seed, several methods in turn."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


def in_turn(methods: Sequence[str], repeats: int, first: int, call: Callable[[str, int], object]) -> dict[str, list]:
    """What ``call(method, repeat)`` returned: a list for each method, with an entry for each repeat.

    Each repeat calls each method once. The order rotates from repeat to repeat, so that whatever else the machine does
    slows down all methods alike. first: which method the first repeat begins with, modulo their number.
    """
    calls: dict[str, list] = {method: [] for method in methods}
    for repeat in range(repeats):
        turn = (first + repeat) % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            calls[method].append(call(method, repeat))
    return calls


def decoding_options(new_tokens: int, temperature: float) -> dict:
    """Options of generate(): greedy at temperature 0, else sampling from the whole vocabulary."""
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    return {"max_new_tokens": new_tokens, "do_sample": temperature > 0, **sampling}


def timed(model: PreTrainedModel, inputs: BatchEncoding, options: dict, seed: int) -> tuple[list[list[int]], float]:
    """One call of the model's generate() from a seed: the new ids of each sequence, and its seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(**inputs, **options)
    texts = output[:, inputs.input_ids.shape[1] :].tolist()
    return texts, time.perf_counter() - start


def prompt_and_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: dict, options: dict, seed: int
) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of what the model writes after it."""
    inputs = tokenizer(prompt["turns"][0], return_tensors="pt", return_token_type_ids=False).to(model.device)
    return inputs.input_ids[0].tolist(), timed(model, inputs, options, seed)[0][0]


def microseconds(call: Callable[[], object], repeats: int = 1000) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
