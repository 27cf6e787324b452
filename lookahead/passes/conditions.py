"""Tests of a model's own passes under unusual conditions: training mode, no cache, or padding before layers that keep a
state. Each test runs once for each state of the model.
"""

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from lookahead.models.adapter import ModelAdapter, device_of, vocabulary_of
from lookahead.models.families import has_page
from lookahead.models.state import state_of
from lookahead.models.training import random_part, unknown_part
from lookahead.passes import probe
from lookahead.passes.capabilities import once
from lookahead.passes.rounding import relative_error


def hides_padding(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether plain passes over a batch keep padding out of the states of layers.

    transformers masks it before a layer computes. A bias may bring it back.
    """
    return once(model, "padding", True, lambda: _try_padding(model, adapter))


def same_without_cache(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether plain passes over the whole text give the logits of plain decoding on a cache: attention is causal."""
    return once(model, "no cache", True, lambda: _try_without_cache(model, adapter))


def what_training_changes(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """Return what passes do differently because parts of the model are in training mode; None if nothing.

    Settings that change something, and unknown parts, need no trial.
    """
    state = state_of(model)
    if (random := random_part(model, state.names)) is not None:
        return random
    if not model.training:  # parts of it that were added later, as adapters are
        return None
    if (unknown := unknown_part(model, state)) is not None:
        return f"lookahead does not know what {unknown} does"
    if not has_page(model):
        return f"lookahead does not know what {type(model).__name__} does"
    return once(model, ("in training", state.in_training), True, lambda: _try_in_training(model, adapter))


def _try_without_cache(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """`same_without_cache`, tried with a prompt of 8 tokens and 4 more."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (1, 12)))
    with probe.as_in_generate(model):
        cache = DynamicCache(config=adapter.config)
        cached = [probe.plain_logits(model, adapter, tokens[:, :8], cache)[0, -1:]]
        cached += [probe.plain_logits(model, adapter, tokens[:, i : i + 1], cache, i)[0] for i in range(8, 12)]
        at_once = [probe.plain_logits(model, adapter, tokens[:, : i + 1])[0, -1:] for i in range(7, 12)]
        noise = probe.batch_errors(model, adapter, tokens.repeat(2, 1)).max().item()
    rounding = probe.tolerance_of(model, max(noise, adapter.row_dependence))
    return relative_error(torch.cat(at_once), torch.cat(cached)) <= rounding


def _try_in_training(model: PreTrainedModel, adapter: ModelAdapter) -> str | None:
    """`what_training_changes`, tried with a prompt of 8 tokens and 4 more, on a cache.

    Logits must be the same to the bit as in evaluation mode, and torch's generators stay as they are.
    """
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (1, 12)))

    def decode() -> torch.Tensor:
        cache = DynamicCache(config=adapter.config)
        parts = [(0, 8), *((i, i + 1) for i in range(8, 12))]
        return torch.cat([probe.plain_logits(model, adapter, tokens[:, a:b], cache, a)[0] for a, b in parts])

    device = device_of(model)
    on_cuda = [device] if device.type == "cuda" else []

    def generators() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, on_cuda)]

    with probe.as_in_generate(model):
        expected = decode()
    with torch.random.fork_rng(on_cuda), torch.no_grad():
        before = generators()
        try:
            found = decode()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            return f"a pass fails with {type(error).__name__}: {error}"
        if not all(map(torch.equal, generators(), before)):
            return "a pass draws at random"
    return None if torch.equal(found, expected) else "the logits are others"


def _try_padding(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """`hides_padding`, tried with a prompt of 7 tokens behind 5 columns of padding, and one token more."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (2, 13)))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with probe.as_in_generate(model):
        padded, plain = DynamicCache(config=adapter.config), DynamicCache(config=adapter.config)
        found = [
            probe.plain_logits(model, adapter, tokens[:, :12], padded, mask=mask[:, :12])[0, 6:]
        ]  # without the first
        found.append(probe.plain_logits(model, adapter, tokens[:, 12:], padded, 12, mask)[0])
        expected = [probe.plain_logits(model, adapter, tokens[:1, 5:12], plain)[0, 1:]]  # which may be zero
        expected.append(probe.plain_logits(model, adapter, tokens[:1, 12:], plain, 7)[0])
        noise = probe.batch_errors(model, adapter, tokens).max().item()
    rounding = probe.tolerance_of(model, max(noise, adapter.row_dependence))
    return relative_error(torch.cat(found), torch.cat(expected)) <= rounding
