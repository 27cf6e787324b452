"""Models around a text model, which take images or sounds, too: while a text has none, passes are one call."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
from zoo import ALIKE, COMMON, SETTINGS

import lookahead
from bench.tiny_models import SPREAD, random_model, tiny_config
from lookahead.models.families import UnknownModelError, page_of
from lookahead.models.families.around import AROUND, KINDS

TYPES = {name: model_type for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()}
PROMPT = [17, 5, 42, 29, 8, 33, 11, 17, 5, 42, 29, 8]
PADDED = torch.tensor([[2] * 5 + PROMPT[:7], PROMPT])
OF_QWEN = {f"Qwen{name}ForConditionalGeneration" for name in ("2VL", "2_5_VL", "3VL", "3VLMoe", "3_5", "3_5Moe")}
"""Whose positions are of time, height and width."""


def random_weights(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
            elif parameter.ndim >= 2 and not name.endswith("A_log"):
                parameter.mul_(SPREAD)
    model.generation_config.update(pad_token_id=2, eos_token_id=None)
    return model.eval()


def texts_of(model):
    """Greedy and sampled texts of one prompt, and of two."""
    for ids in (PADDED[1:], PADDED):
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.8}):
            torch.manual_seed(3)
            yield model.generate(ids, attention_mask=(ids != 2).long(), max_new_tokens=16, **how).tolist()


def assert_same_texts(model):
    expected = list(texts_of(model))
    lookahead.wrap(model)
    for i, text in enumerate(texts_of(model)):
        assert text == expected[i]
        is_left = i >= 2 and type(model).__name__ == "PaliGemmaForConditionalGeneration"  # padded, and seen both ways
        way = "does not decode with padding" if is_left else "passes: fused"
        assert way in model.lookahead.report(), model.lookahead.report()


@pytest.mark.parametrize("name", sorted((AROUND | OF_QWEN) & {name for name in TYPES if hasattr(transformers, name)}))
def test_texts_are_those_of_the_model(name):
    """Some tokens of the prompts are placeholders for missing images or sounds."""
    config = tiny_config(TYPES[name])
    for setting in config.to_dict():
        if KINDS.match(setting):
            setattr(config, setting, 42)
    torch.manual_seed(0)
    model = random_weights(getattr(transformers, name)._from_config(config, dtype=torch.float32))
    assert_same_texts(model)


@pytest.mark.parametrize("text", ["mistral", "qwen2", "phi3", "gemma2", "gemma", "granite", "cohere", "qwen3_moe"])
def test_any_text_model_that_has_a_page_may_stand_within(text):
    settings = (SETTINGS | ALIKE)[text] | {"attn_implementation": None}
    of_text = AutoConfig.for_model(text, **COMMON | settings)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(text_config=of_text, vision_config={"model_type": "clip_vision_model", **vision})
    torch.manual_seed(0)
    how = {"attn_implementation": "eager"} if text == "gemma2" else {}
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, **how)
    assert_same_texts(random_weights(model))


@pytest.mark.parametrize(
    ("family", "part"), [("jetmoe", "JetMoeMoA"), ("deepseek_v32", "DeepseekV32Indexer"), ("zamba", "ZambaMambaMixer")]
)
def test_parts_that_no_operation_computes_are_named(family, part):
    with pytest.raises(UnknownModelError, match=f"no operation computes its parts {part}$"):
        page_of(random_model(tiny_config(family)))
