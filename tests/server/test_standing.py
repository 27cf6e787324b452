"""The server stands: clients that stall, go, come in crowds or read slowly; signals in the middle; failing models."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import endure_server
import pytest
from click.testing import CliRunner
from server_process import ENVIRONMENT, FIXED, SERVE, ask, connect, running
from test_hostile_requests import half_sent, unread
from test_messages import events
from test_server import idle
from test_turns import answer, generations
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig
from lookahead.tools.server import app, arriving
from lookahead.tools.server.answering import End, Likelihood, Words
from lookahead.tools.server.app import Exchange, Server
from lookahead.tools.server.arriving import Bodies
from lookahead.tools.server.chats import Completion
from lookahead.tools.server.fields import Asked, Wishes
from lookahead.tools.server.generations import MOST_ANSWERS, MOST_WAITING, BusyError
from lookahead.tools.server.leaving import Gathered
from lookahead.tools.server.metrics import Metrics
from lookahead.tools.server.parsing import TEXT
from lookahead.tools.server.reading import Prompt

FIXED_GUESSES = LookaheadConfig(budget=6, window_size=2, ngram_size=3)
COMPLETION, CHAT, MESSAGE, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def address():
    with running(*SERVE) as address:
        yield address


def test_two_hundred_that_stall_hold_up_nobody(address):
    """Half of them in the middle of a body, half before any of it; and twenty that read nothing of their answers."""
    with contextlib.ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(contextlib.closing(half_sent(address)))
            clients.enter_context(contextlib.closing(connect(address))).connect()
        for _ in range(20):
            clients.enter_context(contextlib.closing(unread(address, 20)))
        began = time.monotonic()
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        assert time.monotonic() - began < 30
    assert idle(address, 30)


def test_a_crowd_of_which_a_third_goes(address):
    """The others get the text that they would get alone, and nothing is left of those who have gone."""
    prompts = [f"def f{number % 5}(x):\n" for number in range(50)]
    body = {"max_tokens": 16, "temperature": 0}
    alone = {prompt: ask(address, COMPLETION, prompt=prompt, **body)[1]["choices"][0]["text"] for prompt in prompts[:5]}

    def one(number: int) -> str | None:
        with contextlib.closing(connect(address)) as connection:
            sent = json.dumps(body | {"prompt": prompts[number], "stream": number % 2 == 0})
            connection.request("POST", COMPLETION, sent, {"Content-Type": "application/json"})
            if number % 3 == 0:
                time.sleep(number / 100)
                return None
            said = connection.getresponse().read().decode()
        found = [json.loads(line[6:]) for line in said.split("\n") if line.startswith("data: {")] or [json.loads(said)]
        return "".join(each["choices"][0]["text"] for each in found)

    with ThreadPoolExecutor(50) as threads:
        texts = list(threads.map(one, range(50)))
    assert [text for text in texts if text is not None] == [
        alone[prompts[number]] for number in range(50) if number % 3
    ]
    assert idle(address)


def test_the_bodies_that_are_held_are_bounded():
    code = SLOW.replace("uvicorn.run", "app.MOST_OPEN = 1\n    uvicorn.run")
    with running("-c", code) as address, ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, address, COMPLETION, prompt="x", max_tokens=15)
        time.sleep(0.5)
        status, answered = ask(address, MESSAGE, prompt="x")
        assert (status, answered["error"]["type"]) == (429, "rate_limit_error")
        assert "1 requests are open" in answered["error"]["message"]
        assert first.result()[0] == 200
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


def of_app(code: str) -> tuple[str, str]:
    """Return the arguments of Python for a server of other limits."""
    modules = "app, arriving, generations, leaving"
    return "-c", f"from lookahead.tools.server import {modules}; {code}; from lookahead.tools.cli import main; main()"


COMMAND = ("serve", "--port", "0", *FIXED)
LARGE = (*COMMAND, "--max-body", "4000000")


def status_of(client: socket.socket) -> int:
    """Return the status of the answer to a request, and see the connection end."""
    client.settimeout(30)
    said = b""
    with contextlib.suppress(ConnectionResetError):  # so it ends where something was sent after the answer
        while piece := client.recv(4096):
            said += piece
    return int(said.split()[1])


def test_a_body_that_stalls_or_takes_long_is_given_up():
    code = "arriving.STALL = 0.5; arriving.PATIENCE = 1.5"
    with running(*of_app(code), *COMMAND) as address:
        with contextlib.closing(half_sent(address)) as stalled, contextlib.closing(half_sent(address)) as slow:
            began = time.monotonic()
            with ThreadPoolExecutor(2) as threads:
                stops, goes_on = threads.submit(status_of, stalled), threads.submit(status_of, slow)
                while not goes_on.done():
                    with contextlib.suppress(OSError):  # it has been closed
                        slow.sendall(b" ")
                    time.sleep(0.1)
                    if stops.done():
                        first = time.monotonic() - began
            assert (stops.result(), goes_on.result()) == (408, 408)
            assert first < time.monotonic() - began
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


def test_bodies_that_arrive_make_room_for_newer_ones():
    """The oldest first, of one client. A request that comes whole needs no room."""
    with contextlib.ExitStack() as clients, running(*of_app("arriving.MOST_ARRIVING = 3"), *COMMAND) as address:
        halves = []
        for number in range(6):
            halves.append(clients.enter_context(contextlib.closing(half_sent(address))))
            time.sleep(0.1)
            if number == 1:
                halves[0].sendall(b" ")  # so the next one has been silent for longer
            if number >= 3:
                halves[(1, 0, 2)[number - 3]].settimeout(9)
                assert halves[(1, 0, 2)[number - 3]].recv(12) == b"HTTP/1.1 503"
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        halves[3].sendall(b'"a": 1' + b" " * 91 + b"}")
        answer = http.client.HTTPResponse(halves[3])
        answer.begin()
        assert (answer.status, json.load(answer)["error"]["message"][:15]) == (400, "a is not served")


def begun(address: str, number: int, source: str) -> socket.socket:
    """Connect, and send nothing, half of the head of a request, or half of its body."""
    place = urllib.parse.urlsplit(address)
    client = socket.create_connection((place.hostname, place.port), source_address=(source, 0))
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall((b"", head.encode(), f"{head}Content-Length: 99\r\n\r\n{{".encode(), b"P")[number % 4])
    return client


def in_two_parts(address: str, pause: float) -> int:
    """Send a request whose body comes later than its head. Return the status of its answer."""
    with contextlib.closing(connect(address)) as connection:
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        connection.putrequest("POST", COMPLETION)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        time.sleep(pause)
        connection.send(body)
        return connection.getresponse().status


@pytest.mark.parametrize("kind", [2, None], ids=["bodies", "all kinds"])
def test_three_hundred_that_have_begun_hold_up_nobody(address, kind):
    with contextlib.ExitStack() as clients:
        for number in range(300):
            clients.enter_context(begun(address, number if kind is None else kind, "127.0.0.1"))
        for turn in range(20):
            assert in_two_parts(address, turn % 3 / 50) == 200
            assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


@pytest.mark.long
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_a_crowd_that_goes_on_coming_holds_up_nobody(address, source):
    """A request that comes whole is answered beside any crowd, also of its own address."""
    ends, is_large = threading.Event(), threading.Event()

    def crowd() -> None:
        count = 0
        with contextlib.ExitStack() as clients:
            while not ends.is_set():
                if count % 800 == 0:
                    clients.close()
                with contextlib.suppress(OSError):  # of one that made room while it sent
                    clients.enter_context(begun(address, 2, source))
                count += 1
                if count > 800:
                    is_large.set()

    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(crowd)
        try:
            until = time.monotonic() + 5
            while time.monotonic() < until or not (is_large.is_set() or coming.done() or time.monotonic() > until + 60):
                assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
                if source != "127.0.0.1":  # the client with the most makes room
                    assert in_two_parts(address, 0.05) == 200
        finally:
            ends.set()
        coming.result()
        assert is_large.is_set()


def test_a_whole_body_makes_room_for_none_of_those_that_arrive_with_it():
    """Hundreds of bodies begin in the same turn of the event loop, as where a crowd connects at once."""

    async def arrive() -> list[bytes]:
        bodies = Bodies(100)

        async def receive():
            return {"type": "http.request", "body": b"whole"}

        tasks = []
        for number in range(3 * arriving.MOST_ARRIVING):
            tasks.append(asyncio.ensure_future(bodies.take({}, receive if number % 7 == 0 else asyncio.Event().wait)))
        for _ in range(300):  # a busy machine takes a while for so many
            await asyncio.sleep(0.1)
            if (left := sum(not task.done() for task in tasks)) <= arriving.MOST_ARRIVING:
                break
        await asyncio.sleep(0.1)
        assert left == sum(not task.done() for task in tasks) == arriving.MOST_ARRIVING
        for task in tasks:
            task.cancel()
        return [(await task).bytes for task in tasks[::7]]

    assert set(map(bytes, asyncio.run(arrive()))) == {b"whole"}


def test_the_largest_body_makes_room_where_all_are_too_large_together():
    code = "arriving.HELD = 1 << 20; arriving.SMALL = 1 << 10; app.LEAST_BODY = 1 << 20"
    with contextlib.ExitStack() as clients, running(*of_app(code), *COMMAND) as address:
        halves = [clients.enter_context(contextlib.closing(half_sent(address, 1 << 20))) for _ in range(3)]
        for number, half in enumerate(halves):
            half.sendall(b" " * ((number + 1) << 18))
        refused, whole = (http.client.HTTPResponse(halves[i]) for i in (2, 0))
        refused.begin()
        assert refused.status == 503
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        halves[0].sendall(b" " * (1 << 20))
        whole.begin()
        assert whole.status == 400


def test_connections_without_a_request_end():
    code = "arriving.PATIENCE = 1; arriving.MOST_CONNECTIONS = 4"
    with contextlib.ExitStack() as clients, running(*of_app(code), *COMMAND) as address:

        def connected() -> socket.socket:
            client = socket.create_connection(
                (urllib.parse.urlsplit(address).hostname, urllib.parse.urlsplit(address).port)
            )
            client.settimeout(30)
            return clients.enter_context(client)

        first, *others = (connected() for _ in range(5))
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b""  # it makes room
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        others[-1].sendall(b"POST ")
        for other in others:
            with contextlib.suppress(ConnectionResetError):
                assert other.recv(1) == b""
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    """Its answer is not decoded to the end, and no longer counts."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    lookahead.wrap(model, FIXED_GUESSES)
    server = Server(model, AutoTokenizer.from_pretrained(DEMO_MODEL), "demo", None, 0, 1, None)
    monkeypatch.setattr(app, "PATIENCE", 0.2)
    body = {"prompt": "x", "max_tokens": 900, "temperature": 1.5, "seed": 1, "stream": True}
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "method": "POST", "path": COMPLETION}
    sent = []

    async def asked():
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            return messages.pop() if messages else await asyncio.Future()

        async def send(message):
            sent.append(message)
            if len(sent) > 2:
                await asyncio.Future()

        await asyncio.wait_for(app.Exchange(server, COMPLETION, scope, receive, send).serve(), 30)
        await asyncio.wait_for(server.generations.ended(), 30)

    asyncio.run(asked())
    assert len(sent) == 3
    assert server.metrics.requests == {"running": 0, (COMPLETION, "cancelled"): 1}
    assert server.metrics.answer_tokens.sum == 0


def test_fifty_megabytes_are_refused(address):
    with contextlib.closing(connect(address)) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", CHAT, b"x" * (50 << 20), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
    assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


def memory(process: int) -> int:
    """Bytes that a process holds."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells what a process holds")
def test_memory_is_flat():
    """`scripts/endure_server.py` sends thousands of requests."""
    command = [sys.executable, *SERVE, "--cache-mb", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            address = next(
                found[1] for line in process.stderr if (found := re.search(r"running on (http://\S+)", line))
            )
            threading.Thread(target=process.stderr.read, daemon=True).start()
            held = []
            for turn in range(3):
                for number in range(60):
                    prompt = f"# {turn} {number}\n" + "x = 1\n" * (number % 20)
                    assert ask(address, COMPLETION, prompt=prompt, max_tokens=6, n=1 + number % 2)[0] == 200
                held.append(memory(process.pid))
        finally:
            process.terminate()
            process.wait(30)
    assert held[2] - held[1] < 8 << 20, held


@pytest.mark.long
def test_an_attack():
    """`scripts/endure_server.py --attack`, for a short time. A bystander that gets another text is noticed."""
    with running(*SERVE) as address:
        done = CliRunner().invoke(
            endure_server.main, ["--url", address, "--process", str(os.getpid()), "--attack", "4"]
        )
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "0 wrong"), done.output


@pytest.mark.parametrize("number", range(8))
def test_texts_of_an_answer_whole_and_streamed(address, number, monkeypatch):
    path, body = endure_server.request(number)
    found = []
    for stream in (False, True):
        monkeypatch.setattr(endure_server, "request", lambda _, stream=stream: (path, body | {"stream": stream}))
        status, said = endure_server.ask(address, number)
        assert status == 200
        found.append(endure_server.texts(said))
    assert found[0] == found[1]
    assert all(found[0].values())


SLOW = f"""if True:
    import time, sys, socket
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    from lookahead.tools.server import app, make_app

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.1)
            scores[:, tokenizer.eos_token_id] = -1000
            return scores

    tokenizer = AutoTokenizer.from_pretrained({str(DEMO_MODEL)!r})
    tokenizer.chat_template = "{{{{ messages[0].content }}}}"
    model = AutoModelForCausalLM.from_pretrained({str(DEMO_MODEL)!r}).eval()
    generate = model.generate
    model.generate = lambda **options: generate(**options, logits_processor=LogitsProcessorList([Slow()]))
    uvicorn.run(make_app(model, tokenizer, "slow"), port=0, timeout_graceful_shutdown=1)
"""


def test_a_signal_ends_streams_with_an_error():
    """And the process within seconds, though clients wait for whole answers, too, and bodies arrive."""
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900}
    bodies = {
        COMPLETION: {"prompt": "x", "max_tokens": 900}, RESPONSE: {"input": "x", "max_output_tokens": 900},
        CHAT: chat, MESSAGE: chat,
    }  # fmt: skip
    streamed, whole, arriving = {}, {}, {}
    with ThreadPoolExecutor(2 * len(bodies)) as threads, contextlib.ExitStack() as stack:
        with running("-c", SLOW, stop=signal.SIGTERM) as address:
            for path, body in bodies.items():
                streamed[path] = threads.submit(events, address, path, **body)
                whole[path] = threads.submit(ask, address, path, **body)
                arriving[path] = stack.enter_context(contextlib.closing(connect(address)))
                arriving[path].putrequest("POST", path)
                arriving[path].putheader("Content-Length", "99")
                arriving[path].endheaders(b"{")
            time.sleep(1)
            began = time.monotonic()
        assert time.monotonic() - began < 12
        for path in bodies:
            (*_, (name, last)) = streamed[path].result()
            assert "the server is stopping" in json.dumps(last)
            if path == MESSAGE:
                assert name == last["type"] == "error"
            elif path == RESPONSE:
                assert last["type"] == "response.failed"
            refused = arriving[path].getresponse()
            says, (status, answered) = json.load(refused), whole[path].result()
            assert status == refused.status == 503
            assert answered["error"]["message"] == says["error"]["message"] == "the server is stopping"


def test_a_model_that_fails_in_company_harms_its_request_alone():
    """Four texts share their passes. A processor of one of them fails in the middle."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    lookahead.wrap(model, FIXED_GUESSES)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    of = generations(model, tokenizer, 2**30, parallel=4)
    prompts = [tokenizer(f"def f{number}(x):\n").input_ids for number in range(4)]
    alone = [answer(of, ids, 40, seed=1) for ids in prompts]
    generate, failing = of._generate, threading.Event()

    def fails(ids, cache, generation, seed, processors, *others):
        if ids == prompts[1]:

            def processor(input_ids, scores):
                if input_ids.shape[1] > len(ids) + 10:
                    failing.set()
                    raise FloatingPointError("no numbers")
                return scores

            processors = [*processors, processor]
        return generate(ids, cache, generation, seed, processors, *others)

    of._generate = fails
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(answer, of, ids, 40, seed=1) for ids in prompts]
        for number, future in enumerate(futures):
            if number == 1:
                with pytest.raises(FloatingPointError, match="no numbers"):
                    future.result()
            else:
                assert future.result()[0] == alone[number][0]
    assert failing.is_set()
    of._generate = generate
    assert answer(of, prompts[1], 40, seed=1)[0] == alone[1][0]


def test_requests_with_many_answers_shut_nobody_out():
    """What is counted is requests, up to a number of answers that takes no harmful room."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    of, ended, all_asked = (
        generations(lookahead.wrap(model, FIXED_GUESSES), tokenizer, 0, 3),
        SimpleQueue(),
        threading.Event(),
    )
    of.calls.put(lambda: all_asked.wait(60))
    prompts = [Prompt(tokenizer(f"def f{number}(x):\n").input_ids, []) for number in range(64)]
    end = lambda number, piece: ended.put(piece) if isinstance(piece, End) else None  # noqa: E731
    for _ in range(2):
        of.begin(prompts, Wishes(settings={"max_new_tokens": 1}), end)
    for _ in range(MOST_WAITING + 1):
        of.begin(prompts[:1], Wishes(settings={"max_new_tokens": 1}), end)
    with pytest.raises(BusyError, match=f"{MOST_WAITING + 3} requests are being served"):
        of.begin(prompts[:1], Wishes(settings={"max_new_tokens": 1}), end)
    all_asked.set()
    for _ in range(128 + MOST_WAITING + 1):
        ended.get(timeout=60)
    while of.open:
        time.sleep(0.01)
    of.calls.put(lambda: all_asked.wait(60))
    all_asked.clear()
    for _ in range(MOST_ANSWERS // 64):
        of.begin(prompts, Wishes(settings={"max_new_tokens": 1}), end)
    with pytest.raises(BusyError):
        of.begin(prompts[:1], Wishes(settings={"max_new_tokens": 1}), end)
    all_asked.set()


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_request_for_many_answers_leaves_room_for_others(parallel):
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    lookahead.wrap(model, FIXED_GUESSES)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    of, ended, all_asked = generations(model, tokenizer, 2**20, parallel), SimpleQueue(), threading.Event()
    of.calls.put(lambda: all_asked.wait(60))  # else the first answer may have begun, or ended, before the others come

    def ask_for(who: str, answers: int, tokens: int) -> None:
        def send(number, piece):
            if isinstance(piece, (End, Exception)):
                ended.put(who)

        wishes = Wishes(settings={"max_new_tokens": tokens, "min_new_tokens": tokens}, answers=answers)
        of.begin([Prompt(tokenizer(f"def {who}(x):\n").input_ids, [])], wishes, send)

    ask_for("many", 8, 60)
    ask_for("one", 1, 4)
    ask_for("two", 2, 4)
    all_asked.set()
    order = [ended.get(timeout=60) for _ in range(11)]
    assert order.index("one") <= (1 if parallel == 1 else 0), order
    assert order.index("two") <= 2, order


def test_a_reader_that_stalls_holds_up_no_other_and_is_answered_later(address):
    """The answer is written meanwhile; what the connection does not take waits."""
    slow = unread(address, 300)
    with contextlib.closing(slow):
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        answer = slow.getresponse()
        pieces = []
        while piece := answer.read(50):
            pieces.append(piece)
            if len(pieces) < 10:
                time.sleep(0.05)
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert idle(address)


def test_written_answers_that_nobody_takes_hold_no_place():
    """Neither among the requests that are answered, nor in the queue; and there are so many of them at most."""
    code = "app.MOST_OPEN = 4; leaving.MOST_UNREAD = 6; generations.MOST_WAITING = 2"
    instructions = "x " * 1_500_000  # which a response repeats; no connection takes so much by itself
    tools = [{"type": "function", "name": "f", "description": instructions, "parameters": {"type": "object"}}]
    body = {"input": "x", "tools": tools, "tool_choice": "none", "max_output_tokens": 1}
    with contextlib.ExitStack() as clients, running(*of_app(code), *LARGE) as address:
        slow = []
        for _ in range(12):
            connection = clients.enter_context(contextlib.closing(connect(address)))
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            sent = json.dumps(body | {"stream": True})
            connection.request("POST", RESPONSE, sent, {"Content-Type": "application/json"})
            slow.append(connection)
            assert idle(address)
            assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
        whole = 0
        for connection in slow:
            with contextlib.suppress(http.client.HTTPException, OSError):
                said = connection.getresponse().read().decode()
                whole += said.endswith("}\n\n")
        assert 5 <= whole <= 6  # the first ones have made room, and perhaps one for a short answer
        assert idle(address)


def test_a_client_that_is_given_up_loses_its_connection():
    """Or it would hold one of the server's files for as long as it likes."""
    code = "app.PATIENCE = 0.5"
    with running(*of_app(code), *LARGE) as address, contextlib.closing(connect(address)) as connection:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        body = {"input": "x", "tools": [{"type": "function", "name": "f", "description": "x" * 3_000_000}]}
        body |= {"tool_choice": "none", "max_output_tokens": 1, "stream": True}
        connection.request("POST", RESPONSE, json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(0.3)
        assert idle(address)
        end = time.monotonic() + 30
        while sockets_of(address) and time.monotonic() < end:
            time.sleep(0.1)
        assert not sockets_of(address)


def test_a_client_that_goes_while_its_answers_begin_has_none():
    code = "import time; begin = generations.Generations.begin; generations.MOST_WAITING = 0; generations.Generations"
    code += ".begin = lambda self, prompts, wishes, *rest: (begin(self, prompts, wishes, *rest), "
    code += "time.sleep(wishes.answers > 1))[0]"
    with running(*of_app(code), *COMMAND, "--parallel", "2") as address:
        with contextlib.closing(connect(address)) as connection:
            body = {"prompt": "x", "n": 16, "max_tokens": 1000, "generation_config": {"min_new_tokens": 1000}}
            connection.request("POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(0.5)
        time.sleep(1.5)
        assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200


def streaming(sent: list[bytes]) -> tuple[Exchange, asyncio.Task]:
    """Return an exchange whose answer comes as a stream, without a server, and what streams it."""

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    exchange = Exchange(None, COMPLETION, {}, None, send)
    form = Completion(Asked(streams=True), "m", [Prompt([1], [])], 1)
    return exchange, asyncio.ensure_future(exchange._stream(form))


@pytest.mark.parametrize("later", range(6))
def test_a_stream_that_is_cancelled_as_a_piece_comes_ends(later):
    """asyncio.wait_for swallows a cancellation then, up to Python 3.11, and the answer was written to its end.

    later: turns of the event loop between the piece and the cancellation.
    """

    async def ends() -> bool:
        exchange, task = streaming([])
        await asyncio.sleep(0.01)
        exchange._pieces.put_nowait((0, Words(TEXT, "x", [], 1, 0)))
        for _ in range(later):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        return task.cancelled()

    assert asyncio.run(ends())


def test_a_stream_pings_while_nothing_comes(monkeypatch):
    monkeypatch.setattr(app, "PING", 0.1)

    async def sent() -> list[bytes]:
        exchange, task = streaming(said := [])
        await asyncio.sleep(0.35)
        exchange._pieces.put_nowait((0, End("stop", None, 1, 0, 0)))
        await task
        return said

    _, *pings, end, done = asyncio.run(sent())
    assert set(pings) == {b": ping\n\n"}
    assert b'"finish_reason": "stop"' in end
    assert done == b"data: [DONE]\n\n"


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_stream_that_is_taken_too_slowly_is_given_up(monkeypatch, is_taken, streams):
    """What waits of it is bounded, for it may be written much faster. A client that keeps up gets all of it."""
    monkeypatch.setattr(app, "UNREAD", 20_000)
    likelihoods = [Likelihood("x", b"x", -1.0)] * 10

    async def waiting() -> tuple[bool, int, int]:
        async def send(message: dict) -> None:
            await asyncio.sleep(0 if is_taken else 60)

        exchange = Exchange(SimpleNamespace(gathered=Gathered()), COMPLETION, {}, None, send)
        exchange._form = form = Completion(Asked(streams=streams), "m", [Prompt([1], [])], 1)
        exchange._gone, exchange._unwritten = asyncio.get_running_loop().create_future(), 1
        task = asyncio.ensure_future(exchange._stream(form) if streams else exchange._gather(form))
        for number in range(100):
            exchange._take(0, Words(TEXT, "x", likelihoods, number, 0))
            for _ in range(10):
                await asyncio.sleep(0)
        task.cancel()
        return exchange._gone.cancelled(), exchange._unsent, len(form.answers[0].likelihoods)

    is_given_up, unsent, kept = asyncio.run(waiting())
    assert is_given_up == (streams and not is_taken)
    assert (unsent < 5_000) == (streams and is_taken)
    assert kept == (0 if streams else 1000)


def test_answers_that_come_whole_have_a_bound_together():
    """The largest ends, for the reason that is told, and others go on. As a stream it may be as long as it likes."""
    code = "from lookahead.tools.server import leaving; leaving.GATHERED = 200_000"
    with running(*of_app(code), *COMMAND) as address, ThreadPoolExecutor(2) as threads:
        small = {"prompt": "def f(x):", "max_tokens": 60, "temperature": 0}
        large = {"prompt": ["def g(x):"] * 8, "max_tokens": 100, "temperature": 0, "logprobs": 20}
        alone = ask(address, COMPLETION, **small)
        beside = threads.submit(ask, address, COMPLETION, **small)
        status, answered = threads.submit(ask, address, COMPLETION, **large).result()
        assert (status, answered["error"]["param"]) == (400, "stream")
        assert "let them come as a stream" in answered["error"]["message"]
        assert beside.result()[1]["choices"] == alone[1]["choices"]
        told = events(address, COMPLETION, **large)
        assert sum(len((event["choices"][0]["logprobs"] or {"tokens": ()})["tokens"]) for _, event in told) > 700
        assert ask(address, COMPLETION, **small)[1]["choices"] == alone[1]["choices"]
        assert idle(address)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_is_written_while_others_are_answered(stream):
    code = "import time; from lookahead.tools.server import responses; whole = responses.Response._response; "
    code += "responses.Response._response = lambda self, status: ("
    code += "time.sleep(3 * (status == 'incomplete')), whole(self, status))[1]"
    with running(*of_app(code), *COMMAND) as address, ThreadPoolExecutor(1) as threads:
        ask(address, COMPLETION, prompt="x", max_tokens=2)

        def long() -> bytes:
            with contextlib.closing(connect(address)) as connection:
                body = {"input": "x", "max_output_tokens": 2, "stream": stream}
                connection.request("POST", RESPONSE, json.dumps(body), {"Content-Type": "application/json"})
                return connection.getresponse().read()

        written = threads.submit(long)
        count = 0
        while not written.done():
            assert ask(address, COMPLETION, prompt="x", max_tokens=2)[0] == 200
            count += not written.done()
    assert b"incomplete" in written.result()
    assert count > 3


def test_a_connection_stays_for_the_next_turn(address):
    """Agents pause between turns. uvicorn would end the connection after five seconds, perhaps as a request comes."""
    with contextlib.closing(connect(address)) as connection:
        ports = set()
        for pause in (5.5, 0):
            body = json.dumps({"prompt": "x", "max_tokens": 1})
            connection.request("POST", COMPLETION, body, {"Content-Type": "application/json"})
            ports.add(connection.sock.getsockname()[1])
            assert connection.getresponse().read()
            time.sleep(pause)
    assert len(ports) == 1


def sockets_of(address: str) -> int:
    """Return how many connections to a server there are at its end."""
    port = f":{urllib.parse.urlsplit(address).port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(port) and line.split()[3] == "01" for line in lines)


def test_a_line_says_what_was_cached_where_that_is_known(caplog):
    """Only the end of an answer tells it. A client that goes before has not had none."""
    exchange = Exchange(SimpleNamespace(metrics=Metrics()), COMPLETION, {}, None, None)
    exchange._form = Completion(Asked(), "x", [Prompt([1, 2, 3], [])], 1)
    exchange._answers = [SimpleNamespace(writer=SimpleNamespace(stats=None))]
    with caplog.at_level("INFO", "lookahead.serve"):
        exchange._log()
        list(exchange._form.add(0, End("stop", None, 1, 0, 2)))
        exchange._log()
    ends = [message.partition("a prompt of ")[2] for message in caplog.messages]
    assert ends == ["3 tokens, 0 written", "3 tokens, 2 of them cached, 1 written"]
