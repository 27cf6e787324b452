"""Simulate n-gram pools over the replicas of a server, with true answers of a model.

    python scripts/simulate_replicas.py record --model M --passages 1536 --out distinct.jsonl
    python scripts/simulate_replicas.py record --model M --prompts FILE.jsonl --answers 16 --out repeats.jsonl
    python scripts/simulate_replicas.py run --trace distinct.jsonl --out distinct
    python scripts/simulate_replicas.py run --trace repeats.jsonl --zipf --yesterday distinct.jsonl --out repeats
    python scripts/simulate_replicas.py costs --trace distinct.jsonl --out costs

``record`` needs the model, once; the rest goes without. A replica drafts chains from its pool, as a server does that
cannot verify trees, and learns each answer as it comes; the recorded answer says what is accepted. Requests:

    without --zipf  each has a prompt of its own; the prompts left over are yesterday's, of which a base pool is made.
    with --zipf     prompts are drawn by Zipf's law, the k-th likeliest with a chance of 1 / k. A prompt that comes
                    again is answered by its next recorded answer, sampled anew; after the last, by the first again.

They are the same, in the same order, for every number of replicas: with more of them, each sees fewer. Between two
merges replicas know nothing of each other, so one after the other is simulated. A merge adds what each replica has
learned since the last one, and all go on from the result.
"""

import json
import random
import shlex
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
from measure_pool import microseconds
from results import write_results

from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts, up_to_its_end
from ngram_pool import NgramPool, Source
from ngram_pool.kernels import LONGEST

PASSAGE_LINES = 24
BATCH = 64  # answers that are sampled together
REPEATS = 5  # of what is timed
ALONE = "a pool a request"  # instead of a number of replicas
MEASURED = {
    "tokens_per_step": "tokens per step",
    "error": "±",
    "drafted_per_step": "drafted a step",
    "accepted": "of them accepted",
}
SETUP = {
    "start": "starts from",
    "routing": "routing",
    "replicas": "replicas",
    "merge_every": "merged every",
    "per_replica": "requests a replica",
}
TIMES = {
    "memory_mb": "MiB",
    "fill": "full",
    "bytes": "bytes of a file",
    "zipped": "zlib, level 1",
    "save_ms": "save, ms",
    "load_ms": "load, ms",
    "merge_ms": "merge, ms",
    "guess_us": "guess, us",
}
FORMATS = {"tokens_per_step": ".3f", "error": ".3f", "drafted_per_step": ".2f", "accepted": ".1%", "per_replica": ".1f",
           "fill": ".0%", "zipped": ".0%"}  # fmt: skip


def passages(count: int, seed: int) -> list[dict]:
    """Disjoint passages of Python's standard library in random order; its files are the categories."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for begin in range(0, len(lines) - PASSAGE_LINES + 1, PASSAGE_LINES):
            text = "".join(lines[begin : begin + PASSAGE_LINES])
            if text.strip():
                found.append({"question_id": f"{path.name}:{begin + 1}", "category": path.name, "turns": [text]})
    if len(found) < count:
        raise click.UsageError(f"--passages {count}: this Python's standard library has {len(found)}")
    return random.Random(seed).sample(found, count)


@click.group()
def main() -> None:
    """Simulate n-gram pools over the replicas of a server, with true answers of a model."""


@main.command()
@click.option("--model", "model_name", metavar="NAME_OR_PATH", help="The packaged model by default.")
@click.option("--prompts", "prompts_files", multiple=True,
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Prompts in Spec-Bench's format, may be repeated; their categories are the sessions.")  # fmt: skip
@click.option("--passages", "passage_count", type=click.IntRange(min=1), help="Prompts from Python's standard library.")
@click.option("--answers", default=1, show_default=True, type=click.IntRange(min=1), help="Sampled for each prompt.")
@click.option("--temperature", default=0.6, show_default=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def record(model_name, prompts_files, passage_count, answers, temperature, max_new_tokens, seed, out) -> None:
    """Sample answers and write them down: a line for each prompt, with session, prompt and answers as token ids."""
    if bool(prompts_files) == bool(passage_count):
        raise click.UsageError("give --prompts or --passages")
    prompts = [prompt for file in prompts_files for prompt in read_prompts(file, None)]
    prompts = prompts or passages(passage_count, seed)
    model, tokenizer = load(model_name, "float32")
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids = [tokenizer(prompt["turns"][0]).input_ids for prompt in prompts]
    said: list[list[list[int]]] = [[] for _ in prompts]
    jobs = sorted((number for number in range(len(prompts)) for _ in range(answers)), key=lambda n: len(ids[n]))
    torch.manual_seed(seed)
    with click.progressbar(length=len(jobs), label="answers") as progress:
        for begin in range(0, len(jobs), BATCH):
            batch = jobs[begin : begin + BATCH]
            inputs = tokenizer.pad({"input_ids": [ids[n] for n in batch]}, return_tensors="pt")
            output = model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature, top_k=0,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            for number, answer in zip(batch, output[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
                said[number].append(up_to_its_end(answer, model.generation_config.eos_token_id))
            progress.update(len(batch))
    with open(out, "w", encoding="utf-8") as file:
        for prompt, prompt_ids, texts in zip(prompts, ids, said, strict=True):
            line = {"session": prompt["category"], "prompt": prompt_ids, "answers": texts}
            file.write(json.dumps(line) + "\n")


class Request(NamedTuple):
    """session: whose it is. prompt, answer: int64 token ids."""

    session: str
    prompt: np.ndarray
    answer: np.ndarray


def read_trace(path: Path) -> list[list[Request]]:
    """For each recorded prompt a request an answer; answers of one token, which need no step, are left out.

    Raises ClickException that names the line if the file was not written by ``record``.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            said = json.loads(line)
            answers = [np.array(answer, np.int64) for answer in said["answers"] if len(answer) > 1]
            prompts.append([Request(said["session"], np.array(said["prompt"], np.int64), a) for a in answers])
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(f"{path}, line {number} is not what `record` writes: {error!r}") from error
    return [prompt for prompt in prompts if prompt]


def choose_requests(prompts: list[list[Request]], count: int, zipf: bool, seed: int) -> tuple[list[Request], ...]:
    """Today's requests, in order, and yesterday's, which share no prompt with them (none with ``zipf``)."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(prompts))
    if not zipf:
        if count >= len(prompts):
            raise click.UsageError(
                f"--requests {count} leaves none of the trace's {len(prompts)} prompts for yesterday"
            )
        return [prompts[n][0] for n in order[:count]], [prompts[n][0] for n in order[count:]]
    chances = 1 / np.arange(1, len(prompts) + 1)
    drawn = order[rng.choice(len(prompts), count, p=chances / chances.sum())]
    times = [0] * len(prompts)
    requests = []
    for n in drawn:
        requests.append(prompts[n][times[n] % len(prompts[n])])
        times[n] += 1
    return requests, []


def serve(pool: NgramPool, request: Request, budget: int, min_probability: float) -> tuple[int, int, int, int]:
    """Steps of a request, tokens that they yield, and tokens drafted and accepted; the pool learns on the way.

    The prefill yields the answer's first token, a step its accepted drafts and one more.
    """
    text = np.concatenate([request.prompt, request.answer])
    pool.learn(text[: len(request.prompt) + 1], Source.PROMPT)
    at, steps, drafted, accepted = len(request.prompt) + 1, 0, 0, 0
    while at < len(text):
        draft = pool.guess(text[:at], budget, min_probability, len(text) - at - 1, chain=True).tokens
        right = int(np.cumprod(draft == text[at : at + len(draft)]).sum())
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + right
        new, recent = right + 1, min(at, LONGEST)
        pool.follow(text[at - recent : at + new], start=recent)
        at += new
    return steps, len(request.answer) - 1, drafted, accepted


def route(requests: list[Request], replicas: int | str, routing: str, seed: int) -> np.ndarray:
    """The replica that each request goes to."""
    if replicas == ALONE:
        return np.arange(len(requests))
    rng = np.random.default_rng(seed)
    if routing == "random":
        return rng.integers(replicas, size=len(requests))
    homes = {session: rng.integers(replicas) for session in sorted({request.session for request in requests})}
    return np.array([homes[request.session] for request in requests])


def simulate(
    requests: list[Request], start: NgramPool, homes: np.ndarray, merge_every: int | None, drafting, whole: bool = False
) -> np.ndarray:
    """What `serve` returns for each request, int64 [requests, 4].

    start: what every replica begins with. homes: from `route`. merge_every: requests, of all replicas together.
    drafting: the last two arguments of `serve`. whole: merge pools as they are, with what they all started from.
    """
    results = np.zeros((len(requests), 4), np.int64)
    every = merge_every or len(requests)
    for begin in range(0, len(requests), every):
        numbers = np.arange(begin, min(begin + every, len(requests)))
        merged = deepcopy(start)
        for replica in np.unique(homes[numbers]):
            pool = deepcopy(start)
            for number in numbers[homes[numbers] == replica]:
                results[number] = serve(pool, requests[number], *drafting)
            if merge_every:
                merged.merge(pool, None if whole else start)
        start = merged
    return results


def summary(results: np.ndarray) -> dict:
    """Tokens per step of all requests together with its standard error over requests, and acceptance."""
    steps, tokens, drafted, accepted = results.sum(0)
    rate = tokens / steps
    deviations = (results[:, 1] - rate * results[:, 0]) / (steps / len(results))
    return {
        "requests": len(results),
        "tokens_per_step": float(rate),
        "error": float(deviations.std() / len(results) ** 0.5),
        "accepted": float(accepted / max(drafted, 1)),
        "drafted_per_step": float(drafted / steps),
    }


def learned_from(requests: list[Request], memory_mb: float) -> NgramPool:
    """A pool as `lookahead pool build` makes it of past prompts and answers."""
    pool = NgramPool(memory_mb)
    for request in requests:
        pool.learn(np.concatenate([request.prompt, request.answer]), Source.FILE)
    return pool


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Markdown of these columns, under their names; None means never."""

    def cell(name: str, value) -> str:
        if isinstance(value, float):
            return format(value, FORMATS.get(name, ".3g"))
        return "never" if value is None else str(value)

    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[cell(name, row[name]) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(rows: list[dict], path: Path) -> None:
    """Tokens per step by number of replicas, a panel for each start."""
    from matplotlib.figure import Figure

    starts = list(dict.fromkeys(row["start"] for row in rows))
    figure = Figure(figsize=(5.2 * len(starts), 3.8), layout="constrained")
    panels = figure.subplots(1, len(starts), sharey=True, squeeze=False)[0]
    for axes, start in zip(panels, starts, strict=True):
        mine = [row for row in rows if row["start"] == start]
        numbered = [row for row in mine if row["replicas"] != ALONE]
        shared = next(row for row in numbered if row["replicas"] == 1)
        alone = next(row for row in mine if row["replicas"] == ALONE)
        kinds = list(dict.fromkeys((row["routing"], row["merge_every"]) for row in numbered if row["replicas"] > 1))
        for routing, every in kinds:
            line = [
                shared,
                *(r for r in numbered if r["replicas"] > 1 and (r["routing"], r["merge_every"]) == (routing, every)),
            ]
            label = f"merged every {every} requests" if every else "never merged"
            axes.errorbar(
                [row["replicas"] for row in line], [row["tokens_per_step"] for row in line],
                label=label + ("" if routing == "random" else ", sticky sessions"),
                fmt="o-" if routing == "random" else "s--", ms=4,
            )  # fmt: skip
        axes.axhline(alone["tokens_per_step"], color="grey", lw=0.8, ls=":", label=ALONE)
        axes.set(
            xscale="log", xlabel=f"replicas, {shared['requests']} requests among them", title=f"starting from {start}"
        )
        axes.set_xticks([row["replicas"] for row in line], [str(row["replicas"]) for row in line])
        axes.minorticks_off()
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("tokens per step")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


simulation_options = [
    click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
                 help="What `record` wrote."),
    click.option("--memory-mb", default=16.0, show_default=True, help="Of every pool, in MiB."),
    click.option("--budget", default=16, show_default=True, help="Most tokens of a draft."),
    click.option("--min-probability", default=0.2, show_default=True, help="Of a drafted token to be accepted."),
    click.option("--requests", "count", default=512, show_default=True, type=click.IntRange(min=1)),
    click.option("--seed", default=0, show_default=True, help="Of requests and routing."),
    click.option("--out", required=True, type=click.Path(path_type=Path), help="Write OUT.json, OUT.md and a plot."),
]  # fmt: skip


def with_simulation_options(command: Callable) -> Callable:
    for option in reversed(simulation_options):
        command = option(command)
    return command


def whole_numbers(ctx, param, value: str) -> list[int]:
    try:
        numbers = [int(number) for number in value.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive whole numbers")
    return numbers


@main.command()
@with_simulation_options
@click.option("--zipf", is_flag=True, help="Requests that repeat prompts.")
@click.option("--yesterday", "yesterday_trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Another trace, to make the base pool of.")  # fmt: skip
@click.option("--replicas", default="1,4,16,64,256,1000", show_default=True, callback=whole_numbers)
@click.option("--intervals", default="32,256", show_default=True, callback=whole_numbers,
              help="Requests, of all replicas together, from merge to merge.")  # fmt: skip
def run(
    trace, memory_mb, budget, min_probability, count, seed, out, zipf, yesterday_trace, replicas, intervals
) -> None:
    """Tokens per step by number of replicas, routing, and how often pools are merged."""
    prompts = read_trace(trace)
    requests, yesterday = choose_requests(prompts, count, zipf, seed)
    if yesterday_trace:
        yesterday = [request for prompt in read_trace(yesterday_trace) for request in prompt]
    starts = {"nothing": NgramPool(memory_mb)}
    if yesterday:
        starts["yesterday's pool"] = learned_from(yesterday, memory_mb)
    setups = []
    for number in sorted({1, *replicas}):
        if number == 1:
            setups.append((1, "random", None))
        else:
            setups += [(number, "random", every) for every in (None, *sorted(intervals, reverse=True))]
            setups.append((number, "by session", None))
    setups.append((ALONE, "random", None))
    rows = []
    with click.progressbar(length=len(setups) * len(starts), label="simulating", file=sys.stderr) as progress:
        for name, start in starts.items():
            for number, routing, every in setups:
                homes = route(requests, number, routing, seed)
                results = simulate(requests, start, homes, every, (budget, min_probability))
                row = {"start": name, "routing": routing, "replicas": number, "merge_every": every}
                row["per_replica"] = count / len(np.unique(homes))
                rows.append(row | summary(results))
                progress.update(1)
    seen = [(request.prompt.tobytes(), request.answer.tobytes()) for request in requests]
    about = (
        f"{count} requests of {len({prompt for prompt, _ in seen})} prompts, "
        f"{1 - len(set(seen)) / count:.0%} of them with an answer that came before; "
        f"{len({request.session for request in requests})} sessions; {len(yesterday)} requests of yesterday. "
        f"{np.mean([len(r.prompt) for r in requests]):.0f} tokens a prompt and "
        f"{np.mean([len(r.answer) for r in requests]):.0f} an answer on average. "
        f"Pools of {memory_mb:g} MiB; chains of at most {budget} tokens above a probability of {min_probability:g}. "
        "±: standard error over requests; requests a replica: of those that got any."
    )
    write("Pools over replicas", f"{about}\n\n{table(rows, SETUP | MEASURED)}\n\n![plot]({out.name}.png)", rows, out)
    draw(rows, out.with_suffix(".png"))


def timed(pool: NgramPool, requests: list[Request], drafting) -> dict:
    """What a pool costs, one thread: milliseconds, bytes of its file, and microseconds of a guess."""
    later, target = deepcopy(pool), deepcopy(pool)
    for request in requests[:64]:
        later.learn(np.concatenate([request.prompt, request.answer]))
    contexts = [request.answer[:16] for request in requests]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool"
        return {
            "fill": len(pool) / pool.capacity,
            "save_ms": microseconds(lambda: pool.save(path), REPEATS) / 1000,
            "load_ms": microseconds(lambda: NgramPool.load(path), REPEATS) / 1000,
            "merge_ms": microseconds(lambda: target.merge(later, pool), REPEATS) / 1000,
            "guess_us": microseconds(lambda: [pool.guess(c, *drafting, chain=True) for c in contexts], REPEATS)
            / len(contexts),
            "bytes": path.stat().st_size,
            "zipped": len(zlib.compress(path.read_bytes(), 1)) / path.stat().st_size,
        }


@main.command()
@with_simulation_options
@click.option("--parts", default="2,16,64", show_default=True, callback=whole_numbers)
@click.option("--sizes", default="1,16,64,256", show_default=True, callback=whole_numbers, help="MiB to time.")
def costs(trace, memory_mb, budget, min_probability, count, seed, out, parts, sizes) -> None:
    """What merging loses against one pool, what memory buys, and what pools cost to save, load, merge and ask."""
    requests, yesterday = choose_requests(read_trace(trace), count, False, seed)
    alone, drafting = route(requests, ALONE, "random", seed), (budget, min_probability)

    def measured(pool: NgramPool, **about) -> dict:
        click.echo(f"  {about}", err=True)
        return about | summary(simulate(requests, pool, alone, None, drafting))

    merging = []
    for size in (memory_mb, 4 * memory_mb):
        merging.append(measured(learned_from(yesterday, size), memory_mb=size, learned="all by one pool"))
        for number in parts:
            merged = NgramPool(size)
            for part in range(number):
                merged.merge(learned_from(yesterday[part::number], size))
            merging.append(measured(merged, memory_mb=size, learned=f"by {number} pools, merged"))
    homes = route(requests, 64, "random", seed)
    base = learned_from(yesterday, memory_mb)
    bases = [
        {"merged": name, **summary(simulate(requests, base, homes, 32, drafting, whole))}
        for name, whole in (("what is new", False), ("whole pools", True))
    ]
    times = []
    for size in sizes:
        click.echo(f"  times at {size} MiB", err=True)
        times.append(timed(learned_from(yesterday, size), requests, drafting) | {"memory_mb": size})
    text = "Yesterday's pool, asked by today's requests, each from a copy of its own:\n\n"
    text += table(merging, {"memory_mb": "MiB", "learned": "yesterday learned"} | MEASURED)
    text += "\n\n64 replicas, starting from yesterday's pool, merged every 32 requests:\n\n"
    text += table(bases, {"merged": "merged"} | MEASURED)
    text += "\n\nOne thread. Merge: what 64 more requests have taught; guess: a chain of at most "
    text += f"{budget} tokens.\n\n" + table(times, TIMES)
    write("What pools cost", text, {"merging": merging, "bases": bases, "times": times}, out)


def write(title: str, text: str, results: list | dict, out: Path) -> None:
    """Print a page and write it to OUT.md, and what is behind it to OUT.json; paths are cut to names."""
    command = "python scripts/simulate_replicas.py " + shlex.join(Path(word).name for word in sys.argv[1:])
    click.echo(text)
    write_results(out, f"# {title}\n\n    {command}\n\n{text}\n", {"command": command, "results": results})


if __name__ == "__main__":
    main()
