"""A pass as a program: a list of operations, in the order in which they are computed.

`models.families` writes the program of a model, after the model's own forward. Two executors run it: `executor.cpp`,
and `reference.py`, which defines each operation in plain torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lookahead.cpu.operations import Append, Attend, Embed, Logits, Operation, Rotary, Value
from lookahead.cpu.products import Format, Linear

if TYPE_CHECKING:
    from lookahead.cpu.states import StateShape


class CacheShape(NamedTuple):
    """What a layer of the cache holds for each position."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class Program:
    """The operations of a pass, `Embed` first and `Logits` last."""

    operations: Sequence[Operation]

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.dtype

    @property
    def positions(self) -> int | None:
        """Most positions of a text; None: no table bounds them."""
        found = [operation.most_positions for operation in self.operations]
        return min((most for most in found if most is not None), default=None)

    @property
    def vocabulary(self) -> int:
        """Tokens that have an embedding."""
        return min(len(operation.weight) for operation in self.operations if isinstance(operation, Embed))

    @property
    def rotaries(self) -> dict[str, int]:
        """The names of the tables of cosines and sines, and the numbers of the smallest head that rotates by each."""
        found: dict[str, int] = {}
        for operation in self.operations:
            if isinstance(operation, Rotary):
                found[operation.name] = min(operation.size, found.get(operation.name, operation.size))
        return found

    @property
    def caches(self) -> dict[int, CacheShape]:
        """Of the layers of the cache that hold keys and values, in their order."""
        appends = [operation for operation in self.operations if isinstance(operation, Append)]
        return {append.layer: CacheShape(append.heads, append.size, append.value_size) for append in appends}

    @property
    def states(self) -> "dict[int, StateShape]":
        """Of the layers of the cache that keep a state, in their order."""
        found: dict[int, StateShape] = {}
        for operation in self.operations:
            found |= operation.state_shapes(found)
        return found

    @property
    def last_reads(self) -> dict[Value, int]:
        """The number of the last operation that reads a value, if one does."""
        return {value: i for i, operation in enumerate(self.operations) for value in operation.values_read()}

    @property
    def linears(self) -> list[Linear]:
        return [linear for operation in self.operations for linear in operation.linears]

    @property
    def is_transposed(self) -> bool:
        """Whether weights are transposed. Then they must be copied before they are read."""
        return any(linear.is_transposed(self.dtype) for linear in self.linears)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, also those that the weights of linear layers were made of."""
        parts = [tensor for linear in self.linears for tensor in linear.tensors()]
        return parts + [tensor for operation in self.operations for tensor in operation.tensors()]

    @property
    def mixed(self) -> Operation | None:
        """The first operation with floats of another dtype than the program's, which it cannot read beside them."""
        for operation in self.operations:
            wide = set(map(id, operation.wide()))
            of_linears = [linear.weight for linear in operation.linears if linear.format == Format.FLOATS]
            narrow = [*of_linears, *(tensor for tensor in operation.tensors() if id(tensor) not in wide)]
            if any(tensor.is_floating_point() and tensor.dtype != self.dtype for tensor in narrow):
                return operation
        return None

    def elsewhere(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its tensors that are not in the memory of these, and so may have been computed from them."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [tensor for tensor in self.tensors if tensor.untyped_storage().data_ptr() not in memory]

    def computed(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        """All numbers that may have been computed from these tensors: its settings, and what lies `elsewhere`."""
        found = [getattr(one, field.name) for one in self.operations for field in fields(one)]
        settings = [one for one in found if isinstance(one, (bool, int, float))]
        arrays = [one for one in found if isinstance(one, np.ndarray)]
        arrays += [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in self.elsewhere(tensors)]
        return [*settings, *(array.tobytes() for array in arrays)]

    @property
    def _embed(self) -> Embed:
        first = self.operations[0]
        assert isinstance(first, Embed)
        return first

    def shapes_fit(self) -> bool:
        """Whether all shapes fit, layers of the cache are filled once and in order, and all tensors can be read."""
        dtype = self.dtype
        return (
            all(operation.shapes_fit() for operation in self.operations)
            and self._fits_cache()
            and all(linear.is_served(dtype) or linear.is_transposed(dtype) for linear in self.linears)
            and all(operation.is_plain(dtype) for operation in self.operations)
        )

    def _fits_cache(self) -> bool:
        held: dict[int, CacheShape] = {}
        for operation in self.operations:
            if isinstance(operation, Append):
                if operation.layer <= max(held, default=-1):
                    return False
                held[operation.layer] = CacheShape(operation.heads, operation.size, operation.value_size)
            elif isinstance(operation, Attend):
                size, value_size = operation.size, operation.value_size
                sizes = (value_size, size - value_size) if operation.is_latent else (size, value_size)
                shape = CacheShape(operation.key_heads, *sizes)
                if held.get(operation.layer) != shape:
                    return False
        return bool(held or self.states)

    def with_linears(self, change: Callable[[Linear], Linear]) -> "Program":
        """The same program with ``change`` applied to its linear layers."""

        def changed(operation: Operation) -> Operation:
            if not operation.linears:
                return operation
            linears = tuple(map(change, operation.linears))
            its = {"linear": linears[0]} if isinstance(operation, Logits) else {"layers": linears}
            return replace(operation, **its)  # type: ignore[arg-type]  # those with linear layers have one of these

        return Program(list(map(changed, self.operations)))
