"""One table for all evidence about which token follows which context.

    key      64-bit hash of some of the last tokens, for each kind of context in KINDS
    entry    up to 8 next tokens with probabilities and sources, and how much evidence they rest on
    table    fixed arrays of buckets of WAYS entries; a new key evicts the bucket's least recently learned entry

Two contexts that hash alike share an entry. That can only make a guess worse: every guess is verified by the model.
"""

import os
import threading

import numpy as np

from ngram_pool import kernels, storage
from ngram_pool.kernels import KINDS, LONGEST, NO_TOKEN, WAYS, Credence, Table
from ngram_pool.tree import GuessTree, Source

CHUNK = 16_384  # tokens of text learned under one hold of the lock, some 15 ms
LISTED = 3  # tokens of the contexts that `most_confident` shows
_HEADER = {"vocabulary": "vocabulary", "clock": "_clock", "largest": "_largest"}  # fields of a file: of a pool
MOST_GUESSES = 2**16  # in one tree; more than any forward pass verifies


class NgramPool:
    """Evidence from text, logits and Jacobi trajectories, in memory fixed at construction.

    All methods may be called from several threads: one lock makes each of them atomic, `learn` of long texts in pieces.
    The compiled loops run without Python's global lock.
    """

    def __init__(self, memory_mb: float = 16, vocabulary: str | None = None):
        """memory_mb: MiB of the table.
        vocabulary: fingerprint of the vocabulary that the ids belong to, by which a file for another one is refused.

        Raises ValueError if ``memory_mb`` is no number or holds no entry.
        """
        buckets = int(memory_mb * 2**20 / (kernels.ENTRY_BYTES * WAYS)) if 0 < memory_mb < float("inf") else 0
        if buckets < 1:
            raise ValueError(f"memory_mb={memory_mb} holds no entry; give at least 0.001")
        kernels.compile_loops()
        self.vocabulary = vocabulary
        self._table = kernels.empty_table(buckets * WAYS)
        self._credence = kernels.prior_credence()
        self._clock = 0
        self._largest = -1
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the same for ever."""
        return sum(column.nbytes for column in self._table)

    @property
    def capacity(self) -> int:
        """Number of contexts that the table has room for."""
        return len(self._table.keys)

    def __len__(self) -> int:
        """Number of contexts held."""
        return int(np.count_nonzero(self._table.keys))

    @property
    def observations(self) -> int:
        """Number of tokens and distributions ever learned."""
        return self._clock

    @property
    def largest_token(self) -> int:
        """Largest id ever learned as a next token, and so ever guessed; -1 if there is none."""
        return self._largest

    @property
    def belief(self) -> np.ndarray:
        """Float64 [kinds, amounts, peaks], a copy: how far a kind of context is believed before those after it in
        KINDS, by class of its amount of evidence and of its highest probability. Learned by `calibrate`."""
        belief = self._credence.belief
        return belief[..., 0] / belief[..., 1]

    # Learning

    def learn(self, tokens, source: Source = Source.TEXT, start: int = 0) -> None:
        """Learn every (context, next token) of ``tokens`` whose next token stands at index ``start`` or later.

        tokens: sequence of ids; ``tokens[:start]`` serves as context only.
        Raises ValueError for ids outside 0..2**31-1.
        """
        tokens = _ids(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"tokens must be one sequence of ids, not of shape {tokens.shape}")
        self._learn_text(tokens, Source(source), start)

    def learn_next(self, contexts, tokens, probabilities, source: Source | np.ndarray = Source.LOGITS) -> None:
        """Learn distributions over the next token.

        contexts: int [n, c], the tokens before, newest last; a negative id stands where there is none.
        tokens: int [n, k], distinct in a row. probabilities: float [n, k], in 0..1, a row's sum at most 1.
        source: that of all rows, or one a row [n].
        Raises ValueError for ids or probabilities out of range, NaN included, and for shapes that do not fit.
        """
        contexts, tokens, probabilities = _rows(contexts, tokens, probabilities)
        if len(contexts) == 0:
            return
        sources = np.array(np.broadcast_to(source, len(contexts)), np.int64)
        if not ((sources >= 0) & (sources < len(Source))).all():
            raise ValueError(f"source={source} is not a Source, or not one a row")
        with self._lock:
            self._largest = max(self._largest, int(tokens.max(initial=-1)))
            kernels.learn_rows(self._table, contexts, tokens, probabilities, sources, self._clock)
            self._clock += len(contexts)

    def learn_ngrams(self, ngrams, source: Source = Source.JACOBI) -> None:
        """Learn each n-gram (int [m, n], n >= 2) as text of its own: its first token predicts the second, and so on."""
        ngrams = _ids(ngrams)
        if ngrams.ndim != 2 or ngrams.shape[1] < 2:
            raise ValueError(f"n-grams must be [m, n] with n of at least 2, not {ngrams.shape}")
        apart = np.pad(ngrams, ((0, 0), (1, 0)), constant_values=NO_TOKEN)
        self._learn_text(apart.ravel(), Source(source), 0)

    def _learn_text(self, tokens: np.ndarray, source: Source, start: int) -> None:
        for begin in range(max(start, 0), len(tokens), CHUNK):
            chunk = tokens[max(begin - LONGEST, 0) : begin + CHUNK]
            with self._lock:
                self._largest = max(self._largest, int(chunk.max()))
                kernels.learn_text(self._table, chunk, min(begin, LONGEST), int(source), self._clock)
                self._clock += len(chunk) - min(begin, LONGEST)

    def calibrate(self, contexts, tokens, probabilities) -> None:
        """Adjust how far each kind of context is believed, given what followed contexts that came up.

        Arguments and errors as for `learn_next`: what the model said of the next token, or simply the token itself
        with probability 1. To be called before that is learned. Only contexts of the true text are a fair sample.
        """
        contexts, tokens, probabilities = _rows(contexts, tokens, probabilities)
        with self._lock:
            kernels.calibrate(self._table, self._credence, contexts, tokens, probabilities)

    # Guessing

    def guess(
        self, context, budget: int, min_probability: float = 0.0, max_depth: int | None = None, chain: bool = False
    ) -> GuessTree:
        """The likeliest continuations of ``context`` as one tree, grown best-first; deterministic.

        context: sequence of ids, newest last; only the last LONGEST count.
        budget: most nodes, at most MOST_GUESSES. min_probability: nodes must be above it. max_depth: deepest node.
        chain: a single branch, for models that cannot branch.
        Raises ValueError for ids outside 0..2**31-1, a NaN, a budget too large.
        """
        if budget > MOST_GUESSES or min_probability != min_probability:
            raise ValueError(
                f"budget={budget} must be at most {MOST_GUESSES}, min_probability={min_probability} a number"
            )
        tail = _ids(context[-LONGEST:])
        if budget <= 0 or max_depth == 0:
            return GuessTree.empty()
        path = np.full(LONGEST, NO_TOKEN)
        path[LONGEST - len(tail) :] = tail
        depth = budget if max_depth is None else max_depth
        with self._lock:
            return GuessTree(
                *kernels.grow(self._table, self._credence, path, budget, float(min_probability), depth, bool(chain))
            )

    # Sharing

    def merge(self, other: "NgramPool") -> None:
        """Add the other pool's evidence, weighed by its amount; where room is short, the weaker evidence gives way.

        Raises ValueError if the two are of different vocabularies.
        """
        if self.vocabulary and other.vocabulary and self.vocabulary != other.vocabulary:
            raise ValueError(f"pools of vocabularies {self.vocabulary} and {other.vocabulary} cannot be merged")
        theirs = other.__getstate__()
        with self._lock:
            self.vocabulary = self.vocabulary or theirs["vocabulary"]
            self._largest = max(self._largest, theirs["_largest"])
            kernels.merge(self._table, theirs["_table"], self._clock)
            for ours, also in zip(self._credence, theirs["_credence"], strict=True):
                ours += also
                ours /= 2

    def save(self, path: str | os.PathLike) -> None:
        """Write the pool to ``path`` atomically: whatever happens on the way, the old file or the new one is there."""
        state = self.__getstate__()
        arrays = state["_table"]._asdict() | state["_credence"]._asdict()
        storage.write(path, {name: state[key] for name, key in _HEADER.items()}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike, vocabulary: str | None = None) -> "NgramPool":
        """The pool saved at ``path``, memory-mapped: pages are read as they are used, and copied when written to.

        vocabulary: refuse a file of another vocabulary than this.
        Raises PoolFileError for a file that is truncated, corrupted, newer than this version, or foreign.
        """
        header, arrays = storage.read(path)
        if vocabulary and header["vocabulary"] and header["vocabulary"] != vocabulary:
            raise storage.PoolFileError(
                f"{path} is of another vocabulary: {header['vocabulary']}, not {vocabulary}; ids would mean other text"
            )
        for name, like in (kernels.empty_table(WAYS)._asdict() | kernels.prior_credence()._asdict()).items():
            if arrays[name].dtype != like.dtype or arrays[name].shape[1:] != like.shape[1:]:
                raise storage.PoolFileError(f"{path} holds {name} of another layout: build the pool again")
        pool = cls.__new__(cls)
        state = {key: header[name] for name, key in _HEADER.items()}
        state["_table"] = Table(*(arrays[name] for name in Table._fields))
        state["_credence"] = Credence(*(arrays[name] for name in Credence._fields))
        pool.__setstate__(state)
        pool.vocabulary = pool.vocabulary or vocabulary
        return pool

    def __getstate__(self) -> dict:
        with self._lock:
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            for name in ("_table", "_credence"):
                state[name] = type(state[name])(*(array.copy() for array in state[name]))
            return state

    def __setstate__(self, state: dict) -> None:
        kernels.compile_loops()
        vars(self).update(state, _lock=threading.RLock())

    # Looking inside

    def by_source(self) -> dict[str, int]:
        """Number of next tokens held, by the name of the source that each is attributed to."""
        with self._lock:
            counts = np.bincount(self._table.sources[self._table.weights > 0], minlength=len(Source))
        return {source.name.lower(): int(counts[source]) for source in Source}

    def most_confident(self, count: int = 10) -> list[tuple[list[int], int, float, int]]:
        """Contexts whose next token is surest: (context, next token, its probability, observations), surest first.

        The table knows contexts by their hashes alone; those listed, of LISTED tokens, are found by going from token
        to likely next token. Surest is the highest (observations * probability) / (observations + 1).
        """
        with self._lock:
            contexts = np.arange(self._largest + 1)[:, None]
            for length in range(1, LISTED + 1):
                entries = kernels.find_entries(self._table, contexts, KINDS.index((0, length)))
                contexts, entries = contexts[entries >= 0], entries[entries >= 0]
                weights, tokens = self._table.weights[entries], self._table.tokens[entries]
                if length < LISTED:
                    row, place = (weights > 0.1).nonzero()
                    contexts = np.concatenate([contexts[row], tokens[row, place, None]], axis=1)
            seen = self._table.counts[entries, 0].astype(np.int64)
        best = weights.argmax(1) if len(weights) else np.empty(0, np.int64)
        rows = np.arange(len(best))
        surest = np.argsort(-weights[rows, best] * seen / (seen + 1), kind="stable")[:count]
        return [
            (contexts[i].tolist(), int(tokens[i, best[i]]), float(weights[i, best[i]]), int(seen[i])) for i in surest
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table keeps its invariants; for tests."""
        table = self._table
        used = table.keys != 0
        high = table.keys[used] >> np.uint64(32)
        homes = (high * np.uint64(self.capacity // WAYS)) >> np.uint64(32)
        assert (homes == np.flatnonzero(used) // WAYS).all(), "an entry stands outside its key's bucket"
        keys = np.sort(table.keys[used])
        assert (keys[1:] != keys[:-1]).all(), "a key stands twice"
        weights = table.weights[used]
        assert ((weights >= 0) & (weights < np.inf)).all(), "a weight is negative or not finite"
        assert (weights.sum(1) <= 1.001).all(), "an entry's probabilities add up to more than 1"
        assert (table.counts[used, 0] >= np.maximum(table.counts[used, 1], 1)).all(), "counts do not fit"
        for tokens, row in zip(table.tokens[used], weights, strict=True):
            held = tokens[row > 0]
            assert len(set(held.tolist())) == len(held), "a token stands twice in an entry"
        assert ((self.belief > 0) & (self.belief < 1)).all(), "a belief is not between 0 and 1"


def _ids(tokens) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        return tokens.astype(np.int64)
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers in 0..2**31-1, not of dtype {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise ValueError(f"token ids must lie in 0..2**31-1, not {tokens.min()}..{tokens.max()}")
    return _for_loops(tokens, np.int64)


def _for_loops(array: np.ndarray, dtype) -> np.ndarray:
    """As the compiled loops take it; for arrays that are read-only or not contiguous numba would compile them anew."""
    return np.require(array, dtype, ("C", "W"))


def _rows(contexts, tokens, probabilities) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `NgramPool.learn_next`, checked: int64, int64, float64."""
    contexts, tokens, probabilities = np.asarray(contexts), _ids(tokens), np.asarray(probabilities, float)
    if contexts.ndim != 2 or tokens.ndim != 2 or tokens.shape != probabilities.shape:
        raise ValueError(
            f"contexts {contexts.shape}, tokens {tokens.shape} and probabilities {probabilities.shape} must be "
            "[n, c], [n, k] and [n, k]"
        )
    if len(contexts) != len(tokens):
        raise ValueError(f"{len(contexts)} contexts but {len(tokens)} rows of tokens")
    if not (probabilities.min(initial=0) >= 0 and probabilities.sum(1).max(initial=0) <= 1.001):  # NaN is neither
        raise ValueError("probabilities must lie in 0..1, and a row's sum too; NaN is refused")
    contexts = np.maximum(contexts[:, -LONGEST:], NO_TOKEN)
    _ids(contexts + 1)
    return _for_loops(contexts, np.int64), tokens, _for_loops(probabilities, np.float64)
