"""ERNIE 4.5 VL and PaddleOCR-VL, which is built on ERNIE: their text sides, while a text has no images."""

from types import MappingProxyType
from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families.corrected import Ernie4_5_Moe
from lookahead.models.families.glm_vl import PairedTables
from lookahead.models.families.qwen_vl import WithImages


class Ernie4_5_VLMoe(PairedTables, Ernie4_5_Moe):  # the name that transformers gives it
    """Images have experts of their own."""

    model_class = "TextModel"
    names = MappingProxyType(
        {
            name: f"Ernie4_5_VLMoe{part}{name}"
            for part, names in {
                "Text": ("Attention", "RotaryEmbedding"),
                "Moe": ("Block", "TopKRouter", "Experts", "Statics"),
            }.items()
            for name in names
        }
    )

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "text_moe"):
            return super().mlp(x, mlp)
        mixed = self.mixed(x, self.own(self.own(mlp, "Block").text_moe, self.mixture_class))
        return mixed if mlp.shared_experts is None else self.add(mixed, super().mlp(x, mlp.shared_experts))


class PaddleOCRVL(WithImages):
    model_class = "TextModel"
    names = MappingProxyType(
        {
            name: f"PaddleOCR{name}"
            for name in ("TextModel", "Attention", "DecoderLayer", "MLP", "RMSNorm", "RotaryEmbedding")
        }
    )
