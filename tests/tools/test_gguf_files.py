"""Files whose weights stay in their blocks: the model is the one that transformers unpacks, to the last bit."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_blocks import HALVES, Kind, random_blocks
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from zoo import tiny_model

import lookahead
from lookahead.compat import gguf as compat
from lookahead.cpu import native
from lookahead.cpu.gguf import BlocksEmbedding, BlocksExperts, BlocksLinear, unpacked
from lookahead.cpu.products import Format
from lookahead.passes.packed import packed_of

KINDS = [Kind[name] for name in HALVES]
SIZE_OF = {kind: gguf.GGML_QUANT_SIZES[kind][0] for kind in Kind}
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"]
SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""What whole blocks divide."""
IN_FILES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window", "vocab_size": "vocab_size", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}  # fmt: skip
ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "minimax_m2": "minimax-m2"}
MIXTURES = {
    "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"moe_intermediate_size": 768, "head_dim": 64},
    "minimax_m2": {"head_dim": 64},
}
"""With the widths of experts that transformers takes them to have, whatever the file says."""


def as_in_files(parameter, weight):
    """Yield the tensors that a parameter is in a file, by the names that gguf knows."""
    if "experts.gate_up_proj" in parameter:
        for part, numbers in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
            yield parameter.replace("gate_up_proj", f"{part}_proj.weight"), numbers
    elif "experts.down_proj" in parameter:
        yield f"{parameter}.weight", weight
    elif "shared_expert_gate" in parameter:
        yield parameter, weight[0]
    elif "e_score_correction" in parameter:
        yield parameter.replace("_correction_bias", "_correction.bias"), weight
    else:
        yield parameter, 8 * weight if parameter.endswith("mlp.gate.weight") else weight  # experts differ more


def write(path, model, kinds, seed=0):
    """Write a tiny model to a file: matrices in random blocks of these kinds in turn, everything else unchanged."""
    config, random = model.config, np.random.default_rng(seed)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type.removesuffix("_text"))
    writer = gguf.GGUFWriter(path, architecture)
    for name, in_file in IN_FILES.items():
        if (value := getattr(config, name, None)) is not None:
            kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
            writer.add_key_value(f"{architecture}.{in_file}", value, kind)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, matrices = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), 0
    for parameter, weight in (found for of_model in model.state_dict().items() for found in as_in_files(*of_model)):
        name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None or (parameter == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if weight.ndim > 1 and "gate_inp" not in name:
            *_, inputs = weight.shape
            kind = next(kind for kind in (*kinds[matrices % len(kinds) :], Kind.Q8_0) if inputs % SIZE_OF[kind] == 0)
            blocks = random_blocks(kind, weight.numel() // inputs, inputs, random, 0.05)
            writer.add_tensor(name, blocks.reshape(*weight.shape[:-1], -1), raw_dtype=kind)
            matrices += 1
        else:
            writer.add_tensor(name, weight.numpy() + ("gemma" in config.model_type and "norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_transformers(path):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def texts(model):
    found = []
    for i, length in enumerate((1, 9, 70)):
        prompt = torch.arange(3, 3 + length)[None] % 90
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            torch.manual_seed(i)
            found.append(model.generate(prompt, max_new_tokens=24, **options).tolist())
    return found


def weights_of(model):
    """All weights by name, unpacked."""
    found = {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    for name, module in model.named_modules():
        if isinstance(module, (BlocksLinear, BlocksEmbedding)):
            found[f"{name}.weight"] = unpacked(module.weight, module.format)
        if isinstance(module, BlocksExperts):
            gate, up, down = (
                torch.stack([unpacked(one.weight, one.format) for one in module.linears(f"{part}_proj")])
                for part in ("gate", "up", "down")
            )
            found |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    return found


@pytest.mark.long
@settings(max_examples=10, deadline=None, phases=set(Phase) - {Phase.shrink})  # an example takes a second
@given(
    family=st.sampled_from(FAMILIES),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (4, 4), (4, 1)]),
    is_tied=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_model_is_the_one_that_transformers_unpacks(tmp_path_factory, family, kinds, heads, is_tied, seed):
    note(f"{family=} {kinds=} {heads=} {is_tied=} {seed=}")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    of_heads = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    of_heads["head_dim"] = 128 if family == "qwen3" else 64  # what transformers takes it for
    tiny = tiny_model(family, **SIZES, **of_heads, tie_word_embeddings=is_tied or family == "gemma2")
    write(path, tiny, kinds, seed)
    plain, model = by_transformers(path), lookahead.load_gguf(path)
    expected, found = weights_of(plain), weights_of(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    settings = [one.config.to_dict() | {"quantization_config": None, "_name_or_path": ""} for one in (plain, model)]
    assert settings[0] == settings[1]
    assert plain.generation_config.to_dict() == model.generation_config.to_dict()
    wanted = texts(plain)
    assert texts(model) == wanted
    lookahead.wrap(model)
    assert texts(model) == wanted
    assert family == "gemma2" or "passes: fused" in model.lookahead.report()  # its passes need eager attention


def mixture(family):
    return tiny_model(family, **{**SIZES, "num_hidden_layers": 2, "n_shared_experts": None, **MIXTURES[family]})


@pytest.mark.parametrize("family", MIXTURES)
@settings(max_examples=3, deadline=None, phases=set(Phase) - {Phase.shrink})
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_experts_stay_in_blocks(tmp_path_factory, family, kinds, seed):
    note(f"{family=} {kinds=} {seed=}")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, mixture(family), kinds, seed)
    plain, model = by_transformers(path), lookahead.load_gguf(path)
    experts = [module for module in model.modules() if isinstance(module, BlocksExperts)]
    assert len(experts) == 2
    places = {getattr(one, name).untyped_storage().data_ptr() for one in experts for name in one.formats}
    assert len(places) == 1, "they lie in the file"
    expected, found = weights_of(plain), weights_of(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    wanted = texts(plain)
    assert texts(model) == wanted
    lookahead.wrap(model)
    assert texts(model) == wanted
    assert "passes: fused" in model.lookahead.report()
    assert packed_of(model).copied_bytes == 0


def test_weights_stay_where_the_file_is(tmp_path):
    write(tmp_path / "tiny.gguf", tiny_model("qwen3", **SIZES, head_dim=128), KINDS)
    model = lookahead.load_gguf(tmp_path / "tiny.gguf")
    weights = [module.weight for module in model.modules() if isinstance(module, (BlocksLinear, BlocksEmbedding))]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    lookahead.wrap(model).generate(torch.arange(3, 9)[None], max_new_tokens=8)
    assert packed_of(model).copied_bytes == 0
    assert "MB read from the blocks of a GGUF file" in model.lookahead.report()


def test_blocks_of_other_kinds_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setitem(HALVES, "TQ2_0", [64])
    write(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), [Kind.TQ2_0])
    model = lookahead.load_gguf(tmp_path / "tiny.gguf")
    assert not any(isinstance(module, (BlocksLinear, BlocksEmbedding)) for module in model.modules())


@pytest.mark.parametrize("reason", ["no C++", "rules of its own"])
def test_what_cannot_be_kept_is_loaded_by_transformers(tmp_path, monkeypatch, reason):
    write(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), [Kind.Q8_0])
    if reason == "no C++":
        monkeypatch.setattr(native, "why_missing", lambda: "there is none")
    else:
        monkeypatch.setattr("lookahead.tools.gguf.has_conversions", lambda architecture: True)
    model = lookahead.load_gguf(tmp_path / "tiny.gguf")
    assert type(model.lm_head) is torch.nn.Linear


def test_layers_in_blocks_compute_gradients_and_other_dtypes(tmp_path):
    torch.manual_seed(0)
    blocks = torch.from_numpy(random_blocks(Kind.Q4_K, 30, 512, np.random.default_rng(0), 0.1))
    layer = BlocksLinear(torch.nn.Parameter(blocks, requires_grad=False), Format.Q4_K)
    weight, input = unpacked(blocks, layer.format), torch.randn(3, 512, requires_grad=True)
    layer(input).sum().backward()
    torch.testing.assert_close(input.grad, weight.sum(0).expand(3, -1))
    with torch.no_grad():
        torch.testing.assert_close(layer(input), input @ weight.T)
        assert torch.equal(layer(input.bfloat16()), input.bfloat16() @ weight.bfloat16().T)


def test_a_torn_file_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, tiny_model("llama", **SIZES), [Kind.Q8_0])
    content = path.read_bytes()
    for length in (0, 3, 30, 200, len(content) // 2, len(content) - 40):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"truncated|not a GGUF file|empty"):
            lookahead.load_gguf(path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_saved_model_is_the_one_that_transformers_unpacks(tmp_path, family):
    write(tmp_path / "tiny.gguf", mixture(family) if family in MIXTURES else tiny_model(family, **SIZES), KINDS)
    plain, model = by_transformers(tmp_path / "tiny.gguf"), lookahead.load_gguf(tmp_path / "tiny.gguf")
    lookahead.wrap(model).save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, weight in plain.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weight), name
    model.load_state_dict(plain.state_dict())
    assert texts(model) == texts(plain)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain.lm_head.weight[3, 5] += 1
    with pytest.raises(RuntimeError, match=r"lm_head.weight is in blocks of .*, which cannot hold these numbers"):
        model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_moe"])
def test_a_model_in_blocks_is_cast_as_any_other(tmp_path, family, dtype):
    tiny = mixture(family) if family in MIXTURES else tiny_model(family, **SIZES, head_dim=64)
    write(tmp_path / "tiny.gguf", tiny, KINDS)
    plain, model = by_transformers(tmp_path / "tiny.gguf"), lookahead.load_gguf(tmp_path / "tiny.gguf")
    wrapped, ids = lookahead.wrap(lookahead.load_gguf(tmp_path / "tiny.gguf")), torch.arange(3, 30)[None]
    wrapped.generate(ids, max_new_tokens=4)
    if family in MIXTURES:
        plain.set_experts_implementation("eager")  # the other one takes no float64
    with torch.no_grad():
        expected, found = plain.to(dtype)(ids).logits, model.to(dtype)(ids).logits
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    written = [one.to(dtype).generate(ids, max_new_tokens=12).tolist() for one in (plain, wrapped)]
    assert written[0] == written[1]


def text(value):
    return struct.pack("<Q", len(value)) + value


def setting(name, kind, form, *values):
    return text(name) + struct.pack("<I" + form, kind, *values)


ARCHITECTURE = setting(b"general.architecture", 8, "Q5s", 5, b"llama")
NESTED = struct.pack("<IQ", 9, 1) * 9999
SMALL = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "vocab_size": 20,
    "attention.head_count": 2, "attention.head_count_kv": 2,
}  # fmt: skip


def of_llama(**changed):
    return [setting(f"llama.{name}".encode(), 4, "I", value) for name, value in (SMALL | changed).items()]


def tensor_of(shape, kind=0, offset=0):
    return text(b"token_embd.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ([setting(b"x", 9, "IQ", 12, 2**64 - 1)], [], "truncated"),
        ([setting(b"x", 9, "IQ", 7, 2**63 - 1), *of_llama()], [], "truncated"),
        ([setting(b"x", 9, "IQ", 9, 1) + NESTED], [], "truncated"),
        ([setting(b"general.alignment", 4, "I", 0)], [], "the alignment 0"),
        ([setting(b"general.alignment", 5, "i", -32)], [], "the alignment -32"),
        ([setting(b"general.alignment", 8, "Q1s", 1, b"x")], [], "the alignment 'x'"),
        ([setting(b"general.architecture", 4, "I", 7)], [], "the architecture 7"),
        (of_llama(), [tensor_of([])], "of F32 and shape"),
        (of_llama(), [tensor_of([1] * 99)], "of F32 and shape"),
        (of_llama(), [tensor_of([0, 20])], "of F32 and shape"),
        (of_llama(), [tensor_of([33, 20], kind=8)], "of Q8_0 and shape"),
        (of_llama(), [tensor_of([32, 20], kind=999)], "type 999, which the package gguf does not know"),
        (of_llama(), [tensor_of([32, 20], offset=2**64 - 1)], "truncated"),
        (of_llama(), [tensor_of([2**32, 2**32])], "truncated"),
        ([], [], "0 tensors for 32 layers"),
        (of_llama(block_count=2**31), [tensor_of([32, 20])], "1 tensors for 2147483648 layers"),
        (of_llama(embedding_length=0), [tensor_of([32, 20])], "cannot make a model from the metadata"),
        (of_llama(**{"attention.head_count": 0}), [tensor_of([32, 20])], "cannot make a model from the metadata"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path, settings, tensors, reason):
    path, settings = tmp_path / "tiny.gguf", [ARCHITECTURE, *settings]
    start = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(settings))
    path.write_bytes(start + b"".join([*settings, *tensors]) + bytes(9999))
    with pytest.raises(ValueError, match=reason):
        lookahead.load_gguf(path)


def test_metadata_are_read_once(tmp_path, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as loading

    calls, read = [], loading.load_gguf_checkpoint
    monkeypatch.setattr(loading, "load_gguf_checkpoint", lambda path, *more: calls.append(path) or read(path, *more))
    path = tmp_path / "tiny.gguf"
    write(path, tiny_model("llama", **SIZES), [Kind.Q8_0])
    with compat.metadata_read_once():
        first, second = compat.config_of(str(path)), compat.config_of(str(path))
    assert first == second
    assert first is not second
    assert len(calls) == 1
    assert compat.config_of(str(path)) == first
    assert len(calls) == 2
