"""One table for all evidence about which token follows which context.

    key      64-bit hash of the last k tokens, for each order k in ORDERS
    entry    up to WIDTH next tokens with weights and sources, and the evidence they rest on
    table    fixed arrays of buckets of WAYS entries; a new key evicts the bucket's least recently learned entry

Two contexts that hash alike share an entry. That can only make a guess worse: every guess is verified by the model.
"""

import heapq
import threading

import numpy as np

from ngram_pool.tree import GuessTree, Source

ORDERS = (1, 2, 3, 4, 6, 8)
LONGEST = ORDERS[-1]
WIDTH = 8
WAYS = 4
NO_TOKEN = -1  # fills the left of a context shorter than LONGEST
CHUNK = 65_536  # positions of text learned at once, which bounds the memory that learning takes

# Multilinear hashing (Lemire and Kaser 2014, arXiv 1202.4961): fixed random odd multipliers, one a distance from the
# end of the context, and one salt an order; arithmetic is modulo 2**64.
_random = np.random.default_rng(0x6C6F6F6B)
_MULTIPLIERS = _random.integers(1, 2**63, LONGEST, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SALTS = _random.integers(1, 2**63, len(ORDERS), dtype=np.uint64)
_MULTIPLIER_INTS = _MULTIPLIERS.tolist()
_SALT_AT = dict(zip(ORDERS, _SALTS.tolist(), strict=True))
_MASK = 2**64 - 1

_ENTRY = np.dtype([
    ("key", np.uint64),
    ("learned_at", np.uint32),
    ("evidence", np.float32),
    ("tokens", np.int32, WIDTH),
    ("weights", np.float32, WIDTH),
    ("sources", np.uint8, WIDTH),
])  # fmt: skip

# What one observation of a source does to an entry: weights and evidence so far are multiplied by `keep`, then the
# observed distribution is added `gain` times. Newer evidence so outweighs older.
KEEP = np.zeros(len(Source))
GAIN = np.zeros(len(Source))
KEEP[Source.PROMPT], GAIN[Source.PROMPT] = 0.5, 1.0
KEEP[Source.TEXT], GAIN[Source.TEXT] = 0.9, 0.3
KEEP[Source.LOGITS], GAIN[Source.LOGITS] = 0.35, 1.0
KEEP[Source.JACOBI], GAIN[Source.JACOBI] = 0.9, 0.2
_LOG_KEEP = np.log(KEEP)

# Back-off (after Witten and Bell 1991): an order with evidence n is believed n / (n + DOUBT[order]); the rest of the
# belief goes to the shorter orders.
DOUBT = {1: 0.3, 2: 1.0, 3: 0.7, 4: 0.5, 6: 0.3, 8: 0.2}


class NgramPool:
    """Evidence from text, logits and Jacobi trajectories, in memory fixed at construction.

    All methods may be called from several threads: one lock makes each of them atomic.
    """

    def __init__(self, memory_mb: float = 16):
        """Raises ValueError if ``memory_mb`` (MiB) holds no bucket."""
        buckets = int(memory_mb * 2**20 / (_ENTRY.itemsize * WAYS)) if memory_mb > 0 else 0
        if buckets < 1:
            raise ValueError(f"memory_mb={memory_mb} holds no entry; give at least 0.001")
        self.__setstate__((np.zeros(buckets * WAYS, _ENTRY), 0))

    def __getstate__(self) -> tuple[np.ndarray, int]:
        self.absorb()
        return self._table, self._clock

    def __setstate__(self, state: tuple[np.ndarray, int]) -> None:
        # One record an entry, so that touching it costs one cache line or page and not one for each field.
        self._table, self._clock = state
        self._buckets = len(self._table) // WAYS
        self._keys = self._table["key"].reshape(self._buckets, WAYS)
        self._learned_at = self._table["learned_at"].reshape(self._buckets, WAYS)
        self._tokens, self._weights = self._table["tokens"], self._table["weights"]
        self._sources, self._evidence = self._table["sources"], self._table["evidence"]
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the same for ever."""
        return self._table.nbytes

    def __len__(self) -> int:
        """Number of contexts held."""
        self.absorb()
        return int(np.count_nonzero(self._keys))

    # Learning

    def learn(self, tokens, source: Source = Source.TEXT, start: int = 0) -> None:
        """Learn every (context, next token) of ``tokens`` whose next token stands at index ``start`` or later.

        tokens: sequence of ids; ``tokens[:start]`` serves as context only.
        Raises ValueError for ids outside 0..2**31-1.
        """
        tokens = _ids(tokens)
        start = max(start, 1)
        padded = np.concatenate([np.full(LONGEST, NO_TOKEN), tokens])
        chunk = max(min(CHUNK, len(self._table) // (8 * len(ORDERS))), 1)
        for begin in range(start, len(tokens), chunk):
            end = min(begin + chunk, len(tokens))
            contexts = np.lib.stride_tricks.sliding_window_view(padded[begin : end + LONGEST - 1], LONGEST)
            self._observe(contexts, tokens[begin:end, None], np.ones((end - begin, 1)), source)

    def learn_next(self, contexts, tokens, probabilities, source=Source.LOGITS) -> None:
        """Learn distributions over the next token.

        source: that of all rows, or one a row [n].
        contexts: int [n, c], the tokens before, newest last; shorter ones are filled with NO_TOKEN on the left.
        tokens: int [n, k], distinct in a row. probabilities: float [n, k], in 0..1, a row's sum at most 1.
        Raises ValueError for ids or probabilities out of range, NaN included, and for shapes that do not fit.
        """
        contexts, tokens = np.asarray(contexts, np.int64), _ids(tokens)
        probabilities = np.asarray(probabilities, np.float64)
        if contexts.ndim != 2 or tokens.ndim != 2 or tokens.shape != probabilities.shape:
            raise ValueError(
                f"contexts {contexts.shape}, tokens {tokens.shape} and probabilities {probabilities.shape} must be "
                "[n, c], [n, k] and [n, k]"
            )
        if len(contexts) != len(tokens):
            raise ValueError(f"{len(contexts)} contexts but {len(tokens)} rows of tokens")
        if not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise ValueError("probabilities must lie in 0..1; NaN and larger values are refused")
        missing = LONGEST - contexts.shape[1]
        if missing > 0:
            contexts = np.pad(contexts, ((0, 0), (missing, 0)), constant_values=NO_TOKEN)
        self._observe(contexts[:, -LONGEST:], tokens, probabilities, source)

    def learn_ngrams(self, ngrams, source: Source = Source.JACOBI) -> None:
        """Learn each n-gram (int [m, n], n >= 2) as text of its own: its first token predicts the second, and so on."""
        ngrams = _ids(ngrams)
        if ngrams.ndim != 2 or ngrams.shape[1] < 2:
            raise ValueError(f"n-grams must be [m, n] with n of at least 2, not {ngrams.shape}")
        count, n = ngrams.shape
        padded = np.concatenate([np.full((count, LONGEST), NO_TOKEN), ngrams], axis=1)
        views = np.lib.stride_tricks.sliding_window_view(padded, LONGEST, axis=1)
        contexts = views[:, 1:n].reshape(-1, LONGEST)
        self._observe(contexts, ngrams[:, 1:].reshape(-1, 1), np.ones((count * (n - 1), 1)), source)

    def _observe(self, contexts: np.ndarray, tokens: np.ndarray, weights: np.ndarray, source) -> None:
        """Note observations for all orders that their contexts reach; a row holds one's tokens and weights."""
        keys, rows = _hash_orders(contexts)
        if len(keys):
            if tokens.shape[1] > WIDTH:
                best = np.argpartition(-weights, WIDTH - 1, axis=1)[:, :WIDTH]
                tokens, weights = np.take_along_axis(tokens, best, 1), np.take_along_axis(weights, best, 1)
            elif tokens.shape[1] < WIDTH:
                tokens, weights = _widened(tokens), _widened(weights)
            with self._lock:
                sources = np.broadcast_to(source, len(tokens))
                self._pending.append((keys, tokens[rows], weights[rows], sources[rows]))
                if sum(len(keys) for keys, *_ in self._pending) > len(self._table) // 8:
                    self.absorb()  # what is merged at once should not evict itself

    def absorb(self) -> None:
        """Merge what was learned since the last time, all at once; `guess` does it if it was not done."""
        with self._lock:
            if not self._pending:
                return
            pending, self._pending = self._pending, []
            keys, tokens, weights, sources = (np.concatenate(parts) for parts in zip(*pending, strict=True))
            order = keys.argsort(kind="stable")  # oldest first within a key
            self._merge(keys[order], tokens[order], weights[order], sources[order])

    def _merge(self, keys: np.ndarray, tokens: np.ndarray, weights: np.ndarray, sources: np.ndarray) -> None:
        """Merge sorted observations: keys [n], tokens and weights [n, WIDTH], sources [n]."""
        is_first = np.ones(len(keys), bool)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        first = is_first.nonzero()[0]
        last = np.append(first[1:], len(keys)) - 1
        group = is_first.cumsum() - 1
        groups = len(first)
        # An observation, and what the entry held, fades by `keep` of every later observation of the same context.
        log_keep = _LOG_KEEP[sources]
        fading = log_keep.cumsum()
        scale = GAIN[sources] * np.exp(fading[last][group] - fading)
        kept = np.exp(fading[last] - fading[first] + log_keep[first])

        slots, new = self._find_or_claim(keys[first])
        held = self._table[slots]
        held["weights"][new] = 0
        held["evidence"][new] = 0
        # Rows of WIDTH items: first what the entries hold, then the observations, oldest first.
        item_weight = np.concatenate([held["weights"] * kept[:, None], weights * scale[:, None]]).ravel()
        items = item_weight.nonzero()[0]
        if len(items) == 0:
            return
        row_group = np.concatenate([np.arange(groups), group])
        item_token = np.concatenate([held["tokens"], tokens]).ravel()

        # Sum what concerns one token of one entry; the newest item names its source.
        code = (row_group[items // WIDTH] << 32) | item_token[items]
        order = code.argsort()
        code, items = code[order], items[order]
        is_first = np.ones(len(code), bool)
        np.not_equal(code[1:], code[:-1], out=is_first[1:])
        begins = is_first.nonzero()[0]
        weight = np.add.reduceat(item_weight[items], begins).astype(np.float32)
        owner, token = code[begins] >> 32, code[begins] & 0xFFFFFFFF
        item_source = np.concatenate([held["sources"].ravel(), sources.astype(np.uint8).repeat(WIDTH)])
        newest = item_source[np.maximum.reduceat(items, begins)]

        # Keep the WIDTH heaviest tokens of each entry. Positive floats are ordered as their bits are.
        order = ((owner << 32) - weight.view(np.int32)).argsort()
        owner = owner[order]
        rank = np.arange(len(owner)) - np.searchsorted(owner, np.arange(groups))[owner]
        best = rank < WIDTH
        order, owner, rank = order[best], owner[best], rank[best]
        held["key"], held["learned_at"] = keys[first], self._clock
        held["tokens"] = held["weights"] = held["sources"] = 0
        held["tokens"][owner, rank] = token[order]
        held["weights"][owner, rank] = weight[order]
        held["sources"][owner, rank] = newest[order]
        held["evidence"] = held["evidence"] * kept + np.add.reduceat(scale, first)
        self._table[slots] = held

    def _find_or_claim(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of the distinct sorted keys [g], an entry's index; and which of the keys are new.

        A new key takes the entry of its bucket that was learned longest ago; the caller overwrites it.
        """
        self._clock += 1
        buckets = self._bucket(keys)
        match = self._keys[buckets] == keys[:, None]
        way = match.argmax(1)
        is_new = ~match[np.arange(len(keys)), way]
        known = (~is_new).nonzero()[0]
        self._learned_at[buckets[known], way[known]] = self._clock
        new = is_new.nonzero()[0]
        homes = buckets[new]  # sorted, as keys are: the r-th newcomer of a bucket takes its r-th oldest entry
        nth = np.arange(len(new)) - np.searchsorted(homes, homes)
        oldest = self._learned_at[homes].argsort(1, kind="stable")
        way[new] = oldest[np.arange(len(new)), nth % WAYS]
        return buckets * WAYS + way, new

    def _bucket(self, keys: np.ndarray) -> np.ndarray:
        return (((keys >> np.uint64(32)) * np.uint64(self._buckets)) >> np.uint64(32)).astype(np.int64)

    # Guessing

    def guess(
        self, context, budget: int, min_probability: float = 0.0, max_depth: int | None = None, chain: bool = False
    ) -> GuessTree:
        """The likeliest continuations of ``context`` as one tree, grown best-first; deterministic.

        context: sequence of ids, newest last; only the last LONGEST count.
        budget: most nodes. min_probability: nodes below it are not grown. max_depth: deepest node.
        chain: a single branch, for models that cannot branch.
        """
        if budget <= 0 or max_depth == 0:
            return GuessTree.empty()
        tail = tuple(int(token) for token in context[-LONGEST:])
        limit = budget if max_depth is None else max_depth
        nodes: list[tuple[int, int, float, int]] = []
        open_nodes: list[tuple[float, int, int, int, int, tuple[int, ...]]] = []
        with self._lock:
            self.absorb()
            parent, path, probability, depth = -1, tail, 1.0, 0
            while True:
                if depth < limit:
                    for token, (share, source) in self._next(path).items():
                        joint = probability * share
                        if joint > min_probability:
                            heapq.heappush(open_nodes, (-joint, parent, token, source, depth + 1, path))
                if not open_nodes or len(nodes) == budget:
                    return GuessTree.from_nodes(nodes)
                negative, parent, token, source, depth, path = heapq.heappop(open_nodes)
                if chain:
                    open_nodes.clear()
                probability = -negative
                nodes.append((token, parent, probability, source))
                parent, path = len(nodes) - 1, (*path[1 - LONGEST :], token)

    def _next(self, tail: tuple[int, ...]) -> dict[int, tuple[float, int]]:
        """Distribution over the token after ``tail``, orders interpolated: {token: (probability, source)}."""
        entries = []
        hashed = 0
        for distance, token in enumerate(reversed(tail)):
            hashed += (token + 1) * _MULTIPLIER_INTS[distance]
            salt = _SALT_AT.get(distance + 1)
            if salt is None:
                continue
            key = (hashed + salt) & _MASK
            bucket = ((key >> 32) * self._buckets) >> 32
            ways = self._keys[bucket].tolist()
            if key not in ways:
                break  # whatever was learned of a longer context was learned of this one too
            entries.append((distance + 1, bucket * WAYS + ways.index(key)))
        found: dict[int, tuple[float, int]] = {}
        belief = 1.0
        for order, slot in reversed(entries):
            evidence = self._evidence[slot].item()
            share = belief / (evidence + DOUBT[order])
            for token, weight, source in zip(
                self._tokens[slot].tolist(), self._weights[slot].tolist(), self._sources[slot].tolist(), strict=True
            ):
                if weight <= 0:
                    break
                if token in found:
                    before, source = found[token]
                    found[token] = (before + weight * share, source)
                else:
                    found[token] = (weight * share, source)
            belief -= share * evidence
            if belief < 0.02:
                break
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table keeps its invariants; for tests."""
        self.absorb()
        used = self._keys.ravel() != 0
        homes = self._bucket(self._keys.ravel()[used])
        assert (homes == np.flatnonzero(used) // WAYS).all(), "an entry stands outside its key's bucket"
        keys = np.sort(self._keys.ravel()[used])
        assert (keys[1:] != keys[:-1]).all(), "a key stands twice"
        weights = self._weights[used]
        assert ((weights >= 0) & (weights < np.inf)).all(), "a weight is negative or not finite"
        assert (np.diff(weights, axis=1) <= 0).all(), "weights are not in falling order"
        assert (weights.sum(1) <= self._evidence[used] * 1.001 + 1e-6).all(), "weights exceed their evidence"
        for tokens, row in zip(self._tokens[used], weights, strict=True):
            held = tokens[row > 0]
            assert len(set(held.tolist())) == len(held), "a token stands twice in an entry"


def _ids(tokens) -> np.ndarray:
    tokens = np.asarray(tokens, np.int64)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**31):
        raise ValueError(f"token ids must lie in 0..2**31-1, not {tokens.min()}..{tokens.max()}")
    return tokens


def _widened(rows: np.ndarray) -> np.ndarray:
    """Rows [n, k] filled with zeros to [n, WIDTH]."""
    wide = np.zeros((len(rows), WIDTH), rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide


def _hash_orders(contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys of all orders of contexts [n, LONGEST] that are long enough: (keys [m], row of each key [m])."""
    terms = (contexts[:, ::-1] + 1).astype(np.uint64) * _MULTIPLIERS
    sums = np.cumsum(terms, axis=1, dtype=np.uint64)
    columns = np.array(ORDERS) - 1
    keys = sums[:, columns] + _SALTS
    long_enough = contexts[:, LONGEST - 1 - columns] != NO_TOKEN
    return keys[long_enough], long_enough.nonzero()[0]
