"""Compare `lookahead serve`, llama.cpp's `llama-server` and `transformers serve`, part by part.

turns        time to first text in five turns of a chat, whose first message has 3,000 tokens
clients      tokens a second and time to first text, with 1, 4 and 8 clients
tools        a loop of 20 turns with tool calls; texts must be the same with and without earlier texts in the cache
schemas      100 answers in a JSON schema; passes, also without guesses of the tokens that the schema forces
predictions  passes for edited copies of code, with and without `prediction` (only lookahead)

All servers run at once and are asked in turn, so other load affects all of them. Answers are greedy; their tokens are
counted by the model's tokenizer. Prompts of different rounds begin differently, so no server has cached them. With
--no-times, pages have only figures that do not depend on time.

    pip install ".[serve]" "transformers[serving]" && sh scripts/peers/install.sh DIR llama
    python scripts/compare_servers.py PART --model M --llama DIR --out OUT
"""

import ast
import json
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import click
import openai
import torch
from compare_formats import ASK, SCHEMA, is_valid
from serving import SERVERS, running
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from turns import QUESTIONS

from bench import cli
from bench.pages import command_line, heading, show_results, table
from lookahead.passes.environment import processor
from lookahead.tools.prompts import read_prompts

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).with_name("peers")
SLOTS, POSITIONS = 8, 4096  # slots of llama-server, and tokens of each
PATIENCE = 300  # seconds to load the model
FIXED = ("--budget", "16", "--window-size", "0")  # so that passes do not depend on measured costs
TURNS = 20  # in the part `tools`
CONVERT = (
    "import sys; from pathlib import Path; from llama_worker import convert; "
    "print(convert(Path(sys.argv[1]), sys.argv[2]))"
)
TYPES = {"float32": "f32", "bfloat16": "bf16"}
# Hermes' format, for models whose own template has no tools.
WITH_TOOLS = """{%- if tools %}<|im_start|>system
You may call functions: <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer with <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {"type": "function", "function": {
    "name": "look_up", "description": "Look up a word.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string", "maxLength": 20}}, "required": ["word"]},
}}  # fmt: skip


class Server(NamedTuple):
    name: str
    address: str
    client: openai.OpenAI
    model: str


class Said(NamedTuple):
    message: dict
    first: float  # seconds until the first text or call
    seconds: float
    tokens: int


@contextmanager
def llama_server(folder: Path, model: str, dtype: str, threads: int) -> Iterator[str]:
    """Run llama.cpp's server, which scripts/peers/install.sh has built in ``folder``; yield its address."""
    python, server = folder / "llama/bin/python", folder / "llama/build/bin/llama-server"
    converted = subprocess.run(  # in another folder, so paths must be absolute
        [python, "-c", CONVERT, model, TYPES[dtype]], cwd=PEERS, check=True, stdout=subprocess.PIPE, text=True
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        server, "--model", converted.stdout.strip(), "--port", str(port), "--jinja", "--offline",
        "--threads", str(threads), "--threads-batch", str(threads),
        "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * POSITIONS),
    ]  # fmt: skip
    with (
        tempfile.NamedTemporaryFile("w") as said,
        subprocess.Popen(list(map(str, command)), stdout=said, stderr=said) as process,
    ):
        try:
            end, address = time.monotonic() + PATIENCE, f"http://127.0.0.1:{port}"
            while not is_healthy(address):
                if process.poll() is not None or time.monotonic() > end:
                    raise click.ClickException(f"llama-server did not start: {Path(said.name).read_text()[-500:]}")
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health") as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def all_running(
    names: list[str], model: str, dtype: str, llama: Path | None, threads: int, fixed: bool
) -> Iterator[list[Server]]:
    """Run these servers; yield them. fixed: whether lookahead has a fixed budget."""
    with ExitStack() as stack:
        servers = []
        for name in names:
            if name == "llama.cpp":
                if llama is None:
                    raise click.ClickException("give --llama, the folder of llama.cpp, or leave llama out of --servers")
                address = stack.enter_context(llama_server(llama, model, dtype, threads))
            else:
                more = FIXED if fixed and has_passes(name) else ()
                address = stack.enter_context(running(name, model=model, dtype=dtype, device="cpu", more=more))
            client = stack.enter_context(openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=1800))
            servers.append(Server(name, address, client, model))
        yield servers


class Asks:
    """Sends requests to servers, and measures their answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def __call__(self, server: Server, messages: list[dict], most: int, **more: Any) -> Said:
        extra = {}
        if server.name.startswith("transformers"):  # otherwise it would sample if the model's settings say so
            extra = {"generation_config": json.dumps({"max_new_tokens": most, "do_sample": False})}
        elif "prediction" in more:
            extra = {"prediction": more.pop("prediction")}
        begin, first, text, calls = time.perf_counter(), None, "", dict[int, dict]()
        for chunk in server.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=most, temperature=0, stream=True, extra_body=extra, **more
        ):  # fmt: skip
            delta = chunk.choices[0].delta if chunk.choices else None
            if delta is None or not (delta.content or delta.tool_calls):
                continue
            first = first or time.perf_counter() - begin
            text += delta.content or ""
            for part in delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
        seconds = time.perf_counter() - begin
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
                for call in calls.values()
            ]
        written = text + "".join(json.dumps(call) for call in calls.values())
        return Said(message, first or seconds, seconds, len(self._tokenizer(written).input_ids))


def share(values: list[float], of: float) -> float:
    """Return a quantile. of: the share of values below it."""
    return sorted(values)[min(int(of * len(values)), len(values) - 1)]


# -- parts: each takes the servers, an `Asks` and the command's options, and returns columns and rows ------------------


def turns(servers: list[Server], ask: Asks, options: dict) -> tuple[list[str], list[list]]:
    found: dict[tuple[str, int], list[Said]] = {}
    tokenizer = ask._tokenizer
    history = tokenizer.decode(tokenizer(options["history"].read_text(encoding="utf-8")).input_ids[: options["tokens"]])
    for number in range(options["rounds"]):
        for server in servers:
            messages: list[dict] = []
            said = f"Round {number}.\n{history}\n\n"
            for turn, question in enumerate(QUESTIONS[:5], 1):
                messages.append({"role": "user", "content": said + question})
                answer, said = ask(server, messages, options["most"]), ""
                messages.append(answer.message)
                found.setdefault((server.name, turn), []).append(answer)
    rows = [
        [name, turn, statistics.median(one.first for one in of), statistics.median(one.seconds for one in of),
         sum(one.tokens for one in of)]
        for (name, turn), of in found.items()
    ]  # fmt: skip
    return ["server", "turn", "first text, s", "answer, s", "tokens"], rows


def clients(servers: list[Server], ask: Asks, options: dict) -> tuple[list[str], list[list]]:
    if options["prompts_file"] is None:
        raise click.UsageError("--prompts is missing")
    prompts = [prompt["turns"][0] for prompt in read_prompts(options["prompts_file"], options["limit"])]
    found: dict[tuple[int, str], list[tuple[float, list[Said]]]] = {}
    for number in range(options["rounds"]):
        for count in (1, 4, 8):
            for server in servers:
                with ThreadPoolExecutor(count) as threads:
                    begin = time.perf_counter()
                    asked = [
                        [{"role": "user", "content": f"({number}.{count}.{i}) {prompt}"}]
                        for i, prompt in enumerate(prompts)
                    ]
                    answers = list(threads.map(lambda one, to=server: ask(to, one, options["most"]), asked))
                    found.setdefault((count, server.name), []).append((time.perf_counter() - begin, answers))
    rows = []
    for (count, name), of in found.items():
        first = [answer.first for _, answers in of for answer in answers]
        rates = [sum(answer.tokens for answer in answers) / seconds for seconds, answers in of]
        rows.append([count, name, statistics.median(rates), statistics.median(first), share(first, 0.95)])
    return ["clients", "server", "tokens a second", "first text, s", "95% of first texts, s"], rows


def tools(servers: list[Server], ask: Asks, options: dict) -> tuple[list[str], list[list]]:
    """If a server can enforce tool calls, each turn makes one; other servers may answer with text.

    lookahead's texts and calls must be the same with and without earlier texts in the cache.
    """
    found: dict[str, list[tuple[float, int, int]]] = {}
    written: dict[int, tuple[str, list[dict]]] = {}  # by round: a server of lookahead, and its messages
    for number in range(options["rounds"]):
        for server in servers:
            messages: list[dict] = [{"role": "user", "content": f"({number}) Look up twenty words about bread."}]
            begin, tokens, calls = time.perf_counter(), 0, 0
            more = {} if server.name.startswith("transformers") else {"tool_choice": "required"}
            for turn in range(TURNS):
                said = ask(server, messages, options["most"], tools=[TOOL], parallel_tool_calls=False, **more)
                messages.append(said.message)
                tokens += said.tokens
                made = said.message.get("tool_calls", [])
                calls += bool(made)
                result = f"Entry {turn}: a word about bread, flour, water and time. Go on with the next word."
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in made] or [
                    {"role": "user", "content": result}
                ]
            found.setdefault(server.name, []).append((time.perf_counter() - begin, tokens, calls))
            if has_passes(server.name):
                first, conversation = written.setdefault(number, (server.name, messages))
                check_same(first, conversation, server.name, messages)
    rows = [[name, *(statistics.median(column) for column in zip(*of, strict=True))] for name, of in found.items()]
    return ["server", "all turns, s", "tokens", "turns with a call"], rows


def check_same(first: str, expected: list[dict], name: str, found: list[dict]) -> None:
    """Raise ClickException, with the conversation so far, unless both have the same texts and calls."""

    def said(message: dict) -> tuple:
        return message["content"], [call["function"] for call in message.get("tool_calls", ())]

    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if said(one) != said(other):
            raise click.ClickException(
                f"texts differ: {json.dumps(one)} of {first}, {json.dumps(other)} of {name}, after "
                f"{json.dumps(expected[:place])}"
            )


def schemas(servers: list[Server], ask: Asks, options: dict) -> tuple[list[str], list[list]]:
    if options["prompts_file"] is None:
        raise click.UsageError("--prompts is missing")
    prompts = [prompt["turns"][0] for prompt in read_prompts(options["prompts_file"], None)]
    how = {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA, "strict": True}}
    found: dict[str, list[Said]] = {server.name: [] for server in servers}
    before = {server.name: passes_of(server) for server in servers if has_passes(server.name)}
    for i in range(options["answers"]):
        messages = [{"role": "user", "content": f"({i}) {ASK}{prompts[i % len(prompts)]}"}]
        for server in servers:
            more = {} if server.name.startswith("transformers") else {"response_format": how}  # which it ignores
            found[server.name].append(ask(server, messages, 200, **more))
    passes = {server.name: passes_of(server) - before[server.name] for server in servers if server.name in before}
    if len({tuple(one.message["content"] for one in found[name]) for name in before}) > 1:
        raise click.ClickException("texts differ")
    rows = [
        [name, f"{sum(is_valid(one.message['content']) for one in of)} of {len(of)}", sum(one.tokens for one in of),
         passes.get(name), sum(one.seconds for one in of), statistics.median(one.seconds for one in of)]
        for name, of in found.items()
    ]  # fmt: skip
    return ["server", "valid", "tokens", "passes", "all answers, s", "an answer, s"], rows


def predictions(servers: list[Server], ask: Asks, options: dict) -> tuple[list[str], list[list]]:
    """Each in a new server, because a pool learns from earlier answers."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "lookahead").rglob("*.py"))]
    functions = [
        ast.unparse(node)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and 10 < node.end_lineno - node.lineno < 25
    ][: options["answers"]]
    rows, texts = [], []
    for predicted in (False, True):
        with all_running(["lookahead"], str(options["model"]), options["dtype"], None, 0, options["no_times"]) as (
            server,
        ):
            ask(server, [{"role": "user", "content": "Say hello."}], 16)
            before, answers = passes_of(server), []
            for function in functions:
                said = [{"role": "user", "content": f"Rename the first argument to `first`. Repeat all:\n\n{function}"}]
                more = {"prediction": {"type": "content", "content": function}} if predicted else {}
                answers.append(ask(server, said, options["most"], **more))
            passes = passes_of(server) - before
        texts.append([answer.message["content"] for answer in answers])
        tokens, seconds = sum(answer.tokens for answer in answers), sum(answer.seconds for answer in answers)
        rows.append(["given" if predicted else "left out", len(functions), tokens, passes, tokens / passes, seconds])
    if texts[0] != texts[1]:
        raise click.ClickException("texts differ")
    return ["prediction", "answers", "tokens", "passes", "tokens a pass", "all answers, s"], rows


def has_passes(name: str) -> bool:
    """Whether a server reports its passes, as lookahead's do."""
    return name.startswith("lookahead")


def passes_of(server: Server) -> int:
    with urllib.request.urlopen(f"{server.address}/metrics") as answer:
        return int(float(re.search(r"^lookahead_steps_total (\S+)", answer.read().decode(), re.M)[1]))


PARTS: dict[str, Callable] = {one.__name__: one for one in (turns, clients, tools, schemas, predictions)}


def with_tools(model: Path, folder: Path) -> Path:
    """Return a folder of the same model whose chat template has tools: the model's own, or a new one."""
    own = AutoTokenizer.from_pretrained(model)
    if "tools" in str(own.chat_template):
        return model
    made = folder / model.name
    made.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (made / file.name).symlink_to(file.resolve())
        else:
            shutil.copy(file, made / file.name)
    (made / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    return made


@click.command(help=__doc__.split("\n")[0])
@click.argument("part", type=click.Choice(list(PARTS)))
@click.option("--model", "model", required=True, type=cli.FOLDER, help="A folder of a chat model.")
@cli.dtype
@click.option("--llama", type=cli.FOLDER, metavar="DIR", help="llama.cpp, built by scripts/peers/install.sh.")
@click.option("--servers", default="lookahead;llama.cpp;transformers", show_default=True,
              type=cli.ListOf(click.Choice([*SERVERS, "llama.cpp"]), ";"))  # fmt: skip
@click.option("--prompts", "prompts_file", type=cli.FILE, help="For clients and schemas, in Spec-Bench's JSONL format.")
@cli.limit
@click.option("--history", type=cli.FILE, default=ROOT / "docs/design.md", help="Text of the first turn.")
@click.option("--tokens", default=3000, show_default=True, type=cli.COUNT, help="Tokens of the history.")
@click.option("--rounds", default=3, show_default=True, type=cli.COUNT, help="Rounds of all parts but schemas.")
@click.option("--answers", default=100, show_default=True, type=cli.COUNT, help="Answers of schemas and predictions.")
@click.option("--max-new-tokens", "most", default=64, show_default=True, type=cli.COUNT)
@click.option("--no-times", is_flag=True, help="Leave times out, and use a fixed budget.")
@click.option("--out", type=cli.OUT, metavar="OUT", help="Write OUT.md and OUT.json.")
def main(
    part: str, model: Path, dtype: str, llama: Path | None, servers: list[str], out: Path | None, **options
) -> None:
    where = {"command": command_line(__file__), "processor": processor(torch.device("cpu"))}
    where |= {"threads": torch.get_num_threads(), "dtype": dtype, "rounds": options["rounds"]}
    where |= {name: version(name) for name in ("torch", "transformers", "openai")}
    names = [] if part == "predictions" else servers
    options |= {"model": model, "dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        served = with_tools(model, Path(folder)) if part == "tools" else model.absolute()
        ask, threads = Asks(AutoTokenizer.from_pretrained(served)), torch.get_num_threads()
        with all_running(
            names, str(served), dtype, llama and llama.absolute(), threads, options["no_times"]
        ) as running_ones:
            for server in running_ones:  # warm up: they load the model and measure
                ask(server, [{"role": "user", "content": "Say hello."}], 16)
            columns, rows = PARTS[part](running_ones, ask, options)
    if options["no_times"]:
        told = [not column.endswith((", s", " a second")) for column in columns]
        columns, rows = list(compress(columns, told)), [list(compress(row, told)) for row in rows]
    text = f"{heading(where)}{table(columns, rows, 'l' + 'r' * (len(columns) - 1))}\n"
    show_results(out, text, {"environment": where, "columns": columns, "table": rows})


if __name__ == "__main__":
    main()
