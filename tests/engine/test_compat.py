"""What the package uses of other libraries that they may move: each test names the version in which one did."""

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.generation import StopStringCriteria
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo import tiny_model

import lookahead
from lookahead import UnsupportedModelError, compat, wrapping
from lookahead.compat import copies, loops, mtp, operators, quantized, versions
from lookahead.compat.stop_strings import tokens_that_end_stop_strings
from lookahead.models.refused import own_cache_argument

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
IDS = torch.tensor([[5, 6, 7, 8]])
LOOPS = ("_sample", "_beam_search", "_assisted_decoding")  # generate() calls them by name; `wrapping` overrides them


def moved(name: str, library: str) -> str:
    return f"{library} {version(library)} has moved {name}: lookahead/compat has to follow"


@pytest.fixture
def model():
    return tiny_model("llama")


def seen_in_loop(model, monkeypatch, **options) -> dict:
    """What generate() hands to its sampling loop."""
    seen = {}

    def loop(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.update(kwargs, generation=generation_config)
        return input_ids

    monkeypatch.setattr(type(model), "_sample", loop)
    model.generate(IDS, max_new_tokens=2, **options)
    return seen


def test_tokens_that_end_stop_strings():
    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL)
    criterion = StopStringCriteria(tokenizer, ["):\n", "self"])
    found = tokens_that_end_stop_strings(criterion)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    can_end = {token for token, text in texts.items() if text.startswith((":\n", "\n", "elf", "lf", "f"))}
    can_end |= {token for token, text in texts.items() if "self" in text or "):\n" in text}
    assert found == can_end, moved("StopStringCriteria.embedding_vec", "transformers")
    criterion.target_lens[0] = 0
    assert tokens_that_end_stop_strings(criterion) is None


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name):
    assert callable(getattr(GenerationMixin, name, None)), moved(f"GenerationMixin.{name}", "transformers")
    arguments = ["self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"]
    assert list(inspect.signature(getattr(GenerationMixin, name)).parameters)[:5] == arguments, moved(
        f"arguments of GenerationMixin.{name}", "transformers"
    )
    assert name in vars(wrapping.LookaheadMixin)


def test_generate_calls_its_loop_by_name(model, monkeypatch):
    assert loops.own_loop(model) is type(model)._sample
    assert "generation" in seen_in_loop(model, monkeypatch), moved(
        "the call of GenerationMixin._sample", "transformers"
    )


def test_pad_token(model, monkeypatch):
    generation = seen_in_loop(model, monkeypatch, pad_token_id=3, eos_token_id=4)["generation"]
    assert compat.pad_token(generation) == 3, moved("GenerationConfig._pad_token_tensor", "transformers")


def test_length_of_a_mask_that_was_dropped(model, monkeypatch):
    seen = seen_in_loop(model, monkeypatch, attention_mask=torch.ones_like(IDS))
    length = compat.dropped_mask_length(seen["generation"])
    is_told = length == 4 or seen.get("attention_mask") is not None
    assert is_told, moved("GenerationConfig._mask_length", "transformers")
    assert compat.dropped_mask_length(GenerationConfig()) is None


def test_caches_of_callers(model, monkeypatch):
    cache = model(IDS, use_cache=True)[compat.CACHE]
    seen = seen_in_loop(model, monkeypatch, past_key_values=cache)  # the name of old, which all versions take
    assert seen[compat.CACHE] is cache
    assert compat.is_callers_own(cache), moved("Cache._is_user_defined", "transformers")
    assert not compat.is_callers_own(seen_in_loop(model, monkeypatch).get(compat.CACHE))
    assert not compat.is_callers_own(None)


def test_every_model_says_what_it_calls_its_cache():
    unknown = set()
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        of_class = getattr(transformers, name)
        if compat.cache_argument(of_class) is None and own_cache_argument(of_class) is None:
            unknown.add(name)
    # The first keeps no cache, and the others read their main model's.
    known = {"OpenAIGPTLMHeadModel", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"}
    assert unknown <= known, moved(f"the cache among the arguments of {unknown - known}", "transformers")


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({}, ""),
        ({"transformers": "5.24.0", "torch": "2.11.0+cpu"}, ""),
        ({"transformers": "5.24.1"}, "`pip install transformers==5.24.0`"),
        ({"transformers": "5.100.0.dev0", "torch": "2.16.0+cu132"}, "`pip install torch==2.15.0 transformers==5.24.0`"),
    ],
)
def test_versions_newer_than_those_tested_are_named(monkeypatch, here, said):
    for name in versions.NEWEST_TESTED:  # in sys.modules, where transformers replaces itself when it imports a model
        monkeypatch.setattr(sys.modules[name], "__version__", here.get(name, "1.0"))
    told = versions.newer_than_tested()
    assert said in told
    assert bool(told) == bool(said)
    assert all(version in told for version in here.values() if said and version > "5.24.0")


def test_the_newest_version_tested_is_the_one_that_make_test_installs():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", CONSTRAINTS.read_text(), re.MULTILINE))
    assert versions.NEWEST_TESTED["transformers"] == pinned["transformers"]


@pytest.mark.parametrize("newer", [False, True])
def test_three_causes_against_a_cache_have_three_messages(model, monkeypatch, newer):
    """An argument that is not known, a cache of the model's own, a configuration that does not tell."""
    version = "99.0.0" if newer else versions.NEWEST_TESTED["transformers"]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    said = []
    for cause in range(3):
        model = tiny_model("llama")
        if cause == 0:
            model.forward = lambda input_ids=None, kv_store=None, use_cache=None: None
        elif cause == 1:
            model.forward = lambda input_ids=None, state=None, use_cache=None: None
        else:
            model.config.layer_types = ["of another kind"] * model.config.num_hidden_layers
        with pytest.raises(UnsupportedModelError) as error:
            lookahead.wrap(model)
        said.append(str(error.value))
    assert "its forward takes none of the caches that lookahead knows" in said[0]
    assert "layers use a cache of their own (state)" in said[1]
    assert "does not say what its layers cache" in said[2]
    assert all(("`pip install transformers==" in message) == newer for message in said)


def test_attention(model):
    assert compat.attention_implementation(model.config) == "sdpa", moved("config._attn_implementation", "transformers")
    model.set_attn_implementation("eager")
    assert compat.attention_implementation(model.config) == "eager"
    assert compat.looks_up_attention(model), moved("PreTrainedModel._supports_attention_backend", "transformers")
    assert not compat.looks_up_attention(tiny_model("bloom"))


@pytest.mark.long
def test_registered_attention():
    """In a process of its own, where nothing has been registered."""
    code = "from lookahead.compat import registered_attention; print(registered_attention('sdpa').__name__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "sdpa_attention_forward", moved("ALL_ATTENTION_FUNCTIONS", "transformers")
    assert compat.registered_attention("eager") is None


@pytest.mark.long
def test_attention_is_registered_in_place_of_transformers_own():
    code = (
        "from lookahead import compat; mine = lambda *_: None; compat.register_attention(mine); "
        "assert compat.registered_attention('sdpa') is mine; compat.register_attention(print); "
        "assert compat.registered_attention('sdpa') is mine"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, moved("AttentionInterface.register", "transformers") + ended.stderr


def test_registered_masks():
    assert compat.registered_mask("sdpa").__name__ == "sdpa_mask", moved("ALL_MASK_ATTENTION_FUNCTIONS", "transformers")
    assert compat.registered_mask("no such attention") is None
    assert compat.registered_mask(None) is None


def test_registered_experts():
    config = LlamaConfig()
    config._experts_implementation = "eager"
    assert compat.registered_experts(config) is None
    config._experts_implementation = "grouped_mm"
    function = compat.registered_experts(config)
    assert function.__name__ == "grouped_mm_experts_forward", moved("ALL_EXPERTS_FUNCTIONS", "transformers")


def test_settings():
    one, other = LlamaConfig(hidden_size=64), LlamaConfig(hidden_size=64)
    one._name_or_path, other._name_or_path = "here", "there"
    assert compat.settings_of(one) == compat.settings_of(other), moved("config._name_or_path", "transformers")
    assert compat.settings_of(one) != compat.settings_of(LlamaConfig(hidden_size=128))


def test_hooks_of_accelerate(model):
    assert compat.execution_device(model.lm_head) is None
    accelerate.cpu_offload(model, torch.device("cpu"))
    device = compat.execution_device(model.lm_head)
    assert device is not None, moved("module._hf_hook", "accelerate")
    assert torch.device(device).type == "cpu", moved("execution_device", "accelerate")


def test_what_a_module_consists_of():
    layer = nn.BatchNorm1d(2)
    layer.part = nn.Linear(2, 2)
    hook = layer.register_forward_hook(lambda *_: None)
    own, (modules, hooks, _), (parameters, buffers) = compat.dictionaries_of(layer)
    assert own is vars(layer)
    assert (list(modules), len(hooks)) == (["part"], 1), moved("Module._modules, _forward_hooks", "torch")
    assert (list(parameters), "running_mean" in buffers) == (["weight", "bias"], True), moved("_parameters", "torch")
    hook.remove()
    for register in (module_hooks.register_module_forward_hook, module_hooks.register_module_forward_pre_hook):
        assert compat.global_hooks_of_users() == []
        hook = register(print)
        assert compat.global_hooks_of_users() == [print], moved("_global_forward_hooks", "torch")
        hook.remove()


def test_what_a_quantized_tensor_says():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    layer, other = nn.Sequential(nn.Linear(32, 8)), nn.Sequential(nn.Linear(32, 8))
    quantize_(layer, Int8WeightOnlyConfig())
    quantize_(other, Int8DynamicActivationInt8WeightConfig())
    said = [quantized.quantization_of(one[0].weight) for one in (layer, other)]
    assert said[0] != said[1], moved("__tensor_flatten__", "torch")


def test_compiled_modules():
    layer = nn.Linear(2, 2)
    assert not compat.is_compiled(layer)
    layer.compile()
    assert compat.is_compiled(layer), moved("Module._compiled_call_impl", "torch")
    assert compat.is_compiled_wrapper(torch.compile(nn.Linear(2, 2))), moved("OptimizedModule", "torch")
    assert not compat.is_compiled_wrapper(layer)


def test_hooks(model):
    model(IDS, output_hidden_states=True)  # transformers adds hooks of its own
    assert not any(compat.hooks_of_users(module) for module in model.modules()), moved(
        "utils.output_capturing", "transformers"
    )
    layer = nn.Linear(2, 2)
    before = layer.register_forward_pre_hook(lambda *_: None)
    assert len(compat.hooks_of_users(layer)) == 1, moved("_forward_pre_hooks", "torch")
    before.remove()
    assert not compat.hooks_take_keywords(layer)
    before = layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert compat.hooks_take_keywords(layer), moved("_forward_pre_hooks_with_kwargs", "torch")
    before.remove()
    layer.register_forward_hook(lambda *_: None)
    assert len(compat.hooks_of_users(layer)) == 1, moved("Module._forward_hooks", "torch")


def test_copies_of_modules(model):
    """A copy has its own children and shares everything else; it does not run the original's compiled call."""
    model.model.compile(backend="eager")
    head = nn.Linear(1, 1)
    copied = copies.copy_of_module(model, {"lm_head": head})
    assert copied.lm_head is head, moved("Module._modules", "torch")
    assert model.lm_head is not head
    assert copied.model is model.model
    assert not compat.is_compiled(copies.copy_of_module(model.model, {})), moved("Module.__getstate__", "torch")


def test_multi_token_prediction():
    """test_mtp.py reads layers in each layout."""
    for name in ("from_pretrained", "tie_with_main_model", "_project_to_logits"):
        assert callable(getattr(MtpModel, name, None)), moved(f"MtpModel.{name}", "transformers")
    patterns = "_keys_to_ignore_on_load_unexpected"
    assert hasattr(PreTrainedModel, patterns), moved(f"PreTrainedModel.{patterns}", "transformers")
    arguments = inspect.signature(inspect.unwrap(MtpLayer.forward)).parameters
    assert compat.CACHE in arguments, moved("arguments of MtpLayer", "transformers")
    assert mtp.get_model_conversion_mapping(tiny_model("glm4_moe")), moved("conversion mapping", "transformers")


def test_plain_tensors():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(32, 32)
    assert compat.is_plain(layer.weight)
    quantize_(layer, Int8WeightOnlyConfig())
    assert not compat.is_plain(layer.weight), moved("is_traceable_wrapper_subclass", "torch")


def test_weights_in_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(32, 8)
    weight = layer.weight.detach().clone()
    assert quantized.int8_weight(layer.weight) is None
    quantize_(layer, Int8WeightOnlyConfig())
    found = quantized.int8_weight(layer.weight)
    assert found is not None, moved("Int8Tensor.qdata and .scale", "torchao")
    numbers, scales = found
    assert numbers.dtype == torch.int8
    assert ((numbers * scales[:, None] - weight).abs() <= 0.51 * scales[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_int8_by_groups(dtype):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    for config in (
        Int8WeightOnlyConfig(granularity=PerGroup(16)),
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
    ):
        layer = nn.Linear(64, 8, dtype=dtype)
        quantize_(layer, config)
        found = quantized.int8_weight(layer.weight)
        assert found is not None, moved(f"{type(layer.weight).__name__}.qdata and .scale", "torchao")
        numbers, scales = found
        assert (numbers.dtype, scales.shape) == (torch.int8, (8, 4))
        weight = (numbers.unflatten(1, (4, 16)) * scales.float()[..., None]).flatten(1).to(dtype)
        assert torch.equal(weight, layer.weight.dequantize()), "torchao multiplies with other weights"
    asymmetric = IntxWeightOnlyConfig(granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC)
    layer = nn.Linear(64, 8, dtype=dtype)
    quantize_(layer, asymmetric)
    assert quantized.int8_weight(layer.weight) is None


def test_versions_of_tensors():
    tensor = torch.zeros(2)
    before = compat.VERSION(tensor)
    tensor.add_(1)
    assert compat.VERSION(tensor) > before, moved("Tensor._version", "torch")


def test_tensors_of_modules():
    layer = nn.Linear(2, 3, bias=False)
    layer.register_buffer("scale", torch.ones(1))
    layer.factor = torch.ones(1)
    found = {name: (place, tensor) for place, name, tensor in compat.tensors_of([layer])}
    assert set(found) == {"weight", "scale", "factor"}, moved("Module._parameters and ._buffers", "torch")
    layer.weight = nn.Parameter(torch.zeros(2, 3))
    assert found["weight"][0]["weight"] is layer.weight is not found["weight"][1]


def test_cpu_capability(monkeypatch):
    known = {"DEFAULT", "AVX2", "AVX512", "AVX512_BF16", "AVX512_AMX"}
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        functions = "_is_avx512_bf16_supported", "_is_amx_tile_supported", "_init_amx"
        for function, capability in zip(functions, ["AVX512", "AVX512_BF16", "AVX512_BF16"], strict=True):
            assert hasattr(torch.cpu, function), moved(f"torch.cpu.{function}", "torch")
            monkeypatch.setattr(torch.cpu, function, lambda: False)
            assert compat.cpu_capability() == capability
            monkeypatch.setattr(torch.cpu, function, lambda: True)
        assert compat.cpu_capability() == "AVX512_AMX"
        for most, capability in (("avx512_core", "AVX512"), ("AVX512_CORE_BF16", "AVX512_BF16")):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
            assert compat.cpu_capability() == capability
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        monkeypatch.delattr(torch.cpu, "_init_amx")
        assert compat.cpu_capability() == "AVX512_BF16"
    assert compat.cpu_capability() in known | {torch.backends.cpu.get_cpu_capability()}
    monkeypatch.delattr(torch.backends.cpu, "get_cpu_capability")
    assert compat.cpu_capability() == "DEFAULT"


def test_flash_attention():
    query, key, value = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    mask = torch.randn(1, 1, 3, 5)
    out, log_sum = operators.flash_attention(query, key, value, mask, 0.5)
    scores = query @ key.transpose(-1, -2) * 0.5 + mask
    torch.testing.assert_close(out, scores.softmax(-1) @ value, msg=lambda m: moved("flash attention", "torch") + m)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1), msg=lambda m: moved("its log-sum-exp", "torch") + m)


def test_nothing_else_uses_private_names_of_libraries():
    home = Path(compat.__file__).parent
    paths = [path for path in home.parent.rglob("*.py") if path.parent != home]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    used, ours = {}, set(LOOPS)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.fullmatch("_[a-z].*", node.attr):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                else:
                    used.setdefault(node.attr, f"{path.name}, line {node.lineno}")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Name)):
                ours.add(getattr(node, "name", None) or node.id)
    foreign = {name: place for name, place in used.items() if name not in ours}
    assert not foreign, "private names of other libraries belong into lookahead/compat"


def test_methods_of_registries_and_modes(monkeypatch):
    assert compat.own_methods_of_registries() == []
    monkeypatch.setattr(compat.ALL_ATTENTION_FUNCTIONS, "get_interface", print)
    assert compat.own_methods_of_registries() == [("get_interface", print)]
    assert compat.modes_of_users() == []
    with torch.device("cpu"), torch.overrides.TorchFunctionMode(), torch.utils._python_dispatch.TorchDispatchMode():
        assert compat.modes_of_users() == ["TorchFunctionMode", "TorchDispatchMode"]
