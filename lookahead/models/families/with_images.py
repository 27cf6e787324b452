"""The text side of models that also take images. Tokens that stand for these are left to the model's own code."""

from typing import Any

from lookahead.cpu.operations import Value
from lookahead.models.families import gemma, gemma3n, gemma4
from lookahead.models.families.page import Page


class Gemma3(gemma.Gemma3):
    suffix = "ForConditionalGeneration"

    @property
    def inner(self) -> Any:
        return Page.own(self, self.model.model, "Model").language_model

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head)


class Capped(Gemma3):
    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, cap=self.inner.config.final_logit_softcapping)


class Gemma3n(Capped, gemma3n.Gemma3n):
    """Tokens of images and sounds have tables of their own, which come after that of words."""

    def placeholders(self) -> list[int]:
        config, model = self.model.config, self.model.model
        first = min(model.embed_vision.vocab_offset, model.embed_audio.vocab_offset)
        return [config.image_token_id, config.audio_token_id, *range(first, config.text_config.vocab_size)]


class Gemma4Unified(Capped, gemma4.Gemma4Unified):
    def placeholders(self) -> list[int]:
        config = self.model.config
        return [config.image_token_id, config.video_token_id, config.audio_token_id]


class Gemma4(Gemma4Unified, gemma4.Gemma4):
    pass
