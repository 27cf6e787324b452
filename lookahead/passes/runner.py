"""Runs passes over prompts and steps. A runner serves one call of generate():

    prefill(new, cache)  compute a prompt, in one pass or several
    begin(cache)         before the first step: return the cache that all steps will use
    run(steps, cache)    compute a step of each sequence, in one pass
    end()                after the last step, even if it failed

`EagerRunner` runs the model's own code. `fused.FusedRunner` and `graphs.GraphRunner` run some steps faster.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.compat import forward_arguments
from lookahead.cpu import products
from lookahead.decoding_pass import DecodingPass
from lookahead.models.adapter import ModelAdapter, device_of
from lookahead.models.cache import AnyCache, LookaheadCache, SeparateCaches
from lookahead.step import Step, pad, to_device

if TYPE_CHECKING:
    from lookahead.models.biases import Places
    from lookahead.models.recurrence import Forest

TopK = tuple[int, float | Sequence[float]]
"""The number of top tokens to find, and the temperature of their probabilities: one, or one for each sequence."""


class Company(NamedTuple):
    """A pass that several calls share."""

    rows: int
    sequences: int
    seconds: float


@dataclass(frozen=True)
class Output:
    """The result of a pass."""

    logits: torch.Tensor
    """[rows, vocabulary], the steps of all sequences one after the other; of a prompt, its last tokens. On the model's
    device, in its dtype."""
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)
    """Output of the requested layers, [rows, hidden]; of a prompt, for all its tokens."""
    first: Sequence[int] = (0,)
    """The row of each sequence's root."""
    has_nan: bool | None = None
    """Whether a row is NaN; None if unknown."""
    top_k: tuple[np.ndarray, np.ndarray] | None = None
    """For a step, the requested top tokens, if the pass has found them: tokens, int64, and
    probabilities, float32 [rows, count], as `guessing.source.top_k` returns them; roots and guesses at least."""
    argmax: list[int] | None = None
    """The argmax of each row, or with `top_k` of each of these rows, the first of equals; -1 if the row has a NaN or no
    number is the largest. None if the pass has not found them."""
    company: Company | None = None
    """The whole pass, if other calls have shared it."""


def looked_through(output: Output) -> Output:
    """Find the argmax of each row, and NaNs, in logits on another device. Waits for the device once."""
    largest, tokens = output.logits.max(-1)  # of equals the first, as `generate` takes; a NaN is larger than all
    argmax, has_nan = torch.stack([tokens.where(largest.isfinite(), -1), largest.isnan()]).tolist()
    return replace(output, argmax=argmax, has_nan=any(has_nan))


def joined(outputs: Sequence[Output]) -> Output:
    """Join the outputs of passes over one sequence each into that of one pass."""
    first = [0, *accumulate(len(output.logits) for output in outputs)][:-1]
    hidden = {i: torch.cat([output.hidden_states[i] for output in outputs]) for i in outputs[0].hidden_states}
    return Output(torch.cat([output.logits for output in outputs]), hidden, first)


def _of_tokens(states: torch.Tensor) -> torch.Tensor:
    """[sequences, tokens, hidden]. In Gemma 3n, a token has several states, which are concatenated."""
    return states if states.ndim < 4 else states.permute(1, 2, 0, 3).flatten(2)


class EagerRunner:
    """Runs the model's own code."""

    name = "eager"
    """The runner's name in reports."""
    weight_bytes = 0
    """Bytes of weights that a pass reads; 0 if unknown."""
    longest_prompt = 0
    """Most tokens of a prompt that fused passes prefill; the model's own code prefills longer ones."""
    is_ragged = False
    """Whether each sequence has its own cache, and a pass only the rows of each step. If not, steps are padded."""
    company: Hashable | None = None
    """Equal for runners of calls that can share a pass; None: its passes are not shared."""

    def __init__(self, model: PreTrainedModel, adapter: ModelAdapter, hidden_states: tuple[int, ...] = ()):
        """hidden_states: layers whose output is requested. 0 is the embedding, 1 the first layer."""
        self.model = model
        self.adapter = adapter
        self.requested = hidden_states
        self._extras = {"output_hidden_states": True} if hidden_states else {}
        self._served: list[nn.Linear] | None = None  # by our kernels; None until a pass needs them

    def join(self, caches: list[LookaheadCache], expected_length: int = 0) -> AnyCache:
        """Return one cache for all of these, each of one sequence. A single one is returned as it is.

        expected_length: as for `ModelAdapter.make_cache`.
        """
        if len(caches) == 1:
            return caches[0]
        batch = self.adapter.make_cache(expected_length)
        batch.stack(caches)
        return batch

    def begin(self, cache: AnyCache) -> AnyCache:
        """Return a cache with the same prompts, for all steps until `end`."""
        return cache

    def end(self) -> None:
        """Release what the steps needed, after the last step."""

    def eager(self, cache: AnyCache) -> tuple["EagerRunner", AnyCache]:
        """Return a runner of the model's own code, and the cache for its steps, which are single tokens.

        A batch gets the layout of plain decoding: padding first, so that all sequences end together. So the model makes
        all masks itself. This one runs no more steps.
        """
        runner = EagerRunner(self.model, self.adapter, self.requested)
        if len(cache.lengths) == 1:
            return runner, cache
        padded, longest = cache.emptied(), max(cache.lengths)
        sequences = [cache.sequence(b) for b in range(len(cache.lengths))]
        padded.stack(sequences, [longest - length for length in cache.lengths])
        return runner, padded

    def run(
        self,
        steps: list[Step],
        cache: AnyCache,
        last: list[int] | None = None,
        top_k: TopK = (0, 1.0),
        others_ran: bool = True,
    ) -> Output:
        """Run one pass over a step of each sequence.

        T is the number of rows of the longest step that are not computed yet (`Step.computed`, the same in all steps).
        Rows that pad the shorter steps hold nothing useful.
        last: for each sequence, the last position for window tokens (`Step.positions`).
        top_k: the top tokens to find after the root and each guess, if the pass can find them cheaply.
        others_ran: whether foreign code may have run in this thread since the last pass, and changed weights. If not, a
            runner with packed copies checks only a part of them.
        """
        if isinstance(cache, SeparateCaches):
            each = enumerate(zip(steps, cache.each, strict=True))
            return joined([EagerRunner.run(self, [step], one, last and last[b : b + 1]) for b, (step, one) in each])
        adapter, device = self.adapter, device_of(self.model)
        ids, positions, ancestors = pad(steps, cache.lengths, last)
        again = len(cache.replay)
        if again:
            ids = np.concatenate([[cache.replay], ids], axis=1)
            positions = np.concatenate([np.arange(cache.lengths[0] - again, cache.lengths[0])[None], positions], axis=1)
        tokens = to_device(np.stack([ids, positions]), device)
        cache.prepare(tokens.shape[2], steps[0].computed)
        inputs = {adapter.cache_argument: cache, "use_cache": True}
        if adapter.takes_position_ids:
            inputs["position_ids"] = tokens[1]
        # A chain needs none of our masks: the probe has found that the model's own is causal.
        if cache.paddings is not None:
            columns = np.arange(cache.lengths[0] + cache.paddings[0] + 1)
            seen = columns >= np.array(cache.paddings)[:, None]
            inputs["attention_mask"] = to_device(seen.astype(np.int64), device)  # as generate() makes it
        elif adapter.kinds and (len(steps) > 1 or (adapter.can_branch and len(steps[0]) > 1)):
            inputs["attention_mask"] = adapter.masks(ancestors, positions, cache, self.model.dtype, device)
        model, forest, places = self.model, None, None
        if adapter.branches_states and tokens.shape[2] > 1:
            from lookahead.models import branching, recurrence  # other models need neither

            model, forest = branching.branching(model), recurrence.Forest(ancestors, device)
        elif adapter.biases_keys and cache.paddings is None and "attention_mask" in inputs:
            from lookahead.models import biases, branching

            model, places = branching.branching(model), biases.places_in(cache, positions)
        with self._in_pass(forest, places), torch.inference_mode() if adapter.in_inference_mode else nullcontext():
            output = model(input_ids=tokens[0], **inputs, **self._extras)
            hidden = {i: _of_tokens(output.hidden_states[i])[:, again:].flatten(0, 1) for i in self.requested}
            count, rows = len(steps), tokens.shape[2] - again
            return Output(output.logits[:, again:].flatten(0, 1), hidden, range(0, count * rows, rows))

    def prefill(
        self, new: torch.Tensor, cache: LookaheadCache, logits_to_keep: int = 1, as_steps: bool = False
    ) -> Output:
        """Prefill a prompt of one sequence, or a chunk of it, into its cache.

        new: token ids, int64 [1, n], or embeddings [1, n, hidden]. logits_to_keep: number of last tokens whose logits
        are returned. as_steps: fused passes round each row as in a step, wherever chunks begin. Raises IndexError
        beyond the end of a table of learned positions.
        """
        model, adapter = self.model, self.adapter
        held = cache.lengths[0]
        length = held + new.shape[1]
        name = "input_ids" if new.ndim == 2 else "inputs_embeds"
        inputs: dict = {name: new.to(device_of(model)), adapter.cache_argument: cache, "use_cache": True}
        if adapter.takes_position_ids:
            inputs["position_ids"] = torch.arange(held, length, device=device_of(model))[None]
        if "logits_to_keep" in forward_arguments(model):
            inputs["logits_to_keep"] = logits_to_keep
        with self._in_pass():
            output = model(**inputs, **self._extras)
        cache.lengths = [length]
        hidden = {i: _of_tokens(output.hidden_states[i])[0] for i in self.requested}
        return Output(output.logits[0, -logits_to_keep:], hidden)

    @contextmanager
    def _in_pass(self, forest: "Forest | None" = None, places: "Places | None" = None) -> Iterator[None]:
        """The context of each call of the model."""
        adapter = self.adapter
        decoding = DecodingPass(adapter.splits_attention, adapter.uses_kernels, forest=forest, places=places)
        if decoding.uses_kernels and self._served is None:
            self._served = products.served_layers(self.model)
        with decoding, products.installed((self._served or ()) if decoding.uses_kernels else ()):
            yield


class Pass(NamedTuple):
    """A pass that a call requests. Fields as for `EagerRunner.run`."""

    runner: EagerRunner
    steps: list[Step]
    cache: AnyCache
    last: list[int]
    top_k: tuple[int, float]
    others_ran: bool
