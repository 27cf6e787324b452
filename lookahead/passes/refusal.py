"""Says why lookahead cannot decode a model, and what may help."""

from transformers import PreTrainedModel

from lookahead.compat import attention_implementation
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError
from lookahead.models.cache import InPlaceLayer
from lookahead.models.state import state_of
from lookahead.passes import shapes


def refusal(model: PreTrainedModel, adapter: ModelAdapter, reason: str | None) -> UnsupportedModelError:
    """Return the error for a model that no way of computing decodes. reason: against the last way."""
    name, state = type(model).__name__, state_of(model)
    implementation = attention_implementation(model.config)
    if not shapes.is_causal(model, adapter):
        reason = "later tokens change the logits of earlier ones"
        remedy = "Loading it with is_decoder=True may make its attention causal"
        if state.users:
            remedy = "Code of yours that its passes run may look at later tokens, or at the last row alone"
    elif adapter.has_state:
        remedy = f"Its layers {_state_layers(adapter)} keep a state"
    else:
        others = [repr(other) for other in ("sdpa", "eager") if other != implementation]
        remedy = f"Loading it with attn_implementation={' or '.join(others)} may help"
    if state.foreign:
        remedy = f"It runs other code than transformers' ({state.foreign[0]})"
    return UnsupportedModelError(
        f"{name} cannot be decoded by lookahead: {reason} (attn_implementation={implementation!r}). {remedy}; its own "
        "generate() still works."
    )


def _state_layers(adapter: ModelAdapter) -> str:
    """Name the layers that keep a state: indices, type and class."""
    types = getattr(adapter.config, "layer_types", None) or [adapter.config.model_type] * 2**10
    kinds: dict[str, list[str]] = {}
    for index, layer in enumerate(adapter.make_cache().layers):
        if not isinstance(layer, InPlaceLayer):
            kinds.setdefault(f"{types[index]}, {type(layer).__name__}", []).append(str(index))
    return "; ".join(f"{', '.join(indices)} ({kind})" for kind, indices in kinds.items())
