"""The fields of OpenAI's requests: each is honoured, passed over because no text depends on it, or refused by name.

Nothing here needs a server: the bodies are parsed JSON, and what comes out are settings of ``model.generate``.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"

LEVELS = 64  # of nested lists and objects
MESSAGES = 4096  # a template may look at all messages for each of them
STOPS, STOP_LENGTH = 16, 256  # every piece of an answer is compared with all of them
NAMES, ITEMS, TEXT, LARGEST = 32, 64, 1000, 1_000_000  # of the variables of a template

SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}  # imply do_sample


class RefusedError(ValueError):
    """A request asks for what cannot be done. The message names the field and what it must be."""


@dataclass(frozen=True)
class Wishes:
    """What a request asks of ``model.generate``.

    seed: of sampling; None: that of the server.
    stops: stop strings.
    prediction: a text that the client expects.
    settings: fields of GenerationConfig, to be set in the model's own.
    """

    seed: int | None = None
    stops: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    prediction: str = ""


def read_request(body: dict, path: str, model: str, vocabulary: int, reserved: Collection[str]) -> tuple[dict, Wishes]:
    """Return what a request says (``stream``, prompt, tools and variables of the template) and what it asks for.

    body: the parsed JSON of a request; it is not changed. A field that is null counts as left out.
    path: CHAT, COMPLETION or RESPONSE.
    model: the name of the only model; a request may leave it out.
    vocabulary: number of tokens of the model.
    reserved: names that no variable of a chat template may have.
    Raises RefusedError, which names the field, for all that is neither honoured nor passed over.
    """
    body = {name: value for name, value in body.items() if value is not None and name not in PASSED_OVER}
    fields = FIELDS[path]
    for name, value in body.items():
        if name not in fields:
            raise RefusedError(f"{name:.80} is not served: {INSTEAD.get((path, name)) or INSTEAD.get(name, LEAVE_OUT)}")
        _check_characters(name, value)
        _check(name, value, fields[name])
    if body.get("model", model) != model:
        raise RefusedError(f"model must be {model!r}, the only one of this server; it is {body['model']!r:.80}")
    settings: dict[str, Any] = _generation_config(body.get("generation_config", {}))
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body:
            settings["max_new_tokens"] = body[name]
    if "frequency_penalty" in body:
        settings["repetition_penalty"] = 1.0 + body["frequency_penalty"]
    if biases := _biases(body.get("logit_bias", {}), vocabulary):
        settings["sequence_bias"] = biases
    settings |= {name: float(body[name]) for name in ("temperature", "top_p") if name in body}
    stop = body.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    wishes = Wishes(body.get("seed"), stops, _sampling(settings), _predicted(body.get("prediction")))
    said = {"stream": body.get("stream", False)}
    if path == COMPLETION:
        return said | {"prompt": _given(body, "prompt")}, wishes
    if path == CHAT:
        said["messages"] = [_message(one) for one in _given(body, "messages")]
        said["chat_template_kwargs"] = _variables(body.get("chat_template_kwargs", {}), reserved)
    else:
        said["input"] = _input_items(_given(body, "input"), body.get("instructions"))
    if body.get("tools") and body.get("tool_choice") != "none":
        said["tools"] = [_tool(one, nested=path == CHAT) for one in body["tools"]]
    return said, wishes


# -- values -----------------------------------------------------------------------------------------------------------

Check = tuple[Callable[[Any], bool], str]  # whether a value is right, and what it must be


def _check(name: str, value: Any, check: Check) -> None:
    is_right, what = check
    if not is_right(value):
        raise RefusedError(f"{name:.80} must be {what}; it is {json.dumps(value):.80}")


def _given(body: dict, name: str) -> Any:
    if name not in body:
        raise RefusedError(f"{name} is missing: it must be {FIELDS_OF_PROMPTS[name][1]}")
    return body[name]


def _check_characters(name: str, value: Any, levels: int = LEVELS) -> None:
    """Raise RefusedError for what is nested too deeply, and for halves of characters, which no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(
                f"{name:.80} has half of a surrogate pair, {value[error.start]!a}, at place {error.start}, which is no "
                "character: send both halves, or leave it out"
            ) from error
    elif isinstance(value, (list, dict)):
        if not levels:
            raise RefusedError(f"{name:.80} is nested too deeply: {LEVELS} levels are the most")
        for one in value:
            _check_characters(name, one, levels - 1)
        for one in value.values() if isinstance(value, dict) else ():
            _check_characters(name, one, levels - 1)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _objects(value: Any, most: int = MESSAGES) -> bool:
    return isinstance(value, list) and 0 < len(value) <= most and all(isinstance(one, dict) for one in value)


def _stops(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= STOPS and all(isinstance(text, str) and 0 < len(text) <= STOP_LENGTH for text in texts)


def _from(low: float, high: float) -> Check:
    return lambda value: _number(value) and low <= value <= high, f"a number from {low} to {high}"


def _at_least(low: int) -> Check:
    return lambda value: _whole(value) and low <= value < 2**31, f"a whole number from {low} on, below 2**31"


def _only(allowed: Any, what: str) -> Check:
    return lambda value: value == allowed and isinstance(value, bool) == isinstance(allowed, bool), what


FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
A_TEXT: Check = (lambda value: isinstance(value, str), "a text")
AN_OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
# With less, logits overflow: then no token can be drawn.
TEMPERATURE: Check = (
    lambda value: _number(value) and (value == 0 or 1e-4 <= value <= 1e4),
    "a number from 0 on, where 0 decodes greedily and any other is from 0.0001 to 10000",
)
TOP_P: Check = (lambda value: _number(value) and 0 < value <= 1, "a number above 0, up to 1")
NEW_TOKENS: Check = (lambda value: _whole(value) and value > 0, "a whole number above 0")
ONE_ANSWER = _only(1, "1, because a request gets one answer")
AUTO_OR_NONE: Check = (lambda value: value in ("auto", "none"), '"auto" or "none", because no call can be enforced')

FIELDS_OF_PROMPTS: dict[str, Check] = {
    "messages": (_objects, f"a list of at least one message, and of {MESSAGES} at most, all objects"),
    "prompt": (lambda value: isinstance(value, str), "a string"),
    "input": (
        lambda value: isinstance(value, str) or _objects(value),
        f"a text, or a list of 1 to {MESSAGES} items, all objects",
    ),
}
COMMON: dict[str, Check] = {
    "model": A_TEXT,
    "prediction": (
        lambda value: isinstance(value, dict) and value.get("type") == "content" and _is_content(value.get("content")),
        'an object such as {"type": "content", "content": "the text that is expected"}, or with text parts',
    ),
    "stream": FLAG,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "seed": (lambda value: _whole(value) and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "generation_config": (
        lambda value: isinstance(value, (str, dict)),
        "an object of transformers' settings, or its JSON text",
    ),
    "top_logprobs": _only(0, "left out, because answers come without probabilities"),
    "stream_options": (  # a stream ends with its usage anyway
        lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"include_usage", "include_obfuscation"}
            and all(isinstance(flag, bool) for flag in value.values())
        ),
        'an object of flags, such as {"include_usage": true}',
    ),
}
OF_COMPLETIONS: dict[str, Check] = {
    "max_tokens": NEW_TOKENS,
    "frequency_penalty": (
        lambda value: _number(value) and -0.99 <= value <= 2,
        "a number above -1, up to 2 (at least -0.99)",
    ),
    "presence_penalty": _only(0, "0, because there is none"),
    "logit_bias": (lambda value: isinstance(value, dict), "an object of token ids and numbers"),
    "stop": (
        _stops,
        f"a text that is not empty, or a list of such texts; {STOPS} at most, of {STOP_LENGTH} characters at most",
    ),
    "n": ONE_ANSWER,
    "logprobs": _only(False, "left out, because answers come without probabilities"),
}
OF_TOOLS: dict[str, Check] = {
    "tools": (lambda value: value == [] or _objects(value, 128), "a list of 128 tools at most, all objects"),
    "tool_choice": AUTO_OR_NONE,
    "parallel_tool_calls": _only(True, "true, because the number of calls is not limited"),
}
FIELDS: dict[str, dict[str, Check]] = {
    CHAT: {
        "messages": FIELDS_OF_PROMPTS["messages"],
        "max_completion_tokens": NEW_TOKENS,
        "chat_template_kwargs": AN_OBJECT,
        "functions": _only([], "left out: give tools instead"),
        "function_call": _only("none", "left out: give tools instead"),
        "modalities": _only(["text"], '["text"], because nothing else is written'),
        "response_format": _only({"type": "text"}, "text, because nothing else is enforced"),
        "verbosity": _only("medium", '"medium", because nothing else is enforced'),
    }
    | COMMON
    | OF_COMPLETIONS
    | OF_TOOLS,
    COMPLETION: {
        "prompt": FIELDS_OF_PROMPTS["prompt"],
        "best_of": ONE_ANSWER,
        "echo": _only(False, "false, because answers leave the prompt out"),
        "suffix": _only("", "left out, because nothing is inserted before it"),
    }
    | COMMON
    | OF_COMPLETIONS,
    RESPONSE: {
        "input": FIELDS_OF_PROMPTS["input"],
        "instructions": A_TEXT,
        "max_output_tokens": NEW_TOKENS,
        "background": _only(False, "false, because an answer is given to the request for it"),
        "include": _only([], "empty, because answers hold nothing else"),
        "truncation": _only("disabled", '"disabled": a prompt that is too long is refused'),
        "reasoning": (
            lambda value: isinstance(value, dict) and all(one is None for one in value.values()),
            "left out, because the model is not told how much to reason",
        ),
        "text": (
            lambda value: (
                isinstance(value, dict)
                and value.get("format") in (None, {"type": "text"})
                and value.get("verbosity") in (None, "medium")
                and value.keys() <= {"format", "verbosity"}
            ),
            'left out, or {"format": {"type": "text"}}, because nothing else is enforced',
        ),
    }
    | COMMON
    | OF_TOOLS,
}
# No text depends on them: they are about accounts, storage and speed, or ask for what a stream holds anyway.
PASSED_OVER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
}  # fmt: skip
GENERATION: dict[str, Check] = {
    "do_sample": FLAG,
    "temperature": TEMPERATURE,
    "top_k": _at_least(0),
    "top_p": TOP_P,
    "min_p": _from(0, 1),
    "typical_p": TOP_P,
    "epsilon_cutoff": _from(0, 0.99),
    "eta_cutoff": _from(0, 0.99),
    "repetition_penalty": _from(0.01, 100),
    "no_repeat_ngram_size": _at_least(0),
    "max_new_tokens": NEW_TOKENS,
    "min_new_tokens": _at_least(0),
}
NOT_FLOATS = {
    "do_sample",
    "top_k",
    "no_repeat_ngram_size",
    "max_new_tokens",
    "min_new_tokens",
}  # transformers is strict
LEAVE_OUT = "the server does not know it, or cannot do it; leave it out"
INSTEAD: dict[Any, str] = {
    (RESPONSE, "max_tokens"): "give max_output_tokens instead",
    (RESPONSE, "max_completion_tokens"): "give max_output_tokens instead",
    (RESPONSE, "messages"): "give input instead",
    (RESPONSE, "prompt"): "prompts are not kept; give input instead",
    (COMPLETION, "messages"): f"give prompt instead, or ask {CHAT}",
    (CHAT, "prompt"): f"give messages instead, or ask {COMPLETION}",
    (CHAT, "reasoning_effort"): "if the model's chat template has a variable for it, give that in chat_template_kwargs",
    "max_output_tokens": "give max_tokens instead",
    "max_completion_tokens": "give max_tokens instead",
    "previous_response_id": "answers are not kept; send the whole conversation as input",
    "conversation": "conversations are not kept; send the whole conversation as input",
} | {
    name: f'give it in generation_config, such as {{"generation_config": {{"{name}": ...}}}}'
    for name in GENERATION
    if name not in COMMON
}


# -- what to decode ---------------------------------------------------------------------------------------------------


def _generation_config(given: str | dict) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"generation_config must be an object, or its JSON text: {error}") from error
        _check("generation_config", given, AN_OBJECT)
    settings = {name: value for name, value in given.items() if value is not None}  # type: ignore[union-attr]
    for name, value in settings.items():
        if name not in GENERATION:
            raise RefusedError(f"generation_config must not hold {name:.80}: it takes {', '.join(GENERATION)}")
        _check(f"{name} in generation_config", value, GENERATION[name])
    return {name: value if name in NOT_FLOATS else float(value) for name, value in settings.items()}


def _sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with ``do_sample`` as they imply it; without what only sampling reads, where it is false."""
    if settings.get("temperature") == 0:
        if settings.get("do_sample"):
            raise RefusedError("temperature must be above 0 where do_sample is true; it is 0, which decodes greedily")
        settings = settings | {"do_sample": False}
    elif settings.keys() & SAMPLING:
        settings = {"do_sample": True} | settings
    if settings.get("do_sample") is False:
        settings = {name: value for name, value in settings.items() if name not in SAMPLING}
    return settings


def _biases(given: dict, vocabulary: int) -> dict[tuple[int], float]:
    is_bias = _from(-100, 100)[0]
    for token, bias in given.items():
        if not (token.isdecimal() and len(token) < 20 and int(token) < vocabulary and is_bias(bias)):
            raise RefusedError(
                f"logit_bias must be an object of token ids and numbers, ids below {vocabulary} and numbers from "
                f"-100 to 100; it has {json.dumps({token: bias}):.80}"
            )
    return {(int(token),): float(bias) for token, bias in given.items()}


# -- what to read -----------------------------------------------------------------------------------------------------

PARTS = ("text", "input_text", "output_text")
ROLE: Check = (lambda value: isinstance(value, str) and 0 < len(value) <= ITEMS, f"a text of 1 to {ITEMS} characters")
ARGUMENTS = "the JSON text of an object"
MESSAGE_PASSED_OVER = {"name", "refusal", "annotations", "reasoning", "reasoning_content", "id", "type", "status"}


def _is_content(value: Any) -> bool:
    """Whether this is a text, or a list of text parts."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str) for part in value
        )
    )


def _content(value: Any, of: str) -> str | list[dict]:
    """Return a message's content as a text or text parts. Raises RefusedError for anything else."""
    if not _is_content(value):
        raise RefusedError(f"{of}'s content must be a text, or parts of type text; one is {json.dumps(value):.80}")
    return value if isinstance(value, str) else [{"type": "text", "text": part["text"]} for part in value]


def _predicted(value: dict | None) -> str:
    """Return the text that a client expects."""
    content = "" if value is None else value["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(given: dict) -> dict:
    """Return a message of a chat without the fields that no template is given."""
    message = {name: value for name, value in given.items() if value is not None and name not in MESSAGE_PASSED_OVER}
    if not isinstance(message.get("role"), str):
        raise RefusedError(f"a message must be an object with a role; one is {json.dumps(given):.80}")
    _check("a message's role", message["role"], ROLE)
    _known(message, {"role", "content", "tool_calls", "tool_call_id"}, "a message")
    message["content"] = _content(message.get("content", ""), "a message")
    _check("a message's tool_call_id", message.get("tool_call_id", ""), A_TEXT)
    calls = message.pop("tool_calls", [])
    _check("a message's tool_calls", calls, OF_TOOLS["tools"])
    if calls:
        message["tool_calls"] = [_call(call.get("id"), call.get("function")) for call in calls]
    return message


def _call(identity: Any, function: Any) -> dict:
    """Return a tool call that the model has made, as chat completions write it."""
    _check("a tool call's id", "" if identity is None else identity, A_TEXT)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"a tool call must have a function with a name; one is {json.dumps(function):.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"a tool call's arguments must be {ARGUMENTS}: {error}") from error
    _check("a tool call's arguments", arguments, (AN_OBJECT[0], ARGUMENTS))
    _check_characters("a tool call's arguments", arguments)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call if identity is None else call | {"id": identity}


def _input_items(given: str | list[dict], instructions: str | None) -> list[dict]:
    """Return the input of a response as a list of items: messages, calls and what came out of them.

    Instructions become a first message. Items of reasoning are passed over, as in chats.
    """
    items: list[dict] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*items, {"role": "user", "content": given}]
    if all(item.get("type") in PARTS and "role" not in item for item in given):
        return [*items, {"role": "user", "content": _content(given, "a message")}]
    for item in given:
        kind = item.get("type")
        if item.get("role") is not None and kind in (None, "message"):
            message = _message(item)
            _known(message, {"role", "content"}, "a message of input")
            items.append(message)
        elif kind == "function_call" and items:
            function = _call(item.get("call_id", ""), item)["function"]
            call = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
            items.append({"type": kind, "call_id": item.get("call_id", "")} | call)
        elif kind == "function_call_output" and items:
            _check("the call_id of a function_call_output", item.get("call_id"), A_TEXT)
            _check("the output of a function_call_output", item.get("output"), A_TEXT)
            items.append({"type": kind, "call_id": item["call_id"], "output": item["output"]})
        elif kind != "reasoning":
            raise RefusedError(
                "input must begin with a message, and hold only messages with a role and a content, function_call, "
                f"function_call_output and reasoning; one item is {json.dumps(item):.80}"
            )
    if not items:
        raise RefusedError("input must hold a message")
    return items


def _tool(given: dict, nested: bool) -> dict:
    """Return a tool as it was given. nested: as chat completions write it."""
    function = given.get("function") if nested else given
    if given.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"tools must be of type function, each with a name; one is {json.dumps(given):.80}")
    _check("a tool's description", function.get("description") or "", A_TEXT)
    _check("a tool's parameters", function.get("parameters") or {}, AN_OBJECT)
    return given


def _variables(given: dict, reserved: Collection[str]) -> dict[str, Any]:
    """Return the variables for a chat template. Raises RefusedError for all but plain ones."""
    if len(given) > NAMES:
        raise RefusedError(f"chat_template_kwargs must hold {NAMES} names at most; it holds {len(given)}")
    for name, value in given.items():
        if name in reserved or not name.isidentifier() or len(name) > ITEMS:
            raise RefusedError(
                f"chat_template_kwargs must hold variables of the chat template alone, so not {name:.80}: leave it out"
            )
        values = value if isinstance(value, list) else [value]
        if len(values) > ITEMS or not all(map(_is_plain, values)):
            raise RefusedError(
                f"{name} in chat_template_kwargs must be true, false, null, a number up to {LARGEST}, a text of {TEXT} "
                f"characters at most, or a list of {ITEMS} of these at most; it is {json.dumps(value):.80}"
            )
    return given


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT
    return value is None or isinstance(value, bool) or (_number(value) and abs(value) <= LARGEST)


def _known(given: dict, names: Iterable[str], what: str) -> None:
    for name in given.keys() - set(names):
        raise RefusedError(
            f"{what} must not have {name:.80}: the server does not know it, or cannot do it; leave it out"
        )
