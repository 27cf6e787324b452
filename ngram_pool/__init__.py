"""A bounded table of next-token evidence, and the trees of guesses grown from it. Knows nothing of models."""

from ngram_pool.pool import NgramPool, contexts_of
from ngram_pool.storage import PoolFileError
from ngram_pool.tree import GuessTree, Source

__all__ = ["GuessTree", "NgramPool", "PoolFileError", "Source", "contexts_of"]
