"""`lookahead serve`: transformers' own OpenAI-compatible server around one wrapped model.

Routes, messages, chat templates, tool calls and the form of the answers are those of `transformers serve`. The classes
here give it a model that is loaded already, and mend what a client would stumble over: see docs/serve.md. transformers
does not document the classes that these derive from; a test tells which of them an upgrade has moved.
"""

import asyncio
import inspect
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TextIO

import click
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
    from starlette.exceptions import HTTPException as AnyHTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from transformers.cli.serving import ModelManager, build_server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState, Modality
except ImportError as error:
    raise click.UsageError(
        f"the server needs packages that are missing ({error}): pip install 'transformers[serving]'"
    ) from error

from lookahead.compat import CACHE
from lookahead.engine import loop
from lookahead.engine.engine import Lookahead
from lookahead.guessing.combine import Ledger
from lookahead.guessing.retrieval import LONGEST, RetrievalSource
from lookahead.models.adapter import context_length, vocabulary_of
from lookahead.passes.fused import FusedRunner
from lookahead.streaming import CONTEXT, PieceStreamer, StopWhenAsked, without_half_character
from lookahead.tools.chat import PLAIN_TEMPLATE
from lookahead.tools.files import read_text
from lookahead.tools.loading import decoding, load_wrapped
from lookahead.tools.openai_fields import CHAT, COMPLETION, RESPONSE, RefusedError, Wishes, read_request
from lookahead.tools.prefixes import Prefixes
from lookahead.wrapping import own_loop

logger = logging.getLogger(__name__)

ENDPOINTS = (CHAT, COMPLETION, RESPONSE)  # that decode
SERVED = {*ENDPOINTS, "/v1/models", "/health"}  # of transformers' routes: the others load models, or read audio
BYTES_A_TOKEN = 16  # of a request: enough for any language, also where JSON escapes every character
LEAST_BODY, LARGEST_BODY = 2**20, 2**23
GRACE = 5  # seconds that requests have to end once the server is told to stop
MOST_WAITING = 64  # requests that wait for others to end; further ones are refused
PORTION = 512  # tokens of a prompt that are read between two steps of other requests


def serve(
    host: str,
    sockets: list[socket.socket],
    seed: int,
    model_name: str | None,
    template_file: TextIO | None,
    cache_mb: int,
    parallel: int,
    **shared: Any,
) -> None:
    """Serve until a signal. sockets: listening, all at one port of the host. cache_mb, parallel: as for `make_app`."""
    model, tokenizer, engine, options = load_wrapped(model_name, **shared)
    if template_file is not None:
        tokenizer.chat_template = read_text(template_file)
    elif model_name is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    assistant = options.pop("assistant_model", None)
    model.generation_config.update(**options)  # type: ignore[union-attr]  # what requests leave open
    with decoding():
        if engine:
            engine.prepare(model)  # so that the first request does not wait for it
    torch.manual_seed(seed)
    app = make_app(model, tokenizer, model_name or "demo_model", assistant, cache_mb, parallel)
    server = uvicorn.Server(uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=GRACE))
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
) -> "FastAPI":
    """Return the server of one model as an ASGI application, for uvicorn or another server.

    model: wrapped, so that all requests share its pool; any other model decodes as usual.
    name: what requests call the model.
    assistant: draft model for all requests.
    cache_mb: MB (of 2**20 bytes) of what earlier requests have left for those that go on from them (`Prefixes`).
    parallel: most requests that are decoded at once. They share passes, so only where these are fused, and without an
        assistant; other models decode one request after the other.
    """
    engine: Lookahead | None = getattr(model, "lookahead", None)  # type: ignore[assignment]  # no module
    prefixes = Prefixes(model, cache_mb * 2**20)
    if assistant is not None or not _shares_passes(model, engine):
        parallel = 1
    manager, state = OneModel(model, tokenizer, name), Decoding(Generations(assistant, prefixes, engine, parallel))
    app = build_server(
        manager,
        ReadingChat(manager, state),
        completion_handler=ReadingCompletion(manager, state),
        response_handler=ReadingResponse(manager, state),
        transcription_handler=None,  # type: ignore[arg-type]  # its route is left out
        systemone_handler=None,  # type: ignore[arg-type]
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED]
    app.router.lifespan_context = state.lifespan
    requests: Counter = Counter()
    most = min(max(BYTES_A_TOKEN * context_length(model), LEAST_BODY), LARGEST_BODY)
    app.add_middleware(Watched, requests=requests, most=most)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        text = exposition(engine, requests, prefixes)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(AnyHTTPException)
    def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body("the body must be a JSON object", 400), 400)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", 500), 500)

    return app


def error_body(message: str, status: int) -> dict:
    """Return an error as OpenAI's clients read it."""
    message = message.encode(errors="backslashreplace").decode()  # it may quote what is no character
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _shares_passes(model: PreTrainedModel, engine: Lookahead | None) -> bool:
    """Whether calls in several threads share their passes."""
    if engine is None or engine.adapter is None:
        return False
    runner = engine.find_runner(model)
    runner.end()
    return isinstance(runner, FusedRunner)


# -- one model, several threads ---------------------------------------------------------------------------------------


class OneModel(ModelManager):
    """Hands out a model that is loaded already, and no other."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        super().__init__()
        self.force_model = name
        self.model = model
        self.tokenizer = tokenizer
        self._since = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # without "@main", so that answers name the model as requests do

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple:
        return self.model, _prompt.get()

    def list_models(self) -> list[dict]:  # type: ignore[override]  # there it lists the cache of the hub
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "lookahead"}]

    get_gen_models = list_models  # type: ignore[assignment]  # its name before transformers 5.24


_wishes: ContextVar[Wishes] = ContextVar("wishes")  # of the request that the current task serves


class Decoding(GenerationState):
    """Decodes all requests, which begin in the order of their arrival.

    Another thread reads their prompts, one at a time, so that templates and tokenizers hold up no client.
    """

    def __init__(self, manager: "Generations"):
        super().__init__()
        self._manager = manager
        self._reader = GenerateManager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> "Generations":
        return self._manager

    async def read(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call`` from the reading thread."""
        return await asyncio.shield(self._reader.async_submit(call))

    @asynccontextmanager
    async def lifespan(self, app: "FastAPI") -> AsyncIterator[None]:
        """End with the call of generate that has been cancelled: a thread must not decode while Python ends."""
        yield
        with suppress(asyncio.TimeoutError):  # a long prompt is being computed
            await asyncio.wait_for(self._manager.ended(), GRACE)


class Workers:
    """Threads that make calls, in their order. None of them keeps Python from ending."""

    def __init__(self, count: int):
        self.count = count
        self.open = 0
        """Calls that have not ended."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
        self._lock = Lock()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._lock:
            self.open += 1
        self._calls.put((call, future))
        return future

    def _work(self) -> None:
        while True:
            call, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                self._end()
                continue
            try:
                result = call()
            except BaseException as error:  # whoever waits is told
                self._end()
                future.set_exception(error)
            else:
                self._end()
                future.set_result(result)
            del call, future

    def _end(self) -> None:
        with self._lock:
            self.open -= 1


class Generations(GenerateManager):
    """Calls ``model.generate`` with a request's own wishes, and ends the call when the client has gone.

    Calls that run at the same time share their passes. Each has a random generator of its own.
    """

    def __init__(self, assistant: PreTrainedModel | None, prefixes: Prefixes, engine: Lookahead | None, parallel: int):
        self._assistant, self._prefixes, self._engine = assistant, prefixes, engine
        self._workers = Workers(parallel)
        self._of_predictions: Ledger | None = None  # what predictions have earned so far
        self._lock = Lock()  # of what calls share
        self._is_plain = Lock()  # held while the model's own decoding draws from torch's generator
        self._seeds = torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        return self._workers.submit(partial(fn, *args, **kwargs))

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    async def ended(self) -> None:
        """Wait until all calls have ended."""
        while self._workers.open:
            await asyncio.sleep(0.02)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        loop, pieces = asyncio.get_running_loop(), Pieces(_wishes.get().stops)
        call, stop = self._call(model, processor, inputs, gen_config)
        streamer = Streamer(processor, loop, pieces, response_parser, stop)

        def run() -> None:
            try:
                call(streamer)
            except Exception as error:
                loop.call_soon_threadsafe(pieces.put_nowait, error)

        self.submit(run)
        return pieces, streamer

    async def generate_non_streaming(  # type: ignore[override]  # transformers promises either kind of ids
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        call, stop = self._call(model, processor, inputs, gen_config)
        try:
            # Shielded, because the thread sets the result also when nobody waits for it.
            ids = await asyncio.shield(self.async_submit(call))
        except asyncio.CancelledError:
            stop.asked = True
            raise
        length = inputs["input_ids"].shape[-1]
        new = ids[0, length:].tolist()
        return processor.decode(new, skip_special_tokens=True), length, new

    def _call(
        self, model: Any, tokenizer: Any, inputs: Any, generation: GenerationConfig
    ) -> tuple[Callable, StopWhenAsked]:
        """Return the call of ``model.generate`` for this request, and what ends it.

        Raises HTTPException if the prompt does not fit.
        """
        wishes = _wishes.get()
        if self._workers.open >= self._workers.count + MOST_WAITING:
            message = f"{self._workers.open} requests are being served: try again later"
            raise HTTPException(429, message, {"Retry-After": "1"})
        generation.update(**wishes.settings)
        length, context = inputs["input_ids"].shape[-1], context_length(model)
        if not 0 < length < context:
            raise HTTPException(400, f"the prompt has {length} tokens: give 1 to {context - 1}, the model's context")
        generation.max_new_tokens = min(generation.max_new_tokens or context, context - length)
        stop = Stop(tokenizer, length, wishes.stops, generation)
        _stop.set(stop)
        options = {**inputs, "generation_config": generation, "stopping_criteria": StoppingCriteriaList([stop])}
        decode, predicted = partial(self._decode, model, self._seed(wishes.seed)), _prompt.get().predicted

        def call(streamer: DirectStreamer | None = None) -> torch.Tensor:
            if stop.asked:  # the client has gone while it waited
                return inputs["input_ids"]
            ids = inputs["input_ids"][0].tolist()
            with self._lock:
                cache, stop.cached = self._prefixes.take(ids)
            known = {} if cache is None else {CACHE: cache, "return_dict_in_generate": True}
            with self._engine_for(ids, predicted) as engine:
                output = decode(engine, streamer, {**options, **known})
            if cache is None:
                return output
            with self._lock:
                self._prefixes.keep(output.sequences[0].tolist(), cache)
            return output.sequences

        return call, stop

    def _seed(self, wished: int | None) -> int | None:
        """The seed of a request. Where requests are decoded at once, each has one."""
        if wished is None and self._workers.count > 1:
            return int(torch.randint(2**62, (), generator=self._seeds))
        return wished

    @contextmanager
    def _engine_for(self, prompt: list[int], predicted: list[int]) -> Iterator[Lookahead | None]:
        """The engine of a request. The text that its client expects is one more source of guesses."""
        engine = self._engine
        if engine is None or not predicted:
            yield engine
            return
        source = RetrievalSource([[*prompt[-LONGEST:], *predicted]])
        own = engine.beside([source], self._of_predictions)
        self._of_predictions = own.ledger
        with engine.call():
            try:
                yield own
            finally:
                engine.add(own.stats)

    def _decode(
        self,
        model: PreTrainedModel,
        seed: int | None,
        engine: Lookahead | None,
        streamer: DirectStreamer | None,
        options: dict[str, Any],
    ) -> Any:
        """Call ``model.generate``."""
        if self._workers.count == 1 or engine is None or seed is None:
            more = {} if self._assistant is None else {"assistant_model": self._assistant}
            with seeded(seed, model.device):
                return model.generate(**options, **more, streamer=streamer)  # type: ignore[operator]  # a method

        def plain(*args: Any, **kwargs: Any) -> Any:
            with self._is_plain, seeded(seed, model.device):
                return own_loop(model)(*args, **kwargs)

        def decode(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            if streamer is not None:  # as generate() does it for loops of its own
                streamer.put(input_ids)
            return loop.run(engine, plain, model, input_ids, **kwargs, seeds=[seed], streamer=streamer)  # type: ignore

        options["generation_config"].prefill_chunk_size = PORTION
        return model.generate(**options, custom_generate=decode)  # type: ignore[operator]  # a method


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Set torch's generators in the block. Later requests without a seed draw as if it had not been."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        yield


class Streamer(DirectStreamer):
    """Ends the call by a stopping criterion, so that a step is never left half-way.

    Without a parser, its pieces are those of `lookahead.stream`: transformers' own end before the token that holds half
    a character.
    """

    def __init__(self, tokenizer: Any, loop: Any, queue: Any, response_parser: Any, stop: StopWhenAsked):
        parser: Any = None if response_parser is None else Parser(response_parser, tokenizer.all_special_tokens)
        super().__init__(tokenizer.backend_tokenizer, loop, queue, response_parser=parser)
        self._stop = stop
        write = lambda piece: loop.call_soon_threadsafe(queue.put_nowait, piece)  # noqa: E731
        self._text = PieceStreamer(tokenizer, write) if response_parser is None else None
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._text is None:
            super().put(value)
            return
        if self._seen_prompt:
            self.total_tokens += value.numel()
        self._seen_prompt = True
        self._text.put(value)

    def end(self) -> None:
        if self._text is not None:
            self._text.end()
        super().end()

    def cancel(self) -> None:
        self._stop.asked = True


class Parser:
    """Parses an answer as it comes. What the parser of transformers fails at is handed on as text.

    parser: transformers'.
    unseen: special tokens, which its templates need and no text shows.
    """

    def __init__(self, parser: Any, unseen: list[str]):
        self._unseen = unseen
        self.initial_events = parser.initial_events
        self._parser = parser
        self._held = ""  # text that no event has shown yet

    def feed(self, text: str) -> list[dict]:
        self._held += text
        if self._parser is None:
            return self._as_text()
        try:
            events = self._parser.feed(text)
        except Exception:  # parsers raise errors of many kinds
            return self._as_text()
        calls = [event for event in events if event["type"] == "region_close" and event.get("field") == "tool_calls"]
        if not all(is_call(call.get("value")) for call in calls):
            return self._as_text()
        if calls:
            self._held = ""
        for event in events:
            if event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
                self._held = self._held.partition(event["text"])[2]
        return events

    def finalize(self) -> tuple[dict, list[dict]]:
        try:
            if self._parser is not None:
                return self._parser.finalize()
        except Exception:  # the text ends in the middle of a part
            return {}, self._as_text()
        return {}, []

    def _as_text(self) -> list[dict]:
        self._parser, text, self._held = None, self._held, ""
        for token in self._unseen:
            text = text.replace(token, "")
        return [{"type": "region_chunk", "field": "content", "text": text}] if text else []


def is_call(value: Any) -> bool:
    """Return whether this is a tool call of which an answer can be made."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


# -- stop strings -----------------------------------------------------------------------------------------------------

BYTES = 4  # tokens that a character may take


class Stop(StopWhenAsked):
    """Ends a text when it is asked to, or when a stop string is written.

    transformers' own criterion also finds a stop string that begins in the prompt. If the prompt ends with a line break
    and two of them are the stop string, it would end an answer that begins with one.

    If the text ends by itself, `generation.max_new_tokens` becomes None, for transformers' handlers say that a text has
    been cut if it has that many tokens, whatever the last of them is. For responses, they say that it never has:
    `has_cut` knows better.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: int, stops: tuple[str, ...], generation: GenerationConfig
    ):
        super().__init__()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stops = stops
        self._generation = generation
        ends = generation.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._reach = CONTEXT + BYTES * max(map(len, stops), default=0)  # tokens among which a stop string ends
        self.has_cut = False  # whether the text is as long as it may be, and has not ended by itself
        self.cached = 0  # tokens of the prompt that earlier requests have left in a cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stop = super().__call__(input_ids, scores, **kwargs)
        is_end = int(input_ids[0, -1]) in self._ends
        if self._stops:
            text = self._tokenizer.decode(input_ids[0, self._prompt :][-self._reach :], skip_special_tokens=True)
            is_stop = any(one in text for one in self._stops)
            stop |= is_stop
            is_end |= is_stop
        if is_end:
            self._generation.max_new_tokens = None
        else:
            self.has_cut = input_ids.shape[1] - self._prompt == self._generation.max_new_tokens
        return stop


_stop: ContextVar[Stop] = ContextVar("stop")  # of the request that the current task serves


class Pieces(asyncio.Queue):
    """Pieces of an answer on their way to the client, up to the first stop string, which is left out.

    Text that may be the beginning of a stop string is held back until more is known, and so is half a character, which
    is left out where the answer ends. An error put in is raised by get.
    """

    def __init__(self, stops: tuple[str, ...]):
        super().__init__()
        self._stops = stops
        self._held = ""
        self._stopped = False

    def put_nowait(self, item: Any) -> None:
        if isinstance(item, str):
            if type(item) is not type(self._held):  # reasoning and answer are pieces of different classes
                self._release(type(item))
            text, kind = self._held + item, type(item)
            end = before_stop(text, self._stops)
            self._stopped = self._stopped or end < len(text)
            if not self._stopped:
                end = min(len(text) - undecided(text, self._stops), len(without_half_character(text)))
            if end:
                super().put_nowait(kind(text[:end]))
            self._held = kind(text[end:])
        else:
            self._held = without_half_character(self._held)
            self._release(str)
            super().put_nowait(item)

    def get_nowait(self) -> Any:
        item = super().get_nowait()
        if isinstance(item, Exception):
            raise item
        return item

    def _release(self, kind: type[str]) -> None:
        if self._held and not self._stopped:
            super().put_nowait(self._held)
        self._held = kind()


def before_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the number of characters before the first stop string."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))


def undecided(text: str, stops: tuple[str, ...]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


# -- requests ---------------------------------------------------------------------------------------------------------


class UnreadError(Exception):
    """transformers asks for the tokens of a prompt that has not been read yet."""


class Prompt:
    """Stands for the tokenizer while transformers handles a request, so that the event loop reads no prompt.

    The first time that a handler asks for the tokens, UnreadError is raised. `read` is then called on another thread,
    and the handler once more.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prediction: str):
        self._tokenizer, self._prediction = tokenizer, prediction
        self.predicted: list[int] = []
        """Tokens of the text that the client expects."""
        self._call: tuple[Callable, tuple, dict] | None = None
        self._tokens: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._read_elsewhere(self._tokenizer, *texts, **options)

    def apply_chat_template(self, *messages: Any, **options: Any) -> Any:
        return self._read_elsewhere(self._tokenizer.apply_chat_template, *messages, **options)

    def _read_elsewhere(self, reader: Callable, *arguments: Any, **options: Any) -> Any:
        if self._tokens is None:
            self._call = reader, arguments, options
            raise UnreadError
        return self._tokens

    def parse_response(self, ids: list[int], *arguments: Any, **options: Any) -> dict:
        """Return the parts of an answer; one part, its text, if it is none that its template knows, or has been cut."""
        with suppress(Exception):  # parsers raise errors of many kinds
            parts = self._tokenizer.parse_response(ids, *arguments, **options)
            if all(is_call(call) for call in parts.get("tool_calls") or ()):  # type: ignore[union-attr]
                return parts  # type: ignore[return-value]
        return {"content": self._tokenizer.decode(ids, skip_special_tokens=True)}

    def read(self) -> None:
        """Read the prompt. Raises RefusedError if it cannot be read, or if the template passes over the tools."""
        reader, arguments, options = self._call  # type: ignore[misc]  # a handler has asked
        try:
            self._tokens = reader(*arguments, **options)
            if self._prediction:
                self.predicted = self._tokenizer(self._prediction, add_special_tokens=False).input_ids
            knows_tools = not options.get("tools") or not torch.equal(
                self._tokens["input_ids"], reader(*arguments, **options | {"tools": None})["input_ids"]
            )
        except Exception as error:  # templates raise errors of many kinds
            raise RefusedError(f"the prompt cannot be read: {type(error).__name__}: {error}") from error
        if not knows_tools:
            raise RefusedError("tools must be left out, because the model's chat template knows none")


_prompt: ContextVar[Prompt] = ContextVar("prompt")  # of the request that the current task serves


class Reading:
    """Handles a request as transformers does, after a check, and shortens the answer to what was asked for."""

    path: str  # of the endpoint

    async def handle_request(self, body: dict, request_id: str) -> Any:
        manager, state = self.model_manager, self.generation_state  # type: ignore[attr-defined]
        tokenizer, vocabulary = manager.tokenizer, vocabulary_of(manager.model)
        try:
            body, wishes = await state.read(
                lambda: read_request(body, self.path, manager.force_model, vocabulary, reserved_names(tokenizer))
            )
            _wishes.set(wishes)
            _prompt.set(Prompt(tokenizer, wishes.prediction))
            with suppress(UnreadError):
                await super().handle_request({**body}, request_id)  # type: ignore[misc]  # the class that is mixed in
            await state.read(_prompt.get().read)
        except RefusedError as error:
            raise HTTPException(400, str(error)) from error
        try:
            response = await super().handle_request({**body}, request_id)  # type: ignore[misc]
        except HTTPException:
            raise
        except Exception as error:
            logger.exception("a request has failed")
            raise HTTPException(500, f"decoding failed: {type(error).__name__}: {error}") from error
        stop = _stop.get()
        if isinstance(response, StreamingResponse):
            response.body_iterator = events(response.body_iterator, stop, self.path == RESPONSE)
            return response
        answer = json.loads(response.body)
        say_cached(answer, stop.cached)
        if self.path == RESPONSE and stop.has_cut:
            say_incomplete(answer)
        for place, key in texts_of(answer):
            if place.get(key):
                place[key] = without_half_character(place[key][: before_stop(place[key], wishes.stops)])
        return JSONResponse(answer)


class ReadingChat(Reading, ChatCompletionHandler):
    path = CHAT


class ReadingCompletion(Reading, CompletionHandler):
    path = COMPLETION


class ReadingResponse(Reading, ResponseHandler):
    path = RESPONSE


def reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names that a request must not give a variable of a chat template: they are arguments."""
    of_templates = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    of_its_own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    return of_templates | of_its_own | {"messages", "conversations", "load_audio_from_video"}


def texts_of(answer: dict) -> Iterator[tuple[dict, str]]:
    """Yield where an answer holds text: an object and the name in it."""
    for choice in answer.get("choices", []):
        yield (choice["message"], "content") if "message" in choice else (choice, "text")
    for item in answer.get("output", []):
        for part in item.get("content", []):
            yield part, "text"


def say_cached(answer: dict, cached: int) -> None:
    """Say in the usage of an answer, if it has one, how many tokens of the prompt were cached."""
    if usage := answer.get("usage"):
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage[name] = (usage.get(name) or {}) | {"cached_tokens": cached}


def with_cached(events: str, cached: int) -> str:
    """The same events; the usage that they hold, if any, says how many tokens of the prompt were cached."""
    if '"usage"' not in events:
        return events
    told = read_events(events)
    for event in told:
        say_cached(event, cached)
        say_cached(event.get("response", {}), cached)
    return written_events(told)


def say_incomplete(response: dict) -> None:
    """Say, as OpenAI's API does, that a response has ended because it is as long as it may be."""
    response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    items = {item["type"]: item for item in response["output"]}
    items["message"]["status"] = "incomplete"
    if "reasoning" in items and items.keys() == {"reasoning", "message"} and not items["message"]["content"][0]["text"]:
        items["reasoning"]["status"] = "incomplete"  # nothing has ended it


def read_events(events: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n")[:-1]]


def written_events(events: list[dict]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def incomplete(events: str) -> str:
    """Return events of a response that has ended so. Those that end the item that was cut, and the whole, say that.

    They may be older than the end. An item that something follows at once has not been cut.
    """
    told = read_events(events)
    if told[-1]["type"] == "response.completed":
        told[-1]["type"] = "response.incomplete"
        say_incomplete(told[-1]["response"])
    elif told[-1]["type"] == "response.output_item.done" and told[-1]["item"]["type"] in ("message", "reasoning"):
        told[-1]["item"]["status"] = "incomplete"
    return written_events(told)


def failed_event(first: str, latest: str, message: str) -> str:
    """Return the event by which a response fails. first, latest: events that the client has been sent."""
    error = {"code": "server_error", "message": message}
    response = read_events(first)[0]["response"] | {"status": "failed", "error": error}
    number = read_events(latest)[-1]["sequence_number"] + 1
    return written_events([{"type": "response.failed", "sequence_number": number, "response": response}])


async def events(body: Any, stop: Stop, is_response: bool) -> AsyncIterator[Any]:
    """Yield the events of an answer, then the one by which clients know that it is whole; or the error.

    is_response: its own last event says that it is whole.
    """
    first = latest = ""
    try:
        async for event in body:
            latest = with_cached(event, stop.cached)
            latest = incomplete(latest) if is_response and stop.has_cut else latest
            first = first or latest
            yield latest
    except Exception as error:
        logger.exception("a request has failed")
        refusal = error_body(f"decoding failed: {type(error).__name__}: {error}", 500)
        fails = is_response and first
        yield failed_event(first, latest, refusal["error"]["message"]) if fails else written_events([refusal])
    else:
        if not is_response:
            yield "data: [DONE]\n\n"


class Watched:
    """Counts the requests that decode, refuses large ones, and cancels one whose client has gone.

    transformers notices that only while it streams.

    most: bytes of the largest body.
    """

    def __init__(self, app: "ASGIApp", requests: Counter, most: int):
        self._app = app
        self._requests = requests
        self._most = most

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        try:
            body = await body_of(Request(scope, receive), self._most)
        except ClientDisconnect:
            return
        if body is None:
            self._requests[scope["path"], "413"] += 1
            refusal = error_body(f"the body of a request must have {self._most} bytes at most; this one is larger", 413)
            await JSONResponse(refusal, 413)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        # Comes when the client has gone, or the answer is complete.
        gone: asyncio.Future[Message] = asyncio.ensure_future(receive())
        status, is_complete = "cancelled", False

        async def replay() -> "Message":
            return whole.pop() if whole else await asyncio.shield(gone)

        async def answer(message: "Message") -> None:
            nonlocal status, is_complete
            await send(message)
            if message["type"] == "http.response.start":
                status = str(message["status"])
            else:
                is_complete = not message.get("more_body")

        self._requests["running"] += 1
        serving: asyncio.Future[None] = asyncio.ensure_future(self._app(scope, replay, answer))
        try:
            first: set[asyncio.Future[Any]] = {serving, gone}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if is_complete or serving.done():
                await serving
            else:
                status = "cancelled"
        finally:
            gone.cancel()
            serving.cancel()
            await asyncio.wait({serving})
            self._requests["running"] -= 1
            self._requests[scope["path"], status] += 1


async def body_of(request: "Request", most: int) -> bytes | None:
    """Return the body of a request, or None if it has more than ``most`` bytes, which are then not kept."""
    if int(request.headers.get("content-length", 0)) > most:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


# -- metrics ----------------------------------------------------------------------------------------------------------


def exposition(engine: Lookahead | None, requests: Counter, prefixes: Prefixes) -> str:
    """Return all counts in Prometheus' text format (version 0.0.4).

    engine: of the served model; None if it is not wrapped, which leaves the counts of lookahead out.
    requests: by (path, status), and the number under way as "running".
    """
    lines: list[str] = []

    def family(name: str, kind: str, says: str, samples: Mapping[str, float]) -> None:
        lines.extend([f"# HELP lookahead_{name} {says}", f"# TYPE lookahead_{name} {kind}"])
        lines.extend(f"lookahead_{name}{labels} {value:.12g}" for labels, value in samples.items())

    def labelled(label: str, counts: Mapping[str, float]) -> dict[str, float]:
        return {f'{{{label}="{text}"}}': count for text, count in counts.items()}

    ended = {
        f'{{path="{key[0]}",status="{key[1]}"}}': count for key, count in requests.copy().items() if key != "running"
    }
    family("requests_total", "counter", "Requests that have ended.", ended)
    family("requests_running", "gauge", "Requests under way; all but one of them wait.", {"": requests["running"]})
    family("prompt_tokens_total", "counter", "Tokens of prompts.", {"": prefixes.prompt_tokens})
    family("cached_tokens_total", "counter", "Tokens of prompts that earlier requests have left.",
           {"": prefixes.cached_tokens})  # fmt: skip
    family("cache_bytes", "gauge", "Bytes of what earlier requests have left.", {"": prefixes.bytes})
    if engine is not None:
        with engine.lock:
            stats = engine.stats.as_dict()
        family("tokens_total", "counter", "Tokens written.", {"": stats["tokens"]})
        family("steps_total", "counter", "Passes after the prompts.", {"": stats["steps"]})
        family("guesses_total", "counter", "Guesses verified.", {"": stats["guesses"]})
        family("prefill_seconds_total", "counter", "Time spent on prompts.", {"": stats["prefill_seconds"]})
        family("tokens_per_step", "gauge", "Mean number of tokens that a step has written.",
               {"": stats["tokens_per_step"]})  # fmt: skip
        family("step_seconds_total", "counter", "Time spent in steps.", labelled("stage", stats["seconds"]))
        family("accepted_guesses_total", "counter", "Accepted guesses by the origin of their evidence.",
               labelled("source", stats["accepted"]))  # fmt: skip
        proposed = {name: counts["proposed"] for name, counts in stats["sources"].items()}
        family("source_proposed_guesses_total", "counter", "Guesses that a source proposed.",
               labelled("source", proposed))  # fmt: skip
        accepted = {name: counts["accepted"] for name, counts in stats["sources"].items()}
        family("source_accepted_guesses_total", "counter", "Accepted guesses that a source had proposed.",
               labelled("source", accepted))  # fmt: skip
    return "\n".join(lines) + "\n"
