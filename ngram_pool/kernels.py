"""The pool's inner loops, compiled by numba: hash contexts, learn, weigh the evidence, grow the tree.

They trust their arguments; `pool.py` checks them. The constants that shape a table are here as well, because numba
compiles this file's loops anew only when this file changes.
"""

import heapq
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ngram_pool.memory import check_fits
from ngram_pool.waiting import kept_for_later, told_if_long

# Kinds of contexts, the most specific first: (skip, length) holds the tokens at distances skip+1 .. length before the
# next one. Two kinds skip the newest token: they tell what follows whatever that token is. So they still know something
# where the newest token is a rare one, or where the model rejected a guess and chose another token in its place.
KINDS = ((0, 16), (0, 8), (0, 3), (0, 2), (1, 3), (0, 1), (1, 2), (0, 0))
LONGEST = 16  # tokens of the longest context
WIDTH = 8  # next tokens in an entry
WAYS = 4  # entries in a bucket
NO_TOKEN = -1  # where a text has no token; nothing is learned across it

# Belief in each kind before it was observed, by class of its highest probability. It counts for PRIOR_STRENGTH
# observations. What is learned fades by FADE with each observation.
PRIOR = np.array([
    (0.45, 0.45, 0.60, 0.70),
    (0.45, 0.45, 0.55, 0.55),
    (0.55, 0.50, 0.55, 0.55),
    (0.45, 0.55, 0.65, 0.65),
    (0.10, 0.10, 0.15, 0.20),
    (0.60, 0.70, 0.80, 0.80),
    (0.20, 0.30, 0.30, 0.25),
    (0.20, 0.20, 0.20, 0.20),
])  # fmt: skip
PRIOR_STRENGTH = 20.0
FADE = 0.9995
PEAKS = PRIOR.shape[1]  # classes of the highest probability in an entry, see `_peak`
AMOUNTS = 6  # classes of the amount of evidence in an entry, see `_amount`
CLASSES = 6  # classes of the weight that an entry gives a token, see `_class`; each kind has a vote for each class
STEP = 0.02  # of the gradient descent that learns the votes
MAX_VOTES = 50.0  # bound on each vote, and on the sum of a candidate's votes, so that exp() does not overflow
# A belief is a fraction: how often the next token was credited to the kind, of how many times.
MIN_TOLD = 1e-100  # keeps the belief above 0
MIN_TIMES, MAX_TIMES = 1.0, 1.001 / (1 - FADE)  # FADE keeps the times below 1 / (1 - FADE)
OUTSIDE = 1e-4  # probability of one token that no context names
MIN_REST = 1e-9  # least probability that the kinds leave to all those tokens together
# Exponents of a candidate's chance and of its known variate, and the factor for the chance of all other tokens. They
# were fitted to what a model of 135 million parameters wrote at temperatures 0.7 and 1.0.
RACE_CHANCE, RACE_VARIATE, RACE_OTHERS = 0.85, 0.6, 2.4
MIN_VARIATE = 1e-12

# Weight of a new observation, by origin (prompt, text, logits, jacobi, file), once an entry has several: newer evidence
# outweighs older. The context of no tokens forgets slowly.
RATES = np.array([0.25, 0.25, 0.65, 0.15, 0.1])
SLOW_RATE = 0.02
TEXT, LOGITS = np.int64(1), np.int64(2)  # not Python's own numbers: for these, numba would compile loops once more

ROUNDING = 0.001  # the probabilities of a row may exceed 1 by this in total, those of an entry by twice this

_SKIPS = np.array([skip for skip, _ in KINDS])
_LENGTHS = np.array([length for _, length in KINDS])
# Multilinear hashing modulo 2**64 (Lemire and Kaser 2014, arXiv 1202.4961): a fixed random odd multiplier for each
# distance from the end of the context, and a salt for each kind.
_random = np.random.PCG64(0x6C6F6F6B).random_raw  # saved pools need this stream; numpy promises not to change it
_MULTIPLIERS = _random(LONGEST) | np.uint64(1)
_SALTS = _random(len(KINDS))
_HALF = np.uint64(32)
_EMPTY = np.uint64(0)
FLAWED = -2  # `learn_step` was given numbers out of their range
NO_DISTRIBUTIONS = "probabilities and the sum of each row must lie in 0..1, without NaN"


class Table(NamedTuple):
    """n entries in buckets of WAYS. Entry i holds what is known of the context with hash ``keys[i]``.

    keys: uint64 [n], 0 in an empty entry. learned_at: uint32 [n], the clock when the entry was last learned.
    counts: uint8 [n, 2], observations, and how many of them were rows of logits; both stop at 255.
    tokens, weights, sources: int32, float32, uint8 [n, WIDTH], next tokens, their probabilities (0: no token) and
        their origins (`Origin`).
    """

    keys: np.ndarray
    learned_at: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


# The dtype and width of each column of a Table.
_COLUMNS = (np.uint64, 1), (np.uint32, 1), (np.uint8, 2), (np.int32, WIDTH), (np.float32, WIDTH), (np.uint8, WIDTH)
ENTRY_BYTES = sum(np.dtype(kind).itemsize * width for kind, width in _COLUMNS)


def empty_table(entries: int) -> Table:
    """Return a table without evidence. Raises MemoryError if the machine has no room for it.

    The table is written to, so that the system provides its memory now and not page by page during decoding.
    """
    check_fits(entries * ENTRY_BYTES)
    return Table(*(np.full((entries, width) if width > 1 else entries, 0, kind) for kind, width in _COLUMNS))


class Credence(NamedTuple):
    """How far each kind of context is believed. `calibrate` learns it, `bound` keeps it within bounds.

    belief: float64 [kinds, AMOUNTS, PEAKS, 2], how often the next token was credited to a kind, and of how many times.
    votes: float64 [kinds, AMOUNTS, CLASSES], what a kind adds to the log of a candidate's chance.
    """

    belief: np.ndarray
    votes: np.ndarray


def prior_credence() -> Credence:
    belief = np.full((len(KINDS), AMOUNTS, PEAKS, 2), PRIOR_STRENGTH)
    belief[..., 0] *= PRIOR[:, None, :]
    return Credence(belief, np.zeros((len(KINDS), AMOUNTS, CLASSES)))


_is_kept = True  # whether later processes find the compiled loops


def _compiled(loop: Callable) -> Callable:
    """Compile a loop on its first call, and keep the result on disk.

    A loop that Python calls must not return an array. numba runs Python code to make one, and an interrupt there
    becomes a SystemError.
    """
    try:
        return njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        message = "no folder to keep compiled loops in: each process compiles them anew; set NUMBA_CACHE_DIR to one"
        warnings.warn(message, stacklevel=1)  # always from this line, so that it is shown once
        global _is_kept
        _is_kept = False
        return njit(nogil=True)(loop)


def addresses(table: Table, credence: Credence) -> np.ndarray:
    """Return where the arrays lie, and the number of entries: int64 [9], for the loops that each step of decoding runs.

    Between two passes of a model the caches are cold, and numba then takes longer to look at eight arrays than to grow
    a small tree. The arrays must be contiguous, and outlive the addresses.
    """
    return np.array([array.ctypes.data for array in (*table, *credence)] + [len(table.keys)])


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_compiled
def _array(address, shape, dtype):
    return carray(_pointer(address), shape, dtype)


@_compiled
def _opened(places):
    """The table and the credence whose arrays lie there (`addresses`)."""
    n = places[8]
    table = Table(
        _array(places[0], (n,), np.uint64),
        _array(places[1], (n,), np.uint32),
        _array(places[2], (n, 2), np.uint8),
        _array(places[3], (n, WIDTH), np.int32),
        _array(places[4], (n, WIDTH), np.float32),
        _array(places[5], (n, WIDTH), np.uint8),
    )
    belief = _array(places[6], (len(KINDS), AMOUNTS, PEAKS, 2), np.float64)
    return table, Credence(belief, _array(places[7], (len(KINDS), AMOUNTS, CLASSES), np.float64))


@_compiled
def _hash(tokens, end, sums, keys):
    """Write the keys of all kinds of contexts before index ``end`` of ``tokens``; _EMPTY for kinds longer than that.

    sums: scratch, uint64 [LONGEST + 1], 0 at index 0.
    """
    known = 0
    for distance in range(min(end, LONGEST)):
        token = tokens[end - 1 - distance]
        if token < 0:
            break
        sums[distance + 1] = sums[distance] + np.uint64(token + 1) * _MULTIPLIERS[distance]
        known = distance + 1
    for kind in range(len(KINDS)):
        keys[kind] = _EMPTY
        if _LENGTHS[kind] <= known:
            keys[kind] = sums[_LENGTHS[kind]] - sums[_SKIPS[kind]] + _SALTS[kind]


@_compiled
def _bucket(key, entries):
    return np.int64(((key >> _HALF) * np.uint64(entries // WAYS)) >> _HALF) * WAYS


@intrinsic
def _prefetch(typing_context, column, entry):
    """Have the processor fetch an entry's part of a column of the table, which is not waited for."""

    def generate(context, builder, signature, arguments):
        kind, number = signature.args
        array = context.make_array(kind)(context, builder, arguments[0])
        place = [arguments[1], context.get_constant(number, 0)][: kind.ndim]
        pointer = cgutils.get_item_pointer(context, builder, kind, array, place)
        pointer, flag = builder.bitcast(pointer, cgutils.voidptr_t), cgutils.int32_t
        function = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function)
        builder.call(prefetch, [pointer, flag(0), flag(3), flag(1)])  # data, to be read, into all caches

    return types.void(column, entry), generate


@_compiled
def _prefetch_contexts(table, contexts):
    """Have the processor fetch all that may be known of these contexts. One by one, each would be waited for."""
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64)
    for context in contexts:
        _hash(context, len(context), sums, keys)
        for key in keys:
            if key == _EMPTY:
                continue
            first = _bucket(key, len(table.keys))
            _prefetch(table.keys, first)
            _prefetch(table.learned_at, first)
            _prefetch(table.counts, first)
            _prefetch(table.sources, first)
            for entry in range(first, first + WAYS, 2):  # two to a line
                _prefetch(table.tokens, entry)
                _prefetch(table.weights, entry)


@_compiled
def _find(table, key):
    """Return the entry of a key, or -1."""
    if key != _EMPTY:
        first = _bucket(key, len(table.keys))
        for entry in range(first, first + WAYS):
            if table.keys[entry] == key:
                return entry
    return -1


@_compiled
def _age(table, entry, clock):
    return np.int64(np.uint32(clock - table.learned_at[entry]))  # modulo 2**32, as the clock is


@_compiled
def _entry_for(table, key, clock):
    """Return the entry that a new key takes: an empty one of its bucket, or the one with the greatest age / count."""
    first = _bucket(key, len(table.keys))
    found, age, seen = first, np.int64(-1), np.int64(1)
    for entry in range(first, first + WAYS):
        if table.keys[entry] == _EMPTY:
            return entry
        its_age, its_seen = _age(table, entry, clock), np.int64(table.counts[entry, 0])
        if its_age * seen > age * its_seen:
            found, age, seen = entry, its_age, its_seen
    return found


@_compiled
def _assign(table, entry, key):
    """Empty an entry and give it to a key."""
    table.keys[entry] = key
    table.counts[entry] = 0
    table.weights[entry] = 0


@_compiled
def _add(table, entry, token, weight, source):
    """Add weight to a token of an entry. In a full entry, a new token replaces the lightest one if it weighs more.

    The token's origin becomes ``source`` if that gives the larger part of its weight.
    """
    lightest = 0
    for place in range(WIDTH):
        held = table.weights[entry, place]
        if held > 0 and table.tokens[entry, place] == token:
            table.weights[entry, place] = held + weight
            before = table.sources[entry, place]
            table.sources[entry, place] = source if weight > held else before  # an `if` here halves the speed
            return
        if held < table.weights[entry, lightest]:
            lightest = place
    if weight > table.weights[entry, lightest]:
        table.tokens[entry, lightest] = token
        table.weights[entry, lightest] = weight
        table.sources[entry, lightest] = source


@_compiled
def _observe(table, keys, tokens, probabilities, source, clock):
    """Learn a distribution over the next token for every kind of context."""
    for kind in range(len(KINDS)):
        if keys[kind] == _EMPTY:
            continue
        entry = _find(table, keys[kind])
        if entry < 0:
            entry = _entry_for(table, keys[kind], clock)
            _assign(table, entry, keys[kind])
        table.learned_at[entry] = clock
        seen = table.counts[entry, 0]
        floor = SLOW_RATE if _LENGTHS[kind] == 0 else RATES[source]
        rate = max(floor, 1 / (seen + 1))
        table.counts[entry, 0] = min(seen + 1, 255)
        if source == LOGITS:
            table.counts[entry, 1] = min(table.counts[entry, 1] + 1, 255)
        keep = np.float32(1 - rate)
        for place in range(WIDTH):
            table.weights[entry, place] *= keep
        for column in range(len(tokens)):
            weight = np.float32(probabilities[column] * rate)
            if weight > 0:
                _add(table, entry, tokens[column], weight, source)


@_compiled
def are_ids(tokens) -> bool:
    """Whether all tokens lie in 0..2**31-1."""
    return len(tokens) == 0 or (tokens.min() >= 0 and tokens.max() < 2**31)


@_compiled
def are_distributions(probabilities) -> bool:
    """Whether no probability is negative or NaN, and each row's sum is at most 1, but for rounding."""
    for row in range(len(probabilities)):
        total = 0.0
        for probability in probabilities[row]:
            if not probability >= 0:
                return False
            total += probability
        if total > 1 + ROUNDING:
            return False
    return True


@_compiled
def flaw(table, largest, sources) -> str:
    """Say what breaks the invariants of a table whose columns have the right shapes; "" if nothing does.

    largest: the largest token that it may hold. sources: number of origins that exist.
    """
    for entry in range(len(table.keys)):
        key, seen, rows = table.keys[entry], table.counts[entry, 0], table.counts[entry, 1]
        total = 0.0
        for place in range(WIDTH):
            token, weight = table.tokens[entry, place], table.weights[entry, place]
            if not 0 <= weight < np.inf:
                return "a weight is negative or not finite"
            if token < 0 or (weight > 0 and token > largest):
                return "a token is not among those learned"
            if table.sources[entry, place] >= sources:
                return "a source is not known"
            for other in range(place):
                if weight > 0 and table.weights[entry, other] > 0 and table.tokens[entry, other] == token:
                    return "a token stands twice in an entry"
            total += weight
        if key == _EMPTY:
            if seen > 0 or rows > 0 or total > 0:
                return "an empty entry holds evidence"
            continue
        first = _bucket(key, len(table.keys))
        if not first <= entry < first + WAYS:
            return "an entry stands outside its key's bucket"
        for other in range(first, entry):
            if table.keys[other] == key:
                return "a key stands twice"
        if seen == 0 or rows > seen:
            return "counts do not fit"
        if total > 1 + 2 * ROUNDING:
            return "an entry's probabilities add up to more than 1"
    return ""


@_compiled
def learn_text(table, tokens, start, source, clock) -> tuple[int, int]:
    """Learn each of tokens[start:] from the tokens before it. The clock ticks once for each, NO_TOKEN included.

    Returns how many tokens were learned, and the largest of them, or -1.
    """
    sums, keys, certain = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64), np.ones(1)
    learned, largest = 0, -1
    for index in range(start, len(tokens)):
        if tokens[index] >= 0:
            _hash(tokens, index, sums, keys)
            _observe(table, keys, tokens[index : index + 1], certain, source, clock + index - start)
            learned, largest = learned + 1, max(largest, tokens[index])
    return learned, largest


@_compiled
def learn_rows(table, contexts, tokens, probabilities, source, clock) -> int:
    """Learn a distribution from each row. The clock ticks once for each. Returns the largest token learned, or -1."""
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64)
    largest = -1
    for row in range(len(contexts)):
        _hash(contexts[row], contexts.shape[1], sums, keys)
        _observe(table, keys, tokens[row], probabilities[row], source, clock + row)
        for column in range(tokens.shape[1]):
            if probabilities[row, column] > 0:
                largest = max(largest, tokens[row, column])
    return largest


@_compiled
def flaw_in_step(line, guesses, parents, tokens, probabilities) -> str:
    """Say which argument of `learn_step` holds a number out of its range; "" if none does."""
    if not (are_ids(line) and are_ids(guesses) and are_ids(tokens.reshape(-1))):
        return "token ids must lie in 0..2**31-1"
    for guess in range(len(parents)):
        if not -1 <= parents[guess] < guess:
            return "the parent of each guess must be an earlier one, or -1"
    return "" if are_distributions(probabilities) else NO_DISTRIBUTIONS


@_compiled
def learn_step(places, line, start, guesses, parents, tokens, probabilities, clock) -> int:
    """Learn what the model said after the text line[:start], and after each guess; then the tokens line[start:], with
    which the text goes on. First calibrate by what was said about those. places: from `addresses`.

    The clock ticks once for each row and each token. Returns the largest token learned, or -1; or FLAWED, and nothing
    is learned, if `flaw_in_step` finds a flaw.
    """
    if len(flaw_in_step(line, guesses, parents, tokens, probabilities)) > 0:
        return FLAWED
    table, credence = _opened(places)
    rows = len(guesses) + 1
    contexts = np.full((rows, LONGEST), NO_TOKEN)
    known = min(start, LONGEST)
    contexts[0, LONGEST - known :] = line[start - known : start]
    for row in range(1, rows):
        contexts[row, :-1] = contexts[parents[row - 1] + 1, 1:]
        contexts[row, -1] = guesses[row - 1]
    path, accepted = np.zeros(rows, np.int64), 1  # the rows of the text, beginning with that before all guesses
    for row in range(1, rows):  # parents come first
        place = start + accepted - 1
        if place < len(line) - 1 and parents[row - 1] + 1 == path[accepted - 1] and guesses[row - 1] == line[place]:
            path[accepted] = row
            accepted += 1
    _prefetch_contexts(table, contexts)
    calibrate(table, credence, contexts, tokens, probabilities, path[:accepted])
    said = learn_rows(table, contexts, tokens, probabilities, LOGITS, clock)
    return max(said, learn_text(table, line, start, TEXT, clock + rows)[1])


@_compiled
def find_entries(table, contexts, kind, entries) -> None:
    """Write to ``entries`` the entry of each row's context of one kind, -1 where nothing is known."""
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64)
    for row in range(len(contexts)):
        _hash(contexts[row], contexts.shape[1], sums, keys)
        entries[row] = _find(table, keys[kind])


@_compiled
def merge(table, clock, other, other_clock, since) -> None:
    """Add what the other table has learned after ``since``, the table that it started from, weighed by its counts.

    An entry keeps its age, by the clock of its own table. A full bucket evicts as in learning.
    """
    weights = np.empty(WIDTH, np.float32)
    for theirs in range(len(other.keys)):
        key, seen, rows = other.keys[theirs], np.int64(other.counts[theirs, 0]), np.int64(other.counts[theirs, 1])
        if key == _EMPTY:
            continue
        weights[:] = other.weights[theirs]
        base = _find(since, key)
        if base >= 0:
            if other.learned_at[theirs] == since.learned_at[base] and seen == since.counts[base, 0]:
                continue
            if seen >= since.counts[base, 0]:  # otherwise the entry was evicted and learned anew
                _subtract(since, base, other.tokens[theirs], weights, seen)
                seen = max(seen - since.counts[base, 0], 1)  # 1 where the counts have stopped at 255
                rows = min(max(rows - since.counts[base, 1], 0), seen)
        age = _age(other, theirs, other_clock)
        entry = _find(table, key)
        if entry < 0:
            entry = _entry_for(table, key, clock)
            its_seen = np.int64(table.counts[entry, 0])
            if table.keys[entry] != _EMPTY and _age(table, entry, clock) * seen <= age * its_seen:
                continue  # the new entry would be evicted before this one
            _assign(table, entry, key)
        else:
            age = min(age, _age(table, entry, clock))
        held = np.int64(table.counts[entry, 0])
        share = np.float32(seen / (held + seen))
        table.learned_at[entry] = np.uint32(clock - age)
        table.counts[entry, 0] = min(held + seen, 255)
        table.counts[entry, 1] = min(table.counts[entry, 1] + rows, 255)
        table.weights[entry] *= 1 - share
        for place in range(WIDTH):
            if weights[place] > 0:
                _add(table, entry, other.tokens[theirs, place], weights[place] * share, other.sources[theirs, place])
        total = table.weights[entry].sum()
        if total > 1 + ROUNDING:  # learning brings a sum back to 1, merging does not
            table.weights[entry] /= total


@_compiled
def _subtract(since, base, tokens, weights, seen):
    """Reduce an entry's weights to those of the observations made after ``since``.

    base: the same context's entry in ``since``. seen: number of observations that the weights rest on.
    This is exact where an entry is the mean of its observations, as after merging. Where learning gave newer
    observations more weight, the difference still shows their tokens; it is scaled down to a sum of at most 1.
    """
    before = np.int64(since.counts[base, 0])
    new, total = max(seen - before, 1), np.float32(0)
    for place in range(WIDTH):
        if weights[place] <= 0:
            continue
        held = _held(since, base, tokens[place])
        weights[place] = max((seen * weights[place] - before * held) / new, 0)
        total += weights[place]
    if total > 1:
        weights /= total


@_compiled
def _look_up(table, credence, tokens, end, sums, keys, entries, amounts, beliefs):
    """Find what is known before index ``end``: for each kind its entry (or -1), class of amount, and belief.

    Each kind, from the most specific on, takes a share of the belief and leaves the rest to those after it. The share
    is learned by kind, amount of evidence and highest probability. Returns the rest that no kind takes.
    """
    _hash(tokens, end, sums, keys)
    rest = 1.0
    for kind in range(len(KINDS)):
        entry = entries[kind] = _find(table, keys[kind])
        beliefs[kind] = 0.0
        if entry >= 0:
            amounts[kind] = _amount(table, entry)
            told = credence.belief[kind, amounts[kind], _peak(table, entry)]
            beliefs[kind] = rest * told[0] / told[1]
            rest = max(rest - beliefs[kind], 0.0)  # rounding could make it negative
    return rest


@_compiled
def _amount(table, entry):
    """Return the class of an entry's amount: 0 to 2 for text seen once, a few times, often; 3 to 5 for such counts of
    logits rows."""
    seen, rows = table.counts[entry, 0], table.counts[entry, 1]
    if rows == 0:
        return 0 if seen == 1 else 1 if seen < 5 else 2
    return 3 if rows == 1 else 4 if rows < 4 else 5


@_compiled
def _peak(table, entry):
    """Return the class of the highest probability in an entry."""
    highest = np.float32(0)
    for place in range(WIDTH):
        highest = max(highest, table.weights[entry, place])
    return 0 if highest <= 0.4 else 1 if highest <= 0.7 else 2 if highest <= 0.95 else 3


@_compiled
def _class(weight):
    """Return the class of the weight that an entry gives a token; 0 for a token that it does not hold."""
    if weight <= 0.15:
        return 0 if weight <= 0 else 1
    return 2 if weight <= 0.4 else 3 if weight <= 0.7 else 4 if weight <= 0.95 else 5


@_compiled
def _held(table, entry, token):
    """Return the weight that an entry gives a token."""
    weight = np.float32(0)
    for place in range(WIDTH):
        if table.tokens[entry, place] == token:
            weight = max(weight, table.weights[entry, place])  # another place with this token has weight 0: it is empty
    return weight


@_compiled
def _mix(table, votes, entries, amounts, beliefs, candidates, chances, tilts, origins):
    """Write the candidates for the next token, their chances and origins. Returns the number of candidates.

    Beliefs only add up. So they cannot express that kinds which agree are surer together, or that a long context's
    single observation is worth less where shorter contexts, seen more often, lack the token. Votes multiply a
    candidate's chance, and express both.

    tilts: scratch, the sum of each candidate's votes relative to a token that no kind holds.
    """
    found, silence = 0, 0.0  # silence: the votes for a token that no kind holds
    others = 1.0  # chance of the tokens that are not candidates
    for kind in range(len(KINDS)):
        entry = entries[kind]
        if entry < 0:
            continue
        cast = votes[kind, amounts[kind]]
        silence += cast[0]
        for place in range(WIDTH):
            weight = table.weights[entry, place]
            if weight <= 0:
                continue
            token = table.tokens[entry, place]
            known = 0
            while known < found and candidates[known] != token:
                known += 1
            if known == found:
                candidates[found], origins[found] = token, table.sources[entry, place]
                chances[found] = tilts[found] = 0.0
                found += 1
            chance = beliefs[kind] * weight
            chances[known] += chance
            others -= chance
            tilts[known] += cast[_class(weight)] - cast[0]
    total = max(others, MIN_REST)
    for candidate in range(found):
        chances[candidate] *= math.exp(min(silence + tilts[candidate], MAX_VOTES))
        total += chances[candidate]
    for candidate in range(found):
        chances[candidate] /= total
    return found


@_compiled
def calibrate(table, credence, contexts, tokens, probabilities, rows) -> None:
    """Learn from what followed the contexts in these rows: the beliefs, by a step of online expectation maximisation on
    the weights of the mixture, and the votes, by a step of gradient descent on the log loss."""
    kinds = len(KINDS)
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(kinds, np.uint64)
    entries, amounts = np.empty(kinds, np.int64), np.empty(kinds, np.int64)
    beliefs, credit = np.empty(kinds), np.empty(kinds)
    candidates, origins = np.empty(kinds * WIDTH, np.int64), np.empty(kinds * WIDTH, np.int64)
    chances, tilts = np.empty(kinds * WIDTH), np.empty(kinds * WIDTH)
    for row in rows:
        rest = _look_up(table, credence, contexts[row], contexts.shape[1], sums, keys, entries, amounts, beliefs)
        found = _mix(table, credence.votes, entries, amounts, beliefs, candidates, chances, tilts, origins)
        for candidate in range(found):
            observed = 0.0
            for column in range(tokens.shape[1]):
                if tokens[row, column] == candidates[candidate]:
                    observed += probabilities[row, column]
            step = STEP * (observed - chances[candidate])
            for kind in range(kinds):
                if entries[kind] >= 0:
                    of_class = _class(_held(table, entries[kind], candidates[candidate]))
                    credence.votes[kind, amounts[kind], of_class] += step
        for column in range(tokens.shape[1]):
            probability = probabilities[row, column]
            if probability <= 0:
                continue
            total = max(rest, MIN_REST) * OUTSIDE
            for kind in range(kinds):
                credit[kind] = 0.0
                if entries[kind] >= 0:
                    credit[kind] = beliefs[kind] * _held(table, entries[kind], tokens[row, column])
                    total += credit[kind]
            left = 1.0  # credit for the token that is left to this kind and those after it
            for kind in range(kinds):
                entry = entries[kind]
                if entry >= 0:
                    told = credence.belief[kind, amounts[kind], _peak(table, entry)]
                    keep = 1 - (1 - FADE) * probability * left
                    told[0] = told[0] * keep + probability * credit[kind] / total
                    told[1] = told[1] * keep + probability * left
                    left = max(left - credit[kind] / total, 0.0)
    bound(credence)


@_compiled
def bound(credence) -> None:
    """Bring beliefs and votes back within bounds, which rounding and endless learning may exceed."""
    votes, belief = credence.votes.reshape(-1), credence.belief.reshape(-1, 2)
    for cell in range(len(votes)):
        votes[cell] = min(max(votes[cell], -MAX_VOTES), MAX_VOTES)
    for cell in range(len(belief)):
        times = min(max(belief[cell, 1], MIN_TIMES), MAX_TIMES)
        belief[cell, 0], belief[cell, 1] = min(max(belief[cell, 0], MIN_TOLD), times), times


@_compiled
def calibrate_text(table, credence, tokens, start) -> None:
    """Calibrate by the tokens from index ``start`` on."""
    new = len(tokens) - start
    contexts = np.full((new, LONGEST), NO_TOKEN)
    for row in range(new):
        known = min(start + row, LONGEST)
        contexts[row, LONGEST - known :] = tokens[start + row - known : start + row]
    calibrate(table, credence, contexts, tokens[start:].reshape(new, 1), np.ones((new, 1)), np.arange(new))


@_compiled
def _race(draws, found, candidates, chances):
    """Change the candidates' chances for known draws: the token with the largest probability / variate is the next.

    If the chances were the model's probabilities, the winner would be certain. If each said how likely it is that the
    model is sure of this token, the draws would say nothing. They are in between, so both get an exponent.
    draws: float32 [vocabulary], the variate of each token.
    """
    others = 1.0
    for candidate in range(found):
        others -= chances[candidate]
    total = max(others, MIN_REST) * RACE_OTHERS
    for candidate in range(found):
        variate = draws[candidates[candidate]] if candidates[candidate] < len(draws) else np.float32(1)
        chances[candidate] = chances[candidate] ** RACE_CHANCE * max(variate, MIN_VARIATE) ** -RACE_VARIATE
        total += chances[candidate]
    for candidate in range(found):
        chances[candidate] /= total


@_compiled
def grow(places, context, min_probability, max_depth, chain, draws, nodes, joints) -> int:
    """Grow the likeliest tree below ``context`` (int64 [LONGEST]) best-first, and lay it out depth-first.

    places: from `addresses`. draws: float32 [k, vocabulary], the variates of the first k depths.
    nodes, joints: tokens, parents, depths and sources (int64 [4, budget]) and probabilities (float64 [budget]) of a
    `GuessTree`. They are filled from the front. Returns the number of nodes.
    """
    table, credence = _opened(places)
    tokens, parents, depths, sources = nodes[0], nodes[1], nodes[2], nodes[3]
    kinds, budget = len(KINDS), len(joints)
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(kinds, np.uint64)
    entries, amounts, beliefs = np.empty(kinds, np.int64), np.empty(kinds, np.int64), np.empty(kinds)
    candidates = np.empty(kinds * WIDTH, np.int64)
    chances, tilts = np.empty(kinds * WIDTH), np.empty(kinds * WIDTH)
    origins = np.empty(kinds * WIDTH, np.int64)
    paths = np.empty((budget + 1, LONGEST), np.int64)  # row 0 is the root's context, row i + 1 that of node i
    paths[0] = context
    frontier = [(0.0, 0, 0, 0)]  # negative probability, parent, token, origin; an element tells numba the types
    frontier.pop()
    count, node, joint, depth = 0, -1, 1.0, 0
    while True:
        if depth < max_depth:
            path = paths[node + 1]
            _look_up(table, credence, path, LONGEST, sums, keys, entries, amounts, beliefs)
            found = _mix(table, credence.votes, entries, amounts, beliefs, candidates, chances, tilts, origins)
            if depth < len(draws):
                _race(draws[depth], found, candidates, chances)
            for candidate in range(found):
                chance = joint * chances[candidate]
                if chance > min_probability:
                    heapq.heappush(frontier, (-chance, node, candidates[candidate], origins[candidate]))
        if count == budget or len(frontier) == 0:
            break
        negative, parent, token, source = heapq.heappop(frontier)
        if chain:
            frontier.clear()
        node, joint = count, -negative
        depth = 1 if parent < 0 else depths[parent] + 1
        tokens[node], parents[node], depths[node], joints[node], sources[node] = token, parent, depth, joint, source
        paths[node + 1, :-1] = paths[parent + 1, 1:]
        paths[node + 1, -1] = token
        count += 1
    _lay_out(parents[:count], tokens, depths, joints, sources)
    return count


@_compiled
def _lay_out(parents, tokens, depths, joints, sources):
    """Bring the nodes into depth-first order, siblings as they are."""
    count = len(parents)
    sizes = np.ones(count + 1, np.int64)  # of the trees below and with each node; the root's is the last, as index -1
    for node in range(count - 1, -1, -1):
        sizes[parents[node]] += sizes[node]
    places, free = np.full(count + 1, -1), np.zeros(count + 1, np.int64)  # free: where the next child of each stands
    order = np.empty(count, np.int64)
    for node in range(count):
        parent = parents[node]
        places[node] = free[parent]
        free[parent] += sizes[node]
        free[node] = places[node] + 1
        order[places[node]] = node
    parents[:] = places[parents[order]]
    tokens[:count], depths[:count], sources[:count] = tokens[order], depths[order], sources[order]
    joints[:count] = joints[order]


@cache
@told_if_long("compiling the loops of n-gram pools, once on a machine")
def compile_loops() -> None:
    """Compile all loops (seconds) or load them from numba's cache (0.2 s), so that the first guess need not wait."""
    with kept_for_later() if _is_kept else nullcontext():
        _call_all_loops()


def _call_all_loops() -> None:
    table, credence = empty_table(WAYS), prior_credence()
    row, certain = np.zeros((1, LONGEST), np.int64), np.ones((1, LONGEST))
    learn_text(table, row[0], 0, 0, 0)
    learn_rows(table, row, row, certain, 0, 0)
    flaw_in_step(row[0], row[0, :0], row[0, :0], row, certain)
    places = addresses(table, credence)
    learn_step(places, row[0], 1, row[0, :0], row[0, :0], row, certain, 0)
    calibrate(table, credence, row, row, certain, row[0, :1])
    calibrate_text(table, credence, row[0], 0)
    are_ids(row[0])
    are_distributions(certain)
    grow(places, row[0], 0.0, 1, False, np.empty((0, 0), np.float32), np.empty((4, 1), np.int64), np.empty(1))
    merge(table, 0, table, 0, table)
    bound(credence)
    flaw(table, -1, 1)
    find_entries(table, row, 0, row[0])
