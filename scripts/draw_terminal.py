"""Draw a moving picture of one text, written plainly and by lookahead side by side, at the speed of a real run.

    python scripts/draw_terminal.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out docs/terminal.svg

The picture is an SVG that loads nothing and runs no script. Tokens that were accepted in one step share a colour, as in
the terminal. Where nothing moves, it shows the ends of both texts.
"""

from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import LookaheadConfig
from lookahead.engine.recording import Recorder
from lookahead.streaming import inputs_of
from lookahead.tools.contention import watch, why_no_ratio
from lookahead.tools.trace import Trace

PROMPT = "Write a Python class for a bank account with deposit, withdraw and transfer."
COLUMNS, CELL, LINE = 54, 7, 17  # of each text: characters in a line, pixels of a character, pixels of a line
LEFT, GAP, TOP = 16, 28, 84
PAUSE = 4.0  # seconds for which the ends are shown
STEP_COLOURS = ("#7fd7e8", "#f0d27a")
PLAIN_COLOUR = "#c8ccd4"


@dataclass(frozen=True)
class Run:
    """A text as it was written."""

    pieces: list[str]  # the text that each token completes
    times: list[float]  # seconds from the beginning until each token was written
    steps: list[int]  # the number of the pass that each token came from

    @property
    def sentence(self) -> str:
        return f"{len(self.pieces)} tokens in {self.steps[-1] + 1} passes, {self.times[-1]:.1f} s"


def ours(trace: Trace) -> Run:
    passes = [0] + [i for i, step in enumerate(trace.steps, 1) for _ in step.emitted]
    return Run(trace.pieces, trace.record.times, passes)


def chunks(run: Run) -> list[tuple[int, int, str, int]]:
    """Break the text into lines between words; return (line, column, text, token) for each part of a pass in a line."""
    letters = [(letter, token) for token, piece in enumerate(run.pieces) for letter in piece.replace("\t", "    ")]
    found, line = [], 0
    while letters:
        end = next((i for i, (letter, _) in enumerate(letters) if letter == "\n"), len(letters))
        if end > COLUMNS:
            end = 1 + next((i for i in range(COLUMNS - 1, 0, -1) if letters[i][0] == " "), COLUMNS - 1)
        column = 0
        for _, same in groupby(letters[:end], key=lambda pair: run.steps[pair[1]]):
            part = list(same)
            words = "".join(letter for letter, _ in part)
            indent = len(words) - len(words.lstrip(" "))
            if words.strip(" "):
                found.append((line, column + indent, words.strip(" "), part[0][1]))
            column += len(words)
        letters = letters[end + (letters[end : end + 1] != [] and letters[end][0] == "\n") :]
        line += 1
    return found


def text_at(x: float, y: float, words: str, more: str, inside: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(words, quote=False)}{inside}</text>'


def written(run: Run, x: int, colours: tuple[str, ...]) -> list[str]:
    """Draw a text. Each part is hidden from the beginning of the round until it was written."""
    hide = '<set attributeName="visibility" to="hidden" begin="r.begin" dur="{:.2f}s"/>'
    parts = []
    for line, column, words, token in chunks(run):
        style = f'textLength="{CELL * len(words)}" fill="{colours[run.steps[token] % len(colours)]}"'
        hidden = hide.format(run.times[token])
        parts.append(text_at(x + CELL * column, TOP + LINE * line, words, style, hidden))
    end, style = TOP + LINE * (line + 1) + 10, 'fill="#ffffff" font-weight="bold"'
    return [*parts, text_at(x, end, run.sentence, style, hide.format(run.times[-1]))]


def draw(prompt: str, model: str, plain: Run, by_lookahead: Run) -> str:
    """Return the SVG."""
    middle = LEFT + CELL * COLUMNS + GAP
    width = middle + CELL * COLUMNS + LEFT
    height = TOP + LINE * (2 + max(chunks(run)[-1][0] for run in (plain, by_lookahead)))
    lasts = plain.times[-1] + PAUSE
    head = 'fill="#8b93a3"'
    parts = [
        text_at(LEFT, 28, f"> {prompt}", 'fill="#ffffff"'),
        text_at(LEFT, 56, "model.generate(...)", head),
        text_at(middle, 56, "lookahead.wrap(model).generate(...)", head),
        *written(plain, LEFT, (PLAIN_COLOUR,)),
        *written(by_lookahead, middle, STEP_COLOURS),
    ]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve"
font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="11.6" role="img">
<title>{escape(model)}: plainly {plain.sentence}; by lookahead {by_lookahead.sentence}</title>
<rect width="100%" height="100%" rx="8" fill="#1d2129" stroke="#4a5160">
<animate id="r" attributeName="rx" values="8;8" dur="{lasts:.2f}s" repeatCount="1" begin="0s;r.end"/></rect>
{chr(10).join(parts)}
</svg>
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "name", default=str(lookahead.DEMO_MODEL), metavar="NAME_OR_PATH")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--prompt", default=PROMPT, show_default=True, help="A message, if the tokenizer has a chat template.")
@click.option("--max-new-tokens", default=150, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(name: str, dtype: str, prompt: str, max_new_tokens: int, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    given = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    model.generate(**inputs_of(tokenizer, given, model.device), max_new_tokens=8)  # the first pass takes longer
    record, span = Recorder(), watch(model.device)
    model.generate(**inputs_of(tokenizer, given, model.device), **options, streamer=record)
    spans = [span()]
    lookahead.wrap(model, LookaheadConfig(allow_row_dependent=True))  # whether the texts are the same, is seen below
    lookahead.trace(model, tokenizer, "1 2 3", max_new_tokens=8)  # measures step costs, if there are none
    model.lookahead.pool = lookahead.NgramPool(vocabulary=model.lookahead.pool.vocabulary)
    span = watch(model.device)
    trace = lookahead.trace(model, tokenizer, given, **options)
    if why := why_no_ratio(*spans, span()):
        raise click.ClickException(f"the picture would show a ratio. {why}; try again when it is quiet")
    if trace.record.tokens != record.tokens:
        raise click.ClickException("the two texts part at a near tie; take another prompt, or float32")
    plain = Run(trace.pieces, record.times, list(range(len(record.tokens))))
    picture = draw(prompt, Path(name).name, plain, ours(trace))
    out.write_text(picture, encoding="utf-8")
    click.echo(f"plain: {plain.sentence}; lookahead: {ours(trace).sentence}; {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
