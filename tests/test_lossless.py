"""The product: wrapped output is token for token that of `model.generate`."""

import random

import pytest
import torch
from zoo import CHAIN_ONLY, SETTINGS, VOCABULARY, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool


def random_prompt(rng: random.Random, longest: int = 40) -> torch.Tensor:
    """Ids with repeats, so that guesses have something to find."""
    phrase = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 6))]
    tokens = []
    while len(tokens) < rng.randint(1, longest):
        tokens += phrase if rng.random() < 0.6 else [rng.randrange(3, VOCABULARY)]
    return torch.tensor([tokens[:longest]])


def random_config(rng: random.Random) -> LookaheadConfig:
    return LookaheadConfig(
        strategy=rng.choice(["lookahead"] * 4 + ["jacobi"]),
        budget=rng.choice([0, 1, 3, 8, 16, 40]),
        window_size=rng.choice([0, 1, 2, 4, 9]),
        ngram_size=rng.choice([2, 3, 4, 6]),
        pool_memory_mb=rng.choice([0.01, 1]),
    )


def random_options(rng: random.Random) -> dict:
    if rng.random() < 0.4:
        options = {"do_sample": False}
    else:
        options = {
            "do_sample": True,
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
            "top_k": rng.choice([0, 5, 50]),
            "top_p": rng.choice([1.0, 0.9]),
        }
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.2:
        options["no_repeat_ngram_size"] = 3
    options["max_new_tokens"] = rng.randint(1, 48)
    if rng.random() < 0.2:
        options["min_new_tokens"] = options["max_new_tokens"] // 2
    return options


def check_identical(model, ids, options, config, seed, pool=None, **described) -> lookahead.Stats:
    """Generate both ways from the same seed and compare; the message on failure repeats the case."""
    torch.manual_seed(seed)
    expected = model.generate(ids, **options)
    state = torch.get_rng_state()
    lookahead.wrap(model, config, pool)
    try:
        torch.manual_seed(seed)
        actual = model.generate(ids, **options)
    finally:
        stats = model.lookahead.last
        lookahead.unwrap(model)
    case = f"{described} {type(model).__name__} ids={ids.tolist()} {options} {config} seed={seed}"
    assert actual.tolist() == expected.tolist(), case
    assert torch.equal(torch.get_rng_state(), state), f"the generator was consumed differently: {case}"
    assert stats.tokens == actual.shape[1] - ids.shape[1], case
    return stats


@pytest.mark.parametrize("model_type", SETTINGS)
def test_architecture(model_type):
    """Every architecture, greedy and sampled, with a tree and a window; the text outgrows the sliding window."""
    model = tiny_model(model_type)
    rng = random.Random(model_type)
    accepted = 0
    for seed in range(4):
        ids = random_prompt(rng)
        options = {"max_new_tokens": 40, "do_sample": seed % 2 == 1, "temperature": 0.5}
        config = LookaheadConfig(window_size=3 * (seed // 2), ngram_size=3)
        stats = check_identical(model, ids, options, config, seed, model_type=model_type)
        accepted += stats.accepted.total()
        assert bool(stats.window_tokens) == (config.window_size > 0 and model_type not in CHAIN_ONLY)
    assert accepted > 0, "nothing was accepted, so acceptance was not tested"
    assert lookahead.architecture.inspect_model(model).can_branch == (model_type not in CHAIN_ONLY)


@pytest.mark.parametrize("case", range(60))
def test_random_case(case):
    """Random architecture, prompt, options, settings and seed; now and then a pool that other texts have filled."""
    rng = random.Random(case)
    model = tiny_model(rng.choice(sorted(SETTINGS)), seed=case)
    pool = NgramPool(1) if rng.random() < 0.5 else None
    if pool is not None:
        pool.learn([rng.randrange(VOCABULARY) for _ in range(500)])
    for _ in range(3):
        check_identical(
            model, random_prompt(rng), random_options(rng), random_config(rng), rng.randrange(2**31), pool, case=case
        )


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_attention_implementations(attn_implementation):
    model = tiny_model("llama", attn_implementation=attn_implementation)
    assert model.config._attn_implementation == attn_implementation
    rng = random.Random(0)
    stats = check_identical(model, random_prompt(rng), {"max_new_tokens": 60}, LookaheadConfig(window_size=4), 0)
    assert stats.accepted.total() > 0


def test_custom_generate():
    model = tiny_model("llama")
    ids = random_prompt(random.Random(0))
    pool = NgramPool(1)
    expected = model.generate(ids, max_new_tokens=30)
    actual = model.generate(
        ids, max_new_tokens=30, custom_generate=lookahead.decode, lookahead_config=LookaheadConfig(budget=4), pool=pool
    )
    assert actual.tolist() == expected.tolist()
    assert len(pool) > 0, "the pool given was not used"
    assert not hasattr(model, "lookahead")


def test_left_padding_of_one_row():
    model = tiny_model("gpt2")
    ids = random_prompt(random.Random(3))
    padded = torch.cat([torch.full((1, 5), 2), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    expected = model.generate(padded, attention_mask=mask, max_new_tokens=30, do_sample=False)
    lookahead.wrap(model)
    assert model.generate(padded, attention_mask=mask, max_new_tokens=30, do_sample=False).tolist() == expected.tolist()
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_to_the_end_of_learned_positions(model_type):
    """Guesses beyond the last learned position would crash the model."""
    model = tiny_model(model_type, n_positions=32, max_position_embeddings=32)
    ids = random_prompt(random.Random(5), longest=12)
    config = LookaheadConfig(budget=30, window_size=6, ngram_size=4)
    check_identical(model, ids, {"max_length": 32, "min_new_tokens": 20}, config, 0)


def test_dynamic_rope_beyond_its_context():
    """Rotary frequencies that follow the length: past the context, a step must not hold several positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)
    ids = random_prompt(random.Random(6), longest=10)
    check_identical(model, ids, {"max_length": 60, "min_new_tokens": 40}, LookaheadConfig(window_size=3), 0)


def test_prefill_in_chunks():
    model = tiny_model("gemma2")
    ids = random_prompt(random.Random(7))
    check_identical(model, ids, {"max_new_tokens": 30, "prefill_chunk_size": 7}, LookaheadConfig(), 0)


def test_half_precision_diverges_only_at_near_ties():
    """In bf16 a difference is allowed only where the reference's two best logits are as close as rounding."""
    model = tiny_model("llama").to(torch.bfloat16)
    rng = random.Random(8)
    for _ in range(6):
        ids = random_prompt(rng)
        expected = model.generate(
            ids, max_new_tokens=50, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        lookahead.wrap(model, LookaheadConfig(window_size=3))
        actual = model.generate(ids, max_new_tokens=50, do_sample=False)[0].tolist()
        lookahead.unwrap(model)
        sequence = expected.sequences[0].tolist()
        if actual == sequence:
            continue
        first = next(i for i, (a, b) in enumerate(zip(actual, sequence, strict=False)) if a != b)
        logits = expected.logits[first - ids.shape[1]][0]
        best = logits.topk(2).values
        assert best[0] - best[1] <= 0.05 * logits.std(), f"no near tie at {first}: {ids.tolist()}"
