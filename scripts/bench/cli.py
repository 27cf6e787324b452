"""Options that several commands share, and types of option values."""

from collections.abc import Callable
from pathlib import Path

import click

DTYPES = ("auto", "float32", "bfloat16", "float16")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OUT = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)


class ListOf(click.ParamType):
    """Values of another type, separated by commas; repeated values count once."""

    name = "list"

    def __init__(self, kind: click.ParamType, separator: str = ","):
        self._kind, self._separator = kind, separator

    def convert(self, value: str, param, ctx) -> list:
        parts = [part.strip() for part in value.split(self._separator)]
        return list(dict.fromkeys(self._kind.convert(part, param, ctx) for part in parts))


class WholeOr(click.IntRange):
    """A whole number, or one given word."""

    name = "integer or word"

    def __init__(self, word: str, least: int):
        super().__init__(min=least)
        self._word = word

    def convert(self, value: str, param, ctx) -> int | str:
        return value if value == self._word else super().convert(value, param, ctx)


model = click.option("--model", "model_name", metavar="NAME_OR_PATH", help="Default: the packaged model.")
dtype = click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
device = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
prompts = click.option("--prompts", "prompts_file", required=True, type=FILE, help="In Spec-Bench's JSONL format.")
limit = click.option("--limit", type=COUNT, help="Use only the first prompts.")
per_category = click.option("--per-category", type=COUNT, help="Use only the first prompts of each category.")
new_tokens = click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=2))
repeats = click.option("--repeats", default=3, show_default=True, type=COUNT)
temperature = click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy, no sampling."
)
temperatures = click.option(
    "--temperature", "temperatures", type=ListOf(click.FloatRange(min=0)), default="0,0.7", show_default=True,
    help="One or several; 0: greedy, no sampling.",
)  # fmt: skip


def guesses(default: str) -> Callable:
    """The option for the numbers of guesses to compare."""
    return click.option(
        "--guesses", default=default, type=ListOf(WholeOr("auto", least=1)), show_default=True,
        help="Guesses in a step: one or several numbers, or auto.",
    )  # fmt: skip
