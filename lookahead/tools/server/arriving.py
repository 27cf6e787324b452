"""Requests while they arrive: how many, how large they are together, and how long each may take.

Where there are too many, one that is not whole makes room for a newer one: clients that stall hold up nobody.
"""

import asyncio
from asyncio import Future, Task, Transport
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 60  # seconds for a body to arrive; for the head of a request; for a client to take some of its answer
STALL = 10  # seconds without a byte of a body
HELD = 2**26  # bytes of bodies that arrive or wait to be read, all together
SMALL = 2**18  # bytes of a body that are held however many others there are
MOST_CONNECTIONS = 512


class UnreadError(Exception):
    """A body is not read, for the reason that the message says. status: of HTTP."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Body:
    """What has arrived of a body. refused: done once it makes room for others."""

    bytes: bytearray
    refused: Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Bodies:
    """The bodies that arrive, and those that wait to be read. Only one event loop may use them."""

    def __init__(self, most: int):
        """most: bytes of a body."""
        self.most = most
        self._held = 0  # bytes of all
        self._arriving: dict[Body, None] = {}  # the oldest is first

    @property
    def arriving(self) -> int:
        """How many bodies arrive."""
        return len(self._arriving)

    def make_room(self) -> bool:
        """Refuse the body that began to arrive before all others; return whether there was one."""
        for body in self._arriving:
            self._refuse(body)
            return True
        return False

    async def take(self, headers: Mapping[str, str], receive: Receive) -> Body:
        """Return the body of a request, which is held until `release`. Raises UnreadError, ClientDisconnect."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.most:
            raise self._too_large()
        body = Body(bytearray())
        self._arriving[body] = None
        reading: Task[None] = asyncio.ensure_future(self._read(body, receive))
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        try:
            while not reading.done():
                size = len(body.bytes)
                await asyncio.wait({reading, body.refused}, timeout=STALL, return_when=asyncio.FIRST_COMPLETED)
                if body.refused.done():
                    raise UnreadError("too many bodies arrive at once, or too large ones: try again later", 503)
                if not reading.done() and (len(body.bytes) == size or loop.time() > end):
                    raise UnreadError(
                        f"the body has not arrived: it may take {PATIENCE} seconds, and {STALL} without any of it", 408
                    )
            reading.result()
        except BaseException:
            reading.cancel()
            self.release(body)
            raise
        finally:
            self._arriving.pop(body, None)
        return body

    def release(self, body: Body) -> None:
        """Forget a body. It may be forgotten before."""
        self._held -= len(body.bytes)
        body.bytes = bytearray()

    async def _read(self, body: Body, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if body.refused.done():
                return
            chunk = message.get("body", b"")
            body.bytes += chunk
            self._held += len(chunk)
            if len(body.bytes) > self.most:
                raise self._too_large()
            if self._held > max(HELD, self.most):
                largest = max(self._arriving, key=lambda one: len(one.bytes))
                if len(largest.bytes) > SMALL:
                    self._refuse(largest)
            if not message.get("more_body", False):
                return

    def _refuse(self, body: Body) -> None:
        del self._arriving[body]
        self.release(body)
        body.refused.set_result(None)

    def _too_large(self) -> UnreadError:
        return UnreadError(f"the body of a request must have {self.most} bytes at most; this one is larger", 413)


class Connection(H11Protocol):
    """A connection of uvicorn's, which ends when no request begins, and makes room for another one before that."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > MOST_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one._is_idle]
            min(idle, key=lambda one: one._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    @property
    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _watch(self) -> None:
        """End the connection if it stays without a request."""
        if not self._is_idle:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.abort)
