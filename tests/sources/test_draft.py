"""A draft model as a source of guesses: alone, beside the pool, in a cascade, and as the assistant of a call."""

import random
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_lossless import check_identical, check_sources, known_model, left_pad, random_cases, random_prompt
from test_sources import Knows
from torch import nn
from transformers import PreTrainedTokenizerFast
from zoo import SETTINGS, VOCABULARY, tiny_model

import lookahead
from lookahead import DraftModelSource, LayerSkipSource, LookaheadConfig, PoolSource
from lookahead.cpu import products
from lookahead.guessing.combine import Ledger
from lookahead.models.adapter import ModelAdapter
from lookahead.passes import capabilities
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.costs import StepCosts
from lookahead.passes.rounding import relative_error
from lookahead.passes.runner import EagerRunner
from lookahead.sources import draft
from lookahead.sources.draft import DraftGuesser
from lookahead.step import Step, grow

DRAFTS = ["llama", "gpt2", "gemma3_text", "llama4_text", "lfm2", "bloom"]
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


# -- the text ---------------------------------------------------------------------------------------------------------


@random_cases(40)
@given(
    model_type=st.sampled_from(["llama", "gemma3_text", "lfm2", "bloom"]),
    drafts=st.lists(st.sampled_from(DRAFTS), min_size=1, max_size=3),
    draft_seed=st.sampled_from([0, 0, 1]),  # of a type with the model, the first is the model itself
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
    has_pool=st.booleans(),
    budget=st.sampled_from(["auto", "auto", 1, 7, 40]),
    options=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 40)},
        optional={"eos_token_id": st.lists(st.integers(3, VOCABULARY - 1), max_size=8), "top_k": st.just(5)},
    ),
    temperature=st.none() | st.sampled_from([0.3, 1.5]),
    seed=st.integers(0, 2**31),
)
def test_whatever_is_drafted_the_text_is_plain(
    model_type, drafts, draft_seed, prompt_seeds, has_pool, budget, options, temperature, seed
):
    """drafts: a cascade, the largest first; each drafts for the one before it, beside that one's pool."""
    model = known_model(model_type, 0)
    cascade = [tiny_model(kind, seed=draft_seed) for kind in drafts]
    for larger, smaller in pairwise(cascade):
        lookahead.wrap(larger, source=[PoolSource(), DraftModelSource(smaller)])
    sources = [DraftModelSource(cascade[0]), *([PoolSource()] if has_pool else [])]
    described = {"drafts": drafts, "draft_seed": draft_seed}
    check_sources(model, prompt_seeds, options, temperature, budget, seed, sources, **described)


@pytest.mark.parametrize("draft_type", SETTINGS)
def test_every_architecture_drafts(draft_type):
    """A model that drafts for itself knows the text: each kind of layer and cache is brought on as it should be."""
    model, small = tiny_model(draft_type), tiny_model(draft_type)
    config = LookaheadConfig(budget=16, pool_memory_mb=0.1)
    options = {"max_new_tokens": 24, "do_sample": False}
    stats = check_identical(model, [IDS], options, config, 0, source=DraftModelSource(small), draft=draft_type)
    if not find_adapter(small).has_state:  # with a state, only what is nearly sure is guessed
        assert stats.tokens_per_step > 1.5, stats


def test_three_levels():
    """A tiny model drafts for a medium one, which drafts for a large one; each has its pool."""
    large, medium, tiny = tiny_model("llama"), tiny_model("llama"), tiny_model("llama")
    lookahead.wrap(medium, source=[PoolSource(), DraftModelSource(tiny)])
    config = LookaheadConfig(budget=16)
    sources = [PoolSource(), DraftModelSource(medium)]
    stats = check_identical(large, [IDS], {"max_new_tokens": 60, "do_sample": False}, config, 0, source=sources)
    assert stats.accepted["DraftModelSource"] > 0
    assert medium.lookahead.pool.observations > 0, "the medium model's pool has learned nothing of what it said"


def sure_model():
    """A model that holds one next token likely."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


def test_a_cascade_takes_fewer_passes_of_the_draft_model(monkeypatch):
    """What its own sources guess rightly, a draft model computes at once."""
    passes = []
    monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    run = EagerRunner.run
    monkeypatch.setattr(EagerRunner, "run", lambda self, *args: passes.append(self.model) or run(self, *args))
    answer = sure_model().generate(IDS, max_new_tokens=60, do_sample=False)[0].tolist()
    counts = []
    for own in (Knows([[]]), Knows([answer], claim=0.99)):
        large, medium = sure_model(), lookahead.wrap(sure_model(), source=own)
        find_adapter(medium)
        lookahead.wrap(large, LookaheadConfig(budget=16), source=DraftModelSource(medium))
        passes.clear()
        large.generate(IDS, max_new_tokens=60, do_sample=False)
        counts.append(sum(model is medium for model in passes) / large.lookahead.last.tokens)
    assert counts[1] < 0.6 * counts[0], counts


# -- the draft model's cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_type", ["llama", "gpt2", "gemma3_text", "llama4_text", "lfm2", "bloom"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_drafted_is_what_plain_passes_say(monkeypatch, draft_type, batch):
    """After each row of each pass, the probabilities are those of a plain pass over the text up to it."""
    seen = []

    class Spied(DraftModelSource):
        def start(self, batch):
            return Spying(self, batch)

    class Spying(DraftGuesser):
        def propose(self, texts, limits):
            trees = super().propose(texts, limits)
            seen.extend((list(text), one) for text, one in zip(texts, self._drafts, strict=False))
            return trees

    model, small = tiny_model("llama"), tiny_model(draft_type, seed=1)
    prompts = [random_prompt(random.Random(b)) for b in range(batch)]
    lookahead.wrap(model, LookaheadConfig(budget=12), source=[PoolSource(), Spied(small)])
    model.generate(**left_pad(prompts), max_new_tokens=30, do_sample=False)
    can_draft = batch == 1 or find_adapter(small).can_branch
    assert bool(seen) == can_draft
    for text, one in random.Random(0).sample(seen, min(len(seen), 12)):
        for node in one.rows[one.root.row :]:
            if node is not one.root and node.parent is None:
                continue  # fills up a batch
            with torch.no_grad():
                logits = small(torch.tensor([text + node.path()])).logits[0, -1]
            expected = (logits / 0.5).softmax(-1)
            for token, probability in zip(node.following, node.said, strict=True):
                assert abs(expected[token] - probability) < 1e-4, (text, node.row)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("split_attention", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_in_several_passes_is_the_step_in_one(model_type, split_attention, seed):
    """A random forest of rows, in random pieces: the same logits, and the same cache after the same path."""
    rng = random.Random(f"{model_type} {seed}")
    model = tiny_model(model_type)
    attention = "sdpa" if split_attention else "eager"
    model.set_attn_implementation(attention)
    adapter = find_adapter(model)
    assert adapter.can_grow
    count, batch = rng.randint(4, 20), rng.choice([1, 3])
    parents = [[-1, *(rng.randrange(row) for row in range(1, count))] for _ in range(batch)]
    ids = [[rng.randrange(VOCABULARY) for _ in range(count)] for _ in range(batch)]
    paths = []
    for of_sequence in parents:
        path = [rng.randrange(count)]
        while of_sequence[path[0]] >= 0:
            path.insert(0, of_sequence[path[0]])
        paths.append(path)
    cuts = sorted(rng.sample(range(1, count), rng.randint(1, 3)))
    found = []
    for bounds in ([count], [*cuts, count]):
        runner, caches = EagerRunner(model, adapter), []
        for b in range(batch):
            caches.append(adapter.make_cache())
            prompt = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(3 + 2 * b)]])
            prompt = torch.arange(3 + 2 * b)[None] + 7 * b
            runner.prefill(prompt, caches[-1])
        cache = caches[0]
        if batch > 1:
            cache = adapter.make_cache()
            cache.stack(caches)
        pieces, computed = [], 0
        for bound in bounds:
            steps: list[Step] = [grow(i[:bound], p[:bound], computed) for i, p in zip(ids, parents, strict=True)]
            pieces.append(runner.run(steps, cache).logits.clone())
            computed = bound
        cache.commit(steps, paths)
        last = [grow([3], [-1], 0)] * batch
        whole = torch.cat([piece.unflatten(0, (batch, -1)) for piece in pieces], 1)
        found.append((whole, runner.run(last, cache).logits))
    for whole, in_pieces in zip(*found, strict=True):
        assert relative_error(in_pieces.flatten(0, -2), whole.flatten(0, -2)) < 1e-5, (cuts, parents, ids)


def test_a_mask_that_forgets_the_passes_before_is_seen(monkeypatch):
    """The check above can fail."""

    def forgetful(self, ancestors, positions, cache, dtype, device):
        ancestors = ancestors.copy()
        ancestors[:, :, : ancestors.shape[2] - ancestors.shape[1]] = False
        return masks(self, ancestors, positions, cache, dtype, device)

    masks = ModelAdapter.masks
    find_adapter(known_model("llama", 0))
    monkeypatch.setattr(ModelAdapter, "masks", forgetful)
    with pytest.raises(AssertionError):
        test_a_step_in_several_passes_is_the_step_in_one("llama", True, 0)


# -- generate(assistant_model=...) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_assistant_model_is_one_more_source(do_sample, is_wrapped):
    model, small = tiny_model("llama"), tiny_model("llama")
    options = {"max_new_tokens": 40, "do_sample": do_sample, "temperature": 0.5}
    torch.manual_seed(3)
    expected = model.generate(IDS, **options)
    state = torch.get_rng_state()
    if is_wrapped:
        lookahead.wrap(small)
    lookahead.wrap(model, LookaheadConfig(budget=16))
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = model.generate(IDS, **options, assistant_model=small)
    assert actual.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.lookahead.last.accepted["DraftModelSource"] > 0
    torch.manual_seed(3)
    assert model.generate(IDS, **options).tolist() == expected.tolist()
    assert model.lookahead.last.accepted["DraftModelSource"] == 0, "the assistant is that of a call"


def test_batches_have_an_assistant_too():
    model, small = tiny_model("llama"), tiny_model("llama")
    inputs = left_pad([random_prompt(random.Random(seed)) for seed in range(3)])
    expected = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    lookahead.wrap(model, LookaheadConfig(budget=30))
    assert model.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=small).equal(expected)
    assert model.lookahead.last.accepted["DraftModelSource"] > 0


def tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])),
        pad_token=tokens[2],
    )


def test_an_assistant_of_another_vocabulary_is_left_to_transformers(monkeypatch):
    model, small = tiny_model("llama"), tiny_model("llama", vocab_size=VOCABULARY + 3)
    ours = tokenizer([f"a{i} " for i in range(VOCABULARY)])
    theirs = tokenizer([f"a{i} " for i in range(VOCABULARY + 3)])
    options = {"max_new_tokens": 5, "do_sample": False, "tokenizer": ours, "assistant_tokenizer": theirs}
    lookahead.wrap(model)
    left = []
    cls = type(model).__mro__[2]
    monkeypatch.setattr(cls, "_assisted_decoding", lambda self, ids, *a, **k: left.append(k) or ids)
    with pytest.warns(UserWarning, match="assistant model of another vocabulary"):
        model.generate(IDS, **options, assistant_model=small)
    assert left[0]["assistant_model"] is small
    assert left[0]["assistant_tokenizer"] is theirs


def test_an_assistant_with_the_same_tokenizer_and_a_padded_vocabulary_drafts():
    model, small = tiny_model("llama"), tiny_model("llama", vocab_size=VOCABULARY + 3)
    same = tokenizer([f"a{i} " for i in range(VOCABULARY)])
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False)
    lookahead.wrap(model, LookaheadConfig(budget=8))
    options = {"max_new_tokens": 20, "do_sample": False, "tokenizer": same, "assistant_tokenizer": same}
    assert model.generate(IDS, **options, assistant_model=small).equal(expected)
    assert model.lookahead.last.guesses > 0


def test_an_assistant_that_lookahead_cannot_run_is_left_to_transformers(monkeypatch):
    model, small = tiny_model("llama"), tiny_model("llama")

    def refuse(self):
        raise lookahead.UnsupportedModelError("it cannot branch")

    monkeypatch.setattr(DraftModelSource, "check", refuse)
    expected = model.generate(IDS, max_new_tokens=10, do_sample=False)
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="this assistant model .it cannot branch"):
        assert model.generate(IDS, max_new_tokens=10, do_sample=False, assistant_model=small).equal(expected)


# -- what a draft model is left as ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_draft_model_is_left_as_it_was(monkeypatch, fails):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model, small = tiny_model("llama"), tiny_model("llama", seed=1)
    kinds = []
    compute = DraftGuesser._compute
    small.lm_head.register_forward_hook(lambda layer, *_: kinds.append(type(layer)))

    def spied(self, *args):
        if fails:
            raise RuntimeError("no")
        compute(self, *args)

    monkeypatch.setattr(DraftGuesser, "_compute", spied)
    lookahead.wrap(model, LookaheadConfig(budget=4), source=DraftModelSource(small))
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            model.generate(IDS, max_new_tokens=5, do_sample=False)
    else:
        model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert products.DecodingLinear in kinds, "the draft model's products are not those of our kernel"
    assert type(small) is type(tiny_model("llama"))
    assert all(type(layer) is nn.Linear for layer in small.modules() if isinstance(layer, nn.Linear))


def test_a_wrapped_draft_model_is_not_unwrapped_while_it_drafts(monkeypatch):
    model, small = tiny_model("llama"), lookahead.wrap(tiny_model("llama", seed=1))
    compute = DraftGuesser._compute

    def spied(self, *args):
        with pytest.raises(RuntimeError, match="while it decodes"):
            lookahead.unwrap(small)
        compute(self, *args)

    monkeypatch.setattr(DraftGuesser, "_compute", spied)
    lookahead.wrap(model, LookaheadConfig(budget=4), source=DraftModelSource(small))
    model.generate(IDS, max_new_tokens=5, do_sample=False)
    lookahead.unwrap(small)


def test_a_text_beyond_the_draft_models_context_is_written_without_it():
    model, small = tiny_model("gpt2"), tiny_model("gpt2", max_position_embeddings=64)
    prompt = torch.randint(3, VOCABULARY, (1, 20))
    stats = check_identical(
        model, [prompt], {"max_new_tokens": 120, "do_sample": False}, LookaheadConfig(budget=8), 0,
        source=DraftModelSource(small),
    )  # fmt: skip
    assert stats.tokens == 120


def test_a_batch_with_a_text_beyond_the_draft_models_context_is_written_without_it():
    """The first text alone would fit."""
    model, small = tiny_model("gpt2"), tiny_model("gpt2", max_position_embeddings=64)
    prompts = [torch.randint(3, VOCABULARY, (1, length)) for length in (6, 70)]
    check_identical(
        model, prompts, {"max_new_tokens": 20, "do_sample": False}, LookaheadConfig(budget=8), 0,
        source=DraftModelSource(small),
    )  # fmt: skip


def test_passes_stop_where_they_do_not_pay(monkeypatch):
    """A pass of the draft model that costs as much as the model's is not made for a fraction of a token."""
    model, small = tiny_model("llama"), tiny_model("llama", seed=1)
    passes = []
    compute = DraftGuesser._compute
    monkeypatch.setattr(DraftGuesser, "_compute", lambda self, *args: passes.append(1) or compute(self, *args))
    # Both would find that this draft model knows nothing.
    monkeypatch.setattr(draft, "SHARPENING", 0.0)
    monkeypatch.setattr(Ledger, "is_asked", lambda self, number: True)
    for dear, most in ((1e3, 1.0), (1e-9, 20.0)):
        passes.clear()
        monkeypatch.setattr(
            draft,
            "step_costs",
            lambda runner, dear=dear: StepCosts(torch.full((8,), dear).numpy(), torch.zeros(2).numpy()),
        )
        lookahead.wrap(model, LookaheadConfig(window_size=0), source=DraftModelSource(small))
        model.generate(IDS, max_new_tokens=20, do_sample=False)
        steps = model.lookahead.last.steps
        assert len(passes) <= most * steps
        if most > 1:
            assert len(passes) > 1.5 * steps
        lookahead.unwrap(model)


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_say_what_each_source_did(monkeypatch):
    passes, compute = [], DraftGuesser._compute
    monkeypatch.setattr(DraftGuesser, "_compute", lambda *given: passes.append(1) or compute(*given))
    model, medium = tiny_model("llama"), lookahead.wrap(tiny_model("llama"))
    lookahead.wrap(model, LookaheadConfig(budget=16), source=[PoolSource(), DraftModelSource(medium)])
    for _ in range(2):
        of_last_call = len(passes)
        model.generate(IDS, max_new_tokens=40, do_sample=False)
    for stats, made in ((model.lookahead.last, len(passes) - of_last_call), (model.lookahead.stats, len(passes))):
        pool, drafts = stats.sources["PoolSource"], stats.sources["DraftModelSource"]
        assert pool.asked == drafts.asked == stats.steps
        assert max(pool.accepted, drafts.accepted) <= stats.accepted.total() <= pool.accepted + drafts.accepted
        assert max(pool.earned, drafts.earned) <= stats.accepted.total()
        assert 0 < drafts.accepted <= drafts.proposed
        assert drafts.seconds > 0
        assert (pool.passes, drafts.passes) == (0, made)
        assert f"DraftModelSource: asked in {drafts.asked} steps, {drafts.passes} passes, " in str(stats)
        assert f"PoolSource: asked in {pool.asked} steps, {pool.proposed} guesses, " in str(stats)
        assert stats.as_dict()["sources"]["DraftModelSource"]["earned"] == drafts.earned
    assert model.lookahead.stats.sources["PoolSource"].asked == model.lookahead.stats.steps
    inner = medium.lookahead.stats.sources["PoolSource"]
    assert 0 < inner.accepted <= inner.proposed, "what the draft model's own pool guessed of it is not counted"
    report = model.lookahead.report().splitlines()
    assert "sources: PoolSource, DraftModelSource" in report
    assert f"DraftModelSource: {model.lookahead.stats.sources['DraftModelSource']}" in report


# -- cascades and budgets out of the ordinary --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_cascade_may_end_in_a_smaller_vocabulary(seed):
    """The texts that a draft model of a draft model sees go back and forth, and any of their tokens may be unknown."""
    model, middle = tiny_model("llama", seed=seed), tiny_model("gpt2", seed=seed + 50)
    last = tiny_model("llama", seed=3, vocab_size=80)
    config, options = LookaheadConfig(budget=20, window_size=0), {"max_new_tokens": 40, "min_new_tokens": 40}
    torch.manual_seed(seed)
    expected = model.generate(IDS, do_sample=True, **options).tolist()
    lookahead.wrap(middle, config, source=[PoolSource(), DraftModelSource(last)])
    lookahead.wrap(model, config, source=[PoolSource(), DraftModelSource(middle)])
    torch.manual_seed(seed)
    assert model.generate(IDS, do_sample=True, **options).tolist() == expected


@pytest.mark.parametrize("as_assistant", [False, True])
def test_no_guess_is_allowed_and_the_draft_models_own_sources_know_none(as_assistant):
    model, small = tiny_model("llama"), tiny_model("gpt2")
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    lookahead.wrap(small, source=lookahead.RetrievalSource([[90, 91, 92]]))
    sources, given = ([], {"assistant_model": small}) if as_assistant else ([DraftModelSource(small)], {})
    lookahead.wrap(model, LookaheadConfig(budget=0), source=[PoolSource(), *sources])
    assert model.generate(IDS, max_new_tokens=20, do_sample=False, **given).tolist() == expected


def test_a_draft_model_that_needs_itself_is_named():
    model, other = tiny_model("llama"), tiny_model("gpt2")
    with pytest.raises(ValueError, match="LlamaForCausalLM drafts for itself"):
        lookahead.wrap(model, source=[PoolSource(), DraftModelSource(model)])
    assert not hasattr(model, "lookahead")
    lookahead.wrap(model, source=[PoolSource(), DraftModelSource(other)])
    with pytest.raises(ValueError, match="GPT2LMHeadModel drafts for itself"):
        lookahead.wrap(other, source=[PoolSource(), DraftModelSource(model)])
    lookahead.wrap(other, source=DraftModelSource(third := tiny_model("llama", seed=1)))
    third.lookahead = model.lookahead  # behind the back of `wrap`
    with pytest.raises(ValueError, match="drafts for itself"):
        model.generate(IDS, max_new_tokens=5)


def test_a_name_is_no_draft_model():
    with pytest.raises(TypeError, match="DraftModelSource takes a model, not 'gpt2'"):
        DraftModelSource("gpt2")


def test_a_draft_model_may_skip_its_own_layers():
    model, small = tiny_model("llama"), tiny_model("llama", seed=1, num_hidden_layers=3)
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    lookahead.wrap(small, source=[PoolSource(), LayerSkipSource(small, skipped=(1,))])
    lookahead.wrap(model, source=[PoolSource(), DraftModelSource(small)])
    assert model.generate(IDS, max_new_tokens=20, do_sample=False).tolist() == expected


@pytest.mark.parametrize("draft_type", ["gpt2", "llama"])
@pytest.mark.parametrize("as_assistant", [False, True])
def test_dropout_of_a_draft_model_draws_nothing_from_the_text(draft_type, as_assistant):
    """A model that is made, not loaded, is in training mode."""
    dropout = {"gpt2": {"attn_pdrop": 0.5}, "llama": {"attention_dropout": 0.5}}[draft_type]
    model, draft = tiny_model("llama"), tiny_model(draft_type, **dropout).train()

    def written(**options):
        torch.manual_seed(3)
        text = model.generate(IDS, do_sample=True, max_new_tokens=30, eos_token_id=None, **options)
        return text.tolist(), torch.get_rng_state().tolist()

    expected = written()
    lookahead.wrap(model, source=None if as_assistant else [PoolSource(), DraftModelSource(draft)])
    assert written(**({"assistant_model": draft} if as_assistant else {})) == expected
    assert model.lookahead.last.sources["DraftModelSource"].proposed
    assert draft.training
