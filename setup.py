"""Builds the C++ into the packages: libraries for each kind of processor (`lookahead.cpu`) or for all (`ngram_pool`).

    pip install .                             # as pip does
    pip install --editable .                  # into the sources, and only for processors like this machine's
    python setup.py build_kernels --inplace   # into the sources, for all kinds

Libraries that the sources already hold are not built again. Where they cannot be built, the install succeeds all the
same, and `kernels/missing.txt` holds the reason.
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent
KERNELS, POOL = Path("lookahead", "cpu"), Path("ngram_pool")  # the packages with C++
cpp = SimpleNamespace(**runpy.run_path(str(ROOT / POOL / "cpp.py")))  # the package itself would import numpy
# Set where a wheel is built for another processor than this one, as linux-aarch64; sysconfig reads it, too.
TARGET = os.environ.get("_PYTHON_HOST_PLATFORM", "")
IS_X86 = (TARGET or platform.machine()).endswith(("x86_64", "AMD64"))
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
FLAVOURS = {  # compiler options by the processor's capability, in torch's words
    "AVX512_AMX": (*_AVX512, "-mavx512bf16", "-DHAS_AMX"),
    "AVX512_BF16": (*_AVX512, "-mavx512bf16"),
    "AVX512": _AVX512,
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}
# The pool's loops write the same bits everywhere, so nothing is contracted.
KINDS = {KERNELS: FLAVOURS if IS_X86 else {"DEFAULT": ()}, POOL: {"DEFAULT": ("-ffp-contract=off", "-DNDEBUG")}}
IS_MAC = platform.system() == "Darwin"
# Apple's compiler knows OpenMP's pragmas, but not the option of the others.
OPENMP = ("-Xclang", "-fopenmp") if IS_MAC else ("-fopenmp",)
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-exceptions", "-fPIC", "-Wno-psabi",
    "-fvisibility=default",
)  # fmt: skip
# Without OpenMP: torch has loaded one when the library is.
LINKING = ("-undefined", "dynamic_lookup") if IS_MAC else ("-static-libgcc", "-Wl,--as-needed", "-s")
OLDEST_GLIBC = 17  # 2.17; torch needs a newer one
WITH_GLIBC = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64"}  # and how a wheel's name ends there


class BuildError(Exception):
    """Nothing was built. The first line gives the reason; the compiler's output may follow."""


def compiler() -> list[str]:
    """Return the command that calls the C++ compiler: CXX, g++ or clang++.

    Raises:
        BuildError: There is none, or it would not be a POSIX system's.
    """
    if os.name != "posix":
        raise BuildError("it can be built only on POSIX systems")
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CXX is {named!r}, which is not a command: {error}") from None
    if not command:
        command = [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise BuildError("there was no C++ compiler: install g++ or clang++, or name one in CXX")
    if not shutil.which(command[0]):
        raise BuildError(f"CXX is {named!r}, but there is no such program")
    return command


def call(command: Sequence[str | Path]) -> str:
    """Run a compiler, and return what it says.

    Raises:
        BuildError: It failed.
    """
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise BuildError(f"{shlex.join(map(str, command))} failed with status {done.returncode}\n{output}".rstrip())
    return output


def build_library(
    library: Path, compiler: list[str], options: Iterable[str], linking: Iterable[str], sources: Iterable[Path]
) -> None:
    """Compile the sources and link them.

    Raises:
        BuildError: The compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        link(library, compiler, compiled(sources, Path(folder), compiler, options), linking)


def compiled(sources: Iterable[Path], folder: Path, compiler: list[str], options: Iterable[str]) -> list[Path]:
    """Compile each source to an object in a folder."""
    objects = {source: folder / f"{source.stem}.o" for source in sources}
    for source, to in objects.items():
        call([*compiler, *FLAGS, *OPENMP, *options, "-c", source, "-o", to])
    return [*objects.values()]


def link(library: Path, compiler: list[str], objects: Iterable[Path], linking: Iterable[str]) -> None:
    call([*compiler, "-shared", *objects, *linking, "-o", library])


def library_names(package: Path) -> dict[str, str]:
    """The names of the libraries' files, by the kinds of processors that this system's may be."""
    digest = cpp.digest(ROOT / package)
    return {kind: f"{kind}-{digest}.so" for kind in KINDS[package]}


def kind_here(package: Path) -> str:
    """The kind of this machine's processor, of those that a package is built for.

    Raises:
        BuildError: There is no compiler to ask, or it failed.
    """
    if len(KINDS[package]) == 1:
        return next(iter(KINDS[package]))
    macros = set(call([*compiler(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]).split())
    needed = {"-DHAS_AMX": "__AMX_BF16__"}
    return next(
        kind
        for kind, options in KINDS[package].items()
        if all(needed.get(option, f"__{option.removeprefix('-m').upper()}__") in macros for option in options)
    )


def build_kernels(package: Path, folder: Path, kinds: Iterable[str]) -> None:
    """Build the libraries of a package for some kinds of processors into a folder.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    command, sources = compiler(), sorted((ROOT / package).glob("*.cpp"))
    names = library_names(package)
    with tempfile.TemporaryDirectory() as path, ThreadPoolExecutor(os.cpu_count()) as threads:

        def compile_one(kind: str, source: Path) -> Path:
            options = [*(["-march=x86-64"] if IS_X86 else []), *KINDS[package][kind]]
            (of_kind := Path(path, kind)).mkdir(exist_ok=True)
            (made,) = compiled([source], of_kind, command, options)
            return made

        objects = {kind: [threads.submit(compile_one, kind, source) for source in sources] for kind in kinds}
        for kind, made in objects.items():
            link_portable(folder / names[kind], command, [one.result() for one in made])


def link_portable(library: Path, compiler: list[str], objects: Sequence[Path]) -> None:
    """Link a library that needs glibc alone, or else with what else this system has."""
    link(library, compiler, objects, LINKING)
    if IS_MAC:
        return
    try:
        glibc_needed(library.read_bytes())
    except BuildError:
        link(library, compiler, objects, ["-fopenmp"])


def glibc_of(libraries: Iterable[Path]) -> int | None:
    """The minor version of glibc 2 that all libraries need. None: they are for this system alone."""
    if sysconfig.get_platform() not in WITH_GLIBC or platform.libc_ver()[0] != "glibc":
        return None
    try:
        return max([OLDEST_GLIBC, *(glibc_needed(library.read_bytes()) for library in libraries)])
    except BuildError:
        return None


def glibc_needed(content: bytes) -> int:
    """The minor version of glibc 2 that a shared library asks for, by the names that its symbol versions have.

    Raises:
        BuildError: It needs more than glibc and the OpenMP that torch brings.
    """
    names = {word.decode() for word in content.split(b"\0") if re.fullmatch(rb"[\w.+-]+", word)}
    foreign = {name for name in names if re.fullmatch(r"lib.+\.so[.\d]*", name)} - {"libc.so.6", "libm.so.6"}
    foreign |= {name for name in names if name.startswith("__kmpc")}  # clang's OpenMP
    versions = {name: re.fullmatch(r"GLIBC_2\.(\d+)[.\d]*", name) for name in names if name.startswith("GLIBC_")}
    foreign |= {name for name, version in versions.items() if version is None}
    if foreign:
        raise BuildError(f"they would need {', '.join(sorted(foreign))}")
    return max((int(version[1]) for version in versions.values() if version), default=0)


class BuildKernels(Command):
    """A step of `build`, which an editable install runs, too."""

    description = "build the C++"
    user_options: ClassVar = [("inplace", "i", "put the libraries beside the sources")]
    boolean_options: ClassVar = ["inplace"]
    editable_mode = False

    def initialize_options(self) -> None:
        self.inplace, self.build_lib = False, None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        self.folders = {package: base / package / "kernels" for package in KINDS}

    def run(self) -> None:
        for package, folder in self.folders.items():
            self._build(package, folder)

    def _build(self, package: Path, folder: Path) -> None:
        names, beside = library_names(package), ROOT / package / "kernels"
        ready = {} if TARGET else {kind: beside / name for kind, name in names.items() if (beside / name).exists()}
        folder.mkdir(parents=True, exist_ok=True)
        for other in {*folder.iterdir()} - {*ready.values()}:
            other.unlink()
        lacking = [kind for kind in names if kind not in ready]
        try:
            if lacking and self.editable_mode:
                here = kind_here(package)
                lacking = [kind for kind in lacking if kind == here]
            if lacking:
                build_kernels(package, folder, lacking)
        except BuildError as error:
            (folder / "missing.txt").write_text(str(error), encoding="utf-8")
            self.warn(f"the C++ of {package} is not built, so slower code will serve: {error}")
        if folder != beside:
            for library in ready.values():
                shutil.copy(library, folder)

    @property
    def libraries(self) -> list[Path]:
        return [library for folder in self.folders.values() for library in folder.glob("*.so")]

    def get_source_files(self) -> list[str]:
        return [str(package / source.name) for package in KINDS for source in cpp.sources(ROOT / package)]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """With libraries it is for a platform, though for every Python 3."""

    def run(self) -> None:
        self.run_command("build")
        if self.get_finalized_command("build_kernels").libraries:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that it is installed where a platform's files go
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return super().get_tag()
        glibc = glibc_of(self.get_finalized_command("build_kernels").libraries)
        if glibc is None:
            return "py3", "none", super().get_tag()[2]
        return "py3", "none", f"manylinux_2_{glibc}_{WITH_GLIBC[sysconfig.get_platform()]}"


if __name__ == "__main__":
    build.sub_commands = [*build.sub_commands, ("build_kernels", None)]
    setup(cmdclass={"bdist_wheel": Wheel, "build_kernels": BuildKernels})
