"""Compares a model's own passes of several shapes: in a batch and alone, at once and token by token.

Most models do not need it: one pass over all texts of the probe gives the logits of plain decoding.
"""

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from lookahead.models.adapter import ModelAdapter, vocabulary_of
from lookahead.models.state import state_of
from lookahead.passes import probe
from lookahead.passes.probe import GROSS_ERROR, LARGEST_ROUNDING, as_in_generate, tolerance_of, typical
from lookahead.passes.rounding import is_half, relative_error, row_errors


def row_dependence(model: PreTrainedModel, adapter: ModelAdapter, largest: float) -> float:
    """`probe.row_dependence`, where plain decoding and one pass over all its texts differ. largest: by rounding.

    Several sequences are computed in one batch, and each alone. If attention is causal, one sequence is also computed
    in one pass, and token by token. (Not if layers keep a state, because scans and steps sum in another order.)
    Rounding alone may make a router send a row to another expert. That does not count: in full precision it hardly
    happens in both rounds, and in half precision the median ignores it.

    Code of users may go by the place of a row in its pass, such as a hook that changes the last one. So in full
    precision, that is tried token by token even if layers keep a state: `noise` would take it for rounding.
    """
    rng = np.random.default_rng(1)
    users = state_of(model).users if adapter.has_state and not is_half(model.dtype) else None
    goes_by_place = users is not None and users.may_go_by_place
    token_by_token = is_causal(model, adapter) and (goes_by_place or not adapter.has_state)
    found = []
    for _ in range(2):
        tokens = torch.from_numpy(rng.integers(0, vocabulary_of(model), (4, 16)))
        try:
            with as_in_generate(model):
                apart = [batch_errors(model, adapter, tokens)]
                if token_by_token:
                    of_prefill = _prefill_errors(model, adapter, tokens[:1])
                    if goes_by_place:
                        apart.append(of_prefill)
                    else:
                        apart = [torch.cat([*apart, _unless_gross(of_prefill)])]
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # a model that takes no batches, or that the probe will refuse
            return 0.0
        found.append(max(typical(model, part) for part in apart))
        if not found[-1] > largest:
            return 0.0
    return max(found)


def noise(model: PreTrainedModel, adapter: ModelAdapter, ids: torch.Tensor) -> torch.Tensor:
    """Return the errors of rows (`row_errors`) between plain passes of several shapes over ids [batch, n]."""
    of_batch, of_prefill = batch_errors(model, adapter, ids), _prefill_errors(model, adapter, ids[-1:])
    if adapter.has_state:  # scans and steps sum in another order
        of_prefill = _unless_gross(of_prefill)
    elif of_prefill.max() >= LARGEST_ROUNDING / 4:
        of_prefill = of_prefill[:0]
    return torch.cat([of_batch.cpu(), of_prefill.cpu()])


def batch_errors(model: PreTrainedModel, adapter: ModelAdapter, ids: torch.Tensor) -> torch.Tensor:
    """Errors of rows (`row_errors`) between one pass over the sequences ids [batch, n] and a pass over each alone."""
    together = probe.plain_logits(model, adapter, ids)
    alone = torch.cat([probe.plain_logits(model, adapter, line[None]) for line in ids])
    return row_errors(together.flatten(0, 1), alone.flatten(0, 1))


def _prefill_errors(model: PreTrainedModel, adapter: ModelAdapter, ids: torch.Tensor) -> torch.Tensor:
    """Errors of rows (`row_errors`) between one pass over the tokens ids [1, n] and a pass over each alone."""
    at_once = probe.plain_logits(model, adapter, ids, DynamicCache(config=adapter.config))[0]
    cache = DynamicCache(config=adapter.config)
    single = [probe.plain_logits(model, adapter, token[None, None], cache, i)[0] for i, token in enumerate(ids[0])]
    return row_errors(at_once, torch.cat(single))


def _unless_gross(errors: torch.Tensor) -> torch.Tensor:
    """Return errors between two plain passes, or none if they are gross, for example if the model ignores its cache."""
    return errors if errors.median() < GROSS_ERROR else errors[:0]


def is_causal(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether later tokens do not change a token's logits. True if a plain pass fails or gives NaN."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary_of(model), (1, 12)))
    try:
        with as_in_generate(model):
            logits = probe.plain_logits(model, adapter, tokens)
            tokens[0, 6:] = tokens[0, 6:].flip(0)
            other = probe.plain_logits(model, adapter, tokens)
    except Exception:  # then the probe has another reason to refuse the model
        return True
    return bool(logits.isnan().any()) or relative_error(other[0, :6], logits[0, :6]) <= tolerance_of(model)
