"""The warning for calls that the model's own decoding serves, and how it names their inputs."""

import warnings
from typing import Any

from transformers import PreTrainedModel

from lookahead.models.kept import OfModels

_warned = OfModels[set[str]]()


def warn_plain(model: PreTrainedModel, reason: str) -> None:
    """Warn that the model's own decoding takes over, once for each model and reason."""
    told = _warned.setdefault(model, set())
    if reason not in told:
        told.add(reason)
        warnings.warn(f"lookahead does not decode {reason}: the model's own decoding does.", stacklevel=2)


def described(name: str, value: Any) -> str:
    """Name an input of the model in words."""
    if name == "mm_encoder_outputs":  # encoded images and videos, by kind
        return " and ".join(f"{kind}s" for kind in value)
    if name.startswith(("pixel_values", "image")):
        return f"{'videos' if 'video' in name else 'images'} ({name})"
    return f"the model input {name}"
