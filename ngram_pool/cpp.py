"""A package's C++: its sources, and loading the library for a kind of processor.

`setup.py`, which builds the libraries, runs this module, too. So it uses only the standard library.
"""

import ctypes
import hashlib
from pathlib import Path


def sources(package: Path) -> list[Path]:
    return sorted([*package.glob("*.cpp"), *package.glob("*.h")])


def digest(package: Path) -> str:
    """A hash of all sources. A library that was built from other sources is not loaded."""
    hashed = hashlib.sha256()
    for source in sources(package):
        hashed.update(hashlib.sha256(source.read_bytes()).digest())
    return hashed.hexdigest()[:16]


def load(package: Path, folder: Path, kind: str) -> ctypes.CDLL | str:
    """Load the library for a kind of processor, or return why there is none: a line, then the compiler's output if any.

    package: folder of the sources. folder: that of the libraries.
    """
    of_sources = digest(package)
    library = folder / f"{kind}-{of_sources}.so"
    try:
        return ctypes.CDLL(str(library)) if library.exists() else _why_not_built(folder, kind, of_sources)
    except OSError as error:
        return f"the library cannot be loaded: install lookahead again, on this system ({error})"


def _why_not_built(folder: Path, kind: str, of_sources: str) -> str:
    missing = folder / "missing.txt"
    if not missing.exists():
        built = sorted(library.name.split("-")[0] for library in folder.glob(f"*-{of_sources}.so"))
        if built:
            return (
                f"the C++ was built for {' and '.join(built)}, but is to run as {kind}: "
                "run `python setup.py build_kernels --inplace` in the clone"
            )
        if any(folder.glob("*.so")):
            return "the C++ has changed since it was built: install lookahead again"
        return "the C++ was never built: install lookahead with pip, or run `python setup.py build_kernels --inplace`"
    reason, *output = missing.read_text(encoding="utf-8").split("\n", 1)
    first = f"the C++ could not be built when lookahead was installed: {reason}. Then install it again"
    return "\n".join([first, *output])
