"""Send a server many requests of all kinds, some of which go early, and watch the memory of its process.

lookahead serve --port 8000 & python scripts/endure_server.py --url http://localhost:8000 --process $!
"""

import json
import random
import re
import statistics
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import click

ROUNDS = 10


def memory(process: int) -> float:
    """MB that a process holds (Linux)."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) / 1024


def one(url: str, number: int) -> int:
    """Send a request that follows from its number. Return its status; 0 where the client has gone early."""
    rng, place = random.Random(number), urllib.parse.urlsplit(url)
    text = " ".join(rng.choice(("def", "x", "= 1", "import os", "return", "é")) for _ in range(rng.randint(1, 300)))
    kind = rng.choice(("completions", "chat/completions", "messages", "responses"))
    body: dict = {"temperature": rng.choice((0, 1)), "seed": number, "stream": rng.random() < 0.5}
    if kind == "completions":
        body |= {"prompt": [text] * rng.randint(1, 3), "max_tokens": 16, "n": rng.randint(1, 2), "logprobs": 2}
    elif kind == "responses":
        body |= {"input": text, "max_output_tokens": 16}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 16}
    connection = HTTPConnection(place.hostname or "localhost", place.port, timeout=300)
    try:
        connection.request("POST", f"/v1/{kind}", json.dumps(body), {"Content-Type": "application/json"})
        if rng.random() < 0.2:
            return 0
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@click.command()
@click.option("--url", default="http://localhost:8000", show_default=True)
@click.option("--process", type=int, required=True, help="The server's.")
@click.option("--count", type=int, default=2000, show_default=True, help="Requests.")
@click.option("--clients", type=int, default=8, show_default=True)
def main(url: str, process: int, count: int, clients: int) -> None:
    """Send many requests, and tell the memory of the server after each tenth of them."""
    held = []
    for turn in range(ROUNDS):
        with ThreadPoolExecutor(clients) as threads:
            numbers = range(turn * count // ROUNDS, (turn + 1) * count // ROUNDS)
            statuses = list(threads.map(lambda number: one(url, number), numbers))
        held.append(memory(process))
        click.echo(f"{numbers.stop} requests, {held[-1]:.0f} MB; {statuses.count(0)} went early")
        if unexpected := {status for status in statuses if status not in (0, 200, 429)}:
            sys.exit(f"statuses {unexpected}")
    first, last = statistics.mean(held[3:6]), statistics.mean(held[-3:])
    click.echo(f"{last - first:+.1f} MB from the fourth, fifth and sixth tenth to the last three")


if __name__ == "__main__":
    main()
