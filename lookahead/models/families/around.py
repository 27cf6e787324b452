"""Models that also take images or sounds, around a text model of another family, which the configuration names.

They have their own head. If tokens are placeholders for images and sounds, the model's own code computes passes.
"""

import re
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lookahead.compat import registered_experts
from lookahead.cpu.operations import Value
from lookahead.models.families import HOMES, page_for
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import ACTIVATIONS, Page, UnknownModelError
from lookahead.models.origin import is_own

_WITH_TEXT_MODELS = [
    "Aria", "AyaVision", "Cohere2Vision", "DeepseekVL", "DeepseekVLHybrid", "Exaone4_5_", "Glm46V", "GlmAsr", "GotOcr2",
    "GraniteSpeech", "GraniteSpeechPlus", "HyperCLOVAXVisionV2", "Idefics2", "Idefics3", "InternVL", "Janus",
    "Kimi_K25", "Lfm2Vl", "Lfm3Vl", "LightOnOcr", "Llava", "LlavaNext", "LlavaNextVideo", "LlavaOnevision",
    "MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7", "Mistral3", "OmniASR", "Ovis2", "PaliGemma", "QianfanOCR", "Qwen2Audio",
    "Qwen3ASR", "Qwen3_5", "Qwen3_5Moe", "SmolVLM", "VideoLlama3", "VideoLlava", "VipLlava", "Voxtral",
]  # fmt: skip
AROUND = {f"{family}ForConditionalGeneration" for family in _WITH_TEXT_MODELS} | {"FuyuForCausalLM"}
"""Classes of transformers around a text model, which have a page here."""
TEXT_AT = {"Idefics2", "Idefics3", "SmolVLM"}
"""Models that call their text model ``text_model``, and not ``language_model``."""
WITH_PREFIXES = {"PaliGemma"}
"""Models that see a prompt in both directions. They cap logits as their text model does where it is alone."""
SUFFIXES = "ForCausalLM", "ForConditionalGeneration"
"""Suffixes of the class of a text model that has a page; some are only known with images or sounds."""
WITHOUT_OPERATION = re.compile(
    "(Indexer|Compressor|HyperConnection|CrossAttention|MoA|DiffLlamaAttention|ZambaMambaMixer)$"
)
"""Classes of parts that have parts of their own, and that no operation computes."""
KINDS = re.compile("(image|video|audio)_token_(id|index)$")
"""Settings that name a placeholder token."""


def page_of(model: Any) -> Page:
    """Return the page of a model around a text model. Raises UnknownModelError if there is none, and says why."""
    for cls in type(model).__mro__:
        if cls.__name__ in AROUND and cls.__module__.startswith("transformers.models."):
            return _page_around(model, cls)
    unknown = ", ".join(_unknown_parts(model))
    missing = f"; no operation computes its parts {unknown}" if unknown else ""
    raise UnknownModelError(f"there is no program for {type(model).__name__}{missing}")


def _unknown_parts(model: Any) -> list[str]:
    """The classes of a model's smallest parts that no page knows, nor any similar ones.

    Of parts that have parts of their own, those that are known to lack an operation.
    """
    like = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Conv1d, Conv1D, PreTrainedModel)
    named = ("RMSNorm", "RMSNormGated", "LayerNorm", "RotaryEmbedding", "Embedding", "Router", "Experts", "Cache")
    modules = list(model.get_decoder().modules())
    leaves = [module for module in modules if not any(module.children())]
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (*like, nn.ModuleList, nn.ModuleDict))}
    unknown = {name for name in others if not name.endswith((*named, *ACTIVATIONS))}
    return sorted(unknown | set(filter(WITHOUT_OPERATION.search, (type(module).__name__ for module in modules))))


def _page_around(model: Any, own: type) -> Page:
    """own: the class of the model that transformers defines."""
    outer = own.__name__.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    try:
        text = getattr(model.model, "text_model" if outer in TEXT_AT else "language_model")
    except AttributeError as error:
        raise UnknownModelError(f"a part is missing: {error}") from error
    for ending in ("Model", "TextModel"):
        family = type(text).__name__.removesuffix(ending)
        names = [name for suffix in SUFFIXES if (name := f"{family}{suffix}") in HOMES]
        page: Any = page_for(names[0]) if names else Page
        if issubclass(page, Llama):
            return _around(page)(model, own, outer, text, family)
    raise UnknownModelError(f"there is no program for {type(text).__name__}, its text model")


@cache
def _around(of_text: Any) -> Any:
    """The page of models around a text model of this family."""

    class Around(of_text):  # whose page says all but the head
        def __init__(self, model: Any, own: type, outer: str, text: Any, family: str):
            super().__init__(model, own)
            if not is_own(experts := registered_experts(text.config)):
                raise UnknownModelError(f"its experts are computed by {experts}, which transformers does not define")
            self._outer, self._text = outer, text
            self._home, self._family = type(text).__module__, family

        @property
        def inner(self) -> Any:
            self._of_class(self.model.model, self._own.__module__, f"{self._outer}Model")
            return self._text

        def head(self, x: Value) -> None:
            cap = getattr(self._text.config, "final_logit_softcapping", None) if self._outer in WITH_PREFIXES else None
            self.logits(x, self.model.lm_head, cap=cap)

        @property
        def reads_prompts(self) -> bool:
            return super().reads_prompts and self._outer not in WITH_PREFIXES

        def placeholders(self) -> list[int]:
            settings = self.model.config.to_dict().items()
            return [value for name, value in settings if KINDS.match(name) and isinstance(value, int)]

    return Around
