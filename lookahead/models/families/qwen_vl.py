"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and its mixture of experts, and the thinkers of Qwen2.5-Omni and Qwen3-Omni.

These are their text sides, while a text has no images or sounds.

Their positions in time, height and width are then all the same.
"""

from types import MappingProxyType
from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import Page
from lookahead.models.families.qwen import Qwen2, Qwen3


class WithImages(Llama):
    suffix = "ForConditionalGeneration"
    last_norm_class = ""
    """Of the norm after the layers, if it is of another class than theirs."""

    def own(self, module: Any, suffix: str) -> Any:
        if self.last_norm_class and module is self.inner.norm:
            return self._of_class(module, self._home, self.last_norm_class)
        return super().own(module, suffix)

    @property
    def inner(self) -> Any:
        return Page.own(self, self.model.model, "Model").language_model

    def placeholders(self) -> list[int]:
        config = self.model.config
        return [getattr(config, f"{kind}_token_id", -1) for kind in ("image", "video", "audio")]

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Older versions of transformers want all three positions, and Qwen2-VL gives as many tables."""
        tables = self.rotary_module(like, positions.expand(3, 1, -1), *([name] if name else []))
        return [table.flatten(0, -3)[0] for table in tables]


class Qwen2VL(WithImages, Qwen2):
    model_class = "TextModel"
    names = MappingProxyType({"MLP": "Qwen2MLP"})


class Qwen2_5_VL(Qwen2VL):  # the name that transformers gives it
    pass


class Qwen3VL(WithImages, Qwen3):
    slides = "never"

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, f"Text{suffix}")


class Qwen3VLMoe(Qwen3VL):
    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):  # some layers have a usual MLP
            return super().mlp(x, mlp)
        self.own(mlp, "SparseMoeBlock")
        return mixture(self, x, mlp.gate, mlp.experts, getattr(mlp.gate, "norm_topk_prob", True))


class Qwen2_5OmniThinker(Qwen2VL):
    names = MappingProxyType(
        {
            "MLP": "Qwen2MLP",
            **{name: f"Qwen2_5Omni{name}" for name in ("Attention", "DecoderLayer", "RMSNorm", "RotaryEmbedding")},
        }
    )


class Qwen3OmniMoeThinker(Qwen3VLMoe):
    last_norm_class = "Qwen3OmniMoeTextRMSNorm"
