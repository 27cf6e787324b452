"""Attack a wrapped model for a long time. Report what it withstood.

    python scripts/attack.py cases --number 20000      random cases of tests/exactness/test_lossless.py
    python scripts/attack.py interrupts --number 300   interrupted calls, and the calls after them
    python scripts/attack.py cycles --wraps 1000 --calls 10000
    python scripts/attack.py threads --calls 200

If a case fails, it is printed, and the exit status is 1. On two cores, `cases` takes most of an hour, the others some
minutes each. `cases` needs pytest and hypothesis (extra `test`).
"""

import ctypes
import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel

import lookahead
import ngram_pool
from bench.tiny_models import llama
from lookahead import LookaheadConfig, NgramPool
from lookahead.passes import costs, stored

ROOT = Path(__file__).parents[1]
OURS = [Path(package.__file__).parent for package in (lookahead, ngram_pool)]
PATIENCE = 120  # seconds; a longer call counts as hanging
GROWTH = 16 * 2**20  # most bytes by which memory may grow after the first tenth of the wraps or calls
PROMPTS = [[[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]], [[9, 4, 9, 4, 9]], [[5, 6, 7, 8, 5, 6], [3, 9, 3, 9, 3, 9]]]


def text(model: PreTrainedModel, prompt: list[list[int]], tokens: int = 24) -> list[list[int]]:
    """Return greedy ids."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return model.generate(torch.tensor(prompt), **options).tolist()


def texts(model: PreTrainedModel, tokens: int = 24) -> list[list[list[int]]]:
    """Return greedy ids for single prompts and a batch."""
    return [text(model, prompt, tokens) for prompt in PROMPTS]


def in_thread(call: Callable[[], object]) -> object:
    """Return the result of ``call``, which runs in another thread. It hangs if this thread still holds a lock."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait([future], PATIENCE)
    if not future.done():
        where = "".join(traceback.format_stack(sys._current_frames()[thread.ident]))
        raise AssertionError(f"hangs for {PATIENCE} s:\n{where}")
    return future.result()


def demand(right: bool, otherwise: str) -> None:
    if not right:
        raise click.ClickException(otherwise)


@click.group(help=__doc__.split("\n")[0])
def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT by default
    torch.set_num_threads(1)
    stored.FOLDER, costs.SECONDS = Path(tempfile.mkdtemp()), 0.05


@main.command()
@click.option("--number", default=20_000, show_default=True)
@click.option("--processes", default=os.cpu_count(), show_default="one for each core")
@click.option("--seed", default=0, show_default=True, help="Of the first process; the next one gets the next number.")
def cases(number: int, processes: int, seed: int) -> None:
    """Random architectures, batches, masks, options and settings, by tests/exactness/test_lossless.py."""
    began = time.perf_counter()
    environment = os.environ | {"LOOKAHEAD_CASES": str(-(-number // processes)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "tests/exactness/test_lossless.py", "-k", "test_any_case", "-p",
               "no:cacheprovider", "--hypothesis-show-statistics"]  # fmt: skip
    start = partial(subprocess.Popen, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    running = [start([*command, f"--hypothesis-seed={seed + i}"]) for i in range(processes)]
    outputs = [process.communicate()[0] for process in running]
    failed = [output for process, output in zip(running, outputs, strict=True) if process.returncode]
    click.echo("".join(failed), nl=False)
    passing = sum(int(count) for output in outputs for count in re.findall(r"(\d+) passing,", output))
    click.echo(f"{passing} random cases are identical, in {time.perf_counter() - began:.0f} s")
    sys.exit(int(bool(failed) or passing < number))


class Stop(BaseException):
    """An exception thrown into a thread. It is no Exception, which a probe would take for the model's refusal."""


def interrupted(call: Callable[[], object], delay: float, by_signal: bool) -> str | None:
    """Interrupt ``call`` after ``delay`` seconds. Return our function that was interrupted; None if it had ended."""
    main_thread, ended = threading.main_thread().ident, False

    def interrupt() -> None:
        if by_signal:
            signal.pthread_kill(main_thread, signal.SIGINT)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main_thread), ctypes.py_object(Stop))

    timer = threading.Timer(delay, interrupt)
    try:
        timer.start()
        call()
        ended = True
        timer.join()
        time.sleep(0.01)  # wait for a late interrupt
    except (KeyboardInterrupt, Stop) as error:
        if not ended:
            places = [(Path(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
            ours = [f"{path.stem}.{name}" for path, name in places if any(map(path.is_relative_to, OURS))]
            return ours[-1] if ours else "generate"
    return None


@main.command()
@click.option("--number", default=300, show_default=True)
@click.option("--seed", default=0, show_default=True)
def interrupts(number: int, seed: int) -> None:
    """SIGINT, and exceptions thrown from another thread, at random moments of generate()."""
    rng = random.Random(seed)
    places, rounds = Counter(), 0
    expected = {model_seed: texts(llama(model_seed)) for model_seed in range(3)}
    while places.total() < number:
        rounds += 1
        if rounds % 10 == 1:  # take a new model; its first call measures step costs
            model_seed = rng.randrange(3)
            model, pool = llama(model_seed), NgramPool(1)
            configuration = {**vars(model.config)}
            config = rng.choice([LookaheadConfig(), LookaheadConfig(budget=16, window_size=3)])
            lookahead.wrap(model, config, pool)
            length = 1.0  # seconds of a call
        delay, by_signal = rng.uniform(0, length), rng.random() < 0.5
        case = f"seed {seed}, round {rounds}, {'SIGINT' if by_signal else 'exception'} after {delay:.4f} s, {config}"
        began = time.perf_counter()
        try:
            place = interrupted(partial(texts, model), delay, by_signal)
        except BaseException as error:
            raise click.ClickException(f"{case}: turned into {error!r}\n{traceback.format_exc()}") from error
        if place is None:
            length = min(length, time.perf_counter() - began)
        else:
            places[place] += 1
        case += f", in {place}"
        changed = {name: value for name, value in vars(model.config).items() if configuration.get(name) != value}
        demand(vars(model.config) == configuration, f"{case}: the configuration holds {changed}")
        try:
            right = in_thread(partial(texts, model)) == expected[model_seed]
            in_thread(pool.check_integrity)
        except BaseException as error:
            raise click.ClickException(f"{case}: the next call {error!r}") from error
        demand(right, f"{case}: the next call writes another text")
        # An automatic budget may correctly be 0 after a slow pass.
        guessed = model.lookahead.config.budget == "auto" or model.lookahead.last.accepted.total()
        demand(guessed, f"{case}: the next call accepts no guess")
        if rounds % 10 == 0:
            lookahead.unwrap(model)
            demand(texts(model) == expected[model_seed], f"{case}: the unwrapped model writes another text")
    click.echo(f"{number} interrupts; each time, the next call was right. Interrupted functions:")
    for place, count in places.most_common():
        click.echo(f"{count:6d}  {place}")


def _held() -> tuple[int, int, int]:
    """Return this process's resident memory in bytes, and its numbers of open handles and of threads."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
    return resident, len(os.listdir("/proc/self/fd")), threads


def watched(what: str, number: int, once: Callable[[], None]) -> None:
    """Call ``once`` ``number`` times; memory, handles and threads must not grow after the first tenth."""
    began, trace = time.perf_counter(), []
    for i in range(number):
        once()
        if (i + 1) % -(-number // 10) == 0:
            trace.append(_held())
    resident, handles, threads = zip(*trace, strict=True)
    figures = f"memory {', '.join(f'{x / 2**20:.1f}' for x in resident)} MiB, handles {handles}, threads {threads}"
    click.echo(f"{number} {what} in {time.perf_counter() - began:.0f} s: {figures}")
    nothing = resident[-1] - resident[0] <= GROWTH and handles[-1] <= handles[0] and threads[-1] <= threads[0]
    demand(nothing, f"{what} leak memory, handles or threads")


@main.command()
@click.option("--wraps", default=1000, show_default=True)
@click.option("--calls", default=10_000, show_default=True)
def cycles(wraps: int, calls: int) -> None:
    """Wrap, generate and unwrap repeatedly: memory, handles and threads do not grow, parameters do not change."""
    model = llama()
    held = list(model.parameters())
    copies = [parameter.detach().clone() for parameter in held]
    expected = texts(model, 4)

    def once() -> None:
        demand(texts(model, 4) == expected, "a call writes another text")

    def cycle() -> None:
        lookahead.wrap(model)
        once()
        lookahead.unwrap(model)
        for before, copied, now in zip(held, copies, model.parameters(), strict=True):
            kept = now is before and torch.equal(now, copied)
            demand(kept, f"a parameter {list(copied.shape)} is another one after unwrap")

    watched("wraps", wraps, cycle)
    lookahead.wrap(model)
    watched("calls", -(-calls // len(PROMPTS)), once)


@main.command()
@click.option("--calls", default=200, show_default=True)
@click.option("--threads", default=4, show_default=True)
def threads(calls: int, threads: int) -> None:
    """Call one model with one pool from several threads, first alone, then while another thread wraps and unwraps."""
    model, pool = llama(), NgramPool(1)
    expected = texts(model)
    wrong, counts, over = [], Counter(), threading.Event()

    def generate(number: int, pause: float) -> None:
        for i in range(number, calls, threads):
            which = i % len(PROMPTS)
            try:
                if text(model, PROMPTS[which]) != expected[which]:
                    wrong.append(f"call {i} writes another text")
            except Exception:
                wrong.append(f"call {i}: {traceback.format_exc()}")
            counts["calls"] += 1
            time.sleep(pause)

    def change() -> None:
        while not over.is_set():
            for name, act in (("unwrap", lookahead.unwrap), ("wrap", partial(lookahead.wrap, pool=pool))):
                try:
                    act(model)
                    counts[name] += 1
                except RuntimeError as error:  # says that the model is in use
                    counts[f"{name} refused: {error}"] += 1
                except Exception:
                    wrong.append(f"{name}: {traceback.format_exc()}")
                time.sleep(0.002)

    for pause, what in ((0, "alone"), (0.1, "while wrapped and unwrapped")):  # the pause leaves moments without calls
        lookahead.wrap(model, pool=pool)
        counts.clear()
        callers = [threading.Thread(target=generate, args=(i, pause), daemon=True) for i in range(threads)]
        changers = [threading.Thread(target=change, daemon=True)] if pause else []
        for thread in [*callers, *changers]:
            thread.start()
        deadline = time.monotonic() + calls * PATIENCE / 10
        for thread in callers:
            thread.join(max(deadline - time.monotonic(), 0))
        if changers:
            over.set()
            changers[0].join(PATIENCE)
        if any(thread.is_alive() for thread in [*callers, *changers]):
            wrong.append("a thread hangs")
        click.echo(f"{what}: {dict(counts)}")
        demand(not wrong, f"{len(wrong)} failed, first: {''.join(wrong[:1])}")
        lookahead.unwrap(model)
        demand(texts(model) == expected, "the unwrapped model writes another text")


if __name__ == "__main__":
    main()
