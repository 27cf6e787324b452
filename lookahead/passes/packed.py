"""What passes in one call have made of a model, which outlives a call of generate().

Weights may be written to at any time, by the user, an optimizer or another thread. So nothing here is used before it is
known to be of the weights as they are.
"""

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from transformers import PreTrainedModel

from lookahead.cpu.executor import Executor, pack
from lookahead.cpu.products import Linear
from lookahead.cpu.program import Program
from lookahead.models.adapter import ModelAdapter
from lookahead.models.state import State, state_of
from lookahead.passes.runner import EagerRunner
from lookahead.step import Visibility

if TYPE_CHECKING:
    from lookahead.passes.fused import Watch

Packs = bool | Literal["auto"]  # `LookaheadConfig.pack_weights`


@dataclass
class ReadyProgram:
    """A program that is ready to run, and what it was made of. While no call has it, it holds none of the model's
    tensors.
    """

    state: State
    layers: tuple[Visibility | None, ...]
    packs: bool | Literal["auto"]
    watch: "Watch"
    executor: Executor
    original: Executor | None
    """Reads the weights that copies were made of, and finds their digests; None if no pass reads all of them, or if it
    would round otherwise.
    """
    digests: dict[int, bytes | None]
    """Those of the weights that have copies, by their number in the program."""
    most_compared: int
    """Rows of a pass by `original`, at most. Before one of more, all weights are read for their digests alone."""
    computed: list[object] | None
    """What may have been computed from the tensors (`Program.computed`); None: nothing was, unless it is compared with
    them. If something was, this is not kept until the next call.
    """
    most_read: int
    """Tokens of a prompt that it reads, at most."""
    weight_bytes: int
    declined_bytes: int
    """Bytes, about, of a copy of the weights that was not made because it is large."""
    runners: "WeakSet[EagerRunner]" = field(default_factory=WeakSet)
    """Those of calls under way."""
    waits: bool = False
    """Whether it holds none of the model's tensors."""

    def let_go(self) -> None:
        """Wait for the next call."""
        self.waits = True
        self.watch.let_go()
        for executor in self._executors:
            executor.let_go()

    def serves(self, model: PreTrainedModel, adapter: ModelAdapter, packs: bool | Literal["auto"]) -> bool:
        """Whether it can serve one more call: whether all is as it was, but for numbers in weights that have copies:
        those `original` compares.
        """
        if not (self.state is state_of(model) and self.layers == adapter.layers and self.packs == packs):
            return False
        if not self.waits:
            is_same = not self.watch.has_changed()
        elif is_same := self.watch.resume():
            self.waits = False
            tensors = list(map(torch.Tensor.detach, self.watch.tensors))
            for executor in self._executors:
                executor.resume(tensors)
        return is_same and (self.original is not None or not self.executor.has_changed())

    def holds(self, original: Executor) -> bool:
        """Whether the copies hold the weights, whose digests a pass has found."""
        return all(original.digests[i].tobytes() == digest for i, digest in self.digests.items())

    @property
    def _executors(self) -> list[Executor]:
        return [self.executor] if self.original is None else [self.executor, self.original]


class PackedModel:
    """The copies of a model's weights in fewer bits, and its program.

    It lives from the first look at the model to `forget`, which unwrapping calls, or as long as the model.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """What a thread holds during a pass: two passes at once would take each other's cores."""
        self.bytes_in_blocks = 0
        """Bytes of the weights that are read from the blocks of a GGUF file, where they are."""
        self._copies: dict[int, Linear] = {}
        self._waiting: ReadyProgram | None = None
        self._in_use: ref[ReadyProgram] | None = None  # calls under way hold it

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies."""
        return sum([tensor.nbytes for linear in self._copies.values() for tensor in linear.tensors()])

    def drop_copies(self) -> None:
        self._copies = {}

    def pack(self, program: Program, indexes: bool) -> Program:
        """`executor.pack`, with the copies of earlier calls where they hold the weights."""
        return pack(program, self._copies, indexes=indexes)

    def find(self, model: PreTrainedModel, adapter: ModelAdapter, packs: Packs) -> ReadyProgram | None:
        """Return the program that other calls have, or that the last one has left, if it is of the model as it is."""
        ready, self._waiting = self._waiting or (self._in_use() if self._in_use else None), None
        return ready if ready is not None and ready.serves(model, adapter, packs) else None

    def enter(self, ready: ReadyProgram, runner: EagerRunner) -> None:
        """Note that the call of ``runner`` has this program."""
        self._in_use = ref(ready)
        ready.runners.add(runner)

    def leave(self, ready: ReadyProgram, runner: EagerRunner, is_current: bool) -> None:
        """Note that a call has ended. The last one leaves its program to the next, if it ``is_current``."""
        ready.runners.discard(runner)
        if is_current and ready.computed is None and not ready.runners:
            ready.let_go()
            self._waiting = ready


_packed: WeakKeyDictionary[PreTrainedModel, PackedModel] = WeakKeyDictionary()


def packed_of(model: PreTrainedModel) -> PackedModel:
    return _packed.get(model) or _packed.setdefault(model, PackedModel())


def forget(model: PreTrainedModel) -> None:
    """Free what is kept of a model that no call decodes."""
    _packed.pop(model, None)


def _after_fork() -> None:
    """Make new locks: a child has none of the threads that held the old ones."""
    for packed in list(_packed.values()):
        packed.turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
