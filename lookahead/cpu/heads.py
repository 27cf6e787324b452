"""Operations on heads that few families need: they select, multiply and join them."""

from dataclasses import dataclass
from typing import Any

import torch

from lookahead.cpu.operations import LANES, Operation, Part, Value


@dataclass(frozen=True, eq=False)
class Select(Operation):
    """Selects heads of x, which are of `size` and in groups: of each group, `taken` heads from `first` on.

    They keep their order. Each is repeated `repeats` times.
    """

    x: Value
    out: Value
    size: int
    group: int
    first: int
    taken: int = 1
    repeats: int = 1

    @property
    def part(self) -> Part:
        return "heads", self.out.width // self.size

    def cpp_fields(self) -> dict[str, Any]:
        return {"count": self.group, "index": self.first, "heads": self.out.width // self.size}

    def shapes_fit(self) -> bool:
        groups, rest = divmod(self.x.width, self.group * self.size)
        is_within = 0 <= self.first < self.first + self.taken <= self.group
        return not rest and is_within and self.out.width == groups * self.taken * self.repeats * self.size


@dataclass(frozen=True, eq=False)
class HeadProducts(Operation):
    """The numbers of each head of x, multiplied with rows of a weight that are the head's own, from `first` on.

    weight: [heads * rows of each, width]. The rows give the numbers of a head of out, and take a head of `width`; if
    they are transposed, they take the numbers of a head of x, and give a head of `width`.
    """

    x: Value
    out: Value
    weight: torch.Tensor
    heads: int
    first: int
    is_transposed: bool

    @property
    def taken(self) -> int:
        """Rows for each head."""
        return (self.x if self.is_transposed else self.out).width // self.heads

    @property
    def part(self) -> Part:
        return "heads", self.heads

    def cpp_fields(self) -> dict[str, Any]:
        rows, width = self.weight.shape
        of_heads = {"size": self.out.width // self.heads, "count": rows // self.heads}
        return {**of_heads, "index": self.first, "value_size": width}

    def shapes_fit(self) -> bool:
        rows, width = self.weight.shape
        of_width, of_rows = (self.out, self.x) if self.is_transposed else (self.x, self.out)
        return (
            rows % self.heads == of_rows.width % self.heads == 0
            and of_width.width == self.heads * width
            and 0 <= self.first < self.first + self.taken <= rows // self.heads
            and width % LANES == 0
        )


@dataclass(frozen=True, eq=False)
class Join(Operation):
    """Each head of out is a head of x, followed by one of more."""

    x: Value
    out: Value
    more: Value
    heads: int

    @property
    def part(self) -> Part:
        return "heads", self.heads

    def cpp_fields(self) -> dict[str, Any]:
        return {"y": self.more, "size": self.out.width // self.heads}

    def shapes_fit(self) -> bool:
        heads_fit = not self.x.width % self.heads and not self.more.width % self.heads
        return heads_fit and self.out.width == self.x.width + self.more.width
