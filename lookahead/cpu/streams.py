"""Operations of models whose rows have several hidden states, called streams (AltUp, arXiv 2301.13310)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lookahead.cpu.operations import Operation, Value


@dataclass(frozen=True, eq=False)
class Blend(Operation):
    """Each stream of x of `size` numbers, from the first one on, and the sum of those of more by factors of the row.

    weight: [streams of x * streams of more, width of by]. Its products with by, rounded, and + offset, rounded, are the
    factors; those of a stream of x stand together. Without it, the offset is the factor. Sums are rounded before they
    are added.
    """

    x: Value
    out: Value
    more: Value
    size: int
    by: Value | None = None
    weight: torch.Tensor | None = None
    offset: float = 0.0
    first: int = 0
    is_private = True

    @property
    def count(self) -> int:
        """Streams that are added."""
        return self.more.width // self.size

    def cpp_fields(self) -> dict[str, Any]:
        of_factors = {} if self.by is None else {"value_size": self.by.width, "temporary": [self.by]}
        return {"y": self.more, **of_factors}

    def within_limits(self, limits: Mapping[str, int]) -> bool:
        return self.count <= limits["MOST_STREAMS"]

    def shapes_fit(self) -> bool:
        shape = None if self.weight is None else tuple(self.weight.shape)
        wanted = None if self.by is None else (self.x.width // self.size * self.count, self.by.width)
        are_whole = self.x.width % self.size == self.more.width % self.size == 0
        return are_whole and self.count > 0 and shape == wanted and self.first >= 0


@dataclass(frozen=True, eq=False)
class Rescale(Operation):
    """out = x * rms(like) / rms(x), where rms is the root of the mean of a row's squares.

    limit: lower bound for the mean of x's squares. Squares, means, roots and the product are rounded.
    """

    x: Value
    out: Value
    like: Value
    limit: float
    is_private = works_in_place = True

    def cpp_fields(self) -> dict[str, Any]:
        return {"y": self.like}

    def shapes_fit(self) -> bool:
        return self.like.width == self.x.width


@dataclass(frozen=True, eq=False)
class Cut(Operation):
    """out = max(x - mean(x) - factor * deviation(x), 0), of the numbers of a row.

    The factor decides which share of normally distributed numbers is not zero (Gemma 3n; Spark, You et al. 2025, arXiv
    2506.06644). Mean, deviation, product, sum and difference are rounded.
    """

    x: Value
    out: Value
    factor: float
    is_private = works_in_place = True
