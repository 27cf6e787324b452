"""The parts of an answer, by a tokenizer's own response template or one of the usual form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lookahead import DEMO_MODEL
from lookahead.tools.server.parsing import REASONING, TEXT, Call, Parser, response_template

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
AS_JSON = HEAD + "{# <tool_call> #}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BEGUN = HEAD + "{# <tool_call> #}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
AS_XML = HEAD + "{# <tool_call><function= #}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "string"},
    }}}},
]  # fmt: skip
PROMPT = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def parts(tokenizer, template, text, prompt=PROMPT, size=1):
    """Return what a parser tells of a text that comes in pieces of some characters; equal kinds are joined."""
    tokenizer.chat_template = template
    found = response_template(tokenizer, ["<|im_end|>", "<|end|>"])
    parser = Parser(tokenizer, found, prompt, TOOLS)
    told = [part for at in range(0, len(text), size) for part in parser.feed(text[at : at + size])]
    joined = []
    for part in [*told, *parser.finish()]:
        if joined and not isinstance(part, Call) and not isinstance(joined[-1], Call) and joined[-1][0] == part[0]:
            joined[-1] = part[0], joined[-1][1] + part[1]
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("template", "prompt", "text", "wanted"),
    [
        (AS_JSON, PROMPT, "plain  text\n<|im_end|>", [(TEXT, "plain  text")]),
        (AS_JSON, PROMPT, "<think>\na\n\nb\n</think>\n\nc<|im_end|>", [(REASONING, "a\n\nb"), (TEXT, "c")]),
        (BEGUN, PROMPT + "<think>\n", "a\n</think>\n\nc", [(REASONING, "a"), (TEXT, "c")]),
        (
            AS_JSON, PROMPT,
            'See\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>',
            [(TEXT, "See"), Call("f", '{"a": 1}'), Call("g", "{}")],
        ),
        (
            AS_XML, PROMPT,
            "See\n<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            [(TEXT, "See"), Call("f", '{"a": 7, "b": "7"}')],
        ),
        (AS_JSON, PROMPT, "a <tool_call>{nonsense}</tool_call> b", [(TEXT, "a <tool_call>{nonsense}</tool_call> b")]),
        (AS_JSON, PROMPT, "a < b <think", [(TEXT, "a < b <think")]),
        (AS_JSON, PROMPT, "", []),
    ],
)  # fmt: skip
def test_the_usual_forms(tokenizer, size, template, prompt, text, wanted):
    assert parts(tokenizer, template, text, prompt, size) == wanted


@pytest.mark.parametrize(
    "template", [None, "{{ messages[0].content }}", HEAD.replace("</think>", "x"), "{{ x.y.z }}</think>"]
)
def test_answers_without_parts(tokenizer, template):
    tokenizer.chat_template = template
    assert response_template(tokenizer, ["<|im_end|>"]) is None


def test_a_template_of_its_own_counts():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template, tokenizer.response_template = AS_JSON, {"fields": {}}
    assert response_template(tokenizer, []) == {"fields": {}}


pieces = st.lists(st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '"', "{", "a", " ", "\n"]
), max_size=12)  # fmt: skip


@given(pieces, st.integers(1, 9))
def test_nothing_is_lost_and_nothing_raises(pieces, size):
    """Whatever a model writes: each letter of it is in a part, or a call, and calls can be read."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = "".join(pieces)
    told = parts(tokenizer, AS_JSON, text, size=size)
    calls = [part for part in told if isinstance(part, Call)]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    words = "".join(part[1] for part in told if not isinstance(part, Call))
    assert words.count("a") >= text.count("a") - text.count("arguments") - 3 * len(calls)
