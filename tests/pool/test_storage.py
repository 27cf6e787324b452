"""Pool files: a saved pool comes back; torn, foreign and newer files are refused; a crash loses nothing."""

import os
import random
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pool import learn_something, random_text, same

from ngram_pool import NgramPool, PoolFileError, storage


@pytest.fixture
def pool():
    pool = NgramPool(0.2, vocabulary="abc")
    rng = random.Random(0)
    for _ in range(5):
        learn_something(pool, rng)
    return pool


@pytest.fixture
def saved(pool, tmp_path):
    pool.save(tmp_path / "a.pool")
    return tmp_path / "a.pool"


def assert_same(a: NgramPool, b: NgramPool) -> None:
    rng = random.Random(1)
    for _ in range(20):
        context = random_text(rng, 8, 8)
        assert same(a.guess(context, 40), b.guess(context, 40))
    assert (a.belief == b.belief).all()
    assert (len(a), a.nbytes, a.observations, a.largest_token, a.vocabulary) == (
        len(b), b.nbytes, b.observations, b.largest_token, b.vocabulary,
    )  # fmt: skip


def test_a_saved_pool_comes_back(pool, saved):
    loaded = NgramPool.load(saved, vocabulary="abc")
    loaded.check_integrity()
    assert_same(pool, loaded)


def test_a_loaded_pool_learns_and_the_file_stays(pool, saved):
    content = saved.read_bytes()
    loaded = NgramPool.load(saved)
    for seed in range(5):
        learn_something(pool, random.Random(seed))
        learn_something(loaded, random.Random(seed))
    assert_same(pool, loaded)
    assert saved.read_bytes() == content
    loaded.save(saved)
    assert_same(NgramPool.load(saved), loaded)
    assert os.listdir(saved.parent) == [saved.name]


def test_an_empty_pool_without_vocabulary(tmp_path):
    NgramPool(0.1).save(tmp_path / "e.pool")
    loaded = NgramPool.load(tmp_path / "e.pool", vocabulary="abc")
    assert len(loaded) == 0
    assert loaded.vocabulary == "abc"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_truncated_files_are_refused(saved, tmp_path, data):
    content = saved.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 200))
    torn = tmp_path / "torn.pool"
    torn.write_bytes(content[:length])
    with pytest.raises(PoolFileError, match="not a pool file" if length == 0 else "truncated"):
        NgramPool.load(torn)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_is_refused(saved, tmp_path, data):
    content = bytearray(saved.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 200))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "bad.pool").write_bytes(content)
    with pytest.raises(PoolFileError):
        NgramPool.load(tmp_path / "bad.pool")


def test_longer_files_are_refused(saved):
    with open(saved, "ab") as file:
        file.write(b"x")
    with pytest.raises(PoolFileError, match="corrupted"):
        NgramPool.load(saved)


@pytest.mark.parametrize(("version", "message"), [(storage.VERSION + 1, "newer"), (0, "no longer read")])
def test_other_versions_are_refused(saved, version, message):
    content = bytearray(saved.read_bytes())
    struct.pack_into("<I", content, len(storage.MAGIC), version)
    saved.write_bytes(content)
    with pytest.raises(PoolFileError, match=message):
        NgramPool.load(saved)


def test_foreign_files_are_refused(saved, tmp_path):
    with pytest.raises(PoolFileError, match="another vocabulary: abc, not xyz"):
        NgramPool.load(saved, vocabulary="xyz")
    (tmp_path / "text").write_text("this is no pool at all, but long enough to be one " * 10)
    with pytest.raises(PoolFileError, match="not a pool file"):
        NgramPool.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        NgramPool.load(tmp_path / "nothing")


def without(name):
    return lambda header, arrays: arrays.pop(name)


def replaced(name, change):
    def apply(header, arrays):
        arrays[name] = change(arrays[name])

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        *(without(name) for name in ("keys", "weights", "belief", "votes")),
        replaced("tokens", lambda a: a[:, :4]),
        replaced("tokens", lambda a: a - 5),
        replaced("tokens", lambda a: a + 10),
        replaced("weights", lambda a: a[:1]),
        replaced("weights", lambda a: a * np.nan),
        replaced("weights", lambda a: a.astype(np.float64)),
        replaced("keys", lambda a: a[:0]),
        replaced("keys", lambda a: a[:3]),
        replaced("sources", lambda a: a + 9),
        replaced("belief", lambda a: a[:1]),
        replaced("belief", lambda a: a * 0),
        replaced("votes", lambda a: a + np.inf),
        lambda header, arrays: header.pop("clock"),
        lambda header, arrays: header.update(largest="7"),
        lambda header, arrays: header.update(vocabulary=7),
    ],
)
def test_files_that_would_lead_the_loops_astray_are_refused(saved, damage):
    """The compiled loops check no bounds, and a checksum is no proof of good will."""
    header, arrays = storage.read(saved)
    damage(header, arrays)
    storage.write(saved, header, arrays)
    with pytest.raises(PoolFileError, match="not a valid pool"):
        NgramPool.load(saved)


def test_threads_and_readers_at_one_path(saved):
    """The last save wins; nobody reads half a file, and no temporary files are left."""
    pools = [NgramPool(0.1), NgramPool(0.1)]
    failures = []

    def work(pool: NgramPool) -> None:
        try:
            for _ in range(50):
                pool.save(saved)
                NgramPool.load(saved)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(pools[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.skipif(os.name != "posix", reason="links and modes of POSIX")
def test_links_and_modes_are_kept(pool, saved, tmp_path):
    os.chmod(saved, 0o640)
    link = tmp_path / "link.pool"
    link.symlink_to(saved)
    pool.learn([1, 2, 3])
    pool.save(link)
    assert link.is_symlink()
    assert saved.stat().st_mode & 0o777 == 0o640
    assert_same(NgramPool.load(saved), pool)


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_pool_is_for_its_owner_alone_from_the_start(pool, tmp_path, monkeypatch):
    """It holds prompts."""
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(os.fstat(file).st_mode & 0o777))
    before = os.umask(0)
    try:
        pool.save(tmp_path / "new.pool")
    finally:
        os.umask(before)
    assert modes[0] == 0o600
    assert (tmp_path / "new.pool").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="owners of POSIX")
@pytest.mark.parametrize(
    ("may_give", "given", "mode"),
    [
        ((True, True), [(os.getuid(), os.getgid())], 0o660),
        ((False, True), [(os.getuid(), os.getgid()), (-1, os.getgid())], 0o660),
        ((False, False), [(os.getuid(), os.getgid()), (-1, os.getgid())], 0o600),
    ],
)
def test_the_owner_of_a_replaced_file_is_kept_where_that_is_allowed(pool, saved, monkeypatch, may_give, given, mode):
    """If the group cannot be kept, its rights are not given to another group."""
    asked = []

    def chown(file: int, user: int, group: int) -> None:
        asked.append((user, group))
        if not may_give[user == -1]:
            raise PermissionError(1, "Operation not permitted")

    os.chmod(saved, 0o660)
    monkeypatch.setattr(os, "fchown", chown)
    pool.save(saved)
    assert asked == given
    assert saved.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_what_is_not_a_file_is_not_replaced(pool, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            pool.save(path)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_while_saving_leaves_the_old_file(pool, saved, monkeypatch, call):
    content = saved.read_bytes()
    learn_something(pool, random.Random(9))

    def failing(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="No space"):
            pool.save(saved)
    assert saved.read_bytes() == content
    assert os.listdir(saved.parent) == [saved.name], "the unfinished file was left behind"
    pool.save(saved)
    assert_same(NgramPool.load(saved), pool)


KILLED = """
import os, sys
from ngram_pool import NgramPool, storage
pool = NgramPool.load(sys.argv[1])
pool.learn(list(range(500)))
written = 0
class Dying:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, part):
        global written
        left = int(sys.argv[2]) - written
        self.file.write(bytes(part)[:left]); self.file.flush()
        written += len(part)
        if left <= len(part): os._exit(9)
def dying(path, mode, **options):
    file = open(path, mode, **options)
    return Dying(file) if "x" in mode else file
storage.open = dying
pool.save(sys.argv[1])
"""


@pytest.mark.parametrize("after", [0, 100, 50_000])
def test_a_process_killed_while_saving_leaves_the_old_file(saved, after):
    content = saved.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, str(saved), str(after)], check=False)
    assert done.returncode == 9
    assert saved.read_bytes() == content
    NgramPool.load(saved).check_integrity()


def test_what_killed_saves_left_is_removed_and_nothing_else(pool, saved):
    """Files of another pool's saves stay, and so does the file of a running save."""
    other = saved.with_name("other.pool")
    pool.save(other)
    for path in (saved, other):
        subprocess.run([sys.executable, "-c", KILLED, str(path), "100"], check=False)
    left = set(os.listdir(saved.parent)) - {saved.name, other.name}
    assert len(left) == 2, "the killed saves left nothing to remove"
    (saved.parent / ".0123456789abcdef.tmp").write_text("of someone else")
    with storage._temporary(saved) as (_, running):
        pool.save(saved)
        kept = set(os.listdir(saved.parent)) - {saved.name, other.name, ".0123456789abcdef.tmp", running.name}
        assert running.exists()
        assert len(kept) == 1
        assert kept < left
    pool.save(other)
    assert set(os.listdir(saved.parent)) == {saved.name, other.name, ".0123456789abcdef.tmp"}


def test_a_save_whose_file_was_taken_for_a_leftover_writes_another(pool, saved, monkeypatch):
    """Between making a file and locking it, another process may come by."""
    lock, before = storage._lock, []

    def late(file: int) -> bool | None:
        if not before:
            before.append(file)
            storage._remove_leftovers(saved)
        return lock(file)

    pool.learn([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_lock", late)
        pool.save(saved)
    assert_same(NgramPool.load(saved), pool)
    assert os.listdir(saved.parent) == [saved.name]


def test_pools_of_the_longest_names_are_saved(pool, tmp_path):
    pool.save(tmp_path / ("a" * 250 + ".pool"))


def test_processes_that_save_at_one_path(saved):
    """Whoever saves last wins; none takes another's file for a leftover."""
    code = (
        "import sys; from ngram_pool import NgramPool\n"
        "pool = NgramPool.load(sys.argv[1])\n"
        "for _ in range(100): pool.save(sys.argv[1])"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(saved)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    NgramPool.load(saved).check_integrity()
    assert os.listdir(saved.parent) == [saved.name]


def test_a_file_that_is_written_to_while_it_is_read_is_refused(saved):
    """In its own process, because truncating a mapped file kills its reader."""
    code = (
        "import os, sys\n"
        "from ngram_pool import NgramPool, PoolFileError, storage\n"
        "made = storage.xxhash.xxh3_128\n"
        "def shortened(fields):\n"
        "    os.truncate(sys.argv[1], len(fields))\n"
        "    return made(fields)\n"
        "storage.xxhash.xxh3_128 = shortened\n"
        "try: NgramPool.load(sys.argv[1])\n"
        "except PoolFileError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(saved)], check=False).returncode == 7


def test_arrays_keep_their_kind(tmp_path):
    arrays = {"a": np.arange(7, dtype=np.int32), "b": np.ones((3, 2), np.float32), "c": np.zeros((0, 4), np.uint8)}
    storage.write(tmp_path / "x", {"name": "ü"}, arrays)
    header, back = storage.read(tmp_path / "x")
    assert header == {"name": "ü"}
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert (back[name] == array).all()
        assert back[name].flags.writeable
