"""vLLM engines in processes of their own, and what is done inside them."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

K = 8
SPECULATION = {"method": "custom_class", "model": "lookahead.vllm.PoolProposer", "num_speculative_tokens": K}
PATIENCE = 600  # seconds for one thing asked of an engine


class Engine:
    """An engine of vLLM for the model in ``folder``; calls run ``function(llm, *arguments)`` in its process."""

    def __init__(self, folder, speculates: bool, **options: object):
        options = {
            "model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8,
            "enable_prefix_caching": False, "disable_log_stats": False, "generation_config": "vllm", **options,
        }  # fmt: skip
        if speculates:
            options["speculative_config"] = SPECULATION
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _start, (options,))

    def __call__(self, function, *arguments):
        return self._process.submit(_call, function, arguments).result(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.shutdown(cancel_futures=True)


def _start(options: dict) -> None:
    from vllm import LLM

    global _llm, _prompts_learned
    _llm = LLM(**options)
    _prompts_learned = []
    if "speculative_config" in options:
        pool, learn = proposer(_llm).pool, proposer(_llm).pool.learn

        def note(tokens, source):
            _prompts_learned.append(len(tokens))
            learn(tokens, source)

        pool.learn = note


def _call(function, arguments):
    return function(_llm, *arguments)


def proposer(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def _options(max_tokens: int):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens)


def generate(llm, prompts: list[list[int]], max_tokens: int, together: bool) -> list[list[int]]:
    """Greedy answers, one prompt after the other or as many at once as the engine takes."""
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    return [
        list(output.outputs[0].token_ids)
        for call in calls
        for output in llm.generate(call, _options(max_tokens), use_tqdm=False)
    ]


def serve(llm, prompts: list[list[int]], max_tokens: int, cancelled: int) -> tuple[list[list[int] | None], list[int]]:
    """Answers where every ``cancelled``-th request is given up after a few tokens, which then is None; and the resident
    memory in bytes after each tenth of the requests."""
    engine = llm.llm_engine
    answers: dict[str, list[int] | None] = {}
    memory = []
    queue = list(enumerate(prompts))[::-1]
    running = 0
    while queue or engine.has_unfinished_requests():
        while queue and running < 12:  # more than run at once, so that some wait
            number, prompt = queue.pop()
            engine.add_request(str(number), {"prompt_token_ids": prompt}, _options(max_tokens))
            running += 1
        for output in engine.step():
            number, written = output.request_id, len(output.outputs[0].token_ids)
            if output.finished:
                answers[number] = list(output.outputs[0].token_ids)
            elif int(number) % cancelled == cancelled - 1 and written >= 5 and number not in answers:
                engine.abort_request([number])
                answers[number] = None
            else:
                continue
            running -= 1
            if len(answers) % (len(prompts) // 10) == 0:
                memory.append(resident())
    return [answers[str(number)] for number in range(len(prompts))], memory


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts(llm) -> dict[str, int]:
    """vLLM's own counts: preemptions, tokens drafted, accepted."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = {"preemptions": "num_preemptions", "drafted": "spec_decode_num_draft_tokens",
             "accepted": "spec_decode_num_accepted_tokens"}  # fmt: skip
    return {name: int(values.get(f"vllm:{metric}", 0)) for name, metric in names.items()}


def learned(llm) -> tuple[list[int], int]:
    """Lengths of the prompts that the proposer learned, and the number of tokens that it learned in all."""
    return _prompts_learned, proposer(llm).pool.observations


def held(llm) -> int:
    """Number of requests that the proposer keeps something of; it is checked that this is a hash each."""
    texts = proposer(llm)._texts
    assert all(type(text) is bytes and len(text) == 16 for text in texts._hashes.values())
    return len(texts)


def margin(llm, text: list[int], rivals: list[int]) -> float:
    """How far apart two tokens' log-probabilities are after a text, by vLLM itself."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=1, logprobs=10)
    output = llm.generate([{"prompt_token_ids": text}], options, use_tqdm=False)[0]
    said = output.outputs[0].logprobs[0]
    return abs(said[rivals[0]].logprob - said[rivals[1]].logprob)
