"""The loops in C++ and those in Python do the same to the last bit, and the latter serve where there is no C++."""

import os
from copy import deepcopy
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ngram_pool import GuessTree, NgramPool, Origin, cpp, native, reference
from ngram_pool import pool as pools
from ngram_pool.table import NO_TOKEN, RATES

TOKEN = st.integers(0, 5) | st.integers(0, 40)
TEXT = st.lists(TOKEN, max_size=40)
SOURCE = st.sampled_from(list(Origin))
SEED = st.integers(0, 2**32 - 1)
WHICH = st.integers(0, 1)
CHANCE = st.sampled_from([0.0, 1e-30, 0.01, 0.1, 0.25]) | st.floats(0, 0.25)
ROW = st.tuples(st.lists(TOKEN | st.just(NO_TOKEN), min_size=20, max_size=20), st.lists(CHANCE, min_size=4, max_size=4))
ROWS = st.tuples(st.lists(ROW, max_size=4), st.integers(0, 20), SEED)
NODE = st.tuples(st.integers(1, 12), TOKEN)  # distance from its parent, and its token
ACTION = st.one_of(
    st.tuples(st.just("learn"), WHICH, TEXT, SOURCE, st.integers(0, 5)),
    st.tuples(st.just("follow"), WHICH, TEXT, SOURCE, st.integers(0, 5)),
    st.tuples(st.just("learn_ngrams"), WHICH, st.lists(st.lists(TOKEN, min_size=3, max_size=3), max_size=4)),
    st.tuples(st.just("learn_next"), WHICH, ROWS, SOURCE),
    st.tuples(st.just("calibrate"), WHICH, ROWS),
    st.tuples(st.just("learn_step"), WHICH, TEXT, st.lists(NODE, max_size=12), st.lists(CHANCE, min_size=4, max_size=4),
              SEED, st.lists(st.integers(0, 2), max_size=4), st.lists(TOKEN, max_size=2),
              st.sampled_from([None] * 6 + ["ids", "parents", "chances"])),
    st.tuples(st.just("guess"), WHICH, TEXT, st.sampled_from([1, 3, 20, 300]), st.sampled_from([-1.0, 0.0, 0.01]),
              st.sampled_from([None, 1, 5]), st.booleans(), st.integers(0, 3), SEED),
    st.tuples(st.just("merge"), WHICH, WHICH, st.booleans()),
    st.tuples(st.just("kept"), WHICH),
    st.tuples(st.just("saved"), WHICH),
    st.tuples(st.just("most_confident"), WHICH),
)  # fmt: skip


def different(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens that are different within a row."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.broadcast_to(np.arange(12), (*shape[:-1], 12)), axis=-1)[..., : shape[-1]]


class World:
    """Two pools, and the one that both began as, with loops of one kind."""

    def __init__(self, loops, memory_mb: float, path):
        self.loops, self.path = loops, path
        with patch.object(pools, "loops", loops):
            self.pools, self.begun = [NgramPool(memory_mb) for _ in range(2)], NgramPool(memory_mb)

    def do(self, name: str, which: int, *arguments):
        """What an action returns, or raises."""
        with patch.object(pools, "loops", self.loops):
            action = getattr(self, name, None)
            try:
                if action is not None:
                    return action(which, *arguments)
                return getattr(self.pools[which], name)(*arguments)
            except ValueError as error:
                return str(error)

    def learn_ngrams(self, which, ngrams):
        self.pools[which].learn_ngrams(np.array(ngrams, int).reshape(-1, 3))

    def learn_next(self, which, rows, source):
        self.pools[which].learn_next(*self._arrays(*rows), source)

    def calibrate(self, which, rows):
        self.pools[which].calibrate(*self._arrays(*rows))

    @staticmethod
    def _arrays(rows, width, seed):
        contexts = np.array([context for context, _ in rows], int).reshape(-1, 20)[:, :width]
        chances = np.array([chances for _, chances in rows]).reshape(-1, 4)
        return contexts, different(seed, chances.shape), chances

    def learn_step(self, which, text, nodes, chances, seed, path, further, flaw):
        """path: which child of each guess comes true; then come further tokens."""
        parents = [max(node - back, -1) for node, (back, _) in enumerate(nodes)]
        guesses = [token for _, token in nodes]
        emitted, last = [], -1
        for child in path:
            children = [node for node, parent in enumerate(parents) if parent == last]
            if child < len(children):
                last = children[child]
                emitted.append(guesses[last])
        emitted += further
        tokens = different(seed, (1 + len(nodes), 4))
        chances = np.random.default_rng(seed).permuted(np.tile(chances, (1 + len(nodes), 1)), axis=1)
        if flaw == "ids":
            tokens[-1, -1] = 2**31
        elif flaw == "chances":
            chances[-1, -1] = np.nan
        elif flaw == "parents" and parents:
            parents[-1] = len(parents)
        self.pools[which].learn_step(text, guesses, parents, tokens, chances, emitted)

    def guess(self, which, text, budget, floor, depth, chain, drawn, seed):
        draws = np.random.default_rng(seed).exponential(size=(drawn, 8)).astype(np.float32) if drawn else None
        return self.pools[which].guess(text, budget, floor, depth, chain, draws)

    def merge(self, which, other, is_since):
        self.pools[which].merge(self.pools[other], self.begun if is_since else None)

    def kept(self, which):
        """Both go on from what this one has become."""
        self.begun = deepcopy(self.pools[which])
        self.pools[1 - which] = deepcopy(self.pools[which])

    def saved(self, which):
        self.pools[which].save(self.path)
        self.pools[which] = NgramPool.load(self.path)
        return self.path.read_bytes()

    def contents(self):
        return [
            ([array.tobytes() for array in (*pool._table, *pool._credence)], pool._clock, pool._observations,
             pool._largest)
            for pool in (*self.pools, self.begun)
        ]  # fmt: skip


def as_bytes(answer):
    return [array.tobytes() for array in vars(answer).values()] if isinstance(answer, GuessTree) else answer


def test_the_loops_in_cpp_are_installed():
    """The other tests would pass without them."""
    assert native.why_missing() is None
    assert isinstance(pools.loops, native.Library)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTION, min_size=1, max_size=15), st.sampled_from([0.0015, 0.01, 0.1]))
def test_both_kinds_of_loops_write_the_same_bits(tmp_path, actions, memory_mb):
    """Whatever is done, and also where tables are so small that they evict all the time."""
    cpp, plain = (World(loops, memory_mb, tmp_path / "a.pool") for loops in (native.loops(), reference))
    assert type(cpp.pools[0]._opened) is not type(plain.pools[0]._opened)
    for action in actions:
        assert as_bytes(cpp.do(*action)) == as_bytes(plain.do(*action)), action
        assert cpp.contents() == plain.contents(), action
        for pool in cpp.pools:
            pool.check_integrity()


def test_the_plain_loops_learn_long_texts():
    """Counts that stop at 255, and weights that have met many roundings."""
    text = np.random.default_rng(0).choice(4, 1500, p=[0.7, 0.2, 0.07, 0.03])
    cpp, plain = (World(loops, 0.1, None) for loops in (native.loops(), reference))
    for world in (cpp, plain):
        for which in (0, 1):
            world.do("follow", which, text[:: 1 - 2 * which])
        world.do("merge", 0, 1, False)
    assert cpp.contents() == plain.contents()
    assert cpp.pools[0]._table.counts.max() == 255


def test_arrays_of_any_layout_are_taken():
    """The loops see contiguous ones, whatever comes."""
    fixed = np.arange(16, dtype=np.int64)
    fixed.setflags(write=False)
    strided, narrow = np.repeat(np.arange(16), 2)[::2], np.arange(16, dtype=np.int32)
    found = []
    for ids in (fixed, strided, narrow, list(range(16))):
        pool, ids_of = NgramPool(0.1), np.asarray(ids)
        pool.learn(ids)
        pool.learn_next(ids_of[None, ::2], ids_of[None, :8], np.broadcast_to(0.1, (1, 8)))
        pool.calibrate(ids_of[:, None], ids_of[:, None], np.asfortranarray(np.full((16, 1), 0.1)))
        pool.learn_step(ids, ids[::2], np.arange(-1, 7), ids_of.reshape(16, 1)[7:], np.full((9, 1), 0.1), [1])
        draws = np.broadcast_to(np.float32(0.5), (2, 20))
        found.append((*map(np.ndarray.tobytes, pool._table), as_bytes(pool.guess(ids, 4, draws=draws))))
    assert found == [found[0]] * 4


def test_rates_are_of_the_origins():
    assert len(RATES) == len(Origin)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder instead of that of the library."""
    monkeypatch.setattr(native, "KERNELS", tmp_path)
    return tmp_path


def test_without_the_library_the_plain_loops_serve(folder, caplog):
    for _ in range(2):
        assert native.loops() is reference
    assert [record.name for record in caplog.records] == ["ngram_pool.native"]
    assert "run in Python" in caplog.text
    assert "setup.py build_kernels" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="a loader of POSIX")
def test_a_library_that_cannot_be_loaded_is_not_fatal(folder, caplog):
    (folder / f"DEFAULT-{cpp.digest(native.PACKAGE)}.so").write_bytes(b"of another system")
    assert native.loops() is reference
    assert "cannot be loaded" in native.why_missing()
    assert "cannot be loaded" in caplog.text
