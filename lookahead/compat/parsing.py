"""Private names of transformers' parsing of answers, each behind a function."""

from typing import Any


def unread(parser: Any) -> str:
    """The end of what transformers' response parser was fed: the text that may be the beginning of a mark."""
    return parser._buffer[parser._pos :]
