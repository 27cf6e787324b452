"""The parts of an answer, by a tokenizer's own response template or one of the usual form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lookahead import DEMO_MODEL
from lookahead.tools.server.parsing import REASONING, TEXT, Call, Parser, Trim, response_template

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
    return parts_of_pieces(tokenizer, template, [text[at : at + size] for at in range(0, len(text), size)], prompt)


def parts_of_pieces(tokenizer, template, pieces, prompt=PROMPT, is_cut=False):
    tokenizer.chat_template = template
    found = response_template(tokenizer, ["<|im_end|>", "<|end|>"])
    parser, trim = Parser(tokenizer, tokenizer.all_special_tokens, found, prompt, TOOLS), Trim()
    joined = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish(is_cut)]:
        if not isinstance(part, Call):
            if not (shown := trim.feed(*part)):
                continue
            part = part[0], shown
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
        (
            AS_JSON, PROMPT,  # clients join the texts, and what was reasoned
            '\n<think>\na\n</think> b\n<tool_call>{"name": "f", "arguments": {}}</tool_call>c<think>\nd</think>\ne\n',
            [(REASONING, "a"), (TEXT, "b"), Call("f", "{}"), (TEXT, "\nc"), (REASONING, "\n\nd"), (TEXT, "\ne")],
        ),
        (AS_JSON, PROMPT, "a <tool_call>{nonsense}</tool_call> b", [(TEXT, "a <tool_call>{nonsense}</tool_call> b")]),
        *(
            (AS_JSON, PROMPT, call, [(TEXT, call)])
            for call in (
                '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
                '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
            )
        ),
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


xml = st.lists(st.sampled_from([
    "<tool_call>\n<function=f>\n", "</function>\n</tool_call>", "<parameter=a>\n7\n</parameter>", "<", "a\n", "<|end|>",
]), max_size=10)  # fmt: skip


@given(st.one_of(pieces.map(lambda one: (AS_JSON, one)), xml.map(lambda one: (AS_XML, one))), st.randoms())
def test_parts_do_not_depend_on_the_pieces(written, random):
    """How many tokens a step writes depends on guesses, so what comes in one piece does, too."""
    template, tokens = written
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ends = sorted(random.sample(range(len(tokens) + 1), random.randint(0, len(tokens))))
    cut = ["".join(tokens[at:end]) for at, end in zip([0, *ends], [*ends, len(tokens)], strict=True)]
    assert parts_of_pieces(tokenizer, template, cut) == parts_of_pieces(tokenizer, template, tokens)


@given(
    st.recursive(
        st.none()
        | st.integers()
        | st.text('ab\\"<>/_')
        | st.sampled_from(["</tool_call>", '"</tool_call>', "\\</tool_call>"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "</tool_call>"]), inner),
        max_leaves=5,
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_a_text_in_a_call_may_hold_what_ends_a_call(tokenizer, value, size, is_second):
    call = json.dumps({"name": "f</tool_call>", "arguments": {"x": value}}, ensure_ascii=False)
    first = '<tool_call>{"name": "f", "arguments": {"a": "\\\\"}}</tool_call>\n' * is_second
    found = parts(tokenizer, AS_JSON, f"{first}<tool_call>\n{call}\n</tool_call>after<|im_end|>", size=size)
    wanted = [Call("f", '{"a": "\\\\"}')] * is_second
    assert found == [*wanted, Call("f</tool_call>", json.dumps({"x": value})), (TEXT, "after")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_that_is_cut_off_is_the_whole_text_after_a_good_one(tokenizer, size):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for cut in range(12, len(call) - 12):
        told = parts(tokenizer, AS_JSON, f"{call}\n{call[:cut]}", size=size)
        assert told == [Call("f", "{}"), (TEXT, call[:cut].rstrip())], cut


@pytest.mark.parametrize(("template", "call"), [
    (AS_JSON, '<tool_call>{"name": "f", "arguments": {"a": 7}}</tool_call>'),
    (AS_XML, "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"),
])  # fmt: skip
def test_a_call_that_the_length_has_cut_is_left_out(template, call):
    """It is no text, nor a call, even where the arguments before the cut can be read."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens(["<tool_call>"])
    for before, wanted in (("", []), ("See\n", [(TEXT, "See")]), (f"{call}\n", [Call("f", '{"a": 7}')])):
        for cut in range(len("<tool_call>"), len(call)):
            assert parts_of_pieces(tokenizer, template, [before, *call[:cut]], is_cut=True) == wanted, cut
        assert parts_of_pieces(tokenizer, template, [before, *call], is_cut=True) == [*wanted, Call("f", '{"a": 7}')]
