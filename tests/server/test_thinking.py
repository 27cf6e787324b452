"""How long a model reasons: what chat templates are told, and budgets, which end reasoning by its mark."""

import contextlib
import json
import random
import re
from dataclasses import replace
from functools import cache

import openai
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from server_process import ask, connect, running
from test_lossless import random_cases
from test_messages import events
from test_server import THINKING, WRITING, idle
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig
from lookahead.stats import Stats
from lookahead.tools.server.answering import Words, Writer
from lookahead.tools.server.fields import CHAT, COUNT, MESSAGE, RESPONSE, RefusedError, read_request
from lookahead.tools.server.grammar import Enforced
from lookahead.tools.server.parsing import Parser
from lookahead.tools.server.reading import Reader, Written
from lookahead.tools.server.thinking import LimitThinking, Marks, ReasoningTokens

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think></think>\n{% endif %}"
    "{% endif %}{# </think> #}"
)
WITH_EFFORT = "{{ reasoning_effort or 'no effort' }}" + TEMPLATE
MARKS_ALONE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}{# </think> #}"
)
ASKED = [{"role": "user", "content": "def main():"}]
BODIES = {
    CHAT: {"messages": ASKED}, RESPONSE: {"input": "def main():"}, MESSAGE: {"messages": ASKED, "max_tokens": 40},
    COUNT: {"messages": ASKED},
}  # fmt: skip


@cache
def demo():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval(), tokenizer


@random_cases(25)
@given(
    seed=st.integers(0, 99),
    most=st.integers(0, 40),
    temperature=st.sampled_from([None, 0.8, 1.5]),
    begun=st.booleans(),
    budget=st.sampled_from([0, 3, 16]),
)
def test_a_budget_ends_reasoning_and_the_text_is_that_of_generate(seed, most, temperature, begun, budget):
    """The mark is of several tokens here, and guesses lie on both sides of it."""
    note(f"{seed=} {most=} {temperature=} {begun=} {budget=}")
    model, tokenizer = demo()
    prompt = "def f():\n    <think> x = 1 </think>\n" * 2 + ("<think>" if begun else "    ")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    opens = "<think>" if begun else random.Random(seed).choice(["=", "def", "(", "\n"])
    options = {"max_new_tokens": 60, "do_sample": temperature is not None}
    options |= {"temperature": temperature} if temperature else {}

    def limited():
        marks = Marks(opens, "</think>", begun)
        return LogitsProcessorList([LimitThinking(tokenizer, ids.shape[1], marks, most)])

    torch.manual_seed(seed)
    expected = model.generate(ids, **options, logits_processor=limited())[0].tolist()
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    try:
        texts = lookahead.Sequences(model)
        future = texts.submit(ids, seed=seed, **options, logits_processor=limited())
        while texts.step():
            pass
    finally:
        lookahead.unwrap(model)
    assert future.result()[0].tolist() == expected
    if begun:
        new = expected[ids.shape[1] :]
        closing = tokenizer("</think>", add_special_tokens=False).input_ids
        written = tokenizer.decode(new[:most])
        has_ended = len(new) <= min(most, 59)
        assert has_ended or "</think>" in written or new[most : most + len(closing)] == closing[: max(60 - most, 0)]


def limits(most, begun, *texts):
    """Feed a text token by token; return how often the mark was forced, and what was written."""
    _, tokenizer = demo()
    limit, written = LimitThinking(tokenizer, 0, Marks("<think>", "</think>", begun), most), []
    for text in texts:
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            while True:
                scores = limit(torch.tensor([written], dtype=torch.long), torch.zeros(1, 4096))
                if not scores.isinf().any():
                    break
                written.append(int(scores.argmax()))
            written.append(token)
    return tokenizer.decode(written)


def test_what_counts():
    assert limits(100, True, "ab cd", "</think>", "x = 1" * 50) == "ab cd</think>" + "x = 1" * 50
    text = limits(5, False, "a = 1\n" * 9, "<think>", "x\n" * 9)
    assert text.startswith("a = 1\n" * 9 + "<think>")
    assert text.count("</think>") == 1
    # It begins again, and has nothing left.
    assert limits(0, False, "<think>", "</think>", "a", "<think>", "b") == "<think></think></think>a<think></think>b"


@pytest.mark.parametrize(
    ("path", "said", "thinks", "effort", "thought"),
    [
        (CHAT, {}, None, None, None),
        (CHAT, {"reasoning_effort": None}, None, None, None),
        (CHAT, {"reasoning_effort": "high"}, True, "high", None),
        (CHAT, {"reasoning_effort": "max"}, True, "max", None),
        (RESPONSE, {"reasoning": {"effort": "none", "summary": None}}, False, "none", None),
        (RESPONSE, {"reasoning": {}}, None, None, None),
        (MESSAGE, {"thinking": {"type": "disabled"}}, False, "none", None),
        (MESSAGE, {"thinking": {"type": "adaptive"}}, None, None, None),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 2**70}}, True, "medium", 2**70),
        (COUNT, {"thinking": {"type": "enabled", "budget_tokens": 1}}, True, "medium", 1),
        # To Anthropic's clients, how much a model reasons does not say whether it does.
        (MESSAGE, {"output_config": {"effort": "low"}}, None, "low", None),
        (MESSAGE, {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, None, "low", None),
        (MESSAGE, {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, False, "none", None),
        (
            MESSAGE,
            {"output_config": {"effort": "max"}, "thinking": {"type": "enabled", "budget_tokens": 5}},
            True, "max", 5,
        ),
    ],
)  # fmt: skip
def test_what_requests_say(path, said, thinks, effort, thought):
    asked, wishes = read_request(BODIES[path] | said, path, "demo", 4096, ())
    assert (asked.thinks, asked.effort, wishes.thought) == (thinks, effort, thought)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (CHAT, {"verbosity": "low"}),
        (CHAT, {"messages": [ASKED[0] | {"cache_control": {"type": "ephemeral"}}]}),
        (RESPONSE, {"text": {"verbosity": "high"}, "max_tool_calls": 3, "client_metadata": {"x": "y"}}),
        (RESPONSE, {"reasoning": {"summary": "auto", "context": "auto"}, "include": ["reasoning.encrypted_content"]}),
        (MESSAGE, {"thinking": {"type": "adaptive", "display": "omitted"}, "mcp_servers": [], "speed": "standard"}),
        (MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (MESSAGE, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}, "diagnostics": {}}),
    ],
)  # fmt: skip
def test_hints_change_nothing(path, said):
    """Clients send them by themselves. The model cannot be given them, and nothing that they ask for is missed."""
    with_hint, without = (read_request(BODIES[path] | more, path, "demo", 4096, ()) for more in (said, {}))
    assert (replace(with_hint[0], told={}), with_hint[1]) == without


NAN, NO_TEXT = float("nan"), [None, 5, True, [], {}, {"type": 5}]


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        (CHAT, "reasoning_effort", ["", "most", 1, NAN, True, ["low"], {"effort": "low"}, "x" * 9999]),
        (CHAT, "verbosity", ["", "most", 1, NAN, True, ["low"]]),
        (RESPONSE, "text", [5, {"verbosity": "most"}, {"verbosity": ["low"]}]),
        (RESPONSE, "reasoning", [
            "low", 1, NAN, [], {"effort": 1}, {"effort": []}, {"summary": "all"}, {"budget": 5}, {"mode": "pro"},
            {"context": "current_turn"}, {"mode": ["standard"]},
        ]),
        (RESPONSE, "include", ["message.output_text.logprobs", 5, [5], [[]], ["nothing"], {}]),
        (MESSAGE, "context_management", [5, {"edits": 5}, {"edits": [{"type": "clear_tool_uses_20250919"}]}]),
        (MESSAGE, "output_config", [
            5, [], {"effort": "none"}, {"effort": ["low"]}, {"effort": 1}, {"task_budget": 5}, {"format": 5},
            {"format": {}}, {"format": {"type": "text"}},
            {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": [NAN]}},
            {"format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ]),
        (RESPONSE, "top_logprobs", [-1, 21, NAN, 1.0, True, "5", [], 2**70]),
        (MESSAGE, "thinking", [
            "enabled", 5, NAN, [], {}, {"type": None}, {"type": "enabled"}, {"type": "disabled", "budget_tokens": 5},
            {"type": "adaptive", "x": 1}, {"type": "adaptive", "display": "all"}, {"type": []}, *(
                {"type": "enabled", "budget_tokens": tokens} for tokens in (0, -1, 1.5, NAN, True, "9", None, [], 1e99)
            ),
        ]),
    ],
)  # fmt: skip
def test_other_values_are_refused_by_name(path, name, values):
    for value in values:
        with pytest.raises(RefusedError, match=f"^{name} must be"):
            read_request(BODIES[path] | {name: value}, path, "demo", 4096, ())
    with pytest.raises(RefusedError, match="top_logprobs must be left out where"):
        read_request(BODIES[RESPONSE] | {"top_logprobs": 1, "include": []}, RESPONSE, "demo", 4096, ())


def prompt_of(template, path=CHAT, **said):
    model, tokenizer = demo()
    tokenizer.chat_template = template
    reader = Reader(model, tokenizer, Written(0))
    asked, wishes = read_request(BODIES[path] | said, path, "demo", 4096, reader.reserved)
    (prompt,) = reader.read(asked, wishes)
    return tokenizer.decode(prompt.ids), prompt


def test_templates_are_told_in_their_own_words():
    text, prompt = prompt_of(TEMPLATE, reasoning_effort="low")
    assert text.endswith("<think>\n")
    assert prompt.marks == Marks("<think>", "</think>", True)
    text, prompt = prompt_of(TEMPLATE, reasoning_effort="none")
    assert text.endswith("</think>\n")
    assert (prompt.marks.have_begun, prompt.thought) == (False, None)
    for effort, begin, end in (("high", "high", "<think>\n"), ("none", "no effort", "</think>\n")):
        text, _ = prompt_of(WITH_EFFORT, reasoning_effort=effort)
        assert text.startswith(f"{begin}user")
        assert text.endswith(end)
    for said, begin in (({}, "no effort"), ({"output_config": {"effort": "max"}}, "max")):
        text, _ = prompt_of("{{ 'set' if enable_thinking is defined }}" + WITH_EFFORT, MESSAGE, **said)
        assert text.startswith(f"{begin}user")
    own = {"enable_thinking": True, "reasoning_effort": "xhigh"}  # a variable that is given goes before
    text, _ = prompt_of(WITH_EFFORT, reasoning_effort="none", chat_template_kwargs=own)
    assert text.startswith("xhigh")
    assert text.endswith("<think>\n")


def test_what_no_template_can_be_told():
    for said in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 7}):
        _, prompt = prompt_of(MARKS_ALONE, MESSAGE, thinking=said)
        assert prompt.thought == said.get("budget_tokens", 0)  # the mark is forced at once
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    _, prompt = prompt_of(plain, MESSAGE, thinking={"type": "disabled"})
    assert (prompt.thought, prompt.marks) == (None, None)
    without = prompt_of(plain)
    for path, said in (
        (CHAT, {"reasoning_effort": "low"}), (RESPONSE, {"reasoning": {"effort": "low"}}),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 7}}),
        (MESSAGE, {"output_config": {"effort": "max"}}),
    ):  # fmt: skip
        text, prompt = prompt_of(plain, path, **said)  # there is no reasoning, and so none too much
        assert (text, prompt.marks) == (without[0], None)
    with pytest.raises(RefusedError, match="thinking must have no budget_tokens"):
        prompt_of("{{ enable_thinking }}" + plain, MESSAGE, thinking={"type": "enabled", "budget_tokens": 7})


TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
CHOICES = {
    CHAT: {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    RESPONSE: {"tools": [{"type": "function"} | TOOL], "tool_choice": {"type": "function", "name": "f"}},
    MESSAGE: {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}], "tool_choice": {"type": "any"}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL["parameters"]}}


def with_tools(written):
    """written: before each answer."""
    return (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}\n{% endif %}"
        "{% if add_generation_prompt %}a: " + written + "{% endif %}{# </think> #}"
    )


NO, YES = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.mark.parametrize(
    ("path", "said", "thinks"),
    [
        (CHAT, {}, True), (CHAT, {"reasoning_effort": "low"}, True), (CHAT, {"chat_template_kwargs": YES}, True),
        (CHAT, {"chat_template_kwargs": NO}, False), (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": YES}, True),
        (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": NO}, False),
        (RESPONSE, {}, True), (RESPONSE, {"reasoning": {"effort": "none"}}, False),
        (RESPONSE, {"chat_template_kwargs": NO}, False),
        (MESSAGE, {}, True), (MESSAGE, {"thinking": {"type": "disabled"}}, False),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "written", ["", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", "{{ reasoning_effort }}"]
)
def test_what_is_enforced_begins_with_reasoning_only_where_it_may(path, said, thinks, written):
    """Whether the template writes that there is no reasoning, as Qwen3's, or cannot be told."""
    model, tokenizer = demo()
    for more in (CHOICES[path], *([{"response_format": SCHEMA}] if path == CHAT else [])):
        _, prompt = prompt_of(with_tools(written), path, **said, **more)
        _, wishes = read_request(BODIES[path] | said | more, path, "demo", 4096, ())
        grammars = Reader(model, tokenizer, Written(0)).grammars(4096)
        grammar = grammars.compiled(grammars.text(wishes.demand, prompt, True))
        answer = '{"a": true}' if "response_format" in more else '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        for text, is_allowed in ((answer, True), (f"<think>so</think>{answer}", thinks)):
            keeps = Enforced(grammar.deep_copy(), 0)
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            with (
                contextlib.nullcontext()
                if is_allowed
                else pytest.raises(ValueError, match="does not keep to its grammar")
            ):
                keeps.follow(tokens)


def test_reasoning_that_the_prompt_has_begun_goes_on():
    model, tokenizer = demo()
    _, prompt = prompt_of(with_tools("<think>\n"), **CHOICES[CHAT], reasoning_effort="none")
    _, wishes = read_request(BODIES[CHAT] | CHOICES[CHAT], CHAT, "demo", 4096, ())
    grammars = Reader(model, tokenizer, Written(0)).grammars(4096)
    keeps = Enforced(grammars.compiled(grammars.text(wishes.demand, prompt, True)), 0)
    assert (prompt.marks.have_begun, prompt.thought) == (True, 0)
    keeps.follow(tokenizer('</think><tool_call>{"name": "f", "arguments": {}}</tool_call>').input_ids)


SERVER = f"""if True:
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer
    import lookahead
    from lookahead.tools.server import make_app

    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = {TEMPLATE!r}
    model = lookahead.wrap(AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval())
    uvicorn.run(make_app(model, tokenizer, "thinks"), port=0)
"""


@pytest.fixture(scope="module")
def address():
    with running("-c", SERVER) as address:
        yield address


@pytest.mark.parametrize("begun", ["x =", "import os\n", "    return"])
def test_a_begun_answer_goes_on_with_its_blanks(address, begun):
    """A client puts the two together."""
    model, tokenizer = demo()
    inputs = tokenizer(f"user: def main():\nassistant: {begun}", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    wanted = tokenizer.decode(ids, skip_special_tokens=True)
    body = {"messages": [*ASKED, {"role": "assistant", "content": begun}], "max_tokens": 12, "temperature": 0}
    assert ask(address, MESSAGE, **body)[1]["content"] == [{"type": "text", "text": wanted.rstrip()}]
    assert wanted[0].isspace() or begun != "x =", "else it shows nothing"


def test_a_message_has_a_short_thought(address):
    body = {"messages": ASKED, "max_tokens": 60, "temperature": 0}
    _, whole = ask(address, MESSAGE, **body)
    assert [block["type"] for block in whole["content"]] == ["thinking"]  # it never ends by itself
    thinking = {"type": "enabled", "budget_tokens": 9}
    status, short = ask(address, MESSAGE, **body, thinking=thinking)
    assert status == 200, short
    assert [block["type"] for block in short["content"]] == ["thinking", "text"]
    assert whole["content"][0]["thinking"].startswith(short["content"][0]["thinking"].rstrip())
    told = events(address, **body, thinking=thinking)
    pieces = {"thinking_delta": "", "text_delta": ""}
    for name, event in told:
        if name == "content_block_delta":
            kind = event["delta"]["type"]
            pieces[kind] += event["delta"][kind.partition("_")[0]]
    assert list(pieces.values()) == [short["content"][0]["thinking"], short["content"][1]["text"]]
    _, none = ask(address, MESSAGE, **body | {"max_tokens": 3}, thinking={"type": "disabled"})
    assert [block["type"] for block in none["content"]] == ["text"]


def test_a_stream_that_is_cancelled_while_it_thinks(address):
    body = {"messages": ASKED, "max_tokens": 900, "temperature": 1.5, "seed": 1, "stream": True}
    body["thinking"] = {"type": "enabled", "budget_tokens": 600}
    with contextlib.closing(connect(address)) as connection:
        connection.request("POST", MESSAGE, json.dumps(body), {"Content-Type": "application/json"})
        assert b"message_start" in connection.getresponse().read(200)
    assert idle(address)
    test_a_message_has_a_short_thought(address)


def tokens_of_reasoning(ids: list[int], begun: bool = False) -> int:
    """Count the tokens that have a byte between the marks. Each character of a token of this tokenizer is a byte."""
    _, tokenizer = demo()
    before = b"<think>" * begun
    text = before + tokenizer.decode(ids).encode()
    within = [
        place for found in re.finditer(rb"<think>(.*?)(?:</think>|\Z)", text, re.DOTALL)
        for place in range(*found.span(1))
    ]  # fmt: skip
    count, at = 0, len(before)
    for token in ids:
        end = at + len(tokenizer.convert_ids_to_tokens(token))
        count += any(place in range(at, end) for place in within)
        at = end
    assert at == len(text)
    return count


BETWEEN = THINKING | {"start_anchor": "a: "}


@given(
    st.lists(st.sampled_from(
        ["<think>", "</think>", "a b", "é", "\U0001f600", "한국", "\n", " ", "<", "</th", "think>", "x = 1\n"]
    ), max_size=20),
    st.booleans(), st.booleans(), st.randoms(),
)  # fmt: skip
def test_the_tokens_of_reasoning_are_counted(pieces, joined, begun, rng):
    """Whatever the steps write together, and where a token has characters of reasoning and of a mark."""
    _, tokenizer = demo()
    ids = [token for piece in (["".join(pieces)] if joined else pieces) for token in tokenizer(piece).input_ids]
    prompt = "a: <think>\n" if begun else "a: "
    sent: list = []
    writer = Writer(
        tokenizer, Parser(tokenizer, tokenizer.all_special_tokens, BETWEEN, prompt, None), (), None, sent.append
    )
    writer.put(torch.zeros(1, 1, dtype=torch.long))
    writer.begin([], Stats())
    at = 0
    while at < len(ids):
        step = ids[at : at + rng.randint(1, 4)]
        for token in step:
            writer.put(torch.tensor([token]))
        writer.record(0, None, None, [], [])
        at += len(step)
    writer.end()
    assert writer.reasoning == tokens_of_reasoning(ids, begun)
    counts = [piece.reasoning for piece in sent if isinstance(piece, Words)]
    assert counts == sorted(counts)
    assert all(count <= writer.reasoning for count in counts)


def test_bytes_that_are_tokens_do_not_count_with_the_mark_behind_them():
    """A tokenizer such as Llama's tells the text of tokens for bytes with the next token, if that is no byte."""

    class Bytes:
        def decode(self, ids):
            return "".join(map(chr, ids))

    count = ReasoningTokens(Bytes())
    for token, text in ((65, "A"), (66, ""), (67, ""), (60, "é<"), (68, "D")):
        count.see(text, token)
    count.add(0, 2)
    assert count.count == 3  # "<" begins the mark
    count.add(3, 4)
    assert count.count == 4


def usage_of(address: str, path: str, **body) -> list[dict]:
    """Return the usage of an answer that comes whole, and of one that is streamed."""
    status, whole = ask(address, path, **body)
    assert status == 200, whole
    *_, last = (event for _, event in events(address, path, **body) if event.get("type") != "message_stop")
    return [whole["usage"], last.get("response", last)["usage"]]


def test_usage_tells_the_tokens_of_reasoning(address):
    """All of the answer, where its length has cut it; as many as the budget, where that has ended it; or none."""
    chat, response = {"max_tokens": 40, "temperature": 0}, {"max_output_tokens": 40, "temperature": 0}
    none, short = {"reasoning_effort": "none", "max_tokens": 3}, {"max_tokens": 20, "temperature": 0}
    for path, said, wanted in (
        (CHAT, BODIES[CHAT] | chat, 40), (RESPONSE, BODIES[RESPONSE] | response, 40),
        (CHAT, BODIES[CHAT] | chat | none, 0), (CHAT, BODIES[CHAT] | chat | {"n": 2}, 80),
    ):  # fmt: skip
        for usage in usage_of(address, path, **said):
            details = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
            assert details == {"reasoning_tokens": wanted}
    for most, wanted in ((9, 9), (100, 20)):
        thinking = {"type": "enabled", "budget_tokens": most}
        for usage in usage_of(address, MESSAGE, **BODIES[MESSAGE] | short, thinking=thinking):
            assert usage["output_tokens_details"] == {"thinking_tokens": wanted}


def test_usage_of_an_answer_that_reasons_and_then_speaks():
    """The model writes what it is asked to. With each event, too, where the client asks for it."""
    text = "<think>a b\n한국 c</think>return x<think>d</think>, y"
    _, tokenizer = demo()
    wanted = tokens_of_reasoning(tokenizer(text).input_ids)
    assert 6 < wanted < len(tokenizer(text).input_ids)
    with running("-c", WRITING, json.dumps(THINKING)) as address:
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "temperature": 0}
        for usage in usage_of(address, CHAT, **chat):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": wanted}
        for usage in usage_of(address, RESPONSE, input=text, max_output_tokens=200, temperature=0):
            assert usage["output_tokens_details"] == {"reasoning_tokens": wanted}
        told = events(address, CHAT, **chat, stream_options={"continuous_usage_stats": True, "include_usage": True})
        counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for _, event in told]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, wanted)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_probabilities_and_repeat_what_was_said(address, stream):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "thinks", "input": "def main():", "max_output_tokens": 3, "temperature": 0}
        options |= {"reasoning": {"effort": "none"}, "parallel_tool_calls": False, "tool_choice": "none"}
        options |= {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}]}
        options |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
        response = client.responses.create(**options, stream=stream)
        if stream:
            told = list(response)
            response = told[-1].response
            deltas = [one for event in told if event.type == "response.output_text.delta" for one in event.logprobs]
        part = response.output[0].content[0]
        assert len(part.logprobs) == 3
        assert "".join(one.token for one in part.logprobs).strip() == part.text.strip()
        for one in part.logprobs:
            assert len(one.top_logprobs) == 3
            assert one.top_logprobs[0].logprob == one.logprob <= 0
        if stream:
            assert [(one.token, one.logprob) for one in deltas] == [(one.token, one.logprob) for one in part.logprobs]
        assert (response.tool_choice, response.parallel_tool_calls) == ("none", False)
        assert (response.tools[0].name, response.max_output_tokens, response.temperature) == ("f", 3, 0)
        plain = client.responses.create(model="thinks", input="x", max_output_tokens=3, reasoning={"effort": "none"})
        assert (plain.tool_choice, plain.parallel_tool_calls) == ("auto", True)
        assert plain.output[0].content[0].logprobs == []
