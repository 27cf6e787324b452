"""The package's C++: ready in the wheel, or built by the machine's compiler on first use and kept in a cache.

Anybody who can write to a library can act as the process that loads it. So a kept library is loaded only if this user
wrote it, and if it is exactly what was built.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

from lookahead.compat import cpu_capability
from lookahead.cpu import private, toolchain
from ngram_pool.waiting import kept_for_later, told_if_long

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
READY = SOURCES / "kernels"
"""Libraries in the wheel, which can be trusted as much as this module."""
FOLDER = Path(platformdirs.user_cache_dir("lookahead")) / "kernels"
KERNELS = "products", "tree_attention", "decoder", "likeliest", "choice", "blocks"
DAY = 24 * 60 * 60
_DIGEST = hashlib.sha256().digest_size

FLOATS = torch.float32, torch.bfloat16
Kernels = Mapping[torch.dtype, Callable[..., Any]]
"""The versions of a function in a library, by the dtype of their arguments. Empty if there is no library."""


def _processor_flags() -> str:
    """What the processor can do, because CXX may tell the compiler to use all of it. Empty if Linux does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _capability() -> str:
    """The processor's capability according to torch; DEFAULT if our kernels are not built for it."""
    capability = cpu_capability()
    if capability == "AVX512_AMX" and "amx_bf16" not in _processor_flags().split():
        capability = "AVX512_BF16"
    return capability if capability in toolchain.INSTRUCTIONS else "DEFAULT"


CAPABILITY = _capability()
"""Key of `toolchain.INSTRUCTIONS` for the instructions that torch uses.

ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA can lower it.
"""
HAS_TILES = CAPABILITY == "AVX512_AMX"


def kernels(
    name: str, function: str, dtypes: Iterable[torch.dtype], arguments: Sequence[type], result: type | None = None
) -> Kernels:
    """Return ``function`` of ``name``.cpp, for each dtype that it is defined for; empty if the library is missing."""
    library = _library(name)
    if isinstance(library, str):
        return {}
    symbols = {dtype: f"{function}_{str(dtype).removeprefix('torch.')}" for dtype in dtypes}
    found = {dtype: library[symbol] for dtype, symbol in symbols.items() if hasattr(library, symbol)}
    for kernel in found.values():
        kernel.argtypes, kernel.restype = arguments, result
    return found


def why_missing(name: str) -> str | None:
    """Say why ``name``.cpp cannot be used here: a line, then the compiler's output if any. None if it can be used."""
    library = _library(name)
    return library if isinstance(library, str) else None


def build_missing() -> None:
    """Build all kernels that are not there yet, so that nothing waits for a compiler later."""
    for name in KERNELS:
        _library(name)


@cache
def _library(name: str) -> ctypes.CDLL | str:
    """Return the library of ``name``.cpp. If there is none, log a warning and return the reason."""
    ready = READY / f"{name}-{CAPABILITY}.so"
    refused = ""
    if ready.exists():
        try:
            return ctypes.CDLL(str(ready))
        except OSError as error:
            refused = f"the wheel's library cannot be loaded ({error}), and "
    try:
        return _kept_or_built(name)
    except (OSError, toolchain.BuildError) as error:
        logger.warning("%s is left to torch, which is slower: %s%s", name, refused, error)
        return f"{refused}{error}"


def _kept_or_built(name: str) -> ctypes.CDLL:
    """Return the library in this user's cache, or build it."""
    if os.name != "posix":
        raise toolchain.BuildError("it can be built only on POSIX systems")
    compiler = toolchain.compiler()
    key = _key(name, compiler)
    try:
        with private.opened_folder(FOLDER) as folder:
            return _kept(name, compiler, key, folder)
    except OSError as error:
        logger.warning(
            "%s is built for this process alone, in a temporary folder: %s. To keep the library, delete %s, or make it "
            "a folder that belongs to this user and that others cannot write to",
            name, error, FOLDER,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lookahead-") as path, private.opened_folder(Path(path)) as folder:
        return _built(name, compiler, key, folder)


def _kept(name: str, compiler: list[str], key: str, folder: int) -> ctypes.CDLL:
    """Return the library in FOLDER, opened as ``folder``, or build it there."""
    try:
        return _loaded(name, key, folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is built again: %s", name, error)
    failure = f"{_file_name(name, key)}.failed"
    again = f"It is tried again in a day, or when CXX names another compiler, or {FOLDER / failure} is deleted."
    if earlier := _failure_of_last_day(failure, folder):
        raise toolchain.BuildError(f"tried within a day: {earlier}")
    try:
        with kept_for_later():
            return _built(name, compiler, key, folder)
    except toolchain.BuildError as error:
        why, *output = str(error).split("\n", 1)
        message = "\n".join([f"{why}. {again}", *output])
        private.write(failure, message.encode(), folder)
        raise toolchain.BuildError(message) from None


def _built(name: str, compiler: list[str], key: str, folder: int) -> ctypes.CDLL:
    """Build the library, keep it in an opened folder, and return it."""
    with told_if_long(f"building {name}.cpp, once on a machine"):
        instructions = toolchain.INSTRUCTIONS[CAPABILITY]
        content = toolchain.build(SOURCES / f"{name}.cpp", compiler, instructions, linking=["-fopenmp"])
    private.write(_file_name(name, key), content + _digest(content, key), folder)
    return _loaded(name, key, folder)


def _loaded(name: str, key: str, folder: int) -> ctypes.CDLL:
    """Load the library that an opened folder holds. Its file ends with the digest of what was built.

    Raises FileNotFoundError if there is none, and OSError if it is not this user's, not what was built, or cannot be
    loaded.
    """
    with contextlib.ExitStack() as stack:
        file = private.opened(_file_name(name, key), folder)
        stack.callback(os.close, file)
        content = _read(file)
        if content[-_DIGEST:] != _digest(content[:-_DIGEST], key):
            raise OSError(f"{_file_name(name, key)} is not what was built")
        if os.path.exists(f"/proc/self/fd/{file}"):
            library = ctypes.CDLL(f"/proc/self/fd/{file}")  # the file that was checked, even if it was replaced since
            stack.pop_all()  # Keep it open: the linker would take a later file of the same number for this library.
            return library
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-"))) / _file_name(name, key)
        copy.write_bytes(content)
        return ctypes.CDLL(str(copy))


def _failure_of_last_day(failure: str, folder: int) -> str | None:
    """The reason of a failed build that is less than a day old."""
    with contextlib.suppress(OSError), open(private.opened(failure, folder), "rb") as file:
        if abs(time.time() - os.fstat(file.fileno()).st_mtime) < DAY:
            return file.read().decode(errors="replace")
    return None


def _read(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        return stream.read()


def _file_name(name: str, key: str) -> str:
    return f"{name}-{CAPABILITY}-{key}.so"


def _key(name: str, compiler: list[str]) -> str:
    """Hash all that a library depends on: sources, options, compiler and processor."""
    options = compiler, toolchain.FLAGS, toolchain.INSTRUCTIONS[CAPABILITY]
    parts = [platform.machine(), _processor_flags(), repr(options)]
    for program in filter(None, map(shutil.which, compiler)):  # "ccache g++" names two programs
        status = os.stat(program)
        parts.append(repr((os.path.realpath(program), status.st_size, status.st_mtime_ns)))
    hashed = hashlib.sha256("\0".join(parts).encode())
    for source in (SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))):
        hashed.update(hashlib.sha256(source.read_bytes()).digest())
    return hashed.hexdigest()[:32]


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
