"""The library that the C++ was built into when the package was installed, and what holds without one."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import setup
from lookahead.cpu import native, top_k, tree_attention
from lookahead.cpu.products import Format
from ngram_pool import cpp

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder instead of that of the libraries."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    for kept in (native._library, tree_attention._kernels):
        kept.cache_clear()
    yield tmp_path
    for kept in (native._library, tree_attention._kernels):
        kept.cache_clear()


def built_by(compiler, folder, monkeypatch):
    """Install with a compiler; then there is this in the folder."""
    monkeypatch.setenv("CXX", compiler)
    try:
        setup.build_kernels(setup.KERNELS, folder, setup.FLAVOURS)
    except setup.BuildError as error:
        (folder / "missing.txt").write_text(str(error))


def test_a_library_for_this_processor_is_installed():
    """All other tests of kernels would pass without a library, because torch would compute."""
    assert native.why_missing() is None


@pytest.mark.parametrize(
    ("compiler", "named"),
    [
        ("no-such-compiler", "CXX is 'no-such-compiler', but there is no such program"),
        ("g++ 'unbalanced", "No closing quotation"),
        ("false", "failed with status 1"),
    ],
)
def test_where_it_could_not_be_built_torch_serves_and_the_reason_is_said(compiler, named, folder, caplog, monkeypatch):
    built_by(compiler, folder, monkeypatch)
    query, mask = torch.randn(1, 2, 5, 16), torch.zeros(1, 1, 5, 5)
    assert not tree_attention.serves(query, query, query, mask)
    assert not tree_attention.serves(query, query, query, mask)
    assert len(caplog.records) == 1
    assert "left to torch" in caplog.text
    first = native.why_missing().splitlines()[0]
    assert "could not be built when lookahead was installed" in first
    assert named in first
    assert first.endswith("Then install it again")


def test_no_compiler_at_all_is_said(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    built_by("", folder, monkeypatch)
    assert "there was no C++ compiler: install g++ or clang++" in native.why_missing()


def test_what_the_compiler_said_is_kept(folder, monkeypatch):
    failing = folder / "failing"
    failing.write_text("#!/bin/sh\necho so it is >&2; exit 3\n")
    failing.chmod(0o755)
    built_by(str(failing), folder, monkeypatch)
    why, *said = native.why_missing().splitlines()
    assert "failed with status 3" in why
    assert said == ["so it is"]


def test_sources_that_nobody_installed_say_how_to(folder):
    assert "setup.py build_kernels" in native.why_missing()


def test_a_library_of_other_sources_is_not_loaded(folder):
    (folder / f"{native.CAPABILITY}-0123456789abcdef.so").write_bytes(b"")
    assert "has changed since it was built" in native.why_missing()


def test_a_library_for_another_kind_of_processor_is_not_loaded(folder):
    (folder / f"ANOTHER-{cpp.digest(native.PACKAGE)}.so").write_bytes(b"")
    why = native.why_missing()
    assert f"built for ANOTHER, but is to run as {native.CAPABILITY}" in why
    assert "setup.py build_kernels" in why


def test_the_kind_of_this_processor_is_that_which_torch_says():
    assert setup.kind_here(setup.KERNELS) == native.CAPABILITY


def test_a_library_that_cannot_be_loaded_is_not_fatal(folder):
    (folder / f"{native.CAPABILITY}-{cpp.digest(native.PACKAGE)}.so").write_bytes(b"of another system")
    assert "cannot be loaded" in native.why_missing()


def test_each_source_has_a_part_in_the_digest(tmp_path):
    (tmp_path / "a.cpp").write_text("1")
    found = {cpp.digest(tmp_path)}
    (tmp_path / "a.cpp").write_text("2")
    found.add(cpp.digest(tmp_path))
    (tmp_path / "b.h").write_text("")
    assert len(found | {cpp.digest(tmp_path)}) == 3


def test_a_dtype_that_the_sources_do_not_define_is_left_out():
    found = native.kernels("multiply", [torch.float32, torch.float64], [])
    assert list(found) == [torch.float32]
    assert native.kernels("question", [torch.float32], []) == {}


def test_each_kind_of_processor_has_its_library():
    assert tuple(setup.FLAVOURS) == native.FLAVOURS
    kinds = native.FLAVOURS if platform.machine() in ("x86_64", "AMD64") else ("DEFAULT",)
    assert tuple(setup.library_names(setup.KERNELS)) == kinds


def test_what_a_flavour_defines_is_asked_for():
    """Under another name, a library would be built without what the flavour has, and nothing would say so."""
    defined = {option[2:] for options in setup.FLAVOURS.values() for option in options if option.startswith("-D")}
    lines = [line for source in cpp.sources(native.PACKAGE) for line in source.read_text().splitlines()]
    assert defined
    for macro in defined:
        assert f"#ifdef {macro}" in lines, macro


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
LOOK = """
import sys
from lookahead.cpu import native
print(native.CAPABILITY, native.why_missing(), flush=True)
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.parametrize("capability", LOWER.get(native.CAPABILITY, []))
def test_kernels_are_right_on_lesser_processors(capability, tmp_path):
    chosen = [
        "tests/kernels/test_tree_attention.py",
        "tests/kernels/test_products.py::test_products_are_what_the_formula_says",
        "tests/kernels/test_gguf.py::test_products_with_blocks_are_those_with_their_numbers",
        "tests/kernels/test_gguf.py::test_each_code_of_each_group_is_read",
    ]
    isa = {"AVX512_BF16": "AVX512_CORE_BF16", "AVX512": "AVX512_CORE"}
    lowered = (
        {"ONEDNN_MAX_CPU_ISA": isa[capability]} if capability in isa else {"ATEN_CPU_CAPABILITY": capability.lower()}
    )
    ended = subprocess.run(
        [sys.executable, "-c", LOOK, *chosen], cwd=ROOT, env=os.environ | lowered, capture_output=True, text=True
    )
    assert ended.stdout.split("\n")[0] == f"{capability} None"
    assert ended.returncode == 0, ended.stdout


FLAVOURS = [native.CAPABILITY, *LOWER.get(native.CAPABILITY, [])]


@pytest.mark.parametrize("capability", FLAVOURS)
def test_random_programs_do_what_the_reference_does(capability):
    """Many, and others in each flavour: a defect may show in one of some hundreds. Sanitizers watch fewer of them
    (`make test-native`).
    """
    environment = os.environ | {"KERNELS": str(native.FOLDER), "CAPABILITY": capability, "PYTHONPATH": str(ROOT)}
    first = 60 * FLAVOURS.index(capability)
    command = [sys.executable, "scripts/native/fuzz.py", "60", str(first)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout == f"{capability}: 60 programs from {first} on: nothing found\n", ended.stderr


@pytest.mark.skipif("AVX512_BF16" not in native.FLAVOURS[native.FLAVOURS.index(native.CAPABILITY) :], reason="no bf16")
def test_bf16_is_multiplied_right_by_a_processor_of_another_make(tmp_path):
    """It multiplies such numbers in the other way."""
    is_other = int("GenuineIntel" not in Path("/proc/cpuinfo").read_text())
    library = tmp_path / f"AVX512_BF16-{cpp.digest(native.PACKAGE)}.so"
    options = [*setup.FLAVOURS["AVX512_BF16"], f"-D__builtin_cpu_is(name)={is_other}", "-O0"]
    setup.build_library(library, setup.compiler(), options, ["-fopenmp"], [native.PACKAGE / "gemm.cpp"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitized"]
    command += ["tests/kernels/test_products.py::test_products_are_what_the_formula_says"]
    environment = os.environ | {"KERNELS": str(tmp_path), "CAPABILITY": "AVX512_BF16"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "native")])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_one_openmp_serves_torch_and_the_library():
    assert native.why_missing() is None
    with open("/proc/self/maps") as maps:
        loaded = {Path(line.split()[-1]).name for line in maps}
    assert len([name for name in loaded if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1, loaded


def test_python_repeats_what_the_headers_say():
    def found(header: str, pattern: str) -> str:
        return re.search(pattern, (native.PACKAGE / header).read_text())[1]

    assert "".join(found("matrix.h", r"enum Format : long {([^}]*)}").split()).split(",") == [
        one.name for one in Format
    ]
    assert [*Format] == [*range(len(Format))]
    assert int(found("attention.h", r"MAX_SIZE = (\d+)")) == tree_attention.MAX_HEAD_DIM
    assert int(found("top_k.h", r"MAX_COUNT = (\d+)")) == top_k.MAX_COUNT
