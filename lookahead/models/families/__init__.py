"""The families of models whose passes are programs: a page for each, which reads like transformers' forward of it."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lookahead.models.families import with_images
from lookahead.models.families.afmoe import Afmoe
from lookahead.models.families.apertus import Apertus
from lookahead.models.families.cohere import Cohere, Cohere2
from lookahead.models.families.corrected import (
    HYV3,
    Dots1,
    Ernie4_5_Moe,
    ExaoneMoe,
    Glm4Moe,
    MiniMaxM2,
    SolarOpen,
)
from lookahead.models.families.deepseek import AXK1, DeepseekV2, DeepseekV3, Glm4MoeLite, MiniCPM3, Youtu
from lookahead.models.families.exaone import Exaone4
from lookahead.models.families.falcon import Falcon
from lookahead.models.families.gated_delta import OlmoHybrid, Qwen3_5, Qwen3_5Moe, Qwen3Next
from lookahead.models.families.gemma import Gemma, Gemma2, Gemma3, VaultGemma
from lookahead.models.families.gemma4 import Gemma4
from lookahead.models.families.glm import Ernie4_5, Glm, Glm4, Helium
from lookahead.models.families.gpt2 import GPT2, GPTBigCode
from lookahead.models.families.gpt_neox import GPTNeoX, Persimmon
from lookahead.models.families.gpt_oss import GptOss
from lookahead.models.families.gptj import GPTJ, CodeGen
from lookahead.models.families.granite import Granite, HyperCLOVAX
from lookahead.models.families.hunyuan import HunYuanDenseV1, HunYuanMoEV1
from lookahead.models.families.lfm2 import Lfm2, Lfm3
from lookahead.models.families.llama import Cwm, Llama, Ministral, Ministral3, Mistral, SeedOss, SmolLM3
from lookahead.models.families.mamba2 import Bamba, GraniteMoeHybrid
from lookahead.models.families.mixtral import (
    FlexOlmo,
    GraniteMoe,
    GraniteMoeShared,
    Mellum,
    Mixtral,
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
)
from lookahead.models.families.nanochat import NanoChat
from lookahead.models.families.nemotron import Arcee, Jais2, Nemotron
from lookahead.models.families.olmo import Olmo, Olmo2, Olmo3
from lookahead.models.families.opt import OPT
from lookahead.models.families.page import ACTIVATIONS, Page, UnknownModelError
from lookahead.models.families.phi import Phi, StableLm, Starcoder2
from lookahead.models.families.phi3 import Phi3
from lookahead.models.families.qwen import Qwen2, Qwen3

PAGES: dict[str, type[Page]] = {
    page.__name__ + page.suffix: page
    for page in (
        Llama, Mistral, Ministral, Ministral3, Cwm, SeedOss, SmolLM3, Qwen2, Qwen3, Phi3, Granite, HyperCLOVAX, Olmo,
        Olmo2, Olmo3, Exaone4, Gemma, Gemma2, Gemma3, Gemma4, VaultGemma, Glm, Glm4, Ernie4_5, Helium, Cohere, Cohere2,
        Arcee, Nemotron, Jais2, HunYuanDenseV1, Phi, StableLm, Starcoder2, OPT, GPT2, GPTBigCode, GPTNeoX, Persimmon,
        Falcon, Mixtral, Mellum, Qwen2Moe, Qwen3Moe, Olmoe, FlexOlmo, GraniteMoe, GraniteMoeShared, HunYuanMoEV1,
        Glm4Moe, SolarOpen, Dots1, ExaoneMoe, HYV3, MiniMaxM2, Ernie4_5_Moe, GptOss, DeepseekV2, DeepseekV3,
        Glm4MoeLite, AXK1, Youtu, MiniCPM3, GPTJ, CodeGen, NanoChat, Apertus, Afmoe, Lfm2, Lfm3, Qwen3_5,
        Qwen3_5Moe, Qwen3Next, OlmoHybrid, Bamba, GraniteMoeHybrid, with_images.Gemma3, with_images.Gemma4,
    )
}  # fmt: skip


def page_of(model: object) -> Page:
    """Return the page that says what this model computes.

    Raises UnknownModelError if there is none, or if the model's forward is not the one that transformers defines.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in PAGES and cls.__module__.startswith("transformers.models."):
            return PAGES[cls.__name__](model, cls)
    unknown = ", ".join(_unknown_parts(model))
    missing = f"; of its parts, no operation computes {unknown}" if unknown else ""
    raise UnknownModelError(f"no page says what {type(model).__name__} computes{missing}")


def _unknown_parts(model: Any) -> list[str]:
    """The classes of the parts of a model without parts of their own that no page knows, nor any that is like them."""
    like = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Conv1d, Conv1D, PreTrainedModel)
    named = ("RMSNorm", "RMSNormGated", "LayerNorm", "RotaryEmbedding", "Embedding", "Router", "Experts", "Cache")
    leaves = [module for module in model.get_decoder().modules() if not any(module.children())]
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (*like, nn.ModuleList, nn.ModuleDict))}
    return sorted(name for name in others if not name.endswith((*named, *ACTIVATIONS)))


def has_page(model: object) -> bool:
    """Whether a page says what this model computes."""
    try:
        page_of(model)
    except UnknownModelError:
        return False
    return True
