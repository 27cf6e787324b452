"""GLM-4.1V, GLM-4.5V and GLM-OCR: their text sides, while a text has no images. GLM-4.6V is around one of them."""

from types import MappingProxyType
from typing import Any

import torch

from lookahead.models.families.corrected import WithSharedExperts
from lookahead.models.families.glm import Glm4
from lookahead.models.families.qwen_vl import WithImages


class PairedTables(WithImages):
    """The model's tables have each number twice, for the two neighbours that rotate by it."""

    rotary_is_interleaved = True

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [table[:, ::2].repeat(1, 2) for table in super().rotary_tables(like, positions, name)]


class Glm4v(PairedTables, Glm4):
    names = MappingProxyType({"TextRMSNorm": "Glm4vRMSNorm"})

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, f"Text{suffix}")


class GlmOcr(Glm4v):
    names = MappingProxyType({"TextRMSNorm": "GlmOcrRMSNorm"})


class Glm4vMoe(WithImages, WithSharedExperts):
    rotates_part = True
    last_norm_class = "Glm4vMoeRMSNorm"

    def own(self, module: Any, suffix: str) -> Any:
        return super().own(module, f"Text{suffix}")
