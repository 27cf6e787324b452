"""Whether the machine has room. Linux promises memory that it does not have, and kills whoever then writes to it."""

import os


def check_fits(nbytes: int) -> None:
    """Raises MemoryError if that is more than all of the machine's memory, where the system tells how much it has."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows, which promises no more than it has
        return
    if nbytes > installed:
        raise MemoryError(f"{nbytes / 2**20:,.0f} MiB are more than the {installed / 2**20:,.0f} MiB of this machine")
