"""Steps of fixed shape, which a GPU replays as CUDA graphs: one launch for a step instead of one for each kernel.

In an eager pass of a large model over a few tokens, Python takes several times as long to launch the kernels as the GPU
takes to read the weights. A CUDA graph is launched at once, but it always does the same with the same memory. So the
model's program runs in plain torch (`static.StaticPass`), and everything that it uses has a fixed address and shape:

    keys and values   buffers for all layers, kept from call to call; a call's prompt is copied into them once
    tokens            T is rounded up to a power of two; no other token sees those that pad a step
    columns shown     also rounded up, by a half at most; the mask hides the empty ones
    ids, positions, first column, ancestors   copied into fixed tensors before each step; the mask is made on the device

There is one graph for each pair of T and columns shown, captured when it is first needed: at most 8 for the first
`FIRST_CAPACITY` columns, and as many for each other number of columns that a longer text needs (`_rounded_up`). The
graphs share their memory. When the buffers grow they move, and all graphs are dropped.

Graphs never change a text. The passes are compared with plain decoding before they are used for a model (`probe`), and
the first runs of each graph with the same pass launched kernel by kernel. Passes that cannot be captured, or that
differ, run without graphs, with one warning.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.compat import attention_implementation, registered_attention
from lookahead.cpu.program import Program
from lookahead.models import attention
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache
from lookahead.models.families import UnknownModelError, page_of
from lookahead.models.layers import changes_rope
from lookahead.models.origin import is_own
from lookahead.models.sliding import SlidingLayer
from lookahead.models.state import state_of
from lookahead.passes import probe, static
from lookahead.passes.capabilities import what_is_wrong
from lookahead.passes.rounding import relative_error, tolerance
from lookahead.passes.runner import EagerRunner, Output, TopK
from lookahead.step import Step, pad

FIRST_CAPACITY = 1024  # columns
MAX_ROWS = 128  # most rows of a captured step
RUNS_CHECKED = 2  # runs of each graph; a value that the capture has fixed is still right in the first
WARM_UP_RUNS = 3  # before the first capture, so that libraries have chosen their kernels and allocated memory

Result = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""Logits, [T, vocabulary], and outputs of layers by their numbers, [T, hidden]."""
Replay = Callable[[], Result]
Capture = Callable[[Replay, torch.device, Replay | None], Replay]

_capturing = threading.Lock()  # torch captures one graph at a time


def capture_cuda(function: Replay, device: torch.device, earlier: Replay | None) -> Replay:
    """Capture ``function`` on ``device`` as a CUDA graph. Each replay returns the same tensors with new content.

    earlier: a replay to share memory with. Each of the two then overwrites the result of the other.
    During the capture, no other thread may draw random numbers on this device.
    Raises any error of ``function`` if it cannot be captured, mostly RuntimeError.
    """
    pool = earlier.graph.pool() if isinstance(earlier, _CudaReplay) else None
    with _capturing, torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.graphsafe_get_state()
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS if pool is None else 1):
                function()
        current.wait_stream(side)
        # A failed capture leaves its own stream as the current one, and the generator's state unusable. So it gets a
        # copy of that state.
        generator.graphsafe_set_state(state.clone_state())
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = function()
        finally:
            generator.graphsafe_set_state(state)
            torch.cuda.set_stream(current)
    return _CudaReplay(graph, result)


@dataclass
class _CudaReplay:
    graph: "torch.cuda.CUDAGraph"
    result: Result

    def __call__(self) -> Result:
        self.graph.replay()
        return self.result


def static_program(model: PreTrainedModel, adapter: ModelAdapter) -> Program:
    """Return the model's program. Raises UnknownModelError if its passes cannot be replayed on any device."""
    if adapter.foreign:
        raise UnknownModelError(adapter.foreign[0])
    page = page_of(model)
    if not adapter.can_branch or adapter.has_state or adapter.biases_keys:
        raise UnknownModelError("its steps depend on more than mask and position_ids")
    if any(visibility is None or visibility.chunk is not None for visibility in adapter.layers):
        raise UnknownModelError("not all of its layers attend to everything, or to a sliding window")
    if changes_rope(model):
        raise UnknownModelError("its rotary embedding changes with the length")
    name = attention_implementation(model.config) or "eager"
    found = registered_attention(name)
    if not (found is None or found is attention.attend or is_own(found)) or (found and name == "eager"):
        raise UnknownModelError(f"its attention is computed by {found}, which transformers does not define")
    if page.placeholders():
        raise UnknownModelError("some of its tokens are placeholders")
    program = page.program()
    if (reason := static.why_not(program)) is not None:
        raise UnknownModelError(reason)
    return program


class StepGraphs:
    """The graphs of one model, and their buffers.

    A call's `GraphRunner` borrows the buffers with `lend` and returns them with `take_back`. Only one call at a time
    can have them. Another call, nested or in another thread, runs without graphs.
    """

    _replays: dict[tuple[int, int], Replay]  # by T and columns shown
    _unchecked: dict[tuple[int, int], int]  # runs that are still compared
    _inputs: dict[int, tuple[torch.Tensor, torch.Tensor]]  # by T
    _tables: dict[str, tuple[torch.Tensor, torch.Tensor]]  # of the rotary embedding
    _positions: int  # that a text may have; 0: there are no tables
    _made_for: tuple | None  # the model's state, the outputs that are requested, and where its weights are
    _lent: "StaticCache | None"
    _program: Program | None  # while a call has the buffers: it holds the weights
    _windows: dict[int | None, list[int]]  # layers of the cache, by their sliding windows
    _wanted: tuple[int, ...]  # requested outputs

    def __init__(self, model: PreTrainedModel, capture: Capture | None = capture_cuda):
        """capture: makes a replay of a function. None: run steps of fixed shape without capturing them."""
        self._to_model = weakref.ref(model)  # the model refers to this object
        self._capture = capture
        self._free = threading.Lock()
        self._given_up: tuple | None = None  # `State.key` of the model for which there are none
        self.why_not: str | None = None
        """Why the last steps ran without graphs; None if they ran with them."""
        self._forget()

    @property
    def _model(self) -> PreTrainedModel:
        model = self._to_model()
        assert model is not None, "the caller of a step keeps the model alive"
        return model

    @property
    def _running(self) -> Program:
        assert self._program is not None, "passes run while a call has the buffers"
        return self._program

    def __getstate__(self) -> dict:
        return {"model": self._model, "capture": self._capture}  # a copy makes its own graphs and buffers

    def __setstate__(self, state: dict) -> None:
        StepGraphs.__init__(self, **state)

    def lend(self, cache: LookaheadCache, adapter: ModelAdapter, hidden_states: tuple[int, ...] = ()) -> LookaheadCache:
        """Return a copy of ``cache`` in the buffers, until `take_back`; or ``cache`` itself to run without graphs.

        cache: the cache of a call whose prompts have been computed. It is not changed. adapter: the model's.
        hidden_states: layers whose output is requested (`EagerRunner`). With the copy, the logits of a step are valid
        only until the next step. `LookaheadCache.sequence` copies what must outlive the call.
        """
        model, state = self._model, state_of(self._model).key
        device = device_of(model).type
        if self._given_up == state or torch.is_autocast_enabled(device):
            return cache
        if self._capture is capture_cuda and device != "cuda":
            self._warn(f"it is on a device of type {device}")
            return cache
        if (wrong := self._compared(adapter)) is not None:
            self._warn(wrong)
            return cache
        if not self._free.acquire(blocking=False):
            return cache
        lent = None
        try:
            if layers := _layers_of_one_sequence(cache):
                program = static_program(model, adapter)
                places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in program.tensors]
                if self._made_for != (made_for := (state, hidden_states, places)):
                    self._forget()
                if self._buffers.load(layers):
                    self._drop_graphs()
                self._made_for, self._program, self._wanted = made_for, program, hidden_states
                self._windows = {visibility.window: layers for visibility, layers in adapter.kinds.items()}
                self._given_up = self.why_not = None  # what they were given up for was another state of the model
                lent = StaticCache(self._buffers, cache)
        except UnknownModelError as error:
            self._warn(str(error))
        except torch.OutOfMemoryError:
            self._forget()
            self._give_up("there is not enough memory for their buffers")
        finally:
            self._lent = lent
            if lent is None:
                self._free.release()
        return cache if lent is None else lent

    def take_back(self, cache: LookaheadCache) -> None:
        """End a call's use of the buffers. Does nothing if `lend` returned the call's own cache."""
        if cache is self._lent:
            self._lent = self._program = None
            if self._given_up is not None:
                self._forget()
            self._free.release()

    def forward(self, step: Step, cache: "StaticCache", last: list[int] | None = None) -> Result:
        """Run one pass over a step. The logits are valid until the next pass.

        Raises IndexError beyond the end of a table of positions.
        """
        if cache is not self._lent:
            raise RuntimeError("this cache was taken back by the model's StepGraphs when its call ended")
        buffers = self._buffers
        start, rows = buffers.columns, _power_of_two(len(step))
        if buffers.make_room(rows):
            self._drop_graphs()
        self._fill(rows, step, cache.lengths[0], last)
        logits, outputs = self._run(rows, _rounded_up(start + rows))
        buffers.base, buffers.columns = start, start + len(step)
        return logits[: len(step)], {i: output[: len(step)].clone() for i, output in outputs.items()}

    def _compared(self, adapter: ModelAdapter) -> str | None:
        """Compare the passes with plain decoding and return what is wrong; None if nothing is, or nothing is
        captured."""
        if self._capture is None:
            return None
        model = self._model

        def compare() -> str | None:
            try:
                static_program(model, adapter)
            except UnknownModelError as error:
                return str(error)
            return probe.compare_with_plain(GraphRunner(StepGraphs(model, None), EagerRunner(model, adapter)))

        return what_is_wrong(model, "graphs", False, compare)

    def _forget(self) -> None:
        self._drop_graphs()
        self._inputs, self._made_for, self._buffers = {}, None, _GraphLayer()
        self._lent = self._program = None

    def _drop_graphs(self) -> None:
        """Drop everything that depends on the addresses of the buffers."""
        self._replays, self._unchecked, self._tables, self._positions = {}, {}, {}, 0

    def _give_up(self, reason: str) -> None:
        self._given_up = state_of(self._model).key
        self._replays.clear()
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason != self.why_not:
            self.why_not, name = reason, type(self._model).__name__
            warnings.warn(f"{name} is decoded without CUDA graphs: {reason}.", stacklevel=2)

    def _fill(self, rows: int, step: Step, length: int, last: list[int] | None = None) -> None:
        """Copy a step into the input tensors of passes over ``rows`` rows. Copies of the root, unseen, pad the step."""
        device = device_of(self._model)
        ids, positions, ancestors = pad([step], [length], last, rows)
        if not self._positions:
            self._make_tables()
        if (most := positions.max()) >= self._positions:
            raise IndexError(f"position {most} lies beyond the table of {self._positions} positions")
        if rows not in self._inputs:
            with torch.inference_mode(False):  # tensors made in inference mode can never be written to outside of it
                self._inputs[rows] = (
                    torch.zeros(2 * rows + 1, dtype=torch.int64, device=device),
                    torch.zeros(rows, rows, dtype=torch.bool, device=device),
                )
        numbers = np.concatenate([ids[0], positions[0], [self._buffers.columns]])
        for tensor, values in zip(self._inputs[rows], (numbers, ancestors[0]), strict=True):
            tensor.copy_(torch.from_numpy(values), non_blocking=True)  # CUDA has read the array when this returns
        self._buffers.written = max(self._buffers.written, self._buffers.columns + rows)

    def _make_tables(self) -> None:
        """Make the tables of the rotary embedding, of as many positions as the buffers have columns."""
        like = self._buffers.buffers[0].new_empty(1, 1, 1)
        positions = torch.arange(self._buffers.room, device=like.device)[None]
        with torch.inference_mode(False), torch.no_grad():
            page, program = page_of(self._model), self._running
            for name, size in program.rotaries.items():
                cos, sin = page.rotary_tables(like, positions, name)
                if cos.shape != sin.shape or not (cos.shape[1] == size or page.rotates_part):
                    raise RuntimeError("the rotary embedding does not fit the heads")
                self._tables[name] = cos, sin
        stops = [len(cos) for cos, _ in self._tables.values() if len(cos) < self._buffers.room]
        self._positions = min([program.positions or 2**62, *stops])

    def _pass(self, rows: int, shown: int) -> Result:
        """Run the pass to capture, over ``rows`` input rows and ``shown`` columns."""
        numbers, ancestors = self._inputs[rows]
        with torch.inference_mode(False), torch.no_grad():
            ids, positions, start = numbers.split([rows, rows, 1])
            columns = start + torch.arange(rows, device=start.device)
            all_columns = torch.arange(shown, device=start.device)
            after = (all_columns >= start).expand(rows, shown).index_copy(1, columns, ~ancestors)
            distances = positions[:, None] - all_columns.index_copy(0, columns, positions)
            program, hidden = self._running, dict[int, torch.Tensor]()
            for window, layers in self._windows.items():
                hidden |= dict.fromkeys(layers, after if window is None else after | (distances >= window))
            caches = {layer: self._buffers.keys_and_values(i, shown) for i, layer in enumerate(program.caches)}
            found = static.StaticPass(program, ids, positions, self._tables, caches, columns, hidden, self._wanted)
            return found.logits, found.outputs

    def _run(self, rows: int, shown: int) -> Result:
        key = rows, shown
        direct = partial(self._pass, *key)
        if self._given_up is not None or rows > MAX_ROWS or self._capture is None:
            return direct()
        if key not in self._replays:
            earlier = next(iter(self._replays.values()), None)
            try:
                self._replays[key] = self._capture(direct, device_of(self._model), earlier)
            except Exception as error:  # a device may refuse many things
                # An error within a capture causes a second one at its end. The first one is the reason.
                self._give_up(f"a step of {rows} tokens cannot be captured, {(error.__context__ or error)!r}")
                return direct()
            self._unchecked[key] = RUNS_CHECKED
        replayed = self._replays[key]()
        if not self._unchecked[key]:
            return replayed
        logits, outputs = direct()  # writes the same rows of the buffers again
        if not logits.isnan().any():  # an overflow cannot be compared
            self._unchecked[key] -= 1
            if not relative_error(replayed[0], logits) <= tolerance(self._model.dtype):
                self._give_up(f"a graph of {rows} tokens does not give the logits of its pass")
        return logits, outputs


class GraphRunner(EagerRunner):
    """Replays the steps of a call whose cache is in the buffers. Another runner runs all other steps."""

    name = "CUDA graphs"

    def __init__(self, graphs: StepGraphs, other: EagerRunner):
        super().__init__(other.model, other.adapter, other.requested)
        self._graphs, self._other = graphs, other
        self._cache: LookaheadCache | None = None

    def begin(self, cache: AnyCache) -> AnyCache:
        assert isinstance(cache, LookaheadCache)  # as `join` makes it
        self._cache = self._graphs.lend(cache, self.adapter, self.requested)
        return self._cache if self._cache is not cache else self._other.begin(cache)

    def end(self) -> None:
        if self._cache is not None:
            self._graphs.take_back(self._cache)
            self._cache = None
        self._other.end()

    def eager(self, cache: AnyCache) -> tuple[EagerRunner, AnyCache]:
        return self._other.eager(cache.sequence(0) if isinstance(cache, StaticCache) else cache)

    def run(
        self,
        steps: list[Step],
        cache: AnyCache,
        last: list[int] | None = None,
        top_k: TopK = (0, 1.0),
        others_ran: bool = True,
    ) -> Output:
        if isinstance(cache, StaticCache):
            return Output(*self._graphs.forward(steps[0], cache, last))
        return self._other.run(steps, cache, last, top_k, others_ran)


class StaticCache(LookaheadCache):
    """The cache of one sequence, in the buffers that a `StepGraphs` has lent."""

    def __init__(self, buffers: "_GraphLayer", like: LookaheadCache):
        """like: the cache whose content the buffers hold."""
        super().__init__([buffers], list(like.lengths))  # one layer, in the place of all
        self._buffers, self._like = buffers, like.emptied()

    def sequence(self, b: int) -> LookaheadCache:
        """Return a copy in layers of its own, because the buffers stay with the model."""
        cache, (length,) = self._like.emptied(), self.lengths
        for index, layer in enumerate(cache.in_place):
            held = self._buffers.keys_and_values(index, length)
            first = max(length - layer.sliding_window + 1, 0) if isinstance(layer, SlidingLayer) else 0
            layer.update(*(states[None, :, first:] for states in held))
            layer.starts = np.array([first])
        cache.lengths = [length]
        return cache


class _GraphLayer(InPlaceLayer):
    """Keys and values of all layers as one layer with all their heads, so that one commit serves them all.

    Unused columns are masked, not cut off. They take part in sums with weight 0, so they must be finite: `commit` fills
    them with zeros.
    """

    hides_unused = True

    def __init__(self) -> None:
        super().__init__(FIRST_CAPACITY)
        self.heads = 0  # heads of one layer
        self.written = 0  # all columns from this one on are zero

    def load(self, layers: list[InPlaceLayer]) -> bool:
        """Replace the content by that of these layers. Returns whether the buffers have moved."""
        columns = layers[0].get_seq_length()
        self.columns = 0
        moved = not self.is_initialized
        if moved:
            self.heads = layers[0].states()[0].shape[1]
            self._capacity = max(_power_of_two(columns), FIRST_CAPACITY)
            self.lazy_initialization(*(states[:, :, :1].repeat(1, len(layers), 1, 1) for states in layers[0].states()))
        else:
            moved = self.make_room(columns)
        for index, layer in enumerate(layers):
            for ours, theirs in zip(self.keys_and_values(index, columns), layer.states(), strict=True):
                first = columns - theirs.shape[2]  # what is left of a sliding window
                ours[:, :first], ours[:, first:] = 0, theirs[0]
        for buffer in self.buffers:
            buffer[:, :, columns:] = 0
        self.columns = self.base = self.written = columns
        return moved

    def make_room(self, new: int) -> bool:  # type: ignore[override]  # the base class returns nothing
        """Make room for ``new`` more columns. Returns whether the buffers have moved."""
        wanted = _power_of_two(self.columns + new)
        if wanted <= self.at.room:
            return False
        self._move(np.zeros(1, np.int64), np.array([self.columns]), wanted)
        for buffer in self.buffers:
            buffer[:, :, self.columns :] = 0
        return True

    @property
    def room(self) -> int:
        """Columns of the buffers."""
        return self.at.room

    def keys_and_values(self, layer: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first columns of the keys and values of a layer of the model, [heads, columns, head_dim]."""
        heads = slice(layer * self.heads, (layer + 1) * self.heads)
        return self._keys[0, heads, :columns], self._values[0, heads, :columns]

    def clear_unused(self) -> None:
        for buffer in self.buffers:
            buffer[:, :, self.columns : self.written] = 0
        self.written = self.columns


def _layers_of_one_sequence(cache: LookaheadCache) -> list[InPlaceLayer]:
    """Return the cache's layers if it holds one sequence, all of its positions are in order, and all have one shape."""
    layers = cache.in_place
    if len(cache.lengths) > 1 or cache.paddings or cache.replay or len(layers) < len(cache.layers):
        return []
    first = layers[0]
    are_alike = all(
        layer.is_initialized
        and layer.get_seq_length() == cache.lengths[0] > 0
        and not layer.gaps.any()
        and (isinstance(layer, SlidingLayer) or not layer.starts.any())
        and (layer.dtype, layer.device) == (first.dtype, first.device)
        and [x.shape[1::2] for x in layer.buffers] == [x.shape[1::2] for x in first.buffers]
        for layer in layers
    )
    return layers if are_alike else []


def _rounded_up(columns: int) -> int:
    """Return the columns that a graph shows for this many: a power of two, or three quarters of one."""
    power = max(_power_of_two(columns), FIRST_CAPACITY)
    return power * 3 // 4 if FIRST_CAPACITY < columns <= power * 3 // 4 else power


def _power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is not below ``minimum``, which is at least 1."""
    return 1 << (minimum - 1).bit_length()
