"""Compare `lookahead serve` with `transformers serve`, for one client and for several.

Each server has its own process, which is started for each number of clients. A client sends the next prompt when its
answer is complete. Answers are streamed chats. The first prompt does not count, because servers then load and measure.

    pip install ".[serve]" "transformers[serving]"
    python scripts/serving.py --model M --prompts FILE.jsonl --clients 1,4 --dtype bfloat16 --out OUT
"""

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click
import openai
import torch

from bench import cli
from bench.pages import command_line, heading, show_results, table
from lookahead.passes.environment import processor
from lookahead.tools.prompts import read_prompts

COLUMNS = ["temperature", "server", "clients", "ms per token", "times the first", "first token, s", "answer, s",
           "tokens", "tokens per step"]  # fmt: skip
TRANSFORMERS = "from transformers.cli.transformers import main; main()"  # what the command `transformers` runs
UNFORCED = (  # enforces formats, but does not guess the tokens that they force
    "from lookahead.tools.cli import main; from lookahead.tools.server import grammar; "
    "grammar.ForcedTokens.propose = lambda *_: [grammar.GuessTree.chain([])]; main()"
)
COLD = (  # computes each prompt from its beginning
    "from lookahead.tools.cli import main; from lookahead.tools.server.prefixes import Prefixes; "
    "Prefixes._that_share = lambda *_: []; main()"
)
SERVERS = {
    "transformers": ["-c", TRANSFORMERS, "serve"],
    "transformers, continuous batching": ["-c", TRANSFORMERS, "serve", "--continuous-batching"],
    "lookahead": ["-m", "lookahead", "serve", "--model"],
    "lookahead without forced guesses": ["-c", UNFORCED, "serve", "--model"],
    "lookahead without earlier texts": ["-c", COLD, "serve", "--model"],
}  # arguments of Python, followed by the model


class Answer(NamedTuple):
    tokens: int
    first: float  # seconds until the first text
    seconds: float


@contextmanager
def running(server: str, model: str, dtype: str, device: str, more: Sequence[str] = ()) -> Iterator[str]:
    """Run a server in its own process; yield its address. more: further arguments."""
    command = [*SERVERS[server], model, "--dtype", dtype, "--device", device, "--port", "0", *more]
    with (
        tempfile.NamedTemporaryFile("w") as said,
        subprocess.Popen([sys.executable, *command], stdout=said, stderr=said) as process,
    ):
        try:
            while not (found := re.search(r"running on (http://\S+)", Path(said.name).read_text())):
                if process.poll() is not None:
                    raise click.ClickException(f"the server ended: {Path(said.name).read_text()[-500:]}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


def ask(client: openai.OpenAI, model: str, prompt: str, most: int, temperature: float, seed: int) -> Answer:
    # With these settings, both servers sample alike.
    settings = {"max_new_tokens": most, "do_sample": temperature > 0} | (
        {"temperature": temperature} if temperature else {}
    )
    begin, first, usage = time.perf_counter(), None, None
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=most, seed=seed, stream=True,
        extra_body={"generation_config": json.dumps(settings)},
    ):  # fmt: skip
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - begin
        usage = chunk.usage or usage
    seconds = time.perf_counter() - begin
    return Answer(usage.completion_tokens, first or seconds, seconds)


def tokens_per_step(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return float(re.search(r"^lookahead_tokens_per_step (\S+)", answer.read().decode(), re.M)[1])


@click.command()
@cli.model
@cli.prompts
@cli.limit
@cli.dtype
@click.option("--device", default="cpu", show_default=True)
@cli.new_tokens
@click.option("--temperatures", default="0", show_default=True, type=cli.ListOf(click.FLOAT))
@click.option("--clients", default="1,4", show_default=True, type=cli.ListOf(cli.COUNT))
@click.option("--servers", default="transformers;lookahead", show_default=True,
              type=cli.ListOf(click.Choice(list(SERVERS)), ";"))  # fmt: skip
@click.option("--out", type=cli.OUT, metavar="OUT", help="Write OUT.md and OUT.json.")
def main(model_name, prompts_file, limit, dtype, device, max_new_tokens, temperatures, clients, servers, out) -> None:
    prompts = [prompt["turns"][0] for prompt in read_prompts(prompts_file, limit + 1 if limit else None)]
    rows: list[dict] = []
    cells = list(itertools.product(temperatures, clients, servers))
    with click.progressbar(cells, file=sys.stderr) as progress:
        for temperature, count, server in progress:
            with (
                running(server, model=model_name, dtype=dtype, device=device) as address,
                openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as client,
                ThreadPoolExecutor(count) as threads,
            ):
                answer = partial(ask, client, model_name, most=max_new_tokens, temperature=temperature)
                answer(prompts[0], seed=0)
                begin = time.perf_counter()
                futures = [threads.submit(answer, prompts[seed], seed=seed) for seed in range(1, len(prompts))]
                answers = [future.result() for future in futures]
                seconds = time.perf_counter() - begin
                steps = tokens_per_step(address) if server == "lookahead" else None
            tokens = sum(answer.tokens for answer in answers)
            ms_per_token = 1000 * seconds / tokens
            if server == servers[0]:
                first = ms_per_token
            rows.append({
                "temperature": temperature,
                "server": server,
                "clients": count,
                "ms_per_token": ms_per_token,
                "times_the_first": first / ms_per_token,
                "first_token": statistics.median(answer.first for answer in answers),
                "answer": statistics.median(answer.seconds for answer in answers),
                "tokens": tokens,
                "tokens_per_step": steps,
            })  # fmt: skip
    where = {"command": command_line(__file__), "prompts": len(prompts) - 1, "new tokens": max_new_tokens}
    where |= {"processor": processor(torch.device(device)), "threads": torch.get_num_threads(), "dtype": dtype}
    where |= {name: version(name) for name in ("torch", "transformers", "openai")}
    text = heading(where) + table(COLUMNS, [list(row.values()) for row in rows], "rlrrrrrrr") + "\n"
    show_results(out, text, {"environment": where, "table": rows})


if __name__ == "__main__":
    main()
