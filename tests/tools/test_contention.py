"""A ratio to plain decoding is shown only if the machine was quiet while both sides were measured."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner
from draw_terminal import main as draw_picture
from hypothesis import given
from hypothesis import strategies as st

from lookahead.sources.layer_skip import SkippedLayers
from lookahead.tools import commands, contention
from lookahead.tools.cli import main
from lookahead.tools.contention import BUSY, Span, _between, _Clocks, _Thread, why_no_ratio
from lookahead.tools.live import Meter, Rate
from lookahead.tools.tuning import StepTimes

RATIO = re.compile(r"\d\.\d+ ?(times (plain|as fast|the tokens))")
PROMPT = "def add(a, b):\n"


@pytest.mark.parametrize(
    ("end", "on_cpu", "lost"),
    [
        (_Clocks(1.0, 2.0, 1.0, {"1": (10, 5)}, 0.0), True, 0.0),  # both processors
        (_Clocks(1.0, 1.0, 0.5, {"1": (9.5, 5)}, 0.0), True, 0.0),  # two threads by turns, each asleep meanwhile
        (_Clocks(1.0, 1.1, 0.5, {"1": (9.5, 5.4)}, 0.0), True, 0.4),  # a thread that waits
        (_Clocks(1.0, 1.1, 0.5, {"1": (9.5, 5.4), "2": (0.3, 0.2)}, 0.0), True, 0.6),  # and one that has begun
        (_Clocks(1.0, 1.1, 0.5, {"2": (0.3, 0.2)}, 0.0), True, 0.2),  # and one that has ended
        (_Clocks(1.0, 1.1, 0.5, {"1": (9.5, 5.4), "2": (0.04, 0.2)}, 0.0), True, 0.4),  # and one that hardly runs
        (_Clocks(1.0, 2.0, 1.0, {"1": (10, 5)}, 0.3), True, 0.3),  # the host ran others
        (_Clocks(1.0, 0.3, 0.3, {"1": (9.3, 5)}, 0.0), True, 0.7),  # stopped, or swapped out
        (_Clocks(1.0, 0.3, 0.3, {"1": (9.3, 5)}, 0.0), False, 0.0),  # waits for a GPU
        (_Clocks(1.0, 1.5, 0.6, None, 0.0), True, 0.4),  # another system
        (_Clocks(1.0, 0.3, 0.3, None, 0.0), False, None),
    ],
)
def test_what_is_lost(end, on_cpu, lost):
    begin = _Clocks(0.0, 0.0, 0.0, {"1": _Thread(9.0, 5.0)}, 0.0)
    of_each = end.of_each and {name: _Thread(*times) for name, times in end.of_each.items()}
    span = _between(begin, end._replace(of_each=of_each), on_cpu)
    assert (span.seconds, span.lost) == (1.0, pytest.approx(lost))


shares = st.floats(0, 1, allow_subnormal=False)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), shares), min_size=1, max_size=6))
def test_one_busy_span_is_enough(parts):
    spans = [Span(seconds, seconds * share) for seconds, share in parts]
    is_busy = any(span.lost > span.most_lost for span in spans)
    assert bool(why_no_ratio(*spans)) is is_busy
    assert why_no_ratio(*spans).startswith(BUSY) is is_busy
    assert why_no_ratio(*spans, Span(1.0, None))
    total = sum(spans, Span())
    assert total.seconds == pytest.approx(sum(span.seconds for span in spans))
    assert bool(why_no_ratio(total)) is (total.lost > total.most_lost)
    assert (total + Span(1.0, None)).lost is None
    assert 0.1 * total.seconds <= total.most_lost <= min(0.2 * total.seconds, 0.1 * total.seconds + 0.01) * (1 + 1e-9)


def test_a_kernel_that_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(contention, "THREADS", str(tmp_path / "none"))
    assert contention._threads() is None
    monkeypatch.setattr(contention, "THREADS", str(tmp_path))
    for name, content in (("7", "0 0 0\n"), ("8", None)):  # without accounting; a thread that has just ended
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "schedstat").write_text(content)
    assert contention._threads() is None
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "schedstat").write_text("3000000000 500000000 7\n")
    assert contention._threads() == {"7": (0.0, 0.0), "9": (3.0, 0.5)}


# What a quiet machine with two processors said of decoding for 0.2 s, with one thread that computes for each of them.
SHORT = _Thread(0.1996, 0.0014), _Thread(0.1963, 0.0002)


@pytest.mark.parametrize(
    ("helper", "stolen", "is_busy"),
    [
        (_Thread(0.0, 0.0), 0.0, False),
        (_Thread(0.0001, 0.0404), 0.0, False),  # a timer that waits for the two
        (_Thread(0.0, 0.0), 0.02, False),  # two ticks, of either processor
        (_Thread(0.15, 0.05), 0.0, True),  # a third thread that computes
        (_Thread(0.0001, 0.0202), 0.04, True),
    ],
)
def test_a_short_span(helper, stolen, is_busy):
    begin = _Clocks(0.0, 0.0, 0.0, dict.fromkeys("123", _Thread(0.0, 0.0)), 0.0)
    end = _Clocks(0.2, 0.3959, 0.1996, dict(zip("123", (*SHORT, helper), strict=True)), stolen)
    assert bool(why_no_ratio(_between(begin, end, on_cpu=True))) is is_busy


SPANS = "2", "0.2"  # seconds
LOAD = """
import os, subprocess, sys, time
import torch
from lookahead.tools.contention import watch, why_no_ratio

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the spinners inherit it
    processors = 1
else:
    processors = os.cpu_count()
spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * processors)]
try:
    time.sleep(1)  # until all of them spin
    for seconds in map(float, sys.argv[1:]):
        span, until = watch(torch.device("cpu")), time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        print(why_no_ratio(span()))
finally:
    for spinner in spinners:
        spinner.kill()
"""


def test_spinners_on_every_processor_allow_no_ratio():
    done = subprocess.run([sys.executable, "-c", LOAD, *SPANS], capture_output=True, text=True, check=True)
    assert [line[: len(BUSY)] for line in done.stdout.splitlines()] == [BUSY] * len(SPANS), done.stdout


def test_a_process_that_was_stopped_allows_no_ratio():
    span = contention.watch(torch.device("cpu"))
    time.sleep(0.3)  # as a stop, it takes time and no processor
    assert why_no_ratio(span()).startswith(BUSY)


# -- wherever a ratio is shown ----------------------------------------------------------------------------------------

LOSES: dict[str, Callable[[float], float | None]] = {
    "quiet": lambda seconds: 0.05 * seconds,
    "busy": lambda seconds: 0.5 * seconds,
    "not known": lambda seconds: None,
}


class Machine:
    """Spans lose what they are told: each its own, or the last one's."""

    def __init__(self, *kinds: str):
        self.kinds = list(kinds)

    def between(self, begin, end, on_cpu) -> Span:
        kind = self.kinds.pop(0) if len(self.kinds) > 1 else self.kinds[0]
        seconds = end.wall - begin.wall
        return Span(seconds, LOSES[kind](seconds))


def on(monkeypatch, *kinds):
    monkeypatch.setattr(contention, "_between", Machine(*kinds).between)


# The first is of lookahead, the second of plain decoding.
MACHINES = [("quiet",), ("busy",), ("quiet", "busy"), ("busy", "quiet"), ("not known",)]
of_machines = pytest.mark.parametrize("kinds", MACHINES, ids=", ".join)


def says(text: str, kinds) -> None:
    """Check that the text shows a ratio, or says why not."""
    assert bool(RATIO.search(text)) is (kinds == ("quiet",)), text
    assert ("the machine is busy, so no ratio" in text) is ("busy" in kinds), text
    assert ("so no ratio" in text) is (kinds != ("quiet",)), text


@of_machines
def test_a_comparison(kinds, monkeypatch):
    arguments = ["generate", PROMPT, "--max-new-tokens", "12", "--compare"]
    on(monkeypatch, *kinds)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    says(result.stdout, kinds)
    assert "the texts are identical" in result.stdout
    on(monkeypatch, *kinds)
    plain = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["plain"]
    assert (plain["speedup"] is None) is (kinds != ("quiet",))
    assert (plain["why_no_speedup"] is None) is (kinds == ("quiet",))
    assert plain["identical"] is True


@of_machines
def test_the_page_of_a_trace(kinds, monkeypatch, tmp_path):
    on(monkeypatch, *kinds)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["trace", PROMPT, "--max-new-tokens", "12", "--compare", "--out", str(out)])
    assert result.exit_code == 0, result.output
    page = out.read_text(encoding="utf-8")
    plain = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)[1])["plain"]
    assert plain["isSame"] is True
    assert (plain["whyNoRatio"] == "") is (kinds == ("quiet",))
    assert "so no ratio" in plain["whyNoRatio"] or kinds == ("quiet",)


@of_machines
def test_the_statistics_of_a_chat(kinds, monkeypatch):
    on(monkeypatch, *kinds)
    result = CliRunner().invoke(main, ["chat", "--max-new-tokens", "12"], input="import\n/stats\n")
    assert result.exit_code == 0, result.output
    says(result.stdout, kinds)


def test_plain_decoding_is_measured_again_once_the_machine_is_quiet(monkeypatch):
    on(monkeypatch, "quiet", "busy", "quiet")
    result = CliRunner().invoke(main, ["chat", "--max-new-tokens", "12"], input="import\n/stats\n/stats\n/stats\n")
    assert [line.count(BUSY) for line in result.stdout.splitlines() if "ratio" in line or "plain" in line] == [1, 0, 0]


@pytest.mark.parametrize("kinds", [("quiet",), ("busy",), ("not known",)], ids=", ".join)
def test_the_live_line(kinds, monkeypatch):
    quiet, loses = Span(1.0, 0.0), LOSES[kinds[0]]
    for plain, ours in ((quiet, kinds[0]), (Span(1.0, loses(1.0)), "quiet")):
        on(monkeypatch, ours)
        meter = Meter(lambda: None, Rate(1.0, plain))
        for _ in range(3):
            meter.count()
            time.sleep(0.06)  # until it looks again
        says(str(meter), kinds)


@pytest.mark.parametrize("kinds", [("quiet",), ("busy",)], ids=", ".join)
def test_tuning(kinds, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(commands, "find_skipped_layers", lambda *_: SkippedLayers((1,), 0.5, 0.9))
    monkeypatch.setattr(SkippedLayers, "save", lambda self, model: tmp_path)
    monkeypatch.setattr(StepTimes, "picture", lambda self, path, title, has_ratios: drawn.append(has_ratios))
    on(monkeypatch, *kinds)
    arguments = ["tune", "--seconds", "1", "--contexts", "16", "--threads", "1", "--layer-skip"]
    result = CliRunner().invoke(main, [*arguments, "--picture", str(tmp_path / "x.png")])
    assert result.exit_code == 0, result.output
    says(result.output, kinds)
    assert drawn == [kinds == ("quiet",)]


def test_a_picture_without_ratios(tmp_path):
    times = StepTimes({"split": {8: {1: 1e-3, 2: 2e-3}}})
    sizes = []
    for has_ratios in (True, False):
        times.picture(tmp_path / "x.svg", "", has_ratios)
        sizes.append((tmp_path / "x.svg").read_text().count('id="axes_'))
    assert sizes == [2, 1]


@of_machines
def test_the_moving_picture(kinds, monkeypatch, tmp_path):
    on(monkeypatch, *kinds)
    out = tmp_path / "picture.svg"
    result = CliRunner().invoke(draw_picture, ["--max-new-tokens", "8", "--out", str(out)])
    assert (result.exit_code == 0) is out.exists() is (kinds == ("quiet",)), result.output
    assert ("so no ratio" in result.output) is (kinds != ("quiet",))
