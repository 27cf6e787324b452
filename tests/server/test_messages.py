"""`/v1/messages`, as Anthropic's clients ask and read; lists, probabilities and penalties; keys, names and the page."""

import asyncio
import contextlib
import gzip
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import openai
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from server_process import SERVE, ask, connect, running
from starlette.testclient import TestClient
from test_server import THINKING, WRITING
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead import DEMO_MODEL
from lookahead.tools.cli import main
from lookahead.tools.server import app, chats, fields, make_app, messages, responses
from lookahead.tools.server.answering import End
from lookahead.tools.server.parsing import Call
from lookahead.tools.server.reading import Prompt

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LENGTH = 16
KEY = "a key"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}{% if not add_generation_prompt %}{% endif %}")
    options = ("--chat-template", str(path), "--name", "demo", "--cors", "http://here", "--max-body", "5000")
    with running(*SERVE, *options) as address:
        yield address


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def expected(plain, tokenizer):
    @cache
    def text(prompt: str, seed: int | None = None, most: int = LENGTH) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(seed or 0)
        ids = plain.generate(**inputs, max_new_tokens=most, do_sample=seed is not None)[0]
        return tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return text


def events(address: str, path: str = MESSAGES, **body) -> list[tuple[str | None, dict]]:
    """Return the events of a streamed answer, with their names."""
    with contextlib.closing(connect(address)) as connection:
        connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
        blocks = connection.getresponse().read().decode().split("\n\n")
    found = []
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("event"), json.loads(lines["data"])))
    return found


PROMPT = "import os\n\n\nclass Reader:"
ASKED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": LENGTH, "temperature": 0}


def test_an_answer(address, expected):
    prompt = f"import os\nimport sys\n{PROMPT}\n"
    system = [
        {"type": "text", "text": "import os", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "import sys"},
    ]
    status, answer = ask(address, MESSAGES, **ASKED, system=system, model="demo", metadata={"user_id": "x"})
    assert (status, answer["type"], answer["role"], answer["model"]) == (200, "message", "assistant", "demo")
    assert answer["content"] == [{"type": "text", "text": expected(prompt)}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    counted = ask(address, f"{MESSAGES}/count_tokens", messages=ASKED["messages"], system=system)
    assert counted == (200, {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]})
    assert usage["output_tokens"] == LENGTH


def test_a_stream_has_its_events_in_order(address, expected):
    told = events(address, **ASKED)
    assert all(name == event["type"] for name, event in told)
    names = [name for name, _ in told]
    deltas = [event["delta"]["text"] for name, event in told if name == "content_block_delta"]
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(deltas) == expected(f"{PROMPT}\n")
    assert told[0][1]["message"]["content"] == []
    assert told[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] == LENGTH


def test_stop_sequences_and_a_begun_answer(address, expected):
    text = expected(f"{PROMPT}\n")
    stop = text[6:9]
    for answer in (
        ask(address, MESSAGES, **ASKED, stop_sequences=["never", stop])[1],
        events(address, **ASKED, stop_sequences=["never", stop])[-2][1]["delta"],
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    begun = [*ASKED["messages"], {"role": "assistant", "content": "    x"}]
    answer = ask(address, MESSAGES, **ASKED | {"messages": begun})[1]
    assert answer["content"][0]["text"] == expected(f"{PROMPT}\n    x")


@pytest.fixture(scope="module")
def writing():
    """A server whose model writes the prompt, and knows reasoning and calls."""
    with running("-c", WRITING, json.dumps(THINKING)) as address:
        yield address


def test_thinking_and_calls_are_blocks(writing):
    text = '<think>a b</think>See <tool>{"name": "f", "arguments": {"a": [1, {"b": "é"}]}}</tool>'
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, "temperature": 0}
    status, answer = ask(writing, MESSAGES, **body)
    assert status == 200, answer
    told, blocks = events(writing, **body), []
    for name, event in told:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif name == "content_block_delta":
            delta = event["delta"]
            key = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}[
                delta["type"]
            ]
            blocks[-1]["json" if key == "partial_json" else key] += delta[key]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    for found in (answer["content"], blocks):
        assert [block["type"] for block in found] == ["thinking", "text", "tool_use"]
        assert (found[0]["thinking"], found[1]["text"]) == ("a b", "See")
        assert (found[2]["name"], found[2]["input"]) == ("f", {"a": [1, {"b": "é"}]})
        assert re.fullmatch("[a-z0-9]{9}", found[2]["id"])
    assert answer["stop_reason"] == told[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("written", "stop", "told"),
    [
        ("See\n\nx", "\n\n", [("text", "See")]), ("\n\nSee", "\n\n", []), ("See: x", ": ", [("text", "See")]),
        ("<think>a b\n\nc</think>See", "\n\n", [("thinking", "a b")]),
        ("<think>a b</think>See", "</think>", [("thinking", "a b")]),
        ('See <tool>{"name": "f", "x": 1}</tool>', ": 1", [("text", 'See <tool>{"name": "f", "x"')]),
    ],
)  # fmt: skip
def test_a_stop_sequence_is_told_wherever_it_is_found(writing, written, stop, told):
    """Blanks around the parts of an answer are left out, but they may end it; so may marks, which no part shows."""
    body = {"messages": [{"role": "user", "content": written}], "max_tokens": 300, "temperature": 0}
    whole = ask(writing, MESSAGES, **body, stop_sequences=["never", stop])[1]
    assert [(block["type"], block[block["type"]]) for block in whole["content"]] == told
    for delta in (whole, events(writing, **body, stop_sequences=["never", stop])[-2][1]["delta"]):
        assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_be_asked_to_end_with_its_first_call(writing, stream):
    text = "".join(f'<tool>{{"name": "{name}", "arguments": {{}}}}</tool> ' for name in "fg") + "and more"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, "temperature": 0}
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for more, names in ((one, ["f"]), ({}, ["f", "g"])):
        if stream:
            *told, (_, last), _ = events(writing, **body, **more)
            blocks, reason = [e["content_block"] for n, e in told if n == "content_block_start"], last["delta"]
        else:
            blocks, reason = (answer := ask(writing, MESSAGES, **body, **more)[1])["content"], answer
        assert [block["name"] for block in blocks if block["type"] == "tool_use"] == names
        assert reason["stop_reason"] == "tool_use"
    body["parallel_tool_calls"] = False
    (choice,) = ask(writing, "/v1/chat/completions", **body)[1]["choices"]
    assert ([call["function"]["name"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]) == (
        ["f"], "tool_calls",
    )  # fmt: skip
    assert choice["message"]["content"] == ""


def test_blocks_become_messages_of_a_chat():
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}, call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "c"}], "is_error": False},
            {"type": "text", "text": "d"},
        ]},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
    ]  # fmt: skip
    asked, wishes = fields.read_request({"messages": given, "max_tokens": 5, "top_k": 3}, MESSAGES, "demo", 99, ())
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "t1"}]
    assert asked.messages == [
        {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "c"}, {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
    ]  # fmt: skip
    assert not asked.continues
    assert wishes.settings == {"max_new_tokens": 5, "top_k": 3, "do_sample": True}


@given(st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=12), st.randoms())
def test_messages_of_one_role_that_follow_each_other_are_one_turn(roles, random):
    """However its blocks are cut into messages. Chat templates that want roles to alternate would refuse them."""
    block = {
        "user": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "t", "content": "b"}],
        "assistant": [{"type": "text", "text": "c"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                      {"type": "thinking", "thinking": "x"}],
        "system": [{"type": "text", "text": "d"}],
    }  # fmt: skip
    turns = [(role, random.choices(block[role], k=4)) for role, _ in groupby([*roles, "assistant", "user"])]
    whole = [{"role": role, "content": blocks} for role, blocks in turns]
    cuts = random.randint(1, 4)
    cut = [{"role": role, "content": part} for role, blocks in turns for part in (blocks[:cuts], blocks[cuts:])]
    wanted, read = (
        fields.read_request({"messages": given, "max_tokens": 5}, MESSAGES, "demo", 99, ())[0] for given in (whole, cut)
    )
    assert read == wanted
    assert all(a["role"] != b["role"] or a["role"] == "tool" for a, b in pairwise(read.messages))


def test_texts_of_an_answer_are_one_text():
    """The server has cut them where a call or reasoning stood between them: they come back as they were written."""
    blocks = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "x"}, {"type": "text", "text": " b"}]
    given = {"messages": [*ASKED["messages"], {"role": "assistant", "content": blocks}], "max_tokens": 5}
    asked, _ = fields.read_request(given, MESSAGES, "demo", 99, ())
    assert (asked.messages[-1]["content"], asked.continues) == ("a b", True)
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": " b"}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        for role, wanted in (("assistant", "a b"), ("user", "a\n b")):
            asked, _ = fields.read_request({field: [{"role": role, "content": parts}]}, path, "demo", 99, ())
            assert asked.messages[-1]["content"] == wanted


def test_a_call_without_its_result_is_not_gone_on_from():
    """The template would end with the text before the call, and the model would not see it."""
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    for content in ([call], [{"type": "text", "text": "a"}, call]):
        given = {"messages": [*ASKED["messages"], {"role": "assistant", "content": content}], "max_tokens": 5}
        with pytest.raises(fields.RefusedError, match="must not end with a tool_use") as caught:
            fields.read_request(given, MESSAGES, "demo", 99, ())
        assert caught.value.param == "messages[1]"
        asked, _ = fields.read_request(given, COUNT, "demo", 99, ())
        assert not asked.continues


@pytest.mark.parametrize(
    ("end", "chat", "message", "response"),
    [
        (End("length", None, 9, 0, 0), "length", ("max_tokens", None), "incomplete"),
        (End("stop", None, 9, 0, 0), "tool_calls", ("tool_use", None), "completed"),
        (End("stop", "x", 9, 0, 0), "tool_calls", ("tool_use", None), "completed"),
    ],
)
def test_why_an_answer_with_a_call_has_ended(end, chat, message, response):
    """Where its length has cut it, perhaps in the middle of a second call, that is told."""
    answers = []
    for form in (chats.Chat, messages.Message, responses.Response):
        one = form(fields.Asked(), "m", [Prompt([1], [])], 1)
        for piece in (Call("f", "{}"), end):
            list(one.add(0, piece))
        answers.append(one.object())
    assert answers[0]["choices"][0]["finish_reason"] == chat
    assert (answers[1]["stop_reason"], answers[1]["stop_sequence"]) == message
    assert answers[2]["status"] == response


@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_developer_is_the_system(path, field):
    given = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    asked, _ = fields.read_request({field: given}, path, "demo", 99, ())
    assert [message["role"] for message in asked.messages] == ["system", "user"]


@pytest.mark.parametrize("more", [{}, {"disable_parallel_tool_use": True}])
def test_a_template_gets_no_tools_where_none_may_be_called(more):
    given = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "tools": [{"name": "f"}]}
    for kind, are_given in (("none", False), ("auto", True)):
        asked, _ = fields.read_request(given | {"tool_choice": {"type": kind} | more}, MESSAGES, "demo", 99, ())
        assert bool(asked.tools) == are_given


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": None}, "messages is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'role must be "user", "assistant" or "system"'),
        ({"messages": [{"role": "user", "content": "word " * 800}]}, "prompt is too long: 1601 tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks must be of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "blocks must be of type text"),
        ({"messages": [{"role": "user", "content": 5}]}, "a text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "messages must hold a text"),
        ({"tool_choice": {"type": "any"}}, "where there are no tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools must be of type custom"),
        ({"stop": "x"}, "give stop_sequences instead"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers must be empty"),
        ({"output_format": {}}, "give output_config.format instead"),
        ({"response_format": {}}, "give output_config.format instead"),
        ({"presence_penalty": 1}, "leave it out, or ask /v1/chat/completions, which takes it"),
        ({"echo": True}, "leave it out, or ask /v1/completions, which takes it"),
        ({"system": 5}, "system must be a text"),
    ],
    ids=str,
)
def test_errors_are_those_of_the_api(address, changed, says):
    status, answer = ask(address, MESSAGES, **ASKED | changed)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in answer["error"]["message"]


def test_another_model_is_not_found(address):
    status, answer = ask(address, MESSAGES, **ASKED | {"model": "other"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert "model must be 'demo'" in answer["error"]["message"]


OTHERS = ("/v1/messagesX", "/v1/chat/completions/x", "/v1/responses/resp_1", "/v1/models/x", "/v1/embeddings", "/v2")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_errors_at_any_path_have_the_form_of_the_api_that_was_asked(address, method):
    def said(path: str) -> tuple[int, dict, str]:
        with contextlib.closing(connect(address)) as connection:
            connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.load(answer), answer.headers.get("Allow", "")

    for path in (f"{MESSAGES}/nope", f"{MESSAGES}/batches", f"{MESSAGES}/batches/1/cancel", f"{COUNT}/x"):
        status, answer, _ = said(path)
        assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
        assert answer["error"]["message"].startswith(f"nothing is served at {path}: requests go to /v1/chat/")
    for path in (MESSAGES, COUNT):
        status, answer, allowed = said(path)
        assert (status, allowed) == ((400, "") if method == "POST" else (405, "POST"))
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert method == "POST" or answer["error"]["message"] == f"{path} takes POST, not {method}"
    for path in OTHERS if method != "OPTIONS" else ():
        status, answer, _ = said(path)
        assert status == (405 if path == "/v1/models/x" and method != "GET" else 404)
        assert answer.keys() == {"error"}
        assert answer["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/messages", "/v1/messages/count_tokens/", "/v1/completions//", "/v1/nope/"]
)
def test_slashes_around_a_path_mean_nothing(address, path):
    """Clients join addresses so. A redirection would lose the request of a client that does not follow it."""
    body = {"messages": ASKED["messages"], "prompt": "x", "max_tokens": 2}
    given = {name: body[name] for name in (("prompt",) if "/completions//" in path else ("messages",))}
    more = {} if "count" in path else {"max_tokens": 2}
    assert ask(address, path, **given, **more)[0] == (404 if "nope" in path else 200)


def test_what_is_got_may_end_with_a_slash(address):
    for path in ("/v1/models/", "/v1/models/demo/", "/health/", "/metrics/"):
        assert get(address, path)[0] == 200
    (model,) = json.loads(get(address, "/v1/models/")[2])["data"]
    assert (model["id"], model["lifecycle"], model["max_input_tokens"]) == ("demo", "active", 1023)


def test_each_request_has_one_line_and_is_counted_once(plain, tokenizer, monkeypatch, caplog):
    """Wherever it ends: before its path is looked at, on its way, or as it should. Probes that succeed have no line,
    and requests that do not arrive, of which crowds may come.
    """
    served, key = make_app(plain, tokenizer, "x", api_key=KEY), {"x-api-key": KEY}
    completion, asked = "/v1/completions", {"prompt": "x", "max_tokens": 1}

    async def goes() -> None:
        scope = {"type": "http", "method": "POST", "path": completion, "headers": [(b"x-api-key", KEY.encode())]}

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        await served(scope, receive, lambda message: None)

    with caplog.at_level("INFO", "lookahead.serve"), TestClient(served) as client:
        for method, path, more, status, line, counted in (
            ("POST", completion, {"json": asked}, 401, f"POST {completion} 401", completion),
            ("POST", completion, {"json": asked, "headers": key}, 200, f"{completion} 200", completion),
            ("POST", completion, {"json": {}, "headers": key}, 400, f"{completion} 400", completion),
            ("POST", completion, {"content": b"x" * 2**21, "headers": key}, 413, f"{completion} 413", completion),
            ("GET", completion, {"headers": key}, 405, f"GET {completion} 405", completion),
            ("GET", "/v1/models", {"headers": key}, 200, "GET /v1/models 200", "/v1/models"),
            ("GET", "/v1/models/y", {"headers": key}, 404, "GET /v1/models/y 404", "other"),
            ("GET", "/v1/%0a200", {"headers": key}, 404, "GET /v1/%0A200 404", "other"),
            ("GET", "/", {}, 200, "GET / 200", "/"),
            ("GET", "/metrics", {}, 401, "GET /metrics 401", "/metrics"),
            ("GET", "/health", {}, 200, None, "/health"),
            ("POST", "/health", {}, 405, "POST /health 405", "/health"),
            (None, completion, {}, "cancelled", None, completion),
            ("POST", completion, {"json": asked, "headers": key}, 429, f"{completion} 429", completion),
        ):
            if status == 429:
                monkeypatch.setattr(app, "MOST_OPEN", 0)
            sample = f'lookahead_requests_total{{path="{counted}",status="{status}"}}'
            before = client.get("/metrics", headers=key).text
            caplog.clear()
            if method is None:
                asyncio.run(goes())
            else:
                assert client.request(method, path, **more).status_code == status
            own = [message.partition(",")[0] for message in caplog.messages if "httpx" not in message]
            assert [one for one in own if one.startswith(("/", "GET", "POST"))] == ([line] if line else [])
            counts = (
                dict(re.findall(r"^(\S+) (\d+)$", text, re.M))
                for text in (before, client.get("/metrics", headers=key).text)
            )
            old, new = (int(found.get(sample, 0)) for found in counts)
            assert new - old == 1, (method, path, status)


@pytest.mark.parametrize("where", ["serve", "_answer"])
@pytest.mark.parametrize("path", [MESSAGES, COUNT, "/v1/completions"])
def test_a_defect_of_the_server_is_told_in_the_form_of_the_api(plain, tokenizer, monkeypatch, path, where):
    """And counted as one, not as a client that has gone."""

    async def fails(*given):
        raise LookupError("a defect")

    monkeypatch.setattr(app.Exchange, where, fails)
    with TestClient(make_app(plain, tokenizer, "x"), raise_server_exceptions=False) as client:
        answer = client.post(path, json={})
        counted = f'lookahead_requests_total{{path="{path}",status="500"}} 1'
        assert counted in client.get("/metrics").text
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "LookupError: a defect"
    assert answer.json().get("type") == (None if path == "/v1/completions" else "error")


def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_api(address):
    status, answer = ask(address, MESSAGES, **ASKED, system="x" * 5000)
    assert (status, answer["error"]["type"]) == (413, "request_too_large")
    assert "must have 5000 bytes at most" in answer["error"]["message"]


# -- several answers, probabilities, penalties ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_prompts_and_several_answers(client, tokenizer, expected, stream):
    texts = ["def main():\n", "import os\n"]
    for prompt in (texts, [tokenizer(text).input_ids for text in texts]):
        options = {"prompt": prompt, "n": 2, "seed": 3, "temperature": 1, "max_tokens": LENGTH, "echo": True}
        answer = client.completions.create(model="demo", **options, stream=stream)
        found = dict.fromkeys(range(4), "")
        for chunk in answer if stream else [answer]:
            usage = chunk.usage
            for choice in chunk.choices:
                found[choice.index] += choice.text
        assert [found[i] for i in range(4)] == [text + expected(text, seed) for text in texts for seed in (3, 4)]
        assert LENGTH < usage.completion_tokens <= 4 * LENGTH
        assert usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in texts)


def test_one_list_of_tokens_is_one_prompt(client, tokenizer, expected):
    ids = tokenizer("import os\n").input_ids
    answer = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=LENGTH)
    assert [choice.text for choice in answer.choices] == [expected("import os\n")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_probabilities_are_those_of_the_model(client, plain, tokenizer, stream, temperature):
    """Before temperature, and also where a step has written several tokens."""
    prompt = "def read_lines(path):\n" * 3
    options = {"temperature": temperature, "seed": 4, "max_tokens": 30, "stream": stream}
    answer = client.completions.create(model="demo", prompt=prompt, logprobs=3, **options)
    parts = [chunk.choices[0] for chunk in (answer if stream else [answer]) if chunk.choices]
    names, logprobs, top_k = [], [], []
    for part in parts:
        if part.logprobs is not None:
            names += part.logprobs.tokens
            logprobs += part.logprobs.token_logprobs
            top_k += part.logprobs.top_logprobs
    text = "".join(part.text for part in parts)
    assert "".join(names) == text
    ids = tokenizer(prompt).input_ids
    written = tokenizer(text, add_special_tokens=False).input_ids
    if len(written) == len(names):  # the same tokens, not only the same text
        with torch.no_grad():
            rows = plain(torch.tensor([ids + written])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        for row, token, logprob, best in zip(rows, written, logprobs, top_k, strict=True):
            assert math.isclose(row[token], logprob, abs_tol=1e-4)
            assert max(best.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert 1 <= len(best) <= 4  # the written one is named, too
            assert math.isclose(best[tokenizer.decode([token])], logprob, abs_tol=1e-4)
    messages = [{"role": "user", "content": "def main():"}]
    chat = client.chat.completions.create(model="demo", messages=messages, logprobs=True, top_logprobs=2, **options)
    choices = [chunk.choices[0] for chunk in (chat if stream else [chat]) if chunk.choices]
    told = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    said = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    assert "".join(one.token for one in told) == said
    assert all(len(one.top_logprobs) == 2 and bytes(one.bytes).decode() == one.token for one in told)


def test_penalties(client, tokenizer, plain):
    """A large frequency penalty lets no token come often; the text is that of the penalised model."""
    ids = tokenizer("x = 1\n").input_ids
    for presence, frequency in ((2, 0), (0, 2), (-2, 1.5)):
        text = client.completions.create(
            model="demo", prompt=ids, temperature=0, max_tokens=40, presence_penalty=presence,
            frequency_penalty=frequency,
        ).choices[0].text  # fmt: skip
        written = list(ids)
        with torch.no_grad():
            for _ in range(40):
                logits = plain(torch.tensor([written])).logits[0, -1]
                counts = torch.bincount(torch.tensor(written[len(ids) :], dtype=torch.long), minlength=len(logits))
                written.append(int((logits - presence * (counts > 0) - frequency * counts).argmax()))
                if written[-1] == tokenizer.eos_token_id:
                    break
        assert text == tokenizer.decode(written[len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("path", ["chat", "text"])
def test_usage_apart_and_always(client, path):
    create = client.chat.completions.create if path == "chat" else client.completions.create
    prompt = {"messages": ASKED["messages"]} if path == "chat" else {"prompt": "def main():"}
    options = {"model": "demo", "max_tokens": LENGTH, "temperature": 0, "stream": True} | prompt
    apart = list(create(**options, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in apart] == [False] * (len(apart) - 1) + [True]
    assert all("usage" in chunk.model_fields_set for chunk in apart)  # null in all but the last, as OpenAI says
    assert apart[-1].choices == []
    always = list(create(**options, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in always]
    assert counts == sorted(counts)
    assert counts[-1] == apart[-1].usage.completion_tokens


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["x"] * 65}, "list of up to 64"),
        ({"prompt": [4096]}, "with tokens below 4096"),
        ({"prompt": ["x", 5]}, "with tokens below 4096"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ["x"] * 30, "n": 16}, "64 answers at most"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo must be false"),
        ({"prompt": "x", "logprobs": 21}, "from 0 to 20"),
        ({"prompt": "x", "best_of": 2}, "best_of must be 1"),
    ],
)
def test_what_completions_refuse(address, body, says):
    status, answer = ask(address, "/v1/completions", **body)
    assert status == 400
    assert says in answer["error"]["message"]


# -- names, keys, other origins, the page -----------------------------------------------------------------------------


def get(address: str, path: str, **headers: str) -> tuple[int, dict, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", headers=headers), timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_a_name_of_its_own(address, client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("demo").id == "demo"
    assert model.context_length == 1024
    with pytest.raises(openai.NotFoundError, match="the only model is 'demo'"):
        client.models.retrieve("other")


def test_pages_of_other_origins(address):
    for origin, allowed in (("http://here", "http://here"), ("http://there", None)):
        headers = {name.lower(): value for name, value in get(address, "/v1/models", Origin=origin)[1].items()}
        assert headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(("kind", "status"), [("text/plain", 400), ("application/json; charset=utf-8", 200)])
def test_only_json_is_read(address, kind, status):
    """A page of another origin can send other types without asking."""
    with contextlib.closing(connect(address)) as connection:
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}), {"Content-Type": kind}
        )
        answer = connection.getresponse()
        assert answer.status == status
        assert ("whose Content-Type is application/json" in answer.read().decode()) == (status == 400)


def test_a_body_that_is_packed_is_refused_by_name(address):
    body = gzip.compress(json.dumps({"prompt": "x", "max_tokens": 1}).encode())
    with contextlib.closing(connect(address)) as connection:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == 415
        assert "without Content-Encoding" in json.load(answer)["error"]["message"]


def test_an_empty_key_is_refused(tokenizer):
    """Every request would give it."""
    with pytest.raises(ValueError, match="empty"):
        make_app(None, tokenizer, "x", api_key="")
    said = CliRunner().invoke(main, ["serve", "--api-key", ""])
    assert said.exit_code == 2
    assert "--api-key" in said.output


def test_a_key():
    with running(*SERVE, "--api-key", KEY) as address:
        for path in ("/v1/models", "/metrics"):
            for headers, status in (
                ({}, 401), ({"Authorization": "Bearer no"}, 401), ({"x-api-key": "é".encode().decode("latin-1")}, 401),
                ({"Authorization": f"Bearer {KEY}"}, 200), ({"x-api-key": KEY}, 200),
                ({"Authorization": f"bearer {KEY}"}, 200), ({"Authorization": KEY}, 401),
                ({"x-api-key": "of another", "Authorization": f"Bearer {KEY}"}, 200),
                ({"x-api-key": KEY, "Authorization": "Bearer of another"}, 200),
            ):  # fmt: skip
                assert get(address, path, **headers)[0] == status
        assert [get(address, path)[0] for path in ("/", "/health")] == [200, 200]
        status, answer = ask(address, MESSAGES, **ASKED)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert ask(address, f"{MESSAGES}/nope")[1]["error"]["type"] == "authentication_error"
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            assert client.completions.create(model="demo_model", prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_the_page_needs_nothing_from_elsewhere(address):
    status, headers, page = get(address, "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    text = page.decode()
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    assert "/v1/chat/completions" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node is installed")
def test_a_new_chat_begins_empty():
    """Also in the middle of an answer. What was not answered is in no later conversation."""
    page = Path(app.__file__).with_name("page.html")
    command = ["node", str(Path(__file__).with_name("use_page.js")), str(page)]
    said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60, text=True).stdout)
    assert said["shown"] == 0
    two = [("user", "two"), ("assistant", "whole")]
    assert [[(one["role"], one["content"]) for one in chat] for chat in said["sent"]] == [
        [("user", "one")], two[:1], [*two, ("user", "three")], [*two, ("user", "four")],
    ]  # fmt: skip


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
USED = f"""if True:
    import uvicorn
    from starlette.responses import HTMLResponse
    from starlette.routing import Route
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import lookahead
    from lookahead.tools.server import make_app

    USE = '''<script>
    const problems = [];
    addEventListener("error", (event) => problems.push(event.message));
    addEventListener("load", async () => {{
      const until = async (holds) => {{ while (!holds()) await new Promise((go) => setTimeout(go, 20)); }};
      for (const said of ["import os\\\\n\\\\n\\\\nclass Reader:", "<b>x</b>"]) {{
        document.getElementById("said").value = said;
        document.getElementById("form").requestSubmit();
        const count = document.querySelectorAll(".about").length;
        await until(() => document.querySelectorAll(".about, .failed").length > count);
      }}
      await fetch("/seen", {{ method: "POST", body: JSON.stringify({{
        problems, model: document.getElementById("model").textContent,
        texts: [...document.querySelectorAll(".turn:not(.about)")].map((turn) => turn.textContent),
        runs: [...document.querySelectorAll(".answer span[class^=run]")].map((run) => run.title),
        about: document.querySelector(".about").textContent, bold: document.querySelectorAll("b").length,
      }}) }});
    }});
    </script>'''
    model = lookahead.wrap(AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval(),
                           lookahead.LookaheadConfig(budget=8))
    model.generation_config.update(do_sample=False)
    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = "{{% for m in messages %}}{{{{ m.content }}}}\\n{{% endfor %}}"
    app = make_app(model, tokenizer, "used")
    page = next(route for route in app.routes if route.path == "/").endpoint

    async def used(request):
        return HTMLResponse((await page(request)).body.decode() + USE)

    async def see(request):
        found.append(await request.body())
        return HTMLResponse(b"".join(found))

    found = []
    app.router.routes[:0] = [Route("/used", used), Route("/seen", see, methods=["GET", "POST"])]
    uvicorn.run(app, port=0)
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path):
    """A chat of two turns: the texts are shown as they are, and the tokens of a pass as one run."""
    with running("-c", USED) as address:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   f"--user-data-dir={tmp_path / 'profile'}", "--window-size=375,800", "--remote-debugging-port=0",
                   f"{address}/used"]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                end = time.monotonic() + 120
                while not (told := get(address, "/seen")[2]):
                    assert time.monotonic() < end
                    time.sleep(0.2)
            finally:
                browser.terminate()
        seen = json.loads(told)
        messages = [{"role": "user", "content": seen["texts"][0]}]
        status, answer = ask(address, "/v1/chat/completions", messages=messages)
    assert (seen["problems"], seen["model"], seen["bold"]) == ([], "used", 0)
    assert [seen["texts"][0], seen["texts"][2]] == ["import os\n\n\nclass Reader:", "<b>x</b>"]
    assert status == 200
    assert seen["texts"][1] == answer["choices"][0]["message"]["content"]
    assert re.match(r"\d+ tokens read, 0 of them cached; first text after [\d.]+ s", seen["about"])
    assert any(re.fullmatch(r"[2-9] tokens of one pass", title) for title in seen["runs"])
