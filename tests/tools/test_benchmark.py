"""The benchmark: its page, its figures, its peers and its errors."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import benchmark
import click
import compare_batches
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer
from zoo import tiny_model

from bench import corpora, methods, peer_process, timing
from bench.peer_process import Peer, PeerError
from bench.speedups import SPREAD, gains, speedup_interval, summarise
from lookahead import DEMO_MODEL
from lookahead.engine.sampling import NextTokenRule
from lookahead.sources.jacobi import JacobiBlocks
from lookahead.tools import contention
from lookahead.tools.audit import choice_scores, next_logits
from lookahead.tools.contention import BUSY, Span
from lookahead.tools.loading import load
from lookahead.tools.prompts import read_prompts


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine that is quiet, until its ``lost`` is set: the share of each call."""
    machine = SimpleNamespace(lost=0.0)
    monkeypatch.setattr(timing, "_spans", [])

    def between(begin, end, on_cpu):
        return Span(end.wall - begin.wall, machine.lost * (end.wall - begin.wall))

    monkeypatch.setattr(contention, "_between", between)
    return machine


WORKER = """
import argparse, json, os, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("model", "dtype", "threads", "method", "requests"):
    parser.add_argument("--" + name, required=True)
chosen = parser.parse_args()
with Path(__file__).with_name("starts").open("a") as starts:
    starts.write(chosen.method + "\\n")
if chosen.method == "ngram":
    print(json.dumps({"error": "no such model"}), flush=True)
    sys.exit(1)
print(json.dumps({"ready": True, "versions": {"toy": "1.2"}}), flush=True)
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    if number == 1 and chosen.method == "lade-15-5-15":
        sys.exit("out of memory")
    if number == 1 and chosen.method == "suffix":
        time.sleep(1000)
    if request["temperature"]:
        answer = {"error": "greedy only"}
    else:
        ids = [prompt[:1] * request["max_new_tokens"] for prompt in request["prompts"]]
        answer = {"ids": ids, "seconds": 0.5, "steps": None, "drafted": 6, "accepted": 2}
        answer |= {"first_seconds": 0.2, "own_seconds": 0.4} if chosen.method == "q8_0" else {}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    lines = [
        {"question_id": i, "category": f"code{i}", "turns": [f"def f{i}(x):\n    return x\n\ndef f{i + 1}(x):\n   "]}
        for i in range(2)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Make the environments of two libraries, with toys as workers."""
    for library in ("lade", "vllm", "llama"):
        (tmp_path / library / "bin").mkdir(parents=True)
        (tmp_path / library / "bin" / "python").symlink_to(sys.executable)
        (tmp_path / f"{library}_worker.py").write_text(WORKER)
    monkeypatch.setattr(peer_process, "WORKERS", tmp_path)
    return tmp_path


@pytest.fixture
def peer(peers):
    made = []

    def make(method: str, timeout: float = 60) -> Peer:
        options = ["--model", "m", "--dtype", "float32", "--threads", "1", "--requests", "1", "--method", method]
        made.append(Peer([sys.executable, str(peers / "lade_worker.py"), *options], timeout))
        return made[-1]

    yield make
    for each in made:
        each.close(patience=0)


def run(*arguments):
    return CliRunner().invoke(benchmark.main, [str(argument) for argument in arguments])


def report_of(out):
    return json.loads(out.with_suffix(".json").read_text())


def rows_of(cell):
    return {row["method"]: row for row in cell["table"]}


def test_batches_beside_llama(model, prompts, peers, tmp_path):
    """Each prompt twice, in batches of 1 and 3: the peer gets all of a batch at once, without its padding."""
    options = ("--prompts", prompts, "--sizes", "1,3", "--samples", "2", "--dtype", "float32", "--device", "cpu")
    command = [*options, "--max-new-tokens", "4", "--repeats", "1", "--out", tmp_path / "out", "--peers", peers]
    result = CliRunner().invoke(compare_batches.main, list(map(str, ["--model", model, *command])))
    assert result.exit_code == 0, result.output
    rows = {(row["batch"], row["method"]): row for row in report_of(tmp_path / "out")["table"]}
    assert list(rows) == list(itertools.product((1, 3), ("plain", "fresh pool", "shared pool", "llama.cpp")))
    assert {rows[size, method]["identical"] for size in (1, 3) for method in compare_batches.OURS} == {4}
    peer = rows[3, "llama.cpp"]
    assert (peer["prompts"], peer["identical"], peer["cache_mib"]) == (4, 0, None)
    assert peer["tokens_per_second"] == 16 / (2 * 0.5)  # two batches of 0.5 s, by the toy
    refused = CliRunner().invoke(compare_batches.main, list(map(str, ["--model", "gpt2", *command])))
    assert refused.exit_code == 2
    assert "--peers needs a --model that is a folder, got gpt2" in refused.output


def test_page(model, prompts, tmp_path):
    out = tmp_path / "results" / "run"
    chosen = [m for m in (*methods.PLAIN, *methods.LOOKAHEAD) if m != "static-compiled"]
    result = run(
        "--model", model, "--prompts", prompts, "--methods", ",".join(chosen), "--assistant", model,
        "--max-new-tokens", 8, "--repeats", 2, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    cells = report_of(out)["cells"]
    assert [cell["temperature"] for cell in cells] == [0.6, 0]
    for cell in cells:
        rows = rows_of(cell)
        assert list(rows) == chosen
        assert rows["plain"]["speedup"] == rows["plain"]["tokens_per_step"] == 1
        assert rows["plain"]["interval"] == [1, 1]
        assert rows["steps-of-one"]["speedup_over_one"] == rows["steps-of-one"]["tokens_per_step"] == 1
        for method, row in rows.items():
            assert "failed" not in row
            keeps_draws = method not in ("prompt-lookup", "assisted")
            assert row["identical"] == (2 if keeps_draws or not cell["temperature"] else None)
            assert (row["efficiency"] is None) == (method not in methods.LOOKAHEAD)
    text = out.with_suffix(".md").read_text()
    assert (out.parent / "run-tiny-speedups.png").read_bytes().startswith(b"\x89PNG")
    assert "](run-tiny-speedups.png)" in text
    assert "## tiny, float32, temperature 0.6\n" in text
    assert text.count("\n| auto-torch |") == 2 * 3, "over all prompts, by step and by category"
    assert text.count("\n| guesses | steps-of-one | auto |") == 2
    assert "| method | code0 | code1 |" in text
    assert text.count("| plain | 1.00 | 1.00 |") == 2
    for cell in cells:
        auto, once = rows_of(cell)["auto"], 1000 * cell["reading"]["seconds"]
        assert f" | {auto['ms_per_later_token'] / once:.2f} | {auto['first_token_ms']:.1f} | " in text


def test_a_busy_machine_has_no_ratios(model, prompts, tmp_path, machine):
    out = tmp_path / "run"
    machine.lost = 0.5
    result = run("--model", model, "--prompts", prompts, "--methods", "steps-of-one,auto", "--max-new-tokens", 8,
                 "--repeats", 1, "--temperature", "0", "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert report_of(out)["environment"]["why_no_ratios"].startswith(BUSY)
    text = out.with_suffix(".md").read_text()
    assert BUSY in text
    for line in re.findall(r"^\| (?:plain|steps-of-one|auto) \|.*$", text, re.M):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert float(cells[1]) > 0
        assert cells[3:6] == ["", "", ""]
    assert text.count("\n| auto |") == 1
    assert not list(tmp_path.glob("run*.png"))


def test_differences_are_found(prompts, tmp_path, monkeypatch):
    """A decoder that writes one wrong token is reported as different, with the margin at that place."""
    original = NextTokenRule.record

    def record(self, token):
        return original(self, token + 1 if self.ids.shape[1] == 30 else token)

    monkeypatch.setattr(NextTokenRule, "record", record)
    out = tmp_path / "run"
    result = run("--prompts", prompts, "--methods", "auto", "--max-new-tokens", 24, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    for cell in report_of(out)["cells"]:
        assert cell["model"] == "demo_model", "the packaged model by default"
        assert rows_of(cell)["auto"]["identical"] == 0
        rows = [row for row in cell["prompts"] if row["method"] == "auto"]
        assert all(row["difference"] is not None and row["margin"] > 0 for row in rows)


def test_the_margin_is_that_of_the_draw():
    """If the generator's noise is drawn again, the drawn token has the best score."""
    model, tokenizer = load(None)
    inputs = tokenizer("def f(x):\n    return", return_tensors="pt")
    options = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 12}
    ids = timing.timed(model, inputs, options, 5)[0][0]
    rows = next_logits(model, inputs.input_ids, ids)
    assert [int(choice_scores(row, 0.9, 5, index).argmax()) for index, row in enumerate(rows)] == ids
    assert all(benchmark.margin_at(model, inputs, ids, index, options, 5) > 0 for index in range(len(ids)))


def test_passes_of_this_model_alone_are_counted():
    model = torch.nn.Linear(2, 2)
    with methods.count_passes(model) as counted:
        model(torch.zeros(2))
        model(torch.zeros(2))
    model(torch.zeros(2))
    assert counted.passes == 2


def test_the_memory_limit():
    model = tiny_model("llama").bfloat16()
    found = benchmark.reading(model)
    assert found["bytes"] == 2 * (model.num_parameters() - model.get_input_embeddings().weight.numel())
    assert 0 < found["seconds"] < 1
    assert benchmark.bytes_read(tiny_model("llama", tie_word_embeddings=True)) == found["bytes"] * 2


def test_a_pass_reads_the_chosen_experts():
    model = tiny_model("mixtral")
    layers = [layer.mlp.experts for layer in model.model.layers]
    left_out = sum(weight.nbytes for experts in layers for weight in experts.parameters())
    chosen = left_out * model.config.num_experts_per_tok // model.config.num_local_experts
    embedding = model.get_input_embeddings().weight.nbytes
    assert 0 < chosen < left_out
    rest = 4 * model.num_parameters() - embedding - left_out
    assert benchmark.bytes_read(model) == rest + chosen
    assert rest + chosen < benchmark.bytes_read(model, 2) < rest + 2 * chosen
    assert benchmark.bytes_read(model, 10**6) == rest + left_out


def test_a_pass_looks_up_all_embeddings():
    model = tiny_model("gemma4_text")
    tables = model.get_input_embeddings().weight.nbytes + model.model.embed_tokens_per_layer.weight.nbytes
    assert benchmark.bytes_read(model) == 4 * model.num_parameters() - tables


@pytest.mark.parametrize("line", ["not json", '{"turns": ["x"]}', '{"question_id": 1, "category": "a", "turns": []}'])
def test_bad_prompts_are_named_by_line(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n' + line + "\n")
    result = run("--prompts", path, "--out", tmp_path / "run")
    assert result.exit_code != 0
    assert "line 2" in result.output


def test_contexts(model, prompts, tmp_path):
    out = tmp_path / "run"
    result = run("--model", model, "--prompts", prompts, "--methods", "auto", "--temperature", 0, "--contexts",
                 "none,40,72", "--max-new-tokens", 4, "--repeats", 1, "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [cell["context"] for cell in report_of(out)["cells"]] == [None, 40, 72]
    assert (tmp_path / "run-tiny-contexts.png").read_bytes().startswith(b"\x89PNG")
    text = out.with_suffix(".md").read_text()
    assert "](run-tiny-contexts.png)" in text
    assert "## tiny, float32, greedy, context 72\n" in text


def test_never_slower(model, tmp_path):
    out = tmp_path / "run"
    arguments = ["--model", model, "--never-slower", "--limit", 2, "--max-new-tokens", 6, "--repeats", 1, "--out", out]
    result = run(*arguments, "--methods", "auto", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    (cell,) = report_of(out)["cells"]
    assert cell["temperature"] == 1.5
    assert list(rows_of(cell)) == ["plain", "auto"]
    assert len(cell["prompts"]) == 4
    ids = corpora.random_prompts(9, 50)
    assert np.shape(ids) == (9, 64)
    assert ids == corpora.random_prompts(9, 50)
    assert set(np.ravel(ids)) == set(range(50))


def test_each_call_wraps_and_unwraps(model):
    subject = methods.Subject(str(model), "float32", "cpu", ["plain", "auto", "draft"], str(model), None, 60)
    for method in (*methods.LOOKAHEAD, "plain"):
        engine = methods.Engines(subject.draft_model).begin(method, 0)
        subject.call(method, [5, 6, 7], {"max_new_tokens": 4, "do_sample": False}, 0, 7, engine)
        assert engine is None or engine.last.calls == 1
        assert not hasattr(subject.plain, "lookahead")


def test_what_fails_is_a_row(model, prompts, tmp_path, monkeypatch):
    calls = []

    def guess(*_):
        calls.append(0)
        raise RuntimeError("out of | guesses\nand of more")

    monkeypatch.setattr(JacobiBlocks, "propose", guess)
    out = tmp_path / "run"
    result = run("--model", model, "--prompts", prompts, "--methods", "jacobi,steps-of-one", "--temperature", 0,
                 "--max-new-tokens", 4, "--repeats", 1, "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = rows_of(report_of(out)["cells"][0])
    assert rows["jacobi"] == {"method": "jacobi", "failed": "RuntimeError: out of | guesses"}
    assert rows["steps-of-one"]["identical"] == 2
    assert len(calls) == 1, "a method that failed is not tried again in the cell"
    assert "| jacobi | failed: RuntimeError: out of / guesses |" in out.with_suffix(".md").read_text()


def test_static_cache_compiled(model, prompts, tmp_path, monkeypatch):
    """Use a backend that traces like any other, but runs the traced code unchanged."""

    class Eager(methods.CompileConfig):
        def __init__(self):
            super().__init__(backend="eager", mode=None)

    compiled = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiled.append(0) or original(*args, **options))
    monkeypatch.setattr(methods, "CompileConfig", Eager)
    out = tmp_path / "run"
    arguments = ["--model", model, "--prompts", prompts, "--methods", "static-compiled", "--temperature", 0,
                 "--max-new-tokens", 6, "--repeats", 1, "--out", out]  # fmt: skip
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert rows_of(report_of(out)["cells"][0])["static-compiled"]["identical"] == 2
    assert compiled

    timed = methods.timed

    def slow(model, inputs, options, seed):
        if "compile_config" in options:
            time.sleep(60)
        return timed(model, inputs, options, seed)

    monkeypatch.setattr(methods, "timed", slow)
    result = run(*arguments, "--timeout", 0.1)
    assert result.exit_code == 0, result.output
    assert rows_of(report_of(out)["cells"][0])["static-compiled"]["failed"] == "TimeoutError: took more than 0.1 s"


def test_finished_cells_are_kept(model, prompts, tmp_path, monkeypatch):
    measure = benchmark.measure

    def interrupted(subject, prompts, categories, methods, options, *rest):
        if not options["do_sample"]:
            raise KeyboardInterrupt
        return measure(subject, prompts, categories, methods, options, *rest)

    monkeypatch.setattr(benchmark, "measure", interrupted)
    out = tmp_path / "run"
    result = run("--model", model, "--prompts", prompts, "--methods", "plain", "--max-new-tokens", 4, "--out", out)
    assert result.exit_code != 0
    assert [cell["temperature"] for cell in report_of(out)["cells"]] == [0.6]
    assert "temperature 0.6" in out.with_suffix(".md").read_text()


class Recorder:
    """A subject that records its calls and writes tokens 1, 2, 3; static-compiled writes another last token."""

    plain = torch.zeros(0)  # has a device
    draft_model = None

    def __init__(self):
        self.calls = []

    def call(self, method, ids, options, seed, longest, engine):
        self.calls.append((method, seed, engine, engine and engine.pool))
        return methods.outcome([1, 2, 4 if method == "static-compiled" else 3], len(self.calls), steps=2)


def test_order_pools_and_medians(monkeypatch):
    monkeypatch.setattr(benchmark, "margin_at", lambda model, inputs, text, index, options, seed: 0.25)
    subject = Recorder()
    chosen = ["plain", "static-compiled", "auto", "auto-shared"]
    options = {"max_new_tokens": 3, "do_sample": True}
    rows, failures = benchmark.measure(subject, [[7], [8]], ["a", "b"], chosen, options, 3, "cell")
    assert not failures
    warm_up, calls = subject.calls[:4], subject.calls[4:]
    assert [method for method, *_ in warm_up] == chosen
    orders = [[chosen.index(method) for method, *_ in calls[begin : begin + 4]] for begin in range(0, 24, 4)]
    a, b, c, d = [0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]
    assert orders == [a, b, c, b, c, d]
    assert [seed for _, seed, *_ in calls] == [0] * 12 + [1] * 12
    engines, pools = (
        {method: [call[column] for call in subject.calls if call[0] == method] for method in chosen}
        for column in (2, 3)
    )
    assert engines["plain"] == engines["static-compiled"] == [None] * 7
    assert len(set(map(id, pools["auto"]))) == 7, "a fresh pool for each call"
    assert len(set(map(id, engines["auto"]))) == 1
    for shared in (pools["auto-shared"], engines["auto-shared"]):
        assert shared[1:4] == shared[4:], "kept over the prompts of a repeat"
        assert len(set(map(id, shared))) == 4, "each repeat and the warm-up have their own"
    first = {row["method"]: row for row in rows if row["prompt"] == 0}
    assert first["plain"]["all_seconds"] == [5, 12, 15]
    assert first["plain"]["seconds"] == 12
    assert first["plain"]["difference"] is None
    assert (first["static-compiled"]["difference"], first["static-compiled"]["margin"]) == (2, 0.25)


def row(method, tokens, seconds, steps, first=0.1, forward=None):
    return {"method": method, "tokens": tokens, "seconds": seconds, "first_seconds": first, "own_seconds": None,
            "steps": steps, "stepped": tokens - 1, "forward_seconds": forward, "comparable": True, "difference": None,
            "margin": None}  # fmt: skip


def test_figures_by_hand():
    rows = [
        row("plain", 10, 1.0, 9), row("plain", 20, 3.0, 19, 0.2),
        row("steps-of-one", 10, 0.7, 9, 0.1, 0.36), row("steps-of-one", 20, 2.0, 19, 0.2, 0.76),
        row("auto", 10, 0.5, 4, 0.1, 0.2), row("auto", 20, 1.5, 10, 0.2, 0.5),
        row("vllm-plain", 10, 1.0, None, None), row("vllm-plain", 20, 1.0, None, None),
    ]  # fmt: skip
    rows[-1] |= {"difference": 3, "margin": 0.02}
    chosen = ["plain", "steps-of-one", "auto", "vllm-plain", "lade-plain"]
    table = {r["method"]: r for r in summarise(rows, chosen, {"lade-plain": "ended with status 1"})}
    auto = table["auto"]
    assert auto["ms_per_token"] == pytest.approx(1000 * 2 / 30)
    assert auto["ms_per_later_token"] == pytest.approx(1000 * 1.7 / 28)
    assert auto["tokens_per_second"] == pytest.approx(15)
    assert auto["speedup"] == pytest.approx(2)
    assert auto["interval"] == pytest.approx((2, 2))
    assert auto["speedup_over_one"] == pytest.approx(2.7 / 2)
    assert (auto["our_share"], auto["our_later_share"]) == (1, 1)
    assert (auto["agreement"], auto["own_ms_per_token"]) == (1, None)
    assert table["plain"]["our_share"] == pytest.approx((0.5 / 1 + 1.5 / 3) / 2)
    assert table["plain"]["our_later_share"] == pytest.approx((0.4 / 0.9 + 1.3 / 2.8) / 2)
    assert auto["first_token_ms"] == pytest.approx(150)
    assert auto["tokens_per_step"] == pytest.approx(28 / 14)
    assert auto["step_cost"] == pytest.approx(0.05 / 0.04)
    assert auto["efficiency"] == pytest.approx((2.4 / 1.7) / (2 / 1.25))
    assert table["plain"]["efficiency"] is None
    peer = table["vllm-plain"]
    assert peer["speedup"] == pytest.approx(2)
    assert peer["tokens_per_step"] is peer["first_token_ms"] is peer["ms_per_later_token"] is None
    assert (peer["identical"], peer["prompts"], peer["largest_margin"]) == (1, 2, 0.02)
    assert peer["agreement"] == pytest.approx((10 + 3) / 30)
    assert (peer["our_share"], peer["our_later_share"]) == (pytest.approx((0.5 + 1.5) / 2), None)
    earned = {(gain["from"], gain["to"]): gain for gain in gains(rows)}
    assert list(earned) == [("plain", "steps-of-one"), ("steps-of-one", "auto")]
    assert earned["steps-of-one", "auto"]["speedup"] == pytest.approx((0.7 / 0.5 + 2.0 / 1.5) / 2)
    assert earned["steps-of-one", "auto"]["later_speedup"] == pytest.approx((0.6 / 0.4 + 1.8 / 1.3) / 2)
    assert table["lade-plain"] == {"method": "lade-plain", "failed": "ended with status 1"}


def test_the_interval_is_over_prompts():
    """Of two prompts, one is three times as fast: a quarter of the resamples is at 1, half at 2, a quarter at 3."""
    plain = [row("plain", 10, 1.0, 9), row("plain", 10, 3.0, 9)]
    other = [row("auto", 10, 1.0, 9), row("auto", 10, 1.0, 9)]
    assert SPREAD > 0.5
    assert speedup_interval(plain, other) == pytest.approx((1, 3))
    many = [*plain * 50], [*other * 50]
    low, high = speedup_interval(*many)
    assert 1.7 < low < 2 < high < 2.3  # 2 +- 1.645 / sqrt(100)


def test_contexts_by_hand():
    texts = [[1, 2], [3, 4, 5], [6]]
    assert corpora.with_context(texts, [0], 6) == [[0, 3, 4, 5, 1, 2], [0, 6, 1, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert corpora.with_context(texts, [], 8)[0] == [3, 4, 5, 6, 3, 4, 1, 2]
    assert corpora.with_context(texts, [0], 3) == [[0, 1, 2], [0, 4, 5], [0, 1, 6]]


def test_the_share_of_ours_is_the_median_prompt_s():
    mine = [row("auto", 10, seconds, 9) for seconds in (1.0, 2.0, 9.0)]
    others = [row("llama-plain", 10, 2.0, 9) for _ in mine]
    others[0]["first_seconds"] = None
    plain = [row("plain", 10, 5.0, 9) for _ in mine]
    table = summarise(plain + mine + others, ["plain", "auto", "llama-plain"], {})
    assert table[2]["our_share"] == 1
    assert table[2]["our_later_share"] == pytest.approx((1.9 / 1.9 + 8.9 / 1.9) / 2), "of the two that are known"


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_model(model, tmp_path):
    """The tiny model with a chat template."""
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_are_in_the_chat_template(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    texts = ["def f(x):", "return y"]

    def written(contexts, raw=False) -> dict:
        return corpora.tokenized_prompts(str(chat_model), [[text] for text in texts], contexts, 2, 4, raw)

    chats, by_length = written([None, 30])[None], written([None, 30])[30]
    assert [tokenizer.decode(ids) for ids in chats] == [f"<user>{text}\n<assistant>" for text in texts]
    assert written([None], raw=True)[None] == tokenizer(texts).input_ids
    for ids, text in zip(by_length, texts, strict=True):
        assert len(ids) == 30
        decoded = tokenizer.decode(ids)
        assert decoded.startswith("<user>")
        assert decoded.endswith(f"{text}\n<assistant>")
        assert decoded.count("<user>") == 1


@pytest.mark.parametrize(
    ("template", "contexts", "message"),
    [
        ("{{ raise_exception('system first') }}", [None], "refuses a prompt: system first; try --raw"),
        ("{{ messages[0]['content'] | upper }}", [30], "give --raw with --contexts"),
        (TEMPLATE, [9], "no room beside the chat template"),
    ],
)
def test_a_template_that_does_not_fit(chat_model, template, contexts, message):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(chat_model)
    with pytest.raises(click.ClickException, match=message):
        corpora.tokenized_prompts(str(chat_model), [["one"], ["two"]], contexts, 2, 4)


def test_the_last_of_several_turns_is_decoded(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    prompt = {"question_id": 1, "turns": ["one", "three"], "replies": ["two"]}
    said = corpora.conversation(prompt)
    assert said == ["one", "two", "three"]
    chat = tokenizer.decode(corpora.prompt_ids(tokenizer, said, raw=False))
    assert chat == "<user>one\n<assistant>two\n<user>three\n<assistant>"
    assert tokenizer.decode(corpora.prompt_ids(tokenizer, said, raw=True)) == "one\n\ntwo\n\nthree"
    assert corpora.conversation({**prompt, "replies": []}) == ["one"]
    with pytest.raises(click.ClickException, match="prompt 1 needs a reply"):
        corpora.conversation({**prompt, "replies": ["two", "four"]})


def test_the_prompts_of_chats():
    """Benchmarks name their kinds and numbers."""
    read = read_prompts(Path(__file__).parents[2] / "benchmarks" / "chats.jsonl", None)
    assert [prompt["category"] for prompt in read] == ["multi-turn"] * 6 + ["code-edit"] * 6
    assert [len(corpora.conversation(prompt)) for prompt in read] == [3, 3, 3, 3, 5, 5, *[1] * 6]


def test_spec_bench_s_own_file(chat_model, tmp_path, monkeypatch):
    """Categories of MT-bench are one; the first prompts of each category; --raw leaves out the template."""
    questions = [(81, "writing"), (91, "roleplay"), (101, "math"), (1, "translation"), (2, "translation"), (7, "math")]
    lines = [
        {"question_id": number, "category": category, "turns": [f"text {number}", "then"], "reference": []}
        for number, category in questions
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    asked = []

    def measure(subject, prompts, categories, *rest):
        asked.append((prompts, categories))
        raise click.ClickException("seen")

    monkeypatch.setattr(benchmark, "measure", measure)
    options = ["--model", chat_model, "--prompts", path, "--methods", "plain", "--out", tmp_path / "run"]
    for more in ([], ["--raw", "--per-category", 1]):
        assert "seen" in run(*options, *more).output
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    (chats, categories), (texts, few) = asked
    assert categories == ["mt-bench"] * 3 + ["translation"] * 2 + ["math"]
    assert tokenizer.decode(chats[0]) == "<user>text 81\n<assistant>"
    assert few == ["mt-bench", "translation", "math"]
    assert [tokenizer.decode(ids) for ids in texts] == ["text 81", "text 1", "text 7"]


def test_peers(model, prompts, peers, tmp_path):
    out = tmp_path / "run"
    asked = "lade-plain,lade-15-5-15,vllm-ngram,vllm-suffix,llama-q8_0"
    result = run(
        "--model", model, "--prompts", prompts, "--methods", asked, "--temperature", "0,0.6", "--max-new-tokens", 4,
        "--repeats", 1, "--peers", peers, "--timeout", 4, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = report_of(out)
    greedy, sampled = map(rows_of, report["cells"])
    assert greedy["lade-plain"]["ms_per_token"] == 125
    assert greedy["lade-plain"]["identical"] == 0
    assert greedy["lade-plain"]["tokens_per_step"] is greedy["lade-plain"]["ms_per_later_token"] is None
    assert greedy["llama-q8_0"]["ms_per_later_token"] == pytest.approx(100)
    assert greedy["llama-q8_0"]["own_ms_per_token"] == pytest.approx(100)
    assert "\n| llama-q8_0 | 100.00 | 125.00 / 100.00 |" in out.with_suffix(".md").read_text()
    assert greedy["lade-15-5-15"]["failed"] == "ended with status 1: out of memory"
    assert greedy["vllm-ngram"]["failed"] == "no such model"
    assert greedy["vllm-suffix"]["failed"] == "no answer within 4 s"
    assert {row["failed"] for method, row in sampled.items() if method not in ("plain", "vllm-ngram")} == {
        "greedy only"
    }
    assert report["environment"]["peers"] == {library: {"toy": "1.2"} for library in ("lade", "vllm", "llama")}
    starts = (peers / "starts").read_text().split()
    assert sorted(starts) == sorted(["plain", *["lade-15-5-15"] * 2, "ngram", *["suffix"] * 2, "q8_0"])
    drafted = [row["drafted"] for row in report["cells"][0]["prompts"] if row["method"] == "lade-plain"]
    assert drafted == [6, 6]


REQUEST = [[3]], {"max_new_tokens": 2}, 0


def test_a_peer_is_suspended_between_requests(peer):
    one = peer("plain")
    for _ in range(2):
        assert one.ask(*REQUEST)["ids"] == [[3, 3]]
        stopped = os.waitid(os.P_PID, one._process.pid, os.WSTOPPED)
        assert stopped.si_status == signal.SIGSTOP
    assert one.versions == {"toy": "1.2"}
    process = one._process
    one.close()
    assert process.returncode == 0, "it was awake when its stdin ended"


def test_a_peer_that_is_not_there(peers):
    absent = Peer([str(peers / "nowhere" / "python"), "worker.py"], 60)
    for _ in range(2):
        with pytest.raises(PeerError, match="could not be started"):
            absent.ask(*REQUEST)


@pytest.mark.parametrize(
    ("says", "message"),
    [("print('hello')", "no JSON object"), ("print('[1]')", "no JSON object"), ("0", "ended with status 0")],
)
def test_a_peer_that_does_not_keep_the_protocol(says, message):
    with pytest.raises(PeerError, match=message):
        Peer([sys.executable, "-c", says], 60).ask(*REQUEST)
    answer = f"print('{{\"ready\": true}}', flush=True); input(); {says}"
    with pytest.raises(PeerError, match=message):
        Peer([sys.executable, "-c", answer], 60).ask(*REQUEST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "magic"),
        (["--dtype", "float16"], "float16"),
        (["--temperature", "warm"], "warm"),
        (["--contexts", "1"], "1 is not in the range x>=2"),
        (["--contexts", "250"], "made for 256 positions, but a context of 250 and 128 new tokens are 378"),
        (["--contexts", "40", "--limit", "1"], "two prompts or more"),
        (["--methods", "assisted"], "--assistant"),
        (["--methods", "vllm-plain"], "--peers"),
        (["--methods", "vllm-plain", "--device", "cuda"], "on the CPU only: vllm-plain"),
        (["--never-slower"], "leave out --prompts"),
        (["--model", "no/such/folder/tiny2"], "cannot read the model"),
        (["--model", "elsewhere/tiny"], "two models have the same name"),
    ],
)
def test_bad_input_is_named(model, prompts, tmp_path, arguments, message):
    result = run("--model", model, "--prompts", prompts, "--out", tmp_path / "run", *arguments)
    assert result.exit_code != 0
    assert message in result.output


def test_prompts_are_asked_for(model, tmp_path):
    result = run("--model", model, "--out", tmp_path / "run")
    assert result.exit_code != 0
    assert "--prompts, or --never-slower" in result.output
