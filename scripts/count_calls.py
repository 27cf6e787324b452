"""Count the Python calls between a user's generate() and the model, so that the path of a token stays short.

A small random model of 30 layers is wrapped as a user wraps it, and decodes by fused passes. Each Python frame of
lookahead/ and ngram_pool/ counts: functions, and each resumption of a comprehension or a generator. C++ does not count.
With limits, the command fails if one is exceeded.

    python scripts/count_calls.py --step-calls 110 --step-files 10 --token-calls 850 --longest 40
"""

import ast
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import click
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from bench.cli import COUNT
from bench.pages import table
from lookahead.guessing.budget import Pace
from lookahead.passes import costs, stored

ROOT = Path(lookahead.__file__).parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("lookahead", "ngram_pool"))
STEP = "lookahead/engine/call.py", "_guess"  # the function that begins each step
LAYERS, VOCABULARY, NEW_TOKENS = 30, 97, 96
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29] * 3


@dataclass
class Walk:
    """Our functions that were called, in order."""

    calls: list[CodeType]

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.calls})

    @property
    def changes(self) -> int:
        """Number of calls whose function is in another file than that of the call before."""
        return sum(a.co_filename != b.co_filename for a, b in pairwise(self.calls))

    def __str__(self) -> str:
        """Each function's name and number of calls."""
        return "\n".join(f"{count:5}  {name}" for name, count in Counter(map(name_of, self.calls)).most_common())


@dataclass
class Counts:
    """Counts of a wrapped model."""

    step: Walk
    """A greedy step, up to the next: the step with the median number of calls."""
    token: Walk
    """A whole call of generate() that writes one token."""
    longest: str
    """The longest function that the steps have called."""
    lines: int
    """Its lines of code, without signature, docstring, comments and empty lines."""
    accepted: float
    """Guesses that a step accepted on average."""


def name_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{code.co_firstlineno} {code.co_name}"


def calls_in(run: Callable[[], object]) -> list[CodeType]:
    """Return our functions that ``run`` calls."""
    calls: list[CodeType] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            calls.append(code)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def steps_in(calls: list[CodeType]) -> list[Walk]:
    """The steps of a call of generate(), each up to the next. The last step is left out, because it ends the call.

    Raises LookupError if there are none.
    """
    file, name = str(ROOT / STEP[0]), STEP[1]
    begins = [i for i, code in enumerate(calls) if code.co_name == name and code.co_filename == file]
    if len(begins) < 2:
        raise LookupError(f"fewer than two calls of {name} in {STEP[0]}: the decoding loop has changed, or no step ran")
    return [Walk(calls[a:b]) for a, b in pairwise(begins)]


def lines_of(code: CodeType) -> int:
    """Lines of code of a function's body; 0 for a lambda or a comprehension."""
    bodies, lines = _functions(code.co_filename)
    body = bodies.get((code.co_firstlineno, code.co_name))
    if body is None:
        return 0
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # a docstring
        body = body[1:]
    inside = lines[body[0].lineno - 1 : body[-1].end_lineno] if body else []
    return sum(not line.strip().startswith("#") for line in inside if line.strip())


@cache
def _functions(file: str) -> tuple[dict[tuple[int, str], list[ast.stmt]], list[str]]:
    text = Path(file).read_text(encoding="utf-8")
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    found = {(min(x.lineno for x in [node, *node.decorator_list]), node.name): node.body for node in nodes}
    return found, text.splitlines()


def small_model(layers: int = LAYERS) -> PreTrainedModel:
    """A random model built like Llama, which fused passes serve."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, pad_token_id=2, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def count(model: PreTrainedModel) -> Counts:
    """Wrap a model, and count its calls after a warm-up: the pool has learned the text, and costs are known.

    Raises RuntimeError if passes are not fused, or if no guess is accepted: such a step has another path.
    """
    lookahead.wrap(model)
    prompt = torch.tensor([PROMPT])

    def generate(tokens: int) -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)

    for _ in range(2):  # the pool learns the text
        generate(NEW_TOKENS)
    engine = model.lookahead
    if engine.passes != "fused":
        raise RuntimeError(f"passes are {engine.passes}, not fused:\n{engine.report()}")
    known = engine.pace.costs  # replaced by a larger model's, so that guesses pay on any machine
    known.seconds, known.per_position = np.linspace(1e-2, 2e-2, len(costs.RUNGS)), np.zeros(2)
    known.overhead, known.overhead_per_row, known.prices = 1e-3, 0.0, None
    engine.pace = Pace(known)
    steps = steps_in(calls_in(lambda: generate(NEW_TOKENS)))
    accepted = engine.last.accepted.total() / engine.last.steps
    if not accepted:
        raise RuntimeError("no guess was accepted")
    generate(1)
    token = Walk(calls_in(lambda: generate(1)))
    longest = max({code for step in steps for code in step.calls}, key=lines_of)
    middle = sorted(steps, key=lambda step: len(step.calls))[len(steps) // 2]
    return Counts(middle, token, name_of(longest), lines_of(longest), accepted)


def excesses(counts: Counts, step_calls: int, step_files: int, token_calls: int, longest: int) -> list[str]:
    """Return a line for each limit that is exceeded."""
    found = [
        ("calls of a step", len(counts.step.calls), step_calls),
        ("files of a step", counts.step.files, step_files),
        ("calls of a call of one token", len(counts.token.calls), token_calls),
        (f"lines of {counts.longest}", counts.lines, longest),
    ]
    return [f"{what}: {value}, and at most {limit} are allowed" for what, value, limit in found if value > limit]


_limit = {"type": COUNT, "default": sys.maxsize, "show_default": "none"}


@click.command(help=__doc__)
@click.option("--step-calls", help="Most calls of a step.", **_limit)
@click.option("--step-files", help="Most files of a step.", **_limit)
@click.option("--token-calls", help="Most calls of a call of one token.", **_limit)
@click.option("--longest", help="Most lines of a function that a step calls.", **_limit)
@click.option("--names", is_flag=True, help="Name the functions.")
def main(names: bool, **limits: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored.FOLDER, costs.SECONDS = Path(folder), 0.05
        counts = count(small_model())
    walks = {"a greedy step": counts.step, "a call of one token": counts.token}
    columns = ["", "calls", "functions", "files", "changes of file"]
    rows = [[what, len(walk.calls), walk.functions, walk.files, walk.changes] for what, walk in walks.items()]
    print(table(columns, rows, "lrrrr"))
    print(
        f"\n{counts.accepted:.1f} guesses accepted a step; the longest function: {counts.longest}, {counts.lines} lines"
    )
    if names:
        for what, walk in walks.items():
            print(f"\n{what}:\n{walk}")
    if wrong := excesses(counts, **limits):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
