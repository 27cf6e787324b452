"""Cohere: attention and MLP read the same normed states, adjacent elements rotate together, and logits are scaled.

Cohere2-MoE is a mixture of experts. Cohere Compass also takes images.
"""

from typing import Any

import torch

from lookahead.cpu.operations import Value
from lookahead.models.families.experts import mixture
from lookahead.models.families.llama import Llama
from lookahead.models.families.page import Slides, UnknownModelError
from lookahead.models.families.parts import scaled, side_by_side


class Cohere(Llama):
    norm_class = "LayerNorm"
    norms_are_centered = True
    rotary_is_interleaved = True
    rotary_rounds_once = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return side_by_side(self, x, layer, name)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.use_qk_norm:
            raise UnknownModelError("each of its heads has a norm of its own")
        return super().rotated(q, k, attention, name)

    def rotary_tables(self, like: torch.Tensor, positions: torch.Tensor, name: str) -> list[torch.Tensor]:
        return [
            table[:, ::2].repeat(1, 2) for table in super().rotary_tables(like, positions, name)
        ]  # each stood twice

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, factor=float(self.model.logit_scale))


class Cohere2(Cohere):
    slides = "by type"

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        if attention.sliding_window is None and not getattr(attention, "force_rope", False):
            return q, k
        return Llama.rotated(self, q, k, attention, name)


class Cohere2Moe(Cohere2):
    def norm(self, x: Value, module: Any) -> Value:
        is_centered = type(module).__name__.endswith("LayerNorm")
        self.norm_class, self.norms_are_centered = "LayerNorm" if is_centered else "RMSNorm", is_centered
        return super().norm(x, module)

    def mlp(self, x: Value, mlp: Any) -> Value:
        if not hasattr(mlp, "experts"):  # some layers have a usual MLP
            return super().mlp(x, mlp)
        gate = self.own(mlp, "SparseMoeBlock").gate
        is_sigmoid = gate.expert_selection_fn == "sigmoid"  # else the softmax of the scores that are chosen
        adds_to_one = not is_sigmoid or gate.norm_topk_prob
        mixed = mixture(self, x, gate, mlp.experts, adds_to_one, is_sigmoid=is_sigmoid, epsilon=0.0)
        if not mlp.num_shared_experts:
            return mixed
        both = self.add(mixed, super().mlp(x, mlp.shared_experts))
        return both if mlp.shared_expert_combination_strategy == "sum" else scaled(self, both, 0.5)


class CohereCompass(Llama):
    """Its text side, whose adjacent elements do not rotate together. Some types of layers have no positions."""

    model_class = "TextModel"
    slides: Slides = "by type"
    norm_class = "LayerNorm"
    norms_are_centered = True

    def layer(self, x: Value, layer: Any, name: str) -> Value:
        return side_by_side(self, x, layer, name)

    def rotated(self, q: Value, k: Value, attention: Any, name: str) -> tuple[Value, Value]:
        has_positions = self.inner.config.rope_parameters[name] is not None
        return super().rotated(q, k, attention, name) if has_positions else (q, k)

    def head(self, x: Value) -> None:
        self.logits(x, self.model.lm_head, factor=float(self.model.logit_scale))
