"""The product: wrapped output is token for token that of `model.generate`."""

import os
import random
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from zoo import ALONE, CHAIN_ONLY, END, SETTINGS, VOCABULARY, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.engine import call


def random_prompt(rng: random.Random, longest: int = 40) -> torch.Tensor:
    """Ids with repeats, so that guesses have something to find."""
    phrase = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 6))]
    tokens = []
    while len(tokens) < rng.randint(1, longest):
        tokens += phrase if rng.random() < 0.6 else [rng.randrange(3, VOCABULARY)]
    return torch.tensor([tokens[:longest]])


def random_cases(examples: int, **others) -> settings:
    """Settings of a property test that LOOKAHEAD_CASES makes longer."""
    return settings(
        max_examples=int(os.environ.get("LOOKAHEAD_CASES", examples)),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes, and the case is printed as is
        deadline=None,
        **others,
    )


def left_pad(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts [1, n] of several lengths as generate() takes them."""
    longest = max(ids.shape[1] for ids in prompts)
    pad = [torch.full((1, longest - ids.shape[1]), 2) for ids in prompts]
    ids = torch.cat([torch.cat([left, right], dim=1) for left, right in zip(pad, prompts, strict=True)])
    starts = torch.tensor([[left.shape[1]] for left in pad])
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) >= starts).long()}


class Drift(LogitsProcessor):
    """A stateful processor: its effect depends on how often it was called, and on the whole batch."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores[:, len(self.seen) % VOCABULARY] += 2.0
        return scores + 0.1 * (input_ids[0, -1] % 7) / 7


class GenerateFailsError(Exception):
    """generate() itself cannot serve these options together, or this mask, wrapped or not."""


def check_identical(
    model, prompts, options, configs, seed, pool=None, drift=False, mask=None, source=None, **described
) -> lookahead.Stats:
    """Generate plainly and with each configuration, from the same seed, and compare; the message on failure repeats the
    case. Returns what the last of them counted.

    prompts: ids [1, n]; several are a batch. drift: with a stateful processor.
    configs: one, or several. What yields them may look at what each of them has done before it yields the next.
    mask: makes another mask of the usual one, or None, for a call without; such a call may be left to plain decoding.
    A mask that does not fit the ids must be refused if plain decoding refuses it.
    """
    inputs = left_pad(prompts)
    fits = True
    if mask is not None:
        changed = inputs["attention_mask"] = mask(inputs["attention_mask"])
        fits = changed is None or changed.shape == inputs["input_ids"].shape
    ids = [prompt.tolist() for prompt in prompts]
    case = f"{described} {type(model).__name__} ids={ids} {options} {configs} seed={seed} drift={drift} source={source}"
    if mask is not None:
        case += f" mask={inputs['attention_mask']}".replace("\n", "")
    refusal = None

    def write() -> tuple[torch.Tensor, list]:
        """Return the texts, and what the processor has seen."""
        processor = Drift()
        given = {"logits_processor": LogitsProcessorList([processor])} if drift else {}
        torch.manual_seed(seed)
        return model.generate(**inputs, **options, **given), processor.seen

    try:
        expected, seen = write()
    except (IndexError, RuntimeError, ValueError) as error:
        if fits:
            raise GenerateFailsError from error
        refusal = error
    state = torch.get_rng_state()
    for config in [configs] if isinstance(configs, LookaheadConfig | None) else configs:
        lookahead.wrap(model, config, pool, source)
        try:
            actual, seen_by_ours = write()
        except Exception as error:
            if refusal is None:
                raise AssertionError(f"raises {error!r}: {config} of {case}") from error
            raise GenerateFailsError from refusal
        finally:
            stats = model.lookahead.last
            lookahead.unwrap(model)
        assert refusal is None, f"plain decoding raises {refusal!r}: {case}"
        assert actual.tolist() == expected.tolist(), f"{config} of {case}"
        assert torch.equal(torch.get_rng_state(), state), f"{config} consumes the generator differently: {case}"
        assert seen_by_ours == seen, f"{config} of {case}"
        if len(actual) == 1 and mask is None:
            assert stats.tokens == actual.shape[1] - inputs["input_ids"].shape[1], f"{config} of {case}"
    return stats


def check_sources(model, prompt_seeds, options, temperature, budget, seed, sources, **described) -> None:
    """Check random prompts with these sources of guesses. hypothesis drops a case that generate() itself cannot serve.

    temperature: None for greedy decoding. A batch that samples is identical only if its sequences go in step.
    """
    prompts = [random_prompt(random.Random(prompt_seed)) for prompt_seed in prompt_seeds]
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    in_step = temperature is not None and len(prompts) > 1
    try:
        check_identical(
            model, prompts, options | sampling, LookaheadConfig(budget=budget, pool_memory_mb=0.1), seed,
            drift=in_step, source=sources, **described,
        )  # fmt: skip
    except GenerateFailsError:
        assume(False)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_architecture(model_type):
    """Every architecture, greedy and sampled, with a tree and a window; the text outgrows the sliding window."""
    model = tiny_model(model_type)
    rng = random.Random(model_type)
    accepted = 0
    pool = NgramPool(1)
    prompts = [random_prompt(rng) for _ in range(4)]
    for seed in (0, 1, 2, 3, 0):  # the first text comes again: the pool knows it
        options = {"max_new_tokens": 40, "do_sample": seed % 2 == 1, "temperature": 0.5}
        config = LookaheadConfig(budget=16, window_size=3 * (seed // 2), ngram_size=3)
        stats = check_identical(model, [prompts[seed]], options, config, seed, pool, model_type=model_type)
        accepted += stats.accepted.total()
        assert bool(stats.window_tokens) == (config.window_size > 0 and model_type not in CHAIN_ONLY)
    assert accepted > 0, "nothing was accepted, so acceptance was not tested"
    assert lookahead.passes.capabilities.find_adapter(model).can_branch == (model_type not in CHAIN_ONLY)


tokens = st.integers(3, VOCABULARY - 1)
configs = st.builds(
    LookaheadConfig,
    strategy=st.sampled_from(["lookahead"] * 4 + ["jacobi"]),
    budget=st.integers(0, 40),
    window_size=st.integers(0, 9),
    ngram_size=st.integers(2, 6),
    pool_memory_mb=st.sampled_from([0.01, 1]),
)
processing = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 40)},
    optional={
        "min_new_tokens": st.integers(0, 40),
        "repetition_penalty": st.sampled_from([0.9, 1.3]),
        "no_repeat_ngram_size": st.integers(2, 4),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=9),
        "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=9),
        "sequence_bias": st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=2), st.floats(-5, 5)), min_size=1)
        .map(lambda biases: {tuple(sequence): bias for sequence, bias in biases})
        .map(lambda biases: [[list(sequence), bias] for sequence, bias in biases.items()]),
        "exponential_decay_length_penalty": st.tuples(st.integers(1, 20), st.floats(1.01, 1.5)),
        "forced_eos_token_id": st.just(END),
        "eos_token_id": st.lists(tokens, min_size=1, max_size=20),
        "remove_invalid_values": st.just(True),
        "prefill_chunk_size": st.integers(1, 20),
        "watermarking_config": st.just({"bias": 1.5, "seeding_scheme": "lefthash"}),
    },
)
sampling = st.fixed_dictionaries(
    {"do_sample": st.just(True), "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.5]), "top_k": st.integers(0, 50)},
    optional={
        "top_p": st.floats(0.5, 1.0),
        "min_p": st.floats(0.0, 0.2),
        "typical_p": st.floats(0.5, 0.99),
        "epsilon_cutoff": st.floats(0.001, 0.01),
        "eta_cutoff": st.floats(0.001, 0.01),
        "renormalize_logits": st.just(True),
    },
)


class Mask(NamedTuple):
    """Another attention mask than padding to the left has."""

    kind: str
    seed: int

    def __call__(self, usual: torch.Tensor) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(usual.shape, generator=generator)
        return {
            "absent": None,
            "bool": usual.bool(),
            "float": usual.float(),
            "other values": usual * (1 + (3 * drawn).long()),
            "fractions": usual * (0.5 + drawn),
            "negative": usual * (1 - 2 * (drawn < 0.3).long()),
            "holes": usual * (drawn > 0.2).long(),
            "more padding": usual * (torch.arange(usual.shape[1]) >= (8 * drawn[:, :1]).long()).long(),
            "padding to the right": usual.flip(1),
            "nothing": usual * (drawn[:, :1] > 0.5).long(),
            "short": usual[:, 1:],
            "long": torch.cat([usual[:, :1], usual], dim=1),
            "fewer rows": usual[-max(len(usual) - 1, 1) :],
        }[self.kind]


MASKS = (
    "absent", "bool", "float", "other values", "fractions", "negative", "holes", "more padding",
    "padding to the right", "nothing", "short", "long", "fewer rows",
)  # fmt: skip


@random_cases(100)
@given(
    model_type=st.sampled_from(sorted(SETTINGS)),
    model_seed=st.integers(0, 3),
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
    options=processing,
    draws=st.none() | sampling,
    config=configs,
    seed=st.integers(0, 2**31),
    drift=st.booleans(),
    learned=st.none() | st.lists(st.integers(0, VOCABULARY - 1), max_size=300),
    mask=st.none() | st.builds(Mask, st.sampled_from(MASKS), st.integers(0, 2**31)),
)
def test_any_case(model_type, model_seed, prompt_seeds, options, draws, config, seed, drift, learned, mask):
    """Random architecture, weights, batch, mask, options, settings and seed; a pool that other texts have filled."""
    prompts = [random_prompt(random.Random(prompt_seed)) for prompt_seed in prompt_seeds]
    pool = None
    if learned:
        pool = NgramPool(config.pool_memory_mb)
        pool.learn(learned)
    options = options | (draws or {"do_sample": False})
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])
    model = known_model(model_type, model_seed)
    try:
        check_identical(model, prompts, options, config, seed, pool, drift=drift, mask=mask)
    except GenerateFailsError:
        assume(False)


@lru_cache(maxsize=40)
def known_model(model_type: str, seed: int):
    return tiny_model(model_type, seed=seed)


@pytest.mark.parametrize("model_type", sorted(set(SETTINGS) - CHAIN_ONLY - ALONE))
def test_batches_at_their_own_pace(model_type):
    """Each sequence of a greedy batch is that of generate() on the batch, and that of generate() on it alone."""
    model = tiny_model(model_type)
    rng = random.Random(model_type)
    for batch in (2, 5):
        prompts = [random_prompt(rng) for _ in range(batch)]
        options = {"max_new_tokens": 40, "do_sample": False}
        config = LookaheadConfig(window_size=rng.choice([0, 3]), budget=rng.choice([8, 40]))
        stats = check_identical(model, prompts, options, config, 0)
        assert stats.accepted.total() > 0
        alone = [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in prompts]
        lookahead.wrap(model, config)
        inputs = left_pad(prompts)
        together = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
        lookahead.unwrap(model)
        assert [text[: len(one)] for text, one in zip(together, alone, strict=True)] == alone
        assert all(set(text[len(one) :]) <= {2} for text, one in zip(together, alone, strict=True))
        assert stats.tokens == sum(map(len, alone)), "what has ended was written on"


def test_what_a_state_makes_be_computed_again_is_bounded():
    """With most guesses rejected, no step grows beyond its own rows and a few."""
    model = tiny_model("zaya")
    widths = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    lookahead.wrap(model, LookaheadConfig(strategy="jacobi", budget=4))
    widths.clear()
    torch.manual_seed(0)
    options = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": True, "temperature": 1.5}
    model.generate(random_prompt(random.Random(9)), **options)
    assert max(widths[1:]) <= (1 + 4) + call.MAX_REPLAYED + (1 + 4)
    assert sum(widths[1:]) > 100 + 4 * len(widths) / 2, "nothing was computed again, so nothing was tested"


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_attention_implementations(attn_implementation):
    model = tiny_model("llama", attn_implementation=attn_implementation)
    assert model.config._attn_implementation == attn_implementation
    rng = random.Random(0)
    stats = check_identical(model, [random_prompt(rng)], {"max_new_tokens": 60}, LookaheadConfig(window_size=4), 0)
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
    check_identical(model, [ids], {"max_length": 32, "min_new_tokens": 20}, config, 0)


def test_dynamic_rope_beyond_its_context():
    """Rotary frequencies that follow the length: past the context, a step must not hold several positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)
    ids = random_prompt(random.Random(6), longest=10)
    check_identical(model, [ids], {"max_length": 60, "min_new_tokens": 40}, LookaheadConfig(window_size=3), 0)


def test_prefill_in_chunks():
    model = tiny_model("gemma2")
    ids = random_prompt(random.Random(7))
    check_identical(model, [ids], {"max_new_tokens": 30, "prefill_chunk_size": 7}, LookaheadConfig(), 0)
