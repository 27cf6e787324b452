"""Send bad requests to a server of OpenAI's and Anthropic's APIs, and check that it keeps serving.

Each field of the four schemas, and each place in messages, tools and settings, is left out, null, of the wrong type,
huge, not a number, nested deeply or not text. Each request must be answered within a minute, without a status of 500 or
above and without an error in the middle of a stream. Good requests must get the same text as before. Errors must have
the format of the API. If a request fails, it is printed.

    lookahead serve --port 8000 &
    python scripts/fuzz_server.py --url http://localhost:8000
"""

import copy
import http.client
import json
import random
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GOOD = {"prompt": "def read_lines(path):\n", "max_tokens": 12, "temperature": 0.8, "seed": 3}
TIMEOUT = 60  # seconds

TOOL = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "import"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "def main():"},
    {"role": "user", "content": "x = 1"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "import"}]},
    {"type": "reasoning", "id": "2", "summary": []},
    {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "def main():"},
    {"type": "message", "role": "user", "content": "x = 1"},
]
SETTINGS = {"do_sample": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
VARIABLES = {"enable_thinking": False, "names": ["a", 1]}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "import"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "x", "signature": ""}, {"type": "text", "text": "y"},
        {"type": "tool_use", "id": "1", "name": "look_up", "input": {"a": 1}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "def main():"}]},
    {"role": "user", "content": "x = 1"},
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    MESSAGE: {
        "messages": BLOCKS,
        "max_tokens": 3,
        "system": [{"type": "text", "text": "Be brief."}],
        "thinking": {"type": "disabled"},
        "output_config": {"format": None},
    },
    CHAT: {"messages": MESSAGES, "max_tokens": 3, "chat_template_kwargs": VARIABLES, "logit_bias": {"5": 1}},
    COMPLETION: {"prompt": "import", "max_tokens": 3, "generation_config": SETTINGS, "stop": ["\n\n\n"]},
    RESPONSE: {
        "input": ITEMS,
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None},
        "include": ["message.output_text.logprobs"],
    },
}
BODIES[COUNT] = {name: value for name, value in BODIES[MESSAGE].items() if name != "max_tokens"}
SCHEMAS: dict[str, Any] = {CHAT: ChatParams, COMPLETION: CompletionParams, RESPONSE: ResponseParams}
OF_MESSAGES = (
    "billing_policy", "cache_control", "compaction", "container", "context_management", "diagnostics",
    "fallback_credit_token", "fallbacks", "inference_geo", "max_tokens", "mcp_servers", "messages", "metadata", "model",
    "output_config", "output_format", "service_tier", "speed", "stop_sequences", "stream", "system", "temperature",
    "thinking", "thread", "tool_choice", "tools", "top_k", "top_p", "user_profile_id",
)  # fmt: skip
MORE_FIELDS = (
    "seed", "generation_config", "chat_template_kwargs", "top_k", "min_p", "stop", "logit_bias", "chat_template",
    "nope", "num_beams", "reasoning_effort", "input", "prompt", "messages", "tools", "max_tokens", "functions", "",
)  # fmt: skip
NESTED: dict[str, list[tuple]] = {
    CHAT: [
        ("messages", 0), ("messages", 0, "role"), ("messages", 0, "content"), ("messages", 1, "content", 0),
        ("messages", 1, "content", 0, "type"), ("messages", 1, "content", 0, "text"), ("messages", 2, "tool_calls"),
        ("messages", 2, "tool_calls", 0), ("messages", 2, "tool_calls", 0, "id"), ("messages", 2, "content"),
        ("messages", 2, "tool_calls", 0, "function"), ("messages", 2, "tool_calls", 0, "function", "name"),
        ("messages", 2, "tool_calls", 0, "function", "arguments"), ("messages", 3, "tool_call_id"),
        ("messages", 4, "name"), ("messages", 4, "nope"), ("messages", 4, "tool_calls"), ("messages", 4, "audio"),
        ("logit_bias", "5"), ("logit_bias", "-1"), ("logit_bias", "99999999"), ("logit_bias", "x"),
        *(("chat_template_kwargs", name) for name in (
            "x", "chat_template", "tokenize", "truncation", "max_length", "padding", "return_tensors", "return_dict",
            "tools", "documents", "messages", "conversation", "self", "add_generation_prompt", "tokenizer_kwargs",
            "continue_final_message", "bos_token", "raise_exception", "range", "sanitize_control_tokens", "\u00e9",
            "a b",
        )),
    ],
    COMPLETION: [
        ("stop", 0),
        *(("generation_config", name) for name in (
            *SETTINGS, "temperature", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_new_tokens",
            "min_new_tokens", "num_beams", "num_return_sequences", "use_cache", "max_length", "eos_token_id",
            "max_time", "prompt_lookup_num_tokens", "return_dict_in_generate", "output_scores",
            "cache_implementation", "nope",
            "assistant_early_exit", "sequence_bias", "bad_words_ids", "stop_strings", "guidance_scale", "penalty_alpha",
        )),
    ],
    MESSAGE: [
        ("thinking", "type"), ("thinking", "budget_tokens"), ("output_config", "format"), ("output_config", "effort"),
        ("output_config", "task_budget"), ("thinking", "display"),
        ("messages", 0), ("messages", 0, "role"), ("messages", 0, "content"), ("messages", 0, "content", 0),
        ("messages", 0, "content", 0, "type"), ("messages", 0, "content", 0, "text"), ("messages", 1, "content", 0),
        ("messages", 1, "content", 2), ("messages", 1, "content", 2, "id"), ("messages", 1, "content", 2, "name"),
        ("messages", 1, "content", 2, "input"), ("messages", 2, "content", 0, "tool_use_id"),
        ("messages", 2, "content", 0, "content"), ("messages", 2, "content", 0, "is_error"),
        ("messages", 3, "content"), ("messages", 3, "nope"), ("system", 0), ("system", 0, "text"),
    ],
    RESPONSE: [
        ("input", 0), ("input", 0, "role"), ("input", 0, "content"), ("input", 0, "content", 0),
        ("input", 0, "content", 0, "text"), ("input", 0, "type"), ("input", 1), ("input", 1, "content"),
        ("input", 2, "call_id"), ("input", 2, "name"), ("input", 2, "arguments"), ("input", 2, "type"),
        ("input", 3, "output"), ("input", 3, "call_id"), ("input", 4, "type"), ("input", 4, "content"),
        ("text", "format"), ("text", "format", "type"), ("text", "nope"), ("reasoning", "effort"),
        ("reasoning", "summary"),
        ("include", 0),
    ],
}  # fmt: skip
NESTED[COUNT] = NESTED[MESSAGE]
LEFT_OUT = object()


@dataclass(frozen=True)
class Raw:
    """JSON that Python's encoder cannot write, or only slowly."""

    text: str


def deep(levels: int) -> Raw:
    return Raw('{"a":[' * levels + "]}" * levels)


VALUES: list[Any] = [
    LEFT_OUT, None, True, False, 0, 1, -1, 2, 0.5, 1.0, -0.0, 1e-300, 5e-324, 1e308, Raw("1e999"), float("nan"),
    float("inf"), float("-inf"), 10**400, Raw("9" * 5000), -(2**63) - 1, 2**64, 2**31, "", "x", " ", "auto", "none",
    "required", "null", "NaN", "1", "\ud800", "\x00", "{{ 'x' * 300000000 }}", "{}", "[]",
    "x" * 50_000, "\u00e9" * 20_000, [], {}, [None], [1], [True], ["x"], [""], ["\ud800"], [[]], [{}], [[[[1]]]],
    {"a": 1}, {"": None}, {"a": {"b": {}}}, {"\ud800": 1}, {"x" * 5000: 1}, list(range(20_000)), ["x"] * 5000,
    [{}] * 5000, {str(number): 1 for number in range(5000)}, deep(20), deep(100), deep(20_000), {"type": "text"},
    ["text"], {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    ["text", "audio"], {"type": "function", "function": {"name": "look_up"}}, [{"type": "function", "function": TOOL}],
    [{"type": "function", **TOOL}], [{"type": "function", "function": {"name": 1, "parameters": []}}], [TOOL],
    [{"role": "user", "content": "x"}] * 5000, [{"role": "nobody", "content": ""}], [{"role": "user"}], "word " * 3000,
    '{"num_beams": 3}', '{"num_return_sequences": 500, "do_sample": true}', '{"temperature": NaN}', '{"top_k": 1e400}',
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A request that may be bad."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    is_chunked: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}, {self.name}: {self.headers} {self.body[:2000]!r} ({len(self.body)} bytes)"


def cases() -> Iterator[Case]:
    """Yield all requests, in order."""
    for path, body in BODIES.items():
        schema = (
            SCHEMAS[path].__required_keys__ | SCHEMAS[path].__optional_keys__ if path in SCHEMAS else {*OF_MESSAGES}
        )
        names = sorted(schema | {*MORE_FIELDS})
        for place in [*((name,) for name in names), *NESTED[path]]:
            for value in VALUES:
                changed = {"stream": place[0] != "stream" and value in (1, "x", 0.5)} | copy.deepcopy(body)
                for name in ("tool_choice", "parallel_tool_calls"):
                    if place == (name,):
                        changed["tools"] = [{"type": "function", "function": TOOL}]
                yield Case(f"{'.'.join(map(str, place))} is changed", path, encoded(changed, place, value))
        for text in (
            b"",
            b"null",
            b"[]",
            b"5",
            b"[1",
            b"{",
            b"\xff\xfe",
            b"\xef\xbb\xbf{}",
            b'{"a": "\xff"}',
            b"{}" * 9,
        ):
            yield Case("no JSON object", path, text)
        for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""):
            yield Case("another type", path, json.dumps(body).encode(), headers={"Content-Type": kind})
        for is_chunked in (False, True):
            for letter in (b" ", b"[", b"x"):
                yield Case("too large", path, b'{"prompt": "' + letter * (9 << 20), is_chunked=is_chunked)
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            yield Case("another method", path, b"", method=method)
    for path in (
        "/", "/v1", "/v1/models", "/v1/models/nope", "/health", "/metrics", "/docs", "/v1/embeddings", "/load_model",
        "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/v1/chat/completions/", "/v1/responses/resp_1", "/%00",
        "/..%2f", "/v1/messages/count_tokens", "/v1/messages/batches",
    ):  # fmt: skip
        for method in ("GET", "POST", "DELETE"):
            yield Case("another path", path, b'{"model": 5}', method=method)


def encoded(body: dict, place: tuple, value: Any) -> bytes:
    """Return JSON of ``body`` with another value at a place, which is added if it is missing."""
    at: Any = body
    for step in place[:-1]:
        at = at[step]
    if value is not LEFT_OUT:
        if isinstance(at, list):
            at[place[-1]] = value
        else:
            at.update({place[-1]: value})
    elif isinstance(at, list) or place[-1] in at:
        del at[place[-1]]
    raw: list[str] = []

    def mark(one: Any) -> str:
        raw.append(one.text)
        return f"<raw {len(raw) - 1}>"

    text = json.dumps(body, default=mark)
    for number, one in enumerate(raw):
        text = text.replace(f'"<raw {number}>"', one)
    return text.encode()


class Server:
    """The server under test. url: such as http://localhost:8000."""

    def __init__(self, url: str):
        place = urllib.parse.urlsplit(url)
        self._host, self._port = place.hostname, place.port
        self.text = self.answer()

    def send(self, case: Case) -> tuple[int, str]:
        """Return the status and the text of the answer, streamed or not."""
        connection = http.client.HTTPConnection(self._host or "localhost", self._port, timeout=TIMEOUT)
        try:
            body = (
                (case.body[at : at + 4096] for at in range(0, len(case.body), 4096)) if case.is_chunked else case.body
            )
            with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before the whole body is sent
                connection.request(case.method, case.path, body, case.headers, encode_chunked=case.is_chunked)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def answer(self) -> str:
        """Return the text of the answer to a good request."""
        status, said = self.send(Case("a good request", COMPLETION, json.dumps(GOOD).encode()))
        assert status == 200, said
        return json.loads(said)["choices"][0]["text"]

    def check(self, case: Case) -> int:
        """Send a request and return the status. Raises AssertionError, with the request, if it fails."""
        try:
            status, said = self.send(case)
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{error!r} for {case}") from error
        assert status < 500, f"status {status}, {said:.2000} for {case}"
        if case.method != "HEAD" and status >= 400:
            error = json.loads(said)
            is_anthropics = error["error"]["message"] and error.get("type") == "error"
            assert is_anthropics == case.path.startswith(MESSAGE), f"{said:.2000} for {case}"
        assert status != 200 or 'data: {"error"' not in said, f"{said[-2000:]} for {case}"
        return status

    def check_good(self) -> None:
        """Raise AssertionError if a good request gets another answer than the first time."""
        text = self.answer()
        assert text == self.text, f"a good request got another text than before: {text!r}, not {self.text!r}"


def fuzz(url: str, chosen: list[Case]) -> Counter:
    """Send these requests, with good ones in between. Returns the number of answers by status."""
    server, statuses = Server(url), Counter()  # type: ignore[var-annotated]
    for number, case in enumerate(chosen):
        statuses[server.check(case)] += 1
        if number % 50 == 49:
            server.check_good()
    server.check_good()
    return statuses


def choose(count: int | None, seed: int) -> list[Case]:
    """Return some of the requests at random, or all of them, in random order."""
    every = list(cases())
    return random.Random(seed).sample(every, len(every) if count is None else count)


@click.command()
@click.option("--url", default="http://localhost:8000", show_default=True)
@click.option("--count", type=click.IntRange(min=1), help="How many requests, chosen at random; all by default.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(url: str, count: int | None, seed: int) -> None:
    """Send a server bad requests."""
    statuses = fuzz(url, choose(count, seed))
    click.echo(f"{sum(statuses.values())} requests: " + ", ".join(f"{n} with {s}" for s, n in sorted(statuses.items())))


if __name__ == "__main__":
    main()
