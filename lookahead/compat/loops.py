"""The loop that generate() runs."""

from collections.abc import Callable

from transformers import PreTrainedModel


def sampling_loop(model: PreTrainedModel) -> Callable:
    """The model's own loop of greedy decoding and sampling. Its first argument is the model."""
    return type(model)._sample  # type: ignore[attr-defined]  # GenerationMixin has it


def own_sampling_loop(model: PreTrainedModel) -> Callable:
    """`sampling_loop` of the class that was wrapped, or of the class itself."""
    own = [vars(cls)["_sample"] for cls in type(model).__mro__ if "_sample" in vars(cls)]
    return next(loop for loop in own if not str(loop.__module__).startswith("lookahead."))
