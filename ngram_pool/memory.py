"""Check for room in memory. Linux grants more memory than it has, and kills a process that then writes to it."""

import os


def check_fits(nbytes: int) -> None:
    """Raise MemoryError if ``nbytes`` exceed the machine's memory. Does nothing if its size is unknown."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows, which grants only memory that it has
        return
    if nbytes > installed:
        raise MemoryError(f"{nbytes / 2**20:,.0f} MiB are more than the {installed / 2**20:,.0f} MiB of this machine")
