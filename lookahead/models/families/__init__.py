"""The families of models with fused passes: a page for each writes the program, after transformers' forward of it."""

import re
from importlib import import_module

from lookahead.models.families.page import Page
from lookahead.models.families.page import UnknownModelError as UnknownModelError

SUFFIX = re.compile("ForCausalLM$|LMHeadModel$|Decoder$|ForConditionalGeneration$")
HOMES: dict[str, str] = {
    name if SUFFIX.search(name) else f"{name}ForCausalLM": module
    for module, names in {
        "llama": "Llama",
        "mistral": "Mistral Ministral Ministral3 Cwm SeedOss SmolLM3 Emu3",
        "qwen": "Qwen2 Qwen3",
        "phi3": "Phi3 Phi4Multimodal",
        "granite": "Granite HyperCLOVAX",
        "olmo": "Olmo Olmo2 Olmo3",
        "exaone": "Exaone4",
        "gemma": "Gemma Gemma2 Gemma3 VaultGemma",
        "gemma3n": "Gemma3n",
        "gemma4": "Gemma4 Gemma4Unified",
        "glm": "Glm Glm4 Ernie4_5 Helium",
        "cohere": "Cohere Cohere2 Cohere2Moe CohereCompass",
        "nemotron": "Arcee Nemotron Jais2",
        "hunyuan": "HunYuanDenseV1 HunYuanMoEV1",
        "phi": "Phi StableLm Starcoder2",
        "opt": "OPT",
        "biogpt": "BioGpt XGLM",
        "gpt2": "GPT2LMHeadModel GPTBigCode",
        "gpt_neox": "GPTNeoX GPTNeoXJapanese Persimmon",
        "falcon": "Falcon",
        "alibi": "Bloom Mpt",
        "mixtral": "Mixtral Phimoe Mellum Qwen2Moe Qwen3Moe Olmoe FlexOlmo GraniteMoe GraniteMoeShared AriaText",
        "corrected": "Glm4Moe SolarOpen Dots1 ExaoneMoe HYV3 MiniMaxM2 Ernie4_5_Moe Kolibri1",
        "gpt_oss": "GptOss GraniteSWA GraniteMoeSWA Flint MiMoV2Flash",
        "deepseek": "DeepseekV2 DeepseekV3 Glm4MoeLite AXK1 Youtu MiniCPM3",
        "longcat": "LongcatFlash",
        "gptj": "GPTJ CodeGen",
        "nanochat": "NanoChat",
        "apertus": "Apertus Apertus1p5Text",
        "bert": (
            "BertLMHeadModel BertGenerationDecoder Ernie Electra Roberta Camembert XLMRoberta Data2VecText "
            "RobertaPreLayerNorm XLMRobertaXL"
        ),
        "berts": "MegatronBert RemBert BigBird RoCBert Xmod Git",
        "modernbert": "ModernBertDecoderForCausalLM",
        "bitnet": "BitNet",
        "ctrl": "CTRLLMHeadModel",
        "qwen_vl": (
            "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
            "Qwen3VLMoeForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration "
            "Qwen3OmniMoeThinkerForConditionalGeneration"
        ),
        "glm_vl": "Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration",
        "ernie_vl": "Ernie4_5_VLMoeForConditionalGeneration PaddleOCRVLForConditionalGeneration",
        "llama4": "Llama4",
        "dbrx": "Dbrx",
        "laguna": "Laguna",
        "afmoe": "Afmoe",
        "beam": "Beam",
        "lfm2": "Lfm2 Lfm2Moe Lfm3",
        "gated_delta": "Qwen3_5 Qwen3_5Moe Qwen3Next LaraMini OlmoHybrid",
        "mamba2": "Mamba2 Bamba GraniteMoeHybrid FalconH1 NemotronH",
        "zamba": "Zamba2",
        "kimi_linear": "KimiLinear BailingHybrid",
        "hrm": "HrmText",
        "with_images": (
            "Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration "
            "Gemma4UnifiedForConditionalGeneration"
        ),
    }.items()
    for name in names.split()
}
"""The module of the page for each class of transformers, which ends in ForCausalLM if the table names no other end. It
is imported for a model of that class."""


def page_for(name: str) -> type[Page]:
    """Return the page for a class of transformers, by its name. Raises KeyError if there is none."""
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), SUFFIX.sub("", name))


def page_of(model: object) -> Page:
    """Return the page that writes the program of this model.

    Raises UnknownModelError if there is none, or if the model's forward is not the one that transformers defines.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in HOMES and cls.__module__.startswith("transformers.models."):
            return page_for(cls.__name__)(model, cls)
    from lookahead.models.families import around  # models with a page of their own do not need it

    return around.page_of(model)
