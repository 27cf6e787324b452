"""Draw the pictures of docs/design.md from the code.

    python scripts/draw_design.py --out docs

rooms.svg shows the purpose and the imports of each package, in the order of the layers in pyproject.toml. step.svg
shows the tokens of a step and its mask. pool.svg shows what a pool knows after a text, and its guesses. budget.svg
shows how many of these guesses a step verifies. Needs the extra `test` (import-linter).
"""

import ast
from html import escape
from pathlib import Path

import click
import grimp
import numpy as np

from lookahead.guessing.budget import Pace
from lookahead.passes.costs import StepCosts
from lookahead.step import lay_out
from ngram_pool import GuessTree, NgramPool
from ngram_pool.table import KINDS

ROOT = Path(__file__).parents[1]
ROOMS = ("tools", "engine", "sources", "guessing", "passes", "models", "cpu")
AT_THE_TOP, AT_THE_BOTTOM = "wrap, stream, vllm", "step, stats, config, compat"
ROOM_OF_MODULE = {
    **dict.fromkeys(("wrapping", "sequences", "streaming", "vllm"), AT_THE_TOP),
    **dict.fromkeys(("step", "stats", "config", "compat", "decoding_pass", "vocabulary"), AT_THE_BOTTOM),
    **{room: room for room in ROOMS},
    "extending": "guessing",  # a list of names
}
PURPOSES = {
    AT_THE_TOP: "What a user calls.",
    AT_THE_BOTTOM: "Plain data: a step, its layout, its mask; counts; settings.",
}
WIDTH, HEIGHT, GAP, LEFT = 560, 46, 22, 20


def room_of(module: str) -> str | None:
    """Return the room of a module, None for the package itself."""
    package, _, rest = module.partition(".")
    return package if package == "ngram_pool" else ROOM_OF_MODULE.get(rest.split(".")[0])


def purpose(room: str) -> str:
    """Return the first sentence of the room's docstring."""
    if room in PURPOSES:
        return PURPOSES[room]
    package = room if room == "ngram_pool" else f"lookahead/{room}"
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")))
    return docstring.split(".")[0] + "."


def arrows() -> set[tuple[str, str]]:
    """Return (room, room that it imports from) pairs."""
    graph = grimp.build_graph("lookahead", "ngram_pool", exclude_type_checking_imports=True)
    imports = ((m, other) for m in graph.modules for other in graph.find_modules_directly_imported_by(m))
    pairs = {(room_of(module), room_of(imported)) for module, imported in imports}
    return {(above, below) for above, below in pairs if above and below and above != below}


def rooms() -> str:
    """Return an SVG with rooms from top to bottom, and an arc from each room to each room that it imports from."""
    names = ["tools", AT_THE_TOP, *ROOMS[1:], AT_THE_BOTTOM, "ngram_pool"]
    top = {room: 20 + i * (HEIGHT + GAP) for i, room in enumerate(names)}
    right = LEFT + WIDTH
    parts = []
    for above, below in sorted(arrows()):
        begin, end = top[above] + HEIGHT * 0.65, top[below] + HEIGHT * 0.35
        reach = right + 24 + 0.3 * (end - begin)
        curve = f"M{right} {begin:.0f} C{reach:.0f} {begin:.0f} {reach:.0f} {end:.0f} {right + 4} {end:.0f}"
        color = "#c0392b" if end < begin else "#7f8c8d"  # red: upwards
        parts.append(f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="1.2" marker-end="url(#head)"/>')
    for room in names:
        box = rectangle(LEFT, top[room], WIDTH, HEIGHT, 'rx="6" fill="#eef3f8" stroke="#5b7da3"')
        words = text(LEFT + 14, top[room] + 20, room, 15) + text(LEFT + 14, top[room] + 37, purpose(room), 12)
        parts.append(box + words)
    return picture(right + 230, top[names[-1]] + HEIGHT + 20, parts)


CELL = 26
WORDS = ["return", "x", "+", "y", "*", "y", "n", "-"]  # of the root and of the guesses
COLORS = {"root": "#f4c95d", "guess": "#9ccc9c", "window": "#a9c4e4"}


def step() -> str:
    """Return an SVG with the tokens of a step, each connected to its parent, and the tokens that each of them sees.

    The step has a root, seven guesses and a window of W = 3 and N = 3.
    """
    tree = GuessTree.of(range(1, 8), [-1, 0, 1, 0, 3, -1, 5])
    step = lay_out(0, tree, window=[np.arange(8, 11), np.arange(11, 14)])
    window = len(step) - 1 - step.guesses
    names = WORDS + [f"w{i}" for i in range(window)]
    colors = [COLORS[kind] for kind in ("root", *["guess"] * step.guesses, *["window"] * window)]
    parts = [text(20, 24, "The tokens of a step, by position", 14), text(420, 24, "What each of them sees", 14)]
    lanes = lanes_of(step.parents.tolist())
    places = [(30 + 74 * depth, 70 + 40 * lane) for depth, lane in zip(step.depths.tolist(), lanes, strict=True)]
    parts += edges(step.parents.tolist(), places, 56)
    for row, (x, y) in enumerate(places):
        box = rectangle(x, y - 13, 56, 26, f'rx="5" fill="{colors[row]}"')
        parts.append(box + text(x + 28, y + 5, names[row], 13, "middle"))
    left, top = 480, 60
    for row in range(len(step)):
        parts.append(text(left - 8, top + CELL * row + 17, names[row], 12, "end"))
        seen = [color if sees else "#f7f7f7" for color, sees in zip(colors, step.ancestors[row], strict=True)]
        for column, fill in enumerate(["#d9d9d9", *seen]):  # the cache first
            parts.append(rectangle(left + CELL * column, top + CELL * row, CELL - 2, CELL - 2, f'fill="{fill}"'))
    parts.append(text(left, top - 8, "cache | root | guesses | window", 12))
    legend = [("root", "root: the last accepted token"), ("guess", "guess tree"), ("window", "Jacobi window")]
    bottom = top + CELL * len(step) + 24
    for i, (name, words) in enumerate(legend):
        parts.append(rectangle(20 + 220 * i, bottom, 14, 14, f'fill="{COLORS[name]}"'))
        parts.append(text(40 + 220 * i, bottom + 12, words, 12))
    return picture(left + CELL * (len(step) + 1) + 20, bottom + 30, parts)


SENTENCE = "a = sum ( x ) ; b = sum ( y ) ; c = max ( x ) ; d = sum ( x ) ; e = max ("
TEXT = SENTENCE.split()
# Seconds of passes over 1, 2, 4, ..., 128 rows: benchmarks/cpu-2-cores/tune-80M-float32.txt, context 256.
COSTS = np.array([11.60, 11.75, 12.57, 14.65, 23.31, 38.09, 70.79, 133.96]) / 1000
RECENT = 5, 10  # tokens and rows of the steps before
IDS = {word: i for i, word in enumerate(dict.fromkeys(TEXT))}


def guessed(count: int) -> tuple[NgramPool, list[int], GuessTree, list[str]]:
    """Return a pool that has learned TEXT, the ids of TEXT, ``count`` guesses of the pool, and their words."""
    known, ids, words = NgramPool(memory_mb=0.1), [IDS[word] for word in TEXT], list(IDS)
    known.follow(ids)
    tree = known.guess(ids, count)
    return known, ids, tree, [words[token] for token in tree.tokens]


def said(known: NgramPool, ids: list[int], kind: tuple[int, int]) -> list[tuple[str, float]]:
    """Return the next words and their probabilities by one kind of context."""
    (entry,) = known._entries(np.array([ids[-16:]]), kind)
    if entry < 0:
        return []
    words, weights, tokens = list(IDS), known._table.weights[entry], known._table.tokens[entry]
    return sorted(((words[t], float(w)) for t, w in zip(tokens, weights, strict=True) if w > 0), key=lambda x: -x[1])


def pool() -> str:
    """Return an SVG with the contexts at the end of a text, the pool's evidence for each, and its guess tree."""
    known, ids, tree, names = guessed(8)
    shown, cell = TEXT[-9:], 46
    parts = [text(20, 24, "The end of the text, and what each kind of context knows of it", 14)]
    for i, word in enumerate(shown):
        parts.append(rectangle(20 + cell * i, 40, cell - 4, 26, f'rx="5" fill="{COLORS["root"]}"'))
        parts.append(text(20 + cell * i + (cell - 4) // 2, 58, word, 13, "middle"))
    y = 78
    for skip, length in KINDS:
        next_words = said(known, ids, (skip, length))
        for i in range(max(len(shown) - length, 0), len(shown) - skip):
            parts.append(rectangle(20 + cell * i, y, cell - 4, 16, f'rx="3" fill="{COLORS["window"]}"'))
        words = ", ".join(f"{word} {chance:.0%}" for word, chance in next_words[:4]) or "not seen yet"
        parts.append(text(20 + cell * len(shown) + 12, y + 13, words if length else f"everywhere: {words}", 12))
        y += 24
    y += 34
    parts.append(text(20, y, "The tree that it guesses: all kinds mixed, the surest branches first", 14))
    parents, depths = [-1, *(1 + tree.parents)], [0, *tree.depths]  # with the root
    lanes = lanes_of(parents)
    places = [(20 + 96 * depth, y + 32 + 38 * lane) for depth, lane in zip(depths, lanes, strict=True)]
    parts += edges(parents, places, 76)
    labels = [TEXT[-1], *(f"{name}  {p:.0%}" for name, p in zip(names, tree.probabilities, strict=True))]
    for (x, y_node), label in zip(places, labels, strict=True):
        fill = COLORS["guess" if x > 20 else "root"]
        parts.append(rectangle(x, y_node - 13, 76, 26, f'rx="5" fill="{fill}"'))
        parts.append(text(x + 38, y_node + 5, label, 12, "middle"))
    return picture(900, y + 32 + 38 * max(lanes) + 30, parts)


def budget() -> str:
    """Return an SVG with the tokens that a step yields and costs by the number of guesses, and the chosen number."""
    *_, tree, names = guessed(16)
    pace = Pace(StepCosts(COSTS, np.zeros(2)))
    for _ in range(500):
        pace.count(*RECENT, length=0)
    counts = np.arange(len(tree) + 1)
    ranked = tree.probabilities[tree.ranking]
    tokens = 1 + np.concatenate([[0.0], np.cumsum(ranked)])
    costs = pace.rate() * (pace.costs(1 + counts, 0) + pace.costs.between(1 + counts))
    (chosen,) = pace.choose([tree], 0, 0)
    left, bottom, wide = 80, 300, 34

    def y(value: float) -> float:
        return bottom - 34 * value

    parts = [text(20, 24, "How many guesses a step verifies: tokens, by the number of guesses", 14)]
    lines = [(tokens, "#4f9d4f", "that it should yield"), (costs, "#c0392b", "that its time yields elsewhere")]
    for row, (values, color, words) in enumerate(lines):
        points = " ".join(f"{left + wide * n:.0f},{y(value):.1f}" for n, value in zip(counts, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(rectangle(left + 20, 46 + 20 * row, 22, 3, f'fill="{color}"'))
        parts.append(text(left + 50, 52 + 20 * row, words, 12))
    x = left + wide * chosen
    parts.append(f'<path d="M{x} {y(tokens[chosen]):.1f} L{x} {y(costs[chosen]):.1f}" stroke="#333" stroke-width="2"/>')
    parts.append(text(x + 8, int(y(costs[chosen])) + 20, f"the largest gain: {chosen} guesses", 12))
    for n, (node, chance) in enumerate(zip(tree.ranking, ranked.tolist(), strict=True), 1):
        fill = COLORS["guess"] if n <= chosen else "#e5e5e5"
        parts.append(rectangle(left + wide * n - 15, bottom + 10, 30, 20, f'rx="3" fill="{fill}"'))
        parts.append(text(left + wide * n, bottom + 24, names[node], 10, "middle"))
        parts.append(text(left + wide * n, bottom + 46, f"{100 * chance:.0f}", 10, "middle"))
    parts.append(text(left - 8, bottom + 46, "chance, %", 10, "end"))
    for value in range(1, 8):
        parts.append(text(left - 16, int(y(value)) + 4, str(value), 11, "end"))
    return picture(left + wide * len(counts) + 20, bottom + 64, parts)


def lanes_of(parents: list[int]) -> list[int]:
    """Return the lane of each node of a tree: a first child stays in its parent's, another child begins a new lane."""
    lanes = [0]
    for node, parent in enumerate(parents[1:], 1):
        lanes.append(max(lanes) + 1 if parent in parents[:node] else lanes[parent])
    return lanes


def edges(parents: list[int], places: list[tuple[int, int]], width: int) -> list[str]:
    """Return an arrow to each node but the root, from the right side of its parent. width: that of a node."""
    pairs = [(places[parent], place) for parent, place in zip(parents[1:], places[1:], strict=True)]
    line = '<path d="M{} {} L{} {}" stroke="#7f8c8d" marker-end="url(#head)"/>'
    return [line.format(x + width, y, *place) for (x, y), place in pairs]


def rectangle(x: int, y: int, width: int, height: int, style: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'


def text(x: int, y: int, words: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


# The colours of the drawings in dark mode.
DARK = {
    "white": "#161b22", "#eef3f8": "#1d2733", "#f7f7f7": "#21262d", "#d9d9d9": "#484f58", "#e5e5e5": "#30363d",
    "#f4c95d": "#755b12", "#9ccc9c": "#2f6038", "#a9c4e4": "#2d4c74",
}  # fmt: skip
STYLE = "\n".join(
    [
        "text { fill: #1f2328 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 }",
        *(f'[fill="{light}"] {{ fill: {dark} }}' for light, dark in DARK.items()),
        "}",
    ]
)


def picture(width: int, height: int, parts: list[str]) -> str:
    """Return an SVG file."""
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">
<style>
{STYLE}
</style>
<rect width="100%" height="100%" fill="white"/>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#7f8c8d"/></marker></defs>
{chr(10).join(parts)}
</svg>
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(file_okay=False, exists=True, path_type=Path), required=True)
def main(out: Path) -> None:
    for draw in (rooms, step, pool, budget):
        (out / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
