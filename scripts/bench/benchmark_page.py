"""The page that shows a benchmark's results, and its pictures."""

import itertools
from pathlib import Path

from bench.pages import table
from bench.speedups import RESAMPLES, SPREAD, seconds_per_token, title

ENVIRONMENT = ("processor", "threads", "python", "torch", "transformers", "lookahead")

BASELINES = ("plain", "static-compiled", "lade-plain", "vllm-plain")  # one token per step
OTHERS = ("prompt-lookup", "assisted", "lade-15-5-15", "vllm-ngram", "vllm-suffix")
FAMILIES = {"plain decoding": "tab:gray", "lookahead": "tab:blue", "speculation by others": "tab:orange"}

NOTES = f"""\
- Times are of whole calls, prefill included: for each prompt the median of its repeats. ms/token divides the sum over
  the prompts by their new tokens. The brackets hold {SPREAD:.0%} of {RESAMPLES} resamples of the prompts.
- first token: mean time until the first token exists and the second forward pass begins.
- tokens/step: new tokens after the first, per forward pass after the prefill. The first pass of prompt-lookup and
  assisted already verifies guesses: there, all tokens per pass.
- step cost: mean time of a step's forward pass, relative to steps-of-one, the same loop without guesses.
- efficiency: speed-up after the first token over steps-of-one (for -torch methods, over steps-of-one-torch), divided
  by (tokens/step / step cost), the speed-up from the passes alone. Guessing, verifying and learning lower it below 1.
- identical: prompts whose text equals plain's in every repeat, token for token; "-" for a method that draws other
  samples from the same seed. margin: where texts part, the largest gap between plain's best two tokens, in logits.
"""

COLUMNS = [
    "method", "ms/token", "tokens/s", "x plain", "x steps-of-one", "first token, ms", "tokens/step", "step cost",
    "efficiency", "identical", "margin",
]  # fmt: skip


def markdown(report: dict, pictures: list[Path]) -> str:
    where = report["environment"]
    peers = [f"environment of {peer}: " + ", ".join(f"{name} {version}" for name, version in versions.items())
             for peer, versions in where["peers"].items()]  # fmt: skip
    parts = [
        f"# Benchmark\n\n`{where['command']}`",
        "; ".join([", ".join(f"{name} {where[name]}" for name in ENVIRONMENT), *peers]),
        f"{where['prompts']}, {where['max_new_tokens']} new tokens at most, repeats: {where['repeats']}.",
        *(f"![{picture.stem}]({picture.name})" for picture in pictures),
    ]
    for cell in report["cells"]:
        size, seconds = cell["reading"]["bytes"], cell["reading"]["seconds"]
        parts += [
            f"## {cell['model']}, {title(cell)}",
            f"Reading all weights, {size / 1e6:.0f} MB, takes {1000 * seconds:.2f} ms "
            f"({size / seconds / 1e9:.0f} GB/s). At one token per pass, that allows {1 / seconds:.0f} tokens/s.",
            table(COLUMNS, map(_cells, cell["table"]), "lrrrrrrrrrr"),
        ]
        categories = list(dict.fromkeys(row["category"] for row in cell["prompts"]))
        if len(categories) > 1:
            parts += ["Times plain by category:", _by_category(cell["prompts"], categories)]
    return "\n\n".join(parts) + "\n\n" + NOTES


def _by_category(rows: list[dict], categories: list[str]) -> str:
    def pace(method: str, category: str) -> float:
        return seconds_per_token([row for row in rows if (row["method"], row["category"]) == (method, category)])

    methods = list(dict.fromkeys(row["method"] for row in rows))
    speedups = [[method, *(pace("plain", c) / pace(method, c) for c in categories)] for method in methods]
    return table(["method", *categories], speedups, "l" + "r" * len(categories))


def _cells(row: dict) -> list[str]:
    def number(name: str, digits: int = 2) -> str:
        return "-" if row[name] is None else f"{row[name]:.{digits}f}"

    if "failed" in row:
        return [row["method"], f"failed: {row['failed'].replace('|', '/')}", *[""] * (len(COLUMNS) - 2)]
    low, high = row["interval"]
    return [
        row["method"], number("ms_per_token"), number("tokens_per_second", 1),
        f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})", number("speedup_over_one"), number("first_token_ms", 1),
        number("tokens_per_step"), number("step_cost"), number("efficiency"),
        "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        "" if row["largest_margin"] is None else f"up to {row['largest_margin']:.3g}",
    ]  # fmt: skip


def draw(report: dict, out: Path) -> list[Path]:
    """For each model, draw the speed-ups and, if several contexts were measured, the times by context."""
    pictures = []
    for model in dict.fromkeys(cell["model"] for cell in report["cells"]):
        cells = [cell for cell in report["cells"] if cell["model"] == model]
        pictures.append(out.with_name(f"{out.stem}-{model}-speedups.png"))
        draw_speedups(cells, pictures[-1])
        with_context = [cell for cell in cells if cell["context"]]
        if len({cell["context"] for cell in with_context}) > 1:
            pictures.append(out.with_name(f"{out.stem}-{model}-contexts.png"))
            draw_contexts(with_context, pictures[-1])
    return pictures


def draw_speedups(cells: list[dict], path: Path) -> None:
    """Draw a panel for each cell, with a bar for each method: its speed-up over plain and its interval."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    methods = [row["method"] for row in cells[0]["table"] if row["method"] != "plain"]
    columns = min(len(cells), 3)
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(1.6 + 3.6 * columns, 1.1 + lines * (0.9 + 0.26 * len(methods))), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True, sharex=True).ravel()
    largest = max((row["interval"][1] for cell in cells for row in cell["table"] if "failed" not in row), default=1)
    for axes, cell in zip(panels, cells, strict=False):
        for place, row in enumerate([row for row in cell["table"] if row["method"] != "plain"]):
            if "failed" in row:
                axes.text(0.02 * largest, place, "failed", va="center", fontsize=8, color="tab:red")
                continue
            value, (low, high) = row["speedup"], row["interval"]
            others = "speculation by others" if row["method"] in OTHERS else "lookahead"
            family = "plain decoding" if row["method"] in BASELINES else others
            spread = [[max(value - low, 0)], [max(high - value, 0)]]
            axes.barh(place, value, color=FAMILIES[family], xerr=spread, error_kw={"lw": 1, "capsize": 2})
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.text(max(value, high) + 0.02 * largest, place, f"{value:.2f}", va="center", fontsize=8, bbox=box)
        axes.axvline(1, color="black", lw=0.8, ls="--")
        axes.set_title(title(cell), fontsize=9)
        axes.set_yticks(range(len(methods)), methods, fontsize=8)
        axes.set(xlim=(0, 1.15 * largest), ylim=(len(methods) - 0.4, -0.6))
        axes.tick_params(axis="x", labelsize=8, labelbottom=True)
        axes.grid(axis="x", alpha=0.2)
        axes.set_axisbelow(True)
    for axes in panels[len(cells) :]:
        axes.axis("off")
    figure.suptitle(f"{cells[0]['model']}: times as fast as plain decoding", fontsize=10)
    handles = [Patch(color=colour, label=name) for name, colour in FAMILIES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def draw_contexts(cells: list[dict], path: Path) -> None:
    """Draw ms per token by context: two panels for each dtype and temperature, whole call and after the first token."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys((cell["dtype"], cell["temperature"]) for cell in cells))
    contexts = sorted({cell["context"] for cell in cells})
    methods = [row["method"] for row in cells[0]["table"]]
    styles = list(itertools.product(("-", "--"), colormaps["tab10"].colors))
    figure = Figure(figsize=(10, 0.6 + 3.2 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), 2, squeeze=False, sharex=True)
    lines = {}
    for panels, setting in zip(grid, settings, strict=True):
        mine = [cell for cell in cells if (cell["dtype"], cell["temperature"]) == setting]
        mine.sort(key=lambda cell: cell["context"])
        panels[0].set_ylabel("ms per token", fontsize=9)
        for axes, value, what in zip(
            panels, ("ms_per_token", "ms_per_later_token"), ("whole call", "after the first token"), strict=True
        ):
            for method, (line, colour) in zip(methods, styles, strict=False):
                rows = [(cell["context"], row) for cell in mine for row in cell["table"] if row["method"] == method]
                points = [(context, row[value]) for context, row in rows if row.get(value) is not None]
                if points:
                    style = {"marker": "o", "ms": 3, "lw": 1.2, "color": colour, "label": method}
                    (lines[method],) = axes.plot(*zip(*points, strict=True), line, **style)
            axes.set_title(f"{title({**mine[0], 'context': None})}: {what}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [str(context) for context in contexts])
            axes.minorticks_off()
            axes.set_ylim(0, None)
            axes.tick_params(labelsize=8, labelbottom=True)
            axes.grid(alpha=0.2)
    figure.supxlabel("tokens of context", fontsize=9)
    figure.suptitle(cells[0]["model"], fontsize=10)
    figure.legend(handles=list(lines.values()), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
