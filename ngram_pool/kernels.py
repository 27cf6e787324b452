"""The pool's inner loops, compiled by numba: hash contexts, learn, weigh the evidence, grow the tree.

They trust their arguments; `pool.py` checks them. What shapes a table stands here too, because numba caches compiled
code by the file that it comes from.
"""

import heapq
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit

from ngram_pool.memory import check_fits
from ngram_pool.waiting import told_if_long

# Kinds of contexts, the most specific first: (skip, length) takes the tokens at distances skip+1 .. length before the
# next one. Those that skip the newest token say what tends to follow whatever stands there: they speak where the newest
# token is new, and carry over what the model said beside a guess that it rejected.
KINDS = ((0, 16), (0, 8), (0, 3), (0, 2), (1, 3), (0, 1), (1, 2), (0, 0))
LONGEST = 16
WIDTH = 8
WAYS = 4
NO_TOKEN = -1  # stands where a text has no token; nothing is learned across it

# Belief in a kind, by class of its highest probability, before anything was seen of it; and how many observations that
# counts for. What is learned fades by FADE with every observation.
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
PEAKS = PRIOR.shape[1]
AMOUNTS = 6
# How the kinds' joint word is corrected: each kind votes on each candidate, by class of the weight that it gives it.
CLASSES = 6
STEP = 0.02  # by which votes follow what was observed
MOST_VOTES = 50.0  # of one kind and of all, so that no chance overflows
# What a belief rests on: it was told so often at least, of so many times. FADE keeps the times below 1 / (1 - FADE).
LEAST_TOLD = 1e-100  # so that no belief sinks to 0
FEWEST_TIMES, MOST_TIMES = 1.0, 1.001 / (1 - FADE)
OUTSIDE = 1e-4  # probability of a token that no context names
LEAST = 1e-9  # probability that is left to all of those

# Weight of a new observation, by source (prompt, text, logits, jacobi, file), once there are several: newer evidence
# outweighs older. The context of no tokens forgets slowly.
RATES = np.array([0.25, 0.25, 0.65, 0.15, 0.1])
SLOW_RATE = 0.02
LOGITS = 2

ROUNDING = 0.001  # by which the probabilities of a row may exceed 1 together; those of an entry, by twice that

_SKIPS = np.array([skip for skip, _ in KINDS])
_LENGTHS = np.array([length for _, length in KINDS])
# Multilinear hashing (Lemire and Kaser 2014, arXiv 1202.4961): fixed random odd multipliers, one a distance from the
# end of the context, and one salt a kind; arithmetic is modulo 2**64.
_random = np.random.PCG64(0x6C6F6F6B).random_raw  # numpy promises that this stream never changes; saved pools need it
_MULTIPLIERS = _random(LONGEST) | np.uint64(1)
_SALTS = _random(len(KINDS))
_HALF = np.uint64(32)
_EMPTY = np.uint64(0)


class Table(NamedTuple):
    """n entries in buckets of WAYS; entry i holds what is known of the context with hash ``keys[i]``.

    keys: uint64 [n], 0 where the entry is empty. learned_at: uint32 [n], the clock when it was last learned.
    counts: uint8 [n, 2], observations, and those of them that were logits rows; they stop at 255.
    tokens, weights, sources: int32, float32, uint8 [n, WIDTH], next tokens with probabilities (0: no token).
    """

    keys: np.ndarray
    learned_at: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    sources: np.ndarray


COLUMNS = (
    ("keys", np.uint64, 1),
    ("learned_at", np.uint32, 1),
    ("counts", np.uint8, 2),
    ("tokens", np.int32, WIDTH),
    ("weights", np.float32, WIDTH),
    ("sources", np.uint8, WIDTH),
)
ENTRY_BYTES = sum(np.dtype(kind).itemsize * width for _, kind, width in COLUMNS)


def empty_table(entries: int) -> Table:
    """Written to all over, for memory that is first touched later, page by page, would be waited for between steps.

    Raises MemoryError if the machine has no room for it.
    """
    check_fits(entries * ENTRY_BYTES)
    return Table(*(np.full((entries, width) if width > 1 else entries, 0, kind) for _, kind, width in COLUMNS))


class Credence(NamedTuple):
    """How far the evidence is believed; what `calibrate` learns.

    belief: float64 [kinds, AMOUNTS, PEAKS, 2], how often the next token was a kind's to tell, and of how many times.
    votes: float64 [kinds, AMOUNTS, CLASSES], what a kind adds to the log of a candidate's chance.
    `bound` says between what they lie.
    """

    belief: np.ndarray
    votes: np.ndarray


def prior_credence() -> Credence:
    belief = np.full((len(KINDS), AMOUNTS, PEAKS, 2), PRIOR_STRENGTH)
    belief[..., 0] *= PRIOR[:, None, :]
    return Credence(belief, np.zeros((len(KINDS), AMOUNTS, CLASSES)))


def _compiled(loop: Callable) -> Callable:
    """What Python calls returns no array: numba runs Python to make one, where an interrupt becomes a SystemError."""
    try:
        return njit(cache=True, nogil=True)(loop)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        message = "no folder to keep compiled loops in: each process compiles them anew; set NUMBA_CACHE_DIR to one"
        warnings.warn(message, stacklevel=1)  # from one place, so that it is shown once
        return njit(nogil=True)(loop)


@_compiled
def _hash(tokens, end, sums, keys):
    """Keys of all kinds of contexts that end before index ``end`` of ``tokens``; _EMPTY for those not long enough."""
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


@_compiled
def _find(table, key):
    """The entry of a key, or -1."""
    if key != _EMPTY:
        first = _bucket(key, len(table.keys))
        for entry in range(first, first + WAYS):
            if table.keys[entry] == key:
                return entry
    return -1


@_compiled
def _claim(table, key, clock):
    """An emptied entry for a new key: of its bucket, the one longest not learned for how often it has been."""
    first = _bucket(key, len(table.keys))
    claimed, age, seen = first, np.int64(-1), np.int64(1)
    for entry in range(first, first + WAYS):
        if table.keys[entry] == _EMPTY:
            claimed = entry
            break
        its_age = np.int64(np.uint32(clock - table.learned_at[entry]))  # modulo 2**32, as the clock is
        its_seen = np.int64(table.counts[entry, 0])
        if its_age * seen > age * its_seen:
            claimed, age, seen = entry, its_age, its_seen
    _assign(table, claimed, key)
    return claimed


@_compiled
def _assign(table, entry, key):
    """Give an entry, emptied, to a key."""
    table.keys[entry] = key
    table.counts[entry] = 0
    table.weights[entry] = 0


@_compiled
def _add(table, entry, token, weight, source):
    """Add weight to a token of an entry; in a full entry it may take the place of the lightest.

    A token is attributed to the source of the larger part of its weight.
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
            entry = _claim(table, keys[kind], clock)
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
    """Whether all tokens, of which there are some, lie in 0..2**31-1."""
    return tokens.min() >= 0 and tokens.max() < 2**31


@_compiled
def are_distributions(probabilities) -> bool:
    """Whether no probability is negative or NaN, and each row's sum is at most 1, give or take what rounding does."""
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
    """What breaks the invariants of a table, "" if nothing does. The columns' shapes must be right.

    largest: the largest token that it may hold. sources: how many sources there are.
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
    """Learn tokens[start:], each from those before it; the clock ticks once a token, or NO_TOKEN.

    Returns how many tokens that were, and the largest of them, -1 if there is none.
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
def learn_rows(table, contexts, tokens, probabilities, sources, clock) -> None:
    """Learn a distribution a row; the clock ticks once a row."""
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64)
    for row in range(len(contexts)):
        _hash(contexts[row], contexts.shape[1], sums, keys)
        _observe(table, keys, tokens[row], probabilities[row], sources[row], clock + row)


@_compiled
def find_entries(table, contexts, kind, entries) -> None:
    """Entries of one kind of context for rows of tokens, into ``entries``; -1 where nothing is known."""
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(len(KINDS), np.uint64)
    for row in range(len(contexts)):
        _hash(contexts[row], contexts.shape[1], sums, keys)
        entries[row] = _find(table, keys[kind])


@_compiled
def merge(table, clock, other, other_clock, since) -> None:
    """Add what the other table holds and ``since``, which it started from, does not, weighed by its counts.

    An entry keeps its age by its own table's clock, and a full bucket makes room as it does in learning.
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
            if seen >= since.counts[base, 0]:  # else it was evicted and learned anew
                _subtract(since, base, other.tokens[theirs], weights, seen)
                seen = max(seen - since.counts[base, 0], 1)  # at least 1 where the counts have reached their end
                rows = min(max(rows - since.counts[base, 1], 0), seen)
        age = _age(other, theirs, other_clock)
        entry = _find(table, key)
        if entry < 0:
            if not _has_room(table, key, clock, age, seen):
                continue
            entry = _claim(table, key, clock)
        else:
            age = min(age, _age(table, entry, clock))
        held = np.int64(table.counts[entry, 0])
        share = np.float32(seen / (held + seen))
        table.learned_at[entry] = np.uint32(clock - age)
        table.counts[entry, 0] = min(held + seen, 255)
        table.counts[entry, 1] = min(table.counts[entry, 1] + rows, 255)
        for place in range(WIDTH):
            table.weights[entry, place] *= 1 - share
        for place in range(WIDTH):
            if weights[place] > 0:
                _add(table, entry, other.tokens[theirs, place], weights[place] * share, other.sources[theirs, place])
        total = np.float32(0)
        for place in range(WIDTH):
            total += table.weights[entry, place]
        if total > 1 + ROUNDING:  # learning brings a sum back to 1, merging does not
            for place in range(WIDTH):
                table.weights[entry, place] /= total


@_compiled
def _has_room(table, key, clock, age, seen):
    """Whether a key's bucket has an empty entry, or one that would go rather than one of this age and count."""
    first = _bucket(key, len(table.keys))
    for entry in range(first, first + WAYS):
        its_seen = np.int64(table.counts[entry, 0])
        if table.keys[entry] == _EMPTY or _age(table, entry, clock) * seen > age * its_seen:
            return True
    return False


@_compiled
def _age(table, entry, clock):
    return np.int64(np.uint32(clock - table.learned_at[entry]))  # modulo 2**32, as the clock is


@_compiled
def _subtract(since, base, tokens, weights, seen):
    """Leave of an entry's weights, which rest on ``seen`` observations, those of the ones made after ``since``.

    Exact where an entry is the mean of its observations, as after merging. Where learning gave the newer ones more
    weight, the difference shows which tokens they were, and is scaled to what they can amount to.
    """
    before = np.int64(since.counts[base, 0])
    new, total = max(seen - before, 1), np.float32(0)
    for place in range(WIDTH):
        if weights[place] <= 0:
            continue
        held = np.float32(0)
        for other_place in range(WIDTH):
            if since.tokens[base, other_place] == tokens[place]:
                held = max(held, since.weights[base, other_place])
        weights[place] = max((seen * weights[place] - before * held) / new, 0)
        total += weights[place]
    if total > 1:
        for place in range(WIDTH):
            weights[place] /= total


@_compiled
def _look_up(table, credence, tokens, end, sums, keys, entries, amounts, beliefs):
    """What is known before index ``end``: an entry (or -1) a kind, the class of its amount, and the belief in each.

    Belief goes from the most specific kind downwards, each leaving a rest to those after it; how much it takes is
    learned by kind, amount of evidence, and how far that evidence agrees. Returns the rest that no kind takes.
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
            rest = max(rest - beliefs[kind], 0.0)  # it may be rounded up
    return rest


@_compiled
def _amount(table, entry):
    """Class of an entry's evidence: text alone, seen once, a few times, often; or with logits rows, likewise."""
    seen, rows = table.counts[entry, 0], table.counts[entry, 1]
    if rows == 0:
        return 0 if seen == 1 else 1 if seen < 5 else 2
    return 3 if rows == 1 else 4 if rows < 4 else 5


@_compiled
def _peak(table, entry):
    """Class of the highest probability in an entry."""
    highest = np.float32(0)
    for place in range(WIDTH):
        highest = max(highest, table.weights[entry, place])
    return 0 if highest <= 0.4 else 1 if highest <= 0.7 else 2 if highest <= 0.95 else 3


@_compiled
def _class(weight):
    """Class of the weight that an entry gives a token; 0 is for a token that it does not hold."""
    if weight <= 0.15:
        return 0 if weight <= 0 else 1
    return 2 if weight <= 0.4 else 3 if weight <= 0.7 else 4 if weight <= 0.95 else 5


@_compiled
def _held(table, entry, token):
    """The weight that an entry gives a token."""
    weight = np.float32(0)
    for place in range(WIDTH):
        if table.tokens[entry, place] == token:
            weight = max(weight, table.weights[entry, place])  # a place of weight 0 names no token
    return weight


@_compiled
def _mix(table, votes, entries, amounts, beliefs, candidates, chances, tilts, origins):
    """The kinds' joint word on the next token: candidates, their chances and sources. Returns how many there are.

    Beliefs add up, so they cannot say that kinds which agree are surer than each is, nor that a long context's one
    observation is worth less where the short ones, which saw more, hold nothing of it. Votes multiply, and say both.
    tilts: scratch, the votes that each candidate has got.
    """
    found, silence = 0, 0.0  # what all kinds say of a token that they do not hold
    others = 1.0
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
    total = max(others, LEAST)
    for candidate in range(found):
        chances[candidate] *= math.exp(min(silence + tilts[candidate], MOST_VOTES))
        total += chances[candidate]
    for candidate in range(found):
        chances[candidate] /= total
    return found


@_compiled
def calibrate(table, credence, contexts, tokens, probabilities) -> None:
    """Learn from what followed: the belief in each kind (a step of online EM on the mixture's weights), and the kinds'
    votes (a step of gradient descent on the log loss)."""
    kinds = len(KINDS)
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(kinds, np.uint64)
    entries, amounts = np.empty(kinds, np.int64), np.empty(kinds, np.int64)
    beliefs, credit = np.empty(kinds), np.empty(kinds)
    candidates, origins = np.empty(kinds * WIDTH, np.int64), np.empty(kinds * WIDTH, np.int64)
    chances, tilts = np.empty(kinds * WIDTH), np.empty(kinds * WIDTH)
    for row in range(len(contexts)):
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
            total = max(rest, LEAST) * OUTSIDE
            for kind in range(kinds):
                credit[kind] = 0.0
                if entries[kind] >= 0:
                    credit[kind] = beliefs[kind] * _held(table, entries[kind], tokens[row, column])
                    total += credit[kind]
            left = 1.0  # of the token, to the kinds from here on
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
    """Bring what rounding, or learning for ever, took out of its bounds back into them."""
    votes, belief = credence.votes.reshape(-1), credence.belief.reshape(-1, 2)
    for cell in range(len(votes)):
        votes[cell] = min(max(votes[cell], -MOST_VOTES), MOST_VOTES)
    for cell in range(len(belief)):
        times = min(max(belief[cell, 1], FEWEST_TIMES), MOST_TIMES)
        belief[cell, 0], belief[cell, 1] = min(max(belief[cell, 0], LEAST_TOLD), times), times


@_compiled
def calibrate_text(table, credence, tokens, start) -> None:
    """Calibrate by the tokens from index ``start`` on."""
    new = len(tokens) - start
    contexts = np.full((new, LONGEST), NO_TOKEN)
    for row in range(new):
        known = min(start + row, LONGEST)
        contexts[row, LONGEST - known :] = tokens[start + row - known : start + row]
    calibrate(table, credence, contexts, tokens[start:].reshape(new, 1), np.ones((new, 1)))


@_compiled
def grow(table, credence, context, min_probability, max_depth, chain, tokens, parents, depths, joints, sources) -> int:
    """The likeliest tree below ``context`` (int64 [LONGEST]), best first, laid out depth-first.

    tokens, parents, depths, joints, sources: the arrays of a `GuessTree`, with room for as many nodes as are wanted.
    They are filled from the front; the number of nodes is returned.
    """
    kinds, budget = len(KINDS), len(tokens)
    sums, keys = np.zeros(LONGEST + 1, np.uint64), np.empty(kinds, np.uint64)
    entries, amounts, beliefs = np.empty(kinds, np.int64), np.empty(kinds, np.int64), np.empty(kinds)
    candidates = np.empty(kinds * WIDTH, np.int64)
    chances, tilts = np.empty(kinds * WIDTH), np.empty(kinds * WIDTH)
    origins = np.empty(kinds * WIDTH, np.int64)
    paths = np.empty((budget + 1, LONGEST), np.int64)  # row 0 is the root's, row i + 1 that of node i
    paths[0] = context
    frontier = [(0.0, 0, 0, 0)]  # negative probability, parent, token, source
    frontier.pop()
    count, node, joint, depth = 0, -1, 1.0, 0
    while True:
        if depth < max_depth:
            path = paths[node + 1]
            _look_up(table, credence, path, LONGEST, sums, keys, entries, amounts, beliefs)
            found = _mix(table, credence.votes, entries, amounts, beliefs, candidates, chances, tilts, origins)
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
    order, places = _depth_first(parents[:count])
    laid_out = np.empty(count, np.int64)
    for place in range(count):
        parent = parents[order[place]]
        laid_out[place] = -1 if parent < 0 else places[parent]
    parents[:count] = laid_out
    tokens[:count], depths[:count], sources[:count] = tokens[order], depths[order], sources[order]
    joints[:count] = joints[order]
    return count


@_compiled
def _depth_first(parents):
    """Nodes in depth-first order, siblings in the order given; and the place of each node in it."""
    count = len(parents)
    first_child, next_sibling = np.full(count + 1, -1), np.full(count, -1)
    for node in range(count - 1, -1, -1):
        next_sibling[node] = first_child[parents[node] + 1]
        first_child[parents[node] + 1] = node
    order, places = np.empty(count, np.int64), np.empty(count, np.int64)
    stack = np.empty(count + 1, np.int64)
    stack[0], waiting, done = first_child[0], 1, 0
    while waiting:
        waiting -= 1
        node = stack[waiting]
        if node < 0:
            continue
        order[done], places[node] = node, done
        done += 1
        stack[waiting], stack[waiting + 1] = next_sibling[node], first_child[node + 1]
        waiting += 2
    return order, places


@cache
@told_if_long("compiling the loops of n-gram pools, once on a machine")
def compile_loops() -> None:
    """Compile everything now (seconds), or load it from numba's cache (0.2 s), rather than inside the first guess."""
    table, credence = empty_table(WAYS), prior_credence()
    row, certain = np.zeros((1, LONGEST), np.int64), np.ones((1, LONGEST))
    learn_text(table, row[0], 0, 0, 0)
    learn_rows(table, row, row, certain, row[0, :1], 0)
    calibrate(table, credence, row, row, certain)
    calibrate_text(table, credence, row[0], 0)
    are_ids(row[0])
    are_distributions(certain)
    tokens, parents, depths, sources = np.empty((4, 1), np.int64)
    grow(table, credence, row[0], 0.0, 1, False, tokens, parents, depths, np.empty(1), sources)
    merge(table, 0, table, 0, table)
    bound(credence)
    flaw(table, -1, 1)
    find_entries(table, row, 0, row[0])
