"""Answers while they leave: those that are written, and wait for their clients to take them; and what is written of
answers that come whole.

The first hold no place of a request. Where there are too many, or too large ones, one makes room: it is one of the
client with the most of them; of these, the one that was written first.
"""

from asyncio import Future
from collections.abc import Hashable
from typing import Any

from lookahead.tools.server.answering import Piece, Words
from lookahead.tools.server.arriving import Waiting
from lookahead.tools.server.parsing import Call

MOST_UNREAD = 128  # answers
GATHERED = 2**27  # bytes of answers that come whole, while they are written, all together
UNREAD = 2**26  # bytes of them, all together, where one may have more; and of a stream that is still written
CHUNK = 2**16  # bytes that a client is sent at once, at most
A_PIECE, A_TOKEN = 512, 128  # bytes that stand around a piece, and that a token takes with its probability


class Leaving:
    """The answers that are written and not yet taken. Only one event loop may use them."""

    def __init__(self) -> None:
        self._waiting = Waiting[Future[Any]]()
        self._sizes: dict[Future[Any], int] = {}
        self._bytes = 0

    def add(self, client: str, gone: Future[Any], size: int) -> None:
        """Let an answer wait. client: its address. gone: is cancelled if the answer makes room. size: bytes."""
        self._waiting.add(client, gone)
        self._sizes[gone] = size
        self._bytes += size
        while len(self._waiting) > MOST_UNREAD or (self._bytes > UNREAD and len(self._waiting) > 1):
            of, first = self._waiting.first_to_go()
            self.discard(of, first)
            first.cancel()

    def discard(self, client: str, gone: Future[Any]) -> None:
        """Forget an answer. It may be forgotten before."""
        if self._waiting.discard(client, gone):
            self._bytes -= self._sizes.pop(gone)


class Gathered:
    """What is written of answers that come whole, until all of each is. Only one event loop may use it."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}
        self._bytes = 0

    def add(self, answer: Hashable, size: int) -> Hashable | None:
        """Let an answer grow by ``size`` bytes. Return the one that must end, the largest, if all take too many."""
        self._sizes[answer] = self._sizes.get(answer, 0) + size
        self._bytes += size
        if self._bytes <= GATHERED:
            return None
        largest = max(self._sizes, key=self._sizes.__getitem__)
        self.discard(largest)
        return largest

    def discard(self, answer: Hashable) -> None:
        """Forget an answer. It may be forgotten before."""
        self._bytes -= self._sizes.pop(answer, 0)


def size_of(piece: Piece | Exception) -> int:
    """Return about how many bytes a piece takes until it is sent."""
    size = A_PIECE
    if isinstance(piece, Words):
        size += 4 * len(piece.text) + A_TOKEN * sum(1 + len(one.top_k) for one in piece.likelihoods)
    elif isinstance(piece, Call):
        size += 4 * len(piece.arguments)
    return size
