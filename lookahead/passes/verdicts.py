"""Passed probes, stored in the user's cache directory for later processes.

A verdict depends on everything that `models.state` checks, on the versions of the libraries, and on our own code. So it
is stored only if torch and transformers define all code of a pass. Other models are probed in each process, and so are
compiled ones, whose code cannot be identified.
"""

from functools import cache
from pathlib import Path

import xxhash
from transformers import PreTrainedModel

from lookahead.cpu import native
from lookahead.models.state import state_of
from lookahead.passes import stored
from lookahead.passes.environment import environment


def path_of(model: PreTrainedModel, *depends_on: object) -> Path | None:
    """Return the file of a verdict; None if it must not be stored. depends_on: everything else that it depends on."""
    state = state_of(model)
    if not state.is_known or state.is_compiled:
        return None
    text = repr((environment(model), native.CAPABILITY, _our_code(), state.text, depends_on))
    return stored.path_by("verdicts", model, text)


def load(path: Path | None) -> dict | None:
    """Read a verdict; None if there is none."""
    return stored.read(path) if path else None


def save(path: Path | None, verdict: dict) -> None:
    """Write a verdict, if it may be stored."""
    if path:
        stored.keep(path, verdict)


@cache
def _our_code() -> str:
    """Changes whenever a file of this package does."""
    files = sorted(path for path in Path(__file__).parents[1].rglob("*.*") if path.suffix in (".py", ".cpp", ".h"))
    return xxhash.xxh3_128_hexdigest(b"".join(path.read_bytes() for path in files))
