"""Answers that must hold: schemas and calls of tools are enforced, and what they force is guessed."""

import asyncio
import contextlib
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from server_process import ask, connect, running
from test_lossless import random_cases
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig
from lookahead.tools.server import grammar, rehearsals
from lookahead.tools.server.app import Server
from lookahead.tools.server.fields import Demand, RefusedError, Wishes
from lookahead.tools.server.grammar import REACH, Grammars
from lookahead.tools.server.reading import Prompt
from lookahead.tools.server.thinking import Marks

PERSON = {
    "type": "object",
    "properties": {
        "occupation": {"enum": ["programmer", "mathematician"]},
        "has_experience_in_python": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["occupation", "has_experience_in_python", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    """Its budget is fixed: costs that a busy machine has disturbed may say that no guess is worth its row."""
    config = LookaheadConfig(budget=8, window_size=0)
    return lookahead.wrap(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval(), config)


@pytest.fixture(scope="module")
def grammars(model):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    return Grammars(tokenizer, None, model.config.vocab_size, {tokenizer.eos_token_id})


def decode(model, grammars, schema, prompt, guesses, **options):
    """Return the tokens of an answer that keeps to a schema, and the steps that it took."""
    ids = grammars.tokenizer(prompt, return_tensors="pt").input_ids
    grammar = grammars.compiled(grammars.text(Demand(schema), Prompt(ids[0].tolist(), []), many=True))
    processor, source = grammars.enforce(grammar, ids.shape[1])
    sequences = lookahead.Sequences(model)
    before = model.lookahead.stats.steps
    options |= {"logits_processor": LogitsProcessorList([processor]), "source": source if guesses else ()}
    future = sequences.submit(ids, seed=3, **options)
    while sequences.step():
        pass
    return future.result()[0, ids.shape[1] :].tolist(), model.lookahead.stats.steps - before


def test_forced_tokens_save_passes_and_change_no_text(model, grammars):
    found = [
        decode(model, grammars, PERSON, "person = ", guesses, max_new_tokens=120, do_sample=False)
        for guesses in (False, True, True)
    ]
    assert found[0][0] == found[1][0] == found[2][0]
    value = json.loads(grammars.tokenizer.decode(found[0][0], skip_special_tokens=True))
    assert value.keys() == PERSON["properties"].keys()
    assert found[2][1] < len(found[0][0]) / 2


values = st.recursive(
    st.sampled_from(
        [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}, {"enum": ["red", "light green"]},
         {"const": "always"}, {"type": "string", "maxLength": 5}, {"type": "null"}]
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["name", "x", "long_name_of_it"]), inner, min_size=1).map(
            lambda of: {"type": "object", "properties": of, "required": list(of), "additionalProperties": False}
        ),
        inner.map(lambda of: {"type": "array", "items": of, "minItems": 1, "maxItems": 2}),
    ),
    max_leaves=4,
)  # fmt: skip


def keeps_to(value, schema):
    """Whether a value is what the schema asks for, as far as `values` goes."""
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if schema["type"] == "object":
        of = schema["properties"]
        return value.keys() == of.keys() and all(keeps_to(value[name], of[name]) for name in of)
    if schema["type"] == "array":
        return 1 <= len(value) <= 2 and all(keeps_to(one, schema["items"]) for one in value)
    kind = {"integer": int, "boolean": bool, "string": str, "null": type(None)}[schema["type"]]
    return type(value) is kind


@random_cases(25)
@given(values, st.integers(0, 99), st.sampled_from([None, 0.8, 1.5]))
def test_any_answer_keeps_to_its_schema(model, grammars, schema, seed, temperature):
    note(f"{schema=} {seed=} {temperature=}")
    prompt = random.Random(seed).choice(["x = ", "def f(a):\n    return ", "{"])
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    with_guesses, without = (
        decode(model, grammars, schema, prompt, guesses, max_new_tokens=400, **sampling)[0] for guesses in (True, False)
    )
    assert with_guesses == without
    if len(without) < 400:
        assert keeps_to(json.loads(grammars.tokenizer.decode(without, skip_special_tokens=True)), schema)


@random_cases(10)
@given(
    values, st.integers(0, 99), st.sampled_from([None, 1.5]),
    st.sampled_from([{"min_new_tokens": 300}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3}]),
)  # fmt: skip
def test_what_other_settings_hide_breaks_no_schema(model, grammars, schema, seed, temperature, hiding):
    """An answer ends where nothing else may come; or its request is refused, for nothing may come at all."""
    note(f"{schema=} {seed=} {temperature=} {hiding=}")
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    try:
        prompt = random.Random(seed).choice(["x = ", "def f(a):\n    return ", "{"])
        ids, _ = decode(model, grammars, schema, prompt, True, max_new_tokens=400, **sampling, **hiding)
    except RefusedError as error:
        assert "no token is left that the schema allows" in str(error)  # noqa: PT017
        assert (error.param, "min_new_tokens" in hiding) == ("generation_config", False)  # noqa: PT017
    else:
        if len(ids) < 400:
            assert ids[-1] == grammars.tokenizer.eos_token_id
            assert keeps_to(json.loads(grammars.tokenizer.decode(ids[:-1])), schema)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_leave_no_token_are_at_fault(strict, temperature, stream):
    """And neither the server nor its model; least tokens are as many as the schema lets an answer have."""
    schema = {"type": "array", "items": {"const": "aaaa"}, "minItems": 9, "maxItems": 9}
    body, _, events = formats("/v1/chat/completions", schema)
    body |= {"temperature": temperature, "seed": 1, "stream": stream, "max_tokens": 200}
    if not stream:
        status, answer = ask(strict, "/v1/chat/completions", **body, generation_config={"min_new_tokens": 150})
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
        assert json.loads(answer["choices"][0]["message"]["content"]) == ["aaaa"] * 9
    with contextlib.closing(connect(strict)) as connection:
        body |= {"generation_config": {"no_repeat_ngram_size": 2}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status, said = answer.status, answer.read().decode()
    assert (status, events in said) == (200 if stream else 400, True)
    assert "no token is left that the schema allows" in said


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "blah"}, "blah"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(grammars, schema, says):
    with pytest.raises(RefusedError, match=f"the schema cannot be enforced: .*{says}"):
        grammars.compiled(grammars.text(Demand(schema), Prompt([1], []), many=True))


SERVER = f"""if True:
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import lookahead
    from lookahead.tools.server import make_app

    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = (
        "{{% for one in messages %}}{{{{ one.role }}}}: {{{{ one.content }}}}\\n{{% endfor %}}"
        "{{% if tools %}}<tool_call>{{{{ tools | tojson }}}}\\n{{% endif %}}"
        "{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    )
    model = lookahead.wrap(AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval())
    uvicorn.run(make_app(model, tokenizer, "strict"), port=0)
"""
MESSAGES = [{"role": "user", "content": "Who is it?"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    for name, parameters in {
        "remember": PERSON,
        "forget": {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]},
    }.items()
]


@pytest.fixture(scope="module")
def strict():
    with running("-c", SERVER) as address:
        yield address


def test_formats_of_answers_are_enforced(strict):
    schema = {"name": "person", "schema": PERSON, "strict": True}
    with openai.OpenAI(base_url=f"{strict}/v1", api_key="none", max_retries=0) as client:
        for kind in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
            for temperature in (0, 1):
                answer = client.chat.completions.create(
                    model="strict",
                    messages=MESSAGES,
                    response_format=kind,
                    temperature=temperature,
                    seed=5,
                    max_tokens=300,
                )
                if answer.choices[0].finish_reason == "stop":
                    value = json.loads(answer.choices[0].message.content)
                    assert isinstance(value, dict)
                    assert kind["type"] == "json_object" or value.keys() == PERSON["properties"].keys()
                else:
                    assert kind["type"] == "json_object", "a schema without texts of any length ends"
        response = client.responses.create(
            model="strict", input="Who?", text={"format": {"type": "json_schema", **schema}}, max_output_tokens=300
        )
        assert json.loads(response.output_text).keys() == PERSON["properties"].keys()


def test_calls_are_enforced(strict):
    with openai.OpenAI(base_url=f"{strict}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "remember"}}):
            answer = client.chat.completions.create(
                model="strict", messages=MESSAGES, tools=TOOLS, tool_choice=choice, temperature=1, seed=1,
                parallel_tool_calls=False, max_tokens=300,
            ).choices[0]  # fmt: skip
            (call,) = answer.message.tool_calls
            assert call.function.name in ("remember", "forget")[: 2 - isinstance(choice, dict)]
            arguments = json.loads(call.function.arguments)
            if call.function.name == "remember":
                assert arguments.keys() == PERSON["properties"].keys()
        response = client.responses.create(
            model="strict", input="Who?", tools=[{"type": "function", **TOOLS[1]["function"]}], tool_choice="required",
            parallel_tool_calls=False, max_output_tokens=300,
        )  # fmt: skip
        assert [item.name for item in response.output if item.type == "function_call"] == ["forget"]
    tool = {"name": "forget", "input_schema": TOOLS[1]["function"]["parameters"]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "forget"}):
        status, answer = ask(
            strict, "/v1/messages", messages=MESSAGES, tools=[tool], max_tokens=300,
            tool_choice=choice | {"disable_parallel_tool_use": True},
        )  # fmt: skip
        assert status == 200
        assert [block["name"] for block in answer["content"] if block["type"] == "tool_use"] == ["forget"]
        assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "cannot be enforced"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"tool_choice": "required"}, "tool_choice must be left out where there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS}, "must name one of the"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice must be"),
    ],
)
def test_what_cannot_be_enforced_is_refused(strict, body, says):
    status, answer = ask(strict, "/v1/chat/completions", messages=MESSAGES, **body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("schema", [{"type": 5}, {"const": "<|end|>"}, {"type": "string", "not": {"const": "a"}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "wrong"}}])
def test_the_tool_whose_schema_cannot_be_enforced_is_named(strict, schema, choice):
    parameters = {"type": "object", "properties": {"x": schema}}
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
    status, answer = ask(
        strict, "/v1/chat/completions", messages=MESSAGES, tools=[TOOLS[0], wrong, TOOLS[1]], tool_choice=choice
    )
    assert (status, answer["error"]["param"]) == (400, "tools[1]")
    assert answer["error"]["message"].startswith("the schema of the tool 'wrong' cannot be enforced: ")


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [("array", True), (["string", "null"], True), (5, True), ("object", False), (["object", "null"], False)],
)
def test_arguments_are_objects(strict, kind, is_refused):
    """With texts that hold what ends a call."""
    parameters = {"type": kind, "properties": {"x": {"const": 'a \\</tool_call>"'}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    status, answer = ask(strict, "/v1/chat/completions", messages=MESSAGES, tools=[tool], tool_choice="required")
    if is_refused:
        assert (status, answer["error"]["param"]) == (400, "tools[0]")
        assert "must have the type object" in answer["error"]["message"]
    else:
        for call in answer["choices"][0]["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"])["x"] == parameters["properties"]["x"]["const"]


LARGE = {  # takes seconds to compile, and is then too large for a token of its text
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50}}}x"} for i in range(2500)},
    "additionalProperties": False,
}


@pytest.mark.long
def test_a_large_schema_holds_up_nobody(strict):
    with ThreadPoolExecutor(1) as threads:
        how = {"type": "json_schema", "json_schema": {"name": "x", "schema": LARGE}}
        large = threads.submit(ask, strict, "/v1/chat/completions", messages=MESSAGES, response_format=how)
        count = 0
        while not large.done():
            assert ask(strict, "/v1/completions", prompt="x", max_tokens=1)[0] == 200
            count += not large.done()
    status, said = large.result()
    assert (status, said["error"]["param"]) == (400, "response_format")
    assert count > 3  # one at most, if they wait for it


TAKES_MINUTES = {"type": "object", "patternProperties": {f"^a{i}$": {"type": "integer"} for i in range(2000)}}


def test_a_schema_that_takes_minutes_is_given_up(strict):
    """It is refused by name, and ends with its client; other schemas are compiled meanwhile."""
    how = {"type": "json_schema", "json_schema": {"name": "x", "schema": TAKES_MINUTES}}
    body = {"messages": MESSAGES, "max_tokens": 2}
    other = {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(ask, strict, "/v1/chat/completions", **body, response_format=how)
        for _ in range(8):  # whose clients go
            with contextlib.closing(connect(strict)) as connection:
                sent = json.dumps(body | {"response_format": how})
                connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
                time.sleep(0.1)
        assert ask(strict, "/v1/chat/completions", **body, response_format=other)[0] == 200
        assert not slow.done()
        status, said = slow.result(60)
    assert (status, said["error"]["param"]) == (400, "response_format")
    assert "patternProperties" in said["error"]["message"]


PRIMES = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}


def test_a_short_schema_that_cannot_be_compiled_is_refused(monkeypatch):
    """Its size says nothing of what it takes, here more memory than there is. It is tried once."""
    monkeypatch.setattr(rehearsals, "SECONDS", 1)

    async def ask() -> None:
        tokenizer, model = AutoTokenizer.from_pretrained(DEMO_MODEL), AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
        server = Server(model.eval(), tokenizer, "x", None, 1, 1, None)
        for _ in range(2):
            with pytest.raises(RefusedError, match="multipleOf"):
                await server.grammars([Prompt([1], [])], Wishes(demand=Demand(PRIMES)))
            monkeypatch.setattr(rehearsals, "COMPILE", "")
        assert await server.grammars([Prompt([1], [])], Wishes(demand=Demand(PERSON)))

    asyncio.run(ask())


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("have_begun", [True, False])
def test_marks_of_reasoning_may_be_special_tokens(marks, is_special, have_begun):
    """Then the token ends the reasoning, and no text does. What has no role may be special, too."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    if is_special:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    template = {"fields": {"thinking": {}}}
    grammars = Grammars(tokenizer, template, len(tokenizer), {tokenizer.eos_token_id})
    prompt = Prompt([1], [], marks=Marks(*marks, have_begun))
    text = grammars.text(Demand(PERSON), prompt, many=True)
    asyncio.run(rehearsals.Rehearsals().rehearse(text))
    opens, closes = (tokenizer(mark, add_special_tokens=False).input_ids for mark in marks)
    answer = tokenizer('{"occupation": "programmer", ', add_special_tokens=False).input_ids
    thought = tokenizer("I see", add_special_tokens=False).input_ids
    ways = [[*([] if have_begun else opens), *thought, *closes, *answer], *([] if have_begun else [answer])]
    for ids in ways:
        matcher = grammars.compiled(text)
        assert matcher.validate_tokens(ids) == len(ids), tokenizer.decode(ids)


@pytest.mark.parametrize("role", [True, False])
@pytest.mark.parametrize("schema", [{"const": "a<mark>"}, {"type": "object", "properties": {"<mark>": {}}}])
def test_tokens_without_a_role_may_be_special_too(model, schema, role):
    """Such as those of repositories and file names in models of code."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    mark = AddedToken("<mark>", special=True)
    tokenizer.add_special_tokens({"sep_token": mark}) if role else tokenizer.add_tokens([mark], special_tokens=True)
    assert (mark.content in tokenizer.all_special_tokens) == role
    with pytest.raises(RefusedError, match="it has <mark>, a special token"):
        Grammars(tokenizer, None, len(tokenizer), {tokenizer.eos_token_id}).text(
            Demand(schema), Prompt([1], []), many=True
        )


@pytest.mark.parametrize("schema", [{"const": "a<|endoftext|>"}, {"enum": ["a", "<|endoftext|>"]},
                                    {"type": "object", "required": ["<|endoftext|>"]},
                                    {"type": "object", "properties": {"<|endoftext|>": {"type": "null"}}}])  # fmt: skip
def test_a_special_token_is_no_text_of_a_schema(grammars, schema):
    special = grammars.tokenizer.eos_token
    schema = json.loads(json.dumps(schema).replace("<|endoftext|>", special))
    with pytest.raises(RefusedError, match=re.escape(special)):
        grammars.text(Demand(schema), Prompt([1], []), many=True)
    described = {"type": "string", "description": special, "maxLength": 3}
    grammars.compiled(grammars.text(Demand(described), Prompt([1], []), many=True))


A_CITY = {"type": "object", "properties": {"name": {"const": "Rome"}}, "required": ["name"]}
CALLS = {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$defs": {"City": A_CITY}, "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]},
         {"city": {"name": "Rome"}}, {"city": "Rome"}),
        ({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
         {"next": {"next": None}}, {"next": {"name": "f\u00fc\"r", "arguments": {"next": None}}}),
        ({"properties": {"arguments": {"type": "null"}, "name": {"$ref": "#/properties/arguments"}},
          "required": ["arguments", "name"]}, {"arguments": None, "name": None}, {"arguments": None, "name": 1}),
    ],
)  # fmt: skip
def test_references_of_a_tool_begin_at_its_own_schema(model, schema, good, bad):
    """As they do where the schema is that of an answer: a call allows the same, after the name of the tool."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    grammars = Grammars(tokenizer, {"fields": {"tool_calls": CALLS}}, model.config.vocab_size, {tokenizer.eos_token_id})
    schema, name = {"type": "object", "additionalProperties": False, **schema}, 'f\u00fc"r'
    tools = [{"function": {"name": name, "parameters": one}} for one in (schema, A_CITY)]
    tools[1]["function"]["name"] = "other"
    prompt = Prompt([1], [], tools=tools)
    for demand, before, after in (
        (Demand(schema), "", ""),
        (
            Demand(calls=(name, "other")),
            f'<call>{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
            "}</call>",
        ),
    ):
        compiled = grammars.compiled(grammars.text(demand, prompt if before else Prompt([1], []), many=False))
        for value, allowed in ((good, True), (bad, False)):
            ids = tokenizer(before + json.dumps(value, ensure_ascii=False) + after, add_special_tokens=False).input_ids
            text = compiled.deep_copy()
            assert (text.validate_tokens(ids) == len(ids)) == allowed, (before, value)
    for untyped in ({"properties": {"a": {"const": 1}}}, {"$ref": "#/$defs/City", "$defs": {"City": A_CITY}}, {}, None):
        asked = Prompt([1], [], tools=[{"function": {"name": "f", "parameters": untyped}}])
        compiled = grammars.compiled(grammars.text(Demand(calls=("f",)), asked, many=True))
        for value in ("5", "[]", '"x"', "null", '{"name": "Rome"}'):
            ids = tokenizer(f'<call>{{"name": "f", "arguments": {value}}}</call>', add_special_tokens=False).input_ids
            assert (compiled.deep_copy().validate_tokens(ids) == len(ids)) == ("{" in value), (untyped, value)
    broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}
    asked = Prompt([1], [], tools=[{"function": {"name": "f", "parameters": broken}}])
    with pytest.raises(RefusedError) as refused:
        grammars.compiled(grammars.text(Demand(calls=("f",)), asked, many=True))
    assert "/$defs/no" in str(refused.value)
    assert "%json" not in str(refused.value)


@pytest.mark.parametrize("after", ["", "x"])
def test_a_special_token_that_a_pattern_allows_alone_is_refused_as_it_comes(model, grammars, after):
    """Otherwise the text would end there, or have nothing at that place."""
    schema = {"type": "string", "pattern": f"^a{re.escape(grammars.tokenizer.eos_token)}{after}$"}
    with pytest.raises(RefusedError, match="special token"):
        decode(model, grammars, schema, "x = ", guesses=True, max_new_tokens=20)
    ids, _ = decode(model, grammars, {"const": "b"}, "x = ", guesses=True, max_new_tokens=20)
    assert grammars.tokenizer.decode(ids, skip_special_tokens=True) == '"b"'


GROWS = {  # while its text is written
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": f"^{'a?' * 300}{'a' * 300}$"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [GROWS, LARGE], ids=["in_the_middle", "at_once"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_grows_too_large_is_at_fault_alone(strict, path, stream, schema):
    how, field, events = formats(path, schema)
    with ThreadPoolExecutor(2) as threads:
        beside = {"prompt": "def", "max_tokens": 64, "temperature": 0}
        alone = ask(strict, "/v1/completions", **beside)[1]["choices"][0]["text"]
        others = [threads.submit(ask, strict, "/v1/completions", **beside) for _ in range(2)]
        body = how | {"stream": stream, "temperature": 5, "seed": 1}
        with contextlib.closing(connect(strict)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status, said = answer.status, answer.read().decode()
        assert [other.result()[1]["choices"][0]["text"] for other in others] == [alone] * 2
    assert status == (200 if stream else 400), said
    assert "the schema grows too large while the answer is written" in said
    assert "shorter patterns" in said
    if stream:
        assert events in said.rpartition("data: ")[2] or events in said.rpartition("event: ")[2], said[-500:]
    elif path != "/v1/messages":
        assert json.loads(said)["error"]["param"] == field


def formats(path, schema):
    """Return a body that asks for an answer by a schema, the field that does, and a word of the event of an error."""
    if path == "/v1/chat/completions":
        how = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"messages": MESSAGES, "response_format": how}, "response_format", '"invalid_request_error"'
    how = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    if path == "/v1/responses":
        return {"input": "Who is it?", "text": how}, "text.format", "response.failed"
    del how["format"]["name"]
    return {"messages": MESSAGES, "max_tokens": 1024, "output_config": how}, "output_config.format", "error"


def chain(count: int, link) -> dict:
    """Return a schema of definitions that refer to the next one each."""
    definitions = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
    return {"$defs": definitions | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(schema: dict, levels: int) -> dict:
    return schema if not levels else {"type": "object", "properties": {"a": nested(schema, levels - 1)}}


LINKS = {
    "alone": lambda next_one: next_one,
    "items": lambda next_one: {"type": "array", "items": next_one},
    "property": lambda next_one: {"type": "object", "properties": {"a": next_one}, "required": ["a"]},
    "alternative": lambda next_one: {"anyOf": [{"type": "string"}, {"type": "array", "items": next_one}]},
    "one": lambda next_one: {"oneOf": [{"type": "string"}, {"type": "array", "prefixItems": [next_one]}]},
    "all": lambda next_one: {"allOf": [next_one]},
    "deep": lambda next_one: nested(next_one, 25),
}


@pytest.mark.parametrize("link", LINKS)
def test_a_schema_that_is_too_deep_does_not_end_the_server(strict, link):
    """Compiling goes from reference to reference by recursion, and no exception tells where a stack ends."""
    longest = next(n for n in range(1, REACH) if (n + 1) * depth(chain(1, LINKS[link])) > REACH) - 1
    for count, fits in [(longest, True), (longest + 1, False), (3 * longest, False)]:
        how = {"type": "json_schema", "json_schema": {"name": "x", "schema": chain(count, LINKS[link])}}
        status, said = ask(strict, "/v1/chat/completions", messages=MESSAGES, response_format=how, max_tokens=4)
        assert status == (200 if fits else 400), said
        if not fits:
            assert "references" in said["error"]["message"]
            assert said["error"]["param"] == "response_format"


def depth(value) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inside), default=0)


def test_the_first_schema_holds_up_nobody():
    """What all schemas need is made before the server is asked: no other thread would run meanwhile."""

    async def ask_first() -> None:
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
        server = Server(lookahead.wrap(model), AutoTokenizer.from_pretrained(DEMO_MODEL), "x", None, 1, 1, None)
        async with server.lifespan(None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(grammar, "from_tokenizer", None)
                wishes = Wishes(demand=Demand(PERSON))
                assert await server.grammars([Prompt([1], [])], wishes)

    asyncio.run(ask_first())


@pytest.mark.long
def test_the_tool_whose_schema_takes_too_long_is_named(monkeypatch):
    """Its name is found in rehearsals of each tool alone."""
    monkeypatch.setattr(rehearsals, "SECONDS", 1)
    slow = {"type": "function", "function": {"name": "slow", "parameters": TAKES_MINUTES}}

    async def ask() -> None:
        tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        tokenizer.chat_template = "{% if add_generation_prompt %}a: {% endif %}{# <tool_call> #}"
        server = Server(AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval(), tokenizer, "x", None, 1, 1, None)
        wishes = Wishes(demand=Demand(calls=("remember", "slow")))
        await server.grammars([Prompt([1], [], tools=[TOOLS[0], slow])], wishes)

    with pytest.raises(RefusedError, match="the schema of the tool 'slow' cannot be enforced: to compile it") as error:
        asyncio.run(ask())
    assert error.value.param == "tools[1]"
