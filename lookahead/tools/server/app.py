"""Routes, and the way of a request from its body to its answer."""

import asyncio
import hmac
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from heapq import nlargest
from http import HTTPStatus
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import quote

import click
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead import Lookahead
from lookahead.extending import context_length, vocabulary_of
from lookahead.tools.chat import PLAIN_TEMPLATE
from lookahead.tools.files import read_text
from lookahead.tools.loading import decoding, load_wrapped
from lookahead.tools.server import chats, messages, responses
from lookahead.tools.server.answering import End, Piece, Words
from lookahead.tools.server.arriving import ABORT, PATIENCE, Bodies, Body, Connection, UnreadError, Waiting, host_of
from lookahead.tools.server.fields import (
    CHAT,
    COMPLETION,
    COUNT,
    MESSAGE,
    PROMPTS,
    RESPONSE,
    Asked,
    RefusedError,
    Wishes,
    blamed,
    read_request,
)
from lookahead.tools.server.forms import Form
from lookahead.tools.server.generations import Answer, BusyError, Generations, Worker
from lookahead.tools.server.leaving import CHUNK, UNREAD, Gathered, Leaving, size_of
from lookahead.tools.server.metrics import Metrics, exposition
from lookahead.tools.server.prefixes import Prefixes
from lookahead.tools.server.reading import Prompt, Reader, Written
from lookahead.tools.server.rehearsals import STACK, Rehearsals

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("lookahead.serve")

ENDPOINTS = (CHAT, COMPLETION, RESPONSE, MESSAGE)  # that decode
FORMS: dict[str, Any] = {
    CHAT: chats.Chat, COMPLETION: chats.Completion, RESPONSE: responses.Response, MESSAGE: messages.Message,
    COUNT: messages.Message,
}  # fmt: skip
BYTES_A_TOKEN = 16  # of a request: enough for any language, also where JSON escapes every character
LEAST_BODY, LARGEST_BODY = 2**20, 2**23
GRACE = 5  # seconds that requests have to end once the server is told to stop
LAST_WORDS = 1  # seconds in which a stream can still say that it was stopped
MOST_OPEN = 256  # requests whose answers are not yet written; further ones are refused
STOPPING = "the server is stopping"
TOO_LARGE = (
    "the answers that come whole take too much room, and these the most: let them come as a stream, or ask for fewer "
    "of them at once, or for fewer probabilities"
)
BLAMED = 4  # tools that are tried alone where all of them take too long: each may take seconds
PING = 10  # seconds without an event, after which a stream shows that it is alive
PROBES = ("/health", "/metrics")  # are asked again and again, so what succeeds there has no line in the log
KNOWN = (*FORMS, "/v1/models", *PROBES, "/")  # paths that are counted by their names: others may be any number
TOLD = "lookahead.told"  # in the scope of a request whose end has been counted and told

Result = TypeVar("Result")


def serve(
    host: str,
    sockets: list[socket.socket],
    seed: int,
    model_name: str | None,
    template_file: TextIO | None,
    **shared: Any,
) -> None:
    """Serve until a signal. sockets: listening, all at one port of the host. Of ``shared``, some are for `make_app`."""
    name = shared.pop("name") or model_name or "demo_model"
    of_app = {option: shared.pop(option) for option in ("cache_mb", "parallel", "api_key", "cors", "max_body")}
    model, tokenizer, engine, options = load_wrapped(model_name, **shared)
    if template_file is not None:
        tokenizer.chat_template = read_text(template_file)
    elif model_name is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    assistant, _ = options.pop("assistant_model", None), options.pop("tokenizer", None)
    model.generation_config.update(**options)  # type: ignore[union-attr]  # what requests leave open
    with decoding():
        if engine:
            engine.prepare(model)  # so that the first request does not wait for it
    torch.manual_seed(seed)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    app = make_app(model, tokenizer, name, assistant, **of_app)
    http: Any = partial(Connection, Waiting())
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=http, ws="none", access_log=False, timeout_graceful_shutdown=GRACE, timeout_keep_alive=PATIENCE
        )
    )
    place = f"[{host}]" if ":" in host else host
    click.echo(f"running on http://{place}:{sockets[0].getsockname()[1]} (Ctrl-C to quit)", err=True)
    with suppress(KeyboardInterrupt):  # uvicorn passes it on when it has ended
        server.run(sockets)


def make_app(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    assistant: PreTrainedModel | None = None,
    cache_mb: int = 1024,
    parallel: int = 8,
    api_key: str | None = None,
    cors: Sequence[str] = (),
    max_body: int | None = None,
) -> Starlette:
    """Return the server of one model as an ASGI application, for uvicorn or another server.

    model: wrapped, so that all requests share its pool; any other model decodes as usual.
    name: what requests call the model.
    assistant: draft model for all requests.
    cache_mb: MB (of 2**20 bytes) of what earlier requests have left for those that go on from them (`Prefixes`).
    parallel: most requests that are decoded at once; with an assistant, or a model that is not wrapped, one is.
    api_key: what each request must give, but for the page and /health; None: nothing.
    cors: origins whose pages may send requests; "*" for all.
    max_body: bytes of the largest body; by default, 16 for each token of the context, from 1 MiB to 8 MiB.

    Raises ValueError for an empty key.
    """
    if api_key == "":
        raise ValueError("api_key is empty, which every request would give: leave it out, or give a key")
    server = Server(model, tokenizer, name, assistant, cache_mb, parallel, max_body)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, says = request.url.path, str(error.detail)
        if says == HTTPStatus.NOT_FOUND.phrase:  # of no route
            says = f"nothing is served at {path:.80}: requests go to {', '.join(FORMS)}"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            says = f"{path:.80} takes {error.headers['Allow']}, not {request.method:.80}"  # type: ignore[index]  # it has
        return JSONResponse(_form_at(path).error(says, error.status_code), error.status_code, error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(_form_at(request.url.path).error(f"{type(error).__name__}: {error}", 500), 500)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def shown(request: Request) -> Response:
        return HTMLResponse(page)

    routes = [Route(path, Endpoint(server, path), methods=["POST"]) for path in FORMS]
    routes += [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/metrics", server.exposition),
        Route("/health", health),
        Route("/", shown),
    ]
    middleware = [Middleware(Trimmed), Middleware(Noted, requests=server.metrics.requests)]
    if cors:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])
        )
    if api_key is not None:
        middleware.append(Middleware(Guarded, key=api_key))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: refused, Exception: failed},
        lifespan=server.lifespan,
    )


def _form_at(path: str) -> type[Form]:
    """Return the form of errors at a path, whether anything is there or not."""
    return messages.Message if f"{path}/".startswith(f"{MESSAGE}/") else Form


class Trimmed:
    """Has a path mean the same with slashes around it, as clients that join addresses write it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = f"/{scope['path'].strip('/')}"  # in place: the connection may still add to its scope
        await self._app(scope, receive, send)


class Noted:
    """Counts and tells of the requests that no `Exchange` tells of: those of other routes, and those that are refused
    before. Those that have not arrived are counted alone.
    """

    def __init__(self, app: ASGIApp, requests: Counter):
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), "cancelled"

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = "500"
            raise
        finally:
            if not scope.get(TOLD):
                method, path = scope["method"], scope["path"]
                is_known = path in KNOWN and method != "OPTIONS"  # which browsers send before a request
                self._requests[path if is_known else "other", status] += 1
                if status != "cancelled" and (status != "200" or path not in PROBES):  # crowds come and go
                    logger.info(f"{method:.80} {quote(path):.80} {status}, {time.perf_counter() - began:.2f} s")


class Guarded:
    """Refuses requests without the key."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/", "/health"):
            sent = Request(scope).headers
            scheme, _, token = sent.get("authorization", "").partition(" ")
            given = sent.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""
            # Clients may send both, one of them for another server. They are compared as the bytes that were sent.
            if not any([hmac.compare_digest(key.encode("latin-1"), self._key) for key in given]):
                says = "the key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                await JSONResponse(_form_at(scope["path"]).error(says, 401), 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Server:
    """What all requests share."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        assistant: PreTrainedModel | None,
        cache_mb: int,
        parallel: int,
        max_body: int | None,
    ):
        engine: Lookahead | None = getattr(model, "lookahead", None)  # type: ignore[assignment]  # no module
        self.name, self.metrics = name, Metrics()
        most = min(max(BYTES_A_TOKEN * context_length(model), LEAST_BODY), LARGEST_BODY)
        self.bodies = Bodies(max_body or most)
        self.reader = Reader(model, tokenizer, written := Written() if cache_mb else Written(0))
        self._prefixes = Prefixes(model, cache_mb * 2**20)
        self.told = Told(at_once=engine is None or assistant is not None)
        self.generations = Generations(
            model, self.reader, written, self._prefixes, engine, assistant, parallel, self.told.hand_over
        )
        self._engine, self._model, self._since = engine, model, int(time.time())
        self.reading, self.compiling = Worker(), Worker(STACK)
        """Threads that read requests, and that compile what some of them enforce."""
        self.rehearsals = Rehearsals()
        self.leaving, self.gathered = Leaving(), Gathered()
        self.open: set[asyncio.Future] = set()
        """Requests under way."""

    async def by(self, worker: Worker, call: Callable[[], Result]) -> Result:
        """Return the result of ``call`` from another thread, so that no template, tokenizer or schema holds up others.

        Each thread makes its calls one at a time, in their order.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def tell(settle: Callable[[Any], None], value: Any) -> None:
            if not result.done():
                settle(value)

        def run() -> None:
            if result.cancelled():
                return
            try:
                told = tell, result.set_result, call()
            except Exception as error:
                told = tell, result.set_exception, error  # type: ignore[assignment]
            call_in(result.get_loop(), *told)

        worker.calls.put(run)
        return await result

    async def grammars(self, prompts: list[Prompt], wishes: Wishes) -> "list[LLMatcher]":
        """Return the grammars of the answers to each prompt. Raises RefusedError."""
        of = self.generations
        texts = await self.by(self.reading, lambda: of.grammar_texts(prompts, wishes))
        with blamed(wishes.demand.param):
            for text in dict.fromkeys(texts):
                try:
                    await self.rehearsals.rehearse(text)
                except RefusedError:
                    await self._blame_a_tool(prompts[texts.index(text)], wishes)
                    raise
        return await self.by(self.compiling, lambda: of.grammars(prompts, texts, wishes))

    async def _blame_a_tool(self, prompt: Prompt, wishes: Wishes) -> None:
        """Raise RefusedError for a tool whose schema alone takes too long to compile. The largest are tried first."""
        from lookahead.tools.server.grammar import blamed_tool

        tools = await self.by(self.reading, lambda: self.generations.grammars_of_tools(prompt, wishes))
        for number, name, text in nlargest(BLAMED, tools, key=lambda tool: len(tool[2])):
            with blamed_tool(number, name):
                await self.rehearsals.rehearse(text)

    def understand(self, body: bytearray, path: str) -> tuple[Asked, Any, list[Prompt]]:
        """Return what a request says, its wishes and its prompts. Raises RefusedError."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body must be a JSON object: {error}") from error
        if not isinstance(said, dict):
            raise RefusedError("the body must be a JSON object")
        reader = self.reader
        asked, wishes = read_request(said, path, self.name, vocabulary_of(self._model), reader.reserved)
        with blamed(PROMPTS[path]):
            return asked, wishes, reader.read(asked, wishes)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Make what would hold up requests before there are any; end with the call of generate that has been cancelled:
        a thread must not decode while Python ends.
        """
        await self.by(self.compiling, self.generations.prepare_grammars)
        yield
        if self.open:
            await asyncio.wait(self.open, timeout=2 * LAST_WORDS)
        with suppress(asyncio.TimeoutError):  # a long prompt is being computed
            await asyncio.wait_for(self.generations.ended(), GRACE)

    async def exposition(self, request: Request) -> Response:
        text = exposition(self._engine, self.metrics, self._prefixes)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _described(self) -> dict:
        context = context_length(self._model)
        return {
            "id": self.name, "object": "model", "created": self._since, "owned_by": "lookahead", "type": "model",
            "display_name": self.name, "context_length": context, "max_input_tokens": context - 1,
            "lifecycle": "active",
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._since)),
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        pages = {"has_more": False, "first_id": self.name, "last_id": self.name}
        return JSONResponse({"object": "list", "data": [self._described()]} | pages)

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name.rstrip("/"):
            raise HTTPException(404, f"the only model is {self.name!r}")
        return JSONResponse(self._described())


class Endpoint:
    """Answers the requests at one path, as an ASGI application."""

    def __init__(self, server: Server, path: str):
        self._server, self._path = server, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = asyncio.ensure_future(Exchange(self._server, self._path, scope, receive, send).serve())
        self._server.open.add(serving)
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:  # the server is stopping
            serving.cancel()
            await asyncio.wait({serving}, timeout=2 * LAST_WORDS)
        finally:
            self._server.open.discard(serving)


class Exchange:
    """One request and its answer. It is cancelled when its client goes, takes nothing of the answer for long, or takes
    a stream so slowly that too much of it waits.
    """

    def __init__(self, server: Server, path: str, scope: Scope, receive: Receive, send: Send):
        self._server, self._path, self._scope, self._receive = server, path, scope, receive
        self._send_to_client = send
        self._status, self._is_complete = "cancelled", False
        self._began, self._first_text = time.perf_counter(), 0.0
        self._answers: list[Answer] = []
        self._pieces: asyncio.Queue[tuple[int, Piece | Exception] | None] = asyncio.Queue()  # None: nothing for long
        self._form: Form | None = None
        self._gone: asyncio.Future[Any] | None = None  # done when the client goes, has all, or is given up
        self._client = host_of(scope.get("client"))
        self._has_place = False  # among the requests whose answers are not yet written
        self._size = 0  # bytes of the request
        self._unsent = 0  # bytes of what was written, of a stream without what was sent
        self._unwritten = 0  # answers

    async def serve(self) -> None:
        requests, bodies = self._server.metrics.requests, self._server.bodies
        try:
            body = await bodies.take(Request(self._scope).headers, self._receive, self._client)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server is stopping
            await self._refuse(STOPPING, 503, {"Connection": "close"})
            raise
        except UnreadError as error:
            # Others may still send; if the connection ended, they would not see why.
            headers = {408: {"Connection": "close"}, 503: {"Retry-After": "1"}}.get(error.status)
            await self._refuse(str(error), error.status, headers)
            self._log()
            return
        if requests["running"] >= MOST_OPEN:
            bodies.release(body)
            await self._refuse(f"{MOST_OPEN} requests are open: try again later", 429, {"Retry-After": "1"})
            self._log()
            return
        requests["running"] += 1
        self._has_place, self._size = True, len(body.bytes)
        self._gone = gone = asyncio.ensure_future(self._receive())
        answering: asyncio.Future[Any] = asyncio.ensure_future(self._answer(body))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_complete or answering.done():
                await answering
            else:
                self._status = "cancelled"
        except Exception as error:  # a fault of the server, about which nobody has been told
            if self._status != "cancelled":
                raise
            await self._fail(error)
        except asyncio.CancelledError:  # the server is stopping, and an answer can say so
            self._pieces.put_nowait((0, InterruptedError(STOPPING)))
            await asyncio.wait({answering}, timeout=LAST_WORDS)
            if self._status == "cancelled":  # it has said nothing, such as while a schema is compiled
                answering.cancel()
                await asyncio.wait({answering}, timeout=LAST_WORDS / 2)
                await self._refuse(STOPPING, 503, {"Connection": "close"})
            raise
        finally:
            gone.cancel()
            answering.cancel()
            await asyncio.wait({answering})
            for answer in self._answers:
                self._server.generations.cancel(answer)
            bodies.release(body)
            requests["running"] -= self._has_place
            self._has_place = False
            self._server.leaving.discard(self._client, gone)
            self._server.gathered.discard(self)
            if self._status == "cancelled":  # or the connection stays until the client has taken what was sent
                self._scope.get("extensions", {}).get(ABORT, lambda: None)()
            self._log()
            self._answers = []  # they know this: together they would stay until Python looks for circles

    def _leave_place(self) -> None:
        """Let another request have the place of this one, whose answer is written."""
        if self._has_place and self._gone is not None:
            self._has_place = False
            self._server.metrics.requests["running"] -= 1
            self._server.gathered.discard(self)
            self._server.leaving.add(self._client, self._gone, self._size + self._unsent)

    def _take(self, number: int, piece: Piece | Exception) -> None:
        """Take a piece of an answer from the thread that writes it."""
        self._unsent += (size := size_of(piece))
        self._pieces.put_nowait((number, piece))
        if self._form is not None and not self._form.asked.streams:
            largest = self._server.gathered.add(self, size)
            if isinstance(largest, Exchange):
                largest._pieces.put_nowait((0, RefusedError(TOO_LARGE, "stream")))
        elif self._unsent > UNREAD and self._gone is not None:
            self._gone.cancel()
        self._unwritten -= isinstance(piece, End)
        if not self._unwritten or isinstance(piece, Exception):
            self._leave_place()

    async def _answer(self, body: Body) -> None:
        server = self._server
        headers = Request(self._scope).headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # browsers send others without asking the server
            await self._refuse("the body must be a JSON object, whose Content-Type is application/json", 400)
            return
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            await self._refuse(f"the body must be sent as it is, without Content-Encoding; it is {coding:.80}", 415)
            return
        try:
            asked, wishes, prompts = await server.by(server.reading, lambda: server.understand(body.bytes, self._path))
            server.bodies.release(body)
            if self._path == COUNT:
                await self._whole({"input_tokens": len(prompts[0].ids)})
                return
            self._form = form = FORMS[self._path](asked, server.name, prompts, wishes.answers)
            self._unwritten = len(form.answers)
            send = partial(server.told.add, asyncio.get_running_loop(), self._take)
            with blamed(PROMPTS[self._path]):
                grammars = await server.grammars(prompts, wishes) if wishes.demand else None
                beginning = asyncio.ensure_future(
                    server.by(server.reading, lambda: server.generations.begin(prompts, wishes, send, grammars))
                )
                try:
                    await asyncio.shield(beginning)
                finally:  # what has begun when the client goes is to end
                    self._answers = await beginning
        except RefusedError as error:
            await self._refuse(str(error), error.status, param=error.param, code=error.code)
        except BusyError as error:
            await self._refuse(str(error), 429, {"Retry-After": "1"})
        else:
            await (self._stream(form) if asked.streams else self._gather(form))

    async def _gather(self, form: Form) -> None:
        """Answer with one object."""
        while not form.is_whole:
            for number, piece in await self._next():
                if isinstance(piece, Exception):
                    await self._fail(piece)
                    return
                self._note(piece)
                list(form.add(number, piece))
        # Long answers with probabilities take seconds.
        await self._respond(await asyncio.to_thread(lambda: JSONResponse(form.object())))

    async def _stream(self, form: Form) -> None:
        """Answer with events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_text("".join(form.begin()))
        while not form.is_whole:
            if not (found := await self._next()):
                await self._send_text(form.ping())
                continue
            failed = next((piece for _, piece in found if isinstance(piece, Exception)), None)
            pieces = [(number, piece) for number, piece in found if not isinstance(piece, Exception)]
            for _, piece in pieces:
                self._note(piece)
            write = partial(self._written, form, pieces, failed)
            # What ends an answer may repeat all of it: with probabilities, that takes seconds.
            ends = any(isinstance(piece, End) for _, piece in pieces)
            await self._send_text(await asyncio.to_thread(write) if ends else write(), more=failed is None)
            self._unsent -= sum(size_of(piece) for _, piece in found)
            if failed is not None:
                return
        await self._send_text(await asyncio.to_thread(lambda: "".join(form.end())), more=False)

    async def _next(self) -> list[tuple[int, Piece | Exception]]:
        """Return the pieces that have come, when there are any; none if that takes long.

        asyncio.wait_for swallows a cancellation where a piece comes with it, up to Python 3.11.
        """
        late = asyncio.get_running_loop().call_later(PING, self._pieces.put_nowait, None)
        found = [await self._pieces.get()]
        late.cancel()
        while not self._pieces.empty():
            found.append(self._pieces.get_nowait())
        return [one for one in found if one is not None]

    @staticmethod
    def _written(form: Form, pieces: list[tuple[int, Piece]], failed: Exception | None) -> str:
        """Return the events of pieces, and of an error after them."""
        events = [event for number, piece in pieces for event in form.add(number, piece)]
        return "".join(events if failed is None else [*events, *form.fail(*_failure(failed))])

    def _note(self, piece: Piece) -> None:
        if isinstance(piece, Words) and not self._first_text:
            self._first_text = time.perf_counter() - self._began

    async def _whole(self, said: dict) -> None:
        await self._respond(JSONResponse(said))

    async def _refuse(
        self,
        message: str,
        status: int,
        headers: dict[str, str] | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        await self._respond(JSONResponse(_form_at(self._path).error(message, status, param, code), status, headers))

    async def _fail(self, error: Exception) -> None:
        message, status, param = _failure(error)
        await self._refuse(message, status, param=param)

    async def _respond(self, response: Response) -> None:
        self._leave_place()
        headers = {"headers": response.raw_headers}
        await self._send({"type": "http.response.start", "status": response.status_code} | headers)
        body = bytes(response.body)
        for at in range(0, len(body), CHUNK):  # a client may take each of them slowly
            more = at + CHUNK < len(body)
            await self._send({"type": "http.response.body", "body": body[at : at + CHUNK], "more_body": more})

    async def _send_text(self, text: str, more: bool = True) -> None:
        if text or not more:
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def _send(self, message: Message) -> None:
        late = asyncio.get_running_loop().call_later(PATIENCE, self._gone.cancel) if self._gone is not None else None
        try:
            await self._send_to_client(message)
        finally:
            if late is not None:
                late.cancel()
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
        else:
            self._is_complete = not message.get("more_body")

    def _log(self) -> None:
        """Count and tell what a request took."""
        self._scope[TOLD] = True
        self._server.metrics.requests[self._path, self._status] += 1
        seconds, form, metrics = time.perf_counter() - self._began, self._form, self._server.metrics
        said = f"{self._path} {self._status}, {seconds:.2f} s"
        if form is not None and self._answers:
            if form.is_whole:
                metrics.seconds.add(seconds)
                metrics.prompt_tokens.add(form.prompt_tokens)
                for answer in form.answers:
                    metrics.answer_tokens.add(answer.tokens)
            known = f", {form.cached} of them cached" if form.is_whole else ""  # only the end of an answer tells
            said += f": a prompt of {form.prompt_tokens} tokens{known}, {form.tokens} written"
            if self._first_text:
                metrics.first_text.add(self._first_text)
                said += f", first text after {self._first_text:.2f} s"
                if seconds > self._first_text and form.tokens > 1:
                    said += f", then {(form.tokens - 1) / (seconds - self._first_text):.1f} tokens a second"
            steps = [answer.writer.stats for answer in self._answers if answer.writer.stats is not None]
            if passes := sum(stats.sequence_steps for stats in steps):
                said += f", {sum(stats.tokens for stats in steps) / passes:.2f} a step"
        logger.info(said)


class Told:
    """What the thread that decodes tells event loops: all of a step by one call of theirs, after the step.

    A call wakes the thread of a loop, and Python runs one thread at a time. So the one that decodes would wait in the
    middle of the step, for each answer; after it, what is told is sent while the next pass is computed.
    """

    def __init__(self, at_once: bool):
        """at_once: whether there are no steps."""
        self._at_once = at_once
        self._calls: list[tuple[asyncio.AbstractEventLoop, tuple[Any, ...]]] = []

    def add(self, loop: asyncio.AbstractEventLoop, *call: Any) -> None:
        self._calls.append((loop, call))
        if self._at_once:
            self.hand_over()

    def hand_over(self) -> None:
        calls, self._calls = self._calls, []
        for loop, those in groupby(calls, lambda one: one[0]):
            call_in(loop, _call_each, [call for _, call in those])


def _call_each(calls: list[tuple[Any, ...]]) -> None:
    for call, *given in calls:
        call(*given)


def call_in(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Call it in an event loop, from another thread; not at all if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(*call)


def _failure(error: Exception) -> tuple[str, int, str | None]:
    """Return what is said of a request that has failed, the status of HTTP, and the field at fault."""
    if isinstance(error, RefusedError):
        return str(error), error.status, error.param
    if isinstance(error, InterruptedError):
        return str(error), 503, None
    logger.error("a request has failed", exc_info=error)
    return f"{type(error).__name__}: {error}", 500, None
