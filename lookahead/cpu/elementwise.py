"""Operations on each number of a row by itself, which few families need."""

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.cpu.operations import Operation, Part, Value


@dataclass(frozen=True, eq=False)
class Clip(Operation):
    """out = x, clipped to -limit..limit."""

    x: Value
    out: Value
    limit: float
    works_in_place = True

    @property
    def part(self) -> Part:
        return "outputs", self.x.width

    def shapes_fit(self) -> bool:
        return self.limit > 0


@dataclass(frozen=True, eq=False)
class Xielu(Operation):
    """out = positive * x^2 + beta * x where x > 0, else negative * (exp(min(x, least)) - 1 - x) + beta * x.

    xIELU (Huang & Schlag 2024, arXiv 2411.13010), rounded at each step of the formula.
    """

    x: Value
    out: Value
    positive: float
    negative: float
    beta: float
    least: float
    works_in_place = True

    @property
    def part(self) -> Part:
        return "outputs", self.x.width

    def cpp_fields(self) -> dict[str, Any]:
        return {"factor": self.positive, "alpha": self.negative, "offset": self.beta, "limit": self.least}


@dataclass(frozen=True, eq=False)
class Scale(Operation):
    """out = factor * x, and * weight, [width], if there is one."""

    x: Value
    out: Value
    factor: float
    weight: torch.Tensor | None = None
    is_private = works_in_place = True

    def shapes_fit(self) -> bool:
        return self.weight is None or self.weight.shape == (self.x.width,)
