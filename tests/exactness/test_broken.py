"""The checks must be able to fail: each defect below is planted, and the comparison with generate() has to see it."""

import copy
import random

import numpy as np
import pytest
import torch
from test_lossless import check_identical, random_prompt
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, UnsupportedModelError
from lookahead.cpu import states, tree_attention
from lookahead.cpu.executor import Executor
from lookahead.cpu.states import _Recurrence
from lookahead.engine import call
from lookahead.engine.sampling import NextTokenRule
from lookahead.models import biases, cache, recurrence, split_attention
from lookahead.models.cache import LookaheadCache
from lookahead.models.recurrence import Forest, StateLayer
from lookahead.models.sliding import SlidingLayer
from lookahead.passes import capabilities
from lookahead.passes.fused import FusedRunner
from lookahead.step import Step, Visibility


def everyone_sees_everyone(monkeypatch):
    original = cache.hidden
    monkeypatch.setattr(cache, "hidden", lambda *args: np.zeros_like(original(*args)))


def siblings_see_each_other(monkeypatch):
    original = cache.hidden

    def hidden(ancestors, *args):
        return original(np.tril(np.ones_like(ancestors)), *args)

    monkeypatch.setattr(cache, "hidden", hidden)


def gaps_are_seen(monkeypatch):
    original = cache.hidden

    def hidden(ancestors, positions, cached, *args):
        return original(ancestors, positions, np.maximum(cached, 0), *args)

    monkeypatch.setattr(cache, "hidden", hidden)


def fused_rows_of_another_sequence(monkeypatch):
    original = Executor.run

    def run(self, sequences, *others):
        if len(sequences) > 1:
            first, second, *rest = sequences
            sequences = [first._replace(hidden=second.hidden, caches=second.caches, held=second.held), second, *rest]
        return original(self, sequences, *others)

    monkeypatch.setattr(Executor, "run", run)


def sequences_swapped(monkeypatch):
    original = LookaheadCache.hidden

    def hidden(self, ancestors, *args):
        return original(self, ancestors[::-1].copy(), *args)

    monkeypatch.setattr(LookaheadCache, "hidden", hidden)


def sliding_window_too_wide(monkeypatch):
    original = Visibility.hides

    def hides(self, queries, keys):
        return None if self.window else original(self, queries, keys)

    monkeypatch.setattr(Visibility, "hides", hides)


def prefix_hidden(monkeypatch):
    original = cache.hidden

    def hidden(ancestors, positions, cached, *args):
        cached = cached.copy()
        cached[:, : cached.shape[1] // 2] = -1
        return original(ancestors, positions, cached, *args)

    monkeypatch.setattr(cache, "hidden", hidden)


def half_of_the_prefix_unseen(monkeypatch):
    original = split_attention.flash_attention

    def part(query, key, value, mask, scaling):
        begin = key.shape[2] // 2 if mask is None else 0
        return original(query, key[:, :, begin:], value[:, :, begin:], mask, scaling)

    in_two_parts(monkeypatch)
    monkeypatch.setattr(split_attention, "flash_attention", part)


def in_two_parts(monkeypatch):
    """Not a defect: attention as where our kernel does not serve."""
    monkeypatch.setattr(split_attention, "SHORT_CONTEXT", 0)
    monkeypatch.setattr(tree_attention, "serves", lambda *arguments: False)


def parts_joined_evenly(monkeypatch):
    in_two_parts(monkeypatch)
    monkeypatch.setattr(split_attention, "_joined", lambda first, _, second, __: (first + second) / 2)


def kernel_without_its_mask(monkeypatch):
    original = tree_attention.attend

    def attend(query, key, value, mask, scaling):
        return original(query, key, value, mask if mask is None else torch.zeros_like(mask), scaling)

    monkeypatch.setattr(tree_attention, "attend", attend)


def kernel_that_misses_the_first_key(monkeypatch):
    original = tree_attention.attend

    def attend(query, key, value, mask, scaling):
        begin = int(mask is not None)
        return original(query, key[:, :, begin:], value[:, :, begin:], mask, scaling)

    monkeypatch.setattr(tree_attention, "attend", attend)


def fused_pass_without_its_mask(monkeypatch):
    original = Executor.run

    def run(self, sequences, *others):
        seen = []
        for one in sequences:  # of a prompt's chain, no array says what is hidden
            causal = np.triu(np.ones((len(one.ids),) * 2, bool), 1)
            arrays = [(causal if array is None else array, layers) for array, layers in one.hidden]
            seen.append(one._replace(hidden=[(np.zeros_like(array), layers) for array, layers in arrays]))
        return original(self, seen, *others)

    monkeypatch.setattr(Executor, "run", run)


def fused_pass_late_by_one(monkeypatch):
    original = Executor.run

    def run(self, sequences, *others):  # if all passes were late, no distance would change
        late = [one._replace(positions=one.positions + (one.positions[0] > 0)) for one in sequences]
        return original(self, late, *others)

    monkeypatch.setattr(Executor, "run", run)


def fused_pass_that_names_the_least_likely(monkeypatch):
    original = Executor.run

    def run(self, *arguments):
        *others, top_k = original(self, *arguments)
        return *others, top_k and tuple(found[..., ::-1] for found in top_k)

    monkeypatch.setattr(Executor, "run", run)


def fused_pass_that_misses_the_first_key(monkeypatch):
    original = FusedRunner._extend

    def extend(self, executor, b, cache, rows):
        caches, held = original(self, executor, b, cache, rows)
        skipped = executor.caches[0].key_size * executor.like.element_size() * (held[0] > 0)
        caches = [(keys + skipped, values + skipped, *strides) for keys, values, *strides in caches]
        return caches, [seen - (seen > 0) for seen in held]

    monkeypatch.setattr(FusedRunner, "_extend", extend)


def positions_by_row(monkeypatch):
    monkeypatch.setattr(Step, "positions", lambda self, length, last=None: length + np.arange(len(self)))


def positions_late_by_one(monkeypatch):
    monkeypatch.setattr(Step, "positions", lambda self, length, last=None: length + 1 + self.depths)


def commit_keeps_the_first_rows(monkeypatch):
    original = cache.compact
    monkeypatch.setattr(
        cache, "compact", lambda layers, paths: original(layers, [list(range(len(path))) for path in paths])
    )


def commit_keeps_one_row_too_many(monkeypatch):
    original = cache.compact

    def compact(layers, paths):
        steps = [layer.columns - layer.base for layer in layers]
        original(layers, paths)
        for layer, step in zip(layers, steps, strict=True):
            layer.columns += max(map(len, paths)) < step

    monkeypatch.setattr(cache, "compact", compact)


def commit_forgets_the_moved_rows(monkeypatch):
    original = cache.compact
    monkeypatch.setattr(cache, "compact", lambda layers, paths: original(layers, [[0] * len(path) for path in paths]))


def sliding_rows_off_by_one(monkeypatch):
    monkeypatch.setattr(SlidingLayer, "_most_seen", lambda self: self.sliding_window - 2)


def states_not_put_back(monkeypatch):
    monkeypatch.setattr(LookaheadCache, "_restore_states", lambda self: None)


def nothing_computed_again(monkeypatch):
    original = LookaheadCache.commit

    def commit(self, steps, paths):
        original(self, steps, paths)
        self.replay = []

    monkeypatch.setattr(LookaheadCache, "commit", commit)


def keys_biased_the_wrong_way_round(monkeypatch):
    original = biases.places_in

    def places_in(cache, positions):
        places = original(cache, positions)
        return places._replace(keys=places.keys[:, ::-1].copy())

    monkeypatch.setattr(biases, "places_in", places_in)


def only_parents_are_seen(monkeypatch):
    def forest(ancestors, device):
        parents = Forest(ancestors, device)._parents
        seen = np.arange(ancestors.shape[1]) == parents[..., None]
        return Forest(seen | np.eye(ancestors.shape[1], dtype=bool), device)

    monkeypatch.setattr(recurrence, "Forest", forest)


def siblings_update_each_other(monkeypatch):
    monkeypatch.setattr(
        recurrence, "Forest", lambda ancestors, device: Forest(np.tril(np.ones_like(ancestors)), device)
    )


def windows_along_the_rows(monkeypatch):
    def windows(self, width, held):
        return (held + torch.arange(self.rows)[None, :, None] - torch.arange(width).flip(0)).clamp(min=0)

    monkeypatch.setattr(Forest, "windows", windows)


def nothing_decays(monkeypatch):
    original = recurrence._along_paths
    monkeypatch.setattr(recurrence, "_along_paths", lambda g: original(torch.zeros_like(g)))


def decays_of_the_key_beside(monkeypatch):
    original = recurrence._along_paths
    monkeypatch.setattr(recurrence, "_along_paths", lambda g: original(g.roll(1, -1)))


def decays_of_the_row_alone(monkeypatch):
    """Not of those on its path."""
    original = recurrence._along_paths

    def along_paths(g):
        _, between = original(g)
        return g.double(), between

    monkeypatch.setattr(recurrence, "_along_paths", along_paths)


def commits_of(kind, monkeypatch, change):
    original = kind.apply
    monkeypatch.setattr(kind, "apply", lambda self, paths: original(self, [path and change(path) for path in paths]))


def rejected_rows_stay_in_the_state(monkeypatch):
    commits_of(recurrence._Updates, monkeypatch, lambda path: list(range(path[-1] + 1)))


def rejected_rows_stay_in_the_convolution(monkeypatch):
    commits_of(recurrence._Inputs, monkeypatch, lambda path: list(range(path[-1] + 1)))


def the_state_stays_behind(monkeypatch):
    commits_of(recurrence._Updates, monkeypatch, lambda path: path[:-1])


def the_convolution_stays_behind(monkeypatch):
    commits_of(recurrence._Inputs, monkeypatch, lambda path: path[:-1])


def states_are_the_callers(monkeypatch):
    """A call that fails has written to them."""

    def copy_from(self, theirs):
        vars(self).update({name: getattr(theirs, name) for name in vars(LinearAttentionLayer())})

    monkeypatch.setattr(StateLayer, "copy_from", copy_from)


def fused_rows_are_a_chain(monkeypatch):
    original = Executor.run

    def run(self, sequences, *others):
        sequences = [one._replace(parents=np.arange(-1, len(one.ids) - 1)) for one in sequences]
        return original(self, sequences, *others)

    monkeypatch.setattr(Executor, "run", run)


def fused_rejected_rows_stay_in_the_state(monkeypatch):
    original = states.Pending.apply
    monkeypatch.setattr(states.Pending, "apply", lambda self, path: original(self, list(range(path[-1] + 1))))


def fused_state_stays_behind(monkeypatch):
    original = states.Pending.apply
    monkeypatch.setattr(states.Pending, "apply", lambda self, path: original(self, path[:-1]))


def fused_speeds_and_biases(monkeypatch, change):
    """Have the recurrences of fused passes decay by others."""
    original, kept = _Recurrence.cpp_fields, []

    def cpp_fields(self):
        fields = original(self)
        speeds, biases = change(self, fields["weight"], fields["bias"])
        kept.extend([speeds, biases])  # C++ knows where they are
        return fields | {"weight": speeds, "bias": biases}

    monkeypatch.setattr(_Recurrence, "cpp_fields", cpp_fields)


def fused_states_do_not_decay(monkeypatch):
    fused_speeds_and_biases(monkeypatch, lambda _, speeds, biases: (torch.full_like(speeds, -80), biases))


def fused_decays_of_the_head_beside(monkeypatch):
    fused_speeds_and_biases(monkeypatch, lambda _, speeds, biases: (speeds.roll(1), biases))


def fused_decays_of_the_key_beside(monkeypatch):
    def change(recurrence, speeds, biases):
        return speeds, biases.unflatten(0, (recurrence.heads, -1)).roll(1, 1).flatten()

    fused_speeds_and_biases(monkeypatch, change)


def fused_state_of_another_sequence(monkeypatch):
    original = Executor.run

    def run(self, sequences, *others):
        if len(sequences) > 1:
            first, second, *rest = sequences
            pairs = zip(first.states, second.states, strict=True)
            theirs = [mine._replace(inputs=other.inputs, state=other.state) for mine, other in pairs]
            sequences = [first._replace(states=theirs), second, *rest]
        return original(self, sequences, *others)

    monkeypatch.setattr(Executor, "run", run)


def first_guess_always_accepted(monkeypatch):
    original = call.walk

    def walk(steps, logits, rules, *argmax):
        paths, tokens = original(steps, logits, rules, *argmax)
        if len(paths[0]) == 1 and steps[0].guesses and rules[0].live:
            paths[0].append(1)
            tokens[0].append(int(steps[0].ids[1]))
            rules[0].ids = torch.cat([rules[0].ids, torch.tensor([[tokens[0][-1]]])], dim=1)
        return paths, tokens

    monkeypatch.setattr(call, "walk", walk)


def one_draw_too_many(monkeypatch):
    original = NextTokenRule.emit

    def emit(self, logits, *row):
        torch.rand(1)
        return original(self, logits, *row)

    monkeypatch.setattr(NextTokenRule, "emit", emit)


# What defects are planted in: of each kind of state, a family.
RECURRENCES = "qwen3_next kimi_linear mamba2"  # the delta rule with decays of heads, and of keys; Mamba-2's scan
FUSED_RECURRENCES = "qwen3_5_text kimi_linear bamba"
DEFECTS = {
    everyone_sees_everyone: "llama",
    siblings_see_each_other: "llama",
    sliding_window_too_wide: "mistral",
    prefix_hidden: "gemma2",
    half_of_the_prefix_unseen: "llama",
    parts_joined_evenly: "llama",
    kernel_without_its_mask: "llama",
    kernel_that_misses_the_first_key: "llama",
    positions_by_row: "llama",
    positions_late_by_one: "gpt2",
    commit_keeps_the_first_rows: "llama",
    commit_keeps_one_row_too_many: "llama",
    commit_forgets_the_moved_rows: "gemma2",
    sliding_rows_off_by_one: "mistral",
    states_not_put_back: "zaya",
    nothing_computed_again: "zaya",
    keys_biased_the_wrong_way_round: "bloom",
    only_parents_are_seen: RECURRENCES,
    siblings_update_each_other: RECURRENCES,
    nothing_decays: RECURRENCES,
    decays_of_the_row_alone: RECURRENCES,
    decays_of_the_key_beside: "kimi_linear",
    windows_along_the_rows: "lfm2",
    rejected_rows_stay_in_the_state: RECURRENCES,
    the_state_stays_behind: RECURRENCES,
    rejected_rows_stay_in_the_convolution: "lfm2",
    the_convolution_stays_behind: "lfm2",
    first_guess_always_accepted: "llama",
    one_draw_too_many: "llama",
}
FUSED = {
    fused_pass_without_its_mask: "llama",
    fused_pass_late_by_one: "qwen3",
    fused_pass_that_misses_the_first_key: "mistral",
    fused_rows_are_a_chain: f"{FUSED_RECURRENCES} lfm2",
    fused_states_do_not_decay: FUSED_RECURRENCES,
    fused_decays_of_the_head_beside: FUSED_RECURRENCES,
    fused_decays_of_the_key_beside: "kimi_linear bailing_hybrid",
    fused_rejected_rows_stay_in_the_state: f"{FUSED_RECURRENCES} lfm2",
    fused_state_stays_behind: f"{FUSED_RECURRENCES} lfm2",
}
IN_BATCHES = {gaps_are_seen: "llama", sequences_swapped: "llama", sliding_rows_off_by_one: "mistral"}
IN_FUSED_BATCHES = {
    fused_rows_of_another_sequence: "llama",
    fused_pass_late_by_one: "qwen3",
    fused_state_of_another_sequence: "qwen3_5_text",
}
OF_KERNELS = {kernel_without_its_mask, kernel_that_misses_the_first_key}  # torch's are left
SPLIT = {half_of_the_prefix_unseen, parts_joined_evenly, *OF_KERNELS}  # the dense mask is left, or torch's kernels
OF_COPIES = {  # of a model, for what fused passes compute themselves
    only_parents_are_seen, siblings_update_each_other, nothing_decays, decays_of_the_row_alone,
    decays_of_the_key_beside, windows_along_the_rows, rejected_rows_stay_in_the_state, the_state_stays_behind,
    rejected_rows_stay_in_the_convolution, the_convolution_stays_behind, keys_biased_the_wrong_way_round,
}  # fmt: skip
SEEN_BY_THE_PROBE = set(DEFECTS) - {
    sliding_window_too_wide, sliding_rows_off_by_one, first_guess_always_accepted, one_draw_too_many,
    keys_biased_the_wrong_way_round,  # in float32 alone
    rejected_rows_stay_in_the_convolution,  # its rejected row is followed by as many accepted ones as LFM2's reads
}  # fmt: skip
UNSEEN_BY_THE_PROBE = {(fused_rejected_rows_stay_in_the_state, "lfm2")}  # so is this
UNSEEN_IN_BF16 = {(fused_rejected_rows_stay_in_the_state, "qwen3_5_text")}  # of what is forgotten, rounding hides it


def name(one) -> str:
    return getattr(one, "__name__", str(one))


def planted(defects: dict) -> list[tuple]:
    """Each defect with each of the families that it is planted in."""
    return [(plant, model_type) for plant, families in defects.items() for model_type in families.split()]


def check_several(model):
    rng = random.Random(0)
    for seed in range(8):
        options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}
        check_identical(model, [random_prompt(rng)], options, LookaheadConfig(budget=16, window_size=3), seed)


def check_batches(model):
    rng = random.Random(0)
    for seed in range(4):
        prompts = [random_prompt(rng) for _ in range(3)]
        check_identical(model, prompts, {"max_new_tokens": 40, "do_sample": False}, LookaheadConfig(budget=16), seed)


def check_failed_calls(model):
    """What a call on a kept cache writes after one that has failed."""
    rng = random.Random(0)
    for seed in range(4):
        first, second, ends_at = random_prompt(rng), random_prompt(rng, 2), rng.randint(1, 30)
        cache = DynamicCache(config=model.config)
        ids = torch.cat([model.generate(first, past_key_values=cache, max_new_tokens=10, do_sample=False), second], 1)
        options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": seed % 2 == 1}
        options["attention_mask"] = torch.ones_like(ids)
        torch.manual_seed(seed)
        expected = model.generate(ids, past_key_values=copy.deepcopy(cache), **options)

        def fails(ids, scores, longest=ids.shape[1] + ends_at, **_):
            if ids.shape[1] > longest:
                raise KeyboardInterrupt
            return torch.zeros(len(ids), dtype=torch.bool)

        lookahead.wrap(model, LookaheadConfig(budget=16, pool_memory_mb=0.1))
        try:
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids, past_key_values=cache, stopping_criteria=[fails], **options)
            assert model.lookahead.last.plain == ""
            torch.manual_seed(seed)
            assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected), (ids, ends_at, options)
        finally:
            lookahead.unwrap(model)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "kimi_linear", "bamba", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_second_call_sees_what_a_failed_one_has_left(model_type, is_fused, monkeypatch):
    model = tiny_model(model_type)
    if not is_fused:
        monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    check_failed_calls(model)
    states_are_the_callers(monkeypatch)
    with pytest.raises(AssertionError):
        check_failed_calls(model)


@pytest.mark.parametrize(("plant", "model_type"), planted(DEFECTS), ids=name)
def test_comparison_with_generate_sees_it(plant, model_type, monkeypatch):
    model = tiny_model(model_type)
    lookahead.unwrap(lookahead.wrap(model))  # probed while all is well
    if plant in SPLIT | OF_COPIES:  # what fused passes do not use
        monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_several(model)


@pytest.mark.parametrize(
    ("check", "model_type", "plant"),
    [
        *((check_several, model_type, plant) for plant, model_type in planted(FUSED)),
        *((check_batches, model_type, plant) for plant, model_type in planted(IN_FUSED_BATCHES)),
    ],
    ids=name,
)
def test_comparison_with_generate_sees_it_in_fused_passes(check, model_type, plant, monkeypatch):
    model = tiny_model(model_type)
    lookahead.unwrap(lookahead.wrap(model))
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(model)


def test_comparison_with_generate_sees_another_token(monkeypatch):
    model = tiny_model("llama")
    lookahead.unwrap(lookahead.wrap(model))
    fused_pass_that_names_the_least_likely(monkeypatch)
    with pytest.raises(AssertionError):
        check_identical(
            model, [random_prompt(random.Random(0))], {"max_new_tokens": 40, "do_sample": False}, LookaheadConfig(), 0
        )


@pytest.mark.parametrize(
    ("plant", "model_type"), [pair for pair in planted(FUSED) if pair not in UNSEEN_BY_THE_PROBE], ids=name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probe_of_fused_passes_sees_it(plant, model_type, dtype, monkeypatch):
    if dtype == torch.bfloat16 and (plant, model_type) in UNSEEN_IN_BF16:
        pytest.skip("rounding hides it")
    model = tiny_model(model_type, intermediate_size=64).to(dtype)
    adapter = capabilities.find_adapter(model)
    assert isinstance(capabilities.fused_runner(model, adapter), FusedRunner)
    capabilities._found.pop(model)
    plant(monkeypatch)
    found = capabilities.fused_runner(model, adapter)
    assert isinstance(found, str)
    assert "differ from plain decoding's" in found


@pytest.mark.parametrize("plant", IN_BATCHES, ids=name)
def test_comparison_of_batches_sees_it(plant, monkeypatch):
    model = tiny_model(IN_BATCHES[plant])
    assert capabilities.can_batch(model, capabilities.find_adapter(model))
    monkeypatch.setattr(capabilities, "fused_runner", lambda *_, **options: "not here")
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check_batches(model)


@pytest.mark.parametrize(
    ("plant", "model_type"), [pair for pair in planted(DEFECTS) if pair[0] in SEEN_BY_THE_PROBE], ids=name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probe_at_wrap_time_sees_it(plant, model_type, dtype, monkeypatch):
    """A defect of the masks costs the branches; one of the cache or of all positions leaves nothing to decode with."""
    model = tiny_model(model_type).to(dtype)
    before = capabilities.find_adapter(model)
    capabilities._found.pop(model)
    plant(monkeypatch)
    try:
        after = capabilities.find_adapter(model)
        assert not after.splits_attention or (plant in OF_KERNELS and not after.uses_kernels)
        assert (before.can_branch, after.can_branch) == (True, plant in SPLIT)
    except UnsupportedModelError as error:
        assert type(model).__name__ in str(error)  # noqa: PT017


@pytest.mark.parametrize("plant", [gaps_are_seen, sequences_swapped], ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_of_batches_sees_it(plant, dtype, monkeypatch):
    model = tiny_model(IN_BATCHES[plant]).to(dtype)
    plant(monkeypatch)
    assert capabilities.find_adapter(model).can_branch
    assert not capabilities.can_batch(model, capabilities.find_adapter(model))


def test_the_comparison_passes_without_a_defect():
    for model_type in sorted({model_type for _, model_type in planted(DEFECTS)}):
        check_several(tiny_model(model_type))
    for model_type in sorted(set(IN_BATCHES.values())):
        check_batches(tiny_model(model_type))
