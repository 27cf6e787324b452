"""The model drafts with some of its own layers: the same text, the right drafts, the cache as it was."""

import copy
import json
import pickle
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_lossless import check_identical, check_sources, left_pad, random_cases, random_prompt
from torch import nn
from transformers import DynamicCache
from zoo import VOCABULARY, tiny_model

import lookahead
from lookahead import DraftModelSource, LayerSkipSource, LookaheadConfig, PoolSource, UnsupportedModelError
from lookahead.compat import is_compiled
from lookahead.models.cache import LookaheadCache
from lookahead.models.rewinding import part_of
from lookahead.passes import stored
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.costs import RUNGS, StepCosts
from lookahead.passes.graphs import StepGraphs
from lookahead.passes.runner import EagerRunner
from lookahead.sources import layer_skip
from lookahead.sources.layer_skip import LayerSkipGuesser, SkippedLayers, find_skipped_layers, kept_layers
from lookahead.tools.cli import main
from lookahead.tools.loading import load

LAYERS = 4
TYPES = ["llama", "qwen2", "gpt2", "gpt_neox", "opt", "falcon", "gptj", "qwen3_moe", "smollm3", "gpt_bigcode"]
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
GREEDY = {"max_new_tokens": 40, "do_sample": False}


def deep_model(model_type="llama", seed=0, layers=LAYERS):
    return tiny_model(model_type, seed, num_hidden_layers=layers, n_layer=layers, no_rope_layers=[1, 0, 1, 1][:layers])


@lru_cache
def known_model(model_type, seed):
    """Probed once."""
    return deep_model(model_type, seed)


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)


@contextmanager
def bypassed(model, skipped):
    """Another way to skip layers: they compute, but pass on their input instead of their output."""

    def pass_on(module, args, kwargs, output):
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    hooks = [layers_of(model)[index].register_forward_hook(pass_on, with_kwargs=True) for index in skipped]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def said_after(model, skipped, committed, drafted):
    """Logits [n, vocabulary] of the drafted tokens without the skipped layers, after committed ones with all."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([committed]), past_key_values=cache)
        positions = torch.arange(len(committed), len(committed) + len(drafted))[None]
        arguments = {} if model.config.model_type == "opt" else {"position_ids": positions}
        with bypassed(model, skipped):
            return model(torch.tensor([drafted]), past_key_values=cache, **arguments).logits[0]


# -- the text ---------------------------------------------------------------------------------------------------------


@random_cases(40)
@given(
    model_type=st.sampled_from(["llama", "qwen2", "gpt2", "gpt_neox"]),
    skipped=st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1),
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
    has_pool=st.booleans(),
    budget=st.sampled_from(["auto", "auto", 1, 7, 40]),
    options=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 40)},
        optional={
            "eos_token_id": st.lists(st.integers(3, VOCABULARY - 1), max_size=8),
            "top_k": st.just(5),
            "prefill_chunk_size": st.integers(1, 20),
        },
    ),
    temperature=st.none() | st.sampled_from([0.3, 1.5]),
    attention=st.sampled_from(["sdpa", "eager"]),
    seed=st.integers(0, 2**31),
)
def test_whatever_is_skipped_the_text_is_plain(
    model_type, skipped, prompt_seeds, has_pool, budget, options, temperature, attention, seed
):
    model = known_model(model_type, seed % 2)
    model.set_attn_implementation(attention)
    sources = [LayerSkipSource(model, skipped), *([PoolSource()] if has_pool else [])]
    described = {"skipped": skipped, "attention": attention}
    check_sources(model, prompt_seeds, options, temperature, budget, seed, sources, **described)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_architecture_drafts(model_type):
    model = deep_model(model_type)
    stats = check_identical(model, [IDS], GREEDY, LookaheadConfig(budget=12), 0, source=LayerSkipSource(model, [1]))
    assert stats.accepted["LayerSkipSource"] > 0


def test_a_text_that_a_caller_goes_on_with():
    """The cache of the call is the caller's own: it ends as plain decoding leaves it, and serves the next call."""
    model = deep_model()
    caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
    texts = []
    for cache in caches:
        ids = IDS
        for _ in range(2):
            ids = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **GREEDY).sequences
        texts.append(ids.tolist())
        lookahead.wrap(model, LookaheadConfig(budget=12), source=LayerSkipSource(model, [2]))
    assert texts[0] == texts[1]
    assert model.lookahead.last.accepted["LayerSkipSource"] > 0
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.allclose(theirs.keys, ours.keys, atol=1e-4)
        assert torch.allclose(theirs.values, ours.values, atol=1e-4)


def test_with_nothing_skipped_all_that_is_likeliest_is_accepted():
    """The draft is then the model itself. The likeliest branch of each tree comes true to its end."""
    followed = []

    class Spied(LayerSkipSource):
        def start(self, batch):
            return Spying(self, batch)

    class Spying(LayerSkipGuesser):
        def observe(self, outcome):
            super().observe(outcome)
            for draft, emitted in zip(self._drafts, outcome.emitted, strict=True):
                path = draft.accepted(emitted)[draft.root.row :]
                for node, token in zip(path, emitted, strict=False):
                    followed.append(max(node.following, key=node.following.get) == token)

    model = deep_model()
    lookahead.wrap(model, LookaheadConfig(budget=12), source=Spied(model, ()))
    model.generate(IDS, **GREEDY)
    assert len(followed) > 20
    assert all(followed)


# -- what is drafted --------------------------------------------------------------------------------------------------


class Recorded(LayerSkipSource):
    """Keeps its drafts, and finds that the cache is byte for byte what it was."""

    def start(self, batch):
        return Recording(self, batch)


class Recording(LayerSkipGuesser):
    def propose(self, texts, limits):
        before = state_of(self._of_call)
        trees = super().propose(texts, limits)
        for now, then in zip(state_of(self._of_call), before, strict=True):
            for one, other in zip(now, then, strict=True):
                assert torch.equal(one, other), "propose has changed the cache"
        self._source.seen.extend((list(text), one) for text, one in zip(texts, self._drafts, strict=False))
        return trees


def state_of(cache):
    """All that the next pass reads of a cache, copied."""
    caches, batch = getattr(cache, "each", [cache]), len(cache.lengths)
    return [
        (
            *(states.clone() for states in layer.states()),
            torch.tensor(layer.columns),
            torch.tensor(layer.computed),
            torch.tensor(np.broadcast_to(layer.gaps, batch).copy()),
            torch.tensor(np.broadcast_to(layer.starts, batch).copy()),
            torch.tensor(cache.lengths),
        )
        for one in caches
        for layer in one.layers
    ]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gpt_neox", "opt", "qwen3_moe"])
@pytest.mark.parametrize(("skipped", "batch"), [((), 3), ((1,), 1), ((0, 2), 3), ((1, 2, 3), 1)])
def test_what_is_drafted_is_what_the_kept_layers_say(model_type, skipped, batch):
    """After the committed tokens, which all layers have computed; and the cache is left as it was."""
    model = deep_model(model_type)
    source = Recorded(model, skipped)
    source.seen = []
    prompts = [random_prompt(random.Random(b)) for b in range(batch)]
    lookahead.wrap(model, LookaheadConfig(budget=12), source=[PoolSource(), source])
    model.generate(**left_pad(prompts), max_new_tokens=30, do_sample=False)
    lookahead.unwrap(model)
    compared = 0
    for text, one in random.Random(0).sample(source.seen, min(len(source.seen), 8)):
        for node in one.rows[one.root.row :]:
            if node is not one.root and node.parent is None:
                continue  # fills up a batch
            logits = said_after(model, skipped, text[:-1], [text[-1], *node.path()])[-1]
            expected = (logits / 0.5).softmax(-1)
            for token, probability in zip(node.following, node.said, strict=True):
                assert abs(expected[token] - probability) < 1e-4, (text, node.row)
                compared += 1
    assert compared > 50


def test_layers_that_read_another_layers_cache_are_seen(monkeypatch):
    """The check above can fail: the wrong part of the cache."""
    monkeypatch.setattr(layer_skip, "part_of", lambda cache, layers: part_of(cache, [index - 1 for index in layers]))
    with pytest.raises(AssertionError):
        test_what_is_drafted_is_what_the_kept_layers_say("llama", (0, 2), 1)


def test_rows_that_stay_in_the_cache_are_seen(monkeypatch):
    """So can the check of the text: nothing is dropped after drafting."""

    @contextmanager
    def sticky(cache, layers):
        yield LookaheadCache([cache.layers[index] for index in layers], list(cache.lengths))

    monkeypatch.setattr(layer_skip, "part_of", sticky)
    with pytest.raises(AssertionError):
        test_every_architecture_drafts("llama")


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was(at):
    """The last layer fails in a draft pass, after the others have appended their rows."""
    model = deep_model()
    cache = DynamicCache(config=model.config)
    first = model.generate(IDS, past_key_values=cache, return_dict_in_generate=True, **GREEDY).sequences
    expected = model.generate(first, past_key_values=copy.deepcopy(cache), **GREEDY).tolist()
    drafting, caches = [], []

    class Fault(Exception):
        pass

    class Watched(LayerSkipSource):
        def start(self, batch):
            return Watching(self, batch)

    class Watching(LayerSkipGuesser):
        def propose(self, texts, limits):
            drafting.append(True)
            before = state_of(self._of_call)
            try:
                return super().propose(texts, limits)
            except Fault:
                same = zip(state_of(self._of_call), before, strict=True)
                caches.append(all(torch.equal(a, b) for now, then in same for a, b in zip(now, then, strict=True)))
                raise
            finally:
                drafting.pop()

    failing = [0]

    def fail(*_):
        if drafting:
            failing[0] += 1
            if failing[0] == at:
                raise Fault

    source = Watched(model, [1])
    model.lm_head.register_forward_pre_hook(fail)
    lookahead.wrap(model, LookaheadConfig(budget=12), source=[source, PoolSource()])
    with pytest.raises(Fault):
        model.generate(first, past_key_values=cache, **GREEDY)
    assert caches == [True]
    assert model.generate(first, past_key_values=cache, **GREEDY).tolist() == expected


def test_a_part_is_given_back_even_if_half_of_it_was_written():
    model = deep_model()
    cache = find_adapter(model).make_cache()
    EagerRunner(model, find_adapter(model)).prefill(IDS, cache)
    before = state_of(cache)
    with pytest.raises(ZeroDivisionError), part_of(cache, [1, 3]) as part:  # noqa: PT012
        part.prepare(2, 0)
        part.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 0)
        raise ZeroDivisionError
    same = zip(state_of(cache), before, strict=True)
    assert all(torch.equal(a, b) for now, then in same for a, b in zip(now, then, strict=True))


# -- the model without layers -----------------------------------------------------------------------------------------


def test_a_copy_shares_all_weights_and_follows_the_model():
    model = deep_model()
    ids, numbers = (
        [id(parameter) for parameter in model.parameters()],
        [x.self_attn.layer_idx for x in layers_of(model)],
    )
    small = layer_skip._without(model, (1,))
    assert {id(parameter) for parameter in small.parameters()} < set(ids)
    assert [x.self_attn.layer_idx for x in small.model.layers] == [0, 1, 2]
    assert small.config.num_hidden_layers == small.model.config.num_hidden_layers == LAYERS - 1
    assert layer_skip._without(model, (1,)) is small
    assert layer_skip._without(model, (2,)) is not small
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert [x.self_attn.layer_idx for x in layers_of(model)] == numbers
    assert model.config.num_hidden_layers == LAYERS
    model.lm_head = nn.Linear(32, VOCABULARY, bias=False)
    assert layer_skip._without(model, (1,)).lm_head is model.lm_head
    model.set_attn_implementation("eager")
    assert layer_skip._without(model, (1,)).config._attn_implementation == "eager"


def test_a_wrap_with_it_is_copied_and_pickled():
    model = deep_model()
    expected = model.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(model, LookaheadConfig(budget=12), source=[LayerSkipSource(model, [1]), PoolSource()])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.generate(IDS, **GREEDY).tolist() == expected
        assert again.lookahead.last.accepted["LayerSkipSource"] > 0


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral", "lfm2", "bloom", "llama4_text"])
def test_layers_of_other_kinds_are_refused_by_name(model_type):
    model = tiny_model(model_type)
    named = f"{type(model).__name__} .*hold the keys and values of all positions"
    with pytest.raises(UnsupportedModelError, match=named):
        LayerSkipSource(model, [0])
    with pytest.raises(UnsupportedModelError, match=named):
        find_skipped_layers(EagerRunner(model, find_adapter(model)), [[5, 6, 7]], 1.0)


def test_a_model_without_one_list_of_layers_is_refused_by_name():
    model = deep_model()
    model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .*model\.layers and more of its modules is a l"):
        LayerSkipSource(model, [0])
    del model.more
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .*none of its modules is a list of"):
        LayerSkipSource(model, [0])


def test_experts_are_no_list_of_layers():
    model = deep_model()
    model.model.layers[0].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
    assert LayerSkipSource(model, [0]).skipped == (0,)


@pytest.mark.parametrize("skipped", [[4], [-1], range(4)])
def test_layers_that_do_not_fit_are_named(skipped):
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM, whose layers are 0 to 3"):
        LayerSkipSource(deep_model(), skipped)


def test_passes_that_see_no_mask_of_ours_are_refused(monkeypatch):
    model = deep_model()
    lookahead.wrap(model, source=LayerSkipSource(model, [1]))
    without = layer_skip._without(model, (1,))
    found = replace(find_adapter(without), can_branch=False)
    monkeypatch.setattr(layer_skip, "choose_runner", lambda *_: (EagerRunner(without, found), None))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM cannot draft .*take no mask of ours"):
        model.generate(IDS, **GREEDY)


def test_a_module_bound_to_itself_is_refused_by_name():
    model = deep_model()
    attention = model.model.layers[2].self_attn
    attention.forward = attention.forward  # as accelerate does it
    with pytest.raises(UnsupportedModelError, match="the forward of its LlamaAttention was replaced"):
        LayerSkipSource(model, [1])


def test_a_copy_does_not_run_what_was_compiled_of_the_whole():
    model = deep_model()
    model.compile(backend="eager")
    assert is_compiled(model)
    assert not is_compiled(layer_skip._without(model, (1,)))


def test_another_model_than_its_own_is_refused():
    model, other = deep_model(), deep_model(seed=1)
    with pytest.raises(ValueError, match="make it for the wrapped model"):
        lookahead.wrap(model, source=LayerSkipSource(other, [1]))


def test_beside_cuda_graphs_it_proposes_nothing_and_says_so():
    model = deep_model()
    expected = model.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(
        model, LookaheadConfig(cuda_graphs=True, budget=8), source=[PoolSource(), LayerSkipSource(model, [1])]
    )
    model.lookahead.graphs = StepGraphs(model, capture=None)
    with pytest.warns(UserWarning, match="LayerSkipSource proposes nothing: .*StaticCache"):
        assert model.generate(IDS, **GREEDY).tolist() == expected
    assert model.lookahead.last.accepted["LayerSkipSource"] == 0


def test_in_a_draft_model_it_proposes_nothing():
    """A draft model's cache holds guesses that nobody has verified."""
    model, small = deep_model(), deep_model(seed=1)
    lookahead.wrap(small, source=LayerSkipSource(small, [1]))
    stats = check_identical(model, [IDS], GREEDY, LookaheadConfig(budget=8), 0, source=DraftModelSource(small))
    assert stats.guesses > 0
    assert small.lookahead.stats.accepted["LayerSkipSource"] == 0


# -- which layers to skip ---------------------------------------------------------------------------------------------


def model_with_idle_layers(idle):
    model = deep_model()
    with torch.no_grad():
        for index in idle:
            layers_of(model)[index].self_attn.o_proj.weight.zero_()
            layers_of(model)[index].mlp.down_proj.weight.zero_()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("idle", [[1], [0, 3]])
def test_layers_that_do_nothing_are_found(idle, monkeypatch):
    """Each layer takes a quarter of a pass, and any number of rows the same time."""
    flat = StepCosts(np.full(len(RUNGS), 2.0), np.zeros(2))
    monkeypatch.setattr(layer_skip, "step_costs", lambda _: flat)
    monkeypatch.setattr(layer_skip, "time_passes", lambda runner, *_: {(1, 0): len(runner.model.model.layers)})
    model = model_with_idle_layers(idle)
    done = []
    runner = EagerRunner(model, find_adapter(model))
    found = find_skipped_layers(runner, [IDS[0].tolist(), [9, 8, 7]], 60.0, done.append)
    assert found.skipped == tuple(idle)
    assert found.agreement == 1
    assert found.gain == pytest.approx(13 / (12 * (LAYERS - len(idle)) / LAYERS + 1))
    assert done == sorted(done)
    assert done[-1] <= 1
    assert LayerSkipSource(model, found.skipped).skipped == found.skipped


def test_layers_are_dropped_for_what_they_leave_together(monkeypatch):
    """Without 1 or 2 most agrees, without both little. Layer 0, once worse than 1 and 3 together, is not retried."""
    agreements = {(0,): 0.5, (1,): 0.95, (2,): 0.9, (3,): 0.85, (1, 2): 0.1, (1, 3): 0.8}
    tried = []
    flat = StepCosts(np.full(len(RUNGS), 2.0), np.zeros(2))
    monkeypatch.setattr(layer_skip, "step_costs", lambda _: flat)
    monkeypatch.setattr(layer_skip, "time_passes", lambda runner, *_: {(1, 0): len(runner.model.model.layers)})
    monkeypatch.setattr(
        layer_skip, "_agreement", lambda _, __, skipped: tried.append(skipped) or agreements.get(tuple(skipped), 0.05)
    )
    model = model_with_idle_layers([])
    found = find_skipped_layers(EagerRunner(model, find_adapter(model)), [[9, 8, 7]], 60.0)
    assert found == SkippedLayers((1, 3), 0.8, layer_skip._gain(0.8, 0.5, flat))
    assert tried[:6] == [[0], [1], [2], [3], [1, 2], [1, 3]]
    assert [1, 0] not in tried


@pytest.mark.parametrize("skipped", [[1], [2]])
def test_agreement_is_that_of_the_kept_layers_behind_committed_tokens(skipped):
    model = model_with_idle_layers([])
    prompt = IDS[0].tolist()
    runner = EagerRunner(model, find_adapter(model))
    sample = layer_skip._Sample.after(prompt, runner)
    found = layer_skip._agreement(layer_skip._runner_without(runner, skipped), [sample], skipped)
    text = model.generate(IDS, max_new_tokens=layer_skip.SAMPLE, do_sample=False)[0].tolist()
    agrees = []
    for begin in range(len(prompt), len(text) - layer_skip.CHUNK + 1, layer_skip.CHUNK):
        chunk = text[begin : begin + layer_skip.CHUNK]
        said = said_after(model, skipped, text[:begin], chunk).argmax(-1)
        agrees.append(said == said_after(model, [], text[:begin], chunk).argmax(-1))
    assert len(agrees) == layer_skip.SAMPLE // layer_skip.CHUNK
    assert found == pytest.approx(torch.cat(agrees).float().mean().item(), abs=1e-6)
    assert 0 < found < 1


def test_the_expected_gain_is_that_of_the_best_chain():
    """Passes that cost the same for all rows: with sure drafts of half a pass, 12 of them; with none right, one."""
    flat = StepCosts(np.full(len(RUNGS), 2.0), np.zeros(2))
    assert layer_skip._gain(1.0, 0.5, flat) == pytest.approx(13 / (12 * 0.5 + 1))
    assert layer_skip._gain(0.0, 0.5, flat) == pytest.approx(1 / 1.5)
    assert layer_skip._gain(0.5, 0.25, flat) == pytest.approx(max(1.5 / 1.25, 1.75 / 1.5))


def test_no_time_makes_a_pass_cheaper_than_its_layers(monkeypatch):
    """The whole model's pass was interrupted, so it seems to take 50 times as long."""
    flat = StepCosts(np.full(len(RUNGS), 2.0), np.zeros(2))
    monkeypatch.setattr(layer_skip, "step_costs", lambda _: flat)
    monkeypatch.setattr(
        layer_skip,
        "time_passes",
        lambda runner, *_: {(1, 0): 50.0 if len(runner.model.model.layers) == LAYERS else 1.0},
    )
    monkeypatch.setattr(layer_skip, "_agreement", lambda _, __, skipped: 1.0 if skipped == [2] else 0.0)
    model = model_with_idle_layers([])
    found = find_skipped_layers(EagerRunner(model, find_adapter(model)), [[9, 8, 7]], 60.0)
    assert found == SkippedLayers((2,), 1.0, layer_skip._gain(1.0, 0.75, flat))


def test_a_model_that_writes_nothing_is_named():
    model = deep_model()
    with torch.no_grad():
        end = model.generate(IDS, max_new_tokens=1, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = end
    with pytest.raises(ValueError, match="LlamaForCausalLM writes fewer than 8 tokens"):
        find_skipped_layers(EagerRunner(model, find_adapter(model)), [IDS[0].tolist()], 1.0)


def test_without_layers_found_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    model = deep_model()
    with pytest.raises(ValueError, match="`lookahead tune --layer-skip --model NAME_OR_PATH`"):
        LayerSkipSource(model)
    path = SkippedLayers((1, 2), 0.9, 1.1).save(model)
    assert LayerSkipSource(model).skipped == (1, 2)
    assert LayerSkipSource(lookahead.wrap(model)).skipped == (1, 2)
    for data in ({}, [1], {"skipped": "x", "agreement": 1, "gain": 1}):
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match="tune --layer-skip"):
            LayerSkipSource(model)
    with pytest.raises(ValueError, match="tune --layer-skip"):
        LayerSkipSource(model.to(torch.bfloat16))


def test_tune_keeps_the_layers_that_it_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    result = CliRunner().invoke(main, ["tune", "--seconds", "2", "--contexts", "16", "--threads", "1", "--layer-skip"])
    assert result.exit_code == 0, result.output
    model = load(None)[0]
    found = kept_layers(model)
    assert str(found) in result.stdout
    assert f"kept for LayerSkipSource: {layer_skip._path(model)}" in result.stdout
    assert layer_skip._path(model).parent == tmp_path / "skipped-layers"
    assert LayerSkipSource(model).skipped == found.skipped
