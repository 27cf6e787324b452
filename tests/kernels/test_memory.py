"""Whatever a caller does, the C++ reads and writes only where it may, and multiplies with the weights there are."""

import itertools
import os
import subprocess
import sys
import threading
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from test_fused import SIZES, in_blocks
from torch import nn
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.cpu import blocks, choice, executor, gemm, products, top_k, tree_attention
from lookahead.cpu.products import Linear
from lookahead.guessing.source import Needs
from lookahead.models.cache import InPlaceLayer
from lookahead.models.families import page_of
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.fused import PARTS, FusedRunner
from lookahead.passes.rounding import relative_error
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree

DTYPES = [torch.float32, torch.bfloat16]
GREEDY = {"max_new_tokens": 16, "do_sample": False}
IDS = torch.arange(3, 12)[None]


def text_or_error(model, **arguments):
    """The text, or the kind of the error."""
    try:
        return model.generate(**GREEDY, **arguments).tolist()
    except Exception as error:
        return type(error)


# -- caches that others have filled ------------------------------------------------------------------------------------


def filled(model, ids=IDS) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def each(change):
    """Change keys, values, or both, of one layer or of all."""

    def changed(cache, which, layers):
        for layer in cache.layers[layers]:
            for name in which:
                setattr(layer, name, change(getattr(layer, name)))

    return changed


FOREIGN = {
    "bfloat16": each(lambda states: states.bfloat16()),
    "float64": each(lambda states: states.double()),
    "float16": each(lambda states: states.half()),
    "meta": each(lambda states: states.to("meta")),
    "half of the heads": each(lambda states: states[:, :1].contiguous()),
    "twice the heads": each(lambda states: states.repeat(1, 2, 1, 1)),
    "a smaller head": each(lambda states: states[..., :4].contiguous()),
    "a larger head": each(lambda states: states.repeat(1, 1, 1, 2)),
    "two sequences": each(lambda states: states.repeat(2, 1, 1, 1)),
    "fewer positions": each(lambda states: states[:, :, :5].contiguous()),
    "none": each(lambda states: states[:, :, :0]),
    "three dimensions": each(lambda states: states[0]),
    "not contiguous": each(lambda states: states.transpose(2, 3).contiguous().transpose(2, 3)),
    "expanded": each(lambda states: states[:, :1].expand_as(states)),
    "no numbers": each(lambda states: torch.quantize_per_tensor(states, 0.1, 0, torch.qint8)),
    "a subclass": each(lambda states: nn.Parameter(states, requires_grad=False)),
}


WHICH = ("keys",), ("values",), ("keys", "values")
# Values without keys are left out: what torch makes of them is not defined.
CASES = [case for case in itertools.product(FOREIGN, WHICH) if case[0] != "none" or len(case[1]) == 2]


@pytest.mark.parametrize("layers", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["first", "second", "both"])
@pytest.mark.parametrize(("name", "which"), CASES, ids=str)
def test_a_cache_of_another_kind_gives_what_plain_decoding_gives(name, which, layers):
    model = tiny_model("llama")
    caches = [filled(model) for _ in range(2)]
    for cache in caches:
        FOREIGN[name](cache, which, layers)
    ids = torch.cat([IDS, torch.tensor([[20, 21]])], 1)
    expected = text_or_error(model, input_ids=ids, past_key_values=caches[0])
    lookahead.wrap(model, LookaheadConfig(budget=4, window_size=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert text_or_error(model, input_ids=ids, past_key_values=caches[1]) == expected


@pytest.mark.parametrize("by_ours", [False, True])
def test_a_cache_of_another_window(by_ours):
    """Which says how much of itself it shows."""
    ids = torch.cat([IDS, IDS, torch.tensor([[20, 21]])], 1)

    def text(wraps):
        other, model = tiny_model("mistral", sliding_window=16), tiny_model("mistral", sliding_window=8)
        cache = DynamicCache(config=other.config)
        if by_ours:
            lookahead.wrap(other)
        other.generate(IDS, past_key_values=cache, **GREEDY)
        return text_or_error(lookahead.wrap(model) if wraps else model, input_ids=ids, past_key_values=cache)

    assert text(wraps=True) == text(wraps=False)


@pytest.mark.parametrize("how", ["inference mode", "autocast, then not", "not, then autocast", "autocast twice"])
def test_turns_on_one_cache_under_changing_modes(how):
    modes = {
        "inference mode": (torch.inference_mode, torch.no_grad),
        "autocast, then not": (lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad),
        "not, then autocast": (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)),
        "autocast twice": (lambda: torch.autocast("cpu", torch.bfloat16),) * 2,
    }[how]

    def turns(model):
        cache, ids, texts = DynamicCache(config=model.config), IDS, []
        for mode in (*modes, torch.no_grad):
            with mode():  # products round otherwise in bf16, so the turns before the last one are short, and given
                limits = GREEDY if mode is torch.no_grad else GREEDY | {"max_new_tokens": 2}
                texts.append(model.generate(ids, past_key_values=cache, **limits).tolist())
            ids = torch.cat([ids, torch.tensor([[20, 21, 22]])], 1)
            cache.crop(ids.shape[1] - 3 - cache.get_seq_length())
        return texts

    model = tiny_model("llama")
    expected = turns(model)
    assert turns(lookahead.wrap(model, LookaheadConfig(budget=4, window_size=0))) == expected


@pytest.mark.parametrize(("first", "then"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_turn_after_the_model_has_changed_its_dtype(first, then):
    def turns(model):
        cache = DynamicCache(config=model.config)
        model.generate(IDS, past_key_values=cache, max_new_tokens=1)
        model.to(then)
        return text_or_error(model, input_ids=torch.cat([IDS, IDS], 1), past_key_values=cache)

    expected = turns(tiny_model("llama").to(first))
    assert turns(lookahead.wrap(tiny_model("llama").to(first), LookaheadConfig(budget=4, window_size=0))) == expected


@pytest.mark.parametrize("shape", [(1, 4, 3, 8), (2, 2, 3, 8), (1, 1, 3, 8), (1, 2, 3, 1)], ids=str)
def test_our_layers_refuse_what_transformers_layers_refuse(shape):
    """copy_() would repeat a single head, sequence or number."""
    layer = InPlaceLayer()
    layer.update(*torch.randn(2, 1, 2, 5, 8))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(*torch.randn(2, *shape))
    assert layer.get_seq_length() == 5


def test_our_layers_hold_numbers_of_the_wider_dtype():
    layer = InPlaceLayer()
    first, second = torch.randn(2, 1, 2, 5, 8).bfloat16(), torch.randn(2, 1, 2, 3, 8)
    layer.update(*first)
    keys, values = layer.update(*second)
    assert torch.equal(keys, torch.cat([first[0], second[0]], 2))
    assert torch.equal(values, torch.cat([first[1], second[1]], 2))
    assert layer.update(*first)[0].dtype == torch.float32


# -- numbers without a bound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [
    {"top_k": 257}, {"top_k": 4000}, {"top_k": -1}, {"top_k": 2.0}, {"top_k": True},
    {"prompt_logits": -1}, {"hidden_states": (0, -1)}, {"hidden_states": ("0",)},
])  # fmt: skip
def test_needs_are_bounded_where_they_are_made(needs):
    with pytest.raises(ValueError, match=rf"{next(iter(needs))}=.* must be a whole number in 0\.\."):
        Needs(**needs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 256, 257, 300, 5000, -1])
def test_a_pass_finds_no_more_tokens_than_there_is_room_for(count, dtype):
    model = tiny_model("llama", vocab_size=6000, **SIZES).to(dtype)
    runner = FusedRunner(model, find_adapter(model))
    with torch.no_grad():
        cache = runner.adapter.make_cache()
        runner.prefill(IDS, cache)
        output = runner.run([lay_out(5, GuessTree.of([6, 7], [-1, 0]))], cache, top_k=(count, 1.0))
    assert (output.top_k is None) == (not 0 < count <= top_k.MAX_COUNT)
    if output.top_k is not None:
        assert output.top_k[0].shape == (3, count)


def test_what_c_plus_plus_is_not_given():
    assert not top_k.serves(torch.randn(3, 500), 0)
    logits, variates = torch.randn(1, 40), np.ones(39, np.float32)
    assert choice.drawn(logits, variates, choice.Warp()) is None, "variates of other tokens"
    assert choice.drawn(logits, np.ones(40, np.float32), choice.Warp(top_k=300)) is None
    with pytest.raises(ValueError, match="not that of torch's generator"):
        choice.draw(torch.zeros(16, dtype=torch.uint8), variates)


def test_a_generator_of_another_kind_is_not_written_to():
    small = mock.Mock()
    small.return_value.manual_seed.return_value.get_state.return_value = torch.zeros(16, dtype=torch.uint8)
    assert choice.can_draw.__wrapped__()
    with mock.patch.object(torch, "Generator", small), mock.patch.object(choice, "draw", pytest.fail):
        assert not choice.can_draw.__wrapped__()


@pytest.mark.parametrize("wider", [5, -5])
def test_a_processor_that_changes_the_number_of_scores(wider):
    class Changes(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] < 12:
                return scores
            return scores[:, :wider] if wider < 0 else nn.functional.pad(scores, (0, wider), value=-torch.inf)

    def text(model):
        torch.manual_seed(3)
        return model.generate(
            IDS, do_sample=True, max_new_tokens=12, logits_processor=LogitsProcessorList([Changes()])
        ).tolist()

    model = tiny_model("llama")
    expected = text(model)
    assert text(lookahead.wrap(model)) == expected


# -- tensors that change while something holds their address -----------------------------------------------------------


def set_data(parameter):
    parameter.data = parameter.data * 0.5


def set_double(parameter):
    parameter.data = parameter.data.double()


def set_transposed(parameter):
    if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
        parameter.data = parameter.data.T


def write(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)


def write_data(parameter):
    parameter.data.mul_(0.5)


CHANGES = [set_data, set_double, set_transposed, write, write_data]


def named(model, part):
    """The parameters of a part of a model, with their modules and names."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_norm, is_one = parameter.ndim == 1, module is model.model.layers[1].mlp.down_proj
            if part == "all" or (part == "norms" and is_norm) or (part == "one" and is_one):
                yield module, name, parameter


def changed(model, change, part):
    for module, name, parameter in list(named(model, part)):
        if change == "replace":
            setattr(module, name, nn.Parameter(parameter.data * 0.5))
        else:
            change(parameter)


def of_changes(*values):
    """Tests of each change."""
    return pytest.mark.parametrize(
        "change", [*values, "replace"], ids=lambda change: getattr(change, "__name__", change)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("part", ["all", "one", "norms"])
@of_changes(*CHANGES)
def test_weights_that_change_within_a_call_take_effect_at_the_next_pass(change, part, packs, dtype):
    model = tiny_model("llama", **SIZES)
    in_blocks(model, 1)
    model = model.to(dtype)
    adapter = find_adapter(model)
    runners = EagerRunner(model, adapter), FusedRunner(model, adapter, packs=packs)
    caches = [adapter.make_cache() for _ in runners]
    allowed = 1e-4 if dtype == torch.float32 else 8e-2
    with torch.no_grad():
        for cache in caches:
            runners[0].prefill(IDS, cache)
        for token in (5, 6, 7):
            if token == 6:
                changed(model, change, part)
            step, outputs = lay_out(token, GuessTree.of([8, 9], [-1, 0])), []
            for runner, cache in zip(runners, caches, strict=True):
                try:
                    outputs.append(runner.run([step], cache).logits)
                    cache.commit([step], [[0]])
                except RuntimeError as error:  # of several dtypes, by torch
                    outputs.append(str(error))
            if isinstance(outputs[0], str):
                assert outputs[1] == outputs[0]
                return
            assert relative_error(outputs[1], outputs[0]) < allowed


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("part", ["all", "one", "norms"])
@of_changes(set_data, write, write_data)
def test_weights_that_another_thread_changes_take_effect_within_a_few_passes(change, part, packs):
    """Where no code of others runs between passes, each looks at a part of the weights."""
    if change is write_data and part == "one" and packs:
        return  # nobody counts it: it is seen by chance
    model = tiny_model("llama", **SIZES)
    in_blocks(model, 1)
    adapter = find_adapter(model)
    runners = [FusedRunner(model, adapter, packs=packs) for _ in range(2)]  # of two calls, whose passes alternate
    cache, steps = adapter.make_cache(), [lay_out(5, GuessTree.of([8, 9], [-1, 0]))]

    def logits(runner):
        found = runner.run(steps, cache, others_ran=False).logits
        cache.commit(steps, [[]])
        return found

    with torch.no_grad():
        runners[0].prefill(IDS, cache)
        before = [logits(runner) for _ in range(2 * PARTS) for runner in runners]
        assert all(map(before[0].equal, before))
        changed(model, change, part)
        now = [logits(runner) for _ in range(PARTS) for runner in runners][-2:]
        expected = logits(EagerRunner(model, adapter))
        assert max(relative_error(found, expected) for found in now) < 1e-4
        assert relative_error(expected, before[0]) > 1e-3


@of_changes(*CHANGES)
def test_a_callback_that_changes_weights(change):
    class Changes(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 15:
                changed(self.model, change, "all")
            return scores

    def text(model):
        callback = Changes()
        callback.model = model
        return text_or_error(model, input_ids=IDS, logits_processor=LogitsProcessorList([callback]))

    def made():
        model = tiny_model("llama", **SIZES)
        in_blocks(model, 1)
        return model

    plain = made()
    before, expected = text_or_error(plain, input_ids=IDS), text(plain)
    model = lookahead.wrap(made(), LookaheadConfig(budget=0, window_size=0, pack_weights=True))
    assert text_or_error(model, input_ids=IDS) == before
    assert text(model) == expected


def test_memory_that_a_pass_reads_stays_while_it_is_read():
    """Even if every parameter was given other memory meanwhile."""
    model = tiny_model("llama")
    weight = model.model.layers[0].self_attn.q_proj.weight
    ready = executor.Executor(page_of(model).program())
    (held,) = [tensor for tensor in ready._tensors if tensor.data_ptr() == weight.data_ptr()]
    before = held.clone()
    for parameter in model.parameters():
        set_data(parameter)
    assert torch.equal(held, before)
    assert held.data_ptr() != weight.data_ptr()


def test_a_model_that_changes_its_dtype_within_a_call_does_not_write_into_the_cache_that_it_had():
    model = tiny_model("llama", **SIZES)
    runner = FusedRunner(model, find_adapter(model))
    cache = runner.adapter.make_cache()
    with torch.no_grad():
        runner.prefill(IDS, cache)
    assert runner._can_run([np.array([3])], [cache])
    model.bfloat16()
    assert not runner._can_run([np.array([3])], [cache])
    assert runner._can_run([np.array([3])], [runner.adapter.make_cache()])


def test_weights_whose_memory_was_taken_away_are_not_read():
    model = tiny_model("llama")
    weight = model.model.layers[1].mlp.down_proj.weight
    runner = FusedRunner(model, find_adapter(model))
    cache = runner.adapter.make_cache()
    assert runner._can_run([np.array([3])], [cache])
    weight.untyped_storage().resize_(0)
    assert not runner._can_run([np.array([3])], [cache])
    assert not gemm.serves(torch.randn(1, weight.shape[1]), Linear(weight))


def test_a_cache_whose_memory_was_taken_away_is_not_written_to():
    model = tiny_model("llama")
    runner = FusedRunner(model, find_adapter(model))
    cache = runner.adapter.make_cache()
    with torch.no_grad():
        runner.prefill(IDS, cache)
    assert runner._can_run([np.array([3])], [cache])
    cache.layers[1].keys.untyped_storage().resize_(0)
    assert not runner._can_run([np.array([3])], [cache])


@pytest.mark.parametrize("most", [1, 127, -8])
def test_what_another_thread_reads_is_never_written_over(most):
    """When weights have changed, a new copy is made elsewhere."""
    model = tiny_model("llama", **SIZES)
    in_blocks(model, most)
    known = {}
    found = executor.pack(page_of(model).program(), known, indexes=True)
    linears = found.linears
    assert any(linear.origin is not None for linear in linears) or not blocks.can_index(torch.float32)
    before = [linear.weight.clone() for linear in linears]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    again = executor.pack(page_of(model).program(), known, indexes=True)
    assert all(torch.equal(linear.weight, old) for linear, old in zip(linears, before, strict=True) if linear.origin)
    third = executor.pack(page_of(model).program(), known, indexes=True)
    assert third.linears[-1].weight is again.linears[-1].weight, "what has not changed is not made anew"


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # whose weights are also read where they are, or from copies alone
def test_calls_in_threads_while_weights_change(kind, is_counted):
    """While a call waits, others find new weights. These are put back before it goes on, and its text is of the old."""
    model = tiny_model(kind, **SIZES)
    in_blocks(model, 1)

    def change():
        for parameter in model.parameters():
            parameter = parameter if is_counted else parameter.data
            parameter.copy_(parameter.flip(0))

    def text(**options):
        return model.generate(IDS, **GREEDY, **options).tolist()

    with torch.no_grad():
        texts = []
        for _ in range(2):
            texts.append(text())
            change()
        lookahead.wrap(model, LookaheadConfig(budget=4, window_size=0, pack_weights=True))
        assert text() == texts[0] != texts[1]
        at, go_on, of_waiting, of_others = threading.Event(), threading.Event(), [], []

        def wait(ids, scores):
            if ids.shape[1] == IDS.shape[1] + 6:
                at.set()
                assert go_on.wait(60)
            return scores

        waiting = threading.Thread(target=lambda: of_waiting.append(text(logits_processor=[wait])))
        waiting.start()
        assert at.wait(60)
        change()
        others = [threading.Thread(target=lambda: of_others.extend([text(), text()])) for _ in range(2)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        change()
        go_on.set()
        waiting.join()
    assert (of_waiting, of_others) == ([texts[0]], [texts[1]] * 4)
    assert text() == texts[0]
    assert "passes: fused" in model.lookahead.report()


# -- shapes ------------------------------------------------------------------------------------------------------------


def norm_of_one(model, name):
    for module_name, module in model.named_modules():
        if module_name.endswith(name):
            module.weight = nn.Parameter(torch.full((1,), 0.7))


def bias_of_one(model, name):
    for module_name, module in model.named_modules():
        if module_name.endswith(name):
            module.bias = nn.Parameter(torch.full((1,), 0.3))


SHAPES = [
    *itertools.product(
        [norm_of_one], ["input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm"]
    ),
    *itertools.product([bias_of_one], ["q_proj", "o_proj", "gate_proj", "down_proj", "lm_head", "1.mlp.up_proj"]),
]


@pytest.mark.parametrize(("change", "name"), SHAPES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("when", ["before", "after"])
def test_norms_and_biases_that_torch_repeats(change, name, when, monkeypatch):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 0)
    model = tiny_model("qwen3")
    if when == "after":
        lookahead.wrap(model).generate(IDS, **GREEDY)
    change(model, name)
    plain = tiny_model("qwen3")
    change(plain, name)
    expected = plain.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(model)
    assert model.generate(IDS, **GREEDY).tolist() == expected
    assert not isinstance(model.lookahead.find_runner(model), FusedRunner)


def test_a_rotary_embedding_of_another_width():
    model = tiny_model("llama")
    runner = FusedRunner(model, find_adapter(model))
    ready = runner._executor
    good = torch.zeros(20, 8)
    assert ready.can_rotate_by({"": (good, good)})
    for cos, sin in [
        (good, torch.zeros(20, 6)), (torch.zeros(20, 10),) * 2, (torch.zeros(20, 7),) * 2, (good.double(),) * 2,
        (torch.zeros(20, 16)[:, ::2],) * 2, (torch.zeros(8),) * 2, (torch.zeros(20, 0),) * 2,
    ]:  # fmt: skip
        assert not ready.can_rotate_by({"": (cos, sin)})
    rows = executor.Rows(np.array([3]), np.array([1]), [(0, 0, 0, 0)] * 2, [0] * 2, [], 0)
    with pytest.raises(ValueError, match="only 20 of them"):
        ready.run([rows._replace(positions=np.array([20]))], {"": (good, good)})
    with pytest.raises(ValueError, match="outputs"):
        ready.run([rows], {"": (good, good)}, outputs=(3,))


@pytest.mark.parametrize(("query", "key", "value"), [
    ((1, 4, 3, 8), (1, 3, 5, 8), None), ((1, 4, 3, 8), (2, 2, 5, 8), None), ((1, 4, 3, 8), (1, 2, 2, 8), None),
    ((1, 4, 3, 8), (1, 2, 5, 16), None), ((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 4, 8)), ((4, 3, 8), (2, 5, 8), None),
    ((1, 4, 3, 8), (1, 2, 5, 8), (1, 1, 5, 8)), ((1, 4, 0, 8), (1, 2, 5, 8), None), ((2, 4, 3, 8), (2, 2, 5, 8), None),
])  # fmt: skip
def test_attention_of_shapes_that_do_not_fit_is_left_to_torch(query, key, value):
    query, key, value = torch.randn(query), torch.randn(key), torch.randn(value or key)
    assert not tree_attention.serves(query, key, value, None)


@pytest.mark.parametrize("mask", [(1, 1, 2, 3), (1, 4, 3, 5), (2, 1, 3, 5), (1, 1, 3, 6)], ids=str)
def test_masks_that_do_not_fit_are_left_to_torch(mask):
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    assert tree_attention.serves(query, key, key, torch.zeros(1, 1, 3, 5))
    assert not tree_attention.serves(query, key, key, torch.zeros(mask))


# -- small stacks ------------------------------------------------------------------------------------------------------

SMALL_STACK = """
import torch
from zoo import tiny_model
import lookahead
torch.set_num_threads(2)
config = lookahead.LookaheadConfig(budget=8, window_size=2, ngram_size=3)  # nothing that must be measured
for dtype in (torch.float32, torch.bfloat16):
    for size in (256, 64):
        model = tiny_model("qwen3", head_dim=size, hidden_size=64, intermediate_size=64).to(dtype)
        lookahead.wrap(model, config)
        model.generate(torch.arange(3, 60)[None], max_new_tokens=20, do_sample=False)
        assert "passes: fused" in model.lookahead.report()
        lookahead.wrap(model, config)
        model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
        model.generate(torch.arange(3, 60)[None], max_new_tokens=20, do_sample=False)
        assert "passes: eager" in model.lookahead.report()
"""


@pytest.mark.long
def test_threads_may_have_small_stacks(tmp_path):
    environment = os.environ | {
        "OMP_STACKSIZE": "128K",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    subprocess.run([sys.executable, "-c", SMALL_STACK], env=environment, check=True, timeout=600)
