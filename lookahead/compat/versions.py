"""The tested versions of torch and transformers, for error messages."""

import re
import sys

NEWEST_TESTED = {"torch": "2.15.0", "transformers": "5.24.0"}
"""The newest versions with which tests have passed."""


def newer_than_tested() -> str:
    """Name the installed versions that are newer than the tested ones, and how to go back; "" if there are none."""
    here = {name: sys.modules[name].__version__ for name in NEWEST_TESTED}
    newer = [name for name, tested in NEWEST_TESTED.items() if _release(here[name]) > _release(tested)]
    if not newer:
        return ""
    installed = " and ".join(f"{name} {here[name]}" for name in newer)
    back = " ".join(f"{name}=={NEWEST_TESTED[name]}" for name in newer)
    return f"{installed} is newer than lookahead was tested with: `pip install {back}` goes back."


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
