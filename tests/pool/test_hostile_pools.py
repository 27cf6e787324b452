"""Pool files that were damaged by chance, and files with a valid checksum that were made to do harm.

Any of them either raises PoolFileError or is a pool that keeps its invariants, whatever is done with it then.
LOOKAHEAD_CASES=2000 tries that many of each kind.
"""

import json
import os
import random
import warnings
from copy import deepcopy

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_pool import learn_something, random_text

from ngram_pool import NgramPool, PoolFileError, storage
from ngram_pool.table import LONGEST, MAX_TIMES, MAX_VOTES, MIN_TOLD, ROUNDING, WAYS

many = settings(
    max_examples=int(os.environ.get("LOOKAHEAD_CASES", 100)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def honest():
    pool, rng = NgramPool(0.05, vocabulary="abc"), random.Random(0)
    for _ in range(5):
        learn_something(pool, rng)
    return pool


@pytest.fixture(scope="module")
def content(honest, tmp_path_factory):
    path = tmp_path_factory.mktemp("pools") / "honest.pool"
    honest.save(path)
    return path.read_bytes()


def parts(content: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header, which still describes the arrays, and the arrays of a sound file."""
    head_length = storage._FIELDS.unpack_from(content)[2]
    header = json.loads(content[storage._PREAMBLE : storage._PREAMBLE + head_length])
    arrays, at = {}, storage._PREAMBLE + head_length
    for name, dtype, shape in header["arrays"]:
        arrays[name] = np.frombuffer(content, dtype, int(np.prod(shape)), at).reshape(shape).copy()
        at += arrays[name].nbytes
    return header, arrays


def forged(head: bytes, body: bytes) -> bytes:
    """A file with a valid checksum."""
    fields = storage._FIELDS.pack(storage.MAGIC, storage.VERSION, len(head), storage._PREAMBLE + len(head) + len(body))
    return fields + xxhash.xxh3_128(fields + head + body).digest() + head + body


def bytes_of(arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays.values())


def joined(header: dict, arrays: dict[str, np.ndarray]) -> bytes:
    return forged(json.dumps(header).encode(), bytes_of(arrays))


def assert_keeps_its_promises(pool: NgramPool, honest: NgramPool, path, seed: int) -> None:
    """Through whatever is done with a pool."""
    rng = random.Random(seed)

    def check(pool: NgramPool) -> None:
        pool.check_integrity()
        for _ in range(4):
            tree = pool.guess(random_text(rng, rng.randint(0, LONGEST), 8), 40, chain=rng.random() < 0.3)
            above = np.append(tree.probabilities, 1.0)[tree.parents]
            assert np.isfinite(tree.probabilities).all()
            assert ((tree.probabilities >= 0) & (tree.probabilities <= above)).all()
            assert tree.tokens.max(initial=-1) <= pool.largest_token

    check(pool)
    pool.vocabulary = honest.vocabulary  # of another, it would not be merged
    start = deepcopy(pool)
    for _ in range(2):
        learn_something(pool, rng)
        pool.follow(random_text(rng, 40, 8), start=3)
        check(pool)
    empty = NgramPool(0.05)
    for ours, theirs in ((honest, pool), (pool, honest), (pool, pool), (empty, pool), (start, pool)):
        since = start if ours is start else None
        merged = deepcopy(ours)
        merged.merge(theirs, since)
        check(merged)
        merged.merge(merged)
        check(merged)
    pool.by_source()
    pool.most_confident()
    assert 0 <= len(pool) <= pool.capacity
    for saved in (pool, merged):
        saved.save(path)
        check(NgramPool.load(path))


def try_to_load(content: bytes, honest: NgramPool, path, seed: int) -> None:
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            pool = NgramPool.load(path)
        except PoolFileError as error:
            event(str(error).partition(path.name)[2].partition(":")[0])
        else:
            event("loads")
            assert_keeps_its_promises(pool, honest, path, seed)


WHOLE = st.sampled_from([0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**300])
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), WHOLE, WHOLE.map(lambda n: -n), st.floats(), st.text(max_size=5),
        st.sampled_from(["|O", ">i4", "<i4", "<f8", "i4,i4", "V9", "<U2147483647", "("]),
        st.sampled_from(["\ud800", "\x1b[2J"]),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["clock", "arrays", "é"]), inner),
    max_leaves=5,
)  # fmt: skip
NUMBERS = {
    "f": [0.0, -0.0, 1e-308, 5e-324, MIN_TOLD, 1e-45, 0.3, 1.0, 1 + ROUNDING, 1 + 2 * ROUNDING, 1.5, 20.0, MAX_VOTES,
          -MAX_VOTES, 51.0, MAX_TIMES, 2002.0, 1e38, 1e308, -1e308, -1.0, np.inf, -np.inf, np.nan],
    "i": [-(2**31), -1, 0, 1, 7, 8, 2**31 - 1],
    "u": [0, 1, 2, 4, 5, 8, 128, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1],
}  # fmt: skip


@st.composite
def changes(draw, shape: tuple[int, ...], dtype: np.dtype):
    """Hostile values, and where in an array of this shape they stand."""
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = np.array(draw(st.sampled_from(NUMBERS[dtype.kind]))).astype(dtype)
    if draw(st.booleans()):
        return slice(None), value
    row = draw(st.integers(0, shape[0] - 1))
    if draw(st.booleans()):
        return row, value
    return (row, *(draw(st.integers(0, side - 1)) for side in shape[1:])), value


def go_to_the_bounds(header: dict, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Values that nobody would learn, as far out as a sound pool may hold them."""
    used = arrays["keys"] != 0
    for name in rng.permutation(["clock", "observations", "learned_at", "counts", "weights", "belief", "votes"])[:4]:
        if name in ("clock", "observations"):
            header[name] = int(rng.choice([0, 2**32 - 1, 2**32, 2**63 - 1]))
            continue
        array = arrays[name]
        if name == "counts":
            array[used, 0] = rng.choice([1, 2, 254, 255], used.sum())
            array[used, 1] = np.minimum(array[used, 0], rng.choice([0, 1, 255], used.sum()))
        elif name == "learned_at":
            array[:] = rng.choice([0, 1, 2**31, 2**32 - 1], len(array))
        elif name == "weights":
            array[used] = rng.choice(np.array([0, 1e-45, 1e-30, 1, 50], np.float32), array[used].shape)
            sums = array[used].sum(1, keepdims=True)
            array[used] *= np.where(sums > 1, (1 + 2 * ROUNDING) * (1 - 2e-7) / np.maximum(sums, 1), 1)
            arrays["tokens"][used] = rng.permuted(np.tile(np.arange(8), (used.sum(), 1)), axis=1)
        elif name == "belief":
            array[..., 1] = rng.choice([1, 20, MAX_TIMES], array.shape[:-1])
            array[..., 0] = rng.choice([MIN_TOLD, 1e-9, 0.5, 1, 20, MAX_TIMES], array.shape[:-1])
            array[..., 0] = array.min(-1)
        else:
            array[:] = rng.choice([-MAX_VOTES, -1, 0, MAX_VOTES], array.shape)


@st.composite
def hostile(draw, content: bytes) -> bytes:
    header, arrays = parts(content)
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.sampled_from(["bounds", "bounds", "field", "array", "rows", "bytes", "described", "head"]))
        name = draw(st.sampled_from(sorted(arrays)))
        array = arrays[name]
        if what == "bounds":
            go_to_the_bounds(header, arrays, np.random.default_rng(draw(st.integers(0, 2**32))))
        elif what == "field":
            fields = ["clock", "observations", "largest", "vocabulary", "arrays", "more"]
            header[draw(st.sampled_from(fields))] = draw(JSON)
        elif what == "array":
            places, value = draw(changes(array.shape, array.dtype))
            array[places] = value
        elif what == "rows":  # of one array or of all, in another place or twice
            one, other = (draw(st.integers(0, len(array) - 1)) for _ in range(2))
            for column in arrays.values() if draw(st.booleans()) else [array]:
                column[one % len(column)] = column[other % len(column)]
        elif what == "bytes":
            rng = np.random.default_rng(draw(st.integers(0, 2**32)))
            raw = array.reshape(-1).view(np.uint8)
            count = draw(st.integers(1, 8) | st.just(len(raw)))
            raw[rng.integers(0, len(raw), count)] = rng.integers(0, 256, count)
        elif what == "described":
            described = header.get("arrays")
            if not isinstance(described, list) or not described:
                continue
            at, part = draw(st.integers(0, len(described) - 1)), draw(st.integers(-2, 2))
            if part < 0 or not isinstance(described[at], list) or len(described[at]) != 3:
                described.append(described[at]) if part == -1 else described.pop(at)
            else:
                described[at] = [*described[at]]
                described[at][part] = draw(JSON | st.lists(WHOLE | WHOLE.map(lambda n: -n), max_size=3))
        elif draw(st.booleans()):
            heads = [
                b"",
                b"{}",
                b"null",
                b"[" * 60_000,
                b"[" * 100_000,
                b'{"a":' * 10_000,
                b"\xff\xfe",
                b'{"arrays": []}',
            ]
            return forged(draw(st.sampled_from(heads) | JSON.map(lambda value: json.dumps(value).encode())), draw(BODY))
    body = bytes_of(arrays)
    cut = draw(st.sampled_from([0] * 20 + [1, 8, len(body)]))
    return forged(json.dumps(header).encode(), body[cut:])


BODY = st.binary(max_size=20)


@many
@given(st.data(), st.integers(0, 2**32))
def test_hostile_files(content, honest, tmp_path, data, seed):
    try_to_load(data.draw(hostile(content)), honest, tmp_path / "hostile.pool", seed)


@many
@given(st.data())
def test_corrupted_files(content, tmp_path, data):
    """Parts that are lost, doubled, moved, zeroed or altered, as disks, networks and editors do."""
    damaged = bytearray(content)
    where = st.integers(1, len(content) - 1) | st.integers(storage._PREAMBLE, 600) | st.integers(0, storage._PREAMBLE)
    for _ in range(data.draw(st.integers(1, 3))):
        start, length = data.draw(where), data.draw(st.integers(1, 64) | st.integers(1, len(content)))
        run = bytes(damaged[start : start + length])
        damaged[start : start + length] = data.draw(
            st.sampled_from([b"", run + run, run[::-1], bytes(len(run)), bytes(byte ^ 32 for byte in run)])
            | st.binary(min_size=len(run), max_size=len(run))
        )
    path = tmp_path / "corrupted.pool"
    path.write_bytes(damaged)
    if bytes(damaged) == content:
        NgramPool.load(path).check_integrity()
        return
    with pytest.raises(PoolFileError) as refused:
        NgramPool.load(path)
    event(str(refused.value).partition(path.name)[2].partition(":")[0])


def test_no_entry_outgrows_its_bound_by_merging(content, tmp_path):
    """However often, where each merge's rounding would add to the one before."""
    header, arrays = parts(content)
    used, path, pools = arrays["keys"] != 0, tmp_path / "full.pool", []
    for seed in range(2):
        weights = np.random.default_rng(seed).random(arrays["weights"].shape)
        weights = (weights * (1 + 2 * ROUNDING) / weights.sum(1, keepdims=True)).astype(np.float32)
        while (over := weights.sum(1, dtype=float) > 1 + 2 * ROUNDING).any():
            weights[over, 0] = np.nextafter(weights[over, 0], np.float32(0))
        arrays["weights"][used] = weights[used]
        arrays["tokens"][:] = np.arange(weights.shape[1])
        path.write_bytes(joined(header, arrays))
        pools.append(NgramPool.load(path))
    for _ in range(20):
        pools[0].merge(pools[1])
        pools[0].check_integrity()


def test_a_clock_that_begins_again(content, tmp_path):
    """Pools that began as one are merged as if it went on."""
    header, arrays = parts(content)
    header["clock"] = 2**32 - 1
    path, pools = tmp_path / "old.pool", []
    for learned in (0, 3, 10):
        path.write_bytes(joined(header, arrays))
        pool = NgramPool.load(path)
        pool.learn(range(learned))
        pool.save(path)
        pools.append(NgramPool.load(path))
    base, ours, theirs = pools
    ours.merge(theirs, since=base)
    ours.save(path)
    assert storage.read(path)[0]["clock"] == 3 + 10 - 1
    NgramPool.load(path).check_integrity()


def with_field(name, value):
    return lambda header, arrays: header.update({name: value})


def with_value(name, places, value):
    def change(header, arrays):
        arrays[name][places] = value

    return change


def with_described(change):
    return lambda header, arrays: change(header["arrays"])


@pytest.mark.parametrize(
    "change",
    [
        *(with_field("clock", value) for value in (10**30, -1, True, 1.5, None, "7")),
        *(with_field("observations", value) for value in (-1, 2**63, False)),
        *(with_field("largest", value) for value in (2**31, -2, True)),
        *(with_field("vocabulary", value) for value in (7, "\ud800", "\x1b[2J", "x" * 70_000)),
        with_field("arrays", {}),
        with_described(lambda described: described.append(described[0])),
        *(with_described(lambda described, shape=shape: described[0].__setitem__(2, shape))
          for shape in ([10**30], [], [-1], [True], [2**40, 0], "7", None)),
        *(with_described(lambda described, dtype=dtype: described[0].__setitem__(1, dtype))
          for dtype in ("|O", ">u8", "<u4", "V8", ["<u8"], 8, None)),
        *(with_described(lambda described, name=name: described[0].__setitem__(0, name))
          for name in ("tokens", "others", None, ["keys"])),
        with_value("belief", np.s_[..., 1], 1e-308),
        with_value("belief", np.s_[..., 0], 1e-308),
        with_value("belief", np.s_[..., 0], 1e308),
        with_value("belief", np.s_[0, 0, 0], np.nan),
        with_value("votes", np.s_[:], 1e308),
        with_value("votes", 3, -1e308),
        with_value("votes", 3, np.nan),
    ],
)  # fmt: skip
def test_fields_that_would_do_harm(content, tmp_path, change):
    header, arrays = parts(content)
    change(header, arrays)
    path = tmp_path / "hostile.pool"
    path.write_bytes(joined(header, arrays))
    with pytest.raises(PoolFileError):
        NgramPool.load(path)


@pytest.mark.parametrize(
    ("name", "used", "value", "flaw"),
    [
        ("weights", True, -0.1, "negative or not finite"),
        ("weights", True, np.nan, "negative or not finite"),
        ("weights", True, [np.inf, -np.inf, *[0.0] * 6], "negative or not finite"),
        ("weights", True, 0.13, "more than 1"),
        ("weights", False, 0.1, "an empty entry holds evidence"),
        ("counts", False, 1, "an empty entry holds evidence"),
        ("counts", True, 0, "counts are inconsistent"),
        ("counts", True, [1, 2], "counts are inconsistent"),
        ("tokens", True, 3, "an entry holds a token twice"),
        ("tokens", True, np.arange(8) + 1, "a token is out of range"),
        ("tokens", False, -1, "a token is out of range"),
        ("sources", True, 5, "a source is unknown"),
        ("keys", True, 2**64 - 1, "outside its key's bucket"),
    ],
)
def test_entries_that_would_do_harm(content, tmp_path, name, used, value, flaw):
    """Each is refused for its own fault; a few entries suffice."""
    header, arrays = parts(content)
    for column in ("keys", "counts"):
        arrays[column][:WAYS] = 0  # the pool is full
    held = arrays["keys"] != 0
    arrays["weights"][:] = np.where(held[:, None], np.float32(0.1), 0)
    arrays["tokens"][:] = np.arange(8)
    path = tmp_path / "hostile.pool"
    path.write_bytes(joined(header, arrays))
    NgramPool.load(path)
    arrays[name][np.flatnonzero(held if used else ~held)[:3]] = value
    path.write_bytes(joined(header, arrays))
    with pytest.raises(PoolFileError, match=flaw):
        NgramPool.load(path)


@pytest.mark.parametrize("more", [-1, 1, 10**6])
def test_headers_that_describe_more_or_less_than_there_is(content, tmp_path, monkeypatch, more):
    """Before anything is allocated."""
    header, arrays = parts(content)
    next(described for described in header["arrays"] if described[0] == "weights")[2][1] += more
    path = tmp_path / "hostile.pool"
    path.write_bytes(joined(header, arrays))
    monkeypatch.delattr(storage.np, "empty")
    with pytest.raises(PoolFileError, match=r"bytes of arrays, but the header describes|has room for"):
        NgramPool.load(path)


def test_a_key_that_stands_twice_is_refused(content, tmp_path):
    header, arrays = parts(content)
    keys = arrays["keys"].reshape(-1, WAYS)
    bucket = keys[(keys != 0).sum(1).argmax()]
    bucket[1] = bucket[0]
    path = tmp_path / "hostile.pool"
    path.write_bytes(joined(header, arrays))
    with pytest.raises(PoolFileError, match="a key occurs twice"):
        NgramPool.load(path)


@pytest.mark.parametrize(
    "head", [b"[" * 60_000, b"[" * 100_000, b"7", b"{", b"\xff", b'{"clock": ' + b"9" * 5000 + b"}"]
)
def test_headers_that_would_do_harm(tmp_path, head):
    path = tmp_path / "hostile.pool"
    path.write_bytes(forged(head, b""))
    with pytest.raises(PoolFileError):
        NgramPool.load(path)
