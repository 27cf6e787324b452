"""What is published: a wheel with ready kernels where it is built for Linux on x86-64, and all sources."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import setup
from lookahead.cpu import native
from ngram_pool import cpp
from ngram_pool import native as of_pools

ROOT = Path(__file__).parents[2]
READY = {f"{package}/kernels/{name}" for package in setup.KINDS for name in setup.library_names(package).values()}
SOURCES = [source.relative_to(ROOT) for package in setup.KINDS for source in cpp.sources(ROOT / package)]
has_ready_kernels = pytest.mark.skipif(
    sysconfig.get_platform() != "linux-x86_64" or platform.libc_ver()[0] != "glibc",
    reason="only a wheel for Linux on x86-64 has ready kernels",
)
CHECK = """
import sys
from pathlib import Path
import torch
import lookahead
from lookahead.cpu import native, tree_attention
from ngram_pool import cpp
from ngram_pool import native as of_pools

assert of_pools.why_missing() is None
assert Path(lookahead.__file__).is_relative_to(sys.argv[1]), lookahead.__file__
assert native.CAPABILITY == sys.argv[2], native.CAPABILITY
for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
    query, key, value = torch.randn(3, 1, 4, 40, 64).to(dtype)
    assert tree_attention.serves(query, key, value, None), native.why_missing()
    got = tree_attention.attend(query, key, value, None, None).transpose(1, 2)
    query, key, value = query.double(), key.double(), value.double()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (got - expected).abs().max() < error
loaded = {Path(line.split()[-1]) for line in open("/proc/self/maps") if ".so" in line}
assert {path.name for path in loaded if path.parent.name == "kernels"} == {
    f"{native.CAPABILITY}-{cpp.digest(native.PACKAGE)}.so", f"DEFAULT-{cpp.digest(of_pools.PACKAGE)}.so"
}
openmp = [path for path in loaded if path.name.startswith(("libgomp", "libiomp", "libomp"))]
assert len(openmp) == 1, openmp
"""


def copied_sources(folder):
    """Those of the package, without its model. A build writes into them, so each has a copy."""
    ignored = shutil.ignore_patterns("demo_model", "__pycache__", "kernels")
    for package in ("lookahead", "ngram_pool"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.fixture
def sources(tmp_path):
    (folder := tmp_path / "sources").mkdir()
    return copied_sources(folder)


def built(sources, folder, **environment):
    """The wheel that pip makes."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        sources,
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    ]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """With the libraries that were built when this package was installed."""
    sources = copied_sources(tmp_path_factory.mktemp("sources"))
    shutil.copytree(native.FOLDER, sources / "lookahead" / "cpu" / "kernels")
    shutil.copytree(of_pools.KERNELS, sources / "ngram_pool" / "kernels")
    stale = sources / "build" / "lib" / "lookahead" / "cpu" / "kernels" / "stale.so"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another time")
    return built(sources, tmp_path_factory.mktemp("wheel"))


@has_ready_kernels
def test_a_wheel_has_every_kernel_for_every_kind_of_processor(wheel):
    assert {name for name in names(wheel) if name.endswith(".so")} == READY
    assert wheel.name.split("-", 2)[2].startswith("py3-none-manylinux_2_")
    assert wheel.name.endswith("_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        (described,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert b"Root-Is-Purelib: false" in archive.read(described)


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="needs a cross compiler for ARM")
def test_a_wheel_for_arm(sources, tmp_path):
    """Built beside this machine's own libraries, one of which has the same name."""
    kernels = shutil.copytree(native.FOLDER, sources / "lookahead" / "cpu" / "kernels")
    (kernels / f"DEFAULT-{cpp.digest(native.PACKAGE)}.so").touch()
    wheel = built(sources, tmp_path, CXX="aarch64-linux-gnu-g++", _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert wheel.name.endswith("_aarch64.whl")
    assert "-py3-none-manylinux_2_" in wheel.name
    libraries = {f"{package}/kernels/DEFAULT-{cpp.digest(ROOT / package)}.so" for package in setup.KINDS}
    assert {name for name in names(wheel) if name.endswith(".so")} == libraries
    with zipfile.ZipFile(wheel) as archive:
        for library in libraries:
            assert int.from_bytes(archive.read(library)[18:20], "little") == 183, "ELF's number of AArch64"


def test_a_wheel_has_every_module(wheel, sources):
    modules = {str(path.relative_to(sources)) for path in sources.rglob("*.py")} - {"setup.py"}
    assert {name for name in names(wheel) if name.endswith(".py")} == modules


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@has_ready_kernels
@pytest.mark.parametrize("below", ["", "avx2", "default"])
def test_an_installed_wheel_needs_no_compiler(below, installed, tmp_path):
    if below and native.CAPABILITY == "DEFAULT":
        pytest.skip("this processor has nothing to leave out")
    capability = below.upper() or native.CAPABILITY
    environment = {
        "PYTHONPATH": str(installed),
        "PATH": str(tmp_path),
        "HOME": str(tmp_path / "home"),
        **({"ATEN_CPU_CAPABILITY": below} if below else {}),
    }
    ended = subprocess.run(
        [sys.executable, "-c", CHECK, installed, capability],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_wheel_is_pure(compiler, sources, tmp_path):
    wheel = built(sources, tmp_path, CXX=compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names(wheel) if name.endswith(".so")]
    missing = {f"{package}/kernels/missing.txt" for package in setup.KINDS}
    assert {*missing, *map(str, SOURCES)} < names(wheel)


def test_a_source_distribution_has_what_is_built_from(sources, tmp_path):
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    assert {*map(str, SOURCES), "ngram_pool/cpp.py", "setup.py"} <= held


def test_an_editable_install_builds_for_this_processor_and_then_only_what_is_missing(sources, tmp_path):
    """The compiler says what the true one says of this machine, and what it makes is empty."""
    pretended, made = tmp_path / "pretended", tmp_path / "made"
    pretended.write_text(
        '#!/bin/sh\ncase "$*" in *-dM*) exec g++ "$@";; *-shared*) echo linked >> ' + str(made) + ";; esac\n"
        'while [ $# -gt 1 ]; do shift; done; : > "$1"\n'
    )
    pretended.chmod(0o755)
    environment = os.environ | {"CXX": str(pretended)}
    editable = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    whole = {package: setup.library_names(package) for package in setup.KINDS}
    here = {package: names[setup.kind_here(package)] for package, names in whole.items()}
    stale = sources / setup.KERNELS / "kernels" / "AVX2-0123456789abcdef.so"
    stale.parent.mkdir()
    stale.touch()
    for command, expected in (
        (["-c", editable], {package: {name} for package, name in here.items()}),
        (["setup.py", "build_kernels", "--inplace"], {package: {*names.values()} for package, names in whole.items()}),
    ):
        subprocess.run([sys.executable, *command], cwd=sources, env=environment, check=True, capture_output=True)
        for package, names in expected.items():
            assert {file.name for file in (sources / package / "kernels").iterdir()} == names
    assert made.read_text().count("linked") == sum(map(len, whole.values()))


def test_an_editable_install_is_found_beside_a_clone_of_the_same_name(sources, tmp_path):
    """In the folder that holds the clone, Python also finds the clone itself: a namespace without any file."""
    clone, site = sources.rename(tmp_path / "lookahead"), tmp_path / "site"
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"]
    subprocess.run(command, cwd=clone, env=os.environ | {"CXX": "false"}, check=True, capture_output=True)
    for package in setup.KINDS:
        assert "failed with status 1" in (clone / package / "kernels" / "missing.txt").read_text()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    look = (
        f"import site; site.addsitedir({str(site)!r}); from importlib.util import find_spec; "
        "print(*(find_spec(name).origin for name in ('lookahead', 'ngram_pool')), sep='\\n')"
    )
    for folder in (tmp_path, clone, site):
        command = [sys.executable, "-S", "-E", "-c", look]  # without what is installed beside it
        found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
        files = [clone / name / "__init__.py" for name in ("lookahead", "ngram_pool")]
        assert [Path(file).resolve() for file in found] == [file.resolve() for file in files], folder


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["libc.so.6", "GLIBC_2.2.5", "GLIBC_2.14", "GOMP_parallel", "attend_float32"], 14),
        (["libc.so.6", "libm.so.6", "GLIBC_2.2.5", "GLIBC_2.29"], 29),
        ([], 0),
        (["libstdc++.so.6"], "libstdc++.so.6"),
        (["libgomp.so.1"], "libgomp.so.1"),
        (["__kmpc_fork_call"], "__kmpc_fork_call"),
        (["GLIBC_2.36", "GLIBC_ABI_DT_RELR"], "GLIBC_ABI_DT_RELR"),
    ],
)
def test_a_tag_follows_from_what_the_kernels_need(words, needed):
    content = b"\x7fELF\0" + b"\0".join(word.encode() for word in words) + b"\0\xff"
    if isinstance(needed, int):
        assert setup.glibc_needed(content) == needed
    else:
        with pytest.raises(setup.BuildError, match=needed.replace("+", r"\+")):
            setup.glibc_needed(content)
