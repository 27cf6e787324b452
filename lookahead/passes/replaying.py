"""Accepted tokens that restored states lack, after a rejected guess. Usually the next step computes them; this does so
outside of a step.
"""

from lookahead.models.cache import LookaheadCache
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree


def settle(runner: EagerRunner, cache: LookaheadCache) -> None:
    """Compute the tokens in ``cache.replay``, so that the cache holds all accepted tokens."""
    if cache.replay:
        last = cache.replay.pop()
        cache.lengths[0] -= 1
        step = lay_out(last, GuessTree.empty())
        runner.run([step], cache)
        cache.commit([step], [[0]])
