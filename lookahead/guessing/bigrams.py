"""New pools of wraps: they start from the bigrams that `lookahead tune --bigrams` has stored (`tools.bigrams`)."""

from pathlib import Path

from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.models.adapter import vocabulary_of
from lookahead.passes import stored
from ngram_pool import NgramPool, PoolFileError


def bigrams_file(model: PreTrainedModel) -> Path:
    """Return the file of a model's bigrams. It depends on the model's name, settings and dtype."""
    return stored.path_of("bigrams", model, model.name_or_path, model.dtype).with_suffix(".pool")


def new_pool(model: PreTrainedModel, config: LookaheadConfig) -> NgramPool:
    """Return a pool for a wrap: with the model's bigrams if `lookahead tune --bigrams` has stored them, else empty."""
    pool = NgramPool(config.pool_memory_mb)
    try:
        bigrams = NgramPool.load(bigrams_file(model))
    except (OSError, PoolFileError):  # none kept, or by a version with another format of files
        return pool
    if bigrams.largest_token < vocabulary_of(model):
        pool.merge(bigrams)
    return pool
