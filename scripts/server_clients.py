"""Run real clients against `lookahead serve`: OpenAI's and Anthropic's, LiteLLM, LangChain, llama-index, and npm's.

The server's model repeats the last message, so the script knows each answer, tool calls included.

    PYTHON=python3.11 sh scripts/peers/install.sh .peers server_clients
    .peers/server_clients/bin/python scripts/server_clients.py --python python [NAME ...]

--python names an interpreter with lookahead and the extra `serve`. Each client is a function, which raises an error if
an answer is wrong. The exit status is 1 if a client fails or is not installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import click

ROOT = Path(__file__).parents[1]
KEY, MODEL, TURNS = "a-key", "echo", 20
SERVER = f"""if True:
    import torch, uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
    import lookahead
    from lookahead.tools.server import make_app

    class Writing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            ids = input_ids[0].tolist()
            begin = max(i for i, token in enumerate(ids) if token == begins) + 1
            end = ids.index(close, begin)
            place = begin + len(ids) - end - between
            scores[:, ids[place] if place < end else tokenizer.eos_token_id] += 1000
            return scores

    path = str(lookahead.DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{{% for tool in tools or [] %}}{{{{ tool | tojson }}}}{{% endfor %}}"
        "{{% for m in messages %}}[{{{{ m.role }}}}]`{{{{ m.content }}}}~"
        "{{% for c in m.tool_calls or [] %}}{{{{ c.function | tojson }}}}{{% endfor %}}<|end|>{{% endfor %}}"
        "{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    )
    tokenizer.response_template = {{
        "defaults": {{"role": "assistant"}}, "start_anchor": "[assistant]",
        "fields": {{
            "reasoning_content": {{"open": "<think>", "close": "</think>", "content": "text"}},
            "tool_calls": {{"open": "<tool>", "close": "</tool>", "repeats": True, "content": "json",
                           "transform": {{"type": "function", "function": "{{content}}"}}}},
            "content": {{"content": "text", "close": "<|end|>"}},
        }},
    }}
    begins, close = (tokenizer(text, add_special_tokens=False).input_ids[0] for text in "`~")
    between = len(tokenizer("~<|end|>[assistant]", add_special_tokens=False).input_ids)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generate = model.generate

    def writes(logits_processor=(), **options):  # what a format forbids stays forbidden
        return generate(**options, logits_processor=LogitsProcessorList([Writing(), *logits_processor]))

    model.generate = writes
    uvicorn.run(make_app(model, tokenizer, {MODEL!r}, api_key={KEY!r}), port=0, access_log=False)
"""
CALL = '<tool>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}

CLIENTS: dict[str, tuple[str, Callable[[str], None]]] = {}


def client(package: str) -> Callable:
    """Register a function by its name as a client of ``package``. Its docstring says what it requests."""

    def register(function: Callable[[str], None]) -> Callable[[str], None]:
        CLIENTS[function.__name__] = package, function
        return function

    return register


def equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


@contextmanager
def running(python: str) -> Iterator[str]:
    """Run the server in its own process; yield its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([python, "-c", SERVER], stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    break
            else:
                raise click.ClickException(f"the server has ended: {''.join(said)[-1000:]}")
            with ThreadPoolExecutor(1) as threads:
                threads.submit(process.stderr.read)  # so that the pipe does not fill up
                try:
                    yield found[1]
                finally:
                    process.terminate()
        finally:
            process.terminate()


@client("openai")
def openai_texts(url: str) -> None:
    """Chats, completions and responses, whole and streamed; models; a wrong key; a field that is refused."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        equal([model.id for model in client.models.list()], [MODEL])
        equal(client.models.retrieve(MODEL).id, MODEL)
        messages = [{"role": "user", "content": "return x"}]
        options = {"model": MODEL, "temperature": 0}
        equal(client.chat.completions.create(messages=messages, **options).choices[0].message.content, "return x")
        chunks = list(client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        ))  # fmt: skip
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "return x")
        equal(chunks[-1].usage.completion_tokens > 1, True)
        with client.chat.completions.stream(messages=messages, **options) as stream:
            equal(stream.get_final_completion().choices[0].message.content, "return x")
        equal(client.completions.create(prompt="`x = 1~<|end|>[assistant]", **options).choices[0].text, "x = 1")
        equal(client.responses.create(input="return y", **options).output_text, "return y")
        with client.responses.stream(input="<think>a b</think>return y", **options) as stream:
            response = stream.get_final_response()
        equal([item.type for item in response.output], ["reasoning", "message"])
        equal(response.output_text, "return y")
        value = {"a": 1, "b": 2}
        asked = [{"role": "user", "content": json.dumps(value)}]
        schema = {"name": "sum", "schema": SCHEMA, "strict": True}
        for kind in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}):
            answer = client.chat.completions.create(messages=asked, response_format=kind, **options)
            equal(json.loads(answer.choices[0].message.content), value)
        answer = client.responses.create(input=asked, text={"format": {"type": "json_schema", **schema}}, **options)
        equal(json.loads(answer.output_text), value)
        try:
            client.chat.completions.create(messages=messages, response_format={"type": "xml"}, **options)
            raise AssertionError("response_format was not refused")
        except openai.BadRequestError as error:
            equal("response_format" in str(error), True)
        try:
            client.with_options(api_key="wrong").models.list()
            raise AssertionError("a wrong key was taken")
        except openai.AuthenticationError:
            pass


def openai_loop(url: str, name: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        messages, cached = [], 0
        for turn in range(TURNS):
            call = CALL.replace("1", str(turn))
            messages.append({"role": "user", "content": f"<think>{name}</think>so {call}"})
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
            choice = answer.choices[0]
            equal((choice.finish_reason, choice.message.content), ("tool_calls", "so"))
            (made,) = choice.message.tool_calls
            arguments = json.loads(made.function.arguments)
            equal((made.function.name, arguments), ("add", {"a": turn, "b": 2}))
            said = choice.message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": made.id, "content": str(arguments["a"] + arguments["b"])}
            messages += [said, result]
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
            equal(answer.choices[0].message.content, str(turn + 2))
            messages.append({"role": "assistant", "content": str(turn + 2)})
            if turn:
                equal(answer.usage.prompt_tokens_details.cached_tokens > cached, True)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            if answer.usage.prompt_tokens > 800:  # the model's context ends
                messages, cached = [], 0


@client("openai")
def openai_agent(url: str) -> None:
    """A loop of 20 turns with a tool, reasoning, and text with calls; the history is found in the cache."""
    openai_loop(url, "one")


@client("openai")
def two_openai_agents(url: str) -> None:
    """Two such loops at once."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: openai_loop(url, name), ("one", "two")))


@client("anthropic")
def anthropic_messages(url: str) -> None:
    """Messages whole and streamed, thinking, tools and their runner, count_tokens, stop sequences, an error."""
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        options = {"model": MODEL, "max_tokens": 200}
        messages = [{"role": "user", "content": f"<think>a b</think>so {CALL}"}]
        equal(
            client.messages.count_tokens(model=MODEL, messages=messages, tools=[ANTHROPIC_TOOL]).input_tokens > 9, True
        )
        whole = client.messages.create(messages=messages, tools=[ANTHROPIC_TOOL], **options)
        with client.messages.stream(messages=messages, tools=[ANTHROPIC_TOOL], **options) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        equal(text, "so")
        for message in (whole, streamed):
            equal([block.type for block in message.content], ["thinking", "text", "tool_use"])
            equal((message.content[2].name, message.content[2].input), ("add", {"a": 1, "b": 2}))
            equal(message.stop_reason, "tool_use")
        result = {"type": "tool_result", "tool_use_id": streamed.content[2].id, "content": "3"}
        messages += [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(messages=messages, tools=[ANTHROPIC_TOOL], system="Be brief.", **options)
        equal((answer.content[0].text, answer.stop_reason), ("3", "end_turn"))
        messages = [{"role": "user", "content": "one two three"}]
        answer = client.messages.create(messages=messages, stop_sequences=["two"], **options)
        equal(
            (answer.content[0].text.strip(), answer.stop_reason, answer.stop_sequence), ("one", "stop_sequence", "two")
        )
        equal([model.id for model in client.models.list()], [MODEL])
        messages = [{"role": "user", "content": CALL}]
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
            answer = client.messages.create(messages=messages, tool_choice=choice, tools=[ANTHROPIC_TOOL], **options)
            equal((answer.content[0].type, answer.content[0].input), ("tool_use", {"a": 1, "b": 2}))
        tool = anthropic.beta_tool(lambda a, b: str(a + b), name="add", description="Adds.", input_schema=SCHEMA)
        runner = client.beta.messages.tool_runner(messages=messages, tools=[tool], **options)
        equal([message.content[0].type for message in runner], ["tool_use", "text"])
        messages = [{"role": "user", "content": "<think>a b c d e f g h</think>so"}]
        thinking = {"type": "enabled", "budget_tokens": 3}
        answer = client.messages.create(messages=messages, thinking=thinking, **options)
        equal(answer.content[0].type, "thinking")
        equal(len(answer.content[0].thinking) < 9, True)
        try:
            client.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
            raise AssertionError("tool_choice was not refused")
        except anthropic.BadRequestError as error:
            equal("tool_choice" in str(error), True)


@client("anthropic")
def two_anthropic_agents(url: str) -> None:
    """Two loops of 20 turns with a tool at once, with hints that agents send; the history is found in the cache."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: anthropic_loop(url, name), ("one", "two")))


def anthropic_loop(url: str, name: str) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        options = {"model": MODEL, "max_tokens": 200, "tools": [ANTHROPIC_TOOL], "metadata": {"user_id": "x"}}
        options |= {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
        messages, cached = [], 0
        for turn in range(TURNS):
            call = CALL.replace("1", str(turn))
            messages.append({"role": "user", "content": f"<think>{name}</think>so {call}"})
            answer = client.messages.create(messages=messages, **options)
            equal([block.type for block in answer.content], ["thinking", "text", "tool_use"])
            made = answer.content[2]
            equal((made.name, made.input, answer.stop_reason), ("add", {"a": turn, "b": 2}, "tool_use"))
            equal(answer.usage.output_tokens_details.thinking_tokens > 0, True)
            result = {"type": "tool_result", "tool_use_id": made.id, "content": str(turn + 2)}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
            answer = client.messages.create(messages=messages, **options)
            equal(answer.content[0].text, str(turn + 2))
            messages.append({"role": "assistant", "content": answer.content})
            usage = answer.usage
            if turn:
                equal(usage.cache_read_input_tokens > cached, True)
            cached = usage.cache_read_input_tokens
            if usage.input_tokens + cached > 800:  # the model's context ends
                messages, cached = [], 0


@client("litellm")
def litellm_both(url: str) -> None:
    """completion by both providers, whole and streamed, with a tool; text_completion."""
    import litellm

    for name, base in ((f"openai/{MODEL}", f"{url}/v1"), (f"anthropic/{MODEL}", url)):
        options = {"model": name, "api_base": base, "api_key": KEY, "max_tokens": 200}
        messages = [{"role": "user", "content": f"so {CALL}"}]
        message = litellm.completion(messages=messages, tools=[TOOL], **options).choices[0].message
        equal(message.content, "so")
        (made,) = message.tool_calls
        equal((made.function.name, json.loads(made.function.arguments)), ("add", {"a": 1, "b": 2}))
        chunks = litellm.completion(messages=[{"role": "user", "content": "return x"}], stream=True, **options)
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "return x")
    options = {"api_base": f"{url}/v1", "api_key": KEY}
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="`x = 1~<|end|>[assistant]", **options
    )
    equal(answer.choices[0].text, "x = 1")


@client("langchain-openai")
def langchain_openai_chat(url: str) -> None:
    """ChatOpenAI: invoke, stream, batch, a tool and its result."""
    from langchain_openai import ChatOpenAI

    langchain_loop(ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=200))


@client("langchain-anthropic")
def langchain_anthropic_chat(url: str) -> None:
    """ChatAnthropic: the same."""
    from langchain_anthropic import ChatAnthropic

    langchain_loop(ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=200))


def langchain_loop(chat: object) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from pydantic import BaseModel

    class Sum(BaseModel):
        """Two numbers."""

        a: int
        b: int

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    equal(chat.invoke("return x").text, "return x")
    equal("".join(chunk.text for chunk in chat.stream("return x")), "return x")
    equal([answer.text for answer in chat.batch(["x = 1", "y = 2"])], ["x = 1", "y = 2"])
    bound, messages = chat.bind_tools([add]), [HumanMessage(f"so {CALL}")]
    answer = bound.invoke(messages)
    (made,) = answer.tool_calls
    equal((made["name"], made["args"]), ("add", {"a": 1, "b": 2}))
    messages += [answer, ToolMessage(str(add.invoke(made["args"])), tool_call_id=made["id"])]
    equal(bound.invoke(messages).text, "3")
    for method in ("json_schema", "function_calling"):
        asked = '{"a": 1, "b": 2}' if method == "json_schema" else CALL.replace("add", "Sum")
        equal(chat.with_structured_output(Sum, method=method).invoke(asked), Sum(a=1, b=2))


@client("llama-index-llms-openai-like")
def llama_index(url: str) -> None:
    """OpenAILike: chat, stream_chat, and a call of a tool."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    settings = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1024, "max_tokens": 200}
    llm = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=KEY, **settings)
    equal(llm.chat([ChatMessage(role="user", content="return x")]).message.content, "return x")
    equal("".join(piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="return x")])), "return x")
    answer = llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg=f"so {CALL}")
    (made,) = llm.get_tool_calls_from_response(answer)
    equal((made.tool_name, made.tool_kwargs), ("add", {"a": 1, "b": 2}))


@client("npm")
def npm_clients(url: str) -> None:
    """OpenAI's and Anthropic's clients of npm: chats, responses and messages, with a call."""
    with TemporaryDirectory(dir=sys.prefix) as folder:  # node looks for packages in the program's folder and above it
        program = shutil.copy(ROOT / "scripts/peers/server_clients.mjs", folder)
        done = subprocess.run(["node", program, url, KEY, MODEL], capture_output=True, text=True)
    equal((done.returncode, done.stderr[-500:]), (0, ""))


@click.command(help=__doc__.split("\n")[0])
@click.option("--python", default=sys.executable, help="Python with lookahead and the extra `serve`.")
@click.argument("names", nargs=-1, type=click.Choice(list(CLIENTS)), metavar="[NAME]...")
def main(python: str, names: tuple[str, ...]) -> None:
    fails = 0
    with running(python) as url:
        for name in names or CLIENTS:
            package, run = CLIENTS[name]
            try:
                package += f" {version(package)}" if package != "npm" else ""
                run(url)
                result = "works"
            except PackageNotFoundError:
                result = "NOT INSTALLED"
            except Exception as error:
                traceback.print_exc()
                result = f"FAILS: {type(error).__name__}: {error}"
            fails += result != "works"
            click.echo(f"| {name} | {package} | {run.__doc__.rstrip('.')} | {' '.join(result.split())} |")
    sys.exit(int(fails > 0))


if __name__ == "__main__":
    main()
