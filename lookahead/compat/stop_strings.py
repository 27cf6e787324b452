"""Private names of transformers' stop strings, each behind a function."""

from typing import Any

from transformers.generation import stopping_criteria


def tokens_that_end_stop_strings(criterion: Any) -> frozenset[int] | None:
    """The tokens in which a stop string of transformers' criterion can end; None: any token, or another criterion."""
    if type(criterion) is not getattr(stopping_criteria, "StopStringCriteria", None):
        return None
    if not criterion.target_lens.all():  # an empty stop string ends everywhere
        return None
    start = criterion.max_valid_positions * criterion.num_stop_strings
    can_end = (criterion.embedding_vec[:, start:-1] > 0).any(dim=1)
    return frozenset(can_end.nonzero()[:, 0].tolist())
