"""Trees over states: in every family, rows compute the same as single tokens, and nothing else changes."""

import copy
import random
import threading
from copy import deepcopy
from types import FunctionType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_lossless import check_identical, random_cases, random_prompt
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from zoo import tiny_model

import lookahead
from bench.tiny_models import random_model, tiny_config
from lookahead import LookaheadConfig
from lookahead.cpu import states
from lookahead.decoding_pass import DecodingPass
from lookahead.guessing.pool import PoolSource
from lookahead.guessing.source import GuessSource
from lookahead.models import branching, recurrence
from lookahead.models.cache import LookaheadCache
from lookahead.models.kept import ATTRIBUTE
from lookahead.models.recurrence import Forest, StateLayer
from lookahead.models.state import state_of
from lookahead.passes.capabilities import find_adapter, fused_runner
from lookahead.passes.conditions import hides_padding
from lookahead.passes.fused import FusedRunner
from ngram_pool import GuessTree

# Families whose layers with a state compute branches, by how they do. Older transformers lack some.
DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini")
BY_CHANNEL = ("kimi_linear", "bailing_hybrid")
MAMBA2 = ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")
CONVOLUTION = ("lfm2", "lfm2_moe", "lfm3")
FAMILIES = [t for t in (*DELTA_RULE, *BY_CHANNEL, *MAMBA2, *CONVOLUTION) if t in CONFIG_MAPPING]
KEEPS_NO_POSITIONS = {"mamba2"}

parents_of_trees = st.integers(1, 12).flatmap(
    lambda rows: st.tuples(st.just(-1), *(st.integers(0, row - 1) for row in range(1, rows)))
)


def forest_of(trees: list[tuple[int, ...]]) -> Forest:
    ancestors = np.zeros((len(trees), len(trees[0]), len(trees[0])), bool)
    for b, parents in enumerate(trees):
        for row, parent in enumerate(parents):
            ancestors[b, row] = ancestors[b, parent] if parent >= 0 else False
            ancestors[b, row, row] = True
    return Forest(ancestors, torch.device("cpu"))


def path_to(parents: tuple[int, ...], row: int) -> list[int]:
    return [*(path_to(parents, parents[row]) if parents[row] >= 0 else []), row]


def decays(*shape: int) -> torch.Tensor:
    """Logarithms from about 0 to -10, as trained layers have them side by side."""
    return -10 * torch.rand(shape) ** 4


def computed(trees, function, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor, list]:
    """What a function over a forest returns, and what waits for `StateLayer.commit`."""
    forest = forest_of(trees)
    forest.layer = StateLayer()
    with DecodingPass(splits_attention=False, uses_kernels=False, forest=forest):
        return *function(*args, **kwargs), forest.layer.pending


@given(tree=parents_of_trees, seed=st.integers(0, 2**32), by_channel=st.booleans(), groups=st.sampled_from([1, 2]))
@random_cases(40)
def test_the_delta_rule_follows_single_tokens(tree, seed, by_channel, groups):
    """Each row, and the state after each path, are those of transformers' function for single tokens."""
    torch.manual_seed(seed)
    groups = 1 if by_channel else groups
    single = (
        modeling_kimi_linear.recurrent_kimi_delta_attention
        if by_channel
        else modeling_qwen3_next.torch_recurrent_gated_delta_rule
    )
    trees, rows = [tree, (-1, *range(len(tree) - 1))], len(tree)
    query, key = torch.randn(2, 2, rows, 2, 4).unbind()
    value, beta = torch.randn(2, rows, 2 * groups, 6), torch.rand(2, rows, 2 * groups)
    g = decays(2, rows, 2, 4) if by_channel else decays(2, rows, 2 * groups)
    state = torch.randn(2, 2 * groups, 4, 6)
    names = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    given_rows = query, key, value, g, beta
    out, same, pending = computed(
        trees, recurrence.delta_rule, query, key, value, g, beta, initial_state=state, **names
    )
    assert same is state
    for last in range(rows):
        after, paths = state.clone(), [path_to(parents, last) for parents in trees]
        pending[0]._replace(state=after).apply(paths)
        for b, path in enumerate(paths):
            one = [x[b : b + 1, path] for x in given_rows]
            one[:2] = [x.repeat_interleave(groups, 2) for x in one[:2]]
            expected, final = single(*one, initial_state=state[b : b + 1].clone(), **names)
            torch.testing.assert_close(out[b, path], expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(after[b], final[0], rtol=1e-4, atol=1e-5)


@given(tree=parents_of_trees, seed=st.integers(0, 2**32), groups=st.sampled_from([1, 2]), skips=st.booleans())
@random_cases(40)
def test_the_scan_follows_single_tokens(tree, seed, groups, skips):
    torch.manual_seed(seed)
    trees, rows, heads = [tree, (-1, *range(len(tree) - 1))], len(tree), 4
    hidden, dt, A = torch.randn(2, rows, heads, 6), 2 * torch.randn(2, rows, heads), -8 * torch.rand(heads) ** 2
    B, C, D = torch.randn(2, rows, groups, 5), torch.randn(2, rows, groups, 5), torch.randn(heads) if skips else None
    bias, state = torch.randn(heads), torch.randn(2, heads, 6, 5)
    names = {"dt_softplus": True, "dt_limit": (0.0, 0.1)}  # single tokens know no limits
    out, same, pending = computed(
        trees, recurrence.scan, hidden, dt, A, B, C, chunk_size=8, D=D, dt_bias=bias, initial_states=state, **names
    )
    assert same is state
    wide = [None if x is None else x[:, None].expand(-1, 6) for x in (D, bias)]
    for last in range(rows):
        after, paths = state.clone(), [path_to(parents, last) for parents in trees]
        pending[0]._replace(state=after.mT).apply(paths)
        for b, path in enumerate(paths):
            held = state[b : b + 1].clone()
            for row in path:
                expected = modeling_mamba2.mamba2_selective_state_update(
                    held,
                    hidden[b : b + 1, row],
                    dt[b : b + 1, row, :, None].expand(-1, -1, 6),
                    A[:, None, None].expand(-1, 6, 5),
                    B[b : b + 1, row],
                    C[b : b + 1, row],
                    *wide,
                    dt_softplus=True,
                )
            torch.testing.assert_close(out[b, last], expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(after[b], held[0], rtol=1e-4, atol=1e-5)


@given(
    tree=parents_of_trees,
    seed=st.integers(0, 2**32),
    width=st.integers(2, 5),
    activation=st.sampled_from([None, "silu"]),
    has_bias=st.booleans(),
)
@random_cases(40)
def test_convolutions_follow_single_tokens(tree, seed, width, activation, has_bias):
    torch.manual_seed(seed)
    trees, rows = [tree, (-1, *range(len(tree) - 1))], len(tree)
    inputs, weight = torch.randn(2, 3, rows), torch.randn(3, width)
    bias = torch.randn(3) if has_bias else None
    layer = StateLayer()
    layer.update_conv_state(torch.randn(2, 3, 7), conv_kernel_size=width)  # a prompt
    held = layer.conv_states[0].clone()
    with DecodingPass(splits_attention=False, uses_kernels=False, forest=forest_of(trees)):
        out = recurrence.convolve(layer.update_conv_state(inputs), weight, bias, activation)
    assert torch.equal(layer.conv_states[0], held)
    for last in range(rows):
        paths = [path_to(parents, last) for parents in trees]
        after = deepcopy(layer)
        after.commit(paths)
        for b, path in enumerate(paths):
            kept = held[b : b + 1].clone()
            for row in path:
                one = inputs[b : b + 1, :, row : row + 1]
                expected = modeling_mamba2.causal_conv1d_update(one, kept, weight, bias, activation)
            torch.testing.assert_close(out[b, :, last], expected[0, :, 0], rtol=1e-5, atol=1e-5)
            assert torch.equal(after.conv_states[0][b], kept[0])


def test_decays_of_other_branches_do_not_overflow():
    """A row next to a branch of 63 rows, each of which decays by exp(-10): one over the other's decay is no number."""
    torch.manual_seed(0)
    tree = (-1, *range(62), 0)
    query, key = torch.randn(2, 1, 64, 2, 4).unbind()
    value, beta, state = torch.randn(1, 64, 2, 6), torch.rand(1, 64, 2), torch.randn(1, 2, 4, 6)
    g = torch.full((1, 64, 2), -10.0)
    g[:, -1] = -1e-3
    out, *_ = computed([tree], recurrence.delta_rule, query, key, value, g, beta, initial_state=state)
    path = path_to(tree, 63)
    one = [x[:, path] for x in (query, key, value, g, beta)]
    expected, _ = modeling_qwen3_next.torch_recurrent_gated_delta_rule(*one, initial_state=state)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, path], expected, rtol=1e-4, atol=1e-5)


def test_decays_lose_the_digits_that_they_lose_in_the_model():
    """Kimi Linear adds 1 to exp(x) before it takes the logarithm, and a high speed makes much of what that rounds."""
    model = random_model(tiny_config("kimi_linear"))
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            module.dt_bias.data.uniform_(-9, -5)
            module.A_log.data.uniform_(4, 6)
    assert isinstance(fused_runner(model, find_adapter(model)), FusedRunner)


class Forked(GuessSource):
    """Proposes the right token at each place, and a wrong one that it says is likelier. So paths skip rows."""

    is_free = is_calibrated = True

    def __init__(self, answers: list[list[int]], seed: int):
        self.answers, self.seed = answers, seed

    def start(self, batch):
        forked = copy.copy(self)
        forked._random = random.Random(self.seed)
        return forked

    def propose(self, texts, limits):
        return [self._tree(text) for text in texts]

    def _tree(self, text):
        rest = next((answer[len(text) :] for answer in self.answers if answer[: len(text)] == text), [])
        nodes, last, chance = [], -1, 1.0  # token, parent, probability
        for token in rest[:5]:
            wrong, chance = 0.55 * chance, 0.44 * chance
            if self._random.random() < 0.6:
                nodes.append(((token + 1) % 61, last, wrong))
            nodes.append((token if self._random.random() < 0.9 else (token + 2) % 61, last, chance))
            last = len(nodes) - 1
        return _tree_of(*zip(*nodes, strict=True)) if nodes else GuessTree.empty()


def _tree_of(tokens, parents, probabilities):
    return GuessTree.of(tokens, parents, probabilities=probabilities)


@pytest.fixture
def paths(monkeypatch):
    """The accepted paths of all commits."""
    found, original = [], LookaheadCache.commit

    def commit(self, steps, of_each):
        found.extend(of_each)
        original(self, steps, of_each)

    monkeypatch.setattr(LookaheadCache, "commit", commit)
    return found


def prompt_of(rng: random.Random, longest: int = 30) -> torch.Tensor:
    return random_prompt(rng, longest) % 58 + 3


GREEDY = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": True, "temperature": 0.8}


def in_one_call(is_asked_for: bool) -> LookaheadConfig:
    return LookaheadConfig(budget=16, pool_memory_mb=0.1, cpu_kernels=is_asked_for)


@pytest.fixture
def ways(paths):
    """Yields the configurations of both ways, and sees that passes were of the right one."""

    def ways(has_all_products: bool = True, branches: bool = False):
        for fused in (False, True):
            paths.clear()
            with mock.patch.object(states.Pending, "apply", autospec=True, side_effect=states.Pending.apply) as commits:
                yield in_one_call(fused)
            assert commits.called == fused or not has_all_products
            assert not branches or any(path != list(range(len(path))) for path in paths), "no path left a branch"

    return ways


@pytest.mark.parametrize("model_type", FAMILIES)
def test_texts(model_type, ways):
    """Greedy and seeded, with trees whose accepted paths skip rows, in models of even and of odd sizes."""
    rng = random.Random(model_type)
    for shape in ("even", "odd"):
        model = random_model(tiny_config(model_type, shape=shape))
        adapter = find_adapter(model)
        assert adapter.can_branch, adapter.given_up
        assert adapter.branches_states
        lookahead.unwrap(lookahead.wrap(model))  # the probe commits, too
        for options in (GREEDY, SAMPLED):
            prompt, seed = prompt_of(rng), rng.randrange(100)
            torch.manual_seed(seed)
            answers = model.generate(prompt, **options).tolist()
            check_identical(
                model,
                [prompt],
                options,
                ways(has_all_products=shape == "even", branches=True),  # C++ does not take those of odd sizes
                seed,
                source=[Forked(answers, seed), PoolSource()],
                model_type=model_type,
            )


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("pads", [False, True], ids=["equal lengths", "padding"])
def test_batches(model_type, pads, ways):
    """At their own pace, greedily, or in step, sampled: of a family with padding, or without."""
    rng = random.Random(model_type)
    options = (GREEDY, SAMPLED)[FAMILIES.index(model_type) % 2 == pads]
    model = random_model(tiny_config(model_type))
    assert hides_padding(model, find_adapter(model))
    lookahead.unwrap(lookahead.wrap(model))  # the probe commits, too
    prompts = [prompt_of(rng)[:, : 5 if pads else 1] if b % 2 else prompt_of(rng)[:, :1] for b in range(3)]
    answers = [model.generate(prompt, **GREEDY)[0].tolist() for prompt in prompts]
    stats = check_identical(
        model, prompts, options, ways(), 0, drift=options is SAMPLED, source=[Forked(answers, 1), PoolSource()],
        model_type=model_type,
    )  # fmt: skip
    assert stats.plain == ""


@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family in MAMBA2])
def test_limits_of_time_steps(model_type):
    """In lists, as files give them; others later, also in the same lists. Passes over single tokens have none."""
    rng = random.Random(model_type)
    plain = random_model(tiny_config(model_type))
    ours = [lookahead.wrap(copy.deepcopy(plain), in_one_call(fused)) for fused in (False, True)]
    mixers = [m for one in (plain, *ours) for m in one.modules() if hasattr(m, "time_step_limit")]
    none, narrow = [0.0, float("inf")], [0.0, 0.01]
    for limits, in_place in [(none, False), (narrow, True), (none, True), (narrow, False)]:
        for mixer in mixers:
            if in_place and isinstance(mixer.time_step_limit, list):
                mixer.time_step_limit[:] = limits
            else:
                mixer.time_step_limit = list(limits)
        prompt = torch.cat([prompt_of(rng), prompt_of(rng)], dim=1)
        expected = plain.generate(prompt, **GREEDY).tolist()
        for model in ours:
            assert model.generate(prompt, **GREEDY).tolist() == expected, (model.lookahead, limits, in_place, prompt)
            assert model.lookahead.last.plain == ""


def test_padding_that_is_read_in_chunks():
    """In a chunk of one column, transformers hides nothing from the states, and has no limits of time steps."""
    rng, left_to_the_model = random.Random(5), 0
    model = random_model(tiny_config("granitemoehybrid"))
    for _ in range(12):
        chunk_size = rng.choice([1, 2, 3, 8])
        prompts = [prompt_of(rng)[:, :1], prompt_of(rng)[:, : rng.randint(1, 3 * chunk_size)]]
        options = GREEDY | {"prefill_chunk_size": chunk_size}
        stats = check_identical(model, prompts, options, LookaheadConfig(pool_memory_mb=0.1), 0)
        left_to_the_model += "prefill_chunk_size" in stats.plain
    assert left_to_the_model


@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family not in KEEPS_NO_POSITIONS])
def test_second_turns(model_type, paths):
    """On a cache that plain decoding has filled, on one that lookahead has, and back."""
    rng = random.Random(model_type)
    model = random_model(tiny_config(model_type))

    def turns(decoders, config=None):
        cache, ids = DynamicCache(config=model.config.get_text_config(decoder=True)), first
        for turn, source in enumerate(decoders):
            if source is not None:
                lookahead.wrap(model, config, source=[source, PoolSource()])
            torch.manual_seed(turn)
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **SAMPLED)
            assert cache.get_seq_length() == ids.shape[1] - 1
            if source is not None:
                assert model.lookahead.last.plain == ""
                lookahead.unwrap(model)
            ids = torch.cat([ids, more[turn]], dim=1)
        return ids.tolist()

    first, more = prompt_of(rng, 10), [prompt_of(rng, 4) for _ in range(4)]
    expected = turns([None] * 4)
    ours = Forked(expected, 3)
    for fused in (False, True):
        paths.clear()
        assert turns([None, ours, ours, None], in_one_call(fused)) == expected
        assert any(path != list(range(len(path))) for path in paths)


def states_of(cache: DynamicCache) -> list[torch.Tensor]:
    held = [layer.conv_states | {-1 - i: x for i, x in layer.recurrent_states.items()} for layer in with_state(cache)]
    return [states for of_layer in held for states in of_layer.values() if states is not None]


def with_state(cache: DynamicCache) -> list:
    return [layer for layer in cache.layers if hasattr(layer, "conv_states")]


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("place", ["convolve", "commit", "update_conv_state", "extend", "apply"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_cache_survives_a_failure_within_a_pass(model_type, place, at, monkeypatch):
    """Some layers of a step are computed, or committed, and others not."""
    rng, longer = random.Random(model_type), GREEDY | {"max_new_tokens": 40, "min_new_tokens": 40}
    model = tiny_model(model_type)
    first, second = random_prompt(rng), random_prompt(rng)
    cache = DynamicCache(config=model.config)
    fused = place in ("extend", "apply")
    lookahead.wrap(model, in_one_call(fused))
    ids = torch.cat([model.generate(first, past_key_values=cache, **longer), second], dim=1)
    expected = model.generate(ids, past_key_values=deepcopy(cache), **longer)
    before, length = [x.clone() for x in states_of(cache)], cache.get_seq_length()
    owner = {"extend": LookaheadCache, "apply": states.Pending}.get(place)
    owner = StateLayer if hasattr(StateLayer, place) else owner
    original = getattr(owner or recurrence, place)
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        if owner is None:
            patch.setitem(branching._OURS, "causal_conv1d_fn", failing)
            state_of(model).kept.clear()
        else:
            patch.setattr(owner, place, failing)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, past_key_values=cache, **longer)
    state_of(model).kept.clear()
    assert cache.get_seq_length() == length
    assert all(map(torch.equal, states_of(cache), before))
    assert torch.equal(model.generate(ids, past_key_values=cache, **longer), expected)


def test_other_calls_get_the_functions_of_transformers(monkeypatch):
    """In the middle of a step of ours, another thread calls the model."""
    model = tiny_model("qwen3_next")
    prompt = random_prompt(random.Random(2), 12)
    own = dict(vars(modeling_qwen3_next))
    expected, answer = model(prompt).logits, model.generate(prompt, **GREEDY)
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    original, seen = recurrence.delta_rule, []

    def spied(*args, **kwargs):
        other = threading.Thread(target=lambda: seen.append(model(prompt).logits))
        other.start()
        other.join()
        assert vars(modeling_qwen3_next) == own
        return original(*args, **kwargs)

    monkeypatch.setitem(branching._OURS, "torch_chunk_gated_delta_rule", spied)
    lookahead.wrap(model, LookaheadConfig(pool_memory_mb=0.1))
    assert torch.equal(model.generate(prompt, **GREEDY), answer)
    lookahead.unwrap(model)
    assert seen
    assert all(torch.equal(logits, expected) for logits in seen)
    vars(model).pop(ATTRIBUTE)  # what is known of the model stays
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zamba", "ZambaMambaMixer computes its state by functions that lookahead cannot apply to trees"),
        ("zaya", "its cache keeps states in a LinearAttentionAndSlidingWindowAttentionLayer"),
    ],
)
def test_states_without_a_form_over_trees_stay_chains(model_type, reason):
    """Mamba-1 (Zamba's), and what computes its states itself."""
    model = lookahead.wrap(random_model(tiny_config(model_type)))
    prompt = prompt_of(random.Random(1))
    model.generate(prompt, **GREEDY)
    report = model.lookahead.report()
    assert "guesses: single chains" in report
    assert f"trees: {reason}" in report
    lookahead.unwrap(model)


def test_a_function_of_the_users_is_not_passed_over(monkeypatch):
    """Ours would replace it."""
    original = modeling_qwen3_next.causal_conv1d_fn
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", lambda *args, **kwargs: original(*args, **kwargs))
    model = tiny_model("qwen3_next")
    adapter = find_adapter(model)
    assert not adapter.can_branch
    assert any("causal_conv1d_fn" in reason for reason in adapter.given_up)


def test_a_forward_that_accelerate_has_replaced_is_not_copied():
    model = tiny_model("lfm2")
    layer = model.model.layers[0]
    layer.forward = FunctionType((lambda self: None).__code__, {"__name__": "accelerate.hooks"})
    assert "was replaced" in branching.why_not(model)
    del layer.forward
    assert branching.why_not(model) is None
