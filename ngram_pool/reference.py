"""The loops of a pool in plain Python. They define what `loops.cpp` does, and run, slowly, if it was not built.

Both write the same bits. So numbers are rounded in the same places: the table's weights are float32 (`_single`),
everything else is Python's own numbers. Arrays come with their sizes, because C++ needs them. The loops trust their
arguments; `pool.py` checks them.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngram_pool.table import (
    EMPTY,
    FADE,
    KINDS,
    LOGITS,
    LONGEST,
    MAX_VOTES,
    MIN_REST,
    MIN_VARIATE,
    MULTIPLIERS,
    NO_DISTRIBUTIONS,
    NO_IDS,
    NO_PARENTS,
    OUTSIDE,
    RACE_CHANCE,
    RACE_OTHERS,
    RACE_VARIATE,
    RATES,
    ROUNDING,
    SALTS,
    SLOW_RATE,
    STEP,
    TEXT,
    WAYS,
    Credence,
    Table,
    are_distributions,
    are_ids,
    bound,
)

Tokens = Sequence[int]


class Pool(NamedTuple):
    """The arrays of a pool."""

    table: Table
    credence: Credence


opened = Pool


def _single(number: float) -> float:
    return float(np.float32(number))


def _hash(context: Tokens) -> list[int]:
    """Return the keys of all kinds of contexts; EMPTY for kinds that have more tokens than ``context``."""
    sums = [0]
    for token, multiplier in zip(reversed(context[-LONGEST:]), MULTIPLIERS, strict=False):
        if token < 0:
            break
        sums.append(sums[-1] + (token + 1) * multiplier)
    known = len(sums) - 1
    return [
        (sums[length] - sums[skip] + salt) % 2**64 if length <= known else EMPTY
        for (skip, length), salt in zip(KINDS, SALTS, strict=True)
    ]


def _bucket(table: Table, key: int) -> range:
    """The entries of a key's bucket."""
    first = ((key >> 32) * (len(table.keys) // WAYS) >> 32) * WAYS
    return range(first, first + WAYS)


def _find(table: Table, key: int) -> int:
    """Return the entry of a key, or -1."""
    if key != EMPTY:
        for entry in _bucket(table, key):
            if table.keys[entry] == key:
                return entry
    return -1


def _age(table: Table, entry: int, clock: int) -> int:
    return (clock - int(table.learned_at[entry])) % 2**32


def _entry_for(table: Table, key: int, clock: int) -> int:
    """Return the entry that a new key takes: an empty one of its bucket, or the one with the greatest age / count."""
    found, age, seen = _bucket(table, key).start, -1, 1
    for entry in _bucket(table, key):
        if table.keys[entry] == EMPTY:
            return entry
        its_age, its_seen = _age(table, entry, clock), int(table.counts[entry, 0])
        if its_age * seen > age * its_seen:
            found, age, seen = entry, its_age, its_seen
    return found


def _assign(table: Table, entry: int, key: int) -> None:
    """Empty an entry and give it to a key."""
    table.keys[entry] = key
    table.counts[entry] = 0
    table.weights[entry] = 0


def _add(table: Table, entry: int, token: int, weight: float, source: int) -> None:
    """Add weight to a token of an entry. In a full entry, a new token replaces the lightest one if it is heavier.

    The token's origin becomes ``source`` if the added weight exceeds the old one.
    """
    weights, tokens = table.weights[entry].tolist(), table.tokens[entry].tolist()
    for place, held in enumerate(weights):
        if held > 0 and tokens[place] == token:
            table.weights[entry, place] = held + weight
            if weight > held:
                table.sources[entry, place] = source
            return
    lightest = weights.index(min(weights))
    if weight > weights[lightest]:
        table.tokens[entry, lightest] = token
        table.weights[entry, lightest] = weight
        table.sources[entry, lightest] = source


def _observe(
    table: Table, context: Tokens, tokens: Tokens, probabilities: Sequence[float], source: int, clock: int
) -> None:
    """Learn a distribution over the next token for every kind of context."""
    for (_, length), key in zip(KINDS, _hash(context), strict=True):
        if key == EMPTY:
            continue
        entry = _find(table, key)
        if entry < 0:
            entry = _entry_for(table, key, clock)
            _assign(table, entry, key)
        table.learned_at[entry] = clock % 2**32
        seen, rows = table.counts[entry].tolist()
        rate = max(RATES[source] if length else SLOW_RATE, 1 / (seen + 1))
        table.counts[entry] = min(seen + 1, 255), min(rows + (source == LOGITS), 255)
        table.weights[entry] *= np.float32(1 - rate)
        for token, probability in zip(tokens, probabilities, strict=True):
            weight = _single(probability * rate)
            if weight > 0:
                _add(table, entry, token, weight, source)


def learn_text(pool: Pool, tokens: np.ndarray, count: int, start: int, source: int, clock: int) -> int:
    """Learn each of tokens[start:] from the tokens before it. The clock ticks once for each, NO_TOKEN included.

    tokens: int64 [count]. Returns the largest token learned, or -1.
    """
    text = tokens.tolist()
    for index in range(start, count):
        if text[index] >= 0:
            _observe(pool.table, text[:index], [text[index]], [1.0], source, clock + index - start)
    return max(text[start:], default=-1)


def learn_rows(
    pool: Pool, contexts: np.ndarray, count: int, width: int, tokens: np.ndarray, probabilities: np.ndarray,
    columns: int, source: int, clock: int,
) -> int:  # fmt: skip
    """Learn a distribution from each row. The clock ticks once for each.

    contexts: int64 [count, width]. tokens, probabilities: int64 and float64 [count, columns]. Returns the largest token
    learned, or -1.
    """
    for row, context in enumerate(contexts.tolist()):
        _observe(pool.table, context, tokens[row].tolist(), probabilities[row].tolist(), source, clock + row)
    return int(tokens[probabilities > 0].max(initial=-1))


def learn_step(
    pool: Pool, line: np.ndarray, count: int, start: int, guesses: np.ndarray, parents: np.ndarray, guessed: int,
    tokens: np.ndarray, probabilities: np.ndarray, columns: int, clock: int,
) -> int:  # fmt: skip
    """Learn the model's predictions after the text line[:start] and after each guess; then the tokens line[start:],
    which continue the text. First calibrate by the predictions of these tokens.

    line: int64 [count]. guesses, parents: int64 [guessed]. tokens, probabilities: int64 and float64
    [1 + guessed, columns].
    The clock ticks once for each row and each token. Returns the largest token learned, or -1. Where a number is out of
    its range, returns NO_IDS, NO_PARENTS or NO_DISTRIBUTIONS, and nothing is learned.
    """
    if not (are_ids(line) and are_ids(guesses) and are_ids(tokens)):
        return NO_IDS
    if not ((parents >= -1) & (parents < np.arange(guessed))).all():
        return NO_PARENTS
    if not are_distributions(probabilities):
        return NO_DISTRIBUTIONS
    text, above = line.tolist(), parents.tolist()
    contexts = [text[max(start - LONGEST, 0) : start]]
    for guess, parent in zip(guesses.tolist(), above, strict=True):
        contexts.append([*contexts[parent + 1], guess])
    path = [0]  # the rows of the text: the one before all guesses, and those of accepted guesses
    for row in range(1, 1 + guessed):  # parents before children
        place = start + len(path) - 1
        if place < count - 1 and above[row - 1] + 1 == path[-1] and guesses[row - 1] == text[place]:
            path.append(row)
    for row in path:
        _calibrate(pool, contexts[row], tokens[row].tolist(), probabilities[row].tolist())
    bound(pool.credence)
    for row, context in enumerate(contexts):
        _observe(pool.table, context, tokens[row].tolist(), probabilities[row].tolist(), LOGITS, clock + row)
    said = int(tokens[probabilities > 0].max(initial=-1))
    return max(said, learn_text(pool, line, count, start, TEXT, clock + 1 + guessed))


def calibrate(
    pool: Pool, contexts: np.ndarray, count: int, width: int, tokens: np.ndarray, probabilities: np.ndarray,
    columns: int,
) -> None:  # fmt: skip
    """Learn the belief in each kind from what followed the contexts. Arguments as for `learn_rows`."""
    for row, context in enumerate(contexts.tolist()):
        _calibrate(pool, context, tokens[row].tolist(), probabilities[row].tolist())
    bound(pool.credence)


def calibrate_text(pool: Pool, tokens: np.ndarray, count: int, start: int) -> None:
    """Calibrate by the tokens from index ``start`` on. tokens: int64 [count]."""
    text = tokens.tolist()
    for index in range(start, count):
        _calibrate(pool, text[:index], [text[index]], [1.0])
    bound(pool.credence)


def find_entries(pool: Pool, contexts: np.ndarray, count: int, width: int, kind: int, entries: np.ndarray) -> None:
    """Write to ``entries`` the entry of each row's context of one kind, or -1.

    contexts: int64 [count, width]. entries: int64 [count].
    """
    entries[:] = [_find(pool.table, _hash(context)[kind]) for context in contexts.tolist()]


def merge(pool: Pool, clock: int, other: Pool, other_clock: int, since: Pool) -> None:
    """Add what the other table has learned since ``since``, the table that it started from, weighted by counts.

    An entry keeps its age, by the clock of its own table. A full bucket evicts as in learning.
    """
    table = pool.table
    for theirs in np.flatnonzero(other.table.keys).tolist():
        key, (seen, rows) = int(other.table.keys[theirs]), other.table.counts[theirs].tolist()
        tokens, weights = other.table.tokens[theirs].tolist(), other.table.weights[theirs].tolist()
        base = _find(since.table, key)
        if base >= 0:
            before, rows_before = since.table.counts[base].tolist()
            if other.table.learned_at[theirs] == since.table.learned_at[base] and seen == before:
                continue
            if seen >= before:  # otherwise the entry was evicted and learned anew
                _subtract(since.table, base, tokens, weights, seen)
                seen = max(seen - before, 1)  # 1 if both counts have stopped at 255
                rows = min(max(rows - rows_before, 0), seen)
        age = _age(other.table, theirs, other_clock)
        entry = _find(table, key)
        if entry < 0:
            entry = _entry_for(table, key, clock)
            its_seen = int(table.counts[entry, 0])
            if table.keys[entry] != EMPTY and _age(table, entry, clock) * seen <= age * its_seen:
                continue  # the new entry would be evicted before this one
            _assign(table, entry, key)
        else:
            age = min(age, _age(table, entry, clock))
        held, rows_held = table.counts[entry].tolist()
        share = _single(seen / (held + seen))
        table.learned_at[entry] = (clock - age) % 2**32
        table.counts[entry] = min(held + seen, 255), min(rows_held + rows, 255)
        table.weights[entry] = [weight * (1 - share) for weight in table.weights[entry].tolist()]
        for place, source in enumerate(other.table.sources[theirs].tolist()):
            if weights[place] > 0:
                _add(table, entry, tokens[place], _single(weights[place] * share), source)
        total = _sum(table.weights[entry].tolist())
        if total > 1 + ROUNDING:  # learning brings a sum back to 1, merging does not
            table.weights[entry] /= np.float32(total)


def _sum(weights: list[float]) -> float:
    """Their sum, added in float32 from the first on."""
    total = 0.0
    for weight in weights:
        total = _single(total + weight)
    return total


def _subtract(since: Table, base: int, tokens: Tokens, weights: list[float], seen: int) -> None:
    """Reduce an entry's weights to those of the observations made after ``since``.

    base: the same context's entry in ``since``. seen: number of observations behind the weights.
    This is exact if an entry is the mean of its observations, as after merging. If learning gave newer observations
    more weight, the difference still shows their tokens; it is scaled down to a sum of at most 1.
    """
    before = int(since.counts[base, 0])
    new = max(seen - before, 1)
    held = [_held(since, base, token) for token in tokens]
    for place, weight in enumerate(weights):
        if weight > 0:
            weights[place] = _single(max((seen * weight - before * held[place]) / new, 0.0))
    total = _sum([weight for weight in weights if weight > 0])
    if total > 1:
        weights[:] = [_single(weight / total) for weight in weights]


class _Known(NamedTuple):
    """The evidence of one kind of context."""

    kind: int
    entry: int
    amount: int  # its class of evidence
    belief: float


def _look_up(pool: Pool, context: Tokens) -> tuple[list[_Known], float]:
    """Return the evidence of each kind that has any, and the belief that is left over.

    Each kind, the most specific first, takes a share of the belief and leaves the rest to those after it. The share is
    learned by kind, amount of evidence and highest probability.
    """
    found, rest = [], 1.0
    for kind, key in enumerate(_hash(context)):
        entry = _find(pool.table, key)
        if entry >= 0:
            amount = _amount(pool.table, entry)
            told, times = pool.credence.belief[kind, amount, _peak(pool.table, entry)].tolist()
            found.append(_Known(kind, entry, amount, rest * told / times))
            rest = max(rest - found[-1].belief, 0.0)  # rounding could make it negative
    return found, rest


def _amount(table: Table, entry: int) -> int:
    """Return the class of an entry's amount of evidence: 0 to 2 for text seen once, a few times, often; 3 to 5 for the
    same numbers of logits rows."""
    seen, rows = table.counts[entry].tolist()
    if rows == 0:
        return 0 if seen == 1 else 1 if seen < 5 else 2
    return 3 if rows == 1 else 4 if rows < 4 else 5


def _peak(table: Table, entry: int) -> int:
    """Return the class of the highest probability in an entry."""
    highest = float(table.weights[entry].max())
    return 0 if highest <= 0.4 else 1 if highest <= 0.7 else 2 if highest <= 0.95 else 3


def _class(weight: float) -> int:
    """Return the class of the weight that an entry gives a token; 0 for a token that it does not hold."""
    if weight <= 0.15:
        return 0 if weight <= 0 else 1
    return 2 if weight <= 0.4 else 3 if weight <= 0.7 else 4 if weight <= 0.95 else 5


def _held(table: Table, entry: int, token: int) -> float:
    """Return the weight that an entry gives a token. An empty place, of weight 0, may hold the token, too."""
    return float(table.weights[entry][table.tokens[entry] == token].max(initial=0))


class _Candidate:
    """A token that may be the next."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.chance = 0.0
        self.tilt = 0.0  # its votes, relative to a token that no kind holds


def _mix(pool: Pool, known: list[_Known]) -> dict[int, _Candidate]:
    """Return the candidates for the next token.

    Beliefs only add up. So they cannot express that two kinds which agree are surer together. Nor can they express that
    a long context's single observation is worth less if shorter contexts, seen more often, lack the token. Votes
    multiply a candidate's chance, and express both.
    """
    candidates: dict[int, _Candidate] = {}
    silence = 0.0  # the votes for a token that no kind holds
    others = 1.0  # chance of all tokens that are not candidates
    for kind, entry, amount, belief in known:
        cast = pool.credence.votes[kind, amount].tolist()
        silence += cast[0]
        of_entry = (array[entry].tolist() for array in (pool.table.tokens, pool.table.weights, pool.table.sources))
        for token, weight, source in zip(*of_entry, strict=True):
            if weight > 0:
                candidate = candidates.setdefault(token, _Candidate(source))
                candidate.chance += belief * weight
                others -= belief * weight
                candidate.tilt += cast[_class(weight)] - cast[0]
    total = max(others, MIN_REST)
    for candidate in candidates.values():
        candidate.chance *= math.exp(min(silence + candidate.tilt, MAX_VOTES))
        total += candidate.chance
    for candidate in candidates.values():
        candidate.chance /= total
    return candidates


def _calibrate(pool: Pool, context: Tokens, tokens: Tokens, probabilities: Sequence[float]) -> None:
    """Learn from what followed one context: the beliefs, by a step of online expectation maximisation on the weights of
    the mixture, and the votes, by a step of gradient descent on the log loss. `bound` must follow."""
    known, rest = _look_up(pool, context)
    for token, candidate in _mix(pool, known).items():
        observed = 0.0
        for other, probability in zip(tokens, probabilities, strict=True):
            if other == token:
                observed += probability
        for kind, entry, amount, _ in known:
            of_class = _class(_held(pool.table, entry, token))
            pool.credence.votes[kind, amount, of_class] += STEP * (observed - candidate.chance)
    for token, probability in zip(tokens, probabilities, strict=True):
        if probability <= 0:
            continue
        credits, total = [], max(rest, MIN_REST) * OUTSIDE
        for _, entry, _, belief in known:
            credits.append(belief * _held(pool.table, entry, token))
            total += credits[-1]
        left = 1.0  # credit for the token that earlier kinds have left over
        for (kind, entry, amount, _), credit in zip(known, credits, strict=True):
            cell = pool.credence.belief[kind, amount, _peak(pool.table, entry)]
            told, times = cell.tolist()
            keep = 1 - (1 - FADE) * probability * left
            cell[:] = told * keep + probability * credit / total, times * keep + probability * left
            left = max(left - credit / total, 0.0)


def _race(draws: np.ndarray, candidates: dict[int, _Candidate]) -> None:
    """Change the candidates' chances for known draws: the token with the largest probability / variate comes next.

    If the chances were the model's probabilities, the winner would be certain. If a chance were the probability that
    the model is sure of this token, the draws would not matter. They are in between, so both get an exponent.
    draws: float32 [vocabulary], the variate of each token.
    """
    others = 1.0
    for candidate in candidates.values():
        others -= candidate.chance
    total = max(others, MIN_REST) * RACE_OTHERS
    for token, candidate in candidates.items():
        variate = float(draws[token]) if token < len(draws) else 1.0
        candidate.chance = candidate.chance**RACE_CHANCE * max(variate, MIN_VARIATE) ** -RACE_VARIATE
        total += candidate.chance
    for candidate in candidates.values():
        candidate.chance /= total


def grow(
    pool: Pool, context: np.ndarray, min_probability: float, max_depth: int, is_chain: bool, draws: np.ndarray,
    drawn: int, vocabulary: int, nodes: np.ndarray, joints: np.ndarray, budget: int,
) -> int:  # fmt: skip
    """Grow the most likely tree below ``context`` (int64 [LONGEST]) best-first, and lay it out depth-first.

    draws: float32 [drawn, vocabulary], the variates of the first depths.
    nodes, joints: tokens, parents, depths and sources (int64 [4, budget]) and probabilities (float64 [budget]) of a
    `GuessTree`. They are filled from the front. Returns the number of nodes; -1 without memory.
    """
    paths, found = [context.tolist()], [(-1, -1, 0, -1, 1.0)]  # of the root, then of each node
    frontier: list[tuple[float, int, int, int]] = []  # negative probability, parent, token, origin
    while True:
        newest, (_, _, depth, _, joint) = len(found) - 1, found[-1]
        if depth < max_depth:
            candidates = _mix(pool, _look_up(pool, paths[newest])[0])
            if depth < drawn:
                _race(draws[depth], candidates)
            for token, candidate in candidates.items():
                chance = joint * candidate.chance
                if chance > min_probability:
                    heapq.heappush(frontier, (-chance, newest, token, candidate.origin))
        if newest == budget or not frontier:
            break
        negative, parent, token, source = heapq.heappop(frontier)
        if is_chain:
            frontier.clear()
        paths.append([*paths[parent][1:], token])
        found.append((parent, token, found[parent][2] + 1, source, -negative))
    places = _laid_out([node[0] for node in found])
    for place, (parent, token, depth, source, joint) in zip(places[1:], found[1:], strict=True):
        nodes[:, place], joints[place] = (token, places[parent], depth, source), joint
    return len(found) - 1


def _laid_out(parents: list[int]) -> list[int]:
    """Return the place of each node in depth-first order, siblings as they are. Node 0 is the root, at -1."""
    sizes = [1] * len(parents)  # nodes in each node's subtree
    for node in range(len(parents) - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    places, next_child = [-1], [0] * len(parents)
    for node in range(1, len(parents)):
        places.append(next_child[parents[node]])
        next_child[parents[node]] += sizes[node]
        next_child[node] = places[node] + 1
    return places
