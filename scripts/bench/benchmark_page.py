"""The page that shows a benchmark's results, and its pictures."""

import itertools
from pathlib import Path

from bench.methods import PUBLISHED
from bench.pages import table
from bench.speedups import OURS, RESAMPLES, SPREAD, gains, seconds_per_token, title

ENVIRONMENT = ("processor", "threads", "python", "torch", "transformers", "lookahead")

BASELINES = (  # methods that write a token per step
    "plain", "static-compiled", "lade-plain", "vllm-plain", "vllm-sgl", "llama-plain", "llama-q8_0", "llama-q4_0",
    "ik-plain", "ik-q8_0", "ik-q4_0", "openvino-plain", "ortgenai-plain",
)  # fmt: skip
OTHERS = (
    "prompt-lookup", "assisted", "lade-15-5-15", "vllm-ngram", "vllm-suffix", "llama-ngram-simple", "llama-ngram-mod",
    "openvino-lookup", "economize-lookup", "flashspec-lookup", "ortgenai-ngram", *PUBLISHED,
)  # fmt: skip
FAMILIES = {"plain decoding": "tab:gray", "lookahead": "tab:blue", "others' guesses": "tab:orange"}

NOTES = f"""\
- Prompts are in the model's chat template if it has one, unless the command says --raw.
- Times are wall-clock times: for each prompt, the median of its repeats. ms/token with the prompt divides the sum over
  the prompts by their new tokens; without the prompt, it leaves out the first token and the time until the second pass
  begins. (llama.cpp and OpenVINO report the time of the first token themselves. After the time of llama.cpp's whole
  request, a slash and the time by its server's own account follow.)
- {OURS}'s share: {OURS}'s time per token, divided by this row's: the median over the prompts. Below 1, {OURS} is
  faster.
- x plain: the sum of plain's times, divided by this row's. The interval in brackets holds {SPREAD:.0%} of {RESAMPLES}
  resamples of the prompts.
- x reading: ms/token without the prompt, divided by the time in which as many threads read the weights of a pass once,
  in sequence, in the same run. Guesses and packed weights can bring it below 1.
- first token: mean time until the first token exists and the second forward pass begins.
- tokens/step: new tokens after the first, per forward pass after the prefill. The first pass of prompt-lookup and
  assisted already verifies guesses, so for these it is all tokens per pass.
- identical: prompts whose text equals plain's in every repeat, token for token; "-" for a method that draws other
  samples from the same seed. agree: share of all tokens that are before the first difference. margin: where texts
  part, the largest gap between plain's best two tokens, in logits. Methods of q8_0 and q4_0 have other weights, so
  other texts, unless the model has the same format; ortgenai computes in float32.
- step cost: mean time of a step's forward pass, relative to steps-of-one, the same loop without guesses (for -torch
  methods, steps-of-one-torch).
- efficiency: speed-up after the first token over steps-of-one (for -torch methods, over steps-of-one-torch), divided
  by (tokens/step / step cost), the speed-up from the passes alone. Guessing, verifying and learning lower it below 1.
"""

COLUMNS = [
    "method", "ms/token without the prompt", "with the prompt", f"{OURS}'s share, without", "with", "x plain",
    "x reading", "first token, ms", "tokens/step", "identical", "agree", "margin",
]  # fmt: skip
STEP_COLUMNS = ["method", "x steps-of-one", "tokens/step", "step cost", "efficiency"]


def markdown(report: dict, pictures: list[Path]) -> str:
    where = report["environment"]
    why = where["why_no_ratios"]
    peers = [f"environment of {peer}: " + ", ".join(f"{name} {version}" for name, version in versions.items())
             for peer, versions in where["peers"].items()]  # fmt: skip
    parts = [
        f"# Benchmark\n\n`{where['command']}`",
        "; ".join([", ".join(f"{name} {where[name]}" for name in ENVIRONMENT), *peers]),
        f"{where['prompts']}, {where['max_new_tokens']} new tokens at most, repeats: {where['repeats']}.",
        *(f"![{picture.stem}]({picture.name})" for picture in pictures),
        *([f"**Only times and counts: {why}.**"] if why else []),
    ]
    for cell in report["cells"]:
        size, seconds = cell["reading"]["bytes"], cell["reading"]["seconds"]
        parts += [
            f"## {cell['model']}, {title(cell)}",
            f"Reading the weights of a pass once, {size / 1e6:.0f} MB, takes {1000 * seconds:.2f} ms "
            f"({size / seconds / 1e9:.0f} GB/s). At one token per pass, that allows {1 / seconds:.0f} tokens/s.",
            table(COLUMNS, (_cells(row, None if why else seconds) for row in cell["table"]), "lrrrrrrrrrrr"),
        ]
        if why:
            continue
        measured = [row for row in cell["table"] if row.get("step_cost") is not None]
        if len(measured) > 1:
            parts += ["What a step costs and yields:", table(STEP_COLUMNS, map(_step_cells, measured), "lrrrr")]
        if earned := gains(cell["prompts"]):
            stages = [[row["what"], row["from"], row["to"], row["later_speedup"], row["speedup"]] for row in earned]
            columns = ["what is added", "from", "to", "times as fast without the prompt", "with the prompt"]
            parts += ["What each part earns, in the median prompt:", table(columns, stages, "lllrr")]
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


def _number(row: dict, name: str, digits: int = 2) -> str:
    return "-" if row[name] is None else f"{row[name]:.{digits}f}"


def _cells(row: dict, reading: float | None) -> list[str]:
    """reading: seconds to read the weights of a pass; None for a page without ratios."""
    if "failed" in row:
        return [row["method"], f"failed: {row['failed'].replace('|', '/')}", *[""] * (len(COLUMNS) - 2)]
    low, high = row["interval"]
    own = "" if row["own_ms_per_token"] is None else f" / {row['own_ms_per_token']:.2f}"
    ratios = [""] * 4
    if reading:
        later = row["ms_per_later_token"]
        ratios = [_number(row, "our_later_share"), _number(row, "our_share"),
                  f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})",
                  "-" if later is None else f"{later / (1000 * reading):.2f}"]  # fmt: skip
    return [
        row["method"], _number(row, "ms_per_later_token"), _number(row, "ms_per_token") + own,
        *ratios,
        _number(row, "first_token_ms", 1), _number(row, "tokens_per_step"),
        "-" if row["identical"] is None else f"{row['identical']}/{row['prompts']}",
        "-" if row["agreement"] is None else f"{row['agreement']:.0%}",
        "" if row["largest_margin"] is None else f"up to {row['largest_margin']:.3g}",
    ]  # fmt: skip


def _step_cells(row: dict) -> list[str]:
    names = ("speedup_over_one", "tokens_per_step", "step_cost", "efficiency")
    return [row["method"], *(_number(row, name) for name in names)]


def draw(report: dict, out: Path) -> list[Path]:
    """Draw the speed-ups of each model and, if several contexts were measured, the times by context."""
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
    """Draw a panel for each cell, with a bar for each method's speed-up over plain, and its interval."""
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
            others = "others' guesses" if row["method"] in OTHERS else "lookahead"
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
