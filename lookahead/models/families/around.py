"""Models that also take images, around a text model of another family. Fuyu has Persimmon in it, GOT-OCR 2 Qwen2."""

from typing import Any

from transformers import PersimmonForCausalLM, Qwen2ForCausalLM

from lookahead.models.families.gpt_neox import Persimmon
from lookahead.models.families.page import Page
from lookahead.models.families.qwen import Qwen2


class Around(Page):
    of_text: type
    """The class of the text model, with its head."""

    def __init__(self, model: Any, own: type):
        super().__init__(model, own)
        self._outer = self._family
        self._home, self._family = self.of_text.__module__, self.of_text.__name__.removesuffix("ForCausalLM")

    @property
    def inner(self) -> Any:
        return self._of_class(self.model.model, self._own.__module__, f"{self._outer}Model").language_model


class Fuyu(Around, Persimmon):
    of_text = PersimmonForCausalLM


class GotOcr2(Around, Qwen2):
    suffix = "ForConditionalGeneration"
    of_text = Qwen2ForCausalLM
