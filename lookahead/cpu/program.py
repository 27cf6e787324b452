"""A pass as a program: a list of operations, in the order in which they are computed.

`models.families` writes the program of a model, and says there what the model's own forward says. Two executors run it:
`executor.cpp`, and `reference.py`, which says in plain torch what each operation is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from lookahead.cpu.operations import (
    Append,
    Attend,
    Convolve,
    Delta,
    Embed,
    Experts,
    Logits,
    Operation,
    Products,
    Rotary,
    Scan,
    Value,
)
from lookahead.cpu.products import Linear


class CacheShape(NamedTuple):
    """What a layer of the cache holds of each position."""

    heads: int
    key_size: int
    value_size: int


class StateShape(NamedTuple):
    """What a layer of the cache keeps of all positions together."""

    channels: int
    """Of its convolutions."""
    columns: int
    """The last inputs that these read."""
    heads: int = 0
    """Of its recurrence, if it has one."""
    keys: int = 0
    """Numbers of a head of keys."""
    values: int = 0
    is_by_values: bool = False
    """Whether it is held as [heads, values, keys]."""

    @property
    def of_state(self) -> tuple[int, ...]:
        """The shape of the state of its recurrence, if it has one."""
        sizes = (self.values, self.keys) if self.is_by_values else (self.keys, self.values)
        return (self.heads, *sizes) if self.heads else ()


@dataclass(frozen=True)
class Program:
    """The operations of a pass, `Embed` first and `Logits` last."""

    operations: Sequence[Operation]

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden], or blocks of such rows."""
        return self._embed.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.dtype

    @property
    def positions(self) -> int | None:
        """Positions that a text may have; None: no table bounds them."""
        table = self._embed.of_positions
        found = [] if table is None else [len(table) - self._embed.offset]
        attends = [operation for operation in self.operations if isinstance(operation, Attend)]
        return min([*found, *(one.biases.shape[1] for one in attends if one.biases is not None)], default=None)

    @property
    def vocabulary(self) -> int:
        """Tokens that have an embedding."""
        return min(len(operation.weight) for operation in self.operations if isinstance(operation, Embed))

    @property
    def rotaries(self) -> dict[str, int]:
        """The names of the tables of cosines and sines, and the numbers of the smallest head that turns by each."""
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
    def states(self) -> dict[int, StateShape]:
        """Of the layers of the cache that keep a state, in their order."""
        found: dict[int, StateShape] = {}
        for one in self.operations:
            if isinstance(one, Convolve):
                before = found.get(one.layer, StateShape(0, 0))
                channels, columns = max(before.channels, one.first + one.x.width), max(before.columns, one.taps - 1)
                found[one.layer] = before._replace(channels=channels, columns=columns)
            elif isinstance(one, (Delta, Scan)):
                before, is_by_values = found.get(one.layer, StateShape(0, 0)), isinstance(one, Scan)
                found[one.layer] = StateShape(*before[:2], one.heads, one.size, one.value_size, is_by_values)
        return found

    @property
    def last_reads(self) -> dict[Value, int]:
        """The number of the last operation that reads a value, if one does."""
        return {value: i for i, operation in enumerate(self.operations) for value in operation.read()}

    @property
    def linears(self) -> list[Linear]:
        return [linear for operation in self.operations for linear in operation.linears]

    @property
    def is_transposed(self) -> bool:
        """Whether weights lie transposed. Then they must be copied before they are read."""
        return any(linear.is_transposed(self.dtype) for linear in self.linears)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, also those that the weights of linear layers were made of."""
        parts = [tensor for linear in self.linears for tensor in linear.tensors()]
        return parts + [tensor for operation in self.operations for tensor in operation.tensors()]

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

    def fits(self) -> bool:
        """Whether all operations fit, layers of the cache are filled once and in order, and all tensors can be read."""
        dtype = self.dtype
        return (
            all(operation.fits() for operation in self.operations)
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
        """The same program with other linear layers, which `change` makes of its own."""

        def changed() -> Iterator[Operation]:
            for operation in self.operations:
                if isinstance(operation, (Products, Experts)):
                    yield replace(operation, of=tuple(map(change, operation.of)))
                elif isinstance(operation, Logits):
                    yield replace(operation, of=change(operation.of))
                else:
                    yield operation

        return Program(list(changed()))
