"""C++ of this package: ready in the wheel, or built on first use by the machine's compiler and kept in a cache.

Whoever can write to a library that is loaded can do what its process may. So of what is kept, nothing is loaded unless
this user wrote it, and it is what was built.
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

import platformdirs
import torch

from lookahead.compat import cpu_capability
from lookahead.cpu import private, toolchain
from ngram_pool.waiting import told_if_long

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
READY = SOURCES / "kernels"
"""What a wheel has brought along, as trustworthy as this module beside it."""
FOLDER = Path(platformdirs.user_cache_dir("lookahead")) / "kernels"
KERNELS = "products", "tree_attention"
DAY = 24 * 60 * 60
_DIGEST = hashlib.sha256().digest_size

Kernels = Mapping[torch.dtype, Callable[..., None]]
"""One function of a library, by the dtype that it takes."""


def _capability() -> str:
    """DEFAULT where torch names what no kernel of ours is built for."""
    capability = cpu_capability()
    return capability if capability in toolchain.INSTRUCTIONS else "DEFAULT"


CAPABILITY = _capability()
"""The key of `toolchain.INSTRUCTIONS` for what torch uses of this processor; ATEN_CPU_CAPABILITY can lower it."""
HAS_BF16 = CAPABILITY == "AVX512_BF16"


def kernels(name: str, function: str, dtypes: Iterable[torch.dtype], arguments: Sequence[type]) -> Kernels:
    """What ``name``.cpp defines as ``function``, by dtype; without those that it lacks, all where it is missing."""
    library = _library(name)
    if isinstance(library, str):
        return {}
    symbols = {dtype: f"{function}_{str(dtype).removeprefix('torch.')}" for dtype in dtypes}
    found = {dtype: library[symbol] for dtype, symbol in symbols.items() if hasattr(library, symbol)}
    for kernel in found.values():
        kernel.argtypes, kernel.restype = arguments, None
    return found


def why_missing(name: str) -> str | None:
    """Why nothing of ``name``.cpp can be used here, in a line that the compiler's output may follow.

    None where it can be used.
    """
    library = _library(name)
    return library if isinstance(library, str) else None


@cache
def _library(name: str) -> ctypes.CDLL | str:
    """What ``name``.cpp defines; or, after a warning in the log, why it is missing."""
    ready = READY / f"{name}-{CAPABILITY}.so"
    refused = ""
    if ready.exists():
        try:
            return ctypes.CDLL(str(ready))
        except OSError as error:
            refused = f"what the package brings cannot be loaded ({error}), and "
    try:
        return _own(name)
    except (OSError, toolchain.BuildError) as error:
        logger.warning("%s is left to torch, which is slower: %s%s", name, refused, error)
        return f"{refused}{error}"


def _own(name: str) -> ctypes.CDLL:
    """The library that this user's cache holds, or else is built."""
    if os.name != "posix":
        raise toolchain.BuildError("it is built on POSIX systems alone")
    compiler = toolchain.compiler()
    key = _key(name, compiler)
    try:
        with private.opened_folder(FOLDER) as folder:
            return _kept(name, compiler, key, folder)
    except OSError as error:
        logger.warning(
            "%s is built for this process alone, in a temporary folder: %s. To keep it, delete %s, or make it a "
            "folder of this user's own that others cannot write to",
            name, error, FOLDER,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lookahead-") as path, private.opened_folder(Path(path)) as folder:
        return _built(name, compiler, key, folder)


def _kept(name: str, compiler: list[str], key: str, folder: int) -> ctypes.CDLL:
    """The library that FOLDER, opened as ``folder``, holds, or else is built and held there."""
    try:
        return _loaded(name, key, folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s is built again: %s", name, error)
    failure = f"{_file_name(name, key)}.failed"
    again = f"It is tried again in a day, or when CXX names another compiler, or {FOLDER / failure} is deleted."
    if said := _said_today(failure, folder):
        raise toolchain.BuildError(f"tried within a day: {said}")
    try:
        return _built(name, compiler, key, folder)
    except toolchain.BuildError as error:
        why, *output = str(error).split("\n", 1)
        said = "\n".join([f"{why}. {again}", *output])
        private.write(failure, said.encode(), folder)
        raise toolchain.BuildError(said) from None


def _built(name: str, compiler: list[str], key: str, folder: int) -> ctypes.CDLL:
    """The library, built now, and held in an opened folder."""
    with told_if_long(f"building {name}.cpp, once on a machine"):
        instructions = toolchain.INSTRUCTIONS[CAPABILITY]
        content = toolchain.build(SOURCES / f"{name}.cpp", compiler, instructions, linking=["-fopenmp"])
    private.write(_file_name(name, key), content + _digest(content, key), folder)
    return _loaded(name, key, folder)


def _loaded(name: str, key: str, folder: int) -> ctypes.CDLL:
    """The library that an opened folder holds: what was built, its digest behind it.

    Raises:
        FileNotFoundError: It holds none.
        OSError: It is not this user's, not what was built, or cannot be loaded.
    """
    with contextlib.ExitStack() as stack:
        file = private.opened(_file_name(name, key), folder)
        stack.callback(os.close, file)
        content = _read(file)
        if content[-_DIGEST:] != _digest(content[:-_DIGEST], key):
            raise OSError(f"{_file_name(name, key)} is not what was built")
        if os.path.exists(f"/proc/self/fd/{file}"):
            library = ctypes.CDLL(f"/proc/self/fd/{file}")  # what was looked at, whatever has its name by now
            stack.pop_all()  # it stays open: to the linker, another file of this number would be the same library
            return library
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lookahead-"))) / _file_name(name, key)
        copy.write_bytes(content)
        return ctypes.CDLL(str(copy))


def _said_today(failure: str, folder: int) -> str | None:
    """Why it could not be built, if that is less than a day ago."""
    try:
        file = private.opened(failure, folder)
    except OSError:
        return None
    try:
        is_new = abs(time.time() - os.fstat(file).st_mtime) < DAY
        return _read(file).decode(errors="replace") if is_new else None
    finally:
        os.close(file)


def _read(file: int) -> bytes:
    with open(file, "rb", closefd=False) as stream:
        return stream.read()


def _file_name(name: str, key: str) -> str:
    return f"{name}-{CAPABILITY}-{key}.so"


def _key(name: str, compiler: list[str]) -> str:
    """A hash of all that a library depends on: sources, options, compiler and processor."""
    parts = [
        platform.machine(),
        _processor_flags(),
        repr((compiler, toolchain.FLAGS, toolchain.INSTRUCTIONS[CAPABILITY])),
    ]
    for program in filter(None, map(shutil.which, compiler)):  # more than one in "ccache g++"
        status = os.stat(program)
        parts.append(repr((os.path.realpath(program), status.st_size, status.st_mtime_ns)))
    hashed = hashlib.sha256("\0".join(parts).encode())
    for source in (SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))):
        hashed.update(hashlib.sha256(source.read_bytes()).digest())
    return hashed.hexdigest()[:32]


def _processor_flags() -> str:
    """What the processor can do, for compilers that are told to use all of it; nothing where Linux does not tell."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
