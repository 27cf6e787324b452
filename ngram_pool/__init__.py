"""A table of fixed size that learns which token follows which context, and grows trees of guesses from it.

This package needs no model and imports neither torch nor transformers.
"""

from ngram_pool.pool import NgramPool, contexts_of
from ngram_pool.storage import PoolFileError
from ngram_pool.tree import GuessTree, Source

__all__ = ["GuessTree", "NgramPool", "PoolFileError", "Source", "contexts_of"]
