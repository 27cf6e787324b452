"""`lookahead serve`: transformers' own OpenAI-compatible server around one wrapped model.

Routes, messages, chat templates, tool calls and the form of the answers are those of `transformers serve`. The classes
here give it a model that is loaded already, and mend what a client would stumble over: see docs/serve.md. transformers
does not document the classes that these derive from; a test tells which of them an upgrade has moved.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO

import click
import jinja2
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
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState
except ImportError as error:
    raise click.UsageError(
        f"the server needs packages that are missing ({error}): pip install 'lookahead-decoding[serve]'"
    ) from error

from lookahead.engine.engine import Lookahead
from lookahead.models.adapter import context_length
from lookahead.streaming import CONTEXT, StopWhenAsked
from lookahead.tools.chat import PLAIN_TEMPLATE
from lookahead.tools.files import read_text
from lookahead.tools.loading import decoding, load_wrapped

logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # that decode


def serve(host: str, port: int, seed: int, model_name: str | None, template_file: TextIO | None, **shared: Any) -> None:
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
    uvicorn.run(
        make_app(model, tokenizer, model_name or "demo_model", assistant), host=host, port=port, access_log=False
    )


def make_app(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, assistant: PreTrainedModel | None = None
) -> "FastAPI":
    """Return the server of one model as an ASGI application, for uvicorn or another server.

    model: wrapped, so that all requests share its pool; any other model decodes as usual.
    name: what requests call the model.
    assistant: draft model for all requests.
    """
    engine: Lookahead | None = getattr(model, "lookahead", None)  # type: ignore[assignment]  # no module
    manager, state = OneModel(model, tokenizer, name), OneThread(assistant)
    app = build_server(
        manager,
        CheckedChat(manager, state),
        completion_handler=CheckedCompletion(manager, state),
        response_handler=Response(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    requests: Counter = Counter()
    app.add_middleware(Watched, requests=requests)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(exposition(engine, requests), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(AnyHTTPException)
    def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code)

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body("the body must be a JSON object", 400), 400)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", 500), 500)

    return app


def error_body(message: str, status: int) -> dict:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


# -- one model, one thread --------------------------------------------------------------------------------------------


class OneModel(ModelManager):
    """Hands out a model that is loaded already, and no other."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str):
        super().__init__()
        self.force_model = name
        self._loaded = model, tokenizer
        self._since = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # without "@main", so that answers name the model as requests do

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple:
        if model_id_and_revision != self.force_model:
            raise ValueError(f"this server has one model, {self.force_model!r}")
        return self._loaded

    def get_gen_models(self) -> list[dict]:  # type: ignore[override]  # there it lists the cache of the hub
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "lookahead"}]


@dataclass(frozen=True)
class Wishes:
    """What a request asks for beyond the GenerationConfig that transformers makes of it."""

    seed: int | None = None
    samples: bool = False
    stops: tuple[str, ...] = ()


NO_WISHES = Wishes()
_wishes: ContextVar[Wishes] = ContextVar("wishes", default=NO_WISHES)  # of the request that the current task serves


class OneThread(GenerationState):
    """Decodes all requests on one thread, in the order of their arrival: sampling uses torch's one generator."""

    def __init__(self, assistant: PreTrainedModel | None):
        super().__init__()
        self._manager = Generations({} if assistant is None else {"assistant_model": assistant})

    def get_manager(self, model_id: str, use_cb: bool = False) -> "Generations":
        return self._manager


class Generations(GenerateManager):
    """Calls ``model.generate`` with a request's own seed, and ends the call when the client has gone."""

    def __init__(self, options: dict):
        super().__init__()
        self._options = options

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        loop, pieces = asyncio.get_running_loop(), Pieces(_wishes.get().stops)
        call, stop = self._call(model, processor, inputs, gen_config)
        streamer = Streamer(processor.backend_tokenizer, loop, pieces, response_parser, stop)

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
        if wishes.samples:
            generation.do_sample = True
        length, context = inputs["input_ids"].shape[-1], context_length(model)
        if not 0 < length < context:
            raise HTTPException(400, f"the prompt has {length} tokens: give 1 to {context - 1}, the model's context")
        generation.max_new_tokens = min(generation.max_new_tokens or context, context - length)
        stop = Stop(tokenizer, length, wishes.stops)
        options = {**inputs, **self._options, "generation_config": generation, "tokenizer": tokenizer}

        def call(streamer: DirectStreamer | None = None) -> torch.Tensor:
            if stop.asked:  # the client has gone while it waited
                return inputs["input_ids"]
            with seeded(wishes.seed, model.device):
                return model.generate(**options, stopping_criteria=StoppingCriteriaList([stop]), streamer=streamer)

        return call, stop


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
    """Ends the call by a stopping criterion, so that a step is never left half-way."""

    def __init__(self, tokenizer: Any, loop: Any, queue: Any, response_parser: Any, stop: StopWhenAsked):
        super().__init__(tokenizer, loop, queue, response_parser=response_parser)
        self._stop = stop

    def cancel(self) -> None:
        self._stop.asked = True


# -- stop strings -----------------------------------------------------------------------------------------------------

BYTES = 4  # tokens that a character may take


class Stop(StopWhenAsked):
    """Ends a text when it is asked to, or when a stop string is written.

    transformers' own criterion also finds a stop string that begins in the prompt. If the prompt ends with a line break
    and two of them are the stop string, it would end an answer that begins with one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: int, stops: tuple[str, ...]):
        super().__init__()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stops = stops
        self._reach = CONTEXT + BYTES * max(map(len, stops), default=0)  # tokens among which a stop string ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stop = super().__call__(input_ids, scores, **kwargs)
        if self._stops:
            text = self._tokenizer.decode(input_ids[0, self._prompt :][-self._reach :], skip_special_tokens=True)
            stop |= any(one in text for one in self._stops)
        return stop


class Pieces(asyncio.Queue):
    """Pieces of an answer on their way to the client, up to the first stop string, which is left out.

    Text that may be the beginning of a stop string is held back until more is known. An error put in is raised by get.
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
                end = len(text) - undecided(text, self._stops)
            if end:
                super().put_nowait(kind(text[:end]))
            self._held = kind(text[end:])
        else:
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


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return all(isinstance(text, str) and text for text in (value if isinstance(value, list) else [value]))


def _is_text_parts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value
    )


# What a field must be. transformers would fail on other values, or leave them out without a word.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "max_tokens": (lambda value: _whole(value) and value > 0, "a whole number above 0"),
    "max_completion_tokens": (lambda value: _whole(value) and value > 0, "a whole number above 0"),
    "temperature": (lambda value: _number(value) and value >= 0, "a number from 0 on"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0, up to 1"),
    "seed": (lambda value: _whole(value) and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "frequency_penalty": (lambda value: _number(value) and -1 < value <= 2, "a number above -1, up to 2"),
    "stop": (_texts, "a text that is not empty, or a list of such texts"),
    "logit_bias": (
        lambda value: isinstance(value, dict) and all(k.isdecimal() and _number(v) for k, v in value.items()),
        "an object of token ids and numbers",
    ),
    "n": (lambda value: value == 1, "1, because a request gets one answer"),
    "best_of": (lambda value: value == 1, "1, because a request gets one answer"),
    "logprobs": (lambda value: value is False, "left out, because answers come without probabilities"),
    "top_logprobs": (lambda value: value == 0, "left out, because answers come without probabilities"),
    "presence_penalty": (lambda value: value == 0, "0, because there is none"),
    "response_format": (lambda value: value == {"type": "text"}, "text, because nothing else is enforced"),
    "echo": (lambda value: value is False, "false, because answers leave the prompt out"),
}


def check(body: dict) -> None:
    """Raise HTTPException, naming the field, for what the server cannot do."""
    for name, (is_right, what) in FIELDS.items():
        value = body.get(name)
        if value is not None and not is_right(value):
            raise HTTPException(400, f"{name} must be {what}; it is {json.dumps(value):.80}")


def wishes_of(body: dict, stops: tuple[str, ...] = ()) -> Wishes:
    """Take the seed out of a request: transformers would seed at once, and so disturb the one that is being decoded."""
    samples = body.get("temperature") != 0 and any(body.get(name) is not None for name in ("temperature", "top_p"))
    return Wishes(body.pop("seed", None), samples, stops)


class Response(ResponseHandler):
    async def handle_request(self, body: dict, request_id: str) -> Any:
        _wishes.set(wishes_of(body))
        return await super().handle_request(body, request_id)


class Checked:
    """Handles a request as transformers does, after a check, and shortens the answer to what was asked for."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        check(body)
        self.check_prompt(body)
        if (most := body.pop("max_completion_tokens", None)) is not None:
            body["max_tokens"] = most
        if biases := body.pop("logit_bias", None):
            body["logit_bias"] = {token: float(bias) for token, bias in biases.items()}
        stop = body.pop("stop", None) or ()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        _wishes.set(wishes_of(body, stops))
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]  # the class that is mixed in
        except (KeyError, TypeError, ValueError, jinja2.TemplateError) as error:
            raise HTTPException(400, f"{type(error).__name__}: {error}") from error
        except HTTPException:
            raise
        except Exception as error:
            logger.exception("a request has failed")
            raise HTTPException(500, f"decoding failed: {type(error).__name__}: {error}") from error
        if isinstance(response, StreamingResponse):
            response.body_iterator = events(response.body_iterator)
        elif stops:
            answer = json.loads(response.body)
            for choice in answer["choices"]:
                place, key = (choice["message"], "content") if "message" in choice else (choice, "text")
                if place.get(key):
                    place[key] = place[key][: before_stop(place[key], stops)]
            response = JSONResponse(answer)
        return response

    def check_prompt(self, body: dict) -> None:
        raise NotImplementedError


class CheckedChat(Checked, ChatCompletionHandler):
    def check_prompt(self, body: dict) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise HTTPException(400, "messages must be a list of at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise HTTPException(400, f"a message must be an object with a role; one is {json.dumps(message):.80}")
            content = message.get("content")
            if content is not None and not isinstance(content, str) and not _is_text_parts(content):
                raise HTTPException(
                    400, f"a message's content must be a text, or parts of type text; one is {json.dumps(content):.80}"
                )


class CheckedCompletion(Checked, CompletionHandler):
    def check_prompt(self, body: dict) -> None:
        if body.get("logit_bias"):
            raise HTTPException(400, "logit_bias must be left out: only chat completions know it")


async def events(body: Any) -> AsyncIterator[Any]:
    """Yield the events of an answer, then the one by which clients know that it is whole; or the error."""
    try:
        async for event in body:
            yield event
    except Exception as error:
        logger.exception("a request has failed")
        message = error_body(f"decoding failed: {type(error).__name__}: {error}", 500)
        yield f"data: {json.dumps(message)}\n\n"
    else:
        yield "data: [DONE]\n\n"


class Watched:
    """Counts the requests that decode, and cancels one whose client has gone.

    transformers notices that only while it streams.
    """

    def __init__(self, app: "ASGIApp", requests: Counter):
        self._app = app
        self._requests = requests

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
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


# -- metrics ----------------------------------------------------------------------------------------------------------


def exposition(engine: Lookahead | None, requests: Counter) -> str:
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
