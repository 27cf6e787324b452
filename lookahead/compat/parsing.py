"""Private names of transformers' parsing of answers, each behind a function."""

from typing import Any


def unread(parser: Any) -> str:
    """The text that transformers' response parser holds back, because it may be the beginning of a mark."""
    return parser._buffer[parser._pos :]
