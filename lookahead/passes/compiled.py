"""Passes compiled by torch.compile, which fuses a model's small operations and saves calls in Python.

One program serves all steps. The number of rows is open in it. The length of the cache changes with every step, so all
that depends on it is hidden from the compiler in opaque operations:

    compiled    embedding, norms, rotary embedding, activations, sums
    opaque      products by our kernel (`products`); attention, which also appends to the cache
"""

import operator
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.compat import compiling
from lookahead.cpu import products
from lookahead.decoding_pass import decoding_pass
from lookahead.models import attention
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import AnyCache, LookaheadCache
from lookahead.passes import probe
from lookahead.passes.capabilities import once
from lookahead.passes.runner import EagerRunner, Output, TopK
from lookahead.step import Step, pad, to_device
from ngram_pool.waiting import told_if_long

MIN_ROWS = 4  # Shorter steps are padded: a single row would need its own program, and four rows take no longer.
MAX_ROWS = 128

_ASSIGNMENTS = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}

_current = threading.local()  # the pass that this thread is running: its cache and masks, and the last run of a program
_compiled: WeakKeyDictionary[PreTrainedModel, Callable] = WeakKeyDictionary()
_given_up: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # and the reason


class _OwnKeys(Cache):
    """The cache that a compiled pass sees. It returns the step's own keys and values; the opaque attention appends them
    to the true cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


def _pass(
    model: PreTrainedModel, cache_argument: str, tokens: torch.Tensor, layer_types: tuple[str, ...]
) -> torch.Tensor:
    """The function that is traced. The model's masks are placeholders: the opaque attention has the true ones."""
    placeholder = tokens.new_empty(1, 1, 0, 0)
    masks = dict.fromkeys(layer_types, placeholder) or placeholder
    inputs = {cache_argument: _OwnKeys(layers=[]), "attention_mask": masks}
    return model(input_ids=tokens[:1], position_ids=tokens[1:], use_cache=True, **inputs).logits


def _compile(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """Compile a traced graph, the backend of torch.compile, with our products in place of linear layers."""
    _use_products(graph.graph)
    graph.recompile()
    program = compiling.compile_graph(graph, inputs)  # rounds as eager code does, or it could write another token
    checked: set[int] = set()

    def run(*arguments: Any) -> Any:
        outputs = program(*arguments)
        _current.last_run = program, checked, arguments, outputs
        return outputs

    return run


def _use_products(graph: torch.fx.Graph) -> None:
    """Use our kernel where `products.DecodingLinear` would, in one call for all layers of the same input."""
    groups: dict[tuple[torch.fx.Node, int], list[torch.fx.Node]] = {}
    writes = 0  # a write may change an input, so a group ends there
    for node in graph.nodes:
        writes += _may_write(node)
        if node.target is compiling.TRACED_LINEAR and _is_ours(node):
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
    """Whether our kernel would multiply for this linear layer in an eager pass."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    values = [argument.meta["example_value"] for argument in node.args if isinstance(argument, torch.fx.Node)]
    return (
        bool(modules)
        and modules[-1][1] is products.DecodingLinear
        and len({value.dtype for value in values}) == 1
        and products.can_multiply(values[1], values[1].dtype)
        and values[-1].is_contiguous()
    )


def _may_write(node: torch.fx.Node) -> bool:
    """Whether a call may write to its inputs, judged by the naming rules of torch and Python."""
    name = getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") or (node.target in _ASSIGNMENTS) or bool({"out", "inplace"} & set(node.kwargs))
    return node.op in ("call_function", "call_method") and in_place


def _compiled_pass(model: PreTrainedModel) -> Callable:
    """Return `_pass` with a code object of this model's own: torch.compile makes only a few programs for each."""
    if model not in _compiled:
        own = FunctionType(_pass.__code__.replace(), globals())
        _compiled[model] = torch.compile(own, fullgraph=True, backend=_compile)
    return _compiled[model]


def _last_program(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[Callable | None, set[int]]:
    """Return the program that has just made ``logits`` from ``tokens``; None if other code may have had a part.

    It makes logits of other tokens without the checks that torch.compile makes before it. With it come the numbers of
    rows for which torch.compile has checked the model.
    """
    program, checked, arguments, outputs = _current.last_run
    numbers = [i for i, argument in enumerate(arguments) if isinstance(argument, int)]
    places = [i for i, argument in enumerate(arguments) if argument is tokens]
    if len(numbers) != 1 or len(places) != 1 or len(outputs) != 1 or outputs[0] is not logits:
        return None, set()
    checked.add(tokens.shape[1])

    def run(tokens: torch.Tensor) -> torch.Tensor:
        given = list(arguments)
        given[places[0]], given[numbers[0]] = tokens, tokens.shape[1]
        return program(*given)[0]

    return run, checked


class CompiledRunner(EagerRunner):
    """Runs steps of single sequences as one compiled program. Everything else runs eagerly.

    torch.compile checks whether the model has changed since it was compiled: in the first step of a call, and in the
    first step of a process with so many rows. A model that does not compile, or changes too often, runs eagerly, with
    one warning.
    """

    name = "compiled"

    def __init__(self, model: PreTrainedModel, adapter: ModelAdapter):
        super().__init__(model, adapter)
        self.end()

    def end(self) -> None:
        self._program: Callable | None = None  # `_last_program`; it refers to the weights
        self._checked: set[int] = set()

    def run(
        self,
        steps: list[Step],
        cache: AnyCache,
        last: list[int] | None = None,
        top_k: TopK = (0, 1.0),
    ) -> Output:
        device = device_of(self.model)
        serves = len(steps) == 1 and len(steps[0]) <= MAX_ROWS and not torch.is_autocast_enabled(device.type)
        if not serves or self.model in _given_up or not isinstance(cache, LookaheadCache):
            return super().run(steps, cache, last, top_k)
        ids, positions, ancestors = pad(steps, cache.lengths, last, MIN_ROWS)
        tokens = to_device(np.concatenate([ids, positions]), device)
        cache.begin(tokens.shape[1], steps[0].computed)
        try:
            with torch.inference_mode() if self.adapter.in_inference_mode else nullcontext():
                masks = self.adapter.masks(ancestors, positions, cache, self.model.dtype, device)
                logits = self._run(tokens, cache, self.adapter.mask_of_layers(masks))
        except compiling.COMPILE_ERRORS as error:
            give_up(self.model, f"torch.compile fails with {error!r}")
            return super().run(steps, cache, last, top_k)
        return Output(logits[0, : len(steps[0]) - steps[0].computed])

    def _run(self, tokens: torch.Tensor, cache: LookaheadCache, masks: list[torch.Tensor | None]) -> torch.Tensor:
        """Return logits [1, T, vocabulary] and append the step's keys and values to ``cache``.

        tokens: ids and positions, int64 [2, T], where T is at least MIN_ROWS. masks: one for each layer.
        """
        adapter = self.adapter
        program = self._program if tokens.shape[1] in self._checked else None
        _current.cache, _current.masks = cache, masks
        try:
            with decoding_pass(adapter.splits_attention, adapter.uses_kernels, is_traced=program is None):
                if program is not None:
                    return program(tokens)
                compiling.mark_dynamic(tokens, 1)
                with compiling.guarded_hooks(), told_if_long("compiling passes"):
                    kinds = tuple(adapter.mask_of or ())
                    logits = _compiled_pass(self.model)(self.model, adapter.cache_argument, tokens, kinds)
                self._program, self._checked = _last_program(logits, tokens)
                return logits
        finally:
            vars(_current).clear()


def why_not_compiled(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Say why passes of ``model`` are not compiled; None if they are, and their logits are right.

    Probed once for each way of computing. The first failure is final, with a warning.
    """
    if adapter.foreign:
        return adapter.foreign[0]
    if (device := device_of(model).type) != "cpu":
        reason = f"it is on a device of type {device}, for which there is cuda_graphs=True"
        once(model, "compiled", adapter.uses_kernels, lambda: warn(model, reason))
        return reason
    if why_not(model) is None:
        once(model, "compiled", adapter.uses_kernels, lambda: try_out(model, adapter))
    return why_not(model)


def try_out(model: PreTrainedModel, adapter: ModelAdapter) -> None:
    """Give compiled passes up unless their logits are right."""
    reason: str | None = "it does not take our attention"
    if adapter.splits_attention and adapter.takes_position_ids and not adapter.has_state:
        reason = probe.compare_with_plain(CompiledRunner(model, adapter))
    if reason is not None:
        give_up(model, reason)


def give_up(model: PreTrainedModel, reason: str) -> None:
    """Run this model's passes eagerly from now on, and warn."""
    _given_up[model] = reason.strip().splitlines()[0]
    warn(model, _given_up[model])


def warn(model: PreTrainedModel, reason: str) -> None:
    warnings.warn(f"{type(model).__name__} runs without compiled passes: {reason}", stacklevel=3)


def why_not(model: PreTrainedModel) -> str | None:
    """The reason for which compiled passes of this model were given up; None if they were not."""
    return _given_up.get(model)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float | None
) -> torch.Tensor:
    key, value = _current.cache.update(key, value, layer)
    return attention.attend_grouped(query, key, value, _current.masks[layer], scaling)


def _products(input: torch.Tensor, weights: list[torch.Tensor], biases: list) -> list[torch.Tensor]:
    linears = [products.Linear(weight, None, bias) for weight, bias in zip(weights, biases, strict=True)]
    if all(input.shape[-1] == linear.weight.shape[-1] and linear.is_served(input.dtype) for linear in linears):
        return products.multiply(input, linears)
    return [torch.nn.functional.linear(input, linear.weight, linear.bias) for linear in linears]


# Defined by hand, because the wrapper of torch.library.custom_op takes as long as a small layer in each call.
_library = torch.library.Library("lookahead", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float? scaling) -> Tensor")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend", lambda query, *_: query.new_empty(query.transpose(1, 2).shape), "Meta")
_library.define("products(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.impl("products", _products, "CPU")
_library.impl("products", lambda x, weights, _: [x.new_empty(*x.shape[:-1], len(w)) for w in weights], "Meta")
