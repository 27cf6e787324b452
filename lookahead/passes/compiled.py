"""Passes compiled by torch.compile, which fuses a model's small operations and spares Python its calls.

One program serves all steps. Only the number of rows is left open in it; what depends on what the cache holds, which
is another number in each step, is an operation that the compiler does not look into:

    compiled    embedding, norms, rotary embedding, activations, sums, and the calls of
    opaque      products by our kernel (`products`), and attention, which appends to the cache
"""

import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lookahead import compat
from lookahead.cpu import products
from lookahead.decoding_pass import decoding_pass
from lookahead.models import attention
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import LookaheadCache
from lookahead.passes.runner import EagerRunner, Output
from lookahead.step import Step, pad
from ngram_pool.waiting import told_if_long

LEAST_ROWS = 4  # fewer are padded: one row would need a program of its own, and four take no longer
MAX_ROWS = 128

_ASSIGNMENTS = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}

_under_way = threading.local()  # of the pass that this thread is at: cache and masks, and the program that has run
_compiled: WeakKeyDictionary[PreTrainedModel, Callable] = WeakKeyDictionary()
_given_up: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # and why


class _OwnKeys(Cache):
    """The cache of a compiled pass: shows each layer the keys and values of the step itself, which the opaque attention
    then appends to the true one."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


def _pass(
    model: PreTrainedModel, cache_argument: str, tokens: torch.Tensor, layer_types: tuple[str, ...]
) -> torch.Tensor:
    """What is traced. The masks that the model is given are read by nobody: the opaque attention has the true ones."""
    nothing = tokens.new_empty(1, 1, 0, 0)
    inputs = {cache_argument: _OwnKeys(), "attention_mask": dict.fromkeys(layer_types, nothing) or nothing}
    return model(input_ids=tokens[:1], position_ids=tokens[1:], use_cache=True, **inputs).logits


def _compile(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """What torch.compile does with what it has traced, after linear layers have become products by our kernel."""
    _use_products(graph.graph)
    graph.recompile()
    program = compat.compile_graph(graph, inputs)  # what rounds less may write another token
    checked: set[int] = set()

    def run(*arguments: Any) -> Any:
        outputs = program(*arguments)
        _under_way.ran = program, checked, arguments, outputs
        return outputs

    return run


def _use_products(graph: torch.fx.Graph) -> None:
    """Let our kernel multiply what `products.DecodingLinear` would, those of the same input at once."""
    groups: dict[tuple[torch.fx.Node, int], list[torch.fx.Node]] = {}
    writes = 0  # after which an input may be another one
    for node in graph.nodes:
        writes += _may_write(node)
        if node.target is compat.TRACED_LINEAR and _is_ours(node):
            groups.setdefault((node.args[0], writes), []).append(node)
    for (given, _), group in groups.items():
        weights, biases = [node.args[1] for node in group], [(*node.args, None)[2] for node in group]
        with graph.inserting_before(group[0]):
            outs = graph.call_function(torch.ops.lookahead.products.default, (given, weights, biases))
            parts = [graph.call_function(operator.getitem, (outs, i)) for i in range(len(group))]
        for node, part in zip(group, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)


def _is_ours(node: torch.fx.Node) -> bool:
    """Whether a linear layer is one that multiplies by our kernel in a pass."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    values = [argument.meta["example_value"] for argument in node.args if isinstance(argument, torch.fx.Node)]
    return (
        bool(modules)
        and modules[-1][1] is products.DecodingLinear
        and len({value.dtype for value in values}) == 1
        and products.can_multiply(values[1])
        and values[-1].is_contiguous()
    )


def _may_write(node: torch.fx.Node) -> bool:
    """Whether a call may write to what it is given, by the names that torch and Python have for that."""
    name = getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") or (node.target in _ASSIGNMENTS) or bool({"out", "inplace"} & set(node.kwargs))
    return node.op in ("call_function", "call_method") and in_place


def _compiled_pass(model: PreTrainedModel) -> Callable:
    """`_pass` as code of this model's own, for torch.compile makes but a few programs of one code, and keeps them."""
    if model not in _compiled:
        own = FunctionType(_pass.__code__.replace(), globals())
        _compiled[model] = torch.compile(own, fullgraph=True, backend=_compile)
    return _compiled[model]


@dataclass(frozen=True)
class Program:
    """What was compiled, without what torch.compile does around it."""

    _program: Callable
    _checked: set[int]  # numbers of rows that torch.compile has let through
    _arguments: list
    _place: int  # of tokens among the arguments
    _size: int  # and of their number

    @classmethod
    def that_gave(cls, logits: torch.Tensor, tokens: torch.Tensor) -> "Program | None":
        """What has just computed ``logits`` from ``tokens``; None where it may not be all that was done."""
        program, checked, arguments, outputs = _under_way.ran
        sizes = [i for i, argument in enumerate(arguments) if isinstance(argument, int)]
        places = [i for i, argument in enumerate(arguments) if argument is tokens]
        if len(sizes) != 1 or len(places) != 1 or len(outputs) != 1 or outputs[0] is not logits:
            return None
        checked.add(tokens.shape[1])
        return cls(program, checked, list(arguments), places[0], sizes[0])

    def serves(self, rows: int) -> bool:
        return rows in self._checked

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        arguments = self._arguments.copy()
        arguments[self._place], arguments[self._size] = tokens, tokens.shape[1]
        return self._program(*arguments)[0]


class CompiledRunner(EagerRunner):
    """Runs steps of single sequences as one compiled program; everything else runs eagerly.

    Whether the model is still what was compiled is looked at in the first step, and whether the program serves steps of
    T rows, in the first of them. A model that does not compile, or changes too often, runs as it is, with one warning.
    """

    name = "compiled"

    def __init__(self, model: PreTrainedModel, adapter: ModelAdapter):
        super().__init__(model, adapter)
        self._program: Program | None = None

    def end(self) -> None:
        self._program = None  # which holds on to the weights

    def run(self, steps: list[Step], cache: LookaheadCache, last: list[int] | None = None) -> Output:
        device = device_of(self.model)
        serves = len(steps) == 1 and len(steps[0]) <= MAX_ROWS and not torch.is_autocast_enabled(device.type)
        if not serves or self.model in _given_up:
            return super().run(steps, cache, last)
        ids, positions, ancestors = pad(steps, cache.lengths, last, LEAST_ROWS)
        tokens = torch.from_numpy(np.concatenate([ids, positions])).to(device)
        cache.begin(tokens.shape[1], steps[0].computed)
        try:
            with torch.inference_mode() if self.adapter.in_inference_mode else nullcontext():
                masks = self.adapter.masks(ancestors, positions, cache, self.model.dtype, device)
                logits = self._run(tokens, cache, self.adapter.mask_of_layers(masks))
        except compat.COMPILE_ERRORS as error:
            give_up(self.model, f"torch.compile fails with {error!r}")
            return super().run(steps, cache, last)
        return Output(logits[:, : len(steps[0]) - steps[0].computed])

    def _run(self, tokens: torch.Tensor, cache: LookaheadCache, masks: list[torch.Tensor | None]) -> torch.Tensor:
        """Logits [1, T, vocabulary]; keys and values of the step are appended to ``cache``.

        tokens: int64 [2, T], ids and positions, T of at least LEAST_ROWS. masks: of each layer.
        """
        adapter = self.adapter
        program = self._program
        known = program if program is not None and program.serves(tokens.shape[1]) else None
        with (
            decoding_pass(adapter.splits_attention, adapter.uses_kernels, is_traced=known is None),
            _at_pass(cache, masks),
        ):
            if known is not None:
                return known(tokens)
            compat.mark_dynamic(tokens, 1)
            with compat.guarded_hooks(), told_if_long("compiling passes"):
                kinds = tuple(adapter.mask_of or ())
                logits = _compiled_pass(self.model)(self.model, adapter.cache_argument, tokens, kinds)
            self._program = Program.that_gave(logits, tokens)
            return logits


def give_up(model: PreTrainedModel, reason: str) -> None:
    """Run this model's passes as they are from now on."""
    first_line = _given_up[model] = reason.strip().splitlines()[0]
    warnings.warn(f"{type(model).__name__} runs without compiled passes: {first_line}", stacklevel=2)


def why_not(model: PreTrainedModel) -> str | None:
    """Why this model's passes are not compiled, if that was given up."""
    return _given_up.get(model)


@contextmanager
def _at_pass(cache: LookaheadCache, masks: list[torch.Tensor | None]) -> Iterator[None]:
    _under_way.now = cache, masks
    try:
        yield
    finally:
        vars(_under_way).clear()


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float | None
) -> torch.Tensor:
    cache, masks = _under_way.now
    key, value = cache.update(key, value, layer)
    return attention.attend_grouped(query, key, value, masks[layer], scaling)


def _shape_of_attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float | None
) -> torch.Tensor:
    batch, heads, rows, size = query.shape
    return query.new_empty(batch, rows, heads, size)


# Plain definitions: what torch.library.custom_op wraps around each call takes as long as a small layer.
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float? scaling) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend", _shape_of_attended, "Meta")
