"""The program and the packed weights of a model, which outlive a call of generate().

Weights may change at any time, by the user, an optimizer or another thread. So before anything here is used, it is
checked against the weights.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from weakref import WeakSet, ref

import torch
from transformers import PreTrainedModel

from lookahead.cpu.executor import Executor, pack
from lookahead.cpu.products import Linear
from lookahead.cpu.program import Program
from lookahead.models.adapter import ModelAdapter
from lookahead.models.kept import OfModels
from lookahead.models.state import State, state_of
from lookahead.passes.runner import EagerRunner
from lookahead.step import Visibility
from ngram_pool.forks import Turn

if TYPE_CHECKING:
    from lookahead.passes.fused import Watch

Packs = bool | Literal["auto"]  # `LookaheadConfig.pack_weights`
MOST_KEPT = 2**24  # bytes of computed tensors that are kept while no call uses them


@dataclass
class ReadyProgram:
    """A program that is ready to run, and what it was made of. While no call uses it, it holds none of the tensors that
    it watches.
    """

    state: State
    layers: tuple[Visibility | None, ...]
    packs: bool | Literal["auto"]
    watch: "Watch"
    executor: Executor
    original: Executor | None
    """Reads the weights that were packed, and computes their digests; None if no pass reads all of them, or if it
    would round differently.
    """
    digests: dict[int, bytes | None]
    """Those of the weights that have copies, by their number in the program."""
    most_compared: int
    """Most rows of a pass by `original`. Before a pass over more rows, all weights are read only for their digests."""
    elsewhere: list[torch.Tensor]
    """Tensors of the program that are not watched, because they were computed from those (`Program.elsewhere`)."""
    computed: list[object] | None
    """Values that may have been computed from watched tensors (`Program.computed`), and that the next call computes
    again; None if there are none.
    """
    longest_prompt: int
    """Most tokens of a prompt that it prefills."""
    weight_bytes: int
    declined_bytes: int
    """Estimated bytes of a packed copy that was not made because it is large."""
    runners: "WeakSet[EagerRunner]" = field(default_factory=WeakSet)
    """Those of running calls."""
    is_released: bool = False
    """Whether it holds none of the model's tensors."""

    @property
    def can_wait(self) -> bool:
        """Whether it may be kept while no call uses it."""
        return self.watch.can_let_go and sum([tensor.nbytes for tensor in self.elsewhere]) <= MOST_KEPT

    def let_go(self) -> None:
        """Wait for the next call."""
        self.is_released = True
        self.watch.let_go()
        for executor in self._executors:
            executor.let_go()

    def serves(self, model: PreTrainedModel, adapter: ModelAdapter, packs: bool | Literal["auto"]) -> bool:
        """Whether one more call can use it: nothing has changed, except possibly numbers in packed weights, which
        `original` checks.
        """
        if not (self.state is state_of(model) and self.layers == adapter.layers and self.packs == packs):
            return False
        if not self.is_released:
            is_same = not self.watch.has_changed()
        elif is_same := self.watch.resume():
            self.is_released = False
            tensors = list(map(torch.Tensor.detach, self.watch.tensors))
            for executor in self._executors:
                executor.resume(tensors)
        return is_same and (self.original is not None or not self.executor.has_changed())

    def holds(self, original: Executor) -> bool:
        """Whether the copies match the weights, whose digests a pass has computed."""
        return all(original.digests[i].tobytes() == digest for i, digest in self.digests.items())

    @property
    def _executors(self) -> list[Executor]:
        return [self.executor] if self.original is None else [self.executor, self.original]


class PackedModel:
    """The packed weights of a model, and its program.

    It lives until `forget`, which `unwrap` calls, or as long as the model.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        """Lock that a thread holds during a pass, because two passes at once would compete for cores."""
        self.bytes_in_blocks = 0
        """Bytes of the weights that are read directly from the blocks of a GGUF file."""
        self._copies: dict[int, tuple[Hashable, Linear]] = {}
        self._waiting: ReadyProgram | None = None
        self._in_use: ref[ReadyProgram] | None = None  # running calls hold it

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies."""
        return sum([tensor.nbytes for _, linear in self._copies.values() for tensor in linear.tensors()])

    def drop_copies(self) -> None:
        self._copies = {}

    def pack(self, program: Program, indexes: bool) -> Program:
        """`executor.pack`, with the copies of earlier calls where they hold the weights."""
        return pack(program, self._copies, indexes=indexes)

    def find(self, model: PreTrainedModel, adapter: ModelAdapter, packs: Packs) -> ReadyProgram | None:
        """Return the program of other running calls, or of the last call, if the model has not changed."""
        ready, self._waiting = self._waiting or (self._in_use() if self._in_use else None), None
        return ready if ready is not None and ready.serves(model, adapter, packs) else None

    def enter(self, ready: ReadyProgram, runner: EagerRunner) -> None:
        """Note that the call of ``runner`` uses this program."""
        self._in_use = ref(ready)
        ready.runners.add(runner)

    def leave(self, ready: ReadyProgram, runner: EagerRunner, is_current: bool) -> None:
        """Note that a call has ended. If it was the last one, its program is kept for the next if it ``is_current``."""
        ready.runners.discard(runner)
        if is_current and ready.can_wait and not ready.runners:
            ready.let_go()
            self._waiting = ready


_packed = OfModels[PackedModel]()


def packed_of(model: PreTrainedModel) -> PackedModel:
    return _packed.get(model) or _packed.setdefault(model, PackedModel())


def forget(model: PreTrainedModel) -> None:
    """Free the packed weights and the program of a model that no call decodes."""
    _packed.pop(model)
