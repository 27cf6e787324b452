"""Send a server many requests of all kinds, some of which are cancelled, and watch the memory of its process.

    lookahead serve --port 8000 &
    python scripts/endure_server.py --url http://localhost:8000 --process $!
    python scripts/endure_server.py --url http://localhost:8000 --process $! --attack 300

With --attack, harmful clients run for that many seconds: bodies of 50 MB, 200 connections that send half a request or
nothing, slow writers and readers, the fields of scripts/fuzz_server.py, and clients that do not wait for their answers.
Meanwhile, bystanders repeat earlier requests and must get the same texts.
"""

import json
import random
import re
import socket
import statistics
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

import click
import fuzz_server

ROUNDS = 10
LARGE = 50 * 2**20  # bytes of a body
CROWD = 200  # connections that stall
ASKED = 40  # different requests of bystanders
BYSTANDERS = 2


def memory(process: int) -> float:
    """Resident memory of a process in MB (Linux)."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) / 1024


def request(number: int) -> tuple[str, dict]:
    """Return the path and body of request ``number``."""
    rng = random.Random(number)
    text = " ".join(rng.choice(("def", "x", "= 1", "import os", "return", "é")) for _ in range(rng.randint(1, 300)))
    kind = rng.choice(("completions", "chat/completions", "messages", "responses"))
    body: dict = {"temperature": rng.choice((0, 1)), "seed": number, "stream": rng.random() < 0.5}
    if kind == "completions":
        body |= {"prompt": [text] * rng.randint(1, 3), "max_tokens": 16, "n": rng.randint(1, 2), "logprobs": 2}
    elif kind == "responses":
        body |= {"input": text, "max_output_tokens": 16}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 16}
    return f"/v1/{kind}", body


def ask(url: str, number: int, waits: bool = True) -> tuple[int, str]:
    """Send a request. Return the status and the text of its answer; 0 and "" if the client does not wait."""
    place, (path, body) = urllib.parse.urlsplit(url), request(number)
    connection = HTTPConnection(place.hostname or "localhost", place.port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if not waits:
            return 0, ""
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def texts(said: str) -> dict[int, str]:
    """Return the texts of an answer by their numbers, whether it came whole or as a stream."""
    streamed = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    found: dict[int, str] = {}
    for event in streamed or [json.loads(said)]:
        for choice in event.get("choices", ()):
            of = choice.get("delta") or choice.get("message") or choice
            found[choice["index"]] = found.get(choice["index"], "") + (of.get("text") or of.get("content") or "")
        blocks = event.get("content") or [part for item in event.get("output", ()) for part in item["content"]]
        if event.get("type") in ("content_block_delta", "response.output_text.delta"):
            delta = event["delta"]
            blocks = [{"text": delta} if isinstance(delta, str) else delta]
        if blocks:
            found[0] = found.get(0, "") + "".join(block["text"] for block in blocks)
    return found


# -- an attack --------------------------------------------------------------------------------------------------------


class Attack:
    """Harmful clients. Each call of a method takes some seconds. url: the server's."""

    def __init__(self, url: str):
        self._url, self._place = url, urllib.parse.urlsplit(url)
        self._fuzz, self._cases = fuzz_server.Server(url), list(fuzz_server.cases())
        self.statuses: Counter = Counter()
        self.wrong: list[str] = []

    def _half_sent(self, header: str, body: bytes = b"") -> socket.socket:
        connection = socket.create_connection((self._place.hostname, self._place.port), timeout=10)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{header}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def large(self, rng: random.Random) -> None:
        is_chunked, piece = rng.random() < 0.5, b" " * 2**16
        header = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {LARGE}"
        with self._half_sent(header) as connection:
            for _ in range(LARGE // len(piece)):
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)

    def crowd(self, rng: random.Random) -> None:
        with ExitStack() as stack:
            for number in range(CROWD):
                body = b"{" if number % 2 else b""
                stack.enter_context(self._half_sent("Content-Length: 99", body))
            time.sleep(rng.random() * 5)

    def slow_writer(self, rng: random.Random) -> None:
        with self._half_sent("Content-Length: 999") as connection:
            for _ in range(rng.randrange(20)):
                connection.sendall(b" ")
                time.sleep(0.25)

    def slow_reader(self, rng: random.Random) -> None:
        body = {"prompt": "x", "max_tokens": 100, "temperature": 1.5, "stream": True, "logprobs": 20}
        written = json.dumps(body).encode()
        with self._half_sent(f"Content-Length: {len(written)}", written) as connection:
            for _ in range(rng.randrange(20)):
                connection.recv(1)
                time.sleep(0.25)

    def gone(self, rng: random.Random) -> None:
        ask(self._url, rng.randrange(ASKED), waits=False)

    def fields(self, rng: random.Random) -> None:
        case = rng.choice(self._cases)
        status, said = self._fuzz.send(case)
        self.statuses[status] += 1
        if (status >= 500 and status != 503) or (status == 200 and 'data: {"error"' in said):
            self.wrong.append(f"status {status}, {said[-500:]} for {case}")

    def run(self, until: float, seed: int) -> None:
        rng = random.Random(seed)
        kinds: list[Callable[[random.Random], None]] = [self.crowd]  # only one crowd; two would exceed the connections
        if seed:
            kinds = [self.large, self.slow_writer, self.slow_reader, self.gone, self.fields]
        while time.monotonic() < until:
            with suppress(OSError):  # the server closes connections, as it should
                rng.choice(kinds)(rng)


def attack(url: str, process: int, seconds: float, clients: int) -> None:
    """Attack a server, and print its memory before, during and after the attack, and the answers to bystanders."""
    alone = {number: texts(ask(url, number)[1]) for number in range(ASKED)}
    attackers, before, held, took, later = Attack(url), memory(process), [], [], []
    until = time.monotonic() + seconds

    def bystander(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            number, began = rng.randrange(ASKED), time.monotonic()
            try:
                status, said = ask(url, number)
            except OSError as error:
                attackers.wrong.append(f"{error!r} for {request(number)}")
                continue
            if status in (429, 503):  # clients try again
                later.append(number)
                continue
            took.append(time.monotonic() - began)
            if status != 200 or texts(said) != alone[number]:
                attackers.wrong.append(f"{status} {said:.500}, not {alone[number]} for {request(number)}")

    def watch() -> None:
        while time.monotonic() < until:
            held.append(memory(process))
            time.sleep(0.1)

    threads = [threading.Thread(target=attackers.run, args=(until, seed)) for seed in range(clients)]
    threads += [threading.Thread(target=bystander, args=(seed,)) for seed in range(BYSTANDERS)]
    threads.append(threading.Thread(target=watch))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for wrong in attackers.wrong[:5]:
        click.echo(wrong, err=True)
    statuses = ", ".join(f"{count} with {status}" for status, count in sorted(attackers.statuses.items()))
    click.echo(f"{len(took)} answers to bystanders, the slowest after {max(took):.1f} s; fields: {statuses}")
    click.echo(f"{len(later)} bystanders were told to try again later")
    click.echo(f"{before:.0f} MB before, {max(held):.0f} at most, {memory(process):.0f} after")
    click.echo(f"{len(attackers.wrong)} wrong")
    sys.exit(int(bool(attackers.wrong)))


@click.command()
@click.option("--url", default="http://localhost:8000", show_default=True)
@click.option("--process", type=int, required=True, help="The server's.")
@click.option("--count", type=int, default=2000, show_default=True, help="Requests.")
@click.option("--clients", type=int, default=8, show_default=True)
@click.option("--attack", "seconds", type=float, metavar="SECONDS", help="Attack the server for this time instead.")
def main(url: str, process: int, count: int, clients: int, seconds: float | None) -> None:
    """Send many requests, and print the server's memory after each tenth of them; or attack the server."""
    if seconds is not None:
        attack(url, process, seconds, clients)
    held = []
    for turn in range(ROUNDS):
        with ThreadPoolExecutor(clients) as threads:
            numbers = range(turn * count // ROUNDS, (turn + 1) * count // ROUNDS)
            statuses = list(threads.map(lambda number: ask(url, number, number % 5 > 0)[0], numbers))
        held.append(memory(process))
        click.echo(f"{numbers.stop} requests, {held[-1]:.0f} MB; {statuses.count(0)} cancelled")
        if unexpected := {status for status in statuses if status not in (0, 200, 429)}:
            sys.exit(f"statuses {unexpected}")
    first, last = statistics.mean(held[3:6]), statistics.mean(held[-3:])
    click.echo(f"{last - first:+.1f} MB from the fourth, fifth and sixth tenth to the last three")


if __name__ == "__main__":
    main()
