"""Builds shared libraries with a C++ compiler of this machine. `setup.py` runs this too: standard library only."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SECONDS = 300  # time limit for the compiler, which needs 1 to 20 seconds on a server
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
INSTRUCTIONS = {  # compiler options by the processor's capability, in torch's words
    "AVX512_AMX": (*_AVX512, "-mavx512bf16", "-DHAS_TILES"),
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
    """Nothing was built. The first line gives the reason; the compiler's output may follow."""


def compiler() -> list[str]:
    """Return the command that calls the C++ compiler: CXX, g++ or clang++. Raises BuildError if there is none."""
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CXX is {named!r}, which is not a command: {error}") from None
    if not command:
        command = [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise BuildError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    if not shutil.which(command[0]):
        raise BuildError(f"CXX is {named!r}, but there is no such program")
    return command


def build(source: Path, compiler: list[str], instructions: Iterable[str], linking: Iterable[str]) -> bytes:
    """Build ``source`` and return the content of the shared library.

    instructions: compiler options for the processor.
    linking: linker options. Without "-fopenmp", OpenMP must already be loaded when the library is.
    Raises BuildError if the compiler failed, or was stopped with its children because it took more than SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="lookahead-") as path:
        compiled, library = Path(path) / "compiled.o", Path(path) / "library.so"
        _run([*compiler, *FLAGS, *instructions, "-c", str(source), "-o", str(compiled)], Path(path))
        _run([*compiler, "-shared", str(compiled), *linking, "-o", str(library)], Path(path))
        try:
            return library.read_bytes()
        except FileNotFoundError:
            raise BuildError(f"{shlex.join(compiler)} reported success but wrote no library") from None


def _run(command: list[str], folder: Path) -> None:
    """Run a command. Its output and temporary files go into the folder."""
    with (folder / "output").open("w+b") as output:  # a pipe would stay open until the last child ends
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )  # fmt: skip
        try:
            status = process.wait(SECONDS)
        except BaseException as error:  # also an interrupt: the new session does not receive it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise BuildError(f"{shlex.join(command)} was stopped after {SECONDS} seconds") from None
        if status != 0:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise BuildError(f"{shlex.join(command)} failed with status {status}\n{text}".rstrip())
