"""C++ into shared libraries, by a compiler of this machine. Also for `setup.py`, so by the standard library alone."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SECONDS = 120  # that a compiler may take, which needs two
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
INSTRUCTIONS = {  # by the processor's capability, as torch calls it
    "AVX512_BF16": (*_AVX512, "-mavx512bf16"),
    "AVX512": _AVX512,
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-exceptions", "-fopenmp", "-fPIC",
    "-fvisibility=default",
)  # fmt: skip


class BuildError(Exception):
    """Nothing was built: the first line says why, what follows is the compiler's output."""


def compiler() -> list[str]:
    """The command that calls the C++ compiler: CXX of the environment, g++ or clang++.

    Raises:
        BuildError: None of them is there.
    """
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CXX is {named!r}, which is no command: {error}") from None
    if not command:
        command = [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise BuildError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    if not shutil.which(command[0]):
        raise BuildError(f"CXX is {named!r}, which is no program here")
    return command


def build(source: Path, compiler: list[str], instructions: Iterable[str], linking: Iterable[str]) -> bytes:
    """The content of a shared library that is made of ``source``.

    instructions: the compiler's options for the processor.
    linking: the linker's options; without "-fopenmp", the functions of OpenMP have to be there when it is loaded.

    Raises:
        BuildError: The compiler failed; or it took more than SECONDS, and was stopped with all that it had started.
    """
    with tempfile.TemporaryDirectory(prefix="lookahead-") as path:
        compiled, library = Path(path) / "compiled.o", Path(path) / "library.so"
        _run([*compiler, *FLAGS, *instructions, "-c", str(source), "-o", str(compiled)], Path(path))
        _run([*compiler, "-shared", str(compiled), *linking, "-o", str(library)], Path(path))
        try:
            return library.read_bytes()
        except FileNotFoundError:
            raise BuildError(f"{shlex.join(compiler)} ended well and wrote no library") from None


def _run(command: list[str], folder: Path) -> None:
    """Run a command, whose output and temporary files go into the folder."""
    with (folder / "output").open("w+b") as output:  # a pipe would stay open as long as any child of it
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )  # fmt: skip
        try:
            status = process.wait(SECONDS)
        except BaseException as error:  # an interrupt, too, which a session of its own does not hear
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise BuildError(f"{shlex.join(command)} was stopped after {SECONDS} seconds") from None
        if status != 0:
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise BuildError(f"{shlex.join(command)} failed with status {status}\n{said}".rstrip())
