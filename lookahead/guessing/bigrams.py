"""What a model says after each single token, so that a new pool is not empty.

Every token of the vocabulary passes once through the model, alone behind the token that begins a text. The likeliest
next tokens are ordinary evidence of a pool: what decoding observes soon outweighs it (weight-derived bigrams, arXiv
2411.03786).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.guessing.pool import TOP_K
from lookahead.guessing.source import likeliest
from lookahead.models.adapter import device_of, vocabulary_of
from lookahead.passes.costs import path_of
from ngram_pool import NgramPool, PoolFileError, Source

ROWS = 128  # tokens of a pass


def learn_bigrams(
    model: PreTrainedModel, temperature: float, progress: Callable[[float], None] = lambda done: None
) -> NgramPool:
    """Return a pool that knows what the model says after each token of its vocabulary.

    temperature: of the probabilities that are learned. progress: called with the share done, 0 to 1.
    """
    pool, size = NgramPool(), vocabulary_of(model)
    first = model.config.get_text_config(decoder=True).bos_token_id
    for begin in range(0, size, ROWS):
        tokens = torch.arange(begin, min(begin + ROWS, size), device=device_of(model))[:, None]
        ids = tokens if first is None else torch.cat([torch.full_like(tokens, first), tokens], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1]
        said, probabilities = likeliest(logits, temperature, TOP_K)
        pool.learn_next(tokens.cpu().numpy(), said, np.minimum(probabilities, 1.0), Source.LOGITS)
        progress((begin + len(tokens)) / size)
    return pool


def bigrams_file(model: PreTrainedModel) -> Path:
    """Name the file of a model's bigrams, beside its step costs. Models are told apart by name, settings and dtype."""
    return path_of(model, "bigrams", model.name_or_path, model.dtype).with_suffix(".pool")


def new_pool(model: PreTrainedModel, config: LookaheadConfig) -> NgramPool:
    """Return a pool for a wrap: with the model's bigrams, if `lookahead tune --bigrams` has kept them, else empty."""
    pool = NgramPool(config.pool_memory_mb)
    try:
        bigrams = NgramPool.load(bigrams_file(model))
    except (OSError, PoolFileError):  # none kept, or by a version with another format of files
        return pool
    if bigrams.largest_token < vocabulary_of(model):
        pool.merge(bigrams)
    return pool
