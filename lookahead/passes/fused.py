"""Fused passes: a pass is one call of C++ on a CPU, for models whose passes are programs (`models.families`)."""

import operator
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.compat import VERSION, attention_implementation, is_plain, registered_attention, tensors_of
from lookahead.cpu import native
from lookahead.cpu.executor import (
    Executor,
    Rows,
    bytes_to_copy,
    can_digest,
    serves,
    weight_bytes,
)
from lookahead.cpu.products import Format, is_plain_of
from lookahead.cpu.program import CacheShape, Program
from lookahead.models.adapter import ModelAdapter, context_length
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache, SeparateCaches
from lookahead.models.families import Page, UnknownModelError, page_of
from lookahead.models.layers import rope_kinds, ropes_of
from lookahead.models.state import state_of
from lookahead.passes.packed import Packs, ReadyProgram, packed_of
from lookahead.passes.runner import EagerRunner, Output, TopK, joined
from lookahead.step import MAX_DEPTH, Step, grow, pad

# Most tokens of a prompt that fused passes prefill with the matrix unit. Beyond, torch is faster.
MOST_READ_IN_TILES = {torch.bfloat16: 192, torch.float32: 512}
NO_LIMIT = 2**62
MOST_AT_ONCE = 256  # of them in a pass, which bounds its memory. Each pass unpacks the weights once
# Most rows of a first pass that reads the weights themselves, not their packed copies. With more rows, that costs more
# than checking all copies before the pass.
MOST_COMPARED = 12
LEAST_AHEAD = 1024  # positions that a table of rotary embeddings has beyond those that a pass needs
MOST_COPIED = 2**30  # by default, most bytes of a copy that takes more than half as much as the weights

PARTS = 8  # of the watched tensors; only one part is checked if no foreign code has run
_WRONG_WEIGHTS = "its weights are not all in float32, bfloat16 or int8, or their shapes do not fit"

_ADDRESS, _IS_INITIALIZED = torch.Tensor.data_ptr, operator.attrgetter("is_initialized")


class Watch:
    """Notices that tensors of modules were replaced, moved, resized or written to, where torch counts that.

    torch does not count writes through ``.data`` or numpy.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        places = tensors_of(modules)
        self._places, self._names = [place for place, _, _ in places], [name for _, name, _ in places]
        self.tensors = [tensor for _, _, tensor in places]
        """The watched tensors."""
        self.in_memory = [part for tensor in self.tensors for part in _in_memory(tensor)]
        """The same, but the inner tensors instead of those that torchao has quantized."""
        self._counted = [tensor for tensor in self.in_memory if not tensor.is_inference()]
        self._before = _looked_at(self.in_memory, self._counted)
        self._parts: list[list] = []  # watched tensors and their last properties, once requested

    def has_changed(self, part: int | None = None) -> bool:
        """Whether anything has changed since this was made. part: of PARTS, the one to check; default: all.

        Between two passes, caches are cold, so checking everything takes up to half a millisecond.
        """
        of_all: tuple[list[Any], ...] = self.tensors, self.in_memory, self._counted, *self._before
        seen: Sequence[list[Any]] = (self._places, self._names, *of_all)
        if part is not None:
            if not self._parts:
                self._parts = [
                    [one[len(one) * i // PARTS : len(one) * (i + 1) // PARTS] for one in seen] for i in range(PARTS)
                ]
            seen = self._parts[part]
        places, names, tensors, memory, counted, *before = seen
        if not all(map(operator.is_, map(dict.get, places, names), tensors)):
            return True
        return _looked_at(memory, counted) != tuple(before)

    @property
    def can_let_go(self) -> bool:
        """Whether all tensors are in memory of their own, and torch counts their changes."""
        return len(self._counted) == len(self.tensors) and all(map(operator.is_, self.tensors, self._counted))

    @property
    def has_buffers(self) -> bool:
        return not all(isinstance(tensor, nn.Parameter) for tensor in self.tensors)

    def let_go(self) -> None:
        """Release the tensors until `resume`. Only if it `can_let_go`."""
        self._identities = list(map(id, self.tensors))  # torch swaps no tensor that has weak references
        self.tensors = self.in_memory = self._counted = []
        self._parts = []

    def resume(self) -> bool:
        """Hold the tensors again. Returns whether they are unchanged: the same, or others in the same memory."""
        now: list[Any] = list(map(dict.get, self._places, self._names))
        if list(map(id, now)) != self._identities:
            return False
        self.tensors = self.in_memory = self._counted = now
        return _looked_at(now, now) == self._before


def _looked_at(memory: list[torch.Tensor], counted: list[torch.Tensor]) -> tuple[list, ...]:
    tensor = torch.Tensor
    shapes = list(map(tensor.size, memory)), list(map(tensor.stride, memory))
    return list(map(tensor.data_ptr, memory)), *shapes, list(map(VERSION, counted))


def _in_memory(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that a tensor consists of. One that torchao has quantized has no memory itself."""
    if is_plain(tensor):
        return [tensor]
    from lookahead.compat.quantized import int8_weight  # other weights do not need it

    return int8_weight(tensor) or [tensor]


class FusedRunner(EagerRunner):
    """Runs steps and prompts as fused passes. Everything else runs eagerly.

    Weights are read in place, or from a packed copy (`pack`). All running calls share the program of the model, and it
    is kept for the next call if nothing has changed. The first pass of a call reads the weights themselves, and checks
    by digests whether the copy still matches them. If weights change during a call, they are read in place from then
    on; if that is impossible, passes run eagerly. Raises UnknownModelError if the model has no fused passes.
    """

    name = "fused"

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: ModelAdapter,
        hidden_states: tuple[int, ...] = (),
        packs: Packs = False,
    ):
        """packs: `LookaheadConfig.pack_weights`."""
        super().__init__(model, adapter, hidden_states)
        self._packed = packed_of(model)
        if adapter.foreign:
            raise UnknownModelError(adapter.foreign[0])
        if not state_of(model).is_strided:
            raise UnknownModelError(_WRONG_WEIGHTS)
        self._page = _page_of(model, adapter)
        self._placeholders = frozenset(self._page.placeholders())
        # With longrope, the longest position of a pass decides the frequencies of all rows.
        self._shares = not any(rope.get("rope_type") == "longrope" for rope in ropes_of(model))
        by = self._page.attends_by
        attends = adapter.splits_attention if by == "split" else attention_implementation(adapter.config) == by
        if by == "nothing":
            attends = True
        if by == "eager" and registered_attention(by) is not None:  # another function replaces the model's own
            attends = False
        takes_positions = adapter.takes_position_ids or adapter.biases_keys or by == "nothing"
        if not (attends and adapter.can_branch and adapter.uses_kernels and takes_positions):
            raise UnknownModelError("it does not use our attention or our kernels")
        if native.why_missing() is not None:
            raise UnknownModelError("their C++ is missing")
        with self._packed.turn:
            if not packs:
                self._packed.drop_copies()
            if (ready := self._packed.find(model, adapter, packs)) and self._holds(ready):
                self._use(ready, is_compared=False)
            else:
                self._use(self._read(packs))
        self._part = 0  # of the watched tensors, which the last pass has checked
        self._rotary_watch = Watch([])
        self._rotary: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._serves = range(0)  # the largest position of a pass that takes these
        self._buffers: list[_CacheAddresses | None] = []  # of each sequence

    def _holds(self, ready: ReadyProgram) -> bool:
        """Whether the page would write the same program now, of tensors at the same addresses."""
        return ready.computed is None or ready.computed == self._page.program().computed(ready.watch.in_memory)

    def _use(self, ready: ReadyProgram, is_compared: bool = True) -> None:
        """Use this program from now on. is_compared: whether its copies are known to match the weights."""
        self._ready, self._watch = ready, ready.watch
        self._packed.enter(ready, self)
        self._executor: Executor | None = ready.executor
        self._first = None if is_compared else ready.original  # runs the next pass, which checks them
        self.longest_prompt = ready.longest_prompt
        self.weight_bytes, self.declined_bytes = ready.weight_bytes, ready.declined_bytes

    def end(self) -> None:
        with self._packed.turn:
            self._packed.leave(self._ready, self, is_current=self._executor is self._ready.executor)
            self._executor = None

    def _read(self, packs: Packs) -> ReadyProgram:
        """Read the model, and make its program ready to run."""
        model, adapter = self.model, self.adapter
        found = original = self._look()
        kept = [visibility.window if visibility else 0 for visibility in adapter.layers]  # 0: it caches no keys
        windows = self._page.windows()
        if windows != kept + [0] * (len(windows) - len(kept)):  # older transformers leave out what caches nothing
            raise UnknownModelError("its cache keeps other positions than its masks show")
        in_blocks = [linear.weight.nbytes for linear in original.linears if linear.format.is_in_blocks]
        self._packed.bytes_in_blocks, declined = sum(in_blocks), 0
        if packs:
            copied = bytes_to_copy(found)
            indexes = packs is True or copied <= MOST_COPIED or 2 * copied <= weight_bytes(found)
            found = self._packed.pack(found, indexes)
            declined = 0 if indexes else bytes_to_copy(found)
        in_tiles = all(linear.is_in_tiles(found.dtype) for linear in found.linears)
        pairs = list(zip(original.linears, found.linears, strict=True))
        of_copies = {i: copy.digest for i, (_, copy) in enumerate(pairs) if copy.origin is not None}
        are_indexed = all(pairs[i][1].format == Format.INDEXED for i in of_copies)
        is_read = all(operation.reads_all_weights for operation in found.operations) and all(
            can_digest(pairs[i][0], found.dtype)
            and pairs[i][0].is_in_tiles(found.dtype) == pairs[i][1].is_in_tiles(found.dtype)
            for i in of_copies
        )
        elsewhere = original.elsewhere(tensors := self._watch.in_memory)
        return ReadyProgram(
            state=state_of(model),
            layers=adapter.layers,
            packs=packs,
            watch=self._watch,
            executor=_executor_of(found),
            original=Executor(original, of_copies) if of_copies and is_read else None,
            digests=of_copies,
            most_compared=MOST_COMPARED if are_indexed and not in_tiles else NO_LIMIT,
            elsewhere=elsewhere,
            computed=original.computed(tensors) if elsewhere or self._watch.has_buffers else None,
            longest_prompt=self._page.reads_prompts * (MOST_READ_IN_TILES[found.dtype] if in_tiles else NO_LIMIT),
            weight_bytes=weight_bytes(found),
            declined_bytes=declined,
        )

    def _look(self) -> Program:
        """Read the model, and watch it from now on."""
        found = self._page.program()
        if not serves(found):
            if (mixed := found.mixed) is not None:
                raise UnknownModelError(f"weights of a {type(mixed).__name__} are not in the dtype of the embedding")
            raise UnknownModelError(_WRONG_WEIGHTS)
        rotary = self._page.rotary_module
        self._watch = Watch([module for module in self.model.modules() if module is not rotary])
        return found

    @property
    def is_ragged(self) -> bool:  # type: ignore[override]  # it is settled when a call begins
        return not torch.is_autocast_enabled("cpu")

    @property
    def company(self) -> Hashable | None:  # type: ignore[override]  # weights may change in a call
        if self._executor is None or not (self._shares and self.is_ragged):
            return None
        return id(self._executor), self.requested

    def join(self, caches: list[LookaheadCache], expected_length: int = 0) -> AnyCache:
        return SeparateCaches(caches) if len(caches) > 1 and self.is_ragged else super().join(caches, expected_length)

    def run(
        self,
        steps: list[Step],
        cache: AnyCache,
        last: list[int] | None = None,
        top_k: TopK = (0, 1.0),
        others_ran: bool = True,
    ) -> Output:
        each = cache.each if isinstance(cache, SeparateCaches) else [cache]
        with self._packed.turn:
            if len(each) < len(steps) or not self._can_run([step.ids for step in steps], each, others_ran):
                return super().run(steps, cache, last, top_k)
            try:
                return self._compute(steps, each, last, top_k)
            except UnknownModelError:
                return super().run(steps, cache, last, top_k)

    def prefill(
        self, new: torch.Tensor, cache: LookaheadCache, logits_to_keep: int = 1, as_steps: bool = False
    ) -> Output:
        count, until = new.shape[1], cache.lengths[0] + new.shape[1]
        if new.ndim > 2 or count > self.longest_prompt or until > context_length(self.model):
            return super().prefill(new, cache, logits_to_keep)
        passes, outputs, left = -(-count // MOST_AT_ONCE), [], count
        for part in new.split(-(-count // passes), dim=1):
            shown = max(0, min(logits_to_keep - left + part.shape[1], part.shape[1]))
            output = self._read_part(part, cache, shown, as_steps, until)
            if output is None:  # the model's own code reads all that is left
                outputs.append(super().prefill(new[:, -left:], cache, logits_to_keep))
                break
            outputs.append(output)
            left -= part.shape[1]
        if len(outputs) == 1:
            return outputs[0]
        together = joined(outputs)
        return Output(together.logits, together.hidden_states)

    def _read_part(
        self, new: torch.Tensor, cache: LookaheadCache, shown: int, as_steps: bool, until: int
    ) -> Output | None:
        """Compute a chunk of a prompt in one pass; None if the model's own code must.

        shown, until: as for `_compute`. Other arguments as for `prefill`.
        """
        ids, count = new[0].cpu().numpy(), new.shape[1]
        with self._packed.turn:
            if not self._can_run([ids], [cache]):
                return None
            step = grow(ids.tolist(), range(-1, count - 1), computed=0)
            try:
                is_prompt = count > MAX_DEPTH and not as_steps
                output = self._compute([step], [cache], shown=shown, until=until, is_prompt=is_prompt)
            except UnknownModelError:
                return None
        cache.commit([step], [list(range(count))])
        return output

    def _can_run(self, ids: list[np.ndarray], caches: list[LookaheadCache], others_ran: bool = True) -> bool:
        """Whether a pass can compute these tokens. Otherwise, the model's own code does, or raises an error."""
        if torch.is_autocast_enabled("cpu"):
            return False
        if self._executor is not None and self._has_changed(self._executor, others_ran):
            self._executor, self._first, self._buffers, self._serves = None, None, [], range(0)
            with suppress(UnknownModelError):
                self._executor = _executor_of(self._look())
        executor = self._executor
        if executor is None:
            return False
        tokens = list(chain.from_iterable(map(np.ndarray.tolist, ids)))
        is_known = 0 <= min(tokens) <= max(tokens) < executor.vocabulary
        if not (is_known and self._placeholders.isdisjoint(tokens)):
            return False
        for b, cache in enumerate(caches):
            if not others_ran and self._has_found(b, cache):
                continue
            has_layers = (cache.in_place_at, cache.states_at) == (list(executor.caches), list(executor.states))
            if not (has_layers and (self._finds(executor, b, cache) or cache.is_empty)):
                return False
        return True

    def _has_changed(self, executor: Executor, others_ran: bool) -> bool:
        """Whether weights seem to have changed. others_ran: as for `EagerRunner.run`."""
        if others_ran:
            return (self._first is None and executor.is_stale()) or self._watch.has_changed()
        self._part = part = (self._part + 1) % PARTS  # other calls go through the parts in their own turn
        return (self._first is None and executor.is_stale(part, PARTS)) or self._watch.has_changed(part)

    def _has_found(self, b: int, cache: LookaheadCache) -> "_CacheAddresses | None":
        """Return what `_finds` has found, if no layer has taken other buffers since. States may always have."""
        found = self._buffers[b] if b < len(self._buffers) else None
        is_known = found is not None and found.cache is cache and found.taken == InPlaceLayer.taken
        return found if is_known and not cache.states_at else None

    def _finds(self, executor: Executor, b: int, cache: LookaheadCache) -> "_CacheAddresses | None":
        """Return the buffers of a sequence's cache, all initialized; None if a pass cannot read and write them."""
        taken, tensors, known = InPlaceLayer.taken, cache.buffers(), self._buffers
        known += [None] * (b + 1 - len(known))
        found = known[b]
        if found is None or not all(map(operator.is_, tensors, found.tensors)):
            fits = all(map(partial(_fits, executor.like.dtype), executor.caches.values(), cache.in_place))
            if not fits or (executor.states and not _states().can_use(executor, cache)):
                return None
            found = known[b] = _CacheAddresses(tensors, list(executor.caches))
        if list(map(_ADDRESS, tensors)) != found.addresses:
            return None
        found.cache, found.taken = cache, taken
        return found

    def _compute(
        self,
        steps: list[Step],
        caches: list[LookaheadCache],
        last: list[int] | None = None,
        top_k: TopK = (0, 1.0),
        shown: int | None = None,
        until: int = 0,
        is_prompt: bool = False,
    ) -> Output:
        """Run a step of each sequence. shown: rows whose logits are returned, the last ones; default: all. If it is
        given, the rows are those of a prompt, and states are committed.
        until: the position after the whole prompt, which the model's own code would prefill in one pass.
        is_prompt: as for `Executor.run`.

        Raises UnknownModelError, before it changes a cache, if the rotary embedding has become another one.
        """
        executor = self._executor_for(sum([len(step) - step.computed for step in steps]))
        laid_out = [
            pad([step], cache.lengths, last and last[b : b + 1])
            for b, (step, cache) in enumerate(zip(steps, caches, strict=True))
        ]
        most = max([max(positions[0].tolist()) for _, positions, _ in laid_out])
        if executor.positions is not None and most >= executor.positions:
            raise UnknownModelError("its table of positions is too short")
        commits = shown is not None
        rotary, kinds, rows, first = self._rotary_of(max(most, until - 1), executor), self.adapter.kinds, [], [0]
        count, temperatures = top_k
        for b, (step, cache, (ids, positions, ancestors)) in enumerate(zip(steps, caches, laid_out, strict=True)):
            cache.prepare(new := ids.shape[1], step.computed)
            hidden = cache.hidden(ancestors, positions, kinds, of_step=True)
            unseen = [
                (None if commits and _is_causal(hidden[kind][0]) else np.ascontiguousarray(hidden[kind][0]), layers)
                for kind, layers in kinds.items()
            ]
            extended = self._extend(executor, b, cache, new)
            at = temperatures if isinstance(temperatures, float) else temperatures[b]
            states = _states().find(executor, cache, 0 if commits or new == 1 else new) if executor.states else []
            place = cache.lengths[0], step.computed
            rows.append(Rows(ids[0], positions[0], *extended, unseen, *place, at, step.parents, states))
            first.append(first[-1] + new)
        total = first.pop()
        said = 0 if commits else total if len(steps) > 1 else 1 + steps[0].guesses - steps[0].computed
        logits, outputs, has_nan, found = executor.run(rows, rotary, self.requested, shown, (said, count), is_prompt)
        for b, one in enumerate(rows if executor.states and not commits else []):
            if len(one.ids) > 1:
                caches[b].pending = executor.pending(b, (caches[b].room, caches[b].buffers()))
        if executor is self._first:
            self._compare(executor)
        argmax = None
        if found is not None:  # in C++, nothing is likely in a row with a NaN
            argmax = np.where(found[1][:, 0] > 0, found[0][:, 0], -1).tolist()
        return Output(logits, outputs, first, has_nan, found, argmax)

    def _executor_for(self, rows: int) -> Executor:
        """Return the executor for a pass of this many rows. If they are many, copies are checked first."""
        if self._first is not None and rows > self._ready.most_compared and not self._ready.executor.has_changed():
            self._first = None
        executor = self._first or self._executor
        assert executor is not None
        return executor

    def _compare(self, original: Executor) -> None:
        """Continue with the copies if they match the weights that the first pass has read, or with new copies."""
        self._first = None
        if not self._ready.holds(original):
            self._executor = None
            with suppress(UnknownModelError):
                self._use(self._read(self._ready.packs))

    def _rotary_of(self, position: int, executor: Executor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines by name of the rotary embedding: float32 [positions, rotary] each.

        position: the largest of a pass, or of a prompt in several passes. Longrope chooses one of two sets of
        frequencies for all rows by it.
        """
        if position not in self._serves or self._rotary_watch.has_changed():
            rotary = self._page.rotary_module
            count = switch = position + max(LEAST_AHEAD, position // 4)
            if getattr(rotary, "rope_type", None) == "longrope":
                switch = rope_kinds(rotary.config)[""]["original_max_position_embeddings"]
            self._serves = range(switch, count) if position >= switch else range(min(switch, count))
            positions = torch.arange(self._serves.stop, device="cpu")[None]
            like, tables = executor.like.new_empty(1, 1, 1), {}
            for name in executor.rotaries:
                cos, sin = self._page.rotary_tables(like, positions, name)
                tables[name] = cos.float().contiguous(), sin.float().contiguous()
            rotates_all = all(cos.shape[1] == executor.rotaries[name] for name, (cos, _) in tables.items())
            if not (executor.can_rotate_by(tables) and (rotates_all or self._page.rotates_part)):
                self._executor = None
                raise UnknownModelError("its rotary embedding does not fit its heads")
            longest = min([count, *(len(cos) for cos, _ in tables.values())])
            self._serves = range(self._serves.start, min(self._serves.stop, longest))
            if position not in self._serves:
                raise UnknownModelError("its table of positions is too short")
            self._rotary = tables
            self._rotary_watch = Watch([] if rotary is None else [rotary])  # longrope has replaced a buffer
        return self._rotary

    def _extend(
        self, executor: Executor, b: int, cache: LookaheadCache, rows: int
    ) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Append rows to all layers of the cache of sequence ``b``. Return `Rows.caches` and `Rows.held`."""
        if not all(map(_IS_INITIALIZED, cache.in_place)) or (executor.states and cache.is_empty):
            new_empty = executor.like.new_empty
            for one, (heads, size, value_size) in zip(cache.in_place, executor.caches.values(), strict=True):
                one.lazy_initialization(new_empty(1, heads, 0, size), new_empty(1, heads, 0, value_size))
            if executor.states:
                _states().initialize(executor, cache)
            cache.prepare(rows)
        places, held = cache.extend(rows), [0] * executor.layers
        if (buffers := self._has_found(b, cache) or self._finds(executor, b, cache)) is None:
            raise RuntimeError("the buffers of the cache have changed while a pass began")
        for indices, _, seen in places:
            for index in indices:
                held[index] = seen
        return buffers.shown_from([place[:2] for place in places], executor.layers), held


def _states() -> ModuleType:
    """Functions for passes over layers with a state; other models do not import them."""
    from lookahead.passes import states

    return states


def _page_of(model: PreTrainedModel, adapter: ModelAdapter) -> Page:
    try:
        return page_of(model)
    except UnknownModelError as error:
        if adapter.has_state:
            raise UnknownModelError(f"{error}; its layers keep a state") from error
        if not adapter.can_branch:
            raise UnknownModelError(
                f"{error}; its attention depends on more than positions, or takes no mask"
            ) from error
        raise


def _executor_of(found: Program) -> Executor:
    if found.is_transposed:
        raise UnknownModelError("its weights are transposed, and they have no packed copy (pack_weights)")
    return Executor(found)


class _CacheAddresses:
    """The addresses of the keys and values of all layers. It holds the tensors, so that the addresses stay valid."""

    def __init__(self, tensors: list[torch.Tensor], layers: list[int]):
        """tensors: `LookaheadCache.buffers`. layers: those of the cache that hold keys and values."""
        self.tensors = tensors
        self.cache: LookaheadCache | None = None
        """The cache in which they were last found."""
        self.taken = 0
        """`InPlaceLayer.taken` at that time."""
        self.numbers = {layer: i for i, layer in enumerate(layers)}
        self.addresses = list(map(_ADDRESS, tensors))
        tensors = tensors[: 2 * len(layers)]
        self.strides = [tensor.stride(1) for tensor in tensors]
        """Numbers from head to head."""
        self.columns = [tensor.shape[3] * tensor.element_size() for tensor in tensors]
        """Bytes of a column of one head."""
        self._first: list[tuple[list[int], int]] = []
        self._shown: list[tuple[int, int, int, int]] = []

    def shown_from(self, first: list[tuple[list[int], int]], layers: int) -> list[tuple[int, int, int, int]]:
        """Return `Rows.caches` of so many layers. first: the first column shown, for layers by their indices."""
        if first != self._first:
            self._first, self._shown = first, [(0, 0, 0, 0)] * layers
            for indices, column in first:
                for index in indices:
                    i = self.numbers[index]
                    j = i + len(self.numbers)
                    keys = self.addresses[i] + column * self.columns[i]
                    values = self.addresses[j] + column * self.columns[j]
                    self._shown[index] = keys, values, self.strides[i], self.strides[j]
        return self._shown


def _is_causal(hidden: np.ndarray) -> bool:
    """Whether the rows of a chain see all keys except those of later rows."""
    return hidden.shape[1] == len(hidden) and not np.tril(hidden).any()


def _fits(dtype: torch.dtype, shape: CacheShape, layer: Any) -> bool:
    """Whether C++ can read and write the buffers of a layer of the cache."""
    if not layer.is_initialized:
        return False
    (keys, values), (heads, of_key, of_value) = layer.buffers, shape
    room = keys.shape[2]
    are_of_shape = keys.shape == (1, heads, room, of_key) and values.shape == (1, heads, room, of_value)
    return are_of_shape and room >= layer.at.columns and is_plain_of(keys, dtype) and is_plain_of(values, dtype)
