"""A wheel built on Linux for x86-64 brings the C++ kernels ready-built, for every kind of processor.

Where they cannot be built, the wheel is one of pure Python, and its user's machine builds them on first use.
"""

import platform
import re
import runpy
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

KERNELS = Path("lookahead", "cpu")
SOURCES = Path(__file__).parent / KERNELS
toolchain = SimpleNamespace(**runpy.run_path(str(SOURCES / "toolchain.py")))  # the package itself would import torch
OLDEST_GLIBC = 17  # 2.17; torch needs a newer one


def build_kernels(folder: Path) -> int:
    """Build all kernels into the folder; the minor version of glibc 2 that they need.

    Raises:
        toolchain.BuildError: There is no compiler, or not for this platform, or it failed.
    """
    if sysconfig.get_platform() != "linux-x86_64" or platform.libc_ver()[0] != "glibc":
        raise toolchain.BuildError("they are built on Linux for x86-64 with glibc alone")
    compiler = toolchain.compiler()
    linking = ["-static-libgcc", "-Wl,--as-needed", "-s"]  # no OpenMP: torch has loaded one when they are

    def built(of: tuple[Path, str]) -> int:
        source, capability = of
        instructions = ["-march=x86-64", *toolchain.INSTRUCTIONS[capability]]
        content = toolchain.build(source, compiler, instructions, linking)
        (folder / f"{source.stem}-{capability}.so").write_bytes(content)
        return glibc_needed(content)

    folder.mkdir(parents=True)
    with ThreadPoolExecutor() as threads:
        kinds = [(source, capability) for source in SOURCES.glob("*.cpp") for capability in toolchain.INSTRUCTIONS]
        return max(OLDEST_GLIBC, *threads.map(built, kinds))


def glibc_needed(content: bytes) -> int:
    """The minor version of glibc 2 that a shared library asks for, by the names that its symbol versions have.

    Raises:
        toolchain.BuildError: It needs more than glibc and the OpenMP that torch brings.
    """
    names = {word.decode() for word in content.split(b"\0") if re.fullmatch(rb"[\w.+-]+", word)}
    foreign = {name for name in names if re.fullmatch(r"lib.+\.so[.\d]*", name)} - {"libc.so.6", "libm.so.6"}
    foreign |= {name for name in names if name.startswith("__kmpc")}  # clang's OpenMP
    versions = {name: re.fullmatch(r"GLIBC_2\.(\d+)[.\d]*", name) for name in names if name.startswith("GLIBC_")}
    foreign |= {name for name, version in versions.items() if version is None}
    if foreign:
        raise toolchain.BuildError(f"they would need {', '.join(sorted(foreign))}")
    return max((int(version[1]) for version in versions.values()), default=0)


class Wheel(bdist_wheel):
    """With ready kernels, it is for a platform, though for every Python 3."""

    glibc = None

    def run(self) -> None:
        self.run_command("build")
        folder = Path(self.get_finalized_command("build").build_lib) / KERNELS / "kernels"
        shutil.rmtree(folder, ignore_errors=True)  # of another time
        try:
            self.glibc = build_kernels(folder)
        except toolchain.BuildError as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.warn(f"the wheel brings no ready kernels: {error}")
        else:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that it is installed where a platform's files go
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return super().get_tag() if self.glibc is None else ("py3", "none", f"manylinux_2_{self.glibc}_x86_64")


setup(cmdclass={"bdist_wheel": Wheel})
