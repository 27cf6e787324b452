"""Draw the tokens a second of lookahead, llama.cpp and the model's own generate(), from committed results.

    python scripts/draw_speed.py --out docs/speed.svg

A bar is a row of a table in benchmarks/: new tokens divided by the whole time, prompt included.
"""

import json
from pathlib import Path

import click

RESULTS = Path(__file__).parents[1] / "benchmarks" / "cpu-2-cores"
MACHINES = {
    "smollm2-amx": "Intel Xeon with a matrix unit (AMX)",
    "smollm2-48-epyc": "AMD EPYC, with instructions for bf16",
    "smollm2-packed": "older Intel Xeon, without instructions for bf16",
}
METHODS = {
    "plain": "model.generate",
    "llama-plain": "llama.cpp",
    "steps-of-one": "lookahead, no guesses",
    "auto": "lookahead",
}
TITLE = "SmolLM2-135M-Instruct in bf16, two cores: tokens a second, the prompt included"
WIDTH, EDGE, LEFT, BAR, GAP, MOST = 720, 20, 188, 16, 5, 440  # pixels; MOST: of the longest bar
STYLE = """
svg { --paper: #fff; --line: #d0d7de; --ink: #1f2328; --soft: #59636e; --plain: #b6bec7; --peer: #7d8590;
--half: #9fd3ae; --ours: #1a7f37 }
@media (prefers-color-scheme: dark) { svg { --paper: #161b22; --line: #3d444d; --ink: #f0f6fc; --soft: #9198a1;
--plain: #4b535d; --peer: #79828e; --half: #2b6a3d; --ours: #4ac26b } }
.paper { fill: var(--paper); stroke: var(--line) }
.ink { fill: var(--ink) } .soft { fill: var(--soft) } .plain { fill: var(--plain) } .llama-plain { fill: var(--peer) }
.steps-of-one { fill: var(--half) } .auto { fill: var(--ours) }
"""


def rates(name: str) -> dict[str, float]:
    """Return the tokens a second of each method in a result, for greedy decoding."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    (cell,) = [cell for cell in result["cells"] if cell["temperature"] == 0]
    return {row["method"]: row["tokens_per_second"] for row in cell["table"]}


def draw() -> str:
    """Return the SVG."""
    found = {machine: rates(name) for name, machine in MACHINES.items()}
    scale = MOST / max(speeds["auto"] for speeds in found.values())
    y, parts = 40, [f'<text x="{EDGE}" y="32" class="ink" font-weight="600">{TITLE}</text>']
    for machine, speeds in found.items():
        y += 26
        parts.append(f'<text x="{EDGE}" y="{y}" class="soft">{machine}</text>')
        y += 10
        for method, words in METHODS.items():
            weight = ' font-weight="700"' if method == "auto" else ""
            wide, middle = scale * speeds[method], y + BAR - 3.5
            parts += [
                f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" class="ink"{weight}>{words}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="2.5" class="{method}"/>',
                f'<text x="{LEFT + wide + 8:.1f}" y="{middle}" class="ink"{weight}>{speeds[method]:.0f}</text>',
            ]
            y += BAR + GAP
    spoken = "; ".join(
        f"{machine}: " + ", ".join(f"{words} {speeds[method]:.0f}" for method, words in METHODS.items())
        for machine, speeds in found.items()
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" role="img"
font-family="system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif" font-size="14">
<title>{TITLE}. {spoken}</title>
<style>{STYLE}</style>
<rect x=".5" y=".5" width="{WIDTH - 1}" height="{y + 11}" rx="8" class="paper"/>
{chr(10).join(parts)}
</svg>
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(out: Path) -> None:
    out.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
