"""The proposer in vLLM's engine: what is written with it is what vLLM writes without it. Run by `make test-vllm`.

Both sides are greedy and in float32. A pass over another number of rows may round otherwise, with or without
speculation, so where two texts part it is checked that the model itself holds the two tokens to be tied.
"""

from itertools import takewhile

import pytest
from engines import Engine, K, counts, generate, held, learned, margin, serve
from transformers import AutoTokenizer

import lookahead
from lookahead.tools.prompts import source_prompts

TIE = 1e-3  # of log-probabilities; float32 rounds those of this model to some 1e-5


def prompts(count: int, longest: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL)
    return [tokenizer(prompt["turns"][0]).input_ids[:longest] for prompt in source_prompts(count)]


def assert_same(plain: Engine, asked: list[list[int]], expected: list[list[int]], written: list[list[int]]) -> None:
    """The texts are equal; or part where the plain engine finds two tokens tied, which few may."""
    ties = 0
    for prompt, one, other in zip(asked, expected, written, strict=True):
        if one != other:
            agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            assert agreed < min(len(one), len(other)), "one text ends before the other"
            apart = plain(margin, prompt + one[:agreed], [one[agreed], other[agreed]])
            assert apart < TIE, f"the texts part after {agreed} tokens, {apart} apart"
            ties += 1
    assert ties <= len(asked) // 20, "more ties than rounding explains"


def compare(options: dict, asked: list[list[int]], max_tokens: int, together: bool = True) -> dict:
    """Both engines on the same prompts; vLLM's counts of the speculating one, after what holds of every run."""
    with Engine(lookahead.DEMO_MODEL, False, **options) as plain, Engine(lookahead.DEMO_MODEL, True, **options) as ours:
        expected = plain(generate, asked, max_tokens, together)
        written = ours(generate, asked, max_tokens, together)
        assert_same(plain, asked, expected, written)
        seen = ours(counts)
        assert seen["drafted"] >= seen["accepted"] > len(asked)
        prompts_learned, tokens = ours(learned)
        assert sorted(prompts_learned) == sorted(map(len, asked)), "a prompt was not learned, or more than once"
        # A last step may verify more tokens than the request still wants.
        surplus = tokens - sum(map(len, asked + written))
        assert 0 <= surplus <= K * len(asked)
        assert ours(held) <= 2 * 8
        return seen


@pytest.mark.parametrize("together", [False, True], ids=["one at a time", "eight at once"])
def test_greedy_texts_are_those_of_plain_vllm(together):
    compare({}, prompts(16, 300), 100, together)


def test_prompts_read_in_chunks():
    compare({"max_num_batched_tokens": 32, "enable_chunked_prefill": True}, prompts(12, 400), 60)


def test_preempted_requests():
    options = {"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512}
    assert compare(options, prompts(12, 60), 200)["preemptions"] > 0


def test_preempted_requests_read_again_in_chunks():
    options = {"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_batched_tokens": 24,
               "enable_chunked_prefill": True}  # fmt: skip
    assert compare(options, prompts(12, 60), 200)["preemptions"] > 0


def test_texts_that_reach_the_longest():
    """Near it, vLLM would draft for no request of the batch at all."""
    asked = [prompt[: 100 + 7 * number] for number, prompt in enumerate(prompts(16, 300))]
    compare({"max_model_len": 240}, asked, 500)


def test_prefixes_kept_by_vllm():
    asked = prompts(6, 200)
    compare({"enable_prefix_caching": True}, [prompt for prompt in asked for _ in range(3)], 60)


def test_two_hundred_requests_of_which_a_tenth_is_cancelled():
    asked = prompts(200, 80)
    small = {"num_gpu_blocks_override": 32}  # a cache whose memory is soon touched as a whole
    with Engine(lookahead.DEMO_MODEL, False, **small) as plain, Engine(lookahead.DEMO_MODEL, True, **small) as ours:
        expected = plain(generate, asked, 60, True)
        for _ in range(3):  # kernels for new numbers of rows and the pool's table take memory in the first two
            written, memory = ours(serve, asked, 60, 10)
            complete = [number for number, answer in enumerate(written) if answer is not None]
            assert len(complete) == 180
            assert_same(plain, *([texts[number] for number in complete] for texts in (asked, expected, written)))
            assert ours(held) <= 2 * 8
        assert ours(counts)["accepted"] > 1000
        assert len(ours(learned)[0]) == 600
        assert max(memory) - memory[0] < 16 * 2**20, f"memory grows: {memory}"
