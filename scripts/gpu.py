"""Measure everything that a GPU has to show, in stages of a few minutes.

    python scripts/gpu.py --out FOLDER
    python scripts/gpu.py --out FOLDER --model M --prompts FILE.jsonl --minutes 9
    python scripts/gpu.py --out FOLDER --device cpu --small

Each stage runs in its own process and keeps FOLDER/STAGE.md and FOLDER/STAGE.json up to date. If it fails, or its time
is over, these files stay, and the next stage begins. Run the command again to continue; it skips complete stages. To
repeat a stage, remove STAGE.json. FOLDER/all.md holds all pages. Nothing is downloaded or installed.

--small rehearses the same stages with a few tokens of small models, on any device.
"""

import importlib
import json
import multiprocessing
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import click  # the only foreign import here, so that `environment` can report what is missing

from bench import cli
from bench.pages import command_line, write_results

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"
LEAST = 20  # seconds that a stage needs to begin
MOST = 270  # most seconds of a stage, so that others get time, too
STOPPING = 15  # seconds before its limit after which a stage begins nothing more

# The most important ones first.
STAGES = (
    "environment", "tests", "costs-8B", "texts-ballasted-greedy", "profile", "texts-greedy", "costs-135M",
    "texts-ballasted-sampled", "batches", "memory", "audit", "texts-sampled", "costs-1B", "costs-3B",
)  # fmt: skip
SMALL_STAGES = tuple(stage for stage in STAGES if not stage.startswith("costs-") or stage == "costs-8B")


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    model: str | None  # folder or name; None: the packaged model
    prompts: Path
    device: str
    is_small: bool
    out: Path
    command: str


@dataclass(frozen=True)
class Report:
    """Where a stage writes its results, and its time limit."""

    path: Path  # without a suffix
    until: float  # the time (`time.time`) after which it should begin nothing more

    def write(self, text: str, results: dict, is_complete: bool = False) -> None:
        """Replace the page and the results."""
        page = f"# {self.path.name}\n\n{text.strip()}\n"
        write_results(self.path, page, {"is_complete": is_complete, **results})

    @property
    def has_time(self) -> bool:
        return time.time() < self.until


def run_stage(name: str, plan: Plan, limit: float) -> None:
    """Run a stage in this process. limit: seconds until the process is ended."""
    report = Report(plan.out / name, time.time() + limit - STOPPING)
    stage, *kind = name.split("-")
    module = importlib.import_module("bench.gpu_environment" if stage == "environment" else "bench.gpu_stages")
    text, results = getattr(module, stage)(plan, report, *kind)
    report.write(text, results, is_complete=report.has_time and not results.get("status"))


def attempt(name: str, plan: Plan, limit: float) -> None:
    try:
        run_stage(name, plan, limit)
    except BaseException:
        (plan.out / f"{name}.failed.txt").write_text(traceback.format_exc())
        traceback.print_exc()
        sys.exit(1)


def is_complete(path: Path) -> bool:
    try:
        return json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))["is_complete"]
    except (OSError, ValueError, KeyError):
        return False


def what_became(path: Path) -> str:
    """Return how a stage ended, from its results."""
    results = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    if results.get("status"):
        return f"its command ended with exit status {results['status']}"
    if not results["is_complete"]:
        return "ended early: its time was over"
    return f"complete, but for {len(results['errors'])} errors on its page" if results.get("errors") else "complete"


def in_own_process(name: str, plan: Plan, limit: float) -> str:
    """Run a stage for at most ``limit`` seconds. Returns how it ended."""
    (plan.out / f"{name}.failed.txt").unlink(missing_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=attempt, args=(name, plan, limit))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return "stopped: its time was over"
    if process.exitcode:
        return f"failed with exit status {process.exitcode}"
    return what_became(plan.out / name)


def join_pages(out: Path, became: dict[str, str]) -> str:
    """Write all.md: how the stages ended, and their pages."""
    lines = "\n".join(f"- {name}: {what}" for name, what in became.items())
    parts = [f"# Stages\n\n{lines}\n"]
    parts += [path.read_text(encoding="utf-8") for name in STAGES if (path := out / f"{name}.md").exists()]
    for name in became:
        if (path := out / f"{name}.failed.txt").exists():
            parts.append(f"# {name} failed\n\n```\n{path.read_text()[-3000:]}```\n")
    (out / "all.md").write_text("\n".join(parts), encoding="utf-8")
    return lines


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for the results.")
@click.option("--model", metavar="NAME_OR_PATH", help="A Llama that writes the texts. Default: the packaged model.")
@click.option("--prompts", default=PROMPTS, type=cli.FILE,
              help="In Spec-Bench's JSONL format. A model with a chat template gets them in it.")  # fmt: skip
@click.option("--device", default="cuda", show_default=True, help="cpu, cuda, cuda:1, ...")
@click.option("--minutes", default=9.0, show_default=True, type=click.FloatRange(min=0.5),
              help="Time of this run; the next run does the rest.")  # fmt: skip
@click.option("--stages", help=f"Some of {','.join(STAGES)}.  [default: all, in this order]")
@click.option("--small", "is_small", is_flag=True, help="Rehearse with few tokens of small models.")
def main(out, model, prompts, device, minutes, stages, is_small) -> None:
    chosen = stages.split(",") if stages else list(SMALL_STAGES if is_small else STAGES)
    unknown = [name for name in chosen if name not in STAGES]
    if unknown:
        raise click.BadParameter(
            f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}", param_hint="--stages"
        )
    end = time.time() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(model, prompts, device, is_small, out, command_line(__file__))
    chosen.sort(key=lambda name: (out / f"{name}.json").exists())  # stages that were begun before come last
    became: dict[str, str] = {}
    for number, name in enumerate(chosen, 1):
        left = min(end - time.time(), MOST)
        if is_complete(out / name):
            became[name] = what_became(out / name)
        elif left < LEAST:
            became[name] = "not begun: run the command again"
        else:
            began = time.time()
            click.echo(f"[{number}/{len(chosen)}] {name}: at most {left:.0f} s", err=True)
            became[name] = f"{in_own_process(name, plan, left)} ({time.time() - began:.0f} s)"
            click.echo(f"[{number}/{len(chosen)}] {name}: {became[name]}", err=True)
            join_pages(out, became)
    click.echo(join_pages(out, became))
    if any("complete" not in what for what in became.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
