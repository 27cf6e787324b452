"""Turns of a conversation: what earlier ones have read and written is found again, and the answer stays the same."""

import asyncio
import gc
import json
import queue
import random
import threading
import tracemalloc
from itertools import permutations

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from zoo import tiny_model

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig, sequences
from lookahead.extending import bytes_of
from lookahead.tools.server.answering import End, Words
from lookahead.tools.server.fields import CHAT, MESSAGE, RESPONSE, RefusedError, Wishes, read_request
from lookahead.tools.server.generations import Generations
from lookahead.tools.server.parsing import Call
from lookahead.tools.server.prefixes import Prefixes
from lookahead.tools.server.reading import Prompt, Reader, Written, digests, size_of_text

CONFIG = LookaheadConfig(budget=6, window_size=2, ngram_size=3)
# It writes calls in its own way, and leaves reasoning out.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ header or '' }}"
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}{# </think> #}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "x"}}]
ASKED = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def main():"}]


@pytest.fixture(scope="module")
def demo():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def read(demo, tokenizer):
    """Reads a chat's prompt. `read.said` keeps what was written after it."""
    written = Written()
    reader = Reader(demo, tokenizer, written)

    def prompt(messages, **more):
        asked, wishes = read_request({"messages": messages} | more, CHAT, "demo", 4096, reader.reserved)
        (found,) = reader.read(asked, wishes)
        return found

    def said(prompt, text, content, calls=()):
        ids = [*prompt.ids, *tokenizer(text, add_special_tokens=False).input_ids]
        conversation = prompt.conversation
        written.keep(conversation.with_answer(content, [Call(*one) for one in calls]), conversation.rendered, ids)
        return ids

    prompt.said, prompt.written = said, written
    return prompt


def test_an_answer_is_found_as_it_was_written(read, tokenizer):
    """With its reasoning, its blanks, and the call as the model has written it, over several turns."""
    messages = ASKED
    for turn, text in enumerate((
        '<think>so  be it</think>x = 1<tool_call>{"name":"f",  "arguments":{"a":1,"b":[2]}}</tool_call><|end|>',
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call><|end|>',
    )):  # fmt: skip
        prompt = read(messages, tools=TOOLS)
        content = "x = 1" if "x = 1" in text else ""
        arguments = '{"b": [2], "a": 1}' if content else "{}"
        ids = read.said(prompt, text, content, [("f", arguments)])
        call = {"id": f"call{turn}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": content or None, "tool_calls": [call]}
        messages = [*messages, answer, {"role": "tool", "tool_call_id": f"call{turn}", "content": "y = 2"}]
        following = read(messages, tools=TOOLS)
        assert following.ids[: len(ids)] == ids
        assert tokenizer.decode(following.ids[len(ids) :]) == "\n[tool]\ny = 2<|end|>\n[assistant]\n"


@pytest.mark.parametrize("path", [CHAT, RESPONSE, MESSAGE])
def test_results_are_read_in_the_order_of_their_calls(path):
    """Clients send them as tools end. A template that shows no names of calls would give a call another's result."""

    def read(names, called="abc"):
        if path == CHAT:
            calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in called]
            results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in names]
            body = {"messages": [ASKED[1], {"role": "assistant", "tool_calls": calls}, *results]}
        elif path == RESPONSE:
            calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in called]
            results = [{"type": "function_call_output", "call_id": name, "output": f"of {name}"} for name in names]
            body = {"input": [ASKED[1], *calls, *results]}
        else:
            calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in called]
            results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in names]
            turns = {"role": "assistant", "content": calls}, {"role": "user", "content": results}
            body = {"messages": [ASKED[1], *turns], "max_tokens": 1}
        return [one["content"] for one in read_request(body, path, "demo", 4096, set())[0].messages[2:]]

    for names in map("".join, permutations("abc")):
        assert read(names) == ["of a", "of b", "of c"]
    assert read("ba") == ["of a", "of b"]
    assert read("ba", called="aba") == ["of a", "of b"]
    for names in ("ca", "c", "b"):  # to the model, the result of c would be that of b
        with pytest.raises(RefusedError, match=r"has no result.*give results of all calls") as refused:
            read(names)
        assert refused.value.param == ("input" if path == RESPONSE else "messages")
    assert read("bxa") == ["of b", "of x", "of a"]  # whose x belongs to is not known
    assert read("baa", called="aba") == ["of a", "of b", "of a"]
    assert read("baa") == ["of b", "of a", "of a"]  # nor whose the second of a is


ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_messages_are_one_where_the_template_wants_roles_to_alternate(read, tokenizer):
    """Others get each message, as it was sent; what no merging helps is refused in the words of the template."""
    user, said = [{"role": "user", "content": text} for text in ("a", "b")], {"role": "assistant", "content": "c"}
    messages = [*user, said, said, user[0]]
    assert tokenizer.decode(read(messages).ids).count("[user]") == 3
    tokenizer.chat_template = ALTERNATES
    assert tokenizer.decode(read(messages).ids) == "[user]a\nb<|end|>[assistant]c\nc<|end|>[user]a<|end|>[assistant]"
    prompt = read(user)
    ids = read.said(prompt, "c<|end|>", "c")  # is found again
    assert read([*user, said, user[0]]).ids[: len(ids)] == ids
    with pytest.raises(RefusedError, match="roles must alternate"):
        read([said, *user])


@pytest.mark.parametrize("content", ["sunny", "the result of a call, in many words", '"quoted"', " \n"])
def test_no_message_is_passed_over_in_silence(read, tokenizer, content):
    """Some templates know no results of tools, or take a system message at the beginning alone."""
    messages = [ASKED[1], {"role": "assistant", "content": "sunny"}, {"role": "tool", "content": content}, ASKED[0]]
    read(messages)
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content | tojson }}")
    read(messages)
    for role in ("tool", "system"):
        tokenizer.chat_template = TEMPLATE.replace(
            "[{{ m.role }}]", f"{{% if m.role == '{role}' %}}{{% continue %}}{{% endif %}}"
        )
        if content.strip() or role == "system":
            with pytest.raises(RefusedError, match=f"passes over a message of the role '{role}'"):
                read(messages)
            assert role == "tool" or read([ASKED[0], *messages[:3]])
        else:
            read(messages)
    tokenizer.chat_template = TEMPLATE.replace(
        "[{{ m.role }}]", "{% if m.role == 'assistant' %}{% continue %}{% endif %}"
    )
    read(messages)


def test_an_answer_that_its_length_has_cut_goes_on_with_an_end(read, tokenizer):
    ids = read.said(read(ASKED), "return [1, 2", "return [1, 2")
    following = read([*ASKED, {"role": "assistant", "content": "return [1, 2"}, {"role": "user", "content": "z"}])
    assert following.ids[: len(ids)] == ids
    assert tokenizer.decode(following.ids[len(ids) :]) == "<|end|>\n[user]\nz<|end|>\n[assistant]\n"


@pytest.mark.parametrize(
    "change",
    [
        {"content": "x = 2"}, {"before": [*ASKED[:1], {"role": "user", "content": "def more():"}]},
        {"header": "import re\n"}, {"tools": TOOLS}, {"before": ASKED[1:]}, {"content": " "},
    ],
    ids=str,
)  # fmt: skip
def test_another_conversation_is_read_as_it_is_rendered(read, tokenizer, change):
    read.said(read(ASKED), "<think>so</think>x = 1<|end|>", "x = 1")
    more = {"tools": change["tools"]} if "tools" in change else {}
    if "header" in change:
        more["chat_template_kwargs"] = {"header": change["header"]}
    answer = {"role": "assistant", "content": change.get("content", "x = 1")}
    messages = [*change.get("before", ASKED), answer, {"role": "user", "content": "z"}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, tools=more.get("tools"),
        **more.get("chat_template_kwargs", {}),
    )  # fmt: skip
    assert tokenizer.decode(read(messages, **more).ids) == rendered
    assert "<think>" not in rendered


def test_an_end_in_an_answer_is_not_taken_for_the_end_of_it(read, tokenizer):
    read.said(read(ASKED), "a<|end|>", "a <|end|> b")
    messages = [*ASKED, {"role": "assistant", "content": "a <|end|> b"}, {"role": "user", "content": "z"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(read(messages).ids) == rendered


def test_a_template_that_writes_the_last_message_otherwise_is_let_alone(demo, tokenizer):
    """Such as one that puts the tools before it. What was read then is not what stands there now."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}tools {% endif %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    )
    reader = Reader(demo, tokenizer, written := Written())

    def read(messages):
        asked, wishes = read_request({"messages": messages}, CHAT, "demo", 4096, reader.reserved)
        return reader.read(asked, wishes)[0]

    prompt = read(ASKED)
    ids = [*prompt.ids, *tokenizer("x = 1<|end|>", add_special_tokens=False).input_ids]
    written.keep(prompt.conversation.with_answer("x = 1", []), prompt.conversation.rendered, ids)
    messages = [*ASKED, {"role": "assistant", "content": "x = 1"}, {"role": "user", "content": "z"}]
    assert tokenizer.decode(read(messages).ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_what_was_not_used_for_longest_is_forgotten_first():
    written = Written(2 * size_of_text([1] * 5))
    for name in (b"a", b"b"):
        written.keep(name, b"", [1] * 4)
    assert written.find(b"a")
    written.keep(b"c", b"", [2] * 4)
    assert written.find(b"b") is None
    assert written.find(b"a") == ([1] * 4, b"")
    written.keep(b"c", b"", [3] * 6)
    assert written.find(b"c") == ([3] * 6, b"")
    written.keep(b"d", b"", [4] * 500)
    assert [written.find(name) for name in (b"a", b"b", b"c", b"d")] == [None] * 4


@pytest.mark.parametrize("length", [1, 20, 500])
def test_what_is_written_takes_no_more_bytes_than_it_counts(length):
    """Also where conversations are short: each takes far more than its tokens then."""
    most, count = 2**20, 4000
    tracemalloc.start()
    try:
        written = Written(most)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            written.keep(number.to_bytes(32, "big"), number.to_bytes(32, "little"), [5000] * length)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert most / 4 < taken < most * 1.1


# -- answers ----------------------------------------------------------------------------------------------------------


def generations(model, tokenizer, most, parallel=2):
    engine = getattr(model, "lookahead", None)
    written, prefixes = Written(), Prefixes(model, most)
    return Generations(model, Reader(model, tokenizer, written), written, prefixes, engine, None, parallel)


def answer(of, ids, most, count=1, others=(), **wishes):
    """Return the tokens of the answers, as text, and how many of the prompt's were cached. others: prompts."""
    wishes = Wishes(settings={"max_new_tokens": most} | wishes.pop("settings", {}), answers=count, **wishes)

    async def ask():
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        send = lambda number, piece: loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))  # noqa: E731
        prompts = [one if isinstance(one, Prompt) else Prompt(one, []) for one in (ids, *others)]
        of.begin(prompts, wishes, send)
        open_ones = count * len(prompts)
        texts, cached = [""] * open_ones, []
        while open_ones:
            number, piece = await asyncio.wait_for(pieces.get(), 60)
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, Words):
                texts[number] += piece.text
            open_ones -= isinstance(piece, End)
            if isinstance(piece, End):
                cached.append(piece.cached)
        await of.ended()
        return texts, cached

    return asyncio.run(ask())


@settings(max_examples=12, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    samples=st.booleans(),
    seed=st.integers(0, 999),
)
def test_answers_after_a_hit_are_those_of_the_cold_prompt(dtype, samples, seed):
    """In bf16 too, where passes of our own read the prompts, also long ones, and write the answers."""
    note(f"{dtype=} {samples=} {seed=}")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).eval()
    lookahead.wrap(model, CONFIG)
    tokenizer, rng = AutoTokenizer.from_pretrained(DEMO_MODEL), random.Random(seed)
    warm, cold = (generations(model, tokenizer, most) for most in (2**30, 0))
    wishes = {"seed": seed, "settings": {"do_sample": samples}}
    ids = [rng.randrange(3, 4000) for _ in range(rng.randint(20, 200))]
    for turn in range(4):
        (text,), (cached,) = answer(warm, ids, 24, **wishes)
        assert answer(cold, ids, 24, **wishes) == ([text], [0])
        assert cached > 0 or not turn
        written = tokenizer(text, add_special_tokens=False).input_ids
        ids = ids[: rng.randint(max(len(ids) // 2, 20), len(ids))] if rng.random() < 0.3 else ids + written
        ids = ids + [rng.randrange(3, 4000) for _ in range(rng.randint(1, 90))]


@settings(max_examples=12, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    samples=st.booleans(),
    most=st.sampled_from([1, 2_000_000, 2**30]),
    chunk_size=st.sampled_from([16, 128]),
    seed=st.integers(0, 999),
)
def test_what_prompts_that_come_together_share_is_read_once(dtype, samples, most, chunk_size, seed):
    """Several answers to each, and prompts that begin alike: they find what is read, though nothing has ended yet."""
    note(f"{dtype=} {samples=} {most=} {chunk_size=} {seed=}")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).eval()
    lookahead.wrap(model, CONFIG)
    tokenizer, rng = AutoTokenizer.from_pretrained(DEMO_MODEL), random.Random(seed)
    warm, cold = (generations(model, tokenizer, size, 8) for size in (most, 0))
    warm._chunk_size = chunk_size
    wishes = {"seed": seed, "settings": {"do_sample": samples}}
    shared = [rng.randrange(3, 4000) for _ in range(rng.randint(20, 300))]
    prompts = [shared + [rng.randrange(3, 4000) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    prompts[1] = prompts[0] if rng.random() < 0.5 else prompts[1]
    texts, cached = answer(warm, prompts[0], 24, count=2, others=prompts[1:], **wishes)
    alone = [answer(cold, ids, 24, count=2, **wishes)[0] for ids in prompts]
    assert texts == [text for both in alone for text in both]
    assert cached.count(0) == 1, "one has read what all share"
    assert all(one >= len(shared) or not one for one in cached)
    assert warm._prefixes._lent == []
    assert warm._prefixes.bytes <= most


def test_a_prompt_is_read_on_where_one_that_it_waits_for_fails_or_goes(tokenizer):
    """Those that wait for their turn to be read are read, whatever becomes of those before them."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    of = generations(lookahead.wrap(model, CONFIG), tokenizer, 2**30, 8)
    of._chunk_size, ids = 16, [3 + number % 90 for number in range(300)]
    (alone,), _ = answer(of, ids, 12, settings={"do_sample": False})
    of._prefixes._kept.clear()
    generate, ended = of._generate, {}
    has_all_ended, have_all_come = threading.Event(), threading.Event()

    def fails(prompt, *given):
        if prompt[-1] == 1:
            raise FloatingPointError("no numbers")
        return (yield from generate(prompt, *given))

    def send(number, piece):
        if isinstance(piece, (End, BaseException)):
            ended[number] = piece
        if len(ended) == 5:
            has_all_ended.set()

    of._generate = fails
    of.calls.put(lambda: have_all_come.wait(60))
    begun = []
    for number, last in enumerate((5, 1, 6, 1, 7)):
        begun += of.begin([Prompt([*ids, last], [])], Wishes(settings={"max_new_tokens": 5}),
                          lambda _, piece, number=number: send(number, piece))  # fmt: skip
    steps, step = [], of._sequences.step

    def counted(**given):
        steps.append(None)
        if len(steps) in (1, 3):  # while one waits, and while the other is read
            of.cancel(begun[{1: 2, 3: 0}[len(steps)]])
        return step(**given)

    of._sequences.step = counted
    have_all_come.set()
    assert has_all_ended.wait(60)
    assert [type(ended[number]).__name__ for number in range(5)] == [
        "CancelledError", "FloatingPointError", "CancelledError", "FloatingPointError", "End",
    ]  # fmt: skip
    of._generate = generate
    assert answer(of, ids, 12, settings={"do_sample": False})[0] == [alone]
    assert of._prefixes._lent == []


def chat(of, prompt, wishes):
    """Return the tokens of a prompt with its answer, how many were cached, and the message that a client sends back."""
    generate, found = type(of)._generate, []

    def recorded(*given):
        ids, cache = yield from generate(of, *given)
        found.append(ids)
        return ids, cache

    of._generate = recorded

    async def ask():
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        of.begin([prompt], wishes, lambda _, piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
        text, calls = "", []
        while not isinstance(piece := await asyncio.wait_for(pieces.get(), 60), End):
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, Words):
                text += piece.text
            else:
                calls.append({"id": "x", "type": "function", "function": vars(piece)})
        await of.ended()
        return (
            found[-1],
            piece.cached,
            {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}),
        )

    return asyncio.run(ask())


@settings(max_examples=4, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([0, 1]),
    has_calls=st.booleans(),
    seed=st.integers(0, 999),
)
def test_twenty_turns_with_results_of_tools_are_those_of_cold_prompts(dtype, temperature, has_calls, seed):
    """Each turn goes on from the one before, which is found as it was written; a call is enforced, or none."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype, max_position_embeddings=2048).eval()
    lookahead.wrap(model, CONFIG)
    tokenizer, rng = AutoTokenizer.from_pretrained(DEMO_MODEL), random.Random(seed)
    tokenizer.chat_template = TEMPLATE.replace("{# </think> #}", "")
    warm, cold = (generations(model, tokenizer, most) for most in (2**30, 0))
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y", "def", "é"]}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    messages, hits, made = [{"role": "user", "content": "import os"}], 0, 0
    for turn in range(20):
        body = {"messages": messages, "temperature": temperature, "seed": seed, "max_tokens": 24 + 24 * has_calls}
        if has_calls:
            body |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        asked, wishes = read_request(body, CHAT, "demo", 4096, warm._reader.reserved)
        (prompt,) = warm._reader.read(asked, wishes)
        ids, cached, said = chat(warm, prompt, wishes)
        found = chat(cold, prompt, wishes)
        assert found == (ids, 0, said), f"{dtype=} {turn=} {cached=} {body=} {prompt.ids=}"
        made += "tool_calls" in said
        hits += cached > len(prompt.ids) // 2
        result = "".join(
            rng.choice(("x = 1", "\n", "é", "return", " 42", "import re")) for _ in range(rng.randint(0, 9))
        )
        answered = {"role": "tool", "tool_call_id": "x"} if "tool_calls" in said else {"role": "user"}
        messages = [*messages, said, answered | {"content": result}]
    assert hits > 16, (dtype, temperature, has_calls, seed)
    assert made == 20 * has_calls, (dtype, temperature, has_calls, seed)


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("family", ["lfm2", "mamba2", "gemma3_text", "llama"])
def test_a_prompt_is_found_again_without_its_answer(family, wraps, tokenizer):
    """Also where states and windows cannot be cut back: a prompt that goes on otherwise than the answer was."""
    plain, model = tiny_model(family), tiny_model(family)
    if wraps:
        lookahead.wrap(model, CONFIG)
    of, ids = generations(model, tokenizer, 2**30), list(range(3, 60))
    for turn in range(3):
        (text,), (cached,) = answer(of, ids, 12, settings={"do_sample": False})
        wanted = plain.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        reads_all = not turn or (family == "mamba2" and not wraps)  # states do not say what they have seen
        assert cached in ([0] if reads_all else [len(ids) - 6, len(ids) - 7])
        copies = [kept for kept in of._prefixes._kept if kept.stays]
        assert bool(copies) == (family != "llama" and (wraps or family != "mamba2")), "of what can be cut, none is kept"
        ids = [*ids, *(70 + turn for _ in range(6))]


def test_a_first_token_does_not_wait_for_the_pass_of_its_step(demo, tokenizer, monkeypatch):
    of, happened = generations(lookahead.wrap(demo, CONFIG), tokenizer, 2**30), []
    of._after_step = lambda: happened.append("handed on")
    run = sequences.run_together
    monkeypatch.setattr(sequences, "run_together", lambda *given: happened.append("pass") or run(*given))
    ended = threading.Event()

    def send(_, piece):
        happened.append("written")
        if not isinstance(piece, Words):
            ended.set()

    of.begin([Prompt(list(range(100, 120)), [])], Wishes(settings={"max_new_tokens": 9, "do_sample": False}), send)
    assert ended.wait(60)
    first = happened.index("written")
    assert happened[first + 1 : first + 3] == ["handed on", "pass"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "mamba2"])
def test_a_prompt_that_is_cancelled_is_read_no_further(family, tokenizer):
    """And what was kept of an earlier turn still is, and is what it was."""
    plain, model = (tiny_model(family, max_position_embeddings=1024) for _ in range(2))
    of = generations(lookahead.wrap(model, CONFIG), tokenizer, 2**30)
    first, greedy = list(range(3, 60)), {"do_sample": False}
    answer(of, first, 12, settings=greedy)
    for count in (3, 1, 9):
        of._chunk_size, steps, step, begun = 4, [], of._sequences.step, queue.SimpleQueue()
        longer = [*first, *(3 + (count * number) % 90 for number in range(400))]

        def counted(weights_may_change, count=count, steps=steps, step=step, begun=begun):
            steps.append(None)
            if len(steps) == count:
                of.cancel(begun.get(timeout=60))
            return step(weights_may_change)

        ended = threading.Event()
        of._sequences.step = counted
        (number,) = of.begin([Prompt(longer, [])], Wishes(settings=greedy), lambda _, piece: ended.set())  # noqa: B023
        begun.put(number)
        assert ended.wait(60)
        of._sequences.step = step
        assert len(steps) < count + 3  # of a hundred
        of._chunk_size = None
        ids = [*first, *(70 + count for _ in range(6))]
        (text,), (cached,) = answer(of, ids, 12, settings=greedy)
        wanted = plain.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        assert cached in (len(first), len(first) - 1)


def test_a_cache_that_is_not_kept_ends_with_its_answer(tokenizer):
    """And not when Python next looks for circles, many requests later: the bound of bytes would hold for nothing."""
    of = generations(lookahead.wrap(tiny_model("llama"), CONFIG), tokenizer, 1)

    def caches() -> int:
        return sum(type(one) is DynamicCache for one in gc.get_objects())

    answer(of, list(range(3, 60)), 12)
    gc.collect()
    gc.disable()
    try:
        before = caches()
        for _ in range(6):
            answer(of, list(range(3, 60)), 12)
        after = caches()
    finally:
        gc.enable()
    assert after <= before + 1  # the last one may still be in use


FAMILIES_WITH_STATES = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2": {}, "mamba2": {}, "zaya": {}, "gemma3_text": {},
}  # fmt: skip
SYSTEM = "import os\nimport sys\nimport json\nimport re\nfrom pathlib import Path\n"
# As templates of reasoning models do, begins the answer with what no later turn shows.
THINKS = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n<think>{% endif %}"
)


@pytest.mark.parametrize("family", FAMILIES_WITH_STATES)
def test_chats_go_on_where_states_were_kept(family, tokenizer):
    """At the end of the system's message, of the user's last one, and of the answer; the text is the cold prompt's."""
    tokenizer.chat_template = THINKS
    settings = FAMILIES_WITH_STATES[family] | {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    plain, model = (tiny_model(family, **settings) for _ in range(2))
    of = generations(lookahead.wrap(model, CONFIG), tokenizer, 2**30)

    def chat(*contents):
        roles = ["system", *["user", "assistant"] * len(contents)]
        messages = [{"role": role, "content": said} for role, said in zip(roles, contents, strict=False)]
        asked, wishes = read_request({"messages": messages}, CHAT, "demo", 4096, of._reader.reserved)
        (prompt,) = of._reader.read(asked, wishes)
        (text,), (cached,) = answer(of, prompt, 12, settings={"do_sample": False})
        wanted = plain.generate(torch.tensor([prompt.ids]), max_new_tokens=12, do_sample=False)[0, len(prompt.ids) :]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        return prompt.ids, text, tokenizer.decode(prompt.ids[:cached])

    assert chat(SYSTEM, "def main():")[2] == ""
    _, said, found = chat(SYSTEM, "class Reader:")
    assert found == f"[system]\n{SYSTEM}<|end|>\n[user]\n"
    asked = f"{found}class Reader:<|end|>\n[assistant]\n"
    if family == "gemma3_text":  # whose windows can be cut back as long as they have not moved
        return
    for answered in ("x = 1", "y = 2"):  # answers that were changed
        assert chat(SYSTEM, "class Reader:")[2] == asked
        _, _, found = chat(SYSTEM, "class Reader:", answered, "def more():")
        assert found == asked
    ids, _, found = chat(SYSTEM, "class Reader:", said, "def more():")  # its own
    assert found.startswith(f"[system]\n{SYSTEM}")  # what it wrote may be read as other tokens, also the first
    assert tokenizer.decode(ids).startswith(found)


def test_states_that_are_kept_stay_under_their_bound(tokenizer):
    """And two that begin with the same prompt at once write the same, whatever was kept of it."""
    tokenizer.chat_template = THINKS
    model = lookahead.wrap(tiny_model("lfm2", vocab_size=len(tokenizer), max_position_embeddings=1024), CONFIG)
    for most in (0, 1, 30_000, 2**30):
        of, texts = generations(model, tokenizer, most), set()
        for number in range(6):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number // 3}"}]
            asked, wishes = read_request({"messages": messages}, CHAT, "demo", 4096, of._reader.reserved)
            (prompt,) = of._reader.read(asked, wishes)
            two, _ = answer(of, prompt, 12, 2, settings={"do_sample": False})
            at_once, _ = answer(of, prompt, 12, others=[prompt, prompt], settings={"do_sample": False})
            assert len({*two, *at_once}) == 1
            texts.add((number // 3, two[0]))
            assert of._prefixes.bytes == sum(bytes_of(kept.cache) for kept in of._prefixes._kept) <= most
        assert len(texts) == 2


def test_answers_to_one_prompt_follow_from_seeds_that_follow_each_other(demo, tokenizer):
    model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval(), CONFIG)
    of, ids = generations(model, tokenizer, 2**30, parallel=3), tokenizer("def read_lines(path):\n" * 3).input_ids
    answer(of, ids, 4)
    three, cached = answer(of, ids, 20, 3, seed=5, settings={"do_sample": True})
    assert cached == [len(ids) - 1] * 3
    for number, text in enumerate(three):
        torch.manual_seed(5 + number)
        wanted = demo.generate(torch.tensor([ids]), do_sample=True, max_new_tokens=20)[0, len(ids) :]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert len(set(three)) == 3


def test_digests_pass_over_what_no_text_depends_on():
    call = {"id": "a", "function": {"name": "f", "arguments": {"a": 1}}}
    of = [{"role": "assistant", "content": " x\n", "tool_calls": [call]}]
    same = [{"role": "assistant", "content": "x", "tool_calls": [json.loads(json.dumps(call)) | {"id": "b"}]}]
    assert list(digests(of)) == list(digests(same)) != list(digests([*same, *same]))[1:]
