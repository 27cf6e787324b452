"""What the probes find out about a model, and what becomes of the calls of models that are out of the ordinary."""

import copy
import re
import warnings
from types import MappingProxyType

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CsmConfig,
    CsmForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from zoo import COMMON, SETTINGS, tiny_model

import lookahead
from bench.tiny_models import random_model, tiny_config, tiny_settings
from lookahead import LookaheadConfig, UnsupportedModelError, compat
from lookahead.engine import fallback, limits
from lookahead.models.layers import read_config
from lookahead.passes import probe
from lookahead.passes.capabilities import can_batch, find_adapter
from lookahead.passes.conditions import same_without_cache
from lookahead.passes.runner import EagerRunner

IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
GREEDY = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
ENCODERS = ["bert", "megatron-bert", "rembert", "roberta", "electra", "big_bird"]


def encoder(model_type: str, **settings):
    """As it comes from its configuration, so not causal."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, "pad_token_id": 0, "embedding_size": 32, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6)
    return model


def outcome(model, *args, **options):
    """Return the text, or the error."""
    try:
        return model.generate(*args, **options).tolist()
    except Exception as error:
        return type(error), str(error)


# -- causality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 12])
@pytest.mark.parametrize("model_type", ENCODERS)
def test_models_that_are_not_causal(model_type, budget):
    """Guesses stay unseen by those before them, also where they are a single chain."""
    model = encoder(model_type)
    prompts = [IDS, torch.randint(3, 90, (1, 9)), torch.randint(3, 90, (1, 2))]
    expected = [model.generate(ids, **GREEDY).tolist() for ids in prompts]
    lookahead.wrap(model, LookaheadConfig(budget=budget, window_size=0))
    assert [model.generate(ids, **GREEDY).tolist() for ids in prompts] == expected
    assert model.lookahead.stats.steps > 0


@pytest.mark.parametrize("model_type", ENCODERS)
def test_models_that_are_not_causal_without_a_cache(model_type):
    """Recomputed in each pass, a prompt sees what follows it: another text, which is left to the model."""
    model = encoder(model_type)
    assert not same_without_cache(model, find_adapter(model))
    expected = model.generate(IDS, use_cache=False, **GREEDY).tolist()
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert model.generate(IDS, use_cache=False, **GREEDY).tolist() == expected


@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_models_that_are_causal_say_the_same_without_a_cache(model_type):
    model = tiny_model(model_type)
    assert same_without_cache(model, find_adapter(model))


def test_chains_of_a_model_that_is_not_causal_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"later tokens change .*is_decoder=True"):
        lookahead.wrap(encoder("roformer"))
    lookahead.wrap(encoder("roformer", is_decoder=True))


# -- rows that depend on other rows -----------------------------------------------------------------------------------


def quantized(how: str, model_type: str = "llama", seed: int = 3):
    model = tiny_model(model_type, seed=seed, hidden_size=256, intermediate_size=256, num_hidden_layers=4)
    if how == "torchao":
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(("model_type", "seed"), [("llama", 0), ("mixtral", 1), ("qwen3", 2)])
@pytest.mark.parametrize("how", ["torch.ao", "torchao"])
def test_quantized_activations_are_left_to_the_model(how, model_type, seed):
    model = quantized(how, model_type, seed)
    expected = model.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(model)
    assert model.lookahead.config.allow_row_dependent is False
    with pytest.warns(UserWarning, match=r"other rows of a pass.*allow_row_dependent=True") as caught:
        actual = [model.generate(IDS, **GREEDY).tolist() for _ in range(2)]
    assert actual == [expected, expected]
    assert len([w for w in caught if "lookahead" in str(w.message)]) == 1
    assert model.lookahead.stats.steps == 0
    lookahead.wrap(model, LookaheadConfig(allow_row_dependent=True))
    assert model.generate(IDS, **GREEDY).shape == (1, IDS.shape[1] + 40)
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize("model_type", sorted(SETTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_dependence(model_type, dtype):
    for seed in range(3):
        model = tiny_model(model_type, seed=seed).to(dtype)
        assert probe.row_dependence(model, read_config(model)) == 0


@pytest.mark.parametrize("model_type", ["zamba2", "nemotron_h"])
def test_scans_are_not_taken_for_dependence(model_type):
    """Over several rows they round by more than attention does."""
    for window in (8, 40):
        assert find_adapter(random_model(tiny_config(model_type, window))).row_dependence == 0


def sharp(model_type: str, by: float):
    """A model whose attention is so sharp that it makes rounding ten times what is usual, as in some trained models."""
    model = tiny_model(model_type)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.add_(by)
    return model


SHARP = [("gemma3_text", 23.0), ("gemma3_text", 99.0), ("qwen3", 23.0)]


@pytest.mark.parametrize(("model_type", "by"), SHARP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_make_rounding_grow(model_type, by, dtype):
    model = sharp(model_type, by).to(dtype)
    adapter = find_adapter(model)
    assert (adapter.can_branch, adapter.splits_attention, adapter.row_dependence) == (True, True, 0)
    assert can_batch(model, adapter)
    if dtype == torch.float32:
        expected = model.generate(IDS.expand(2, -1), **GREEDY)
        assert lookahead.wrap(model).generate(IDS.expand(2, -1), **GREEDY).tolist() == expected.tolist()
        assert not model.lookahead.last.plain


@pytest.mark.parametrize(("model_type", "by"), SHARP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_mask_that_such_models_ignore_is_noticed(model_type, by, dtype, sequences):
    model = sharp(model_type, by).to(dtype)
    inner = model.model.forward

    def deaf(*args, attention_mask=None, **kwargs):
        has_layout = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4)
        return inner(*args, attention_mask=None if has_layout else attention_mask, **kwargs)

    model.model.forward = deaf
    assert "not honoured" in probe.compare_with_plain(EagerRunner(model, read_config(model)), sequences)


def test_more_noise_is_measured_once(monkeypatch):
    """In half precision, two passes may move a row less than a pass of several rows does."""
    model = tiny_model("llama").bfloat16()
    runner, trials = EagerRunner(model, read_config(model)), {}
    assert probe.compare_with_plain(runner, trials=trials) is None
    (trial,) = trials.values()
    before = [rows.noise.clone() for _, rows in trial.prompts]
    noisy = probe._noisy_errors
    measured = []
    monkeypatch.setattr(probe, "_noisy_errors", lambda *args: measured.append(args) or noisy(*args))
    wrong = iter(["wrong", None, "wrong"])
    monkeypatch.setattr(probe, "_compare_with_plain", lambda *_: next(wrong))
    assert probe.compare_with_plain(runner, trials=trials) is None
    assert probe.compare_with_plain(runner, trials=trials) == "wrong"
    assert len(measured) == 1
    assert all((rows.noise >= old).all() for (_, rows), old in zip(trial.prompts, before, strict=True))


def sparse(model):
    module = model.model.layers[0].mlp.gate_proj
    module.weight = nn.Parameter(module.weight.detach().to_sparse_csr(), requires_grad=False)


def without_numbers(model):
    model.to("meta")


@pytest.mark.parametrize("config", [None, LookaheadConfig(cpu_kernels=False)], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("change", [sparse, without_numbers])
@pytest.mark.parametrize("is_before", [True, False])
def test_weights_that_have_no_address_for_each_number(change, is_before, config):
    """Texts and errors are the model's own."""
    model = tiny_model("llama")
    plain = copy.deepcopy(model)
    change(plain)
    if is_before:
        change(model)
    lookahead.wrap(model, config)
    if not is_before:
        model.generate(IDS, **GREEDY)
        change(model)
    assert outcome(model, IDS, **GREEDY) == outcome(plain, IDS, **GREEDY)


def last_row(states):
    return torch.cat([states[:, :-1], 1.5 * states[:, -1:]], dim=1)


def single_row(states):
    return 1.3 * states if states.shape[1] == 1 else states


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "lfm2", "mamba2", "falcon_h1", "qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("change", [last_row, single_row])
def test_hooks_that_go_by_the_place_of_a_row(model_type, change):
    """Layers with a state round by more over several rows. A hook's change is not taken for that."""
    model = tiny_model(model_type)
    lookahead.wrap(model)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))

    def hook(module, inputs, output):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    layers[0].register_forward_hook(hook)
    expected = lookahead.unwrap(copy.deepcopy(model)).generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)


@pytest.mark.parametrize("training", [True, False])
def test_probing_leaves_a_model_as_it_was(training):
    """Dropout is no dependence on other rows; what was frozen in eval mode stays so; nothing is drawn."""
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train(training)
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    assert find_adapter(model).row_dependence == 0
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


# -- weights that refuse inference mode, and weights elsewhere --------------------------------------------------------


class Shy(nn.Module):
    """Stands for weights quantized by a library whose tensors refuse inference mode."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return self.inner(x)


@pytest.mark.parametrize("at", ["eval", "restoring"])
def test_an_interrupt_leaves_a_model_in_training_mode(at):
    model = tiny_model("gpt2").train()
    layer, left = model.transformer.h[1], [1]

    class Interrupted(type(layer)):
        @property
        def training(self):
            return vars(self)["training"]

        @training.setter
        def training(self, value):
            if left and value == (at == "restoring"):
                left.pop()
                raise KeyboardInterrupt
            vars(self)["training"] = value

    layer.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt), probe.as_in_generate(model):
        pass
    assert not left
    assert all(module.training for module in model.modules())


def test_inference_mode_is_not_forced_on_tensors_that_refuse_it():
    model = tiny_model("llama", seed=3)
    assert find_adapter(model).in_inference_mode
    expected = model.generate(IDS, **GREEDY).tolist()
    other = tiny_model("llama", seed=3)
    other.model.layers[1].mlp.down_proj = Shy(other.model.layers[1].mlp.down_proj)
    lookahead.wrap(other)
    adapter = find_adapter(other)
    assert not adapter.in_inference_mode
    assert adapter.splits_attention
    assert other.generate(IDS, **GREEDY).tolist() == expected
    assert other.lookahead.last.steps > 0


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_models(where, when, tmp_path):
    """All of whose parameters are on the meta device between passes."""
    model = tiny_model("llama", seed=3)
    expected = model.generate(IDS, **GREEDY).tolist()

    def offload():
        if where == "cpu":
            cpu_offload(model, torch.device("cpu"))
        else:
            disk_offload(model, tmp_path, torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())

    if when == "before":
        offload()
    lookahead.wrap(model)
    if when == "between":
        assert model.generate(IDS, **GREEDY).tolist() == expected
    if when != "before":
        offload()
    assert model.generate(IDS, **GREEDY).tolist() == expected
    assert model.lookahead.last.steps > 0
    lookahead.unwrap(model)
    assert model.generate(IDS, **GREEDY).tolist() == expected


# -- masks ------------------------------------------------------------------------------------------------------------

PADDED = [0, 0, *[1] * 10]
MASKS = {
    "twos": [2] * 12,
    "some twos": [0, 0, 2, 1, 3, 1, 1, 2, 1, 1, 1, 2],
    "negative": [-1, -1, *[1] * 10],
    "fractions": [0.0, 0.25, 0.5, *[0.75] * 9],
    "booleans": [bool(value) for value in PADDED],
    "floats": [float(value) for value in PADDED],
    "ones, one short": [1] * 11,
    "padded, one short": PADDED[:11],
    "ones, one too many": [1] * 13,
    "padded, one too many": [*PADDED, 1],
    "nothing": [],
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "bloom"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_do_what_they_do_in_plain_decoding(model_type, attention, mask):
    """The same text, or the same error."""
    model = tiny_model(model_type, seed=3)
    model.set_attn_implementation(attention)
    options = {"attention_mask": torch.tensor([MASKS[mask]]), **GREEDY}
    expected = outcome(model, IDS, **options)
    lookahead.wrap(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert outcome(model, IDS, **options) == expected
    said = [str(w.message) for w in caught if "lookahead" in str(w.message)]
    if mask in ("booleans", "floats"):
        assert not said
        assert model.lookahead.last.steps > 0
    else:
        assert len(said) == 1
        assert re.search("values other than 0 and 1" if mask in list(MASKS)[:4] else "prompt's shape", said[0])


def test_an_empty_batch_is_named():
    model = lookahead.wrap(tiny_model("llama"))
    with pytest.raises(ValueError, match="the batch is empty"):
        model.generate(torch.empty((0, 5), dtype=torch.long), max_new_tokens=5)


# -- warnings ---------------------------------------------------------------------------------------------------------


def tiny_whisper():
    config = WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=50, num_mel_bins=8,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def tiny_llava():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = LlamaConfig(**COMMON)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)).eval()


def test_each_model_is_warned_of_once():
    for _ in range(2):
        model = lookahead.wrap(tiny_whisper())
        with pytest.warns(UserWarning, match="encoder-decoder") as caught:
            [model.generate(torch.randn(1, 8, 100), max_new_tokens=5) for _ in range(2)]
        assert len([w for w in caught if "lookahead" in str(w.message)]) == 1


def test_images_are_called_so():
    model = tiny_llava()
    inputs = {"input_ids": torch.tensor([[5, 96, 96, 96, 96, 7, 8]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    expected = model.generate(**inputs, **GREEDY).tolist()
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="does not decode with images:"):
        assert model.generate(**inputs, **GREEDY).tolist() == expected
    model.generate(torch.tensor([[5, 7, 8]]), **GREEDY)  # text alone
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize("serves", [True, False])
def test_a_row_may_be_off_by_what_plain_passes_move_it(serves, monkeypatch):
    """In half precision, sums over several rows are rounded otherwise; in trained models, some rows by much."""
    model = tiny_model("llama").bfloat16()
    multiply = model.lm_head.forward

    def rounded(hidden):
        logits = multiply(hidden)
        noise = 0.15 * torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(1)).to(logits)
        is_moved = (hidden[..., :1] > 0) & (hidden.shape[1] > 1)
        return logits + noise * is_moved * logits.std(-1, keepdim=True)

    monkeypatch.setattr(model.lm_head, "forward", rounded)
    if not serves:  # only the passes of our own
        monkeypatch.setattr(probe, "plain_logits", plain_logits_of(tiny_model("llama").bfloat16()))
    assert (probe.compare_with_plain(EagerRunner(model, read_config(model))) is None) == serves


def plain_logits_of(other):
    """Another model's plain passes replace those of the probed model."""
    original = probe.plain_logits
    return lambda model, *arguments: original(other, *arguments)


def test_plain_decoding_is_tried_once_for_all_runners(monkeypatch):
    """Each trial takes dozens of passes of the whole model."""
    tried = []
    trial = probe._plain_trial
    monkeypatch.setattr(probe, "_plain_trial", lambda *args: tried.append(args) or trial(*args))
    model = lookahead.wrap(tiny_model("llama"))
    model.generate(torch.tensor([[5, 7, 8]]), **GREEDY)
    assert "passes: fused" in model.lookahead.report()
    assert len(tried) == 1


def test_each_setting_by_which_a_model_is_limited_is_looked_for():
    others = {"attn_temperature_tuning", "original_max_position_embeddings"}
    assert {*limits.DENSE_UP_TO.values(), *others} == fallback.LIMITING


@pytest.mark.parametrize("vocabulary", [2, 3, 97])
def test_a_token_without_an_embedding_refuses_no_model(vocabulary):
    """Torch sets the embedding of a padding token to zero, so that its logits are all equal."""
    first = int(np.random.default_rng(0).integers(0, vocabulary, (1, 20))[0, 0])  # of the probe's tokens
    model = tiny_model("llama", vocab_size=vocabulary, pad_token_id=first, eos_token_id=None, bos_token_id=None)
    assert not model.get_input_embeddings().weight[first].any()
    assert lookahead.wrap(model).lookahead.adapter.can_branch


OF_TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


def speaking_model():
    """It writes frames of several codes each, by a loop of its own."""
    of_codes = {**OF_TEXT, "num_codebooks": 3, "vocab_size": 33, "num_hidden_layers": 1, "head_dim": 16}
    return CsmForConditionalGeneration(
        CsmConfig(
            **of_codes, text_vocab_size=97, pad_token_id=2, codebook_pad_token_id=30, codebook_eos_token_id=31,
            bos_token_id=0, eos_token_id=None, depth_decoder_config={**of_codes, "backbone_hidden_size": 32},
        )
    )  # fmt: skip


def model_that_knows_its_prompt():
    """Before the first pass, its own method tells its cache how long the prompt is."""
    of_images = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    windows = {"mlp_dim": 32, "global_attn_indexes": [0], "downsample_channels": [8, 8], "window_size": 2}
    of_experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = CONFIG_MAPPING["unlimited_ocr"](
        text_config={**OF_TEXT, **of_experts, "vocab_size": 97, "num_hidden_layers": 2, "sliding_window": 4},
        vision_config={
            "sam_config": {**of_images, **windows, "output_channels": 8, "image_size": 32},
            "encoder_config": {**of_images, "intermediate_size": 32, "image_size": 16},
        },
        image_token_id=96,
    )
    return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (speaking_model, {}),
        *((model_that_knows_its_prompt, options) for options in ({}, {"prefill_chunk_size": 2}, {"use_cache": False})),
    ],
)
def test_a_loop_of_the_familys_own_is_left_to_it(made, options):
    """A class of transformers may replace any method of the loop of generate()."""
    if made is model_that_knows_its_prompt and "unlimited_ocr" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    torch.manual_seed(0)
    model = made().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    ids, options = IDS, {"max_new_tokens": 30, "do_sample": False} | options
    plain = model.generate(ids, **options)
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="a model with a loop of its own"):
        assert torch.equal(model.generate(ids, **options), plain)


def endless(model_type, **settings):
    model = tiny_model(model_type, **settings)
    model.generation_config.eos_token_id = None
    return model


def second_turns(model, ids, more, first=MappingProxyType({}), then=MappingProxyType({}), mask=None):
    """Return the scores of what a model writes after ``more``, on the cache of its answer to ``ids``."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=5, **options, **first)
    prompt = torch.cat([answer.sequences, more], dim=1)
    mask = None if mask is None else torch.cat([mask, mask.new_ones(1, prompt.shape[1] - mask.shape[1])], dim=1)
    cache = {compat.CACHE: getattr(answer, compat.CACHE)}
    return torch.stack(model.generate(prompt, attention_mask=mask, max_new_tokens=9, **options, **cache, **then).logits)


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 8.0, 16.0, 64.0],
    "original_max_position_embeddings": 16, "factor": 4.0, "short_mscale": 1.0, "long_mscale": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LONG_ROPE}], ids=["usual", "longrope"])
@pytest.mark.parametrize("family", ["phi3", "phimoe", "phi4_multimodal"])
def test_a_class_that_drops_its_cache_at_a_length(family, rope):
    """Where the text is longer than that and the cache is not."""
    plain = endless(family, sliding_window=None, original_max_position_embeddings=16, **rope)
    model, ids = lookahead.wrap(copy.deepcopy(plain)), torch.arange(3, 13)[None]
    text = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(plain.generate(ids, **text), model.generate(ids, **text))
    expected, found = (second_turns(one, ids, torch.arange(30, 50)[None]) for one in (plain, model))
    assert torch.allclose(expected, found, atol=1e-4)


@pytest.mark.parametrize("own", [{}, {"output_hidden_states": True}], ids=["ours", "own"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_class_with_other_positions_shares_no_cache_with_us(own, is_first):
    """PaliGemma counts from 1. A rotary embedding does not show it within a call."""
    plain = endless("paligemma")
    for name, parameter in plain.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data.mul_(3)
    model, ids, more = lookahead.wrap(copy.deepcopy(plain)), torch.arange(3, 9)[None], torch.arange(20, 23)[None]
    turns = {"first" if is_first else "then": own}
    expected, found = (second_turns(one, ids, more, **turns) for one in (plain, model))
    assert torch.allclose(expected, found, atol=1e-4)
    model.generate(ids, max_new_tokens=5)
    assert not model.lookahead.last.plain


@pytest.mark.parametrize("name", ["Exaone4_5_ForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration"])
def test_a_class_that_counts_padding_shares_no_cache_with_us(name):
    if not hasattr(transformers, name):
        pytest.skip("this transformers has no such model")
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    plain = cls._from_config(cls.config_class(**tiny_settings(cls.config_class(), {}, 8)), dtype=torch.float32).eval()
    for parameter in plain.parameters():
        parameter.data.mul_(8 if parameter.ndim >= 2 else 1)
    plain.generation_config.eos_token_id, plain.generation_config.pad_token_id = None, 2
    model, ids = lookahead.wrap(copy.deepcopy(plain)), torch.tensor([[2, 2, 2, 5, 9, 11, 7]])
    mask, more = (ids != 2).long(), torch.tensor([[8, 20, 21]])
    expected, found = (second_turns(one, ids, more, mask=mask) for one in (plain, model))
    assert torch.allclose(expected, found, atol=1e-3 * expected.std())


def test_rotary_embeddings_that_change_are_computed_anew_without_a_cache():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    plain = endless("qwen2", rope_parameters=dynamic, max_position_embeddings=16)
    torch.manual_seed(1)
    ids, options = torch.randint(3, 97, (1, 14)), {"max_new_tokens": 40, "do_sample": False, "use_cache": False}
    assert torch.equal(plain.generate(ids, **options), lookahead.wrap(copy.deepcopy(plain)).generate(ids, **options))


def test_training_mode_is_read_from_the_configuration_of_the_text():
    model, ids, options = tiny_model("fuyu").train(), IDS[:, :4], {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(lookahead.wrap(model).generate(ids, **options), expected)
