"""Reads from a model's configuration and classes which layers it has."""

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from lookahead import compat
from lookahead.compat import attention_implementation
from lookahead.models.adapter import ModelAdapter, UnsupportedModelError
from lookahead.models.state import state_of
from lookahead.step import Visibility


def read_config(model: PreTrainedModel, branches_states: bool | None = None) -> ModelAdapter:
    """Make a first adapter, not yet probed, from the cache that transformers would make for this model.

    branches_states: of the adapter; default: if `branching.why_not` finds nothing against it.
    Raises UnsupportedModelError if there is no such cache.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    arguments = compat.forward_arguments(model)
    cache_argument = compat.cache_argument(model)
    if cache_argument is None:
        from lookahead.models.refused import lacks_cache  # other models have one

        raise lacks_cache(model)
    try:
        theirs = DynamicCache(config=config).layers
    except Exception as error:  # transformers' own cache does not know this configuration either
        raise UnsupportedModelError(
            f"{name} does not say what its layers cache: {error!r}. Its own generate() still works."
        ) from error
    if not theirs:
        raise UnsupportedModelError(f"{name} says that it has no layers to cache. Its own generate() still works.")
    # Settings count where the model's code reads them. The cache reads all of them, and so hides more at times.
    names = state_of(model).names
    reads_types = "layer_types" in names or "create_causal_mask" not in names  # or makes its masks in a way of its own
    types = getattr(config, "layer_types", None) if reads_types else None
    chunk = getattr(config, "attention_chunk_size", None) if "create_chunked_causal_mask" in names else None
    always = "create_sliding_window_causal_mask" in names and not reads_types  # all layers have the window
    window = getattr(config, "sliding_window", None) if always else None
    has_state, biases_keys, why_not = any(map(keeps_state, theirs)), _biases_keys(model), None
    if biases_keys or (has_state and branches_states is None):
        from lookahead.models import branching  # other models do not need it

        why_not = branching.why_not(model)
    if branches_states is None:
        branches_states = has_state and why_not is None
    layers: list[Visibility | None] = []
    for index, layer in enumerate(theirs):
        if type(layer) is DynamicLayer:
            layers.append(Visibility(window=window))
        elif type(layer) is DynamicSlidingWindowLayer:
            is_chunk = layer.sliding_window == chunk and (not types or types[index] == "chunked_attention")
            layers.append(Visibility(chunk=chunk) if is_chunk else Visibility(window=layer.sliding_window))
        else:
            beside = Visibility() if type(layer) is LinearAttentionAndFullAttentionLayer else None
            layers.append(beside if branches_states else None)
    mask_of = None
    if types and len({v for v in layers if v is not None}) > 1:
        mask_of = {kind: v for kind, v in zip(types, layers, strict=False) if v is not None or branches_states}
    return ModelAdapter(
        config,
        tuple(layers),
        mask_of,
        takes_position_ids="position_ids" in arguments,
        cache_argument=cache_argument,
        has_state=has_state,
        branches_states=branches_states,
        in_inference_mode=(not has_state or branches_states) and not changes_rope(model),
        biases_keys=biases_keys,
        can_branch=(
            attention_implementation(model.config) in ("sdpa", "eager")
            and not (config.model_type == "gpt_neo" and "local" in config.attention_layers)  # windows by columns
            and not (biases_keys and why_not is not None)
            and (not has_state or branches_states)
        ),
    )


def keeps_state(layer: object) -> bool:
    """Whether a layer of transformers' cache keeps anything else than keys and values."""
    known = DynamicLayer, DynamicSlidingWindowLayer
    return type(layer) not in known and not compat.caches_nothing(layer)


def rope_kinds(config: PreTrainedConfig) -> dict[str, dict]:
    """The settings of each rotary embedding, by type of layer; of the only one, by an empty name."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = {name: kind for name, kind in rope.items() if isinstance(kind, dict) and "rope_type" in kind}
    return nested or {"": rope}


def ropes_of(model: PreTrainedModel) -> list[dict]:
    """The settings of all rotary embeddings that the configuration or the modules of a model name.

    A module keeps the type that it was made with, and reads the rest from its configuration.
    """
    kept = state_of(model).kept
    if "ropes" not in kept:
        kept["ropes"] = _ropes_of(model)
    return kept["ropes"]


def _ropes_of(model: PreTrainedModel) -> list[dict]:
    ropes = list(rope_kinds(model.config.get_text_config(decoder=True)).values())
    for module in map(vars, model.modules()):
        own, types = module.get("config"), module.get("rope_type")
        if isinstance(own, PreTrainedConfig) and types is not None:
            kinds = rope_kinds(own)
            names = types if isinstance(types, dict) else dict.fromkeys(kinds, types)
            ropes += [{**kinds.get(name, {}), "rope_type": kind} for name, kind in names.items()]
    return ropes


def changes_rope(model: PreTrainedModel) -> bool:
    """Whether a pass may change the model's rotary frequencies, which then stay changed."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes_of(model))


def _biases_keys(model: PreTrainedModel) -> bool:
    """Whether attention is biased by a key's column in the cache (ALiBi). In a tree, columns are not positions.

    If a model does this in another way, the probe finds out.
    """
    config = model.config.get_text_config(decoder=True)
    is_said = config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))
    if not is_said:
        return False
    from lookahead.models import branching

    return branching.biases_keys(model)
