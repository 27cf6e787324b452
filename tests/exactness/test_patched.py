"""Models whose code, settings or parts are changed, before they are wrapped or after: the text is the model's own."""

import contextlib
import copy
import copyreg
import functools
import gc
import itertools
import re
import types
import warnings
import weakref
from unittest import mock

import pytest
import torch
import transformers.activations
import transformers.cache_utils
import transformers.integrations.moe as moe
import transformers.masking_utils
import transformers.models.llama.modeling_llama as llama
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from test_products import small_llama
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoTokenizer, GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from zoo import ALIKE, SETTINGS, tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.models import attention, state
from lookahead.models.families import HOMES, page_for
from lookahead.models.state import State, state_of
from lookahead.passes import probe, stored, verdicts
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.runner import EagerRunner
from ngram_pool import NgramPool, Origin

IDS = torch.tensor([[3, 14, 15, 92, 65, 35]])
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
CONFIG = LookaheadConfig(budget=12, window_size=2, ngram_size=3)
PATH_OF = verdicts.path_of


def scaled(function, by=1.3):
    """The function with scaled results, disguised as the original."""

    @functools.wraps(function)
    def other(*args, **kwargs):
        result = function(*args, **kwargs)
        return (result[0] * by, *result[1:]) if isinstance(result, tuple) else result * by

    return other


def later(function, after=24):
    """A rotary embedding that stops at a position beyond those that the probe tries."""

    @functools.wraps(function)
    def other(self, x, position_ids):
        return function(self, x, position_ids.clamp(max=after))

    return other


def slanted(function):
    """A function of queries and keys that rotates them another way."""

    @functools.wraps(function)
    def other(q, k, *args, **kwargs):
        q, k = function(q, k, *args, **kwargs)
        return q.roll(1, -1), k

    return other


class Turned:
    """An object that says that it is the function in it."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        q, k = self.__wrapped__(*args, **kwargs)
        return q.roll(1, -1), k


def doubled(self, ids, **kwargs):
    """Inputs of a pass, with every second position left out."""
    inputs = _inputs(self, ids, **kwargs)
    return {**inputs, "position_ids": inputs["position_ids"] * 2}


F = nn.functional
_call, _update = nn.Module.__call__, transformers.cache_utils.DynamicLayer.update
_inputs = llama.LlamaForCausalLM.prepare_inputs_for_generation
IN_PLACE = {  # the replaced attribute, and its replacement
    "attention": (llama.LlamaAttention, "forward", scaled(llama.LlamaAttention.forward)),
    "mlp": (llama.LlamaMLP, "forward", scaled(llama.LlamaMLP.forward)),
    "norm": (llama.LlamaRMSNorm, "forward", scaled(llama.LlamaRMSNorm.forward)),
    "rotary": (llama.LlamaRotaryEmbedding, "forward", later(llama.LlamaRotaryEmbedding.forward)),
    "layer": (llama.LlamaDecoderLayer, "forward", scaled(llama.LlamaDecoderLayer.forward)),
    "call": (llama.LlamaMLP, "__call__", scaled(nn.Module.__call__)),
    "every call": (nn.Module, "__call__", lambda self, *args, **kwargs: _of_modules(self, *args, **kwargs)),
    "linear": (nn.Linear, "forward", scaled(nn.Linear.forward)),
    "embedding": (nn.Embedding, "forward", scaled(nn.Embedding.forward)),
    "activation": (transformers.activations.SiLUActivation, "forward", lambda self, x: F.gelu(x)),
    "turning": (llama, "apply_rotary_pos_emb", slanted(llama.apply_rotary_pos_emb)),
    "turning of another model": (llama, "rotate_half", lambda x: x.roll(1, -1)),
    "a function of torch.nn": (F, "silu", scaled(F.silu)),
    "another of torch.nn": (F, "silu", F.relu),
    "product": (F, "linear", scaled(F.linear)),
    "a function of torch": (torch, "rsqrt", torch.sqrt),
    "softmax of attention": (F, "scaled_dot_product_attention", scaled(F.scaled_dot_product_attention)),
    "a method of tensors": (torch.Tensor, "rsqrt", scaled(torch.Tensor.rsqrt)),
    "an object": (llama, "apply_rotary_pos_emb", Turned(llama.apply_rotary_pos_emb)),
    "a part of a turning": (
        llama,
        "apply_rotary_pos_emb",
        functools.partial(llama.apply_rotary_pos_emb, unsqueeze_dim=1),
    ),
    "inputs": (llama.LlamaForCausalLM, "prepare_inputs_for_generation", doubled),
    "cache": (transformers.cache_utils.DynamicLayer, "update", lambda self, k, v, *args, **kw: _halved(self, k, v)),
    "loop": (GenerationMixin, "_sample", lambda self, ids, *args, **kwargs: torch.cat([ids, ids], -1)),
}


def _of_modules(self, *args, **kwargs):
    result = _call(self, *args, **kwargs)
    return result * 1.2 if isinstance(self, llama.LlamaMLP) else result


def _halved(self, keys, values):
    return _update(self, keys, values * 0.5)


WITHOUT_EFFECT = "a function of torch", "a method of tensors", "a part of a turning"  # on this model's text


def text_of(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(IDS, **{**GREEDY, **options}).tolist()


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_code_that_is_replaced_computes_the_text(what, is_before, monkeypatch):
    place, name, code = IN_PLACE[what]
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    usual = text_of(plain)
    if not is_before:
        assert text_of(lookahead.wrap(model, CONFIG)) == usual
        assert "passes: fused" in model.lookahead.report()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, code)
        expected = text_of(plain)
        assert expected != usual or what in WITHOUT_EFFECT, "it has an effect"
        if is_before:
            lookahead.wrap(model, CONFIG)
        assert text_of(model) == expected
        report = model.lookahead.report()
        assert "passes: fused" not in report
        if what not in ("cache", "loop", "inputs"):
            assert f"{getattr(place, '__name__', '')}.{name}" in report
            assert not isinstance(code, types.FunctionType) or code.__code__.co_filename in report
    assert text_of(model) == usual, "it was put back"
    assert "passes: fused" in model.lookahead.report()


def test_an_inherited_method_that_is_put_back_is_the_models_own(monkeypatch):
    model = tiny_model("llama")
    usual = text_of(model)
    lookahead.wrap(model, CONFIG)
    monkeypatch.setattr(llama.LlamaMLP, "__call__", nn.Module.__call__, raising=False)
    monkeypatch.setattr(llama.LlamaForCausalLM, "_sample", GenerationMixin._sample)
    assert text_of(model) == usual
    assert "passes: fused" in model.lookahead.report()


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", ["for all", "for this model", "mask"])
def test_registered_attention_computes_the_text(how, is_before):
    def mine(module, query, key, value, mask, **kwargs):
        out, weights = attention.sdpa(module, query, key, value, mask, **kwargs)
        return out * 1.3, weights

    def mask_of_mine(*args, **kwargs):
        return _masks(*args, **kwargs)

    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    _masks = masks["sdpa"]
    model = tiny_model("llama")
    plain, usual = copy.deepcopy(model), text_of(model)
    if not is_before:
        assert text_of(lookahead.wrap(model, CONFIG)) == usual
    before = registry["sdpa"]
    try:
        if how == "for all":
            AttentionInterface.register("sdpa", mine)
        elif how == "for this model":
            registry["sdpa"] = mine
        else:
            masks["sdpa"] = mask_of_mine
        expected = text_of(plain)
        if is_before:
            lookahead.wrap(model, CONFIG)
        assert text_of(model) == expected
        assert "passes: fused" not in model.lookahead.report()
        assert "a model whose attention was replaced (" in model.lookahead.report()
    finally:
        for mapping in (registry, masks):
            mapping._local_mapping.pop("sdpa", None)
        AttentionInterface.register("sdpa", before)
    assert text_of(model) == usual
    assert "passes: fused" in model.lookahead.report()


def test_our_attention_stands_in_for_that_of_transformers_alone():
    assert attention.register()
    mine = lambda *args, **kwargs: attention.sdpa(*args, **kwargs)  # noqa: E731
    try:
        AttentionInterface.register("sdpa", mine)
        assert not attention.register()
        assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
        AttentionInterface.register("sdpa", attention.sdpa)
        assert attention.register(), "transformers' own is replaced again"
    finally:
        AttentionInterface.register("sdpa", attention.attend)


def windowed(hidden_states_of, last):
    """Attention that is given the last keys alone, as some that evict keys from the cache do it."""

    def forward(self, *args, **kwargs):
        def mine(module, query, key, value, mask, **others):
            mask = mask if mask is None else mask[..., -last:]
            return attention.sdpa(module, query, key[:, :, -last:], value[:, :, -last:], mask, **others)

        with mock.patch.dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=mine):
            return hidden_states_of(self, *args, **kwargs)

    return forward


def louder(attend, last):
    """Attention that gets louder once it sees more keys than ``last``."""

    def mine(module, query, key, *args, **kwargs):
        out, weights = attend(module, query, key, *args, **kwargs)
        return out * (1.4 if key.shape[2] > last else 1), weights

    return mine


@pytest.mark.parametrize("last", [30, 100])
@pytest.mark.parametrize("how", ["window", "registered", "of one layer"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_attention_that_acts_in_long_texts_computes_the_text(last, how, is_before, monkeypatch):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    if how == "window":
        monkeypatch.setattr(llama.LlamaAttention, "forward", windowed(llama.LlamaAttention.forward, last))
    elif how == "registered":
        mapping = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
        monkeypatch.setitem(mapping, "sdpa", louder(attention.sdpa, last))
    else:
        for one in (model, plain):
            layer = one.model.layers[0].self_attn
            layer.forward = types.MethodType(windowed(llama.LlamaAttention.forward, last), layer)
    if is_before:
        lookahead.wrap(model, CONFIG)
    assert text_of(model, max_new_tokens=110) == text_of(plain, max_new_tokens=110)
    assert re.search(r"a model whose attention was replaced \(.*test_patched.py", model.lookahead.report())


def own_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: 1.3 * llama.LlamaMLP.forward(self, x), mlp)


def own_method(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.act = None
        layer.self_attn.__class__ = type(
            "Mine", (llama.LlamaAttention,), {"forward": scaled(llama.LlamaAttention.forward)}
        )


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.3)


def hook_on_keywords(model):
    def halve(module, args, kwargs):
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 0.5}

    model.model.layers[0].self_attn.register_forward_pre_hook(halve, with_kwargs=True)


def hook_on_all(model):
    def change(module, inputs, output):
        return output * 1.3 if isinstance(module, llama.LlamaMLP) else None

    return torch.nn.modules.module.register_module_forward_hook(change)


class Largest(llama.LlamaMLP):
    """Its rows depend on the others of a pass."""

    def forward(self, x):
        return super().forward(x) * (1 + x.abs().max())


def row_dependent(model):
    for layer in model.model.layers:
        layer.mlp.__class__ = Largest


def head(model):
    torch.manual_seed(1)
    model.lm_head = nn.Linear(32, 97, bias=True)


def activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def causality(model):
    model.model.layers[0].self_attn.is_causal = False


def negated(model):
    """Torch negates the numbers of such a weight whenever it reads them."""
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(torch._neg_view(layer.weight.detach()))


def setting(path, value, layer):
    def change(model):
        *names, last = path.split(".")
        part = functools.reduce(getattr, names, model.model.layers[layer])
        setattr(part, last, value)

    change.__name__ = f"{path} of layer {layer}"
    return change


CHANGES = [
    own_forward, own_method, hook, hook_on_keywords, hook_on_all, row_dependent, head, activation, causality, negated,
    *(setting("self_attn.scaling", 1.0, layer) for layer in (0, 1)),
    *(setting("input_layernorm.variance_epsilon", 0.5, layer) for layer in (0, 1)),
    *(setting("residual_multiplier", 0.3, layer) for layer in (0, 1)),
    *(setting("self_attn.use_rope", False, layer) for layer in (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_changed_part_computes_the_text(change, is_before):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    on_all = [change(model) if change is not hook_on_all else None, change(plain)]
    try:
        if is_before:
            lookahead.wrap(model, CONFIG)
        assert text_of(model) == text_of(plain)
    finally:
        for handle in filter(None, on_all):
            handle.remove()


@pytest.mark.parametrize("family", ["granite", "gemma3_text", "exaone4", "smollm3", "qwen3", "phi3"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("residual_multiplier", 0.3), ("self_attn.scaling", 0.9),
        ("self_attn.use_rope", 0), ("self_attn.is_sliding", 0),
        ("self_attn.sliding_window", None), ("self_attn.layer_type", "full_attention"),
        ("self_attn.q_norm.variance_epsilon", 0.5), ("self_attn.q_norm.eps", 0.5),
    ],
)  # fmt: skip
def test_attributes_of_one_layer_count_for_it_alone(family, layer, path, value):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    text_of(lookahead.wrap(model, CONFIG))
    for one in (model, plain):
        try:
            setting(path, value, layer)(one)
        except AttributeError:
            pytest.skip("it has no such part")
    assert text_of(model) == text_of(plain)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("batch", [1, 4])
def test_layers_in_another_order_than_their_numbers(is_before, batch):
    """A prompt is read and steps are run by different code, which must find the same layers of the cache."""
    model = tiny_model("llama")
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    lookahead.unwrap(model)
    ids = BATCH[-batch:] if batch > 1 else BATCH[1:2].repeat(1, 100)[:, :190]  # too long for a fused pass
    options = {**GREEDY, "attention_mask": (ids != 2).long()}
    expected = model.generate(ids, **options).tolist()
    assert lookahead.wrap(model, CONFIG).generate(ids, **options).tolist() == expected
    assert "layer_idx" in model.lookahead.report()


def test_fewer_layers_from_a_callback_on():
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    texts = []
    for one in (plain, lookahead.wrap(model, CONFIG)):
        fewer = in_first_token(lambda one: setattr(one.config, "num_hidden_layers", 1), one)
        options = {**GREEDY, **fewer, "attention_mask": (BATCH != 2).long(), "return_dict_in_generate": True}
        texts.append(one.generate(BATCH, **options).sequences.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["llama", "cohere", "phi3"])
def test_attention_that_is_told_to_see_later_tokens(family):
    """Without a mask it sees the whole prompt, and with one of padding only what comes before."""
    model = tiny_model(family)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    for ids in (BATCH, BATCH[1:2].repeat(2, 1), BATCH[1:2]):
        options = {**GREEDY, "attention_mask": (ids != 2).long()}
        expected = lookahead.unwrap(model).generate(ids, **options).tolist()
        assert lookahead.wrap(model, CONFIG).generate(ids, **options).tolist() == expected


@pytest.mark.parametrize("name", ["mine", "grouped_mm"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_code_of_experts_that_a_user_registers(name, is_before, monkeypatch):
    """Under a new name, or under transformers' name."""
    model = tiny_model("qwen3_moe")
    plain = copy.deepcopy(model)
    if not is_before:
        before = text_of(lookahead.wrap(model, CONFIG))
        assert "passes: fused" in model.lookahead.report()
        assert before == text_of(plain)

    def mine(self, hidden_states, chosen, weights):
        return own(self, hidden_states, chosen, weights * 0.3)

    own = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, name, mine)
    for one in (model, plain):
        one.config._experts_implementation = name
    expected = text_of(plain)
    assert text_of(lookahead.wrap(model, CONFIG) if is_before else model) == expected
    assert "passes: fused" not in model.lookahead.report()


@pytest.mark.parametrize("where", ["class", "object", "its products", "look-up"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_code_of_experts_that_is_replaced(where, family, is_before, monkeypatch):
    """Experts are computed by a function that is looked up by name. It calls methods of theirs."""
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    unchanged = text_of(plain)
    if not is_before:
        assert text_of(lookahead.wrap(model, CONFIG)) == unchanged
        assert "passes: fused" in model.lookahead.report()
    cls = type(next(module for module in model.modules() if type(module).__name__.endswith("Experts")))
    if where == "class":
        monkeypatch.setattr(cls, "_apply_gate", scaled(cls._apply_gate))
    elif where == "object":
        for module in (*model.modules(), *plain.modules()):
            if isinstance(module, cls):
                module._apply_gate = types.MethodType(scaled(cls._apply_gate), module)
    elif where == "its products":
        monkeypatch.setattr(moe, "_grouped_linear", scaled(moe._grouped_linear))
    else:
        found = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "get_interface", lambda *_: scaled(found))
    expected = text_of(plain)
    assert expected != unchanged
    assert text_of(lookahead.wrap(model, CONFIG) if is_before else model) == expected


def test_layers_may_differ_in_their_settings():
    model = tiny_model("llama")
    setting("self_attn.scaling", 0.5, 1)(model)
    expected = text_of(model)
    assert text_of(lookahead.wrap(model, CONFIG)) == expected
    assert "passes: fused" in model.lookahead.report()


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("path", ["self_attn.scaling", "input_layernorm.variance_epsilon"])
def test_a_setting_in_a_tensor_that_is_written_to(path, within):
    model = tiny_model("llama")
    setting(path, torch.tensor(0.3), 1)(model)
    tensor = functools.reduce(getattr, path.split("."), model.model.layers[1])
    lookahead.wrap(model, CONFIG)

    def text(one):
        def process(ids, scores):
            if within and ids.shape[1] == 20:
                functools.reduce(getattr, path.split("."), one.model.layers[1]).fill_(2.0)
            return scores

        return text_of(one, logits_processor=[process])

    plain = lookahead.unwrap(copy.deepcopy(model))
    assert text(model) == text(plain)
    for one in (tensor, functools.reduce(getattr, path.split("."), plain.model.layers[1])):
        one.fill_(2.0)
    assert text(model) == text(plain)


OF_OTHERS = {
    "residual_multiplier": 0.3, "attention_multiplier": 0.7, "logits_scaling": 3.0, "embedding_multiplier": 2.0,
    "final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 3, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"], "no_rope_layers": [0, 1], "use_sliding_window": True,
    "sliding_window_pattern": 2, "partial_rotary_factor": 0.5, "qk_norm": True, "use_qk_norm": True,
    "use_bidirectional_attention": True, "attention_chunk_size": 8, "logit_scale": 0.5, "hidden_activation": "gelu",
    "max_window_layers": 1, "rms_norm_eps": 1e-2, "norm_eps": 0.1, "layer_norm_eps": 0.1, "clip_qkv": 0.1,
    "alibi": True, "scale_embeddings": True, "mlp_bias": True, "attention_bias": True,
}  # fmt: skip
TYPES = {AutoConfig.for_model(kind).__class__.__name__.removesuffix("Config"): kind for kind in (*SETTINGS, *ALIKE)}
FUSED = [TYPES.get(page.__name__, TYPES.get(f"{page.__name__}Text")) for page in map(page_for, HOMES)]
FUSED = [kind for kind in FUSED if kind is not None]  # Emu3's text side has the configuration of the whole


def numbers_of(model):
    """Where modules keep numbers, by the dictionary of a module and the name there."""
    spaces = [vars(module) for module in model.modules()]
    found = [(space, name) for space in spaces for name in space if isinstance(space[name], (bool, int, float))]
    return [(space, name) for space, name in found if not (name.startswith("_") or name in LEFT_OUT)]


LEFT_OUT = "training", "first_kv_shared_layer_idx"  # by the latter, Gemma 4 reads a prompt for some of its logits alone


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(family=st.sampled_from(FUSED), place=st.integers(0, 10**6), change=st.sampled_from(["more", "less"]))
def test_any_number_that_a_module_keeps(family, place, change):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    text_of(lookahead.wrap(model, CONFIG), max_new_tokens=16)
    found = [numbers_of(one) for one in (model, plain)]
    texts = []
    for one, numbers in zip((model, plain), found, strict=True):
        space, name = numbers[place % len(numbers)]
        value = space[name]
        other = value + 1 if change == "more" else type(value)(value / 2)
        space[name] = not value if isinstance(value, bool) else other
        try:
            texts.append(text_of(one, max_new_tokens=16))
        except Exception as error:
            texts.append(type(error))
        note(f"{name} of {family}: {value} -> {space[name]}")
    assert texts[0] == texts[1]


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(FUSED),
    names=st.sets(st.sampled_from(sorted(OF_OTHERS)), min_size=1, max_size=4),
    window=st.sampled_from([8, 30]),  # the probe's texts are shorter than the longer one
    is_late=st.booleans(),
    prompt=st.integers(2, 50),
    seed=st.integers(0, 9),
)
@example("llama", {"layer_types", "sliding_window"}, 30, False, 2, 0)  # a window of the cache alone
def test_settings_of_other_families(family, names, window, is_late, prompt, seed):
    chosen = {name: OF_OTHERS[name] for name in sorted(names)}
    chosen |= dict.fromkeys({"sliding_window", "attention_chunk_size"} & names, window)
    torch.manual_seed(seed)
    ids = torch.randint(3, 97, (1, prompt))
    try:
        model = tiny_model(family, seed, **({} if is_late else chosen))
        plain = copy.deepcopy(model)
        if is_late:
            lookahead.wrap(model, CONFIG).generate(ids, **GREEDY)
            for name, value in chosen.items():
                setattr(model.config, name, value)
                setattr(plain.config, name, value)
        expected = plain.generate(ids, **GREEDY)
    except Exception:
        return  # transformers refuses them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not is_late:
            try:
                lookahead.wrap(model, CONFIG)
            except lookahead.UnsupportedModelError:
                return
        found = model.generate(ids, **GREEDY)
    assert found.tolist() == expected.tolist()


# -- what is known of a model is known of it as it is ------------------------------------------------------------------


def in_bfloat16(model):
    model.to(torch.bfloat16)


def a_shorter_window(model):
    model.config.sliding_window = 4


def other_layers(model):
    model.config.layer_types = ["full_attention", "sliding_attention"]


def other_layers_in_place(model):
    model.config.layer_types[:] = ["full_attention"] * 2


def eager_attention(model):
    model.set_attn_implementation("eager")


def quantized_activations(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())


@pytest.mark.parametrize(
    "change",
    [in_bfloat16, a_shorter_window, other_layers, other_layers_in_place, eager_attention, quantized_activations],
)
def test_a_model_that_has_changed_is_tried_anew(change):
    model = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2)
    plain = copy.deepcopy(model)
    text_of(lookahead.wrap(model, CONFIG))
    known = find_adapter(model)
    change(model)
    change(plain)
    assert find_adapter(model) is not known
    assert text_of(model) == text_of(plain)
    if change is quantized_activations:
        assert "depend on the other rows" in model.lookahead.report()


def test_a_model_that_is_as_it_was_is_not_tried_again():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    usual = text_of(model)
    with mock.patch.object(probe, "plain_logits", side_effect=AssertionError("it is tried")):
        assert text_of(model) == usual
        model.train()
        model.eval()
        model.config.pad_token_id = 5
        model.generation_config.top_k = 3
        with torch.no_grad():
            model.lm_head.weight.mul_(1)
        handle = model.model.layers[0].register_forward_hook(lambda *inputs: None)
        handle.remove()
        assert text_of(model) == usual
        lookahead.unwrap(model)
        assert text_of(lookahead.wrap(model, CONFIG)) == usual


class Doubled(nn.Linear):
    def forward(self, rows):
        return 2 * super().forward(rows)


@pytest.mark.parametrize("way", ["replaced", "added", "parametrized"])
@pytest.mark.parametrize(
    "name",
    ["compat.dictionaries_of", "_identities", "_settings", "_registered", "compat.hooks_of_users", "_attributes"],
)
def test_a_model_that_another_thread_changes_as_it_is_looked_at(name, way, monkeypatch):
    """Plain decoding notices nothing but the change."""

    def change(model):
        head = model.lm_head
        if way == "replaced":
            model.lm_head = Doubled(head.in_features, head.out_features, bias=False)
            model.lm_head.weight = head.weight
        elif way == "added":
            model.more = nn.Identity()
            head.register_buffer("more", torch.zeros(1))
        else:
            nn.utils.parametrizations.weight_norm(head)

    model, plain = tiny_model("llama"), tiny_model("llama")
    text_of(lookahead.wrap(model, CONFIG))
    model.config.looked_at_anew = True
    place = state.compat if name.startswith("compat.") else state
    looks, own = [], getattr(place, name.removeprefix("compat."))

    def look(*given):
        looks.append(given)
        if len(looks) == 2:
            change(model)
        return own(*given)

    monkeypatch.setattr(place, name.removeprefix("compat."), look)
    found = text_of(model)
    change(plain)
    assert found == text_of(plain)
    assert len(looks) > 2


def test_a_hook_that_is_set_for_each_call_is_tried_once():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    seen = []

    def watched():
        handle = model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        try:
            return text_of(model)
        finally:
            handle.remove()

    usual = text_of(model)
    assert watched() == usual
    with mock.patch.object(probe, "plain_logits", side_effect=AssertionError("it is tried")):
        assert watched() == usual
    assert seen


def test_a_model_that_is_refused_is_tried_once(caplog):
    """Its calls take no longer than before the wrap, and are not told that guesses will be chains."""
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    hook = model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: torch.cat([output[:, :-1], output[:, -1:] + 1], dim=1)
    )
    expected = text_of(lookahead.unwrap(copy.deepcopy(model)))
    assert text_of(model) == expected
    assert model.lookahead.last.plain.startswith("a model that was changed after it was wrapped")
    assert "is_decoder" not in model.lookahead.last.plain
    with mock.patch.object(probe, "plain_logits", side_effect=AssertionError("it is tried")):
        for _ in range(3):
            assert text_of(model) == expected
        assert model.lookahead.last.plain.startswith("a model that was changed after it was wrapped")
    assert "single chain" not in caplog.text
    hook.remove()
    text_of(model)
    assert not model.lookahead.last.plain


def test_a_model_that_a_wrap_has_refused_is_tried_again_by_the_next(monkeypatch):
    model, reason = tiny_model("llama"), ["the disk is full"]
    monkeypatch.setattr(probe, "compare_with_plain", lambda *_, **__: reason[0])
    with pytest.raises(lookahead.UnsupportedModelError, match="the disk is full"):
        lookahead.wrap(model, CONFIG)
    reason[0] = None
    lookahead.wrap(model, CONFIG)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", ["auto", 32])
@pytest.mark.parametrize("rows", [3, 5, 9, 17, 33, 65])
def test_a_hook_that_acts_on_many_rows_computes_the_text(rows, budget, attention):
    """It may take a step for a prompt."""
    model = tiny_model("llama", attn_implementation=attention)
    change = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[9, 17, 33, 41] * 6])
    options = {"max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False}

    def act(module, inputs, output):
        return output + change if output.shape[1] >= rows else None

    handle = model.model.layers[0].register_forward_hook(act)
    expected = model.generate(ids, **options).tolist()
    handle.remove()
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    model.model.layers[0].register_forward_hook(act)
    for _ in range(2):
        assert model.generate(ids, **options).tolist() == expected
    assert model.lookahead.last.plain.startswith("a model that was changed after it was wrapped")


def test_code_of_transformers_and_torch_is_known_as_theirs():
    for family in (*SETTINGS, *ALIKE):
        model = tiny_model(family)
        assert state_of(model).foreign == (), family
        assert state_of(model).is_known, family


def test_looking_at_a_model_keeps_nothing_of_it_alive():
    model = tiny_model("llama")
    state_of(model)
    weights = weakref.ref(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    gc.collect()
    assert weights() is None
    layer = weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert layer() is None


def in_first_token(change, model):
    """Options of a call in which a processor changes something when the first token is chosen."""
    left = [change]

    def process(ids, scores):
        if left:
            left.pop()(model)
        return scores

    return {"logits_processor": [process]}


def module_replaced(model):
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def rotary_replaced(model):
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq.mul_(0.3)


def class_swapped(model):
    for layer in model.model.layers:
        layer.mlp.__class__ = type("Mine", (llama.LlamaMLP,), {"forward": scaled(llama.LlamaMLP.forward)})


def weights_halved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize(
    "change",
    [
        module_replaced, rotary_replaced, class_swapped, weights_halved, own_forward, hook, head, activation,
        setting("self_attn.scaling", 0.9, 0), lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    ],
)  # fmt: skip
def test_what_a_callback_changes_counts_from_the_next_pass_on(change):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    usual = text_of(lookahead.wrap(model, CONFIG))
    expected = text_of(plain, **in_first_token(change, plain))
    assert expected != usual
    assert text_of(model, **in_first_token(change, model)) == expected


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_a_callback_changes_counts_from_the_next_pass_on(family):
    def narrowed(model):
        model.config.sliding_window = 4

    model = tiny_model(family, sliding_window=30)
    plain = copy.deepcopy(model)
    usual = text_of(lookahead.wrap(model, CONFIG))
    expected = text_of(plain, **in_first_token(narrowed, plain))
    assert expected != usual
    assert text_of(model, **in_first_token(narrowed, model)) == expected


def window_of(size):
    return lambda model: setattr(model.config, "sliding_window", size)


def masks_narrowed(model):
    """Let the model see the last three positions alone."""
    module = transformers.models.mistral.modeling_mistral
    usual = module.create_causal_mask

    def narrowed(config, *args, and_mask_function=None, **kwargs):
        return usual(config, *args, and_mask_function=lambda b, h, q, k: k > q - 3, **kwargs)

    CALLBACKS.setattr(module, "create_causal_mask", narrowed)


def masks_the_same(model):
    """Make a change that has no effect on a text."""
    model.config.max_window_layers = 7


CALLBACKS = pytest.MonkeyPatch()
BATCH = torch.tensor([[2, 2, 2, 14, 15, 92], [3, 14, 15, 92, 65, 35], [2, 2, 2, 2, 2, 9], [11, 12, 13, 14, 15, 16]])
ENDS = [1, 40, 41, 42, 43]


@pytest.mark.parametrize(
    ("family", "window", "change"),
    [
        ("mistral", 30, window_of(4)), ("mistral", 8, window_of(30)), ("mistral", None, masks_narrowed),
        ("gemma3_text", 30, window_of(4)), ("gemma3_text", 8, window_of(30)), ("phi3", 30, window_of(4)),
        ("llama", None, masks_the_same), ("gemma3_text", 8, masks_the_same),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("sample", "when"), [(False, 9), (True, 20)])
def test_masks_that_a_callback_changes_are_those_of_a_batch_from_the_next_pass_on(
    family, window, change, sample, when, request
):
    """Sequences end at different times, and the cache that is returned holds what plain decoding leaves."""
    request.addfinalizer(CALLBACKS.undo)
    model = tiny_model(family, sliding_window=window)
    plain = copy.deepcopy(model)
    # Guesses go on in a step in which a callback changes something.
    lookahead.wrap(model, CONFIG if when == 6 or change is masks_the_same else LookaheadConfig(budget=0))
    options = {**GREEDY, "do_sample": sample, "eos_token_id": ENDS, "return_dict_in_generate": True}

    def text_of_batch(one, change):
        one.config.sliding_window = window
        CALLBACKS.undo()

        def process(ids, scores):
            if ids.shape[1] == when:
                change(one)
            return scores

        torch.manual_seed(3)
        output = one.generate(BATCH, attention_mask=(BATCH != 2).long(), logits_processor=[process], **options)
        CALLBACKS.undo()
        return output.sequences, [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    usual, _ = text_of_batch(plain, lambda model: None)
    expected, held = text_of_batch(plain, change)
    has_effect = change is masks_narrowed or window == 30
    assert torch.equal(usual, expected) is not has_effect
    actual, ours = text_of_batch(model, change)
    assert torch.equal(actual, expected)
    columns = expected.shape[1] - 1
    for b, text in enumerate(expected):
        begin = int((BATCH[b] == 2).sum())
        end = next((i for i in range(6, columns) if text[i] in ENDS), columns)
        for theirs, mine in zip(itertools.chain(*held), itertools.chain(*ours), strict=True):
            assert theirs.shape == mine.shape
            shown = slice(max(begin - columns, -theirs.shape[2]), end - columns or None)
            if end > columns - theirs.shape[2]:
                torch.testing.assert_close(theirs[b, :, shown], mine[b, :, shown], rtol=1e-3, atol=1e-3)


class Switch:
    """Hooks that scale the last row of a pass while a flag, kept in one of several places, is up."""

    def __init__(self):
        self.is_up = False
        self.seen = []

    def method(self, module, inputs, output):
        self.seen.append(output.shape)
        return last_row_scaled(output) if self.is_up else output

    def closure(self):
        flags = [False]

        def switched(module, inputs, output):
            return last_row_scaled(output) if flags[0] else output

        return switched, lambda: flags.__setitem__(0, True)

    def default(self):
        flag = {"factor": 0.0}

        def switched(module, inputs, output, *, flag=flag):
            return last_row_scaled(output) if flag["factor"] else output

        return switched, lambda: flag.__setitem__("factor", 2.0)

    def own(self):
        return self.method, lambda: setattr(self, "is_up", True)

    def partial(self):
        return functools.partial(Switch.method, self), lambda: setattr(self, "is_up", True)

    def of_module(self):
        def switched(module, inputs, output):
            return last_row_scaled(output) if SWITCH.is_up else output

        SWITCH.is_up = False
        return switched, lambda: setattr(SWITCH, "is_up", True)


def last_row_scaled(output):
    output = output.clone()
    output[:, -1] *= 3
    return output


SWITCH = types.SimpleNamespace(is_up=False)


@pytest.mark.parametrize("place", ["closure", "default", "own", "partial", "of_module"])
@pytest.mark.parametrize("is_hook", [True, False], ids=["hook", "forward"])
def test_flags_that_code_of_users_hangs_on_are_part_of_the_state(place, is_hook):
    """What acts on the last row of a pass alone gives another text if several rows are verified in one."""
    switched, raise_flag = getattr(Switch(), place)()
    model = tiny_model("llama")
    if is_hook:
        model.model.layers[0].mlp.register_forward_hook(switched)
    else:
        usual_forward = model.model.layers[0].mlp.forward
        model.model.layers[0].mlp.forward = lambda x: switched(None, x, usual_forward(x))
    usual = text_of(model)
    lookahead.wrap(model, CONFIG)
    assert text_of(model) == usual
    raise_flag()
    actual = text_of(model)
    lookahead.unwrap(model)
    assert text_of(model) == actual
    assert actual != usual, "it has an effect"


@pytest.mark.parametrize("what", ["mlp", "turning", "a function of torch.nn"])
def test_code_that_a_callback_replaces_counts_from_the_next_pass_on(what, monkeypatch):
    place, name, code = IN_PLACE[what]
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    text_of(lookahead.wrap(model, CONFIG))
    texts = []
    for one in (plain, model):
        with monkeypatch.context() as patch:
            texts.append(text_of(one, **in_first_token(lambda _, patch=patch: patch.setattr(place, name, code), one)))
    assert texts[0] == texts[1]


def test_callbacks_of_our_own_need_no_look_at_the_model_before_each_pass():
    """A look takes a millisecond. `stream`, chats and the server stop by a criterion of ours."""
    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL)
    model = lookahead.wrap(tiny_model("llama", vocab_size=len(tokenizer)), CONFIG)
    looks, look = [], State.is_current
    with mock.patch.object(State, "is_current", lambda *args: looks.append(args) or look(*args)):
        list(lookahead.stream(model, tokenizer, "def f(", max_new_tokens=5, stop_strings=["no such"]))
        assert len(looks) <= 2
        text_of(model, logits_processor=[lambda ids, scores: scores])
        assert len(looks) > 5


def test_a_callback_that_changes_nothing_leaves_passes_as_they_are():
    model = lookahead.wrap(tiny_model("llama"), CONFIG)
    with mock.patch.object(EagerRunner, "run", side_effect=AssertionError("it runs eagerly")):
        text_of(model, logits_processor=[lambda ids, scores: scores])


def test_the_type_of_a_rotary_embedding_is_its_modules():
    """Its frequencies change at 48 positions, whatever the configuration says by now."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, "rope_theta": 10000.0, **factors}
    model = tiny_model("llama", head_dim=8, rope_parameters=rope)
    model.config.rope_parameters["rope_type"] = "default"
    usual = text_of(model, max_new_tokens=80)
    lookahead.wrap(model, CONFIG)
    assert text_of(model, max_new_tokens=80) == usual


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_fewer_frequencies_than_heads_have_are_refused(is_before):
    """The model's own code cannot turn by them."""
    model = tiny_model("llama")
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:-1].clone()
    with pytest.raises((RuntimeError, lookahead.UnsupportedModelError), match="must match the size"):
        text_of(lookahead.wrap(model, CONFIG) if is_before else model)


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma3_text", "olmo3", "exaone4"])
@pytest.mark.parametrize("which", ["outer", "inner"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_configurations_of_parts_that_differ(family, which, is_before):
    model = tiny_model(family, sliding_window=30)  # more than the probe tries
    plain = copy.deepcopy(model)
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    for one in (model, plain):
        part = one if which == "outer" else one.model
        part.config = copy.deepcopy(part.config)
        part.config.sliding_window = 40
    if is_before:
        lookahead.wrap(model, CONFIG)
    for sample in (False, True):
        texts = []
        for one in (model, plain):
            torch.manual_seed(0)
            texts.append(text_of(one, max_new_tokens=60, do_sample=sample))
        assert texts[0] == texts[1]
    assert "configurations that differ (sliding_window)" in model.lookahead.report()


@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_look_up_of_attention_that_is_replaced(of_class, is_before, monkeypatch):
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    if not is_before:
        text_of(lookahead.wrap(model, CONFIG))
    mine = scaled(transformers.integrations.sdpa_attention.sdpa_attention_forward)
    found = lambda *args: mine  # noqa: E731
    monkeypatch.setattr(AttentionInterface if of_class else registry, "get_interface", found)
    if is_before:
        lookahead.wrap(model, CONFIG)
    assert text_of(model) == text_of(plain)
    assert "passes: fused" not in model.lookahead.report()


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 1.3 if function is F.silu else result


class OfOperations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 1.3 if function is torch.ops.aten.silu.default else result


@pytest.mark.parametrize("mode", [OfFunctions, OfOperations])
def test_modes_that_see_operations(mode):
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    usual = text_of(lookahead.wrap(model, CONFIG))
    with mode():
        expected = text_of(plain)
        assert expected != usual
        assert text_of(model) == expected
    with torch.device("cpu"):
        assert text_of(model) == usual
    assert "passes: fused" in model.lookahead.report()


# -- how often a model is tried ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def passes_counted():
    """Yield a list that grows by one for each pass of the model's own code."""
    count = []

    def counted(function):
        def run(*args, **kwargs):
            count.append(1)
            return function(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for place, name in ((probe, "plain_logits"), (EagerRunner, "run"), (EagerRunner, "prefill")):
            stack.enter_context(mock.patch.object(place, name, counted(getattr(place, name))))
        yield count


@pytest.mark.usefixtures("monkeypatch")  # so that it is probed anew
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrapping_takes_few_passes(dtype):
    with passes_counted() as count:
        lookahead.wrap(tiny_model("llama").to(dtype))
    assert 0 < len(count) <= 20


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of verdicts, which are kept."""
    monkeypatch.setattr(verdicts, "path_of", PATH_OF)
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    (folder := tmp_path / "verdicts").mkdir()
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_verdict_serves_later_processes(family, kept):
    first, second = tiny_model(family), tiny_model(family)
    usual = text_of(copy.deepcopy(first))
    assert text_of(lookahead.wrap(first, CONFIG)) == usual
    assert list(kept.iterdir())
    with mock.patch.object(probe, "plain_logits", side_effect=AssertionError("it is tried")):
        assert text_of(lookahead.wrap(second, CONFIG)) == usual
    assert find_adapter(second) == find_adapter(first)
    assert second.lookahead.passes == first.lookahead.passes


@pytest.mark.parametrize(
    "change",
    [
        in_bfloat16, head, hook, own_forward, row_dependent, causality, setting("self_attn.scaling", 1.0, 0),
        lambda model: model.config.update({"rms_norm_eps": 0.1}), lambda model: model.set_attn_implementation("eager"),
    ],
)  # fmt: skip
def test_a_verdict_is_on_what_it_was_found_for(change, kept):
    lookahead.wrap(tiny_model("llama"), CONFIG)
    other = tiny_model("llama")
    change(other)
    with passes_counted() as count:
        lookahead.wrap(other, CONFIG)
    assert count


def test_a_verdict_knows_where_modules_are(kept):
    """One layer of two is the same to what is listed of modules, whether the other is gone or is the first again."""
    one = tiny_model("llama")
    del one.model.layers[1]
    lookahead.wrap(one, CONFIG)
    twice = tiny_model("llama")
    twice.model.layers[1] = twice.model.layers[0]
    with pytest.raises(lookahead.UnsupportedModelError):
        lookahead.wrap(twice, CONFIG)
    changed = lookahead.wrap(tiny_model("llama"), CONFIG)
    plain = copy.deepcopy(lookahead.unwrap(copy.deepcopy(changed)))
    for model in (changed, plain):
        model.model.layers[1] = model.model.layers[0]
    assert text_of(changed) == text_of(plain)


@pytest.mark.long
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model.layers[0].self_attn])
def test_a_compiled_model_is_tried_itself(part, kept):
    """What is compiled cannot tell that a pass is ours, so it does not look up our attention."""
    lookahead.wrap(tiny_model("llama"), CONFIG)
    before, other = list(kept.iterdir()), tiny_model("llama")
    usual = text_of(copy.deepcopy(other))
    part(other).compile(backend="eager")
    assert text_of(lookahead.wrap(other, CONFIG)) == usual
    assert not find_adapter(other).splits_attention
    assert list(kept.iterdir()) == before


@pytest.fixture
def compiling_begins_anew():
    """And no more than two programs are made of one code."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch.compiler.reset()


def test_a_users_own_compiled_model_is_as_it_was(compiling_begins_anew):
    model, ids = small_llama(), torch.arange(1, 10)[None]
    expected = model(ids, labels=ids)
    lookahead.wrap(model)
    model.generate(ids, max_new_tokens=8, do_sample=False)
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids)
    assert torch.equal(got.logits, expected.logits)
    got.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model.layers[1]], ids=["all", "one layer"])
@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_its_user_compiles_writes_the_same(part, before, compiling_begins_anew):
    """In its programs and, as they soon do not fit, without them."""
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    if before:
        part(model).compile(backend="eager", dynamic=True)
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=3))
    if not before:
        model.generate(ids, **options)
        part(model).compile(backend="eager", dynamic=True)
    assert torch.equal(model.generate(ids, **options), expected)
    assert model.lookahead.last.accepted.total() > 0


def test_verdicts_on_code_of_users_are_not_kept(kept, monkeypatch):
    monkeypatch.setattr(llama.LlamaMLP, "forward", scaled(llama.LlamaMLP.forward))
    lookahead.wrap(tiny_model("llama"), CONFIG)
    model = tiny_model("gpt2")
    hook_on_output = model.transformer.h[0].register_forward_hook(lambda *inputs: None)
    lookahead.wrap(model, CONFIG)
    hook_on_output.remove()
    refused = tiny_model("qwen3")
    row_dependent_head(refused)
    lookahead.wrap(refused, CONFIG)
    assert not list(kept.iterdir())


def row_dependent_head(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * (1 + output.abs().max()))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"can_branch": true}', '{"wrong": 1}', "null"])
def test_a_file_that_is_not_a_verdict_is_found_anew(content, kept):
    model = tiny_model("gpt2")
    usual = text_of(copy.deepcopy(model))
    lookahead.wrap(tiny_model("gpt2"), CONFIG)
    for path in kept.iterdir():
        path.write_text(content)
    assert text_of(lookahead.wrap(model, CONFIG)) == usual


def test_our_own_code_is_part_of_a_verdict(kept, monkeypatch):
    model = tiny_model("llama")
    before = verdicts.path_of(model)
    monkeypatch.setattr(verdicts, "_our_code", lambda: "another")
    assert verdicts.path_of(model) != before


# -- rotary embeddings, and vocabularies -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
@pytest.mark.parametrize("which", ["full_attention", "sliding_attention", "both"])
@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_embeddings_by_type_of_layer(family, kind, which, batch):
    most = 24 if kind == "dynamic" else 64
    changing = {
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0},
    }[kind]
    changing |= {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    usual = {"rope_type": "default", "rope_theta": 1e4}
    types_ = ["sliding_attention", "full_attention"]
    rope = {name: dict(changing if which in (name, "both") else usual) for name in types_}
    model = tiny_model(family, rope_parameters=rope, max_position_embeddings=most)
    plain = copy.deepcopy(model)
    ids = IDS.repeat(batch, 1) + torch.arange(batch)[:, None]
    lookahead.wrap(model, CONFIG)
    for new_tokens in (30, 5, 16):
        options = {**GREEDY, "max_new_tokens": new_tokens}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = plain.generate(ids, **options).tolist()
            except UnboundLocalError:
                pytest.skip("the first versions of transformers 5 fail on longrope by type of layer themselves")
            assert model.generate(ids, **options).tolist() == expected


def test_a_smaller_vocabulary_goes_on_with_a_new_pool():
    model = tiny_model("llama")
    lookahead.wrap(model, CONFIG)
    text_of(model)
    pool = model.lookahead.pool
    assert pool.largest_token >= 93
    model.resize_token_embeddings(93)
    plain = lookahead.unwrap(copy.deepcopy(model))
    assert text_of(model) == text_of(plain)
    assert model.lookahead.pool is not pool
    model.resize_token_embeddings(110)
    assert text_of(model) == text_of(lookahead.unwrap(copy.deepcopy(model)))
    mine = NgramPool()
    mine.learn(list(range(100)), Origin.TEXT)
    lookahead.wrap(model, pool=mine)
    text_of(model)
    model.resize_token_embeddings(93)
    with pytest.raises(ValueError, match=r"the pool holds token .* but the model knows 93 tokens.*give one"):
        text_of(model)
    assert model.lookahead.pool is mine


def test_what_python_adds_to_a_class_is_no_change():
    """It notes the slots of a class when an instance is first copied."""

    class Copied(llama.LlamaMLP):
        pass

    model = tiny_model("llama")
    model.model.layers[0].mlp.__class__ = Copied
    before = state_of(model)
    copyreg._slotnames(Copied)  # as copy.copy does
    assert "__slotnames__" in vars(Copied)
    assert before.is_current(model)
    Copied.forward = lambda self, x: x
    assert not before.is_current(model)
