"""The loop that generate() runs."""

from collections.abc import Callable

from transformers import PreTrainedModel


def own_loop(model: PreTrainedModel) -> Callable:
    """The model's own loop of greedy decoding and sampling, whether the model is wrapped or not.

    Its first argument is the model. It can be given as ``custom_generate``.
    """
    own = [vars(cls)["_sample"] for cls in type(model).__mro__ if "_sample" in vars(cls)]
    return next(loop for loop in own if not str(loop.__module__).startswith("lookahead."))
