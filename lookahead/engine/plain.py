"""The warning for calls that the model's own decoding serves."""

import warnings

from transformers import PreTrainedModel

from lookahead.models.kept import OfModels

_warned = OfModels[set[str]]()


def warn_plain(model: PreTrainedModel, reason: str) -> None:
    """Warn that the model's own decoding takes over, once for each model and reason."""
    told = _warned.setdefault(model, set())
    if reason not in told:
        told.add(reason)
        warnings.warn(f"lookahead does not decode {reason}: the model's own decoding does.", stacklevel=2)
