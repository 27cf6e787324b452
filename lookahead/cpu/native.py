"""The package's C++: a library for each kind of processor, built when the package is installed (`setup.py`)."""

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lookahead.compat import cpu_capability
from ngram_pool import cpp

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
FOLDER = PACKAGE / "kernels"
FLAVOURS = "AVX512_AMX", "AVX512_BF16", "AVX512", "AVX2", "DEFAULT"
"""Kinds of processors, in torch's words, the widest first."""
FLOATS = torch.float32, torch.bfloat16
Kernels = Mapping[torch.dtype, Callable[..., Any]]
"""The versions of a function in the library, by the dtype of their arguments. Empty if there is no library."""


def _processor_flags() -> str:
    """What the processor can do. Empty if Linux does not say."""
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
    return capability if capability in FLAVOURS else "DEFAULT"


CAPABILITY = _capability()
"""The one of `FLAVOURS` whose instructions torch uses.

ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA can lower it.
"""
HAS_AMX = CAPABILITY == "AVX512_AMX"


def kernels(
    function: str, dtypes: Iterable[torch.dtype], arguments: Sequence[type], result: type | None = None
) -> Kernels:
    """Return a function of the library, for each dtype that it is defined for; empty if there is no library."""
    library = _library()
    if isinstance(library, str):
        return {}
    symbols = {dtype: f"{function}_{str(dtype).removeprefix('torch.')}" for dtype in dtypes}
    found = {dtype: library[symbol] for dtype, symbol in symbols.items() if hasattr(library, symbol)}
    for kernel in found.values():
        kernel.argtypes, kernel.restype = arguments, result
    return found


def why_missing() -> str | None:
    """Say why the library cannot be used here: a line, then the compiler's output if any. None if it can be used."""
    library = _library()
    return library if isinstance(library, str) else None


@cache
def _library() -> ctypes.CDLL | str:
    """Load the library for this processor. If there is none, log a warning and return the reason."""
    found = cpp.load(PACKAGE, FOLDER, CAPABILITY)
    if isinstance(found, str):
        logger.warning("our kernels are left to torch, which is slower: %s", found)
    return found
