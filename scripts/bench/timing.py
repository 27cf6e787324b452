"""Make and time calls: from a seed, several methods in turn."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from lookahead.passes.measuring import synchronize
from lookahead.tools.contention import Span, watch, why_no_ratio
from lookahead.tools.loading import load

_spans: list[Span] = []  # of the calls of `timed`


def load_for_batches(name: str | None, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` a model and its tokenizer, which pads to the left, with the end token if it has no padding token."""
    model, tokenizer = load(name, dtype, device)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def in_turn(methods: Sequence[str], repeats: int, first: int, call: Callable[[str, int], object]) -> dict[str, list]:
    """Call ``call(method, repeat)`` for each repeat and method; return a list of results for each method.

    The order of the methods rotates from repeat to repeat, so other load on the machine slows all of them alike.
    first: index, modulo the number of methods, of the method that begins the first repeat.
    """
    calls: dict[str, list] = {method: [] for method in methods}
    for repeat in range(repeats):
        turn = (first + repeat) % len(methods)
        for method in [*methods[turn:], *methods[:turn]]:
            calls[method].append(call(method, repeat))
    return calls


def decoding_options(new_tokens: int, temperature: float) -> dict:
    """Return options of generate(): greedy at temperature 0, otherwise sampling from the whole vocabulary."""
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    return {"max_new_tokens": new_tokens, "do_sample": temperature > 0, **sampling}


def timed(model: PreTrainedModel, inputs: BatchEncoding, options: dict, seed: int) -> tuple[list[list[int]], float]:
    """Call the model's generate() from a seed; return the new ids of each sequence, and the seconds it took."""
    torch.manual_seed(seed)
    span = watch(model.device)
    output = model.generate(**inputs, **options)
    texts = output[:, inputs.input_ids.shape[1] :].tolist()
    _spans.append(span())
    return texts, _spans[-1].seconds


def why_no_ratios() -> str:
    """Return why rates of this process's calls of `timed` must not be compared; "" if the machine was quiet overall.

    Calls of peers are not watched. They alternate with the others, in which a busy machine shows.
    """
    return why_no_ratio(sum(_spans, Span()))


def waited(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including the wait for the device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block runs longer. Works only in the main thread."""

    def ring(*_) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second, because some code swallows exceptions
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
