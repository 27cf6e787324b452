"""Steps of fixed shape, which a GPU replays as CUDA graphs: one launch for a step instead of one for each kernel.

In an eager pass of a large model over a few tokens, Python takes several times as long to launch the kernels as the GPU
takes to read the weights. A CUDA graph is launched at once, but it always does the same to the same memory. So while a
call decodes, all that a step uses has a fixed place and a fixed shape:

    keys and values   buffers for all layers, kept from call to call; a call's prompt is copied into them once
    tokens            T is rounded up to a power of two; no other token sees those that pad a step
    columns shown     also rounded up, by a half at most; the mask hides the empty ones
    ids, positions, first column, ancestors   copied into fixed tensors before each step; the mask is made on the device

There is one graph for each pair of T and columns shown, captured when it is first needed: at most 8 for the first
`FIRST_CAPACITY` columns, and as many for each further number of columns that a longer text needs (`_rounded_up`). The
graphs share their memory. When the buffers grow they move, and all graphs are dropped.

Attention in a graph is our own (`attention.attend_in_parts`), where the model's is "sdpa".

Graphs never change a text. The first runs of each graph are compared with an eager pass, which has transformers'
attention, and one graph again at the start of each call. A step that cannot be captured, or differs, is computed
without graphs, with one warning.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lookahead import compat
from lookahead.decoding_pass import decoding_pass
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache
from lookahead.passes.rounding import relative_error, tolerance
from lookahead.passes.runner import EagerRunner, Output, TopK
from lookahead.step import Step, Visibility, lay_out, pad
from ngram_pool import GuessTree

FIRST_CAPACITY = 1024  # columns
MAX_ROWS = 128  # rows of a step that is captured, at most
RUNS_CHECKED = 2  # runs of each graph; a value fixed by the capture, such as a length, is still right in the first
WARM_UP_RUNS = 3  # before the first capture, so that libraries have chosen their kernels and allocated memory

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor], torch.device, Replay | None], Replay]

_capturing = threading.Lock()  # torch captures one graph at a time


def capture_cuda(function: Callable[[], torch.Tensor], device: torch.device, earlier: Replay | None) -> Replay:
    """Capture ``function`` on ``device`` as a CUDA graph. Each replay returns the same tensor with new content.

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
                logits = function()
        finally:
            generator.graphsafe_set_state(state)
            torch.cuda.set_stream(current)
    return _CudaReplay(graph, logits)


@dataclass
class _CudaReplay:
    graph: "torch.cuda.CUDAGraph"
    logits: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


def why_eager(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Say why the model cannot run as a graph on any device, or return None."""
    if not adapter.can_branch or not adapter.takes_position_ids or adapter.has_state or adapter.biases_keys:
        return "its steps depend on more than mask and position_ids"
    if adapter.mask_of is not None or any(visibility != Visibility() for visibility in adapter.layers):
        return "not all of its layers attend to everything"
    if compat.is_compiled(model):
        return "it is compiled"
    for module in model.modules():
        if compat.has_accelerate_hook(module):
            return "accelerate moves its weights or inputs"
        if type(module).__module__.startswith("peft."):
            return "adapters can be switched between calls"
        if compat.hooks_of_users(module):
            return f"a hook on {type(module).__name__} would not be called"
    weights = list(_weights(model))
    if not all(compat.is_plain(weight) for weight in weights):
        return "some of its weights are not plain tensors"
    if len({weight.device for weight in weights}) > 1:
        return "it is spread over several devices"
    return None


class StepGraphs:
    """The graphs of one model, and their buffers.

    A call's `GraphRunner` borrows the buffers with `lend` and returns them with `take_back`. Only one call at a time
    can have them. Another call, nested or in another thread, runs without graphs.
    """

    _made_for: tuple
    _lent: "StaticCache | None"

    def __init__(self, model: PreTrainedModel, capture: Capture | None = capture_cuda):
        """capture: makes a replay of a function. None: run steps of fixed shape without capturing them."""
        self._to_model = weakref.ref(model)  # the model refers to this object
        self._capture = capture
        self._free = threading.Lock()
        self._warned = self._given_up = False
        self.why_not: str | None = None
        """Why the last steps ran without graphs; None if they ran with them."""
        self._forget()

    @property
    def _model(self) -> PreTrainedModel:
        model = self._to_model()
        assert model is not None, "the caller of a step keeps the model alive"
        return model

    def __getstate__(self) -> dict:
        return {"model": self._model, "capture": self._capture}  # a copy makes its own graphs and buffers

    def __setstate__(self, state: dict) -> None:
        StepGraphs.__init__(self, **state)

    def lend(self, cache: LookaheadCache, adapter: ModelAdapter) -> LookaheadCache:
        """Return a copy of ``cache`` in the buffers, until `take_back`; or ``cache`` itself to run without graphs.

        cache: the cache of a call whose prompts have been computed. It is not changed. adapter: the model's.
        With the copy, the logits of a step are valid only until the next step. `LookaheadCache.sequence` copies what
        must outlive the call.
        """
        if self._given_up:
            return cache
        device = device_of(self._model).type
        reason = why_eager(self._model, adapter)
        if self._capture is capture_cuda and device != "cuda":
            reason = f"it is on a device of type {device}"
        if reason is not None:
            self._warn(f"CUDA graphs do not serve {type(self._model).__name__}", reason)
            return cache
        layers = _layers_of_one_sequence(cache)
        if not layers or torch.is_autocast_enabled(device):
            return cache
        if not self._free.acquire(blocking=False):
            return cache
        try:
            weights = [(weight.data_ptr(), weight.dtype, weight.shape) for weight in _weights(self._model)]
            made_for = compat.attention_implementation(self._model.config), layers[0].dtype, *weights
            if made_for != self._made_for:
                self._forget()
                self._made_for = made_for
            if self._buffers.load(layers):
                self._replays.clear()
            self._lent = StaticCache(self._buffers, len(layers), cache.lengths)
            self._cache_argument = adapter.cache_argument
            self._are_proven = not self._replays
            self.why_not = None
        except BaseException as error:
            self._forget()
            self._free.release()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            self._give_up("there is no memory for their buffers")
            return cache
        return self._lent

    def take_back(self, cache: LookaheadCache) -> None:
        """End a call's use of the buffers. Does nothing if `lend` returned the call's own cache."""
        if cache is self._lent:
            self._lent = None
            if self._given_up:
                self._forget()
            self._free.release()

    def forward(self, step: Step, cache: "StaticCache", last: list[int] | None = None) -> torch.Tensor:
        """Run one pass over a step. Returns logits [1, T, vocabulary], valid until the next pass."""
        if cache is not self._lent:
            raise RuntimeError("this cache was taken back by the model's StepGraphs when its call ended")
        buffers = self._buffers
        begin, rows = buffers.columns, _power_of_two(len(step))
        if buffers.make_room(rows):
            self._replays.clear()
        if not self._are_proven:
            self._prove(lay_out(int(step.ids[0]), GuessTree.empty()), cache.lengths[0])
            self._are_proven = True
        self._fill(rows, step, cache.lengths[0], last)
        logits = self._run(rows, _rounded_up(begin + rows))
        buffers.base, buffers.columns = begin, begin + len(step)
        return logits[:, : len(step)]

    def _forget(self) -> None:
        self._replays: dict[tuple[int, int], Replay] = {}
        self._unchecked: dict[tuple[int, int], int] = {}
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._buffers = _Buffers()
        self._made_for = ()
        self._lent = None
        self._cache_argument = ""
        self._are_proven = True

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._replays.clear()
        self._warn(f"CUDA graphs of {type(self._model).__name__} are off from now on", reason)

    def _warn(self, what: str, reason: str) -> None:
        self.why_not = reason
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}: {reason}. It is decoded without them.", stacklevel=2)

    def _fill(self, rows: int, step: Step, length: int, last: list[int] | None = None) -> None:
        """Copy a step into the input tensors of passes over ``rows`` rows. Copies of the root, unseen, pad the step."""
        device = device_of(self._model)
        if rows not in self._inputs:
            with torch.inference_mode(False):  # tensors made in inference mode can never be written to outside of it
                self._inputs[rows] = (
                    torch.zeros(2 * rows + 1, dtype=torch.int64, device=device),
                    torch.zeros(rows, rows, dtype=torch.bool, device=device),
                )
        ids, positions, ancestors = pad([step], [length], last, rows)
        numbers = np.concatenate([ids[0], positions[0], [self._buffers.columns]])
        for tensor, values in zip(self._inputs[rows], (numbers, ancestors[0]), strict=True):
            tensor.copy_(torch.from_numpy(values), non_blocking=True)  # CUDA has read the array when this returns
        self._buffers.written = max(self._buffers.written, self._buffers.columns + rows)

    def _pass(self, rows: int, shown: int, in_parts: bool = True) -> torch.Tensor:
        """Run the pass to capture, over ``rows`` input rows and ``shown`` columns. Returns [1, rows, vocabulary].

        in_parts: with attention of our own. Transformers' is what replays are compared with, and has fewer launches.
        """
        numbers, ancestors = self._inputs[rows]
        own_attention = decoding_pass(splits_attention=False, uses_kernels=False, is_static=in_parts)
        with torch.inference_mode(False), torch.no_grad(), own_attention:
            ids, positions, begin = numbers.split([rows, rows, 1])
            places = begin + torch.arange(rows, device=begin.device)
            seen = (torch.arange(shown, device=begin.device) < begin).expand(rows, shown)
            seen = seen.index_copy(1, places, ancestors)
            dtype = self._model.dtype
            mask = torch.zeros(rows, shown, dtype=dtype, device=begin.device)
            mask.masked_fill_(~seen, torch.finfo(dtype).min / 2)  # kernels scale it: the least number would overflow
            self._buffers.places, self._buffers.shown = places, shown
            return self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=mask[None, None],
                use_cache=True,
                **{self._cache_argument: self._lent},
            ).logits

    def _run(self, rows: int, shown: int) -> torch.Tensor:
        key = rows, shown
        direct = partial(self._pass, *key)
        if self._given_up or rows > MAX_ROWS:
            return self._pass(*key, in_parts=False)
        if self._capture is None:
            return direct()
        if key not in self._replays:
            earlier = next(iter(self._replays.values()), None)
            try:
                self._replays[key] = self._capture(direct, device_of(self._model), earlier)
            except Exception as error:  # a model may do many things that cannot be captured
                # An error within a capture causes a second one at its end. The first one is the reason.
                self._give_up(f"a step of {rows} tokens cannot be captured, {(error.__context__ or error)!r}")
                return self._pass(*key, in_parts=False)
            self._unchecked[key] = RUNS_CHECKED
        replayed = self._replays[key]()
        if not self._unchecked[key]:
            return replayed
        logits = self._pass(*key, in_parts=False)  # writes the same rows of the buffers again
        if not logits.isnan().any():  # an overflow cannot be compared
            self._unchecked[key] -= 1
            if not self._agree(replayed, logits):
                self._give_up(f"a graph of {rows} tokens does not give the model's logits")
        return logits

    def _prove(self, root: Step, length: int) -> None:
        """Drop the graphs of earlier calls unless one of them still gives the model's logits for a step's root.

        Replaced weights are found by their addresses. This check finds other changes of the model.
        """
        begin = self._buffers.columns
        fitting = [key for key in self._replays if begin + key[0] <= key[1]]
        if fitting:
            rows, shown = min(fitting)
            self._fill(rows, root, length)
            replayed = self._replays[rows, shown]()
            if self._agree(replayed, self._pass(rows, shown, in_parts=False)):
                return
        self._replays.clear()

    def _agree(self, replayed: torch.Tensor, direct: torch.Tensor) -> bool:
        return relative_error(replayed[0], direct[0]) <= tolerance(self._model.dtype)


class GraphRunner(EagerRunner):
    """Replays the steps of a call whose cache is in the buffers. Another runner runs all other steps."""

    name = "CUDA graphs"

    def __init__(self, graphs: StepGraphs, other: EagerRunner):
        super().__init__(other.model, other.adapter)
        self._graphs, self._other = graphs, other
        self._cache: LookaheadCache | None = None

    def begin(self, cache: AnyCache) -> AnyCache:
        assert isinstance(cache, LookaheadCache)  # as `join` makes it
        self._cache = self._graphs.lend(cache, self.adapter)
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
    ) -> Output:
        if isinstance(cache, StaticCache):
            return Output(self._graphs.forward(steps[0], cache, last)[0])
        return self._other.run(steps, cache, last, top_k)


class StaticCache(LookaheadCache):
    """The cache of one sequence, in the buffers that a `StepGraphs` has lent."""

    def __init__(self, buffers: "_Buffers", layers: int, lengths: list[int]):
        super().__init__([_Part(buffers, index) for index in range(layers)], list(lengths))
        self._buffers, self.in_place, self._with_state = buffers, [buffers], []  # one layer, in the place of all

    def sequence(self, b: int) -> LookaheadCache:
        """Return a copy in layers of its own, because the buffers stay with the model."""
        copies = [InPlaceLayer(self.lengths[0]) for _ in self.layers]
        for index, layer in enumerate(copies):
            layer.update(*(states[:, self._buffers.heads_of(index)] for states in self._buffers.states()))
        return LookaheadCache(copies, list(self.lengths))


class _Buffers(InPlaceLayer):
    """Keys and values of all layers as one layer with the heads of all of them, so that one commit serves them all.

    Columns behind those in use are hidden, not cut off. They take part in sums with weight 0, so they must be finite:
    `commit` fills them with zeros.
    """

    hides_unused = True

    def __init__(self) -> None:
        super().__init__(FIRST_CAPACITY)
        self.heads = 0  # heads of one layer
        self.written = 0  # all columns from this one on are zero
        self.places: torch.Tensor  # int64 [T], columns of the current pass
        self.shown = 0  # columns that the current pass is shown, hidden ones included

    def load(self, layers: list[InPlaceLayer]) -> bool:
        """Replace the content by that of these layers. Returns whether the buffers have moved."""
        columns = layers[0].columns
        self.columns = 0
        moved = not self.is_initialized
        if moved:
            self.heads = layers[0].states()[0].shape[1]
            self._capacity = max(_power_of_two(columns), FIRST_CAPACITY)
            self.lazy_initialization(*(states[:, :, :1].repeat(1, len(layers), 1, 1) for states in layers[0].states()))
        else:
            moved = self.make_room(columns)
        theirs_by_kind = zip(*map(InPlaceLayer.states, layers), strict=True)
        for buffer, states in zip((self._keys, self._values), theirs_by_kind, strict=True):
            for index, theirs in enumerate(states):
                buffer[:, self.heads_of(index), :columns] = theirs
            buffer[:, :, columns:] = 0
        self.columns = self.base = self.written = columns
        return moved

    def make_room(self, new: int) -> bool:  # type: ignore[override]  # the base class returns nothing
        """Make room for ``new`` more columns. Returns whether the buffers have moved."""
        wanted = _power_of_two(self.columns + new)
        if wanted <= self._keys.shape[2]:
            return False
        self._move(np.zeros(1, np.int64), np.array([self.columns]), wanted)
        for buffer in (self._keys, self._values):
            buffer[:, :, self.columns :] = 0
        return True

    def heads_of(self, layer: int) -> slice:
        return slice(layer * self.heads, (layer + 1) * self.heads)

    def clear_unused(self) -> None:
        for buffer in (self._keys, self._values):
            buffer[:, :, self.columns : self.written] = 0
        self.written = self.columns


class _Part(CacheLayerMixin):
    """One layer of the model in the buffers."""

    is_sliding = False

    def __init__(self, buffers: _Buffers, index: int):
        super().__init__()
        self.is_initialized = True
        self._buffers = buffers
        self._heads = buffers.heads_of(index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states [1, heads, T, head_dim] to the columns of the current pass. Return all that it is shown."""
        shown = slice(self._buffers.shown)
        keys = self._buffers._keys[:, self._heads, shown]
        values = self._buffers._values[:, self._heads, shown]
        keys.index_copy_(2, self._buffers.places, key_states)
        values.index_copy_(2, self._buffers.places, value_states)
        return keys, values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("the buffers of a StepGraphs are made before a step")

    def get_seq_length(self) -> int:
        return self._buffers.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffers.shown, 0


def _layers_of_one_sequence(cache: LookaheadCache) -> list[InPlaceLayer]:
    """Return the cache's layers if it holds one sequence, position i in column i of each, and all have one shape."""
    layers = [layer for layer in cache.layers if type(layer) is InPlaceLayer]
    if len(cache.lengths) > 1 or cache.replay or len(layers) < len(cache.layers):
        return []
    first = layers[0]
    are_alike = all(
        layer.is_initialized
        and layer.columns == cache.lengths[0] > 0
        and not layer.gaps.any()
        and not layer.starts.any()
        and (layer.dtype, layer.device) == (first.dtype, first.device)
        and all(a.shape == b.shape for a, b in zip(layer.states(), first.states(), strict=True))
        for layer in layers
    )
    return layers if are_alike else []


def _weights(model: PreTrainedModel) -> chain:
    return chain(model.parameters(), model.buffers())


def _rounded_up(columns: int) -> int:
    """Return how many columns a pass is shown that needs so many: a power of two, or three quarters of one."""
    whole = max(_power_of_two(columns), FIRST_CAPACITY)
    return whole * 3 // 4 if FIRST_CAPACITY < columns <= whole * 3 // 4 else whole


def _power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is not below ``minimum``, which is at least 1."""
    return 1 << (minimum - 1).bit_length()
