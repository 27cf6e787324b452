"""Private names of transformers' stop strings, each behind a function."""

from copy import copy
from typing import Any

from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import stopping_criteria


def as_criterion(model: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of generate(), with a criterion in the place of stop strings.

    transformers does not see the tokenizer, which they need, if a ``custom_generate`` is given as well.
    Raises ValueError if there is none, and if the model's own settings have stop strings.
    """
    options = dict(options)
    stops, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
    if (given := options.get("generation_config")) is not None and given.stop_strings:
        options["generation_config"] = settings = copy(given)
        stops, settings.stop_strings = stops or given.stop_strings, None
    own = getattr(model.generation_config, "stop_strings", None)
    if own:
        raise ValueError(
            f"model.generation_config.stop_strings={own!r:.80} cannot be used here: set it to None, and give "
            "stop_strings and tokenizer"
        )
    if not stops:
        return options
    if tokenizer is None:
        raise ValueError(f"stop_strings={stops!r:.80} need the tokenizer: give tokenizer=...")
    ends = stopping_criteria.StopStringCriteria(tokenizer, stops)
    return options | {"stopping_criteria": StoppingCriteriaList([*(options.get("stopping_criteria") or ()), ends])}


def tokens_that_end_stop_strings(criterion: Any) -> frozenset[int] | None:
    """The tokens in which a stop string of transformers' criterion can end; None: any token, or another criterion."""
    if type(criterion) is not getattr(stopping_criteria, "StopStringCriteria", None):
        return None
    if not criterion.target_lens.all():  # an empty stop string ends everywhere
        return None
    start = criterion.max_valid_positions * criterion.num_stop_strings
    can_end = (criterion.embedding_vec[:, start:-1] > 0).any(dim=1)
    return frozenset(can_end.nonzero()[:, 0].tolist())
