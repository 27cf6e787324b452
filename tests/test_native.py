"""C++ that is built on first use: kept where nobody else can write, and done without where it cannot be built."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.cpu import native, private, toolchain, tree_attention

ROOT = Path(__file__).parents[1]
ANOTHER = os.geteuid() + 1
TINY = """
#include "answer.h"
extern "C" void answer_float32(int* x) { *x = ANSWER; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty one, and none of what a wheel brings."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "cache" / "kernels")
    monkeypatch.setattr(native, "READY", tmp_path / "nothing")
    monkeypatch.setenv("CXX", os.environ.get("CXX", "g++"))
    for kept in (native._library, tree_attention._kernels):
        kept.cache_clear()
    yield native.FOLDER
    for kept in (native._library, tree_attention._kernels):
        kept.cache_clear()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A source that compiles in no time. Its answer is 42."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    return sources


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def answer():
    native._library.cache_clear()
    found = native.kernels("tiny", "answer", [torch.float32], [ctypes.c_void_p])
    if not found:
        return None
    x = ctypes.c_int()
    found[torch.float32](ctypes.byref(x))
    return x.value


def key():
    return native._key("tiny", toolchain.compiler())


def kept():
    return native.FOLDER / native._file_name("tiny", key())


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def give_to_another(path, monkeypatch):
    """As root, in truth; else the system is made to say so."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
        return
    given, fstat = os.stat(path), os.fstat

    def told(descriptor):
        found = fstat(descriptor)
        return os.stat_result((*found[:4], ANOTHER, *found[5:])) if os.path.samestat(found, given) else found

    monkeypatch.setattr(os, "fstat", told)


def put_trap(path, ran):
    """A library that tells when it is loaded, with the digest of what was built."""
    source = path.parent / "trap.cpp"
    source.write_text(
        f'#include <cstdio>\n__attribute__((constructor)) void run() {{ fclose(fopen("{ran}", "w")); }}\n'
    )
    content = toolchain.build(source, toolchain.compiler(), [], [])
    path.write_bytes(content + native._digest(content, key()))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("compiler", "named"),
    [
        ("no-such-compiler", "no-such-compiler"),
        ("g++ 'unbalanced", "No closing quotation"),
        ("false", "failed with status 1"),
        ("true", "wrote no library"),
    ],
)
def test_without_a_compiler_it_is_left_to_torch(compiler, named, caplog, monkeypatch, temporary):
    query, mask = torch.randn(1, 2, 5, 16), torch.zeros(1, 1, 5, 5)
    monkeypatch.setenv("CXX", compiler)
    assert not tree_attention.serves(query, query, query, mask)
    assert not tree_attention.serves(query, query, query, mask)
    assert len(caplog.records) == 1
    assert caplog.text.count(named) == 1
    assert "left to torch" in caplog.text
    assert named in native.why_missing("tree_attention").splitlines()[0]
    assert not list(temporary.iterdir())


def test_no_compiler_at_all_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no C++ compiler: install" in native.why_missing("tree_attention")


def test_what_is_there_is_not_missing(tiny):
    assert answer() == 42
    assert native.why_missing("tiny") is None


def test_a_dtype_that_the_source_does_not_define_is_left_out(tiny):
    found = native.kernels("tiny", "answer", [torch.float32, torch.bfloat16], [ctypes.c_void_p])
    assert list(found) == [torch.float32]
    assert native.kernels("tiny", "question", [torch.float32], []) == {}


def test_what_was_built_is_kept(tiny, cache, monkeypatch):
    assert answer() == 42
    assert [path.name for path in cache.iterdir()] == [kept().name]
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(toolchain, "build", lambda *_, **__: pytest.fail("built again"))
    assert answer() == 42


def test_all_that_a_library_depends_on_has_a_part_in_its_name(tiny, monkeypatch, tmp_path):
    compiler = script(tmp_path / "c++", "as it was")
    other = next(name for name in toolchain.INSTRUCTIONS if name != native.CAPABILITY)
    changes = [
        lambda: monkeypatch.setenv("CXX", str(compiler)),
        lambda: monkeypatch.setenv("CXX", f"{compiler} -O1"),
        lambda: script(compiler, "replaced by a longer one"),
        lambda: os.utime(compiler, (1, 1)),
        lambda: monkeypatch.setenv("CXX", f"env {compiler} -O1"),
        lambda: os.utime(compiler, (2, 2)),  # behind another program
        lambda: (tiny / "answer.h").write_text("#define ANSWER 43\n"),
        lambda: (tiny / "tiny.cpp").write_text(TINY + " "),
        lambda: monkeypatch.setattr(native, "_processor_flags", lambda: "flags: none"),
        lambda: monkeypatch.setattr(native.platform, "machine", lambda: "another"),
        lambda: monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g")),
        lambda: monkeypatch.setattr(native, "CAPABILITY", other),
    ]
    names = [kept().name]
    for change in changes:
        change()
        names.append(kept().name)
    assert len(set(names)) == len(names), names


def test_another_version_of_a_header_is_built(tiny):
    assert answer() == 42
    (tiny / "answer.h").write_text("#define ANSWER 43\n")
    assert answer() == 43


@settings(deadline=None)
@given(data=st.data())
def test_no_other_content_is_loaded_than_what_was_built(data):
    """Nor given to the linker, which would end the process."""
    content, name = b"any library", "0" * 32
    whole = content + native._digest(content, name)
    other = data.draw(
        st.binary(max_size=100)
        | st.integers(0, len(whole) - 1).map(lambda end: whole[:end])
        | st.integers(0, 8 * len(whole) - 1).map(
            lambda bit: bytes(byte ^ ((bit // 8 == i) << bit % 8) for i, byte in enumerate(whole))
        )
        | st.just(content + native._digest(content, "1" * 32))  # of another source
    )
    with tempfile.TemporaryDirectory() as path, private.opened_folder(Path(path)) as folder:
        private.write(native._file_name("any", name), other, folder)
        with pytest.raises(OSError, match="is not what was built"):
            native._loaded("any", name, folder)


@pytest.mark.parametrize("content", [b"", b"no library", "half", "without the symbol", "another's name"])
def test_what_is_damaged_is_built_again(content, tiny, cache, caplog):
    assert answer() == 42
    path, whole = kept(), kept().read_bytes()
    if content == "half":
        content = whole[: len(whole) // 2]
    elif content == "without the symbol":
        (tiny / "empty.cpp").write_text("")
        content = toolchain.build(tiny / "empty.cpp", toolchain.compiler(), [], [])
    elif content == "another's name":
        content = whole[: -native._DIGEST] + native._digest(whole[: -native._DIGEST], "another key")
    path.unlink()  # which this process has loaded
    path.write_bytes(content)
    path.chmod(0o600)
    assert answer() == 42
    assert "not what was built" in caplog.text
    assert kept().read_bytes() == whole
    assert [path.name for path in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("trap", ["another's", "written by others", "a link", "a pipe"])
def test_no_file_is_loaded_that_others_may_have_written(trap, tiny, cache, caplog, monkeypatch, tmp_path):
    cache.mkdir(0o700, parents=True)
    ran = tmp_path / "ran"
    path = kept()
    if trap == "a link":
        path.symlink_to(put_trap(tmp_path / "elsewhere.so", ran))
    elif trap == "a pipe":
        os.mkfifo(path, 0o600)
    else:
        put_trap(path, ran)
    if trap == "another's":
        give_to_another(path, monkeypatch)
    elif trap == "written by others":
        path.chmod(0o620)
    assert answer() == 42
    assert not ran.exists()
    assert len(caplog.records) == 1
    assert "built again" in caplog.text
    assert answer() == 42
    assert len(caplog.records) == 1


@pytest.mark.parametrize("trap", ["another's", "written by others", "a link", "a file"])
def test_a_folder_that_others_may_write_to_is_not_used(trap, tiny, cache, caplog, monkeypatch, temporary, tmp_path):
    cache.mkdir(0o700, parents=True)
    ran = tmp_path / "ran"
    path = put_trap(kept(), ran)
    if trap == "another's":
        give_to_another(cache, monkeypatch)
    elif trap == "written by others":
        cache.chmod(0o770)
    else:
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere") if trap == "a link" else cache.write_text("")
        path = tmp_path / "elsewhere" / path.name
    before = path.read_bytes()
    assert answer() == 42
    assert not ran.exists()
    assert len(caplog.records) == 1
    assert "for this process alone" in caplog.text
    assert str(cache) in caplog.text
    assert path.read_bytes() == before
    assert not list(temporary.iterdir())


def test_a_folder_that_others_may_read_becomes_private(tiny, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    assert answer() == 42
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kept().exists()


def test_a_new_folder_is_private_from_the_start(tiny, cache, caplog):
    before = os.umask(0)
    try:
        assert answer() == 42
    finally:
        os.umask(before)
    assert kept().exists()
    assert not caplog.records


def test_a_folder_is_judged_open_whoever_may_exchange_it(tiny, cache, monkeypatch, tmp_path):
    """Those above may be anybody's: what is exchanged after the look is not what is used."""
    assert answer() == 42
    trap = tmp_path / "trap"
    trap.mkdir()
    put_trap(trap / kept().name, tmp_path / "ran")
    opened = private.opened

    def exchange(name, folder):
        if cache.exists():
            cache.rename(tmp_path / "away")
            trap.rename(cache)
        return opened(name, folder)

    monkeypatch.setattr(private, "opened", exchange)
    assert answer() == 42
    assert not (tmp_path / "ran").exists()


def test_a_file_is_loaded_as_it_was_looked_at_whoever_may_exchange_it(tiny, cache, monkeypatch, tmp_path):
    assert answer() == 42
    trap, read = put_trap(tmp_path / "trap.so", tmp_path / "ran"), native._read

    def exchange(file):
        content = read(file)
        os.replace(trap, kept())
        return content

    monkeypatch.setattr(native, "_read", exchange)
    assert answer() == 42
    assert not (tmp_path / "ran").exists()


def test_where_files_cannot_be_named_by_descriptors_a_copy_is_loaded(tiny, temporary, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc/") and exists(path))
    assert answer() == 42
    assert not list(temporary.iterdir())


def test_two_libraries_are_two(tiny):
    """Though the linker takes the same name for the same library."""
    (tiny / "other.cpp").write_text(TINY.replace("answer_", "other_"))
    assert answer() == 42
    assert native.kernels("other", "other", [torch.float32], [])


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A compiler that does; the time that it is given begins when it has a child."""
    tried, children, wait = tmp_path / "tried", tmp_path / "children", subprocess.Popen.wait
    text = (
        f"echo $$ >> {tried}\necho > ${{TMPDIR:-{tmp_path}/temporary}}/left\nsleep 600 &\necho $! >> {children}\nwait"
    )
    monkeypatch.setenv("CXX", str(script(tmp_path / "hanging", text)))
    monkeypatch.setattr(toolchain, "SECONDS", 0.1)

    def waited(process, timeout=None):
        while timeout is not None and (not children.exists() or len(pids(children)) < len(pids(tried))):
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    return tried, children


def pids(path):
    return path.read_text().split()


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end(processes):
    """Whether they do, soon."""
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, processes))


def test_a_compiler_that_hangs_is_stopped_with_its_children(hanging, tiny, temporary, caplog):
    tried, children = hanging
    assert answer() is None
    assert end(pids(tried) + pids(children))
    assert not list(temporary.iterdir())
    assert len(caplog.records) == 1
    assert "was stopped after 0.1 seconds" in caplog.text
    assert f"{kept()}.failed is deleted" in caplog.text


def test_a_compiler_that_hung_is_not_tried_again_for_a_day(hanging, tiny, monkeypatch):
    tried, _ = hanging
    failure = Path(f"{kept()}.failed")
    for _ in range(3):
        assert answer() is None
        assert str(failure) in native.why_missing("tiny").splitlines()[0]
    assert "tried within a day" in native.why_missing("tiny")
    assert len(pids(tried)) == 1
    os.utime(failure, (time.time() - native.DAY - 1,) * 2)
    assert answer() is None
    assert len(pids(tried)) == 2
    failure.unlink()
    assert answer() is None
    assert len(pids(tried)) == 3


def test_after_one_that_hung_another_compiler_is_tried_at_once(hanging, tiny, monkeypatch):
    assert answer() is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "FOLDER", tiny.parent / "cache" / "kernels")
    monkeypatch.setattr(native, "SOURCES", tiny)
    assert answer() == 42


def test_a_compiler_that_fails_is_left_alone_and_what_it_said_kept(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(script(tmp_path / "failing", f"echo >> {tmp_path}/tried; echo so it is >&2; exit 3")))
    for _ in range(3):
        assert answer() is None
        why, said = native.why_missing("tiny").splitlines()
        assert "failed with status 3" in why
        assert said == "so it is"
    assert (tmp_path / "tried").read_text() == "\n"


def test_what_another_says_of_the_compiler_is_not_heard(tiny, cache, monkeypatch):
    cache.mkdir(0o700, parents=True)
    failure = Path(f"{kept()}.failed")
    failure.write_text("do not try")
    failure.chmod(0o666)
    assert answer() == 42


def test_an_interrupt_stops_the_compiler_too(hanging, tiny, cache, monkeypatch):
    tried, children = hanging
    waited = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        try:
            return waited(process, timeout)
        except subprocess.TimeoutExpired:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer()
    assert end(pids(tried) + pids(children))
    assert not list(cache.iterdir())


def test_several_processes_build_at_once_and_each_has_a_whole_library(tiny, cache):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(6), context.SimpleQueue()

    def build():
        barrier.wait()
        answers.put(answer())

    processes = [context.Process(target=build) for _ in range(6)]
    for process in processes:
        process.start()
    assert [answers.get() for _ in processes] == [42] * 6
    for process in processes:
        process.join()
    assert [path.name for path in cache.iterdir()] == [kept().name]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    stop, contents = threading.Event(), [bytes([i]) * 100_000 for i in range(4)]
    with private.opened_folder(tmp_path / "folder") as folder:
        private.write("file", contents[0], folder)

        def write():
            while not stop.is_set():
                for content in contents:
                    private.write("file", content, folder)

        monkeypatch.setattr(os, "fsync", lambda _: None)  # for more writes
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(2000):
                file = private.opened("file", folder)
                assert native._read(file) in contents
                os.close(file)
        finally:
            stop.set()
            writer.join()
        monkeypatch.setattr(os, "replace", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private.write("file", b"new", folder)
        assert os.listdir(folder) == ["file"]
        assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("says", ["SVE256", "DEFAULT", "NO AVX", "Z VECTOR", None, AttributeError, RuntimeError])
def test_what_torch_does_not_know_of_the_processor_is_not_used(says, monkeypatch):
    def capability():
        if isinstance(says, type):
            raise says
        return says

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", capability)
    assert native._capability() == "DEFAULT"
    monkeypatch.delattr(torch.backends.cpu, "get_cpu_capability")
    assert native._capability() == "DEFAULT"
    monkeypatch.delattr(torch.backends, "cpu")
    assert native._capability() == "DEFAULT"


def test_bf16_is_multiplied_only_where_torch_says_so(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert native._capability() == "AVX512_BF16"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert native._capability() == "AVX512"
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert native._capability() == "AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert native._capability() == "AVX2"


def test_the_matrix_unit_is_used_only_if_it_multiplies_bf16_and_the_system_allows_it(monkeypatch):
    monkeypatch.setattr(native, "cpu_capability", lambda: "AVX512_AMX")
    for flags, capability in (
        ("amx_tile amx_bf16", "AVX512_AMX"),
        ("amx_tile amx_int8", "AVX512_BF16"),
        ("", "AVX512_BF16"),
    ):
        monkeypatch.setattr(native, "_processor_flags", lambda flags=flags: f"flags : fpu {flags}\n")
        assert native._capability() == capability


LOWER = {
    "AVX512_AMX": ["AVX512_BF16", "AVX512", "AVX2", "DEFAULT"],
    "AVX512_BF16": ["AVX512", "AVX2", "DEFAULT"],
    "AVX512": ["AVX2", "DEFAULT"],
    "AVX2": ["DEFAULT"],
}


# A processor of another make would multiply bf16 numbers in the other way.
VENDORS = {"AVX512_BF16": ["0", "1"]}


@pytest.mark.parametrize(
    ("capability", "is_intel"),
    [(lower, is_intel) for lower in LOWER.get(native.CAPABILITY, []) for is_intel in VENDORS.get(lower, [""])],
)
def test_kernels_are_right_on_lesser_processors(capability, is_intel, tmp_path, monkeypatch):
    if is_intel:
        monkeypatch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} '-D__builtin_cpu_is(name)={is_intel}'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tree_attention.py"]
    command += ["tests/test_products.py::test_products_are_what_the_formula_says"]
    isa = {"AVX512_BF16": "AVX512_CORE_BF16", "AVX512": "AVX512_CORE"}
    lowered = (
        {"ONEDNN_MAX_CPU_ISA": isa[capability]} if capability in isa else {"ATEN_CPU_CAPABILITY": capability.lower()}
    )
    environment = os.environ | lowered | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    built = sorted(file.name for file in (tmp_path / "lookahead" / "kernels").iterdir())
    for library, name in zip(built, ["products", "tree_attention"], strict=True):
        assert library.startswith(f"{name}-{capability}-")


def test_one_openmp_serves_torch_and_what_is_built():
    assert native.why_missing("tree_attention") is None
    with open("/proc/self/maps") as maps:
        loaded = {Path(line.split()[-1]).name for line in maps}
    assert len([name for name in loaded if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1, loaded
