"""`lookahead serve`: a server process and OpenAI's client. tests/server/test_messages.py has Anthropic's."""

import asyncio
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import openai
import pytest
import serving as script
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from server_process import ENVIRONMENT, ROOT, SERVE, ask, connect, running
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from lookahead import DEMO_MODEL, NgramPool
from lookahead.stats import Stats
from lookahead.streaming import UNDECODED
from lookahead.tools.cli import main
from lookahead.tools.server import make_app
from lookahead.tools.server.answering import Pieces, Probabilities, Stop, Words, Writer, _top_k
from lookahead.tools.server.app import Server
from lookahead.tools.server.metrics import Metrics, exposition
from lookahead.tools.server.parsing import REASONING, TEXT, Parser
from lookahead.tools.server.prefixes import Prefixes

MODEL = "demo_model"  # the packaged one
PROMPTS = ["def read_lines(path):\n", "import os\n\n\nclass Reader:\n", "for i in range("]
LENGTH = 24


@pytest.fixture(scope="module")
def address():
    with running(*SERVE) as address:
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def parser(tokenizer, *of_answer):
    return Parser(tokenizer, tokenizer.all_special_tokens, *of_answer)


@pytest.fixture(scope="module")
def expected(plain, tokenizer):
    """What ``model.generate`` writes."""

    @cache
    def text(prompt: str, seed: int | None, most: int = LENGTH, **options) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        options |= {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
        if seed is not None:
            torch.manual_seed(seed)
        ids = plain.generate(**inputs, **options, max_new_tokens=most)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(ids, skip_special_tokens=True)

    return text


def complete(client, prompt: str, seed: int | None = None, stream: bool = False, most: int = LENGTH, **options) -> str:
    options |= {"temperature": 0} if seed is None else {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=most, stream=stream, **options)
    return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text


def metrics(address: str) -> dict[str, float]:
    """Every sample of /metrics. Fails for a line that Prometheus could not read."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples, families = {}, set()
    for line in lines:
        if found := re.fullmatch(r"# TYPE (lookahead_[a-z_]+) (counter|gauge|histogram)", line):
            families |= {found[1], *(f"{found[1]}{end}" for end in ("_bucket", "_sum", "_count"))}
        elif not re.fullmatch(r"# HELP lookahead_[a-z_]+ .+", line):
            found = re.fullmatch(r'((lookahead_[a-z_]+)(?:\{[a-z]+="[^"\\]+"(?:,[a-z]+="[^"\\]+")*\})?) (\S+)', line)
            assert found, line
            assert found[2] in families, line
            samples[found[1]] = float(found[3])
    return samples


def idle(address: str, within: float = 10.0) -> bool:
    """Whether no request is under way soon."""
    end = time.monotonic() + within
    while metrics(address)["lookahead_requests_running"]:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_is_not_read_again(address, client, expected, tokenizer, stream):
    """What was written is found again where the tokenizer gives the same tokens, and an answer says how much was."""
    before = metrics(address)
    prompt = f"# a history of its own: {stream}\nclass Node:\n    def __init__(self, value):\n"
    for turn in range(3):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=LENGTH, temperature=0, stream=stream)
        chunks = list(answer) if stream else [answer]
        text, usage = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage
        assert text == expected(prompt, None)
        assert usage.prompt_tokens == tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1]
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= usage.prompt_tokens // 2 if turn else cached <= usage.prompt_tokens // 2
        prompt += text + "\n    def next(self):\n"
    assert metrics(address)["lookahead_cached_tokens_total"] > before["lookahead_cached_tokens_total"]
    assert 0 < metrics(address)["lookahead_cache_bytes"] <= 2**30
    status, response = ask(address, "/v1/responses", model=MODEL, input=prompt, max_output_tokens=4)
    assert status == 200
    assert response["usage"]["input_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 2**63])
def test_completions_are_those_of_generate(client, expected, seed, stream):
    for prompt in PROMPTS:
        assert complete(client, prompt, seed, stream) == expected(prompt, seed)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client, expected, stream):
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def main():"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=LENGTH, temperature=0.9, top_p=0.95, seed=6, stream=stream
    )
    if stream:
        chunks = list(answer)
        text, choice = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0]
        usage = chunks[-1].usage
        assert len(chunks) > LENGTH // 4  # it comes in pieces
    else:
        choice, usage = answer.choices[0], answer.usage
        text = choice.message.content
        assert "logprobs" in choice.model_fields_set  # OpenAI's schema wants both, even if they are null
        assert "refusal" in choice.message.model_fields_set
    assert text == expected("import os\ndef main():\n", 6)
    assert choice.finish_reason == "length"
    assert usage.completion_tokens == LENGTH
    assert usage.total_tokens == LENGTH + usage.prompt_tokens


def test_several_clients_at_once(client, expected):
    """Each gets the text of its own seed, though the others' requests arrive in the middle of its own."""
    wanted = [(prompt, seed) for prompt in PROMPTS for seed in (None, 1, 2, 3)]
    with ThreadPoolExecutor(len(wanted)) as threads:
        texts = threads.map(
            lambda number: complete(client, *wanted[number], stream=bool(number % 2)), range(len(wanted))
        )
        for one, text in zip(wanted, texts, strict=True):
            assert text == expected(*one)


@pytest.mark.long
@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_makes_guesses_and_changes_no_text(address, client, expected, parts):
    """Its text begins otherwise than the answer, which the client cannot know, and goes on as it does."""
    prompt, key = PROMPTS[parts], 'lookahead_source_accepted_guesses_total{source="RetrievalSource"}'
    before = metrics(address).get(key, 0)
    for seed in (5, 6):
        text = "# of before\n" + expected(prompt, seed, 80)
        content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if parts else text
        extra = {"prediction": {"type": "content", "content": content}}
        assert complete(client, prompt, seed, most=80, extra_body=extra) == expected(prompt, seed, 80)
    assert metrics(address)[key] - before > 20


def test_the_seed_of_a_response_is_its_own(client):
    def respond(seed: int) -> str:
        body = {
            "model": MODEL,
            "input": "x = 1",
            "stream": False,
            "max_output_tokens": 30,
            "temperature": 1.5,
            "seed": seed,
        }
        return client.post("/responses", body=body, cast_to=object)["output"][0]["content"][0]["text"]

    texts = [respond(seed) for seed in (7, 8, 7)]
    assert texts[0] == texts[2] != texts[1]


def test_a_seed_is_the_requests_own(client):
    """What is drawn without a seed does not follow from the seed of the request before."""
    free = []
    for _ in range(2):
        complete(client, PROMPTS[0], seed=7)
        answer = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=LENGTH, temperature=1.5)
        free.append(answer.choices[0].text)
    assert free[0] != free[1]  # two random texts agree by a chance of 10^-20


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, expected, tokenizer, stream):
    """The text ends before the first of them, and the token that completes it is the last."""
    whole = expected(PROMPTS[0], 4, 60)
    for begin, end in ((0, 2), (20, 22), (31, 40), (50, 51)):
        stops = [whole[begin:end], "never written"]
        wanted = whole[: whole.find(stops[0])]
        assert complete(client, PROMPTS[0], 4, stream, most=60, stop=stops) == wanted
        answer = client.completions.create(
            model=MODEL, prompt=PROMPTS[0], max_tokens=60, temperature=0.9, top_p=0.95, seed=4, stop=stops
        )
        assert answer.choices[0].finish_reason == "stop"
        count = answer.usage.completion_tokens
        assert stops[0] not in expected(PROMPTS[0], 4, count - 1) if count > 1 else wanted == ""
        assert stops[0] in expected(PROMPTS[0], 4, count)


def test_a_stop_string_does_not_begin_in_the_prompt(client, expected):
    prompt, seed = "import os\ndef main():\n", 6
    text = expected(prompt, seed)
    assert text.startswith("\ndef")
    assert "\n\ndef" not in text
    assert complete(client, prompt, seed, stop="\n\ndef") == text


@pytest.mark.parametrize("text", ["a😀é", "é" * 20 + "한"])
def test_half_a_character_is_no_stop_string(tokenizer, text):
    """It is decoded as U+FFFD until the rest comes, or where its beginning is too far back to be looked at."""
    ids, more = (tokenizer(one, add_special_tokens=False).input_ids for one in (text, "b"))
    assert len(ids) > len(text)
    stop, cut = Stop(tokenizer, 0, (UNDECODED,), GenerationConfig()), Pieces((UNDECODED,))
    assert not any(stop.ends(ids[:end]) for end in range(1, len(ids) + 1))
    assert stop.ends([*ids[:-1], *more])  # nothing will ever make a character of it
    assert [*cut.feed(TEXT, f"a{UNDECODED}"), *cut.release()] == [(TEXT, "a")]
    assert cut.stop is None
    assert [*cut.feed(TEXT, f"a{UNDECODED}"), *cut.feed(TEXT, "b")] == [(TEXT, "a")]
    assert cut.stop == UNDECODED


texts = st.text("ab", max_size=4)


@given(st.lists(texts, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_pieces_up_to_a_stop_string(pieces, stops):
    cut = Pieces(tuple(stops))
    handed = [text for piece in pieces for _, text in cut.feed(TEXT, piece)]
    handed += [text for _, text in cut.release()]
    seen = ""
    for piece in pieces:  # it ends with the piece that completes a stop string, though a longer one may begin earlier
        seen += piece
        if any(stop in seen for stop in stops):
            break
    assert "".join(handed) == min((seen.split(stop)[0] for stop in stops), key=len, default=seen)
    assert "" not in handed
    assert cut.stop in stops if any(stop in seen for stop in stops) else cut.stop is None


@given(st.lists(texts, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_a_piece_is_held_back_for_a_stop_string_alone(pieces, stops):
    cut, seen, handed = Pieces(tuple(stops)), "", ""
    for piece in pieces:
        seen += piece
        handed += "".join(text for _, text in cut.feed(TEXT, piece))
        if any(stop in seen for stop in stops):
            break
        held = seen[len(handed) :]
        assert seen.startswith(handed)
        assert not held or any(stop.startswith(held) for stop in stops)


def told(tokenizer, steps: list[list[int]], stops: tuple[str, ...], parser: Parser | None = None) -> list[Words]:
    """Return the pieces of an answer that steps write, with the probabilities of their tokens."""
    pieces, all_ids = [], torch.zeros(1, 1, dtype=torch.long)
    probabilities = Probabilities(tokenizer, 1, 0)
    writer = Writer(tokenizer, parser, stops, probabilities, pieces.append)
    writer.put(all_ids)
    writer.begin([], Stats())
    for step in steps:
        for token in step:
            probabilities(all_ids, torch.zeros(1, len(tokenizer)))
            writer.put(torch.tensor([token]))
            all_ids = torch.cat([all_ids, torch.tensor([[token]])], 1)
        writer.record(0, None, None, [], [])
    writer.end()
    return pieces


@given(st.text("ab \n\u00e9\U0001f389", max_size=8), st.booleans(), st.randoms())
def test_probabilities_do_not_depend_on_the_steps(tokenizer, text, ends, random):
    """How many tokens a step writes depends on guesses."""
    ids = tokenizer(text).input_ids + [tokenizer.eos_token_id] * ends
    cuts = sorted(random.sample(range(len(ids) + 1), random.randint(0, len(ids))))
    steps = [ids[at:end] for at, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces = told(tokenizer, steps, ("\n\n",))
    assert pieces == told(tokenizer, [[token] for token in ids], ("\n\n",))
    offsets = [each.offset for piece in pieces for each in piece.likelihoods]
    whole = [tokenizer.decode(ids[:at], skip_special_tokens=True).rstrip("\ufffd") for at in range(len(offsets))]
    assert offsets == list(map(len, whole))  # also in the middle of a character


ENDS_CONTENT = {"defaults": {}, "start_anchor": "~", "fields": {"content": {"content": "text", "close": "<|end|>"}}}


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "aab", " ", "\n", "\u00e9", "\U0001f389"]), max_size=8).map("".join),
    st.lists(st.text("ab \u00e9\U0001f389", min_size=1, max_size=4), max_size=2),
    st.booleans(),
)
def test_only_tokens_whose_text_is_sent_have_probabilities(tokenizer, text, stops, is_parsed):
    """Not those of a stop string, of blanks that are left out, or of the end. Their bytes make the text."""
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    parser = Parser(tokenizer, tokenizer.all_special_tokens, ENDS_CONTENT, "~", None) if is_parsed else None
    sent, written = "", []
    for piece in told(tokenizer, [[token] for token in ids], tuple(stops), parser):
        sent += piece.text
        written += [each.bytes for each in piece.likelihoods]
        everything, last, sent_bytes = b"".join(written), written[-1] if written else b"", sent.encode()
        if is_parsed:  # blanks at the beginning are left out, but a token may hold some and more
            assert written[0].strip()
            everything = everything.lstrip()
        assert everything.startswith(sent_bytes), (everything, sent_bytes)
        assert len(everything) - len(last) < len(sent_bytes), (written, sent)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([
            "<think>", "</think>", "a", "bb", " ", "\n", "\u00e9", "<", '<tool>{"name": "f", "arguments": {}}</tool>',
            "<tool>no call</tool>",
        ]), max_size=8,
    ),
    st.booleans(), st.randoms(),
)  # fmt: skip
def test_tokens_of_marks_and_calls_have_no_probabilities(tokenizer, written, begun, random):
    """Those of a text are its own, and those of reasoning stand with it, however many tokens a step writes."""
    ids = [token for text in written for token in tokenizer(text, add_special_tokens=False).input_ids]
    cuts = sorted(random.sample(range(len(ids) + 1), random.randint(0, len(ids))))
    steps = [ids[at:end] for at, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    prompt = "~<think>" if begun else "~"
    pieces = told(tokenizer, steps, (), parser(tokenizer, THINKING, prompt, None))
    assert pieces == told(
        tokenizer,
        [[token] for token in ids],
        (),
        parser(tokenizer, THINKING, prompt, None),
    )
    for kind in (TEXT, REASONING):
        of_kind = [piece for piece in pieces if isinstance(piece, Words) and piece.kind == kind]
        sent = "".join(piece.text for piece in of_kind)
        own = b"".join(each.bytes for piece in of_kind for each in piece.likelihoods).decode()
        assert "".join(own.split()) == "".join(sent.split()), (sent, own)


def test_tokens_are_named_by_what_they_add_to_a_text():
    """Words of such tokenizers begin with a space that decoders drop at the beginning; other bytes are tokens."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581there", "\ufffd"]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core)
    parts = [f"<0x{byte:02X}>" for byte in "\u6f22".encode()]
    ids = [names.index(name) for name in ("a", "\u2581there", *parts, "\ufffd")]
    found = [each for piece in told(fast, [[token] for token in ids], ()) for each in piece.likelihoods]
    assert [each.token for each in found] == ["a", " there", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]
    assert b"".join(each.bytes for each in found) == "a there\u6f22\ufffd".encode()


@given(st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.5, 3.0]), min_size=1, max_size=30), st.integers(0, 30))
def test_the_likeliest_are_those_of_a_stable_sort(row, count):
    row, count = np.array(row, np.float32), min(count, len(row))
    assert _top_k(row, count) == np.argsort(-row, kind="stable")[:count].tolist()


def test_events_of_a_response_are_named(address):
    """Clients may read the name of an event in the place of its type."""
    with contextlib.closing(connect(address)) as connection:
        body = {"input": "x", "max_output_tokens": 2, "stream": True}
        connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json"})
        for event in filter(None, connection.getresponse().read().decode().split("\n\n")):
            name, data = event.split("\n")
            assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_reasoning_and_answer_are_kept_apart():
    cut = Pieces(("stop",))
    handed = [part for piece in ((REASONING, "think s"), (TEXT, "st"), (TEXT, "ay")) for part in cut.feed(*piece)]
    assert [*handed, *cut.release()] == [(REASONING, "think "), (REASONING, "s"), (TEXT, "stay")]


@pytest.mark.parametrize("way", ["stream", "whole", "waiting"])
def test_a_cancelled_request_ends(address, client, way):
    """A client that goes takes its request along, whether it is decoded or waits. Its 900 tokens take seconds."""
    before, options = metrics(address), {"temperature": 1.5, "seed": 1}
    impatient = client.with_options(timeout=0.5)
    if way == "stream":
        stream = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=900, stream=True, **options)
        for _ in range(3):
            next(stream)
        stream.close()
    else:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(3 if way == "waiting" else 1):
                threads.submit(impatient.completions.create, model=MODEL, prompt=PROMPTS[0], max_tokens=900, **options)
    assert idle(address)
    assert complete(client, PROMPTS[0]) == complete(client, PROMPTS[0], stream=True)
    after = metrics(address)
    key = 'lookahead_requests_total{path="/v1/completions",status="cancelled"}'
    requests = 3 if way == "waiting" else 1
    assert after[key] - before.get(key, 0) == requests
    assert after["lookahead_tokens_total"] - before["lookahead_tokens_total"] < 850 * requests


MESSAGES = [{"role": "user", "content": "def main():"}]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"content": "no role"}]}, "a message must be an object with a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "tokens > 1023 maximum"),
        ({"max_tokens": 0}, "max_tokens must be a whole number above 0; it is 0"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens must be a whole number above 0; it is 2.5"),
        ({"temperature": -1}, "temperature must be a number from 0 on, .*; it is -1"),
        ({"temperature": "hot"}, 'temperature must be a number from 0 on, .*; it is "hot"'),
        ({"top_p": 0}, "top_p must be a number above 0, up to 1; it is 0"),
        ({"seed": True}, "seed must be a whole number of 64 bits; it is true"),
        ({"stop": ["a", ""]}, "stop must be a text that is not empty, or a list of such texts"),
        ({"stream": 1}, "stream must be true or false; it is 1"),
        ({"n": 0}, "n must be a whole number from 1 to 16; it is 0"),
        ({"top_logprobs": 2}, "top_logprobs must be left out where logprobs is not true"),
        ({"presence_penalty": 3}, "presence_penalty must be a number from -2 to 2; it is 3"),
        ({"response_format": {"type": "xml"}}, "response_format must be of type text"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be an object of token ids and numbers"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias must have 1024 tokens at most"),
        ({"typical_p": 0.1}, "typical_p is not served: give it in generation_config"),
        ({"generation_config": "nonsense"}, "generation_config must be an object, or its JSON text"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_say_what_is_wrong(client, changed, says, stream):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": stream} | changed
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.body.keys() >= {"message", "type"}
    assert re.search(says, caught.value.body["message"]), caught.value.body


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_another_model_is_not_found(client, path, stream):
    prompt = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}
    with pytest.raises(openai.NotFoundError) as caught:
        client.post(f"/{path}", body=prompt[path] | {"model": "other", "stream": stream}, cast_to=object)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    says = "model must be 'demo_model', the only one of this server; it is 'other'"
    assert caught.value.body["message"] == says


def test_errors_of_other_requests(address, client):
    for prompt, says in (("", "the prompt is empty: give 1 to"), ([0.5], "prompt must be a string")):
        with pytest.raises(openai.BadRequestError, match=says):
            client.completions.create(model=MODEL, prompt=prompt)
    with pytest.raises(openai.NotFoundError, match="nothing is served at /v1/nowhere: requests go to /v1/chat/"):
        client.post("/nowhere", body={}, cast_to=object)
    for body, says in (
        (b"[1]", "the body must be a JSON object"),
        (b'{"prompt": "x",\n"n" 2}', "the body must be a JSON object: Expecting ':' delimiter: line 2 column 5"),
        (b'{"seed": %s}' % (b"9" * 5000), "the body must be a JSON object: Exceeds the limit"),
    ):
        bad = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(bad, timeout=30)
        assert json.load(caught.value)["error"]["message"].startswith(says)


FAILING = f"""if True:
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    from lookahead.tools.server import make_app

    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 9:
                raise FloatingPointError("no numbers")
            return scores

    model = AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval()
    generate = model.generate
    model.generate = lambda **options: generate(**options, logits_processor=LogitsProcessorList([Failing()]))
    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = "{{{{ messages[0].content }}}}"
    uvicorn.run(make_app(model, tokenizer, "failing"), port=0)
"""


def test_an_error_in_the_middle_leaves_the_server_usable():
    says = "FloatingPointError: no numbers"
    with running("-c", FAILING) as address:
        body = {"prompt": "x = 1", "max_tokens": 20}
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="failing", stream=True, **body)
            with pytest.raises(openai.APIError, match=says):
                list(stream)
            asked = {"model": "failing", "input": "x = 1", "max_output_tokens": 20}
            events = list(client.responses.create(**asked, stream=True))
            with pytest.raises(openai.InternalServerError, match=says):
                client.responses.create(**asked)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        first, *_, last = events
        assert (last.type, last.response.status, last.response.id) == ("response.failed", "failed", first.response.id)
        assert (last.response.error.code, last.response.error.message) == ("server_error", says)
        status, answer = ask(address, "/v1/completions", **body)
        assert (status, answer["error"]["message"], answer["error"]["type"]) == (500, says, "server_error")
        assert ask(address, "/v1/completions", **body | {"max_tokens": 2})[0] == 200


BUSY = f"""if True:
    import time, uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    from lookahead.tools.server import generations, make_app

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.1)
            return scores

    model = AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval()
    generate = model.generate
    model.generate = lambda **options: generate(**options, logits_processor=LogitsProcessorList([Slow()]))
    generations.MOST_WAITING = 1
    uvicorn.run(make_app(model, AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r}), "busy"), port=0)
"""


def test_a_request_too_many_is_refused_until_others_have_ended():
    with running("-c", BUSY) as address, ThreadPoolExecutor(2) as threads:
        body = {"prompt": "x = 1", "max_tokens": 15}
        two = [threads.submit(ask, address, "/v1/completions", **body) for _ in range(2)]
        time.sleep(0.5)
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (429, "1")
        assert "2 requests are being served" in json.load(caught.value)["error"]["message"]
        assert [one.result()[0] for one in two] == [200, 200]
        assert ask(address, "/v1/completions", **body)[0] == 200


WRITING = f"""if True:
    import json, sys, uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    from lookahead.tools.server import make_app

    class Writing(LogitsProcessor):
        def __call__(self, input_ids, scores):  # the prompt is what is written, and a line break
            length = (input_ids[0] == end).nonzero()[0, 0] + 1
            place = input_ids.shape[1] - length
            scores[:, input_ids[0, place] if place < length - 1 else tokenizer.eos_token_id] += 1000
            return scores

    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = "{{{{ messages[0].content }}}}~{{% if tools %}}x{{% endif %}}"
    tokenizer.response_template = json.loads(sys.argv[1])
    end = tokenizer("~").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval()
    generate = model.generate
    model.generate = lambda **options: generate(**options, logits_processor=LogitsProcessorList([Writing()]))
    uvicorn.run(make_app(model, tokenizer, "writing"), port=0)
"""
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "~",
    "fields": {
        "tool_calls": {"open": "<tool>", "close": "</tool>", "repeats": True, "content": "json",
                       "transform": {"type": "function", "function": "{content}"}},
        "content": {"content": "text", "close": "<|end|>"},
    },
}  # fmt: skip


def test_a_call_that_cannot_be_read_is_text():
    """A model may write anything, and its answer may be cut anywhere."""
    good = '<tool>{"name": "f", "arguments": {"a": 1}}</tool>'
    with (
        running("-c", WRITING, json.dumps(TEMPLATE)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for text in (
            "plain", f"See {good}", f"See {good[:20]}", "See <tool>nonsense</tool>", '<tool>{"name": 5}</tool>',
            "<tool>[1]</tool>", "<tool>", f"{good}<tool>",
        ):  # fmt: skip
            options = {"model": "writing", "messages": [{"role": "user", "content": text}], "temperature": 0}
            whole = client.chat.completions.create(**options).choices[0].message
            deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
            streamed = "".join(delta.content or "" for delta in deltas)
            calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
            if text.startswith("See") and good in text:
                assert ((whole.content or "").strip(), streamed.strip()) == ("See", "See")
                assert [call.function.name for call in whole.tool_calls] == [call.name for call in calls] == ["f"]
            elif good not in text:
                shown = text.rstrip()
                assert (whole.content, streamed, whole.tool_calls, calls) == (shown, shown, None, [])
        options |= {"messages": [{"role": "user", "content": f"See {good}"}], "max_tokens": 12}
        for streams in (False, True):  # what the length has cut of a call is in neither
            found = client.chat.completions.create(**options, stream=streams)
            said = [each.choices[0] for each in (found if streams else [found])]
            parts = [one.delta if streams else one.message for one in said]
            assert ("".join(part.content or "" for part in parts), said[-1].finish_reason) == ("See", "length")
            assert not any(part.tool_calls for part in parts)


THINKING = TEMPLATE | {
    "fields": {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}, **TEMPLATE["fields"]}
}


@given(st.randoms())
def test_tokens_behind_the_call_that_ends_an_answer_do_not_count(tokenizer, random):
    """A step may have written some of them."""
    call = '<tool>{"name": "f", "arguments": {}}</tool>'
    ids = tokenizer(f"see {call} and {call} more").input_ids
    cuts = sorted(random.sample(range(len(ids) + 1), 4))
    writer = Writer(
        tokenizer,
        parser(tokenizer, TEMPLATE, "~", None),
        (),
        None,
        lambda piece: None,
        lambda: None,
    )
    writer.put(torch.zeros(1, 1, dtype=torch.long))
    writer.begin([], Stats())
    for at, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        writer.put(torch.tensor(ids[at:end]))
        writer.record(0, None, None, [], [])
    writer.end()
    assert tokenizer.decode(ids[: writer.count]).strip() == f"see {call}"


@pytest.fixture(scope="module")
def thinking():
    """A client of a server whose model thinks aloud."""
    with (
        running("-c", WRITING, json.dumps(THINKING)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("most", [6, 14, 200])
def test_the_part_of_a_response_that_its_length_has_cut_is_incomplete(thinking, most):
    """What has ended before is not. The cut falls into the reasoning, into the message after it, or nowhere."""
    options = {"model": "writing", "max_output_tokens": most, "temperature": 0}
    options["input"] = "<think>ab</think>return x, y, z, 1, 2, 3, 4"
    whole = thinking.responses.create(**options)
    events = list(thinking.responses.create(**options, stream=True))
    told = {6: ("incomplete", "incomplete"), 14: ("completed", "incomplete"), 200: ("completed", "completed")}[most]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    for items in (done, events[-1].response.output, *([whole.output] if len(whole.output) > 1 else [])):
        assert [(item.type, item.status) for item in items] == [("reasoning", told[0]), ("message", told[1])], items
    assert whole.status == events[-1].response.status == told[1]
    assert whole.output[-1].status == told[1]


def test_token_biases(client):
    """Whole numbers too, as OpenAI's clients send them."""
    banned = {str(token): -100 for token in range(0, 400)}
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=LENGTH, temperature=0, logit_bias=bias
        ).choices[0].message.content
        for bias in ({}, banned)
    ]  # fmt: skip
    assert answers[0] != answers[1]


def test_the_list_of_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "lookahead")


def test_an_answer_ends_with_the_context(client):
    answer = client.completions.create(model=MODEL, prompt="word " * 500, max_tokens=500, temperature=0)
    assert answer.usage.total_tokens <= 1024
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_ends_with_done(address):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_metrics(address, client):
    before = metrics(address)
    for _ in range(2):
        complete(client, PROMPTS[0], most=40)
    after = metrics(address)

    def more(name: str) -> float:
        return after[f"lookahead_{name}"] - before.get(f"lookahead_{name}", 0)

    assert more('requests_total{path="/v1/completions",status="200"}') == 2
    assert more("tokens_total") == 80
    assert 10 <= more("steps_total") < 60  # one pool: the second text is known
    assert after["lookahead_tokens_per_step"] > 1
    accepted = sum(more(name[10:]) for name in after if name.startswith("lookahead_accepted_guesses_total"))
    assert accepted == more("tokens_total") - more("steps_total") - 2  # each prompt yields a token, and each step
    assert more('source_accepted_guesses_total{source="PoolSource"}') > 0
    assert more('source_proposed_guesses_total{source="PoolSource"}') <= more("guesses_total")


def test_what_is_missing_is_named(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("lookahead.tools.server")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = CliRunner().invoke(main, ["serve", "--port", "0"])
    assert done.exit_code == 2
    assert "pip install starlette uvicorn llguidance" in done.stderr


def test_a_model_that_is_not_wrapped(plain, tokenizer):
    """It is served as it decodes; there is nothing to count but requests and their prompts."""
    paths = {route.path for route in make_app(plain, tokenizer, "plain").routes}
    assert {"/metrics", "/v1/completions"} <= paths
    metrics = Metrics()
    metrics.requests["/v1/completions", "200"] = 3
    names = re.findall(r"^# TYPE lookahead_(\w+)", exposition(None, metrics, Prefixes(plain, 0)), re.M)
    of_requests = ["requests_total", "requests_running", "first_text_seconds", "request_seconds"]
    lengths = ["prompt_length", "answer_length", "prompt_tokens_total", "cached_tokens_total", "cache_bytes"]
    assert names == of_requests + lengths


def test_nothing_of_transformers_own_server_is_used():
    """Its classes are not documented, and change."""
    code = "import sys, lookahead.tools.server; print([name for name in sys.modules if 'transformers.cli' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "[]\n"


def test_the_page(address, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/serve.md").read_text(encoding="utf-8"), re.S)
    exec(example.replace("http://localhost:8000", address).replace("path/or/name", MODEL), {})
    assert len(capsys.readouterr().out) > 20


def test_the_comparison_of_servers(address, monkeypatch, tmp_path):
    @contextlib.contextmanager
    def already_running(server, **settings):
        assert (server, settings["model"]) == ("lookahead", MODEL)
        yield address

    monkeypatch.setattr(script, "running", already_running)
    done = CliRunner().invoke(script.main, [
        "--model", MODEL, "--prompts", str(ROOT / "benchmarks/prompts.jsonl"), "--limit", "3", "--max-new-tokens", "8",
        "--servers", "lookahead", "--clients", "1,2", "--temperatures", "0,0.5", "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out.json").read_text())["table"]
    assert [(row["clients"], row["temperature"], row["times_the_first"]) for row in rows] == [
        (1, 0, 1), (2, 0, 1), (1, 0.5, 1), (2, 0.5, 1),
    ]  # fmt: skip
    for row in rows:
        assert 3 <= row["tokens"] <= 24
        assert 0 < row["first_token"] <= row["answer"] < 1000
        assert row["tokens_per_step"] >= 1
    assert (tmp_path / "out.md").read_text().count("| lookahead |") == 4


def test_the_example_keeps_its_pool(tmp_path):
    path = tmp_path / "answers.pool"
    with running(str(ROOT / "examples/server.py"), "--port", "0", "--pool", str(path), stop=signal.SIGTERM) as address:
        body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
    assert len(NgramPool.load(path)) > 0


def test_a_prompt_that_is_cancelled_while_it_waits_leaves_the_reader_alive(plain, tokenizer):
    server = Server(plain, tokenizer, "plain", None, 0, 1, None)
    go_on = threading.Event()

    async def read():
        first = asyncio.ensure_future(server.by(server.reading, lambda: go_on.wait(60)))
        second = asyncio.ensure_future(server.by(server.reading, lambda: seen.append(2)))
        third = asyncio.ensure_future(server.by(server.reading, lambda: 1 / 0))
        await asyncio.sleep(0.1)
        second.cancel()
        go_on.set()
        with pytest.raises(ZeroDivisionError):
            await third
        return await first, await server.by(server.reading, lambda: 4)

    seen = []
    assert asyncio.run(read()) == (True, 4)
    assert seen == []
    assert server.generations.open == 0


def test_what_a_failed_step_has_written_is_sent(tokenizer):
    """However many tokens that are: they depend on guesses, and so on what else is decoded."""
    pieces = []
    writer = Writer(tokenizer, None, (), None, pieces.append)
    ids = tokenizer("import os and more", add_special_tokens=False).input_ids
    writer.put(torch.tensor([[1, 2]]))  # the prompt
    writer.put(torch.tensor([ids[0]]))
    writer.begin([], Stats())
    for token in ids[1:]:
        writer.put(torch.tensor([token]))
    before = "".join(piece.text for piece in pieces)
    writer.flush()
    assert before != "".join(piece.text for piece in pieces) == "import os and more"
