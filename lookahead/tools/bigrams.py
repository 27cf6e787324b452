"""The top next tokens after each single token, so that a new pool is not empty.

The model computes every token of the vocabulary once, after a few tokens that begin a text. A pool learns the most
likely next tokens as ordinary evidence, which the observations of decoding soon outweigh (weight-derived bigrams, arXiv
2411.03786).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lookahead.guessing.pool import TOP_K
from lookahead.guessing.source import top_k
from lookahead.models.adapter import UnsupportedModelError, device_of, vocabulary_of
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree, NgramPool, Origin

ROWS = 63  # tokens of a pass; with the root, as many rows as the kernels for a CPU can compute


def learn_bigrams(
    runner: EagerRunner,
    beginning: Sequence[int],
    temperature: float,
    progress: Callable[[float], None] = lambda done: None,
) -> NgramPool:
    """Return a pool that has learned the model's top next tokens after each token of its vocabulary.

    beginning: at least one token, put before each. A line break affects the next token least.
    temperature: that of the learned probabilities. progress: called with the share done, 0 to 1.
    Raises UnsupportedModelError if the model cannot verify trees.
    """
    model = runner.model
    if not runner.adapter.can_branch:
        raise UnsupportedModelError(
            f"{type(model).__name__} verifies single branches only, so it would need a pass for each token of its "
            "vocabulary: tune it without --bigrams"
        )
    pool, size = NgramPool(), vocabulary_of(model)
    cache = runner.adapter.make_cache(len(beginning) + ROWS)
    *before, root = beginning
    with torch.no_grad():
        if before:
            runner.prefill(torch.tensor([before], device=device_of(model)), cache)
        for start in range(0, size, ROWS):
            tokens = np.arange(start, min(start + ROWS, size))
            step = lay_out(root, GuessTree.of(tokens, np.full(len(tokens), -1)))
            logits = runner.run([step], cache).logits[1:]
            said, probabilities = top_k(logits, temperature, TOP_K)
            cache.commit([step], [[]])
            pool.learn_next(tokens[:, None], said, probabilities, Origin.LOGITS)
            progress((start + len(tokens)) / size)
    return pool
