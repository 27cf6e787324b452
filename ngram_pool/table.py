"""The table of a pool: its layout and its constants.

`table.h` and `mixture.h` repeat those that the loops in C++ need.
"""

from typing import NamedTuple

import numpy as np

from ngram_pool.memory import check_fits

# Kinds of contexts, the most specific first: (skip, length) are the tokens at distances skip+1 .. length before the
# next one. Two kinds skip the newest token. So they have evidence even if the newest token is rare, or if the model
# rejected a guess and chose another token instead.
KINDS = ((0, 16), (0, 8), (0, 3), (0, 2), (1, 3), (0, 1), (1, 2), (0, 0))
LONGEST = 16  # tokens of the longest context
WIDTH = 8  # next tokens in an entry
WAYS = 4  # entries in a bucket
NO_TOKEN = -1  # a gap between texts; nothing is learned across it

# Prior belief in each kind, by class of its highest probability. It counts as PRIOR_STRENGTH observations. Each
# observation multiplies the weight of earlier ones by FADE.
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
# Numbers of classes, which `reference` defines: of the highest probability in an entry (`_peak`), of its amount of
# evidence (`_amount`), and of the weight that it gives a token (`_class`). A kind has a vote for each class of weights.
PEAKS, AMOUNTS, CLASSES = PRIOR.shape[1], 6, 6
STEP = 0.02  # of the gradient descent that learns the votes
MAX_VOTES = 50.0  # bound on each vote, and on the sum of a candidate's votes, so that exp() does not overflow
# A belief is a fraction: credits of next tokens to the kind (told), divided by observations (times).
MIN_TOLD = 1e-100  # keeps the belief above 0
MIN_TIMES, MAX_TIMES = 1.0, 1.001 / (1 - FADE)  # with FADE, times stay below 1 / (1 - FADE)
OUTSIDE = 1e-4  # probability of a token that no context holds
MIN_REST = 1e-9  # least probability that the kinds leave to all those tokens together
# Exponents of a candidate's chance and of its known variate, and the factor for the chance of all other tokens. They
# were fitted to texts of a model of 135 million parameters at temperatures 0.7 and 1.0.
RACE_CHANCE, RACE_VARIATE, RACE_OTHERS = 0.85, 0.6, 2.4
MIN_VARIATE = 1e-12

# Weight of a new observation by origin (prompt, text, logits, jacobi, file) in an entry that has several. So newer
# evidence outweighs older. The empty context forgets slowly.
RATES = 0.25, 0.25, 0.65, 0.15, 0.1
SLOW_RATE = 0.02
TEXT, LOGITS = 1, 2

ROUNDING = 0.001  # a row's probabilities may add up to this much above 1, an entry's to twice as much above 1

# Multilinear hashing modulo 2**64 (Lemire and Kaser 2014, arXiv 1202.4961): a fixed random odd multiplier for each
# distance from the end of the context, and a salt for each kind.
_random = np.random.PCG64(0x6C6F6F6B).random_raw  # saved pools need this stream; numpy promises not to change it
MULTIPLIERS = tuple((_random(LONGEST) | np.uint64(1)).tolist())
SALTS = tuple(_random(len(KINDS)).tolist())
EMPTY = 0  # the key of an entry that holds nothing

# Errors of `learn_step` for numbers out of range, and their messages.
NO_IDS, NO_PARENTS, NO_DISTRIBUTIONS = -2, -3, -4
FLAWS = {
    NO_IDS: "token ids must lie in 0..2**31-1",
    NO_PARENTS: "the parent of each guess must be an earlier one, or -1",
    NO_DISTRIBUTIONS: "probabilities and the sum of each row must lie in 0..1, without NaN",
}

_PIECE = 2**14 * WAYS  # entries that `flaw` checks at a time, to need little memory


class Table(NamedTuple):
    """n entries in buckets of WAYS. Entry i holds the evidence of the context with hash ``keys[i]``.

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

    The table is written, so that the system provides its memory now, and not page by page during decoding.
    """
    check_fits(entries * ENTRY_BYTES)
    return Table(*(np.full((entries, width) if width > 1 else entries, 0, kind) for kind, width in _COLUMNS))


class Credence(NamedTuple):
    """The belief in each kind of context. `calibrate` learns it, `bound` keeps it within bounds.

    belief: float64 [kinds, AMOUNTS, PEAKS, 2], credits of next tokens to a kind, and the number of observations.
    votes: float64 [kinds, AMOUNTS, CLASSES], what a kind adds to the log of a candidate's chance.
    """

    belief: np.ndarray
    votes: np.ndarray


def prior_credence() -> Credence:
    belief = np.full((len(KINDS), AMOUNTS, PEAKS, 2), PRIOR_STRENGTH)
    belief[..., 0] *= PRIOR[:, None, :]
    return Credence(belief, np.zeros((len(KINDS), AMOUNTS, CLASSES)))


def bound(credence: Credence) -> None:
    """Bring beliefs and votes back within bounds, which rounding and endless learning may exceed."""
    np.clip(credence.votes, -MAX_VOTES, MAX_VOTES, out=credence.votes)
    told, times = credence.belief[..., 0], credence.belief[..., 1]
    np.clip(times, MIN_TIMES, MAX_TIMES, out=times)
    np.clip(told, MIN_TOLD, times, out=told)


def are_ids(tokens: np.ndarray) -> bool:
    """Whether all tokens lie in 0..2**31-1."""
    return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < 2**31)


def are_distributions(probabilities: np.ndarray) -> bool:
    """Whether no probability is negative or NaN, and each row's sum is at most 1, except for rounding."""
    return bool((probabilities >= 0).all() and (probabilities.cumsum(1) <= 1 + ROUNDING).all())


def flaw(table: Table, largest: int, origins: int) -> str:
    """Say which invariant a table breaks, whose columns have the right shapes; "" if none.

    largest: the largest token that it may hold. origins: number of origins.
    """
    buckets = len(table.keys) // WAYS
    for first in range(0, len(table.keys), _PIECE):
        piece = Table(*(column[first : first + _PIECE] for column in table))
        if found := _flaw_in_piece(piece, first // WAYS, buckets, largest, origins):
            return found
    return ""


def _flaw_in_piece(table: Table, bucket: int, buckets: int, largest: int, origins: int) -> str:
    """bucket: the first bucket of the piece. buckets: their number in the whole table."""
    tokens, weights, held, keys = table.tokens, table.weights, table.weights > 0, table.keys.reshape(-1, WAYS)
    (seen, rows), is_used = table.counts.T, table.keys != EMPTY
    if not ((weights >= 0) & (weights < np.inf)).all():
        return "a weight is negative or not finite"
    total = weights.sum(1, dtype=float)
    if (tokens < 0).any() or (tokens[held] > largest).any():
        return "a token is out of range"
    if (table.sources >= origins).any():
        return "a source is unknown"
    pairs = (tokens[:, :, None] == tokens[:, None, :]) & held[:, :, None] & held[:, None, :]
    if np.count_nonzero(pairs) > np.count_nonzero(held):  # each token forms a pair with itself
        return "an entry holds a token twice"
    if ((seen > 0) | (rows > 0) | (total > 0))[~is_used].any():
        return "an empty entry holds evidence"
    of_key = (keys >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
    if ((of_key != bucket + np.arange(len(keys))[:, None]) & (keys != EMPTY)).any():
        return "an entry is outside its key's bucket"
    in_order = np.sort(keys)
    if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != EMPTY)).any():
        return "a key occurs twice"
    if ((seen == 0) | (rows > seen))[is_used].any():
        return "counts are inconsistent"
    if (total > 1 + 2 * ROUNDING).any():
        return "an entry's probabilities add up to more than 1"
    return ""
