"""Wrapping and unwrapping: what a wrapped model reports, and what other threads may do meanwhile."""

import copy
import functools
import gc
import os
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
from test_products import small_llama
from transformers import StoppingCriteria
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool, compat
from lookahead.cpu import choice, native, products
from lookahead.guessing.budget import TRIAL_STEPS, Trials
from lookahead.models import kept
from lookahead.models.state import state_of
from lookahead.passes import probe, verdicts
from lookahead.passes.fused import FusedRunner
from lookahead.passes.packed import packed_of
from ngram_pool import native as of_pools

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
GREEDY = {"max_new_tokens": 20, "do_sample": False}


class Gate(StoppingCriteria):
    """Stops nothing; lets whoever waits know that the call is under way, and keeps it there."""

    def __init__(self):
        self.reached, self.leave = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.reached.set()
        assert self.leave.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "change",
    [lookahead.unwrap, lambda model: lookahead.wrap(model, LookaheadConfig(budget=3))],
    ids=["unwrap", "wrap anew"],
)
def test_a_model_that_decodes_is_not_wrapped_or_unwrapped(change):
    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model)
    engine, gate, got = model.lookahead, Gate(), []
    thread = threading.Thread(target=lambda: got.append(model.generate(IDS, stopping_criteria=[gate], **GREEDY)))
    thread.start()
    assert gate.reached.wait(60)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="while it decodes: wait"):
        change(model)
    assert model.lookahead is engine
    gate.leave.set()
    thread.join(60)
    assert torch.equal(got[0], expected)
    for it in (model, *copies):
        change(it)
        assert torch.equal(it.generate(IDS, **GREEDY), expected)


@pytest.mark.parametrize(
    ("loop", "mode"),
    [("_sample", {}), ("_beam_search", {"num_beams": 2}), ("_assisted_decoding", {"prompt_lookup_num_tokens": 2})],
)
def test_a_call_may_begin_before_and_decode_after_unwrapping(loop, mode):
    model = lookahead.wrap(tiny_model("llama"))
    kind = type(model)
    expected = lookahead.unwrap(copy.deepcopy(model)).generate(IDS, **GREEDY, **mode)
    decode = getattr(kind, loop)

    def unwrapped_first(self, *args, **kwargs):
        lookahead.unwrap(self)
        return decode(self, *args, **kwargs)

    setattr(kind, loop, unwrapped_first)
    try:
        assert torch.equal(model.generate(IDS, **GREEDY, **mode), expected)
    finally:
        setattr(kind, loop, decode)


def test_threads_lose_no_statistics():
    model = lookahead.wrap(tiny_model("llama"))
    threads = [threading.Thread(target=lambda: [model.generate(IDS, **GREEDY) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.lookahead.stats.calls == 20
    assert model.lookahead.stats.tokens == 20 * model.lookahead.last.tokens


def test_threads_end_each_trial_of_a_window_once():
    class Slow(int):
        """A number that lets other threads in between reading it and writing it back."""

        def __sub__(self, other):
            threading.Event().wait(0.0005)
            return Slow(int(self) - other)

    trials = Trials(1)
    steps = 4 * TRIAL_STEPS
    trials._steps_left = Slow(steps)
    threads = [threading.Thread(target=lambda: [trials.count(0, 0.0) for _ in range(steps // 4)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trials.level > 0, "the pause is over, and a window is on trial"
    assert trials._steps_left == TRIAL_STEPS


def test_what_took_a_call_over_is_said():
    model = lookahead.wrap(tiny_model("llama"))
    model.generate(IDS, **GREEDY)
    assert model.lookahead.last.steps > 0
    assert not model.lookahead.last.plain
    ways = {
        "beam search": {"num_beams": 2},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
        "cache_implementation='static'": {"cache_implementation": "static"},
    }
    for reason, options in ways.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.generate(IDS, **GREEDY, **options)
        last = model.lookahead.last
        assert reason in last.plain
        assert last.steps == 0
        assert str(last).startswith("the model's own decoding: lookahead does not decode")
        assert last.as_dict()["plain"] == last.plain
        assert reason in model.lookahead.report()
    assert model.lookahead.stats.calls == 1
    model.generate(IDS, **GREEDY)
    assert not model.lookahead.last.plain


def test_the_report_says_what_is_in_use_and_why_not_more(monkeypatch):
    model = lookahead.wrap(small_llama())
    report = model.lookahead.report()
    assert report.splitlines()[:5] == [
        "passes: eager",
        "attention: sdpa, split into cache and step",
        f"kernels: lookahead's, for {native.CAPABILITY}",
        "guesses: trees",
        "sources: PoolSource, WindowSource",
    ]
    assert "in C++" not in report
    for library in (native, of_pools):
        monkeypatch.setattr(library, "why_missing", lambda: "the C++ was never built here")
    report = model.lookahead.report()
    assert "given up: n-gram pools in C++: the C++ was never built here" in report
    assert "kernels: torch's" in report
    assert "given up: lookahead's kernels: the C++ was never built here" in report
    without = lookahead.wrap(small_llama())
    without.generate(IDS, **GREEDY)
    assert "given up: fused passes: their C++ is missing" in without.lookahead.report()
    zaya = lookahead.wrap(tiny_model("zaya")).lookahead.report()
    assert "guesses: single chains" in zaya
    graphs = lookahead.wrap(small_llama(), LookaheadConfig(cuda_graphs=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs.generate(IDS, **GREEDY)
    assert "given up: CUDA graphs: it is on a device of type cpu" in graphs.lookahead.report()


def test_a_model_that_torch_compile_returns_is_refused_by_name():
    with pytest.raises(TypeError, match=r"model\.compile\(\)"):
        lookahead.wrap(torch.compile(tiny_model("llama")))


def test_a_model_that_is_refused_is_left_as_it_was():
    model = small_llama()
    inner = model.model.forward
    model.model.forward = lambda *args, cache=None, past_key_values=None, **kwargs: inner(*args, **kwargs)
    model.__class__ = type("Forgetful", (type(model),), {})  # an architecture of its own, not one that is patched
    with pytest.raises(lookahead.UnsupportedModelError):
        lookahead.wrap(model)
    assert not hasattr(model, "lookahead")


def test_wrapping_again_and_again_keeps_the_pool():
    pool = NgramPool(0.01)
    model = lookahead.wrap(tiny_model("llama"), pool=pool)
    model.generate(IDS, **GREEDY)
    stats = model.lookahead.stats
    lookahead.wrap(model, LookaheadConfig(budget=2))
    assert model.lookahead.pool is pool
    assert model.lookahead.stats is stats
    other = NgramPool(0.01)
    assert lookahead.wrap(model, pool=other).lookahead.pool is other


def test_a_mask_of_other_rows_is_refused_as_plain_decoding_refuses_it():
    model, ids = tiny_model("granite"), IDS.repeat(4, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones(3, ids.shape[1], dtype=torch.long)}
    with pytest.raises(RuntimeError, match="must match") as plain:
        model.generate(**inputs, **GREEDY)
    lookahead.wrap(model)
    reason = "number of sequences|not of the prompt's shape"  # transformers before 5.23 does not drop such a mask
    with pytest.warns(UserWarning, match=reason), pytest.raises(RuntimeError) as ours:
        model.generate(**inputs, **GREEDY)
    assert str(ours.value) == str(plain.value)


def test_the_report_gives_no_reason_against_what_is_not_asked_for_any_more():
    model = tiny_model("zaya")  # there is no program for it
    for cpu_kernels in (True, False):
        lookahead.wrap(model, LookaheadConfig(cpu_kernels=cpu_kernels, budget=4, window_size=0))
        model.generate(IDS, **GREEDY)
        assert ("given up: fused passes" in model.lookahead.report()) == cpu_kernels


def test_a_refused_change_leaves_everything_as_it_was():
    model = lookahead.wrap(tiny_model("llama"))
    engine, pool = model.lookahead, model.lookahead.pool
    with pytest.raises(TypeError, match="no source of guesses"):
        lookahead.wrap(model, LookaheadConfig(cpu_kernels=False), pool=NgramPool(), source=object())
    assert model.lookahead is engine
    assert engine.pool is pool


def test_a_probe_that_is_interrupted_leaves_the_kernels(monkeypatch):
    model = lookahead.wrap(small_llama())

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lookahead.wrapping.find_adapter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lookahead.wrap(model, LookaheadConfig(cpu_kernels=False))
    assert model.lookahead.config.cpu_kernels
    assert type(model.lookahead.find_runner(model)) is FusedRunner


def classes(model):
    return [type(module) for module in model.modules()][1:]


def test_layers_have_their_own_classes_but_in_passes(monkeypatch):
    """Libraries look for `type(layer) is nn.Linear`."""
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model = tiny_model("zaya")  # there is no program for it
    own, in_passes, between = classes(model), [], []
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: in_passes.append(classes(model)))
    lookahead.wrap(model)
    assert any(products.DecodingLinear in found for found in in_passes)
    assert classes(model) == own
    in_passes.clear()

    class Looks(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            between.append(classes(model))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model.generate(IDS, stopping_criteria=[Looks()], **GREEDY)
    assert any(products.DecodingLinear in found for found in in_passes)
    assert all(found == own for found in between)
    hook.remove()
    text = state_of(model).text
    with products.installed(products.served_layers(model)):  # as in another thread
        assert classes(model) != own
        assert state_of(model).text == text
        assert classes(copy.deepcopy(model)) == own
        assert all(classes(pickle.loads(pickle.dumps(model, protocol))) == own for protocol in range(6))
        with products.installed(products.served_layers(model)):
            pass
        assert classes(model) != own, "the pass of another thread still runs"
    assert classes(model) == own


def test_a_pass_of_one_model_leaves_the_layers_of_others(monkeypatch):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    one, other = tiny_model("llama"), tiny_model("llama")
    other.lm_head = one.lm_head
    own = classes(one)
    with products.installed(products.served_layers(other)):
        with products.installed(products.served_layers(one)):
            assert products.DecodingLinear in classes(one.model)
        assert products.DecodingLinear not in classes(one.model)
        assert type(one.lm_head) is products.DecodingLinear, "the other model's pass still needs it"
    assert classes(one) == classes(other) == own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_in_the_middle_of_a_pass_has_the_layers_own_classes(monkeypatch):
    """And no lock of the passes that do not go on there."""
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model = tiny_model("llama")
    own, layers = classes(model), products.served_layers(model)
    forked, entered = threading.Event(), threading.Event()

    def run():
        with products.installed(layers):
            entered.set()
            forked.wait(60)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        entered.wait(60)
        if not (child := os.fork()):
            with products.installed(layers):
                is_swapped = classes(model) != own
            os._exit(0 if is_swapped and classes(model) == own else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert classes(model) != own
        forked.set()
        running.result()
    assert classes(model) == own


@pytest.mark.parametrize("name", ["llama", "zaya"])
def test_a_wrapped_model_is_quantized_as_any_other(name, monkeypatch):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model = tiny_model(name)

    def quantized(given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(given, {torch.nn.Linear}, dtype=torch.qint8)

    plain = quantized(copy.deepcopy(model))
    lookahead.wrap(model)
    model.generate(IDS, **GREEDY)
    found = quantized(model)
    assert classes(found) == classes(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found.generate(IDS, **GREEDY).equal(plain.generate(IDS, **GREEDY))


@pytest.mark.parametrize("name", ["llama", "zaya"])
def test_a_wrapped_model_is_parametrized_as_any_other(name, monkeypatch):
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)
    model = lookahead.wrap(tiny_model(name))
    model.generate(IDS, **GREEDY)
    head = model.get_output_embeddings()
    torch.nn.utils.parametrize.register_parametrization(head, "weight", torch.nn.Hardtanh(-0.05, 0.05))
    assert type(head).__name__ == "ParametrizedLinear"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(IDS, **GREEDY)
        assert found.equal(lookahead.unwrap(model).generate(IDS, **GREEDY))


def test_a_verdict_on_weights_that_are_no_tensors_is_not_stored():
    """These two models differ only in a dtype that is hidden in them. In one of them, rows depend on each other."""
    states = []
    for dtype in (torch.float16, torch.qint8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(tiny_model("qwen2"), {torch.nn.Linear}, dtype=dtype)
            expected = model.generate(IDS, **GREEDY)
            assert lookahead.wrap(model).generate(IDS, **GREEDY).equal(expected)
        assert verdicts.path_of(model) is None
        states.append(state_of(model).key)
        states.append(state_of(copy.deepcopy(model)).key)
    assert len(set(states)) == 4
    assert verdicts.path_of(tiny_model("qwen2")) is not None


@pytest.mark.parametrize("name", ["llama", "zaya"])
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("is_wrapped_first", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_a_scripted_part_decodes(name, is_traced, is_wrapped_first):
    model = tiny_model(name)
    expected = model.generate(IDS, **GREEDY)
    if is_wrapped_first:
        lookahead.wrap(model)
    place = next(place for place, module in model.named_modules() if type(module) is torch.nn.Linear)
    layer = model.get_submodule(place)
    made = torch.jit.trace(layer, torch.randn(2, layer.in_features)) if is_traced else torch.jit.script(layer)
    model.set_submodule(place, made)
    assert lookahead.wrap(model).generate(IDS, **GREEDY).equal(expected)
    assert lookahead.unwrap(model).generate(IDS, **GREEDY).equal(expected)


@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_a_model_that_is_offloaded_no_more_is_as_before(is_wrapped_first):
    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    if is_wrapped_first:
        lookahead.wrap(model)
    accelerate.cpu_offload(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    lookahead.wrap(model)
    assert model.generate(IDS, **GREEDY).equal(expected)
    assert type(model.lookahead.find_runner(model)) is FusedRunner


@pytest.mark.parametrize("name", ["llama", "zaya", "lfm2", "gemma3_text"])
def test_a_cache_that_is_returned_has_the_padding(name):
    model = tiny_model(name)
    ids, mask = torch.cat([torch.full((1, 6), 2), IDS], 1), (torch.arange(6 + IDS.shape[1]) >= 6).long()[None]

    def texts():
        first = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
        more = torch.cat([first.sequences, torch.tensor([[9, 11]])], 1)
        longer = torch.cat([mask, torch.ones(1, more.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        length = first.past_key_values.get_seq_length()
        return length, model.generate(
            more, attention_mask=longer, past_key_values=first.past_key_values, **GREEDY
        ).tolist()

    plain = texts()
    lookahead.wrap(model)
    assert texts() == plain


def test_a_subclass_of_the_wrapped_class_decodes():
    """FSDP makes one."""
    model = tiny_model("llama")
    options = {"max_new_tokens": 10, "num_beams": 2, "do_sample": False}
    expected = model.generate(IDS, **options)
    lookahead.wrap(model)
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.warns(UserWarning, match="beam search"):
        assert torch.equal(model.generate(IDS, **options), expected)
    assert torch.equal(model.generate(IDS, **GREEDY), tiny_model("llama").generate(IDS, **GREEDY))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_another_default_dtype_changes_nothing(default):
    model = tiny_model("llama")
    options = {"max_new_tokens": 20, "do_sample": True, "top_k": 7}
    torch.manual_seed(3)
    expected = model.generate(IDS, **options)
    torch.set_default_dtype(default)
    try:
        choice.can_draw.cache_clear()
        lookahead.wrap(model)
        torch.manual_seed(3)
        assert torch.equal(model.generate(IDS, **options), expected)
        assert choice.can_draw()
    finally:
        torch.set_default_dtype(torch.float32)
        choice.can_draw.cache_clear()


def test_the_probe_moves_the_embeddings_of_its_own_thread_alone():
    model = tiny_model("llama").bfloat16()
    embeddings = model.get_input_embeddings()
    expected = embeddings(IDS)
    with probe._moved_embeddings(model, 0), ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(embeddings, IDS).result(), expected)
        assert not torch.equal(embeddings(IDS), expected)
        assert not compat.hooks_of_users(embeddings)
    assert torch.equal(embeddings(IDS), expected)


def test_unwrapping_frees_copies():
    """And leaves nothing on the model but what was learned of it."""
    model = small_llama()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    lookahead.wrap(model).generate(IDS, **GREEDY)
    packed = weakref.ref(packed_of(model))
    state = weakref.ref(state_of(model))
    lookahead.unwrap(model)
    gc.collect()
    assert packed() is None
    assert state() is None, "and with it copies of modules"
    assert vars(model).pop(kept.ATTRIBUTE)
    assert {name: vars(module) for name, module in model.named_modules()} == before


def seen_by_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: model.config and None)


def seen_by_forward(model):
    own = model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    model.forward = forward


def seen_by_class(model):
    mlp = model.model.layers[0].mlp
    scaled = type("Scaled", (type(mlp),), {"forward": lambda self, x: model.scale * super(type(self), self).forward(x)})
    model.scale, mlp.__class__ = 0.5, scaled


def seen_by_part(model):
    model.model.owner = [model]


def dispatched(model):
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def offloaded(model):
    accelerate.cpu_offload(model, torch.device("cpu"))


def mixed(model):
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


WRAPPED = {
    "wrapped": lambda model: lookahead.wrap(model).generate(IDS, **GREEDY),
    "unwrapped": lambda model: lookahead.unwrap(lookahead.wrap(model)).generate(IDS, **GREEDY),
    "decode": lambda model: model.generate(IDS, custom_generate=lookahead.decode, **GREEDY),
    "draft": lambda model: lookahead.wrap(tiny_model("llama", 1)).generate(IDS, assistant_model=model, **GREEDY),
}


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize(
    "known_by",
    [seen_by_hook, seen_by_forward, seen_by_class, seen_by_part, dispatched, offloaded, mixed],
)
def test_a_model_that_its_own_parts_know_is_freed(known_by, how):
    """What is found out about a model leads back to it, by hooks, functions, classes and modules of users."""
    model = tiny_model("llama")
    known_by(model)
    WRAPPED[how](model)
    layer = weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert layer() is None


def test_what_is_kept_of_a_model_is_not_copied():
    model = tiny_model("llama")
    before = state_of(model)
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert state_of(other) is not before
        assert state_of(other) is state_of(other)
    assert state_of(model) is before
    assert b"lookahead." not in pickle.dumps(model)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_wrapped_model_is_pickled_by_every_protocol(protocol):
    model = lookahead.wrap(tiny_model("llama"))
    expected = model.generate(IDS, **GREEDY)
    assert torch.equal(pickle.loads(pickle.dumps(model, protocol)).generate(IDS, **GREEDY), expected)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"budget": 5}}, r"config={'budget': 5} must be a LookaheadConfig"),
        ({"config": LookaheadConfig}, "must be a LookaheadConfig"),
        ({"pool": "code.pool"}, r"pool='code.pool' must be an NgramPool: NgramPool\.load\(path\) reads one"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(given, message, is_wrapped):
    model = tiny_model("llama")
    if is_wrapped:
        lookahead.wrap(model)
    with pytest.raises(TypeError, match=message):
        lookahead.wrap(model, **given)
    assert hasattr(model, "lookahead") == is_wrapped
    with pytest.raises(TypeError, match="must be an NgramPool"):
        lookahead.PoolSource("code.pool")
