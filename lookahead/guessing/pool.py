"""The n-gram pool as a source of guesses. It learns from texts and logits."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from lookahead.guessing.source import Batch, Guesser, GuessSource, Limits, Needs, Outcome, top_k
from lookahead.stats import SourceStats
from ngram_pool import GuessTree, NgramPool, Origin, contexts_of
from ngram_pool.tree import Ints

TOP_K = 8  # next tokens learned from each row of logits


def check_pool(pool: object) -> None:
    """Raise TypeError if this is neither a pool nor None."""
    if not isinstance(pool, NgramPool | None):
        raise TypeError(f"pool={pool!r:.80} must be an NgramPool: NgramPool.load(path) reads one from a file")


class PoolSource(GuessSource):
    """Proposes the most likely continuations that a pool knows."""

    # 64 rows of a prompt gained 0 to 2% more tokens a step. Where the vocabulary is large, as in Gemma 3 270M, the
    # logits of a row take longer than all layers.
    needs = Needs(prompt_logits=16, top_k=TOP_K)
    is_free = True
    is_calibrated = True  # the pool calibrates itself in each step

    def __init__(self, pool: NgramPool | None = None):
        """pool: the wrap's pool by default. Raises TypeError for what is no pool."""
        check_pool(pool)
        self._given = pool

    def start(self, batch: Batch) -> "PoolGuesser":
        """Begin a call. Raises ValueError if the pool holds tokens that the model does not know."""
        pool = batch.pool if self._given is None else self._given
        if pool.largest_token >= batch.vocabulary:
            raise ValueError(
                f"the pool holds token {pool.largest_token}, but the model knows {batch.vocabulary} tokens: the "
                "pool has another vocabulary; give one that was learned with this model's tokenizer"
            )
        return PoolGuesser(pool, batch.temperature, batch.vocabulary)


class PoolGuesser(Guesser):
    """A pool in one call: it guesses, and learns from texts and logits."""

    def __init__(self, pool: NgramPool, temperature: float = 1.0, vocabulary: int = 2**31):
        """temperature: at which the next tokens are drawn. vocabulary: of the model; default: all ids of a pool."""
        self._pool, self._temperature, self._vocabulary = pool, temperature, vocabulary

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        if text:  # a prompt of embeddings has no text
            self._pool.learn(text, Origin.PROMPT)
            logits = logits[-len(text) :]
            self._pool.learn_next(contexts_of(text, len(logits)), *top_k(logits, self._temperature, TOP_K))

    def propose(self, texts: Sequence[Ints], limits: Limits) -> list[GuessTree]:
        trees = []
        for text, depth, draws in zip(texts, limits.depths, limits.draws or [None] * len(texts), strict=True):
            tree = self._pool.guess(text, limits.guesses, limits.min_probability, depth, limits.is_chain, draws)
            if (largest := max(tree.tokens.tolist(), default=-1)) >= self._vocabulary:  # learned since the call began
                raise ValueError(
                    f"PoolSource proposes token {largest}, but the model knows {self._vocabulary} tokens: another "
                    "model uses the same pool; give one that only models of one vocabulary use"
                )
            trees.append(tree)
        return trees

    def observe(self, outcome: Outcome) -> None:
        if outcome.top_k is not None:
            tokens, probabilities = outcome.top_k
            if tokens.shape[-1] > TOP_K:
                tokens, probabilities = tokens[..., :TOP_K], probabilities[..., :TOP_K]
        else:
            tokens, probabilities = top_k(outcome.logits, self._temperature, TOP_K)
        of_each = outcome.texts, outcome.steps, outcome.emitted, outcome.first
        for text, step, new, first in zip(*of_each, strict=True):
            if max(new, default=0) >= self._vocabulary:  # a processor of this text has more scores than the model
                continue
            tree, rows = slice(1, 1 + step.guesses), slice(first, first + 1 + step.guesses)
            guesses, parents = step.ids[tree], step.parents[tree] - 1  # the root is row 0 of a step
            self._pool.learn_step(text, guesses, parents, tokens[rows], probabilities[rows], new)


class PoolAlone:
    """The pool as the only source of a step: nothing must be merged, checked or calibrated."""

    paid_seconds = 0.0
    """Seconds of sources that are not free."""

    def __init__(self, pool: Guesser, stats: SourceStats):
        """pool: the only guesser. stats: counts what it does."""
        self._pool, self._stats = pool, stats

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        """`Together.propose` for this step."""
        began = time.perf_counter()
        trees = self._pool.propose(texts, limits)
        self._seconds = time.perf_counter() - began
        for tree in trees:
            self._stats.proposed += len(tree.tokens)
        return trees

    @staticmethod
    def look_ahead(limits: Limits) -> list[list[np.ndarray]]:
        """No windows."""
        return [[]] * len(limits.depths)

    def observe(self, outcome: Outcome) -> None:
        """`Together.observe` for this step."""
        began, stats = time.perf_counter(), self._stats
        self._pool.observe(outcome)
        stats.asked += 1
        stats.seconds += self._seconds + time.perf_counter() - began
        for path in outcome.paths:
            stats.accepted += len(path) - 1
            stats.earned += len(path) - 1
