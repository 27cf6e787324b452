"""C++ of this package: built on first use, by the machine's compiler if there is one, and kept in the user's cache."""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import platformdirs
import torch
import xxhash

from ngram_pool.waiting import told_if_long

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FOLDER = Path(platformdirs.user_cache_dir("lookahead")) / "kernels"
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_BF16 = HAS_AVX512 and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
_INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
_FLAGS = (
    "-x", "c++", "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC",
    "-fvisibility=default",
)  # fmt: skip


@cache
def library(name: str) -> ctypes.CDLL | None:
    """What ``name``.cpp defines; None, and a warning in the log, where it cannot be built."""
    try:
        try:
            return ctypes.CDLL(str(_built(name)))
        except OSError:  # what was kept may be damaged
            return ctypes.CDLL(str(_built(name, anew=True)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        logger.warning(
            "%s is left to torch, which is slower: it is built by a C++ compiler, and that failed (%s)\n%s",
            name, error, output,
        )  # fmt: skip
        return None


def kernels(
    name: str, function: str, dtypes: Iterable[torch.dtype], arguments: list[type]
) -> dict[torch.dtype, "ctypes._CFuncPtr"]:
    """What ``name``.cpp defines as ``function``, by dtype; nothing where it cannot be built."""
    built = library(name)
    of_dtype = {} if built is None else {dtype: built[f"{function}_{str(dtype)[6:]}"] for dtype in dtypes}
    for kernel in of_dtype.values():
        kernel.argtypes, kernel.restype = arguments, None
    return of_dtype


def _built(name: str, anew: bool = False) -> Path:
    """The shared library, which is built unless it was before, of the same source in the same way."""
    source = (SOURCES / f"{name}.cpp").read_bytes()
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "g++"]
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    command = [*compiler, *instructions, *(["-mavx512bf16"] if HAS_BF16 else []), *_FLAGS]
    of = source + (SOURCES / "vectors.h").read_bytes() + repr(command).encode()
    path = FOLDER / f"{name}-{xxhash.xxh3_64_hexdigest(of)}.so"
    if anew or not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        told = told_if_long(f"building {name}.cpp, once on a machine")
        with told, tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            new = Path(folder) / path.name
            command += ["-I", str(SOURCES), "-", "-o", str(new)]
            subprocess.run(command, input=source, capture_output=True, check=True, timeout=120)
            with new.open("rb") as file:
                os.fsync(file.fileno())  # half of a library would end whatever process loads it
            os.replace(new, path)
    return path


KERNELS = ("products", "tree_attention")


def why_missing(name):
    return None if library(name) else "not built"
