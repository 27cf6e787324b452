"""How a pass is run: a step of each sequence, or a prompt, through the model as it is.

A runner serves one call of generate():

    read(new, cache)   a prompt, in one pass or several
    begin(cache)       before the first step: the cache that the steps work on from now on
    run(steps, cache)  a step of each sequence, in one pass
    end()              after the last step, also if one failed

`compiled.CompiledRunner` and `graphs.GraphRunner` run steps faster where they can.
"""

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.cpu import products
from lookahead.decoding_pass import decoding_pass
from lookahead.models.adapter import ModelAdapter, context_length, device_of
from lookahead.models.cache import LookaheadCache
from lookahead.step import Step, lay_out, pad
from ngram_pool import GuessTree


@dataclass(frozen=True)
class Output:
    """What a pass says."""

    logits: torch.Tensor
    """Of a step, [batch, T, vocabulary]; of a prompt, those of its last tokens, [k, vocabulary]. On the model's device,
    in its dtype."""
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of the layers that were asked for, [batch, T, hidden]; of a prompt, of all tokens, [n, hidden]."""


class EagerRunner:
    """Runs the model's own code."""

    name = "eager"
    """As reports call it."""

    def __init__(self, model: PreTrainedModel, adapter: ModelAdapter, hidden_states: tuple[int, ...] = ()):
        """hidden_states: layers whose output is asked for; 0 is the embedding, 1 the first layer's."""
        self.model = model
        self.adapter = adapter
        self._asked = hidden_states

    def begin(self, cache: LookaheadCache) -> LookaheadCache:
        """What holds the prompts in ``cache``, for the steps to work on. It is not used any more after `end`."""
        return cache

    def end(self) -> None:
        """No further steps will be run."""

    def run(self, steps: list[Step], cache: LookaheadCache, last: list[int] | None = None) -> Output:
        """One pass over a step of each sequence.

        T is the number of rows of the longest step, less those computed before, of which each step has as many. What
        shorter ones are padded with says nothing.
        last: for each sequence, the position beyond which no window token is placed (`Step.positions`).
        """
        adapter, device = self.adapter, device_of(self.model)
        ids, positions, ancestors = pad(steps, cache.lengths, last)
        again = len(cache.replay)
        if again:
            ids = np.concatenate([[cache.replay], ids], axis=1)
            positions = np.concatenate([np.arange(cache.lengths[0] - again, cache.lengths[0])[None], positions], axis=1)
        tokens = torch.from_numpy(np.stack([ids, positions])).to(device)
        cache.begin(tokens.shape[2], steps[0].computed)
        inputs = {adapter.cache_argument: cache, "use_cache": True}
        if adapter.takes_position_ids:
            inputs["position_ids"] = tokens[1]
        # Where chains are all that there is, the model's own mask serves, which the probe has found to be causal.
        if len(steps) > 1 or (adapter.can_branch and len(steps[0]) > 1):
            inputs["attention_mask"] = adapter.masks(ancestors, positions, cache, self.model.dtype, device)
        with self._in_pass(), torch.inference_mode() if adapter.in_inference_mode else nullcontext():
            output = self.model(input_ids=tokens[0], **inputs, **self._extras())
            return Output(output.logits[:, again:], {i: output.hidden_states[i][:, again:] for i in self._asked})

    def read(self, new: torch.Tensor, cache: LookaheadCache, chunk_size: int | None = None, keep: int = 1) -> Output:
        """Add the positions of one sequence, its prompt, to its cache; logits of the last ones, at most ``keep``.

        new: ids, int64 [1, n], or embeddings [1, n, hidden]. chunk_size: positions of a pass, all of them by default.
        Raises ValueError if a table of learned positions is too short for them.
        """
        model, adapter = self.model, self.adapter
        name = "input_ids" if new.ndim == 2 else "inputs_embeds"
        held, context = cache.lengths[0], context_length(model)
        length = held + new.shape[1]
        if length > context:
            warnings.warn(f"the prompt has {length} tokens, the model was made for {context}", stacklevel=2)
        takes_limit = "logits_to_keep" in inspect.signature(model.forward).parameters
        limits = {"logits_to_keep": keep} if takes_limit else {}
        positions = torch.arange(held, length, device=device_of(model))[None]
        hidden: dict[int, list[torch.Tensor]] = {i: [] for i in self._asked}
        for begin in range(0, new.shape[1], chunk_size or new.shape[1]):
            chunk = slice(begin, begin + (chunk_size or new.shape[1]))
            inputs = {name: new[:, chunk].to(positions.device), adapter.cache_argument: cache, "use_cache": True}
            if adapter.takes_position_ids:
                inputs["position_ids"] = positions[:, chunk]
            try:
                with self._in_pass():
                    output = model(**inputs, **limits, **self._extras())
            except IndexError as error:  # a table of learned positions is at its end
                if length <= context:
                    raise
                raise ValueError(
                    f"the prompt has {length} tokens, the model's context is {context}: shorten it"
                ) from error
            for i, states in hidden.items():
                states.append(output.hidden_states[i][0])
        cache.lengths = [length]
        return Output(output.logits[0, -keep:], {i: torch.cat(states) for i, states in hidden.items()})

    def settle(self, cache: LookaheadCache) -> None:
        """Compute what the cache has to compute again, so that it holds all that was accepted."""
        if cache.replay:
            last = cache.replay.pop()
            cache.lengths[0] -= 1
            step = lay_out(last, GuessTree.empty())
            self.run([step], cache)
            cache.commit([step], [[0]])

    @cached_property
    def _siblings(self) -> dict[int, tuple[nn.Linear, ...]]:
        """`products.siblings`, once a call, and only where passes run eagerly."""
        return products.siblings(self.model) if self.adapter.uses_kernels else {}

    def _in_pass(self) -> AbstractContextManager[None]:
        """What each call of the model has to run in."""
        adapter = self.adapter
        return decoding_pass(adapter.splits_attention, adapter.uses_kernels, siblings=self._siblings)

    def _extras(self) -> dict[str, bool]:
        return {"output_hidden_states": True} if self._asked else {}
