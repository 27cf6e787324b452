"""The fields of OpenAI's and Anthropic's requests: each is honoured, passed over because no text depends on it or
because it is a hint that the model cannot be given, or refused by name.

Nothing here needs a server: the bodies are parsed JSON, and what comes out are messages as chat completions write them,
and settings of ``model.generate``.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, TypeVar

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE, COUNT = "/v1/messages", "/v1/messages/count_tokens"  # Anthropic's
PROMPTS = {CHAT: "messages", COMPLETION: "prompt", RESPONSE: "input", MESSAGE: "messages", COUNT: "messages"}
SCHEMAS = {CHAT: "response_format", RESPONSE: "text.format", MESSAGE: "output_config.format"}
NO_THREAD = "thread_unsupported_request"  # Anthropic's client then sends the whole conversation, again and from then on

LEVELS = 64  # of nested lists and objects
MESSAGES = 4096  # a template may look at all messages for each of them
MOST_PROMPTS, MOST_ANSWERS, MOST_LIKELIEST, MOST_BIASES = 64, 16, 20, 1024  # of a request
STOPS, STOP_LENGTH = 16, 256  # every piece of an answer is compared with all of them
NAMES, ITEMS, TEXT, LARGEST = 32, 64, 1000, 1_000_000  # of the variables of a template

SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}  # imply do_sample


Read = TypeVar("Read")


class RefusedError(ValueError):
    """A request asks for what cannot be done. The message names the field and what it must be.

    param: the field at fault, or the part of it, such as messages[1]; None if it is no field.
    code: what OpenAI or Anthropic calls such a fault, where clients act on the name.
    status: of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@contextmanager
def blamed(param: str) -> Iterator[None]:
    """Let what is refused here be the fault of this field, unless a part of it is named already."""
    try:
        yield
    except RefusedError as error:
        error.param = error.param or param
        raise


@dataclass(frozen=True)
class Demand:
    """What an answer must be.

    schema: JSON schema of its text; None: any text.
    calls: names of the tools of which it must call one; empty: it need not.
    field: of the request, with the schema.
    """

    schema: dict | None = None
    calls: tuple[str, ...] = ()
    field: str = ""

    def __bool__(self) -> bool:
        return self.schema is not None or bool(self.calls)

    @property
    def param(self) -> str:
        """The field that is at fault if it cannot be enforced."""
        return "tools" if self.schema is None else self.field


@dataclass(frozen=True)
class Wishes:
    """What a request asks of ``model.generate``.

    seed: of sampling; None: that of the server.
    stops: stop strings.
    prediction: a text that the client expects.
    settings: fields of GenerationConfig, to be set in the model's own.
    answers: to each prompt.
    logprobs: how many likeliest tokens to name with each token and its log probability; None: no probabilities.
    presence, frequency: what is taken from the logit of a token that the answer has, once and for each time.
    one_call: whether an answer ends with its first call of a tool.
    demand: what is enforced.
    thought: tokens of reasoning in an answer, at most; None: as many as it likes.
    """

    seed: int | None = None
    stops: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    prediction: str = ""
    answers: int = 1
    logprobs: int | None = None
    presence: float = 0.0
    frequency: float = 0.0
    one_call: bool = False
    demand: Demand = Demand()
    thought: int | None = None


@dataclass(frozen=True)
class Asked:
    """What a request says besides its `Wishes`.

    messages: of a chat, for the chat template; None: `prompts` are read as they are.
    prompts: texts, or tokens.
    continues: whether the last message, the model's own, goes on; otherwise the model begins a new one.
    tools, variables: for the chat template.
    thinks, effort: whether the model is to reason, and how much, one of EFFORTS, for the chat template; None: as it
        does by itself.
    streams: whether the answer comes as a stream.
    usage_apart: whether the stream ends with an event of the usage alone.
    usage_always: whether each event has the usage so far.
    echoes: whether answers begin with their prompts.
    told: fields that a response repeats.
    """

    messages: list[dict] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    continues: bool = False
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    thinks: bool | None = None
    effort: str | None = None
    streams: bool = False
    usage_apart: bool = False
    usage_always: bool = False
    echoes: bool = False
    told: dict[str, Any] = field(default_factory=dict)


def read_request(body: dict, path: str, model: str, vocabulary: int, reserved: Collection[str]) -> tuple[Asked, Wishes]:
    """Return what a request says.

    body: the parsed JSON of a request; it is not changed. A field that is null counts as left out.
    path: CHAT, COMPLETION, RESPONSE, MESSAGE or COUNT.
    model: the name of the only model; a request may leave it out.
    vocabulary: number of tokens of the model.
    reserved: names that no variable of a chat template may have.
    Raises RefusedError, which names the field, for all that is neither honoured nor passed over.
    """
    given, fields = {name: value for name, value in body.items() if value is not None}, FIELDS[path]
    body = {name: value for name, value in given.items() if name not in PASSED_OVER}
    for name, value in given.items():
        with blamed(f"{name:.80}"):
            _check_values(name, value)
    for name, value in body.items():
        with blamed(f"{name:.80}"):
            if name not in fields:
                raise RefusedError(f"{name:.80} is not served: {_instead(name, path)}", code=CODES.get(name))
            _check(name, value, fields[name])
    if body.get("model", model) != model:
        says = f"model must be {model!r}, the only one of this server; it is {body['model']!r:.80}"
        raise RefusedError(says, "model", "model_not_found", 404)
    asked, wishes = _asked(body, path, vocabulary, reserved), _wishes(body, path, vocabulary)
    if len(asked.prompts) * wishes.answers > MOST_PROMPTS:
        raise RefusedError(
            f"n must be lower, or prompt shorter: a request gets {MOST_PROMPTS} answers at most, and this one asks for "
            f"{len(asked.prompts) * wishes.answers}",
            "n",
        )
    return asked, wishes


def _wishes(body: dict, path: str, vocabulary: int) -> Wishes:
    settings: dict[str, Any] = _generation_config(body.get("generation_config", {}))
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body:
            settings["max_new_tokens"] = body[name]
    if biases := _biases(body.get("logit_bias", {}), vocabulary):
        settings["sequence_bias"] = biases
    settings |= {name: body[name] if name in NOT_FLOATS else float(body[name]) for name in OF_SAMPLING if name in body}
    stop = body.get("stop", body.get("stop_sequences", ()))
    logprobs = body.get("logprobs") if path == COMPLETION else body.get("top_logprobs", 0)
    if (path == CHAT and not body.get("logprobs")) or (path == RESPONSE and LOGPROBS not in body.get("include", ())):
        if logprobs:
            where = "logprobs is not true" if path == CHAT else f"include does not hold {LOGPROBS!r}"
            raise RefusedError(f"top_logprobs must be left out where {where}", "top_logprobs")
        logprobs = None
    elif path in (MESSAGE, COUNT):
        logprobs = None
    choice = body["tool_choice"] if isinstance(body.get("tool_choice"), dict) else {}
    return Wishes(
        body.get("seed"),
        (stop,) if isinstance(stop, str) else tuple(stop),
        _sampling(settings),
        _predicted(body.get("prediction")),
        body.get("n", 1),
        logprobs,
        float(body.get("presence_penalty", 0)),
        float(body.get("frequency_penalty", 0)),
        not body.get("parallel_tool_calls", True) or choice.get("disable_parallel_tool_use", False),
        Demand(_schema(body), _to_be_called(body, path), SCHEMAS.get(path, "")),
        body.get("thinking", {}).get("budget_tokens"),
    )


def _reasoning(body: dict) -> tuple[bool | None, str | None]:
    """Return whether the model is to reason, and how much, by one of EFFORTS; None: as it does by itself.

    To Anthropic's clients these are two things: an effort says nothing of whether it reasons.
    """
    thinking, effort = body.get("thinking", {}).get("type"), body.get("output_config", {}).get("effort")
    if thinking == "disabled":
        return False, "none"
    if thinking == "enabled":
        return True, effort or "medium"
    if effort is None:
        effort = body.get("reasoning_effort") or body.get("reasoning", {}).get("effort")
        return None if effort is None else effort != "none", effort
    return None, effort


def _schema(body: dict) -> dict | None:
    """Return the JSON schema of the text that is asked for."""
    inside = next((body[name].get("format") for name in ("text", "output_config") if name in body), None)
    how = body.get("response_format") or inside or {}
    if how.get("type") == "json_object":
        return {"type": "object"}
    return (how.get("json_schema") or how).get("schema") if how.get("type") == "json_schema" else None


def _kind_of_choice(body: dict) -> str | None:
    """Return what tool_choice says; None if it is left out. Some kinds are objects, with more in them."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, dict) else choice


@blamed("tool_choice")
def _to_be_called(body: dict, path: str) -> tuple[str, ...]:
    """Return the names of the tools of which one must be called."""
    choice, kind = body.get("tool_choice"), _kind_of_choice(body)
    if kind not in ("required", "any", "function", "tool"):
        return ()
    names = tuple(_tool(one, path)["function"]["name"] for one in body.get("tools", ()))
    if not names:
        raise RefusedError(f"tool_choice must be left out where there are no tools; it is {_shown(choice)}")
    if kind in ("required", "any"):
        return names
    assert isinstance(choice, dict)
    name = choice.get("name") or choice["function"]["name"]
    if name not in names:
        raise RefusedError(f"tool_choice must name one of the tools ({', '.join(names):.200}); it names {name!r:.80}")
    return (name,)


def _asked(body: dict, path: str, vocabulary: int, reserved: Collection[str]) -> Asked:
    options = body.get("stream_options", {})
    streams = body.get("stream", False)
    if path == COMPLETION:
        if body.get("echo") and "logprobs" in body:
            raise RefusedError("echo must be false where logprobs are asked for: the prompt has none", "echo")
        return Asked(
            prompts=_prompts(_given(body, "prompt"), vocabulary),
            streams=streams,
            usage_apart=options.get("include_usage", False),
            usage_always=options.get("continuous_usage_stats", False),
            echoes=body.get("echo", False),
        )
    tools = None
    if body.get("tools") and _kind_of_choice(body) != "none":
        tools = _each("tools", body["tools"], lambda one: _tool(one, path))
    if path == CHAT:
        messages = _each("messages", _given(body, "messages"), _message)
    elif path == RESPONSE:
        messages = _input_items(_given(body, "input"), body.get("instructions"))
    else:
        if path == MESSAGE:
            _given(body, "max_tokens")
        messages = _anthropic_messages(_given(body, "messages"), body.get("system"))
        if path == MESSAGE and messages[-1].get("tool_calls"):
            raise RefusedError(
                "messages must not end with a tool_use: give a message of the user with its tool_result",
                f"messages[{len(body['messages']) - 1}]",
            )
    with blamed("input" if path == RESPONSE else "messages"):
        messages = _in_order_of_calls(messages)
    thinks, effort = _reasoning(body)
    return Asked(
        messages=messages,
        continues=path in (MESSAGE, COUNT) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        tools=tools,
        variables=_variables(body.get("chat_template_kwargs", {}), reserved),
        thinks=thinks,
        effort=effort,
        streams=streams,
        usage_apart=path == CHAT and options.get("include_usage", False),
        usage_always=path == CHAT and options.get("continuous_usage_stats", False),
        told={name: body[name] for name in REPEATED if name in body} if path == RESPONSE else {},
    )


# -- values -----------------------------------------------------------------------------------------------------------

Check = tuple[Callable[[Any], bool], str]  # whether a value is right, and what it must be


def _shown(value: Any) -> str:
    """Return the beginning of a value, for a message."""
    try:
        return f"{json.dumps(value):.80}"
    except RecursionError:  # json.loads goes a little deeper than json.dumps
        return "nested too deeply"


def _check(name: str, value: Any, check: Check) -> None:
    is_right, what = check
    if not is_right(value):
        raise RefusedError(f"{name:.80} must be {what}; it is {_shown(value)}")


def _given(body: dict, name: str) -> Any:
    if name not in body:
        raise RefusedError(f"{name} is missing: it must be {OF_ALL_NEEDED[name][1]}", name)
    return body[name]


def _each(name: str, given: list, read: Callable[[Any], Read]) -> list[Read]:
    """Read each part of a field."""
    found = []
    for number, one in enumerate(given):
        with blamed(f"{name}[{number}]"):
            found.append(read(one))
    return found


def _check_values(name: str, value: Any, levels: int = LEVELS, place: str = "") -> None:
    """Raise RefusedError for what is nested too deeply, for halves of characters, which no tokenizer takes, and for
    NaN and Infinity, which Python reads and JSON does not have. place: how the value is called inside the field.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(
                f"{name:.80} has half of a surrogate pair, {value[error.start]!a}, at place {error.start}, which is no "
                "character: send both halves, or leave it out"
            ) from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise RefusedError(f"{name:.80} must be free of NaN and infinite numbers; it has {place}{value}")
    elif isinstance(value, (list, dict)):
        if not levels:
            raise RefusedError(f"{name:.80} is nested too deeply: {LEVELS} levels are the most")
        for one in value:
            _check_values(name, one, levels - 1)
        for key, one in value.items() if isinstance(value, dict) else ():
            _check_values(name, one, levels - 1, f"{key:.80} = ")


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
ANSWERS: Check = (lambda value: _whole(value) and 0 < value <= MOST_ANSWERS, f"a whole number from 1 to {MOST_ANSWERS}")
PENALTY = _from(-2, 2)
LIKELIEST: Check = (
    lambda value: _whole(value) and 0 <= value <= MOST_LIKELIEST,
    f"a whole number from 0 to {MOST_LIKELIEST}",
)
LEVELS_OF_EFFORT = ("low", "medium", "high", "xhigh", "max")
EFFORTS = ("none", "minimal", *LEVELS_OF_EFFORT)
EFFORT: Check = (lambda value: value in EFFORTS, f"one of {', '.join(EFFORTS)}")
VERBOSITY: Check = (lambda value: value in ("low", "medium", "high"), "low, medium or high")
# Of a response; what is told of its reasoning is all, whatever `summary` says.
REASONING: dict[str, tuple[str, ...]] = {
    "effort": EFFORTS, "summary": ("auto", "concise", "detailed"), "generate_summary": ("auto", "concise", "detailed"),
    "context": ("auto",), "mode": ("standard",),
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # what a response can include
INCLUDED = {
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
}  # fmt: skip  # all but the first are of items that no answer has, or of nothing that is missed
TOOL_CHOICE: Check = (
    lambda value: (
        value in ("auto", "none", "required")
        or (
            isinstance(value, dict)
            and value.get("type") == "function"
            and isinstance((value.get("function") if "function" in value else value), dict)
            and isinstance((value.get("function") or value).get("name"), str)
        )
    ),
    '"auto", "none", "required", or an object that names a function',
)


def _is_tool_choice(value: dict) -> bool:
    return value.get("type") == "tool" and isinstance(value.get("name"), str)


def _is_format(value: Any) -> bool:
    """Whether a text can be written so. The schema stands in a part of its own in chats, and beside it in responses."""
    if not isinstance(value, dict):
        return False
    if value.get("type") == "json_schema":
        inner = value.get("json_schema", value)
        return isinstance(inner, dict) and isinstance(inner.get("schema"), dict)
    return value.get("type") in ("text", "json_object")


OF_ALL_NEEDED: dict[str, Check] = {
    "max_tokens": NEW_TOKENS,
    "messages": (_objects, f"a list of at least one message, and of {MESSAGES} at most, all objects"),
    "prompt": (
        lambda value: isinstance(value, str) or (isinstance(value, list) and len(value) > 0),
        f"a string, a list of tokens, or a list of up to {MOST_PROMPTS} of these",
    ),
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
    "top_k": _at_least(0),
    "min_p": _from(0, 1),
    "repetition_penalty": _from(0.01, 100),
    "seed": (lambda value: _whole(value) and -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "generation_config": (
        lambda value: isinstance(value, (str, dict)),
        "an object of transformers' settings, or its JSON text",
    ),
    "stream_options": (
        lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"include_usage", "continuous_usage_stats", "include_obfuscation"}
            and all(isinstance(flag, bool) for flag in value.values())
        ),
        'an object of flags, such as {"include_usage": true}',
    ),
}
OF_COMPLETIONS: dict[str, Check] = {
    "max_tokens": NEW_TOKENS,
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "logit_bias": (lambda value: isinstance(value, dict), "an object of token ids and numbers"),
    "stop": (
        _stops,
        f"a text that is not empty, or a list of such texts; {STOPS} at most, of {STOP_LENGTH} characters at most",
    ),
    "n": ANSWERS,
}
OF_TOOLS: dict[str, Check] = {
    "tools": (lambda value: value == [] or _objects(value, 128), "a list of 128 tools at most, all objects"),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
}
FIELDS: dict[str, dict[str, Check]] = {
    CHAT: {
        "messages": OF_ALL_NEEDED["messages"],
        "logprobs": FLAG,
        "top_logprobs": LIKELIEST,
        "max_completion_tokens": NEW_TOKENS,
        "chat_template_kwargs": AN_OBJECT,
        "functions": _only([], "left out: give tools instead"),
        "function_call": _only("none", "left out: give tools instead"),
        "modalities": _only(["text"], '["text"], because nothing else is written'),
        "reasoning_effort": EFFORT,
        "response_format": (_is_format, "of type text, json_object, or json_schema with a json_schema and its schema"),
        "verbosity": VERBOSITY,
    }
    | COMMON
    | OF_COMPLETIONS
    | OF_TOOLS,
    COMPLETION: {
        "prompt": OF_ALL_NEEDED["prompt"],
        "logprobs": LIKELIEST,
        "best_of": _only(1, "1, because all answers are given"),
        "echo": FLAG,
        "suffix": _only("", "left out, because nothing is inserted before it"),
    }
    | COMMON
    | OF_COMPLETIONS,
    RESPONSE: {
        "input": OF_ALL_NEEDED["input"],
        "top_logprobs": LIKELIEST,
        "chat_template_kwargs": AN_OBJECT,
        "instructions": A_TEXT,
        "max_output_tokens": NEW_TOKENS,
        "background": _only(False, "false, because an answer is given to the request for it"),
        "include": (
            lambda value: isinstance(value, list) and all(isinstance(one, str) and one in INCLUDED for one in value),
            f"a list of {', '.join(sorted(INCLUDED))}",
        ),
        "truncation": _only("disabled", '"disabled": a prompt that is too long is refused'),
        "reasoning": (
            lambda value: (
                isinstance(value, dict)
                and all(one is None or (name in REASONING and one in REASONING[name]) for name, one in value.items())
            ),
            "an object of " + ", ".join(f"{name} ({' or '.join(values)})" for name, values in REASONING.items()),
        ),
        "text": (
            lambda value: (
                isinstance(value, dict)
                and (value.get("format") is None or _is_format(value["format"]))
                and (value.get("verbosity") is None or VERBOSITY[0](value["verbosity"]))
                and value.keys() <= {"format", "verbosity"}
            ),
            "an object whose format is of type text, json_object, or json_schema with a schema",
        ),
    }
    | COMMON
    | OF_TOOLS,
}
KEEP_THINKING: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
OF_MESSAGES: dict[str, Check] = {
    "messages": OF_ALL_NEEDED["messages"],
    "system": (
        lambda value: isinstance(value, str) or (isinstance(value, list) and _is_content(value)),
        "a text, or a list of text blocks",
    ),
    "tools": OF_TOOLS["tools"],
    "tool_choice": (
        lambda value: (
            isinstance(value, dict)
            and (value.get("type") in ("auto", "none", "any") or _is_tool_choice(value))
            and isinstance(value.get("disable_parallel_tool_use", False), bool)
            and value.keys() <= {"type", "name", "disable_parallel_tool_use"}
        ),
        'an object of type "auto", "none" or "any", or of type "tool" with a name',
    ),
    "thinking": (
        lambda value: (
            isinstance(value, dict)
            and (
                (value.get("type") in ("disabled", "adaptive") and value.keys() <= {"type", "display"})
                or (
                    value.get("type") == "enabled"
                    and {"budget_tokens"} <= value.keys() <= {"type", "budget_tokens", "display"}
                    and NEW_TOKENS[0](value["budget_tokens"])
                )
            )
            and value.get("display") in (None, "summarized", "omitted")
        ),
        'an object of type "disabled" or "adaptive", or of type "enabled" with budget_tokens, a whole number above 0; '
        'display may be "summarized" or "omitted"',
    ),
    "output_config": (
        lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"format", "effort", "task_budget"}
            and (value.get("format") is None or (_is_format(value["format"]) and "schema" in value["format"]))
            and value.get("effort") in (None, *LEVELS_OF_EFFORT)
            and isinstance(value.get("task_budget") or {}, dict)
        ),
        "an object whose format is of type json_schema with a schema, and whose effort is one of "
        f"{', '.join(LEVELS_OF_EFFORT)}",
    ),
    "context_management": (
        lambda value: (
            isinstance(value, dict)
            and value.keys() <= {"edits"}
            and (value.get("edits") or [])
            in ([], *([KEEP_THINKING | {"keep": keep}] for keep in ("all", {"type": "all"})))
        ),
        f"an object without edits, or with {json.dumps(KEEP_THINKING)} alone: the conversation is read as it is sent",
    ),
    "mcp_servers": _only([], "empty, because the server calls no other"),
    "chat_template_kwargs": AN_OBJECT,
    "stop_sequences": (
        lambda value: isinstance(value, list) and _stops(value),
        f"a list of texts that are not empty; {STOPS} at most, of {STOP_LENGTH} characters at most",
    ),
    "max_tokens": NEW_TOKENS,
} | {name: check for name, check in COMMON.items() if name != "stream_options"}
FIELDS[MESSAGE] = FIELDS[COUNT] = OF_MESSAGES
# No text depends on them: they are about accounts, storage, speed, and what a server does that declines requests or
# runs tools itself.
PASSED_OVER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "container", "inference_geo", "client_metadata", "access_programs",
    "max_tool_calls", "speed", "diagnostics", "user_profile_id", "billing_policy", "fallbacks", "fallback_credit_token",
}  # fmt: skip
REPEATED = (  # in a response
    "instructions", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_logprobs",
    "max_output_tokens", "reasoning", "text",
)  # fmt: skip
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
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # fields of their own, too
NOT_FLOATS = {
    "do_sample",
    "top_k",
    "no_repeat_ngram_size",
    "max_new_tokens",
    "min_new_tokens",
}  # transformers is strict
CODES = {"thread": NO_THREAD}
LEAVE_OUT = "the server does not know it, or cannot do it; leave it out"
INSTEAD: dict[Any, str] = {
    (RESPONSE, "max_tokens"): "give max_output_tokens instead",
    (RESPONSE, "max_completion_tokens"): "give max_output_tokens instead",
    (RESPONSE, "messages"): "give input instead",
    (RESPONSE, "prompt"): "prompts are not kept; give input instead",
    (COMPLETION, "messages"): f"give prompt instead, or ask {CHAT}",
    (MESSAGE, "stop"): "give stop_sequences instead",
    (COUNT, "stop"): "give stop_sequences instead",
    (CHAT, "stop_sequences"): "give stop instead",
    (CHAT, "system"): "give a message whose role is system instead",
    (CHAT, "prompt"): f"give messages instead, or ask {COMPLETION}",
    "max_output_tokens": "give max_tokens instead",
    "max_completion_tokens": "give max_tokens instead",
    (MESSAGE, "output_format"): "give output_config.format instead",
    (MESSAGE, "response_format"): "give output_config.format instead",
    (MESSAGE, "reasoning_effort"): "give output_config.effort or thinking instead",
    (CHAT, "thinking"): "give reasoning_effort instead",
    (CHAT, "best_of"): "give n instead",
    (RESPONSE, "logprobs"): f"give include with {LOGPROBS!r}, and top_logprobs, instead",
    "enable_thinking": 'give it in chat_template_kwargs, such as {"chat_template_kwargs": {"enable_thinking": false}}',
    "min_tokens": 'give min_new_tokens in generation_config, such as {"generation_config": {"min_new_tokens": 8}}',
    "audio": "nothing but text is read or written; leave it out",
    (CHAT, "reasoning"): "give reasoning_effort instead",
    (RESPONSE, "reasoning_effort"): "give reasoning.effort instead",
    (RESPONSE, "response_format"): "give text.format instead",
    "previous_response_id": "answers are not kept; send the whole conversation as input",
    "conversation": "conversations are not kept; send the whole conversation as input",
    "thread": "conversations are not kept; send the whole conversation as messages",
} | {
    name: f'give it in generation_config, such as {{"generation_config": {{"{name}": ...}}}}'
    for name in GENERATION
    if name not in COMMON
}


def _instead(name: str, path: str) -> str:
    """Return what helps whoever sends a field that is not served at this path."""
    known = INSTEAD.get((path, name)) or INSTEAD.get(name)
    there = next((other for other in (CHAT, COMPLETION) if name in FIELDS[other]), None)
    return known or (LEAVE_OUT if there is None else f"leave it out, or ask {there}, which takes it")


# -- what to decode ---------------------------------------------------------------------------------------------------


@blamed("generation_config")
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
            raise RefusedError(
                "temperature must be above 0 where do_sample is true; it is 0, which decodes greedily", "temperature"
            )
        settings = settings | {"do_sample": False}
    elif settings.keys() & SAMPLING:
        settings = {"do_sample": True} | settings
    if settings.get("do_sample") is False:
        settings = {name: value for name, value in settings.items() if name not in SAMPLING}
    return settings


@blamed("logit_bias")
def _biases(given: dict, vocabulary: int) -> dict[tuple[int], float]:
    if len(given) > MOST_BIASES:
        raise RefusedError(f"logit_bias must have {MOST_BIASES} tokens at most, not {len(given)}")
    is_bias = _from(-100, 100)[0]
    for token, bias in given.items():
        if not (token.isdecimal() and len(token) < 20 and int(token) < vocabulary and is_bias(bias)):
            raise RefusedError(
                f"logit_bias must be an object of token ids and numbers, ids below {vocabulary} and numbers from "
                f"-100 to 100; it has {_shown({token: bias})}"
            )
    return {(int(token),): float(bias) for token, bias in given.items()}


# -- what to read -----------------------------------------------------------------------------------------------------

PARTS = ("text", "input_text", "output_text")
ROLE: Check = (lambda value: isinstance(value, str) and 0 < len(value) <= ITEMS, f"a text of 1 to {ITEMS} characters")
ARGUMENTS = "the JSON text of an object"
MESSAGE_PASSED_OVER = {
    "name", "refusal", "annotations", "reasoning", "reasoning_content", "id", "type", "status", "phase",
    "cache_control",
}  # fmt: skip


def _is_content(value: Any) -> bool:
    """Whether this is a text, or a list of text parts."""
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str) for part in value
        )
    )


def _content(value: Any, of: str, between: str = "\n") -> str:
    """Return a content, or what a call has returned, whose text parts stand below each other.

    between: the parts. Nothing stands between those of an answer: the model has written them as one text.

    Raises RefusedError for anything else.
    """
    if not _is_content(value):
        wrong = next((part for part in value if not _is_content([part])), value) if isinstance(value, list) else value
        raise RefusedError(f"{of}'s content must be a text, or parts of type text; one is {_shown(wrong)}")
    return value if isinstance(value, str) else between.join(part["text"] for part in value)


def _predicted(value: dict | None) -> str:
    """Return the text that a client expects."""
    content = "" if value is None else value["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(given: dict) -> dict:
    """Return a message of a chat without the fields that no template is given."""
    message = {name: value for name, value in given.items() if value is not None and name not in MESSAGE_PASSED_OVER}
    if not isinstance(message.get("role"), str):
        raise RefusedError(f"a message must be an object with a role; one is {_shown(given)}")
    _check("a message's role", message["role"], ROLE)
    if message["role"] == "developer":  # OpenAI's newer name, which few templates know
        message["role"] = "system"
    _known(message, {"role", "content", "tool_calls", "tool_call_id"}, "a message")
    between = "" if message["role"] == "assistant" else "\n"
    message["content"] = _content(message.get("content", ""), "a message", between)
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
        raise RefusedError(f"a tool call must have a function with a name; one is {_shown(function)}")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # clients write a call without arguments so
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"a tool call's arguments must be {ARGUMENTS}: {error}") from error
    _check("a tool call's arguments", arguments, (AN_OBJECT[0], ARGUMENTS))
    _check_values("a tool call's arguments", arguments)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return call if identity is None else call | {"id": identity}


def _in_order_of_calls(messages: list[dict]) -> list[dict]:
    """Return messages of which the results of tools that follow their calls stand in the order of these.

    Clients send them as tools end, and name the calls. Most templates show no names: to the model, the first result is
    that of the first call.

    Raises RefusedError if a call has a result, but an earlier one has none.
    """
    found = list[dict]()
    for is_result, those in groupby(messages, lambda one: one["role"] == "tool"):
        run = list(those)
        if is_result and found:
            calls = [call.get("id") for call in found[-1].get("tool_calls", ())]
            results = [result.get("tool_call_id") for result in run]
            if Counter(results) <= Counter(calls):  # clients may give several calls one name
                of_name = {name: iter([at for at, call in enumerate(calls) if call == name]) for name in calls}
                at = {next(of_name[name]): result for name, result in zip(results, run, strict=True)}
                run = [at[place] for place in sorted(at)]
                if missing := {*range(max(at))} - {*at}:
                    name = found[-1]["tool_calls"][min(missing)]["function"]["name"]
                    raise RefusedError(
                        f"a call of {name!r:.80} (id {calls[min(missing)]!r:.80}) has no result, though a later call "
                        "has: give results of all calls"
                    )
        found += run
    return found


def _input_items(given: str | list[dict], instructions: str | None) -> list[dict]:
    """Return the input of a response as messages of a chat.

    Instructions become a first message. Items of reasoning are passed over, as in chats.
    """
    messages: list[dict] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if all(item.get("type") in PARTS and "role" not in item for item in given):
        return [*messages, {"role": "user", "content": _content(given, "a message")}]
    _each("input", given, lambda item: _add_item(messages, item))
    if not messages:
        raise RefusedError("input must hold a message", "input")
    return messages


def _add_item(messages: list[dict], item: dict) -> None:
    """Add an item of a response's input to the messages before it."""
    kind = item.get("type")
    if item.get("role") is not None and kind in (None, "message"):
        message = _message(item)
        _known(message, {"role", "content"}, "a message of input")
        messages.append(message)
    elif kind == "function_call" and messages:
        _add_calls(messages, [_call(item.get("call_id", ""), item)])
    elif kind == "function_call_output" and messages:
        _check("the call_id of a function_call_output", item.get("call_id"), A_TEXT)
        output = _content(item.get("output"), "a function_call_output")
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind != "reasoning":
        raise RefusedError(
            "input must begin with a message, and hold only messages with a role and a content, function_call, "
            f"function_call_output and reasoning; one item is {_shown(item)}"
        )


def _add_calls(messages: list[dict], calls: list[dict]) -> None:
    """Add calls to the model's message that is the last one, or begin one."""
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).extend(calls)


def _anthropic_messages(given: list[dict], system: str | list[dict] | None) -> list[dict]:
    """Return messages of Anthropic's API as messages of a chat. Blocks of thinking are passed over, as in chats.

    Messages of one role that follow each other are one turn, as there.
    """
    messages: list[dict] = [] if system is None else [{"role": "system", "content": _content(system, "system")}]
    for role, turn in groupby([_role_and_blocks(one) for one in given], lambda one: one[0]):
        texts, calls = [], []
        for block in chain.from_iterable(blocks for _, blocks in turn):
            kind = block.get("type")
            if kind == "text" and isinstance(block.get("text"), str):
                texts.append(block["text"])
            elif kind == "tool_use" and role == "assistant":
                calls.append(_call(block.get("id"), {"name": block.get("name"), "arguments": block.get("input")}))
            elif kind == "tool_result" and role == "user":
                _check("the tool_use_id of a tool_result", block.get("tool_use_id"), A_TEXT)
                result = _content("" if block.get("content") is None else block["content"], "a tool_result")
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
            elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
                raise RefusedError(
                    "a message's blocks must be of type text; tool_use and thinking of the assistant; or tool_result "
                    f"of the user; one is {_shown(block)}"
                )
        if texts or role == "assistant":
            messages.append({"role": role, "content": ("" if role == "assistant" else "\n").join(texts)})
        if calls:
            _add_calls(messages, calls)
    if not messages:
        raise RefusedError("messages must hold a text")
    return messages


def _role_and_blocks(given: dict) -> tuple[str, list[dict]]:
    """Return what a message of Anthropic's API says. Raises RefusedError if it is none."""
    role, content = given.get("role"), given.get("content")
    _known(given, {"role", "content"}, "a message")
    if role not in ("user", "assistant", "system"):
        raise RefusedError(f'a message\'s role must be "user", "assistant" or "system"; one is {_shown(role)}')
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RefusedError(f"a message's content must be a text, or a list of blocks; one is {_shown(content)}")
    return role, blocks


@blamed("prompt")
def _prompts(given: Any, vocabulary: int) -> list[str | list[int]]:
    """Return the prompts of a completion, texts or tokens. Raises RefusedError if they are neither."""

    def is_tokens(value: Any) -> bool:
        return isinstance(value, list) and all(_whole(one) and 0 <= one < vocabulary for one in value)

    prompts = [given] if isinstance(given, str) or is_tokens(given) else given
    if len(prompts) > MOST_PROMPTS or not all(isinstance(one, str) or is_tokens(one) for one in prompts):
        raise RefusedError(
            f"prompt must be {OF_ALL_NEEDED['prompt'][1]}, with tokens below {vocabulary}; it is {_shown(given)}"
        )
    return prompts


def _tool(given: dict, path: str) -> dict:
    """Return a tool as chat completions write it, which nest it and call its schema ``parameters``."""
    if path in (MESSAGE, COUNT):
        kind = "function" if given.get("type") in (None, "custom") else given["type"]
        function: Any = {name: given.get(name) for name in ("name", "description")} | {
            "parameters": given.get("input_schema")
        }
    else:
        kind = given.get("type")
        function = given.get("function") if path == CHAT else {n: v for n, v in given.items() if n != "type"}
    if kind != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wanted = "custom" if path in (MESSAGE, COUNT) else "function"
        raise RefusedError(f"tools must be of type {wanted}, each with a name; one is {_shown(given)}")
    _check("a tool's description", function.get("description") or "", A_TEXT)
    _check("a tool's parameters", function.get("parameters") or {}, AN_OBJECT)
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


@blamed("chat_template_kwargs")
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
                f"characters at most, or a list of {ITEMS} of these at most; it is {_shown(value)}"
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
