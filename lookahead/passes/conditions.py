"""Tests of a model's own passes under unusual conditions: training mode, no cache, padding, or a loop of its own. Each
test runs once for each state of the model.
"""

from copy import copy
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from lookahead.compat import CACHE, forward_arguments
from lookahead.compat.loops import own_loop
from lookahead.models.adapter import ModelAdapter, device_of, vocabulary_of
from lookahead.models.families import UnknownModelError, page_of
from lookahead.models.state import state_of
from lookahead.models.training import random_part, unknown_part
from lookahead.passes import probe, shapes
from lookahead.passes.capabilities import once
from lookahead.passes.rounding import relative_error, row_errors


def hides_padding(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether plain passes over a batch keep padding out of the states of layers.

    transformers masks it before a layer computes. A bias may bring it back.
    """
    return once(model, "padding", True, lambda: _try_padding(model, adapter))


def gives_usual_inputs(model: PreTrainedModel, adapter: ModelAdapter, generation: GenerationConfig) -> bool:
    """`loop_gives_usual_inputs` for a class that prepares its inputs. Families with a program need no trial: their
    texts have been compared with those of generate().
    """
    users = state_of(model).users
    is_own = users is None or users.prepares is None
    if is_own and once(model, "program", True, lambda: _has_program(model)):
        return True
    return loop_gives_usual_inputs(model, adapter, generation)


def leaves_positions(model: PreTrainedModel, adapter: ModelAdapter, is_padded: bool) -> bool:
    """Whether the class that prepares the inputs of passes leaves positions as they are.

    Within a call, a rotary embedding does not show where they begin; on a cache that two loops share, it does.
    is_padded: whether a pass without positions would count padding.
    """
    return once(model, ("positions", is_padded), True, lambda: _leaves_positions(model, adapter, is_padded))


def loop_gives_usual_inputs(
    model: PreTrainedModel, adapter: ModelAdapter, generation: GenerationConfig, padding: int = 0
) -> bool:
    """Whether the model's own loop gives the logits of passes over the tokens alone, at their usual positions.

    A class may prepare the inputs of its passes in its own way. And a model that is given a mask, but no positions, may
    count padding.
    padding: columns to the left of the prompt.
    """
    return once(model, ("loop", padding), True, lambda: _try_loop(model, adapter, generation, padding))


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
    if not _has_program(model):
        return f"lookahead does not know what {type(model).__name__} does"
    return once(model, ("in training", state.in_training), True, lambda: _try_in_training(model, adapter))


def _leaves_positions(model: PreTrainedModel, adapter: ModelAdapter, is_padded: bool) -> bool:
    ids = torch.arange(7, device=device_of(model))[None]
    given = {CACHE: DynamicCache(config=adapter.config), "use_cache": True, "is_first_iteration": True}
    try:
        prepare: Any = model.prepare_inputs_for_generation
        inputs = prepare(ids, position_ids=ids.clone(), attention_mask=None, **given)
    except Exception:  # it needs what this call lacks
        return False
    positions = inputs.get("position_ids")
    return not is_padded if positions is None else torch.equal(positions.flatten(), ids.flatten())


def _has_program(model: PreTrainedModel) -> bool:
    try:
        page_of(model)
    except UnknownModelError:
        return False
    return True


def _try_without_cache(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """`same_without_cache`, tried with a prompt of 8 tokens and 4 more."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (1, 12)))
    with probe.as_in_generate(model):
        cache = DynamicCache(config=adapter.config)
        cached = [probe.plain_logits(model, adapter, tokens[:, :8], cache)[0, -1:]]
        cached += [probe.plain_logits(model, adapter, tokens[:, i : i + 1], cache, i)[0] for i in range(8, 12)]
        at_once = [probe.plain_logits(model, adapter, tokens[:, : i + 1])[0, -1:] for i in range(7, 12)]
        noise = shapes.batch_errors(model, adapter, tokens.repeat(2, 1)).max().item()
    rounding = probe.tolerance_of(model, max(noise, adapter.row_dependence))
    return relative_error(torch.cat(at_once), torch.cat(cached)) <= rounding


def _try_loop(model: PreTrainedModel, adapter: ModelAdapter, generation: GenerationConfig, padding: int) -> bool:
    """`loop_gives_usual_inputs`, tried with a prompt of 7 tokens and 5 more.

    generation: of any call. Its tensors of special tokens are those that the loop needs.
    """
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (1, padding + 7)))
    device, arguments = device_of(model), forward_arguments(model)
    settings = copy(generation)
    settings.do_sample, settings.return_dict_in_generate, settings.output_logits = False, True, True
    settings.output_scores = settings.output_attentions = settings.output_hidden_states = False
    settings.prefill_chunk_size = None
    mask = (torch.arange(tokens.shape[1], device=device) >= padding).long()[None]
    inputs: dict[str, Any] = {CACHE: DynamicCache(config=adapter.config), "use_cache": True}
    inputs["attention_mask"] = mask if padding else None
    if adapter.takes_position_ids:  # as generate() makes them
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if "logits_to_keep" in arguments:
        inputs["logits_to_keep"] = 1
    ends = StoppingCriteriaList([MaxLengthCriteria(tokens.shape[1] + 5)])
    with probe.as_in_generate(model):
        try:
            written = own_loop(model)(
                model, tokens.to(device), logits_processor=LogitsProcessorList(), stopping_criteria=ends,
                generation_config=settings, **inputs,
            )  # fmt: skip
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # the model's own decoding will raise it, too
            return False
        text, plain = written.sequences[:, padding:], DynamicCache(config=adapter.config)
        expected = [probe.plain_logits(model, adapter, text[:, :7], plain)[0, -1:]]
        expected += [probe.plain_logits(model, adapter, text[:, i : i + 1], plain, i)[0] for i in range(7, 11)]
        noise = shapes.batch_errors(model, adapter, text.repeat(2, 1)).max().item()
    rounding = probe.tolerance_of(model, max(noise, adapter.row_dependence))
    errors = row_errors(torch.cat(written.logits), torch.cat(expected)).nan_to_num(torch.inf)
    return probe.typical(model, errors) <= rounding


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
    """`hides_padding`, tried with a prompt of 7 tokens after 5 columns of padding, and one token more."""
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
        noise = shapes.batch_errors(model, adapter, tokens).max().item()
    rounding = probe.tolerance_of(model, max(noise, adapter.row_dependence))
    return relative_error(torch.cat(found), torch.cat(expected)) <= rounding
