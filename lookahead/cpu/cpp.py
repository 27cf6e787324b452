"""The C++ that libraries are built of. `setup.py` runs this too: standard library only."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def sources() -> list[Path]:
    return sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])


def digest() -> str:
    """A hash of all sources, so that no library is loaded that was built of others."""
    hashed = hashlib.sha256()
    for source in sources():
        hashed.update(hashlib.sha256(source.read_bytes()).digest())
    return hashed.hexdigest()[:16]
