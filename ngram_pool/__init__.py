"""A table of fixed size that learns what follows a context, and grows trees of guesses. Needs no model and no torch."""

from ngram_pool.pool import NgramPool, contexts_of
from ngram_pool.storage import PoolFileError
from ngram_pool.tree import GuessTree, Origin

__all__ = ["GuessTree", "NgramPool", "Origin", "PoolFileError", "contexts_of"]
