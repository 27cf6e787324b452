"""The page that shows a benchmark's figures, and its pictures."""

import itertools
from pathlib import Path

from bench.pages import table
from bench.speedups import RESAMPLES, SPREAD, seconds_per_token, title

ENVIRONMENT = ("processor", "threads", "python", "torch", "transformers", "lookahead")

BASELINES = ("plain", "static-compiled", "lade-plain", "vllm-plain")  # one token a step, by design
OTHERS = ("prompt-lookup", "assisted", "lade-15-5-15", "vllm-ngram", "vllm-suffix")
FAMILIES = {"plain decoding": "tab:gray", "lookahead": "tab:blue", "speculation by others": "tab:orange"}

NOTES = f"""\
- A time is that of a whole call, prefill included, the median of a prompt's repeats; ms/token is the sum over the
  prompts by that of their new tokens. In brackets, what holds {SPREAD:.0%} of {RESAMPLES} resamples of the prompts.
- first token: mean time until it is there and the second forward pass begins.
- tokens/step: new tokens after the first, by forward passes after the prefill; where the first pass takes guesses
  beside the prompt, as in prompt-lookup and assisted, all tokens by all passes.
- step cost: the mean forward pass of a step, by that of steps-of-one, the same loop without guesses.
- efficiency: the speed-up after the first token over steps-of-one (of -torch: over its own), by tokens/step / step
  cost, which is what the passes alone would give. Guessing, verifying and learning make it less than 1.
- identical: prompts of which the text of every repeat is that of plain, token for token; "-" for a method that draws
  other samples from the same seed. margin: where texts part, how far apart the best two tokens were in plain decoding,
  in logits, at most.
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
        parts += [f"## {cell['model']}, {title(cell)}", _limit(**cell["reading"]), _table(cell["table"])]
        categories = list(dict.fromkeys(row["category"] for row in cell["prompts"]))
        if len(categories) > 1:
            parts += ["Times plain by category:", _by_category(cell["prompts"], categories)]
    return "\n\n".join(parts) + "\n\n" + NOTES


def _limit(bytes: int, seconds: float) -> str:
    return (
        f"Memory yields all weights, {bytes / 1e6:.0f} MB, in {1000 * seconds:.2f} ms ({bytes / seconds / 1e9:.0f} "
        f"GB/s): at a token a pass, that allows for {1 / seconds:.0f} tokens/s."
    )


def _by_category(rows: list[dict], categories: list[str]) -> str:
    def pace(method: str, category: str) -> float:
        return seconds_per_token([row for row in rows if (row["method"], row["category"]) == (method, category)])

    methods = list(dict.fromkeys(row["method"] for row in rows))
    speedups = [[method, *(pace("plain", c) / pace(method, c) for c in categories)] for method in methods]
    return table(["method", *categories], speedups, "l" + "r" * len(categories))


def _table(rows: list[dict]) -> str:
    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def cells(row: dict) -> list[str]:
        if "failed" in row:
            return [row["method"], f"failed: {row['failed'].replace('|', '/')}", *[""] * (len(COLUMNS) - 2)]
        low, high = row["interval"]
        return [
            row["method"], number(row["ms_per_token"]), number(row["tokens_per_second"], 1),
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})", number(row["speedup_over_one"]),
            number(row["first_token_ms"], 1), number(row["tokens_per_step"]), number(row["step_cost"]),
            number(row["efficiency"]), "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
            "" if row["largest_margin"] is None else f"up to {row['largest_margin']:.3g}",
        ]  # fmt: skip

    return table(COLUMNS, map(cells, rows), "lrrrrrrrrrr")


def draw(report: dict, out: Path) -> list[Path]:
    """For each model, a picture of speed-ups and, where several contexts were measured, one of times by context."""
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


def family(method: str) -> str:
    if method in BASELINES:
        return "plain decoding"
    return "speculation by others" if method in OTHERS else "lookahead"


def draw_speedups(cells: list[dict], path: Path) -> None:
    """A panel a cell: a bar a method, its speed-up over plain with its interval."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    methods = [row["method"] for row in cells[0]["table"] if row["method"] != "plain"]
    columns = min(len(cells), 3)
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(1.6 + 3.6 * columns, 1.1 + lines * (0.9 + 0.26 * len(methods))), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True, sharex=True).ravel()
    largest = max((row["interval"][1] for cell in cells for row in cell["table"] if "failed" not in row), default=1)
    for axes, cell in zip(panels[: len(cells)], cells, strict=True):
        rows = {row["method"]: row for row in cell["table"]}
        for place, method in enumerate(methods):
            row = rows[method]
            if "failed" in row:
                axes.text(0.02 * largest, place, "failed", va="center", fontsize=8, color="tab:red")
                continue
            value, (low, high) = row["speedup"], row["interval"]
            spread = [[max(value - low, 0)], [max(high - value, 0)]]
            axes.barh(place, value, color=FAMILIES[family(method)], xerr=spread, error_kw={"lw": 1, "capsize": 2})
            axes.text(
                max(value, high) + 0.02 * largest, place, f"{value:.2f}", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
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
    """Two panels a dtype and temperature: ms per token by context, of the whole call and after the first token."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    styles = itertools.product(("-", "--"), colormaps["tab10"].colors)

    settings = list(dict.fromkeys((cell["dtype"], cell["temperature"]) for cell in cells))
    contexts = sorted({cell["context"] for cell in cells})
    methods = [row["method"] for row in cells[0]["table"]]
    style_of = dict(zip(methods, styles, strict=False))
    figure = Figure(figsize=(10, 0.6 + 3.2 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), 2, squeeze=False, sharex=True)
    lines = {}
    for row_of_panels, (dtype, temperature) in zip(grid, settings, strict=True):
        mine = [cell for cell in cells if (cell["dtype"], cell["temperature"]) == (dtype, temperature)]
        for axes, value, what in zip(
            row_of_panels, ("ms_per_token", "ms_per_later_token"), ("whole call", "after the first token"), strict=True
        ):
            for method in methods:
                points = [
                    (cell["context"], row[value])
                    for cell in sorted(mine, key=lambda cell: cell["context"])
                    for row in cell["table"]
                    if row["method"] == method and row.get(value) is not None
                ]
                if points:
                    line, colour = style_of[method]
                    lines[method] = axes.plot(
                        *zip(*points, strict=True), line, marker="o", ms=3, lw=1.2, color=colour, label=method
                    )[0]
            axes.set_title(f"{title({**mine[0], 'context': None})}: {what}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [str(context) for context in contexts])
            axes.minorticks_off()
            axes.set_ylim(0, None)
            axes.tick_params(labelsize=8, labelbottom=True)
            axes.grid(alpha=0.2)
        row_of_panels[0].set_ylabel("ms per token", fontsize=9)
    figure.supxlabel("tokens of context", fontsize=9)
    figure.suptitle(cells[0]["model"], fontsize=10)
    figure.legend(handles=list(lines.values()), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
