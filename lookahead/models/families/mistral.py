"""Mistral (arXiv 2310.06825), and other families that differ from Llama in only windows, positions or names."""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.llama import Llama


class Mistral(Llama):
    slides = "always"


class Ministral(Llama):
    slides = "by type"


class Ministral3(Llama):
    """Queries grow with their position, so that attention stays sharp in long texts: a factor of their tables."""

    slides = "always"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return self.rotary(q, attention.head_dim, "queries"), self.rotary(k, attention.head_dim, name)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        tables = super().rotary_tables(like, positions, "")
        if name != "queries":
            return tables
        rope = self.inner.config.rope_parameters
        steps = torch.floor(positions[0] / rope["original_max_position_embeddings"])
        factors = (1 + rope["llama_4_scaling_beta"] * torch.log(1 + steps)).to(like.dtype)
        return [table.float() * factors[:, None] for table in tables]


class Cwm(Llama):
    slides = "by type"


class SeedOss(Llama):
    pass


class SmolLM3(Llama):
    slides = "by type"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        return super().rotated(q, k, attention, name) if attention.use_rope else (q, k)


class Emu3(Llama):
    """Its text side."""

    model_class = "TextModel"
    dropouts = ("attention_dropout",)
