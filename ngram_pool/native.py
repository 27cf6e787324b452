"""The loops of a pool: those in C++ if they were built when the package was installed, or else those in Python.

Both have the same names, take the same arguments, and write the same bits. C++ runs without Python's global lock.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

from ngram_pool import cpp, reference
from ngram_pool.table import Credence, Table

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
KERNELS = PACKAGE / "kernels"


class _Pool(ctypes.Structure):
    """`Pool` in table.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*Table._fields, *Credence._fields)]
    _fields_ += [("entries", ctypes.c_int64), ("exp", ctypes.c_void_p), ("pow", ctypes.c_void_p)]


class _Array:
    """A contiguous and writable array as an argument. ctypes gets its address without running Python code."""

    from_param = (ctypes.c_char * 0).from_buffer


_POOL, _WHOLE = ctypes.POINTER(_Pool), ctypes.c_int64
_ARGUMENTS: dict[str, list[Any]] = {  # of the functions in `reference`, which explains them
    "learn_text": [_POOL, _Array, _WHOLE, _WHOLE, _WHOLE, _WHOLE],
    "learn_rows": [_POOL, _Array, _WHOLE, _WHOLE, _Array, _Array, _WHOLE, _WHOLE, _WHOLE],
    "learn_step": [_POOL, _Array, _WHOLE, _WHOLE, _Array, _Array, _WHOLE, _Array, _Array, _WHOLE, _WHOLE],
    "calibrate": [_POOL, _Array, _WHOLE, _WHOLE, _Array, _Array, _WHOLE],
    "calibrate_text": [_POOL, _Array, _WHOLE, _WHOLE],
    "find_entries": [_POOL, _Array, _WHOLE, _WHOLE, _WHOLE, _Array],
    "merge": [_POOL, _WHOLE, _POOL, _WHOLE, _POOL],
    "grow": [
        _POOL, _Array, ctypes.c_double, _WHOLE, ctypes.c_bool, _Array, _WHOLE, _WHOLE, _Array, _Array, _WHOLE,
    ],
}  # fmt: skip

_WITH_RESULT = "learn_text", "learn_rows", "learn_step", "grow"


class Library:
    """The functions of `reference` in C++."""

    def __init__(self, library: ctypes.CDLL):
        system = ctypes.CDLL(None)
        self._exp, self._pow = (ctypes.cast(system[name], ctypes.c_void_p) for name in ("exp", "pow"))
        for name, arguments in _ARGUMENTS.items():
            function = library[f"pool_{name}"]
            function.argtypes, function.restype = arguments, _WHOLE if name in _WITH_RESULT else None
            setattr(self, name, function)

    def opened(self, table: Table, credence: Credence) -> Any:
        """Return the addresses of the arrays, for all functions. The arrays must be contiguous and outlive it.

        It is made once, because finding eight addresses takes longer than growing a small tree: after a pass of the
        model, the processor's caches are cold.
        """
        places = [array.ctypes.data for array in (*table, *credence)]
        return ctypes.byref(_Pool(*places, len(table.keys), self._exp, self._pow))


def loops() -> Any:
    """Return an object with the loops' functions, as `reference` has them."""
    library = _library(KERNELS)
    return reference if isinstance(library, str) else library


def why_missing() -> str | None:
    """Say why the C++ is not used: a line, then the compiler's output if any. None if it is."""
    library = _library(KERNELS)
    return library if isinstance(library, str) else None


@cache
def _library(folder: Path) -> Library | str:
    """Load the library from its folder. If there is none, log a warning and return the reason."""
    found = cpp.load(PACKAGE, folder, "DEFAULT")
    if isinstance(found, str):
        logger.warning("n-gram pools run in Python, which is much slower: %s", found)
        return found
    return Library(found)
