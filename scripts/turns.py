"""Measure the time to first text in the turns of a chat, with any server of OpenAI's API.

The first turn is a long text of --characters characters; each later turn is a short question. The whole history is sent
each time. Answers are streamed.

    lookahead serve --model M --dtype bfloat16 --port 8000 &
    python scripts/turns.py --url http://localhost:8000/v1 --history FILE --out OUT
"""

import time
from pathlib import Path

import click
import openai

from bench import cli
from bench.pages import command_line, heading, show_results, table

QUESTIONS = [
    "Summarise the text above in two sentences.",
    "What is its main claim?",
    "Which numbers does it name?",
    "What would you change in it?",
    "Write a title for it.",
    "Who should read it?",
    "What is missing?",
    "Thank you. Say goodbye.",
]
COLUMNS = ["turn", "tokens of the prompt", "cached", "first text, s", "answer, s", "tokens of the answer"]


@click.command()
@click.option("--url", default="http://localhost:8000/v1", show_default=True)
@click.option("--model", help="The server's name for the model; by default, the first that it lists.")
@click.option("--history", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True,
              help="Text of the first turn.")  # fmt: skip
@click.option("--characters", type=int, default=10_000, show_default=True, help="Length of the first turn's text.")
@click.option("--turns", type=click.IntRange(1, len(QUESTIONS)), default=5, show_default=True)
@cli.new_tokens
@click.option("--out", type=cli.OUT, metavar="OUT", help="Write OUT.md and OUT.json.")
def main(url: str, model: str | None, history: Path, characters: int, turns: int, max_new_tokens: int, out) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
    model = model or client.models.list().data[0].id
    said = history.read_text(encoding="utf-8")[:characters] + "\n\n"
    messages: list = []
    rows = []
    for turn, question in enumerate(QUESTIONS[:turns], 1):
        messages.append({"role": "user", "content": said + question})
        said, begin, first, text, usage = "", time.perf_counter(), None, "", None
        for chunk in client.chat.completions.create(
            model=model, messages=messages, max_tokens=max_new_tokens, temperature=0, stream=True,
            stream_options={"include_usage": True},
        ):  # fmt: skip
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece and first is None:
                first = time.perf_counter() - begin
            text, usage = text + (piece or ""), chunk.usage or usage
        seconds = time.perf_counter() - begin
        messages.append({"role": "assistant", "content": text})
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        rows.append([turn, usage.prompt_tokens, cached, first or seconds, seconds, usage.completion_tokens])
    where = {"command": command_line(__file__), "model": model, "new tokens": max_new_tokens}
    text = heading(where) + table(COLUMNS, rows, "rrrrrr") + "\n"
    show_results(out, text, {"environment": where, "table": rows})


if __name__ == "__main__":
    main()
