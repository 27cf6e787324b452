"""The families of models with fused passes: a page for each writes the program, after transformers' forward of it."""

import re
from importlib import import_module

from lookahead.models.families.page import Page, UnknownModelError

HOMES: dict[str, str] = {
    name: module
    for module, names in {
        "llama": "LlamaForCausalLM",
        "mistral": (
            "MistralForCausalLM MinistralForCausalLM Ministral3ForCausalLM CwmForCausalLM SeedOssForCausalLM "
            "SmolLM3ForCausalLM Emu3ForCausalLM"
        ),
        "qwen": "Qwen2ForCausalLM Qwen3ForCausalLM",
        "phi3": "Phi3ForCausalLM Phi4MultimodalForCausalLM",
        "granite": "GraniteForCausalLM HyperCLOVAXForCausalLM",
        "olmo": "OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM",
        "exaone": "Exaone4ForCausalLM",
        "gemma": "GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM VaultGemmaForCausalLM",
        "gemma3n": "Gemma3nForCausalLM",
        "gemma4": "Gemma4ForCausalLM Gemma4UnifiedForCausalLM",
        "glm": "GlmForCausalLM Glm4ForCausalLM Ernie4_5ForCausalLM HeliumForCausalLM",
        "cohere": "CohereForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM",
        "nemotron": "ArceeForCausalLM NemotronForCausalLM Jais2ForCausalLM",
        "hunyuan": "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM",
        "phi": "PhiForCausalLM StableLmForCausalLM Starcoder2ForCausalLM",
        "opt": "OPTForCausalLM",
        "biogpt": "BioGptForCausalLM XGLMForCausalLM",
        "gpt2": "GPT2LMHeadModel GPTBigCodeForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM PersimmonForCausalLM",
        "falcon": "FalconForCausalLM",
        "alibi": "BloomForCausalLM MptForCausalLM",
        "mixtral": (
            "MixtralForCausalLM PhimoeForCausalLM MellumForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM "
            "OlmoeForCausalLM FlexOlmoForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM "
            "AriaTextForCausalLM"
        ),
        "corrected": (
            "Glm4MoeForCausalLM SolarOpenForCausalLM Dots1ForCausalLM ExaoneMoeForCausalLM HYV3ForCausalLM "
            "MiniMaxM2ForCausalLM Ernie4_5_MoeForCausalLM Kolibri1ForCausalLM"
        ),
        "gpt_oss": (
            "GptOssForCausalLM GraniteSWAForCausalLM GraniteMoeSWAForCausalLM FlintForCausalLM MiMoV2FlashForCausalLM"
        ),
        "deepseek": (
            "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM AXK1ForCausalLM "
            "YoutuForCausalLM MiniCPM3ForCausalLM"
        ),
        "longcat": "LongcatFlashForCausalLM",
        "gptj": "GPTJForCausalLM CodeGenForCausalLM",
        "nanochat": "NanoChatForCausalLM",
        "apertus": "ApertusForCausalLM Apertus1p5TextForCausalLM",
        "bert": (
            "BertLMHeadModel BertGenerationDecoder ErnieForCausalLM ElectraForCausalLM RobertaForCausalLM "
            "CamembertForCausalLM XLMRobertaForCausalLM Data2VecTextForCausalLM RobertaPreLayerNormForCausalLM "
            "XLMRobertaXLForCausalLM"
        ),
        "berts": (
            "MegatronBertForCausalLM RemBertForCausalLM BigBirdForCausalLM RoCBertForCausalLM XmodForCausalLM "
            "GitForCausalLM"
        ),
        "modernbert": "ModernBertDecoderForCausalLM",
        "bitnet": "BitNetForCausalLM",
        "ctrl": "CTRLLMHeadModel",
        "qwen_vl": (
            "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
            "Qwen3VLMoeForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration "
            "Qwen3OmniMoeThinkerForConditionalGeneration"
        ),
        "glm_vl": "Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration",
        "ernie_vl": "Ernie4_5_VLMoeForConditionalGeneration PaddleOCRVLForConditionalGeneration",
        "llama4": "Llama4ForCausalLM",
        "dbrx": "DbrxForCausalLM",
        "laguna": "LagunaForCausalLM",
        "afmoe": "AfmoeForCausalLM",
        "beam": "BeamForCausalLM",
        "lfm2": "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM",
        "gated_delta": (
            "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3NextForCausalLM LaraMiniForCausalLM OlmoHybridForCausalLM"
        ),
        "mamba2": (
            "Mamba2ForCausalLM BambaForCausalLM GraniteMoeHybridForCausalLM FalconH1ForCausalLM NemotronHForCausalLM"
        ),
        "zamba": "Zamba2ForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM BailingHybridForCausalLM",
        "hrm": "HrmTextForCausalLM",
        "with_images": (
            "Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration "
            "Gemma4UnifiedForConditionalGeneration"
        ),
    }.items()
    for name in names.split()
}
"""The module of the page for each class of transformers. It is imported for a model of that class."""
SUFFIX = re.compile("ForCausalLM$|LMHeadModel$|Decoder$|ForConditionalGeneration$")


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
