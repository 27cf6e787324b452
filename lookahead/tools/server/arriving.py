"""Requests while they arrive: how many, how large they are together, and how long each may take.

Where there are too many, one that is not whole makes room for a newer one: clients that stall hold up nobody. It is one
of the client with the most of them; of these, the one that has been silent for longest.
"""

import asyncio
import json
from asyncio import Future, Task, Transport
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import h11
from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from lookahead.tools.server.forms import error_body

PATIENCE = 60  # seconds for a body to arrive; for the head of a request; for a client to take some of its answer
STALL = 10  # seconds without a byte of a body
HELD = 2**26  # bytes of bodies that arrive or wait to be read, all together
SMALL = 2**18  # bytes of a body that are held however many others there are
BEGINNING = 0.1  # seconds in which a new connection makes room for no other
MOST_ARRIVING = 256  # bodies of which more is to come
MOST_CONNECTIONS = 768  # more than those and the requests that are answered, so that a new one always has room

ABORT = "lookahead.abort"  # extension of ASGI: a function that ends a connection, whatever is still to be sent by it

One = TypeVar("One")


def host_of(client: tuple[str, int] | None) -> str:
    """Return the address of a client, which several connections may share. client: as ASGI names it."""
    return client[0] if client else ""


class Waiting(Generic[One]):
    """What waits for clients to go on, by their addresses. No step looks at all that waits: crowds come at once."""

    def __init__(self) -> None:
        self._of: dict[str, dict[One, None]] = {}  # of each address; what has been silent for longest is first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[One]:
        return chain.from_iterable(self._of.values())

    def add(self, client: str, one: One) -> None:
        """client: its address."""
        self._of.setdefault(client, {})[one] = None
        self._count += 1

    def discard(self, client: str, one: One) -> bool:
        """Return whether it was there."""
        those = self._of.get(client, {})
        if one not in those:
            return False
        del those[one]
        self._count -= 1
        if not those:
            del self._of[client]
        return True

    def first_to_go(self) -> tuple[str, One]:
        """Return what makes room, after its client's address."""
        _, most = max((len(those), client) for client, those in self._of.items())
        return most, next(iter(self._of[most]))


class UnreadError(Exception):
    """A body is not read, for the reason that the message says. status: of HTTP."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Body:
    """What has arrived of a body. client: its address. refused: done once it makes room for others."""

    client: str
    bytes: bytearray = field(default_factory=bytearray)
    refused: Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Bodies:
    """The bodies that arrive, and those that wait to be read. Only one event loop may use them."""

    def __init__(self, most: int):
        """most: bytes of a body."""
        self.most = most
        self._held = 0  # bytes of all
        self._arriving = Waiting[Body]()

    async def take(self, headers: Mapping[str, str], receive: Receive, client: str = "") -> Body:
        """Return the body of a request, which is held until `release`. Raises UnreadError, ClientDisconnect.

        client: its address.
        """
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.most:
            raise self._too_large()
        body = Body(client)
        reading: Task[None] = asyncio.ensure_future(self._read(body, receive))
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        try:
            await asyncio.sleep(0)  # what has come with its head is read: it needs no room
            if not (reading.done() or body.refused.done()):
                self._arriving.add(client, body)
                if len(self._arriving) > MOST_ARRIVING:
                    self._refuse(self._arriving.first_to_go()[1])
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
            self._arriving.discard(client, body)
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
            if self._arriving.discard(body.client, body):
                self._arriving.add(body.client, body)
            if len(body.bytes) > self.most:
                raise self._too_large()
            if self._held > max(HELD, self.most):
                largest = max(self._arriving, key=lambda one: len(one.bytes), default=None)
                if largest is not None and len(largest.bytes) > SMALL:
                    self._refuse(largest)
            if not message.get("more_body", False):
                return

    def _refuse(self, body: Body) -> None:
        self._arriving.discard(body.client, body)
        self.release(body)
        body.refused.set_result(None)

    def _too_large(self) -> UnreadError:
        return UnreadError(f"the body of a request must have {self.most} bytes at most; this one is larger", 413)


class Connection(H11Protocol):
    """A connection of uvicorn's, which ends when no request begins, and makes room for another one before that."""

    def __init__(self, idle: "Waiting[Connection]", **of_uvicorn: Any):
        """idle: all connections of a server that have no request."""
        super().__init__(**of_uvicorn)
        self._idle = idle
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.loop.call_later(BEGINNING, self._watch)  # what has come meanwhile is read first: a crowd connects at once

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with an error like all others; uvicorn's own is plain text."""
        body = json.dumps(error_body(msg, 400)).encode()
        headers = {"Content-Type": "application/json", "Content-Length": f"{len(body)}", "Connection": "close"}
        head = h11.Response(status_code=400, headers=[*headers.items()], reason="Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._goes_on()

    def _watch(self) -> None:
        """End the connection if it stays without a request."""
        cycle: Any = self.cycle
        if cycle is not None:
            cycle.scope.setdefault("extensions", {})[ABORT] = self.transport.abort
        if cycle is not None and not cycle.response_complete:
            self._goes_on()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(PATIENCE, self._end)
            self._idle.add(host_of(self.client), self)
            if len(self.connections) > MOST_CONNECTIONS:
                self._idle.first_to_go()[1]._end()

    def _end(self) -> None:
        self._goes_on()
        self.transport.abort()

    def _goes_on(self) -> None:
        """Wait no longer for a request."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
            self._idle.discard(host_of(self.client), self)
