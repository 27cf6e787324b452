"""Models that keep no cache that lookahead knows."""

from transformers import PreTrainedModel

from lookahead.compat import CACHE_ARGUMENTS, forward_arguments
from lookahead.models.adapter import UnsupportedModelError


def lacks_cache(model: PreTrainedModel) -> UnsupportedModelError:
    """Return the error for a model whose forward takes no `Cache`."""
    own, model_type = own_cache_argument(model), model.config.get_text_config(decoder=True).model_type
    what = (
        f"its {model_type} layers use a cache of their own ({own}), which cannot be cut back to an accepted prefix"
        if own
        else f"its forward takes none of the caches that lookahead knows ({', '.join(CACHE_ARGUMENTS)})"
    )
    return UnsupportedModelError(
        f"{type(model).__name__} cannot verify guesses: {what}. Its own generate() still works."
    )


def own_cache_argument(model: PreTrainedModel | type[PreTrainedModel]) -> str | None:
    """The model's argument for a cache of its own kind, which is not a `Cache`; None if it has none."""
    arguments = forward_arguments(model)
    return next((name for name in ("state", "mems", "past_buckets_states", "cache") if name in arguments), None)
