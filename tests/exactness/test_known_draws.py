"""Draws that are made before the tokens that they choose: the same tokens, and better guesses."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from test_lossless import check_identical, random_cases, random_prompt
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from zoo import VOCABULARY, tiny_model

import lookahead
from lookahead import DraftModelSource, GuessSource, LookaheadConfig, compat
from lookahead.cpu import choice
from lookahead.cpu.choice import Warp
from lookahead.engine.batch_draws import BatchDraws
from lookahead.engine.draws import KNOWN_DRAWS, Race
from lookahead.guessing.draws import draws_at
from lookahead.guessing.source import top_k
from lookahead.sources.draft import MAX_SHARPNESS, Sharpness
from ngram_pool import NgramPool

actions = st.lists(
    st.tuples(st.just("ahead"), st.integers(0, KNOWN_DRAWS))
    | st.tuples(st.just("choose"), st.integers(1, 5))
    | st.tuples(st.just("used by others"), st.integers(1, 2))
    | st.tuples(st.just("seeded"), st.integers(0, 3)),
    max_size=40,
)


warps = st.builds(
    Warp,
    st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 5, 50, 256]),
    st.sampled_from([1.0, 0.9, 0.4, 0.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


def race_of(generator, vocabulary):
    """A race whose draws can be asked for before the first logits."""
    race = Race(generator)
    race._allocate(vocabulary)
    return race


def processors_of(warp):
    """transformers' processors that do the same."""
    found = LogitsProcessorList()
    if warp.temperature != 1:
        found.append(TemperatureLogitsWarper(warp.temperature))
    if warp.top_k:
        found.append(TopKLogitsWarper(warp.top_k))
    if warp.top_p < 1:
        found.append(TopPLogitsWarper(warp.top_p))
    if warp.min_p:
        found.append(MinPLogitsWarper(warp.min_p))
    return found


def drawn_by_torch(logits, warp, generator):
    scores = processors_of(warp)(torch.zeros(1, 1, dtype=torch.long), logits[None].float())
    return torch.multinomial(scores.softmax(-1), num_samples=1, generator=generator).item()


@random_cases(300)
@given(
    vocabulary=st.sampled_from([1, 7, 16, 97, 1003, 5000]),
    seed=st.integers(0, 2**31),
    actions=actions,
    own=st.booleans(),
    warp=warps,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_race_is_multinomial(vocabulary, seed, actions, own, warp, dtype):
    """The same tokens and generator state for any number of draws ahead, and any other user of the generator."""
    plain = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed) if own else None
    race = race_of(generator, vocabulary)
    generator = generator or torch.default_generator
    known = None
    for count, (action, number) in enumerate(actions):
        if action == "ahead":
            known = race.ahead(number).copy()
            assert known.shape == (number, vocabulary)
        elif action == "choose":
            for _ in range(number):
                noise = torch.Generator().manual_seed(count)
                logits = (4 * torch.randn(vocabulary, generator=noise)).to(dtype)
                expected = drawn_by_torch(logits, warp, plain)
                token = race.choose(logits, warp)
                if token is None:  # not certain
                    token, known = drawn_by_torch(logits, warp, generator), None
                assert token == expected
                if known is not None and len(known):
                    assert warp[1:] != (0, 1.0, 0.0) or token == winner(logits.float() / warp.temperature, known[0])
                    known = known[1:]
        else:
            known = None
            for each in (plain, generator):
                if action == "seeded":
                    each.manual_seed(number)
                else:
                    torch.rand(number, generator=each)
        assert torch.equal(generator.get_state(), plain.get_state())


@random_cases(200)
@given(
    vocabulary=st.sampled_from([1, 7, 97, 1003, 5000]),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    seed=st.integers(0, 2**31),
    warp=warps,
    by_torch=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_a_batch_draws_what_plain_decoding_draws(vocabulary, lengths, seed, warp, by_torch):
    """Whoever is ahead, whatever is known ahead, whoever ends first; torch's generator ends as after the longest."""
    note(f"{vocabulary=} {lengths=} {seed=} {warp=} {by_torch=}")
    noise = torch.randn(len(lengths), max(lengths), vocabulary, generator=torch.Generator().manual_seed(seed))
    scores = processors_of(warp)(torch.zeros(1, 1, dtype=torch.long), 4 * noise.flatten(0, 1)).view_as(noise)
    torch.manual_seed(seed)
    expected = torch.stack([torch.multinomial(rows.softmax(-1), 1)[:, 0] for rows in scores.unbind(1)], 1)
    left = torch.get_rng_state()
    torch.manual_seed(seed)
    rng, draws = random.Random(seed), BatchDraws(len(lengths))
    races, done = draws.races(), [0] * len(lengths)
    while live := [b for b, length in enumerate(lengths) if done[b] < length]:
        b = rng.choice(live)
        if races[b].vocabulary and rng.random() < 0.5:
            races[b].ahead(rng.randint(0, KNOWN_DRAWS))
        for t in range(done[b], min(done[b] + rng.randint(1, 5), lengths[b])):
            token = races[b].choose(4 * noise[b, t], warp) if rng.random() >= by_torch else None
            if token is None:
                races[b].choose(torch.full((vocabulary,), torch.nan), warp)  # as before each draw of torch's
                token = torch.multinomial(scores[b, t].softmax(-1), 1, generator=races[b].generator).item()
            assert token == expected[b, t], f"{b=} {t=}"
            done[b] += 1
        if done[b] == lengths[b]:
            races[b].end()
    assert not draws._states, "something is kept for sequences that have ended"
    draws.set_generator_after(max(lengths))
    assert torch.equal(torch.get_rng_state(), left)


def winner(scores, variates):
    return (scores.float().softmax(-1).numpy() / variates).argmax()


WARPS = Warp(), Warp(0.7), Warp(1.3, 50), Warp(0.7, 0, 0.9), Warp(1.0, 40, 0.6), Warp(0.9, min_p=0.05)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_is_seldom_needed(warp, dtype):
    """And what is certain is what torch draws."""
    plain, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    race, unsure = Race(generator), 0
    for seed in range(300):
        logits = (3 * torch.randn(2000, generator=torch.Generator().manual_seed(seed))).to(dtype)
        expected, token = drawn_by_torch(logits, warp, plain), race.choose(logits, warp)
        unsure += token is None
        assert token in (None, expected)
        generator.set_state(plain.get_state())
    assert unsure <= 9


@random_cases(300)
@given(
    values=st.lists(
        st.sampled_from([0.0, 1.0, 1.0078125, -3.0, torch.nan, torch.inf, -torch.inf]), min_size=1, max_size=40
    ),
    warp=warps,
    seed=st.integers(0, 2**20),
)
def test_logits_that_leave_no_choice_or_an_equal_one(values, warp, seed):
    """With equal logits, it is torch that knows which of them top-p drops. With a NaN, it is torch that complains."""
    logits = torch.tensor(values)
    plain, generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    token = Race(generator).choose(logits, warp)
    if torch.isfinite(logits.max()):
        assert token in (None, drawn_by_torch(logits, warp, plain))
    else:
        assert token is None
    greedy = choice.argmax(logits)
    assert greedy == (None if logits.isnan().any() else logits.argmax().item())


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"min_p": 0.1},
        {"top_k": 300},
        {"renormalize_logits": True},
        {"top_k": 7},
        {"top_p": 0.8, "top_k": 0},
        {"temperature": 1},
    ],
    ids=str,
)
def test_settings_of_sampling(changes):
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7} | changes
    for seed in range(2):
        prompts = [random_prompt(random.Random(3 * seed + b)) for b in range(1 + 2 * seed)]
        check_identical(tiny_model("llama"), prompts, options, LookaheadConfig(budget=16), seed)


class Dice(LogitsProcessor):
    """Uses the generator that the tokens are drawn by."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores) if input_ids.shape[1] % 3 else scores


@pytest.mark.parametrize("seed", range(4))
def test_a_processor_that_draws(seed):
    model, ids = tiny_model("llama"), random_prompt(random.Random(seed))
    options = {"max_new_tokens": 40, "do_sample": True, "logits_processor": LogitsProcessorList([Dice()])}
    torch.manual_seed(seed)
    expected = model.generate(ids, **options)
    state = torch.get_rng_state()
    lookahead.wrap(model, LookaheadConfig(budget=16))
    torch.manual_seed(seed)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_race", [True, False])
def test_where_torch_draws_in_another_way(monkeypatch, is_race):
    """Then nothing is known ahead, and the text is drawn as ever."""
    asked = []
    monkeypatch.setattr(choice, "can_draw", lambda: is_race)
    monkeypatch.setattr(Race, "ahead", lambda *args, ahead=Race.ahead: asked.append(args) or ahead(*args))
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}
    check_identical(tiny_model("llama"), [random_prompt(random.Random(1))], options, LookaheadConfig(budget=16), 0)
    assert bool(asked) == is_race


def test_draws_of_each_sequence(monkeypatch):
    """Sequences that go at their own pace each have their own draws; those that go in step have none."""
    seen = []
    guess = NgramPool.guess
    monkeypatch.setattr(NgramPool, "guess", lambda self, *args: seen.append(args[-1]) or guess(self, *args))
    model = tiny_model("llama")
    lookahead.wrap(model, LookaheadConfig(budget=16))
    ids = torch.cat([torch.tensor([[5, 6, 7, 5, 6]])] * 2)
    model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=True)
    assert seen
    assert all(draws.shape[1] == VOCABULARY and 0 <= len(draws) <= KNOWN_DRAWS for draws in seen)
    assert not np.array_equal(seen[0], seen[1]), "two sequences have the same draws"
    seen.clear()
    model.generate(ids, max_new_tokens=6, do_sample=True, return_dict_in_generate=True, output_scores=True)
    model.generate(ids[:1], max_new_tokens=6, do_sample=False)
    assert seen
    assert all(draws is None for draws in seen)


def test_threads_that_share_a_generator_draw_different_numbers():
    generator, expected = (torch.Generator().manual_seed(5) for _ in range(2))
    logits, draws, threads = torch.zeros(2003), 200, 4

    def choose():
        race = Race(generator)
        for _ in range(draws):
            assert race.choose(logits, Warp()) is not None

    with ThreadPoolExecutor(threads) as pool:
        for chosen in [pool.submit(choose) for _ in range(threads)]:
            chosen.result()
    for _ in range(threads * draws):
        torch.multinomial(logits.softmax(-1), 1, generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_known_draws_find_more_winners():
    """A pool that knows the model's probabilities names the winner more often if it knows the draws; and the better
    its first guess stands, the more often it comes true."""
    rng, pool = np.random.default_rng(0), NgramPool(1)
    p = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.06, 0.04])
    for _ in range(20):
        pool.learn_next([[1, 2, 3]], [np.arange(8)], [p])
    races = rng.exponential(size=(2000, 1, 8)).astype(np.float32)
    winners = (p / races[:, 0]).argmax(1)
    trees = [pool.guess([1, 2, 3], 8, 0.0, 1, False, draws) for draws in races]
    first = np.array([tree.tokens[0] for tree in trees])
    claimed = np.array([tree.probabilities[0] for tree in trees])
    assert np.mean(first == winners) > 0.8 > 0.35 > np.mean(pool.guess([1, 2, 3], 8).tokens[0] == winners)
    assert np.mean((first == winners)[claimed > np.median(claimed)]) > np.mean(first == winners)
    assert all(tree.probabilities.sum() <= 1 for tree in trees)


def test_draws_for_the_first_depths_only():
    """Deeper guesses are as likely as the pool says."""
    pool = NgramPool(1)
    pool.learn([5, 6, 7, 8] * 9)
    plain = pool.guess([5], 3)
    draws = np.full((1, 9), 5.0, np.float32)
    raced = pool.guess([5], 3, draws=draws)
    assert raced.tokens.tolist() == plain.tokens.tolist() == [6, 7, 8]
    assert raced.probabilities[0] < plain.probabilities[0]
    np.testing.assert_allclose(
        raced.probabilities[1:] / raced.probabilities[:-1], plain.probabilities[1:] / plain.probabilities[:-1]
    )


def test_draws_that_lack_a_token_or_have_another_shape():
    pool = NgramPool(1)
    pool.learn([5, 6, 7] * 9)
    assert pool.guess([5], 2, draws=np.ones((2, 3), np.float32)).tokens.tolist() == [6, 7]
    with pytest.raises(ValueError, match=r"draws must be of shape \[tokens, vocabulary\], not \(3,\)"):
        pool.guess([5], 2, draws=np.ones(3))


def test_torch_draws_as_we_do():
    assert compat.multinomial_is_race(), f"torch {torch.__version__} draws tokens in another way"
    assert choice.can_draw(), f"torch {torch.__version__} keeps a generator's state in another way"


# -- sources that know the model's probabilities ----------------------------------------------------------------------


def written_steps(model: torch.nn.Module, source: GuessSource) -> int:
    """The steps that a sampled text of 49 tokens takes."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    options = {"max_new_tokens": 49, "min_new_tokens": 49, "do_sample": True, "top_k": 0}
    torch.manual_seed(1)
    expected = model.generate(ids, **options)
    lookahead.wrap(model, LookaheadConfig(budget=12, window_size=0), source=source)
    torch.manual_seed(1)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    steps = model.lookahead.last.steps
    lookahead.unwrap(model)
    return steps


def test_a_draft_model_that_is_the_model_knows_every_winner(monkeypatch):
    """The model's probabilities are nearly flat, so that without the draws hardly a guess comes true."""
    model = tiny_model("llama")
    with_draws = written_steps(model, DraftModelSource(tiny_model("llama")))
    monkeypatch.setattr(choice, "can_draw", lambda: False)
    without = written_steps(model, DraftModelSource(tiny_model("llama")))
    assert with_draws <= 16 < 36 < without


@random_cases(100)
@given(vocabulary=st.integers(2, 50), others=st.integers(-5, 5), seed=st.integers(0, 2**20), known=st.integers(0, 4))
def test_draws_are_those_of_the_row(vocabulary, others, seed, known):
    """others: how many tokens fewer the draft model knows than the model."""
    rng = np.random.default_rng(seed)
    drawn = rng.exponential(size=(known, max(vocabulary + others, 1))).astype(np.float32)
    depths = rng.integers(0, 6, 7).tolist()
    found = draws_at([None, drawn], [[0] * 7, depths], vocabulary)
    assert found.shape == (2, 7, vocabulary)
    assert (found[0] == 1).all()
    for row, depth in zip(found[1].numpy(), depths, strict=True):
        expected = drawn[depth, :vocabulary] if depth < known else np.empty(0)
        assert row[: len(expected)].tolist() == expected.tolist()
        assert (row[len(expected) :] == 1).all()
    assert draws_at([], [[0]], vocabulary) is draws_at([None], [[0]], vocabulary) is None


@random_cases(100)
@given(seed=st.integers(0, 2**20), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_the_likeliest_with_draws_is_the_winner(seed, temperature):
    torch.manual_seed(seed)
    logits, draws = 3 * torch.randn(5, 40), torch.empty(5, 40).exponential_()
    tokens, chances = top_k(logits, temperature, 8, draws)
    winners = ((logits / temperature).softmax(-1) / draws).argmax(-1)
    assert tokens[:, 0].tolist() == winners.tolist()
    assert (np.diff(chances) <= 0).all()
    assert (chances.sum(-1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_the_exponent_of_a_draft_is_found(exponent):
    """The tokens are drawn by sharpened probabilities."""
    rng = np.random.default_rng(0)
    sharpness = Sharpness()
    found = []
    for _ in range(6000):
        said = np.sort(rng.dirichlet(np.ones(5)))[::-1]
        true = said**exponent / (said**exponent).sum()
        token = int(rng.choice(5, p=true))
        sharpness.count(said[:4], token if token < 4 else None)
        found.append(sharpness._exponent)
    assert np.mean(found[2000:]) == pytest.approx(exponent, rel=0.15)
    chances = sharpness(said[:4])
    assert (chances >= 0).all()
    assert chances.sum() <= 1


def test_no_probabilities_spoil_the_exponent():
    sharpness = Sharpness()
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        for said in ([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1e-300, 0.0]):
            for index in (0, 1, None):
                for _ in range(500):
                    sharpness.count(np.array(said), index)
                assert (sharpness(np.array([said])) <= 1).all()
                assert 1 / MAX_SHARPNESS <= sharpness._exponent <= MAX_SHARPNESS
