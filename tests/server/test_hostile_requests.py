"""No request stops the server: what cannot be done is refused by name, and what is long holds up nobody.

Nearly all of it goes by HTTP, so it holds for any server of these endpoints.
"""

import contextlib
import http.client
import json
import math
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import click
import fuzz_server
import openai
import pytest
import torch
from fuzz_server import CHAT, COMPLETION, RESPONSE, SCHEMAS, TOOL
from hypothesis import given, settings
from hypothesis import strategies as st
from server_process import ENVIRONMENT, FIXED, ROOT, SERVE, ask, connect, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead import DEMO_MODEL
from lookahead.tools.listening import listen
from lookahead.tools.server.fields import RefusedError, read_request

LENGTH = 16
# It knows tools, a variable, and takes long if it is told to.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ header or '' }}"
    "{% if slow %}{% for i in range(1500) %}{% for j in range(20000) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{{ '\\n' }}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "def main():"}]
PROMPTS = {CHAT: {"messages": MESSAGES}, COMPLETION: {"prompt": "x = 1"}, RESPONSE: {"input": "x = 1"}}
MOST = {CHAT: "max_tokens", COMPLETION: "max_tokens", RESPONSE: "max_output_tokens"}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def address(template):
    with running(*SERVE, "--chat-template", template) as address:
        yield address


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def expected(tokenizer):
    """What ``model.generate`` writes after a prompt, with these settings."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()

    @cache
    def text(prompt: str, seed: int = 0, most: int = LENGTH, **options) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(seed)
        ids = model.generate(**inputs, max_new_tokens=most, **options)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(ids, skip_special_tokens=True)

    return text


def texts(address: str, path: str, **body) -> list[tuple[str, str | None]]:
    """Return the text and the finish reason of an answer that comes whole, and of one that is streamed."""
    status, answer = ask(address, path, **body)
    assert status == 200, answer
    if path == RESPONSE:
        whole = answer["output"][0]["content"][0]["text"], None
    else:
        choice = answer["choices"][0]
        whole = choice["message"].get("content", "") if path == CHAT else choice["text"], choice["finish_reason"]
    with contextlib.closing(connect(address)) as connection:
        connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().split("\n")  # some events have a name in a line before
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == RESPONSE:
        return [whole, ("".join(e["delta"] for e in events if e["type"] == "response.output_text.delta"), None)]
    choices = [event["choices"][0] for event in events]
    pieces = [one["delta"].get("content", "") if path == CHAT else one["text"] for one in choices]
    return [whole, ("".join(pieces), choices[-1]["finish_reason"])]


def refused(address: str, path: str, **body) -> dict:
    status, answer = ask(address, path, **body)
    assert status == 400, (status, answer, body)
    return answer["error"]


def refusal(address: str, path: str, **body) -> str:
    return refused(address, path, **body)["message"]


# -- every field ------------------------------------------------------------------------------------------------------


def test_a_fuzz(address):
    """LOOKAHEAD_CASES=20000 sends all requests."""
    seed = secrets.randbelow(2**32)
    count = min(int(ENVIRONMENT.get("LOOKAHEAD_CASES", 500)), len(list(fuzz_server.cases())))
    try:
        statuses = fuzz_server.fuzz(address, fuzz_server.choose(count, seed))
    except AssertionError as error:
        pytest.fail(f"seed {seed}: {error}")
    assert {200, 400} <= statuses.keys()


def test_the_fuzz_finds_a_server_that_fails():
    """Its own check: a status of 500, an error in a stream, another text than before, no answer."""
    broken = """if True:
        import http.server, itertools, json
        class Handler(http.server.BaseHTTPRequestHandler):
            answers = itertools.count()
            def log_message(self, *_): pass
            def do_POST(self):
                body = self.rfile.read(int(self.headers['Content-Length'])).decode()
                text = str(next(self.answers) if FAULT == 'text' else 0)
                bad = 'max_tokens": 12' not in body
                if bad and FAULT == 'silence':
                    return
                self.send_response(500 if bad and FAULT == 'status' else 200)
                self.end_headers()
                error = 'data: {"error": 1}' if bad and FAULT == 'stream' else ''
                self.wfile.write((json.dumps({'choices': [{'text': text}]}) + error).encode())
        server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
        import sys; print(f'running on http://127.0.0.1:{server.server_port}', file=sys.stderr, flush=True)
        server.serve_forever()
    """
    case = fuzz_server.Case("bad", COMPLETION, b"{}")
    for fault, says in (
        ("status", "status 500"),
        ("stream", "error"),
        ("silence", "RemoteDisconnected"),
        ("text", "another text"),
    ):
        with (
            running("-c", broken.replace("FAULT", repr(fault)), stop=signal.SIGKILL) as address,
            pytest.raises(AssertionError, match=says),
        ):
            fuzz_server.fuzz(address, [case])


HONOURED = {
    "model", "messages", "prompt", "input", "instructions", "stream", "temperature", "top_p", "seed", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "frequency_penalty", "presence_penalty", "logit_bias", "stop",
    "tools", "n", "parallel_tool_calls", "logprobs", "top_logprobs", "echo",
}  # fmt: skip


@pytest.mark.parametrize("path", SCHEMAS)
def test_a_field_is_honoured_refused_by_name_or_documented(address, path):
    """Every field of OpenAI's schemas is supported, documented as ignored, or refused."""
    page = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    passed_over = set(re.findall(r"`(\w+)`", re.search(r"Ignored,[^:]*: ([^.]*)\.", page)[1]))
    assert passed_over >= {"user", "metadata", "store"}
    for name in sorted(SCHEMAS[path].__required_keys__ | SCHEMAS[path].__optional_keys__):
        body = PROMPTS[path] | {MOST[path]: 2}
        if name in passed_over:
            assert ask(address, path, **body, **{name: {"x": 1}})[0] == 200
        else:
            for value in ({"x": True}, *(() if name in HONOURED else ("x", ["x"], 7))):
                error = refused(address, path, **body | {name: value})
                assert name in error["message"]
                assert error["param"] == name
        if name not in PROMPTS[path]:
            assert ask(address, path, **body | {name: None})[0] == 200 or name == MOST[path]


@pytest.mark.parametrize(
    ("path", "field", "value", "says"),
    [
        (CHAT, "temperature", 1e-300, "0 decodes greedily and any other is from 0.0001"),
        (CHAT, "temperature", 10**400, "temperature must be"),
        (CHAT, "typical_p", 5, 'typical_p is not served: give it in generation_config, such as {"generation_config"'),
        (CHAT, "max_output_tokens", 5, "give max_tokens instead"),
        (RESPONSE, "max_tokens", 5, "give max_output_tokens instead"),
        (RESPONSE, "previous_response_id", "resp_1", "send the whole conversation as input"),
        (
            CHAT,
            "messages",
            [{"role": "user", "content": "a\ud800"}],
            r"half of a surrogate pair, '\\ud800', at place 1",
        ),
        (COMPLETION, "prompt", "\udc00", "half of a surrogate pair"),
        (COMPLETION, "\ud800", 1, r"\\ud800 is not served"),
        (CHAT, "messages", MESSAGES * 5000, "of 4096 at most"),
        (CHAT, "messages", [{"role": "user", "content": "x", "audio": {"id": "1"}}], "must not have audio"),
        (CHAT, "tool_choice", "required", "where there are no tools"),
        (CHAT, "tools", [{"type": "web_search"}], "tools must be of type function"),
        (CHAT, "functions", [{"name": "f"}], "give tools instead"),
        (CHAT, "modalities", ["text", "audio"], r'modalities must be \["text"\]'),
        (CHAT, "stop", ["x"] * 17, "16 at most"),
        (CHAT, "stop", "x" * 257, "of 256 characters at most"),
        (CHAT, "logit_bias", {"4096": 1}, "ids below 4096"),
        (COMPLETION, "suffix", "x", "nothing is inserted"),
        (
            RESPONSE,
            "input",
            [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
            "begin with a",
        ),
        (RESPONSE, "input", [{"type": "input_image", "image_url": "x"}], "one item is"),
        (RESPONSE, "temperature", -1, "temperature must be"),
        (RESPONSE, "temperature", float("nan"), "temperature must be"),
    ],
)
def test_words_that_help(address, path, field, value, says):
    assert re.search(says, refusal(address, path, **PROMPTS[path] | {field: value}))


def test_a_thread_is_refused_as_anthropics_client_knows_it(address):
    """Its runner of tools asks for one, and by these details goes on without."""
    body = {"messages": MESSAGES, "max_tokens": 2}
    error = refused(address, "/v1/messages", **body, thread={"type": "create"})
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in refused(address, "/v1/messages", **body, nonsense=1)


def test_a_missing_prompt_is_named(address):
    for path, prompt in PROMPTS.items():
        for body in ({}, dict.fromkeys(prompt)):
            error, name = refused(address, path, **body), next(iter(prompt))
            assert error["message"].startswith(f"{name} is missing: it must be")
            assert error["param"] == name


FUNCTION = {"type": "function", "function": TOOL}


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        (CHAT, {"n": 0}, "n"),
        (COMPLETION, {"prompt": ["x"] * 30, "n": 16}, "n"),
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1]"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        (COMPLETION, {"prompt": "word " * 2000}, "prompt"),
        (COMPLETION, {"prompt": [4096]}, "prompt"),
        (RESPONSE, {"input": "word " * 2000}, "input"),
        (RESPONSE, {"input": [{"role": "user", "content": "x"}, {"type": "input_image"}]}, "input[1]"),
        (CHAT, {"tools": [FUNCTION, {"type": "web_search"}]}, "tools[1]"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "required"}, "tool_choice"),  # it writes calls in no known form
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
         "response_format"),
        (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
        (RESPONSE, {"text": {"format": {"type": "xml"}}}, "text"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (COMPLETION, {"echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"generation_config": {"top_k": -1}}, "generation_config"),
        (CHAT, {"generation_config": "["}, "generation_config"),
        (CHAT, {"temperature": 0, "generation_config": {"do_sample": True}}, "temperature"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (RESPONSE, {"tools": [{"type": "function", "name": "f", "parameters": {"x": math.nan}}]}, "tools"),
        (RESPONSE, {"text": {"format": {"type": "json_object"}, "x": [1e999]}}, "text"),
        (CHAT, {"nope\ud800": 1}, "nope\\ud800"),
        (CHAT, {"x" * 100: 1}, "x" * 80),
    ],
    ids=str,
)  # fmt: skip
def test_the_field_at_fault_is_named(address, path, changed, param):
    error = refused(address, path, **PROMPTS[path] | changed)
    assert error["param"] == param
    is_long = "word " * 2000 in str(changed)
    assert error["code"] == ("context_length_exceeded" if is_long else None)  # then agents shorten what they send


def test_a_message_that_a_client_has_got_can_be_sent_back(address):
    """With the fields that are null or empty in it, which mean the same as fields left out."""
    sent = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for empty in (sent, {"tool_calls": []}):
        messages = [*MESSAGES, {"role": "assistant", "content": "pass"} | empty, *MESSAGES]
        counts = [
            ask(address, CHAT, messages=each, max_tokens=1)[1]["usage"]["prompt_tokens"]
            for each in (messages, [*MESSAGES, {"role": "assistant", "content": "pass"}, *MESSAGES])
        ]
        assert counts[0] == counts[1]


# -- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tools", "documents", "tokenize", "truncation", "max_length", "padding", "return_tensors",
     "return_dict", "add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "conversation", "messages",
     "return_assistant_tokens_mask", "self", "load_audio_from_video", "not a name"],
)  # fmt: skip
@pytest.mark.parametrize("value", [1, True, "{{ 'x' * 300000000 }}"])
def test_a_template_gets_variables_and_no_arguments(address, name, value):
    assert f"so not {name}:" in refusal(address, CHAT, messages=MESSAGES, chat_template_kwargs={name: value})


@pytest.mark.parametrize("value", ["x" * 1001, 1_000_001, float("inf"), {"a": 1}, [[1]], [1] * 65, [{}]], ids=repr)
def test_a_templates_variables_are_plain(address, value):
    says = refusal(address, CHAT, messages=MESSAGES, chat_template_kwargs={"header": value})
    of_all = "chat_template_kwargs must be free of NaN and infinite numbers; it has header = inf"
    plain = "header in chat_template_kwargs must be true, false, null, a number"
    assert says.startswith(of_all if value == float("inf") else plain)


def test_a_templates_variables_are_honoured(address, expected):
    options = {"messages": MESSAGES, "max_tokens": LENGTH, "temperature": 0}
    for text, _ in texts(address, CHAT, **options, chat_template_kwargs={"header": "import os\n", "unknown": None}):
        assert text == expected("import os\ndef main():\n", do_sample=False)


def test_tools_that_the_template_knows(address):
    """They are in the prompt, unless tool_choice says that none must be called."""
    flat, nested = {"type": "function"} | TOOL, {"type": "function", "function": TOOL}

    def count(path: str, **more) -> int:
        usage = ask(address, path, **PROMPTS[path], **{MOST[path]: 1}, **more)[1]["usage"]
        return usage["prompt_tokens" if path == CHAT else "input_tokens"]

    assert count(CHAT, tools=[nested]) - count(CHAT) == count(RESPONSE, tools=[flat]) - count(RESPONSE) > 20
    assert count(CHAT, tools=[nested], tool_choice="none") == count(CHAT, tools=[]) == count(CHAT)


def test_instructions_and_input_make_one_conversation(address, expected):
    prompt = "import os\nimport re\nx = 1\n\ny = 2\nz = 3\n"  # a call has no text in this template
    items = [
        {"role": "system", "content": "import re"},
        {"role": "user", "content": [{"type": "input_text", "text": "x = 1"}]},
        {"type": "reasoning", "id": "1", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "y = 2"},
        {"type": "message", "role": "user", "content": "z = 3"},
    ]
    for text, _ in texts(
        address, RESPONSE, input=items, instructions="import os", max_output_tokens=LENGTH, temperature=0
    ):
        assert text == expected(prompt, do_sample=False)


@pytest.mark.parametrize(("most", "status"), [(8, "incomplete"), (9, "completed"), (10, "completed")])
def test_openais_client_gets_a_response(address, expected, most, status):
    """Whole where it does not ask for a stream. It says whether its length has cut it."""
    prompt = "if __name__ == '__main__':\n    main()\n"
    wanted = expected(f"{prompt}\n", most=8, do_sample=False)
    assert expected(f"{prompt}\n", most=20, do_sample=False) == wanted, "the ninth token ends the text"
    options = {"model": "demo_model", "input": prompt, "max_output_tokens": most, "temperature": 0}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**options)
        events = list(client.responses.create(**options, stream=True))
        with client.responses.stream(**options) as stream:
            *_, last = stream
    assert events[-1].type == last.type == f"response.{status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (item,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert item.status == status
    reason = "max_output_tokens" if status == "incomplete" else None
    for response in (whole, events[-1].response, last.response):
        assert response.output_text == wanted
        assert response.status == response.output[0].status == status
        assert (response.incomplete_details and response.incomplete_details.reason) == reason


# -- settings ---------------------------------------------------------------------------------------------------------

GENERATION = st.fixed_dictionaries(
    {},
    optional={
        "do_sample": st.just(True),
        "temperature": st.floats(0.5, 2),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.2, 1),
        "min_p": st.sampled_from([0, 0.05, 0.2]),
        "typical_p": st.floats(0.5, 1),
        "epsilon_cutoff": st.sampled_from([0, 1e-3]),
        "eta_cutoff": st.sampled_from([0, 1e-3]),
        "repetition_penalty": st.sampled_from([1, 1.1, 2]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "max_new_tokens": st.integers(1, LENGTH),
        "min_new_tokens": st.integers(0, LENGTH),
    },
)


@settings(max_examples=20, deadline=None)
@given(GENERATION, st.integers(0, 99), st.booleans(), st.booleans())
def test_settings_are_those_of_generate(address, expected, given, seed, is_text, first):
    """What only sampling reads implies sampling, as on the command line."""
    config = json.dumps(given) if is_text else given
    options = {
        name: float(value) if name in ("min_p", "repetition_penalty") else value for name, value in given.items()
    }
    sampling = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    most = options.pop("max_new_tokens", LENGTH)
    wanted = expected("import os\n", seed, most, **{"do_sample": bool(given.keys() & sampling)} | options)
    body = {"prompt": "import os\n", "seed": seed, "generation_config": config}
    if "max_new_tokens" not in given:
        body["max_tokens"] = LENGTH
    for text, _ in texts(address, COMPLETION, **body):
        assert text == wanted


@pytest.mark.parametrize(
    "given",
    [{"num_beams": 3}, {"num_return_sequences": 500, "do_sample": True}, {"use_cache": False}, {"max_length": 2},
     {"cache_implementation": "static"}, {"stop_strings": "x"}, {"eos_token_id": 5}, {"max_time": 0.1}, {"seed": 1},
     {"prompt_lookup_num_tokens": 3}, {"output_scores": True}, {"return_dict_in_generate": True}, {"nope": 1},
     {"top_k": -1}, {"top_k": 1.5}, {"top_k": "5"}, {"temperature": float("nan")}, {"temperature": 1e-300},
     {"top_p": float("inf")}, {"min_p": 2}, {"repetition_penalty": 0}, {"repetition_penalty": 1e-300},
     {"do_sample": "yes"}, {"max_new_tokens": 0}, {"no_repeat_ngram_size": 10**400},
     {"temperature": 0, "do_sample": True}],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("path", SCHEMAS)
def test_settings_that_are_refused(address, path, given):
    for config in (given, json.dumps(given)):
        assert next(iter(given)) in refusal(address, path, **PROMPTS[path], generation_config=config)


@pytest.mark.parametrize("depths", [range(1, 5), range(50, 150), range(850, 1000)], ids=str)
@pytest.mark.parametrize("way", ["generation_config", "tools", "tool_calls", "messages", "stop", "metadata", "user"])
def test_whatever_depth_values_have_nothing_but_a_refusal_is_raised(way, depths):
    """Python's parser goes deeper than what writes JSON, and a stack is used up in either."""
    for depth in depths:
        text = "[" * depth + "]" * depth
        call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": text}}
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
        body = {"messages": messages if way == "tool_calls" else MESSAGES}
        try:
            body |= {} if way == "tool_calls" else {way: text if way == "generation_config" else json.loads(text)}
        except RecursionError:
            continue
        with contextlib.suppress(RefusedError):  # what is shallow is right in some fields
            read_request(body, CHAT, "demo", 4096, ())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_json_is_refused_even_in_a_field_that_is_passed_over(address, number):
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "metadata": {{"a": [{number}]}}}}'
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert "metadata must be free of NaN and infinite numbers" in json.loads(answer.read())["error"]["message"]


@pytest.mark.parametrize("config", ["nonsense", "[1]", "5", "[" * 100_000, 5, [1], True])
def test_settings_that_are_no_object(address, config):
    assert "generation_config must be an object" in refusal(address, CHAT, messages=MESSAGES, generation_config=config)


# -- ends -------------------------------------------------------------------------------------------------------------


def written(address: str, path: str, ids: list[int], most: int) -> list[tuple[str, str]]:
    """Return `texts` of an answer that is these tokens: each is likelier than the next one, and comes once."""
    return texts(
        address, path, **PROMPTS[path], max_tokens=most, temperature=0, generation_config={"no_repeat_ngram_size": 1},
        logit_bias={str(token): 100 - 15 * place for place, token in enumerate(ids)},
    )  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_end_token_as_the_last_one_allowed(address, tokenizer, path):
    ids = [*tokenizer("a", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    for most, wanted in ((1, ("a", "length")), (2, ("a", "stop")), (3, ("a", "stop"))):
        assert written(address, path, ids, most) == [wanted, wanted]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("text", ["a😀", "éb한"])
def test_an_answer_has_no_half_character_at_its_end(address, tokenizer, path, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(set(ids)) > len(text)
    for most in range(1, len(ids) + 1):
        wanted = tokenizer.decode(ids[:most]).rstrip("\N{REPLACEMENT CHARACTER}"), "length"
        assert written(address, path, ids, most) == [wanted, wanted]


# -- what is long -----------------------------------------------------------------------------------------------------


def answered_meanwhile(address: str, path: str, **body) -> tuple[int, str]:
    """Send a request, and others as long as it is served. Return how many were answered, and the error of the first."""
    with ThreadPoolExecutor(1) as threads, contextlib.closing(connect(address)) as other:
        long, count = threads.submit(refusal, address, path, **body), 0
        while not long.done():
            other.request("GET", "/health")
            other.getresponse().read()
            count += not long.done()
        return count, long.result()


def test_a_long_prompt_holds_up_nobody(address):
    """It is refused before it is decoded. An event loop that reads it answers nobody else."""
    for path, body in (
        (COMPLETION, {"prompt": "é " * 120_000}),
        (CHAT, {"messages": [{"role": "user", "content": "é " * 120_000}]}),
        (RESPONSE, {"input": "é " * 120_000}),
    ):
        began = time.monotonic()
        count, says = answered_meanwhile(address, path, **body)
        assert says.startswith("prompt is too long: 1024 or more tokens > 1023 maximum")
        assert count > 3 or time.monotonic() - began < 1  # a loop that is held up answers one at most


def test_a_slow_template_holds_up_nobody(address):
    body = {"messages": [{"role": "user", "content": "word " * 2000}], "chat_template_kwargs": {"slow": True}}
    count, says = answered_meanwhile(address, CHAT, **body)
    assert says.startswith("prompt is too long: ")
    assert count > 3  # a loop that is held up answers one at most


@pytest.mark.parametrize("path", SCHEMAS)
@pytest.mark.parametrize("way", ["length", "chunks"])
def test_a_large_body_is_refused_before_it_is_read(address, path, way):
    """The answer comes though the body does not end."""
    with contextlib.closing(connect(address)) as connection:
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/json")
        if way == "length":
            connection.putheader("Content-Length", str(50 << 20))
            connection.endheaders(b'{"prompt": "')
        else:
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            for _ in range(17):
                connection.send(b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16)))
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.load(answer)["error"]["message"] == (
            "the body of a request must have 1048576 bytes at most; this one is larger"
        )


def test_the_whole_of_a_large_body_may_be_sent(address):
    """The answer comes then, too: a client that sends all before it reads is told why it is refused."""
    with contextlib.closing(connect(address)) as connection:
        connection.request("POST", CHAT, b" " * (20 << 20), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413


# -- start and end ----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_reported_before_a_model_is_loaded():
    """Also where the other server is still loading its model, or listens at another address of the host."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "lookahead", "serve", "--port", port, "--model", "no/such/model"],
            capture_output=True, text=True, env=ENVIRONMENT, timeout=120,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"Error: cannot listen on localhost, port {port}; choose another --port" in done.stderr
    assert "in use" in done.stderr
    assert "no/such/model" not in done.stderr


def test_an_address_that_the_machine_does_not_have_is_left_out(monkeypatch):
    """As in containers whose hosts file names one of IPv6."""
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    (only,) = listen("localhost", 0)
    with only:
        assert only.getsockname()[0] == "127.0.0.1"
    del addresses[1]
    with pytest.raises(click.ClickException, match="cannot listen on localhost, port 0; choose another"):
        listen("localhost", 0)


def half_sent(address: str, size: int = 99) -> socket.socket:
    """Send the beginning of a request, whose body has so many bytes."""
    place = urllib.parse.urlsplit(address)
    client = socket.create_connection((place.hostname, place.port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n{{"
    client.sendall(head.encode())
    return client


@pytest.mark.parametrize("sent", [
    b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2**17 + b"\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
])  # fmt: skip
def test_what_is_no_http_gets_an_error_like_all_others(address, sent):
    place = urllib.parse.urlsplit(address)
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(sent)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.getheader("Content-Type")) == (400, "application/json")
        assert json.load(answer)["error"]["type"] == "invalid_request_error"


def unread(address: str, most: int = 50) -> http.client.HTTPConnection:
    """Ask for an answer of so many tokens, and do not read it."""
    connection = connect(address)
    body = {"prompt": "x", "max_tokens": most, "temperature": 1.5, "stream": True}
    connection.request("POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_stalled_clients_do_not_keep_the_server(stop):
    """It ends as if they were not there. Nobody else waits for them either."""
    with contextlib.ExitStack() as clients, running(*SERVE, stop=stop) as address:  # the server ends first
        for client in (half_sent, unread):
            for _ in range(3):
                clients.enter_context(contextlib.closing(client(address)))
            assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        clients.enter_context(contextlib.closing(unread(address, 1000)))
        time.sleep(0.3)  # its answer is being decoded


def test_requests_wait_for_a_server_that_loads():
    """The port is taken first, so a client that comes early is answered as soon as the model is there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "lookahead", "serve", "--port", port, *FIXED], stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    try:
        end = time.monotonic() + 60
        while True:
            try:
                status, _ = ask(f"http://127.0.0.1:{port}", COMPLETION, prompt="x", max_tokens=2)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert status == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
