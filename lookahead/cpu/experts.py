"""Operations of layers of which each row takes a part, its experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead.cpu.operations import Activation, Operation, Value
from lookahead.cpu.products import Linear


@dataclass(frozen=True, eq=False)
class Experts(Operation):
    """The MLPs of the top_k experts of each row, added up by their weights (Shazeer et al. 2017, arXiv 1701.06538).

    A router gives each expert a product, its score. Weights are the softmax of the scores. Results are rounded when
    they have been weighed, and added in the order of experts. Of equally good experts, those are chosen that torch's
    topk takes.

    Layers:

    layers: the router, then for each expert a layer of both halves, gates first, and the one that goes back. The first
        one may also give a single half, which then has no gates.
    is_apart: two layers give the halves.
    router: a router in float32, [experts, width], whose products are not rounded; `layers` then has none.
    routed: what the router reads, if that is not x.
    identities: the number of last experts without layers, which return their input (LongCat-Flash, arXiv 2509.01322).

    Weights, in the order of the steps that compute them:

    cap: scores s become cap * tanh(s / cap), unless it is 0.
    is_sigmoid: weights are the sigmoids of the scores, not their softmax.
    adds_to_one: the weights of a row's experts are divided by their sum, to which epsilon is added.
    factor: multiplies the weights.
    scales: float32 [experts], multiply the weights at last, unless they are rounded.
    rounds_weights: the weights are rounded at the end; with rounds_steps, after each of these steps.
    weighs_inputs: weights multiply the inputs of experts, which are then rounded, and not their outputs.

    Choice:

    correction: float32 [experts], added to what experts are chosen by (Wang et al. 2024, arXiv 2408.15664).
    ranks_scores: experts are chosen by their scores, and not by their weights.
    rounds_ranks: what experts are chosen by is rounded.
    groups: experts are in so many groups. A row's experts come from the `top_groups` groups with the largest sum of
        their best `best_of_group` experts, two or one (DeepSeek-V3, arXiv 2412.19437).
    nearness: unless it is negative, experts are chosen in turn, each with its share of the softmax of those left whose
        scores s are near its own s': (s' - s) / max(|s|, s') <= nearness (SparseMixer, Liu et al. 2024, arXiv
        2409.12136).

    Within an expert:

    limit: unless it is 0, a gate stands beside its number, and the two become
        (number + 1) * gate * sigmoid(alpha * gate), within this limit (gpt-oss, arXiv 2508.10925).
    """

    x: Value
    out: Value
    layers: tuple[Linear, ...]
    top_k: int
    activation: Activation
    adds_to_one: bool
    rounds_weights: bool
    is_sigmoid: bool = False
    factor: float = 1.0
    rounds_steps: bool = False
    rounds_ranks: bool = False
    epsilon: float = 1e-20
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    nearness: float = -1.0
    limit: float = 0.0
    alpha: float = 1.0
    cap: float = 0.0
    ranks_scores: bool = False
    weighs_inputs: bool = False
    is_apart: bool = False
    identities: int = 0
    correction: torch.Tensor | None = None
    router: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    routed: Value | None = None
    is_private = True
    reads_all_weights = False

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.layers

    def wide(self) -> list[torch.Tensor]:
        return self.tensors()

    @property
    def experts(self) -> tuple[Linear, ...]:
        """The layers of the experts."""
        return self.layers[self.router is None :]

    @property
    def each(self) -> int:
        """Layers of an expert."""
        return 2 + self.is_apart

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.experts) // self.each + self.identities

    @property
    def inner(self) -> int:
        """Numbers of a row within an expert."""
        return self.experts[self.each - 1].inputs

    @property
    def is_gated(self) -> bool:
        """Whether an expert has gates."""
        return self.is_apart or self.experts[0].outputs != self.inner

    def weighed(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return what experts read of these rows, not yet rounded, and by what to multiply what they give."""
        return (x * weights, 1.0) if self.weighs_inputs else (x, weights)

    def cpp_fields(self) -> dict[str, Any]:
        products = [(*linear.matrix(), -1, 0) for linear in self.layers]
        if self.router is not None:  # it is none of them, but has its place
            products.insert(0, (0,) * len(products[0]))
        of_router = {"y": self.routed, "size": (self.routed or self.x).width}
        return {"products": np.array(products, np.int64), "count": len(products), **of_router}

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        # The halves of a layer are parts of it.
        return self.count <= limits["MOST_EXPERTS"] and self.inner % limits["OUTPUTS_TOGETHER"] == 0

    def widths_beside(self, itemsize: int, limits: Mapping[str, int]) -> tuple[list[int], list[int]]:
        of_choices = 2 * self.top_k * limits["CHOICE_BYTES"] // itemsize  # in their order, and by row
        of_scores = self.count if self.router is None else 4 * self.count // itemsize
        width, inner = self.x.width, self.inner
        return [of_scores, width, 2 * inner, of_choices], [self.top_k * inner, self.top_k * width]

    def shapes_fit(self) -> bool:
        count, width = self.count, self.x.width
        routing = Linear(self.router) if self.router is not None else self.layers[0]
        of_each = [[(one.outputs, one.inputs) for one in self.experts[i :: self.each]] for i in range(self.each)]
        return (
            0 < self.top_k <= count
            and (routing.outputs, routing.inputs) == (count, (self.routed or self.x).width)
            and {shape for shapes in of_each[:-1] for shape in shapes}
            == {(self.inner << (self.is_gated and not self.is_apart), width)}
            and (self.is_gated or not self.limit)
            and not (self.is_apart and self.limit)
            and set(of_each[-1]) == {(width, self.inner)}
            and all(one is None or one.shape == (count,) for one in (self.correction, self.scales))
            and 0 < self.top_groups <= self.groups
            and self.best_of_group in (1, 2)
            and (self.groups == 1 or (count % self.groups == 0 and count // self.groups >= self.best_of_group))
        )


@dataclass(frozen=True, eq=False)
class Weigh(Operation):
    """out = sigmoid(by), rounded, * x. by: one number for each row."""

    x: Value
    out: Value
    by: Value
    is_private = True

    def cpp_fields(self) -> dict[str, Any]:
        return {"y": self.by}

    def shapes_fit(self) -> bool:
        return self.by.width == 1
