"""One table holds all evidence of which token follows which context.

    key      64-bit hash of some of the last tokens, for each kind of context in KINDS
    entry    up to 8 next tokens with probabilities and origins, and the number of observations that they rest on
    table    fixed arrays of buckets of WAYS entries. A new key evicts the entry of its bucket with the greatest time
             since it was last learned, divided by its number of observations

Contexts whose hashes collide share an entry. That can only make guesses worse: the model verifies each of them.
"""

import math
import numbers
import operator
import os

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ngram_pool import native, storage
from ngram_pool.forks import Lock
from ngram_pool.table import (
    ENTRY_BYTES,
    FLAWS,
    KINDS,
    LONGEST,
    NO_DISTRIBUTIONS,
    NO_TOKEN,
    WAYS,
    Credence,
    Table,
    are_distributions,
    are_ids,
    bound,
    empty_table,
    flaw,
    prior_credence,
)
from ngram_pool.tree import GuessTree, Ints, Origin

loops = native.loops()
CHUNK = 16_384  # tokens of text learned while the lock is held once, about 15 ms
LISTED_LENGTH = 3  # tokens of the contexts that `most_confident` lists
MAX_NODES = 2**16  # in one tree; more than any pass verifies
MIN_MEMORY_MB, MAX_MEMORY_MB = 0.001, 2**20  # a few buckets; as many buckets as 32 bits of a hash distinguish
_TICKS = 2**32  # a pool's clock wraps around after this many positions
_MAX_COUNT = 2**63 - 1  # also for the clock, which did not wrap around in older files
# The counters in a file's header, each with its least and greatest value.
_COUNTERS = {"clock": (0, _MAX_COUNT), "observations": (0, _MAX_COUNT), "largest": (-1, 2**31 - 1)}
# The state of a pool that has learned nothing, as far as `merge` needs it.
_NO_DRAWS = np.empty((0, 0), np.float32)
_NOTHING: dict = {"_table": empty_table(WAYS), "_credence": prior_credence(), "_clock": 0, "_observations": 0}


class NgramPool:
    """Evidence from text, logits and Jacobi trajectories, in memory of a fixed size.

    All methods are thread-safe. One lock makes each of them atomic; `learn` and `follow` take it for one CHUNK at a
    time. The loops in C++ run without Python's global lock.
    """

    def __init__(self, memory_mb: float = 16, vocabulary: str | None = None):
        """memory_mb: size of the table in MiB.
        vocabulary: fingerprint of the vocabulary that the ids belong to. Pools of other vocabularies are refused.

        Raises ValueError if ``memory_mb`` is not a number in MIN_MEMORY_MB..MAX_MEMORY_MB, or ``vocabulary`` is not
        printable; MemoryError if the machine has no room for the table.
        """
        check_memory("memory_mb", memory_mb)
        if not _is_name(vocabulary):
            raise ValueError(f"vocabulary={vocabulary!r} must be a string of printable characters, or None")
        buckets = int(float(memory_mb) * 2**20 / (ENTRY_BYTES * WAYS))
        try:
            table = empty_table(buckets * WAYS)
        except MemoryError as error:
            raise MemoryError(f"memory_mb={memory_mb}: no room for the table, give fewer MiB: {error}") from error
        self.vocabulary = vocabulary
        self._table = table
        self._credence = prior_credence()
        self._opened = loops.opened(table, self._credence)
        self._clock = 0  # positions learned, modulo _TICKS
        self._observations = 0
        self._largest = -1
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the table; they never change."""
        return sum(column.nbytes for column in self._table)

    @property
    def capacity(self) -> int:
        """Number of contexts that the table has room for."""
        return len(self._table.keys)

    def __len__(self) -> int:
        """Number of contexts held."""
        with self._lock:
            return int(np.count_nonzero(self._table.keys))

    @property
    def observations(self) -> int:
        """Number of tokens and distributions learned so far."""
        return self._observations

    @property
    def largest_token(self) -> int:
        """Largest id learned as a next token so far, so no guess is larger; -1 if nothing was learned."""
        return self._largest

    @property
    def belief(self) -> np.ndarray:
        """Float64 [kinds, amounts, peaks], a copy: the share of belief that a kind of context takes before the kinds
        after it in KINDS, by class of its amount of evidence and of its highest probability. `calibrate` learns it."""
        with self._lock:
            return self._credence.belief[..., 0] / self._credence.belief[..., 1]

    # Learning

    def learn(self, tokens: Ints, source: Origin = Origin.TEXT, start: int = 0) -> None:
        """Learn every (context, next token) of ``tokens`` whose next token stands at index ``start`` or later.

        tokens: sequence of ids; ``tokens[:start]`` is only context. source: the evidence's origin.
        Raises ValueError for ids outside 0..2**31-1.
        """
        self._learn_text(_text(tokens), int(Origin(source)), start)

    def learn_next(
        self, contexts: ArrayLike, tokens: ArrayLike, probabilities: ArrayLike, source: Origin = Origin.LOGITS
    ) -> None:
        """Learn distributions over the next token.

        contexts: int [n, c], the tokens before, newest last; a negative id where there is no token.
        tokens: int [n, k], distinct within a row. probabilities: float [n, k], in 0..1, each row's sum at most 1.
        source: the evidence's origin.
        Raises ValueError for ids or probabilities out of range or NaN, and for shapes that do not match.
        """
        contexts, tokens, probabilities = _rows(contexts, tokens, probabilities)
        with self._lock:
            largest = loops.learn_rows(
                self._opened, contexts, *contexts.shape, tokens, probabilities, tokens.shape[1], int(Origin(source)),
                self._clock,
            )  # fmt: skip
            self._largest = max(self._largest, largest)
            self._count(len(contexts), len(contexts))

    def learn_step(
        self, text: Ints, guesses: Ints, parents: Ints, tokens: ArrayLike, probabilities: ArrayLike, emitted: Ints
    ) -> None:
        """Learn from a step of decoding: the model's predictions after a text and after each guess, and the new text.

        text: sequence of ids; only the last LONGEST count. guesses, parents: int [n], as in a `GuessTree`.
        tokens: int [1 + n, k], distinct within a row. probabilities: float [1 + n, k]. Row 0 is the prediction after
        the text, row 1 + i that after guess i. emitted: the ids that continue the text.
        First, rows of the true text `calibrate`. Errors as for `learn_next`.
        """
        recent = text[-LONGEST:]
        line, guesses, parents, tokens = _whole([*recent, *emitted], guesses, parents, tokens)
        probabilities = _for_loops(np.asarray(probabilities), np.float64)
        n = len(guesses)
        if parents.shape != (n,) or tokens.ndim != 2 or len(tokens) != 1 + n or tokens.shape != probabilities.shape:
            raise ValueError(
                f"guesses {guesses.shape}, parents {parents.shape}, tokens {tokens.shape} and probabilities "
                f"{probabilities.shape} must be [n], [n], [1 + n, k] and [1 + n, k]"
            )
        with self._lock:
            largest = loops.learn_step(
                self._opened, line, len(line), len(recent), guesses, parents, n, tokens, probabilities, tokens.shape[1],
                self._clock,
            )  # fmt: skip
            if largest in FLAWS:
                raise ValueError(FLAWS[largest])
            self._largest = max(self._largest, largest)
            learned = len(tokens) + len(emitted)
            self._count(learned, learned)

    def learn_ngrams(self, ngrams: ArrayLike, source: Origin = Origin.JACOBI) -> None:
        """Learn each n-gram (int [m, n], n >= 2) as a separate text: its first token predicts the second, and so on.

        source: the evidence's origin. Raises ValueError for ids outside 0..2**31-1 or another shape.
        """
        ngrams = _ids(ngrams)
        if ngrams.ndim != 2 or ngrams.shape[1] < 2:
            raise ValueError(f"n-grams must be of shape [m, n] with n >= 2, not {ngrams.shape}")
        apart = np.pad(ngrams, ((0, 0), (1, 0)), constant_values=NO_TOKEN)
        self._learn_text(apart.ravel(), int(Origin(source)), 0)

    def _learn_text(self, tokens: np.ndarray, source: int, start: int, follows: bool = False) -> None:
        for begin in range(max(start, 0), len(tokens), CHUNK):
            chunk, first = tokens[max(begin - LONGEST, 0) : begin + CHUNK], min(begin, LONGEST)
            with self._lock:
                if follows:
                    loops.calibrate_text(self._opened, chunk, len(chunk), first)
                largest = loops.learn_text(self._opened, chunk, len(chunk), first, source, self._clock)
                self._largest = max(self._largest, largest)
                self._count(len(chunk) - first, int(np.count_nonzero(chunk[first:] != NO_TOKEN)))

    def _count(self, positions: int, learned: int) -> None:
        self._clock = (self._clock + positions) % _TICKS
        self._observations = min(self._observations + learned, _MAX_COUNT)

    def calibrate(self, contexts: ArrayLike, tokens: ArrayLike, probabilities: ArrayLike) -> None:
        """Adjust the belief in each kind of context by what followed these contexts.

        Arguments and errors as for `learn_next`: the model's distribution over the next token, or the token itself
        with probability 1. Call it before learning the same, and only for contexts of the true text, because others
        are not a fair sample.
        """
        contexts, tokens, probabilities = _rows(contexts, tokens, probabilities)
        with self._lock:
            loops.calibrate(self._opened, contexts, *contexts.shape, tokens, probabilities, tokens.shape[1])

    def follow(self, tokens: Ints, source: Origin = Origin.TEXT, start: int = 0) -> None:
        """`calibrate` by the tokens from index ``start`` on, then `learn` them. Call it with each new piece of a text.

        Arguments and errors as for `learn`.
        """
        self._learn_text(_text(tokens), int(Origin(source)), start, follows=True)

    # Guessing

    def guess(
        self,
        context: Ints,
        budget: int,
        min_probability: float = 0.0,
        max_depth: int | None = None,
        chain: bool = False,
        draws: np.ndarray | None = None,
    ) -> GuessTree:
        """Return the most likely continuations of ``context`` as one tree, grown best-first. It is deterministic.

        context: sequence of ids, newest last; only the last LONGEST count.
        budget: most nodes, up to MAX_NODES. min_probability: each node is above it. max_depth: most nodes in a branch.
        chain: a single branch, for models that cannot verify trees.
        draws: float32 [k, vocabulary], if known: the exponential variates by which the next k tokens will be chosen,
            the largest probability / variate each time. They change what is most likely.
        Raises ValueError for ids outside 0..2**31-1, a NaN, a budget that is too large, or draws of another shape.
        """
        budget = operator.index(budget)
        if budget > MAX_NODES or math.isnan(min_probability):
            raise ValueError(
                f"budget={budget} must be at most {MAX_NODES}, and min_probability={min_probability} a number"
            )
        draws = _NO_DRAWS if draws is None else _for_loops(np.asarray(draws), np.float32)
        if draws.ndim != 2:
            raise ValueError(f"draws must be of shape [tokens, vocabulary], not {draws.shape}")
        tail = _tail(context)
        depth = budget if max_depth is None else min(operator.index(max_depth), budget)
        if budget <= 0 or depth <= 0:
            return GuessTree.empty()
        path = np.array([NO_TOKEN] * (LONGEST - len(tail)) + tail)
        nodes, joints = np.empty((4, budget), np.int64), np.empty(budget)
        with self._lock:
            count = loops.grow(
                self._opened, path, float(min_probability), depth, bool(chain), draws, *draws.shape, nodes, joints,
                budget,
            )  # fmt: skip
        if count < 0:
            raise MemoryError(f"no room for a tree of {budget} guesses")
        tokens, parents, depths, sources = nodes[:, :count]
        return GuessTree.trusted(tokens, parents, depths, joints[:count], sources)

    # Sharing

    def merge(self, other: "NgramPool", since: "NgramPool | None" = None) -> None:
        """Add the other pool's evidence, weighed by its number of observations. Full buckets evict as in learning.

        since: the pool from which the other was loaded or copied, as it was then. Only what the other has learned
            since then is added. Without ``since``, evidence that both pools started from counts twice. This pool must
            hold the evidence of ``since``, too.
        Raises ValueError if the pools' vocabularies differ, or if they cannot both have started from ``since``.
        """
        for known in (other, since):
            if known is not None and self.vocabulary and known.vocabulary and self.vocabulary != known.vocabulary:
                raise ValueError(f"pools of vocabularies {self.vocabulary} and {known.vocabulary} cannot be merged")
        theirs = other.__getstate__()
        before = _NOTHING if since is None else since.__getstate__()
        with self._lock:
            held = self._observations - before["_observations"]
            learned = theirs["_observations"] - before["_observations"]
            if min(held, learned) < 0:
                raise ValueError("since has learned more than a merged pool, which cannot have started from it")
            self.vocabulary = self.vocabulary or theirs["vocabulary"]
            self._largest = max(self._largest, theirs["_largest"])
            # This pool's evidence is older than the other's. Only `since` tells by how much.
            self._count(theirs["_clock"] - before["_clock"] if since is not None else 0, learned)
            opened, base = (loops.opened(state["_table"], state["_credence"]) for state in (theirs, before))
            loops.merge(self._opened, self._clock, opened, theirs["_clock"], base)
            if learned:
                for ours, also in zip(self._credence, theirs["_credence"], strict=True):
                    ours += (also - ours) * (learned / (held + learned))
                bound(self._credence)

    def save(self, path: str | os.PathLike) -> None:
        """Write the pool to ``path`` atomically: after a crash, either the old or the new file is there.

        Meanwhile, this takes the memory of a second table. Raises OSError if the file cannot be written, ValueError if
        the vocabulary's name is too long.
        """
        state = self.__getstate__()
        arrays = state["_table"]._asdict() | state["_credence"]._asdict()
        header = {"vocabulary": state["vocabulary"]} | {name: state[f"_{name}"] for name in _COUNTERS}
        storage.write(path, header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike, vocabulary: str | None = None) -> "NgramPool":
        """Return the pool saved at ``path``.

        vocabulary: the expected one. A file that names no vocabulary gets this one.
        Raises PoolFileError for a file that is truncated, corrupted, not a pool, has another version or vocabulary, or
        breaks a pool's invariants; OSError if it cannot be read.
        """
        header, arrays = storage.read(path)
        missing = np.empty(0)
        table = Table(*(arrays.get(name, missing) for name in Table._fields))
        credence = Credence(*(arrays.get(name, missing) for name in Credence._fields))
        if found := _flaw(header, table, credence):
            raise storage.PoolFileError(
                f"{path} is complete, but not a valid pool of this format ({found}): build the pool again"
            )
        if vocabulary and header["vocabulary"] and header["vocabulary"] != vocabulary:
            raise storage.PoolFileError(
                f"{path} has another vocabulary: {header['vocabulary']}, not {vocabulary}; its ids mean other text"
            )
        pool = cls.__new__(cls)
        state = {f"_{name}": header[name] for name in _COUNTERS}
        state |= {"vocabulary": header["vocabulary"] or vocabulary, "_table": table, "_credence": credence}
        pool.__setstate__(state | {"_clock": header["clock"] % _TICKS})
        return pool

    def __getstate__(self) -> dict:
        with self._lock:
            state = {name: value for name, value in vars(self).items() if name not in ("_lock", "_opened")}
            for name in ("_table", "_credence"):
                state[name] = type(state[name])(*(array.copy() for array in state[name]))
            return state

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._opened = loops.opened(self._table, self._credence)
        self._lock = Lock()

    # Looking inside

    def by_source(self) -> dict[str, int]:
        """Return the number of next tokens held, by the name of their origin (`Origin`)."""
        with self._lock:
            counts = np.bincount(self._table.sources[self._table.weights > 0], minlength=len(Origin))
        return {source.name.lower(): int(counts[source]) for source in Origin}

    def most_confident(self, count: int = 10) -> list[tuple[list[int], int, float, int]]:
        """List the contexts whose next token is surest: (context, next token, its probability, observations).

        They are sorted by observations * probability / (observations + 1), with at most 255 observations. The table
        holds only hashes of contexts. So contexts of LISTED_LENGTH tokens are found by following likely next tokens.
        """
        with self._lock:
            contexts = np.unique(self._table.tokens[self._table.weights > 0]).astype(np.int64)[:, None]
            for length in range(1, LISTED_LENGTH + 1):
                entries = self._entries(contexts, (0, length))
                contexts, entries = contexts[entries >= 0], entries[entries >= 0]
                weights, tokens = self._table.weights[entries], self._table.tokens[entries]
                if length < LISTED_LENGTH:
                    row, place = (weights > 0.1).nonzero()
                    contexts = np.concatenate([contexts[row], tokens[row, place, None]], axis=1)
            seen = self._table.counts[entries, 0].astype(np.int64)
        best = weights.argmax(1) if len(weights) else np.empty(0, np.int64)
        rows = np.arange(len(best))
        surest = np.argsort(-weights[rows, best] * seen / (seen + 1), kind="stable")[:count]
        return [
            (contexts[i].tolist(), int(tokens[i, best[i]]), float(weights[i, best[i]]), int(seen[i])) for i in surest
        ]

    def _entries(self, contexts: np.ndarray, kind: tuple[int, int]) -> np.ndarray:
        """Int64 [n], the entry of each context (int64 [n, c]) of a kind in KINDS, or -1."""
        entries = np.empty(len(contexts), np.int64)
        loops.find_entries(self._opened, contexts, *contexts.shape, KINDS.index(kind), entries)
        return entries

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool breaks its invariants; for tests."""
        with self._lock:
            found = _flaw_in_arrays(self._table, self._credence, self._largest)
        if found:
            raise AssertionError(found)


def contexts_of(text: Ints, count: int) -> np.ndarray:
    """Return int64 [count, LONGEST], the contexts that end with each of a text's last ``count`` tokens, for
    `learn_next`."""
    padded = np.concatenate([np.full(LONGEST, NO_TOKEN), text])
    return np.lib.stride_tricks.sliding_window_view(padded, LONGEST)[len(text) + 1 - count :]


def _whole(*arrays: ArrayLike) -> list[np.ndarray]:
    """Return arrays of whole numbers as int64. Numbers that do not fit become negative."""
    found = []
    for array in map(np.asarray, arrays):
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"token ids must be whole numbers in 0..2**31-1, not of dtype {array.dtype}")
        is_ready = array.dtype == np.int64 and array.flags.carray
        found.append(array if is_ready else _for_loops(array, np.int64))
    return found


def _ids(tokens: ArrayLike) -> np.ndarray:
    tokens = np.asarray(tokens)
    (ids,) = _whole(tokens)
    if not are_ids(ids):
        raise ValueError(f"token ids must lie in 0..2**31-1, not {tokens.min()}..{tokens.max()}")
    return ids


def _tail(context: Ints) -> list[int]:
    """Return the last LONGEST ids of a context. Raises ValueError unless they are ids."""
    tail = context[-LONGEST:]
    if type(tail) is list and set(map(type, tail)) == {int} and min(tail) >= 0 and max(tail) < 2**31:
        return tail  # the usual case in decoding
    return _text(tail).tolist()


def _text(tokens: Ints) -> np.ndarray:
    tokens = _ids(tokens)
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be one sequence of ids, not an array of shape {tokens.shape}")
    return tokens


def _for_loops(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return the array as the loops take it: of this dtype, contiguous and writable."""
    if array.dtype == dtype and array.flags.carray:
        return array
    array = array.astype(dtype, order="C", copy=False)
    return array if array.flags.writeable else array.copy()


def _rows(
    contexts: ArrayLike, tokens: ArrayLike, probabilities: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check the arguments of `NgramPool.learn_next`, and return them as int64, int64 and float64."""
    contexts, tokens, probabilities = np.asarray(contexts), _ids(tokens), np.asarray(probabilities, float)
    if contexts.ndim != 2 or tokens.ndim != 2 or tokens.shape != probabilities.shape:
        raise ValueError(
            f"contexts {contexts.shape}, tokens {tokens.shape} and probabilities {probabilities.shape} must be "
            "[n, c], [n, k] and [n, k]"
        )
    if len(contexts) != len(tokens):
        raise ValueError(f"{len(contexts)} contexts but {len(tokens)} rows of tokens")
    if contexts.size and (contexts.dtype.kind not in "iu" or contexts.max() >= 2**31):
        raise ValueError(
            f"ids of contexts must be whole numbers below 2**31, not {contexts.dtype} up to {contexts.max()}"
        )
    probabilities = _for_loops(probabilities, np.float64)
    if not are_distributions(probabilities):
        raise ValueError(FLAWS[NO_DISTRIBUTIONS])
    return _for_loops(contexts[:, -LONGEST:], np.int64), tokens, probabilities


def _flaw(header: dict, table: Table, credence: Credence) -> str:
    """Say why a file's content is not a pool; "" if it is one. A missing array is given as an empty one."""
    for name, (least, most) in _COUNTERS.items():
        if type(header.get(name)) is not int or not least <= header[name] <= most:
            return f"{name} is not a whole number in {least}..{most}"
    if not _is_name(header.get("vocabulary", 0)):
        return "the vocabulary's name cannot be printed"
    entries = table.keys.size
    if not WAYS <= entries <= MAX_MEMORY_MB * 2**20 // ENTRY_BYTES or entries % WAYS:
        return "the keys do not fill whole buckets"
    table_like, credence_like = empty_table(WAYS), prior_credence()
    shapes = [*((entries, *like.shape[1:]) for like in table_like), *(like.shape for like in credence_like)]
    names, likes = (*Table._fields, *Credence._fields), (*table_like, *credence_like)
    for name, array, like, shape in zip(names, (*table, *credence), likes, shapes, strict=True):
        if array.dtype != like.dtype or array.shape != shape:
            return f"{name} is missing, or not {like.dtype} of shape {shape}"
    return _flaw_in_arrays(table, credence, header["largest"])


def _flaw_in_arrays(table: Table, credence: Credence, largest: int) -> str:
    """The same for arrays of the right shapes. The loops rely on this and check nothing."""
    bounded = Credence(*(array.copy() for array in credence))
    bound(bounded)
    if not all(np.array_equal(array, within) for array, within in zip(credence, bounded, strict=True)):
        return "a belief or a vote is out of bounds"
    return flaw(table, largest, len(Origin))


def _is_name(vocabulary: object) -> bool:
    return vocabulary is None or (isinstance(vocabulary, str) and vocabulary.isprintable())


def check_memory(name: str, memory_mb: float) -> None:
    """Raise ValueError unless a pool's memory is a number within bounds. name: the setting's name, for the message."""
    is_number = isinstance(memory_mb, numbers.Real) and not isinstance(memory_mb, bool)
    if not is_number or not MIN_MEMORY_MB <= memory_mb <= MAX_MEMORY_MB:
        raise ValueError(f"{name}={memory_mb!r} must be a number of MiB in {MIN_MEMORY_MB}..{MAX_MEMORY_MB}")
