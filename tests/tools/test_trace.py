"""A trace records what the decoding loop did, and browsers can read its page for any text."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation import BaseStreamer
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, Stats
from lookahead.engine import recording
from lookahead.engine.recording import Recorder
from lookahead.stats import STAGES
from lookahead.tools import files
from lookahead.tools.cli import main
from lookahead.tools.loading import load
from lookahead.tools.trace import PAGE, PlainTimes, label

PROMPT = "def read_lines(path):"
HOSTILE = "</script><script>alert(1)</script><!-- \" ' ` & \\ </pre> \u2028\u202e\0 \U0001f30a é\n\tdef f():\n"
VOID = {"meta", "input"}


@pytest.fixture(scope="module")
def demo():
    return load(None)


@pytest.fixture(scope="module")
def traced(demo):
    """A sampled text with a window, its statistics, and the tokens that the model writes by itself."""
    model, tokenizer = demo
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": 90, "do_sample": True, "temperature": 0.6}
    torch.manual_seed(4)
    plain = model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    lookahead.wrap(model, LookaheadConfig(window_size=4, ngram_size=3))
    torch.manual_seed(4)
    trace = lookahead.trace(model, tokenizer, PROMPT, **options)
    stats = model.lookahead.last
    lookahead.unwrap(model)
    return trace, stats, plain


def check_steps(record, stats):
    """The steps are those of the text, and add up to the statistics."""
    written, texts = 1, record.prompt + record.tokens
    for step in record.steps:
        assert step.length == len(record.prompt) + written - 1
        assert step.ids[0] == texts[step.length]
        assert record.tokens[written : written + len(step.emitted)] == step.emitted
        assert step.parents[0] == -1
        assert ((step.parents[1:] >= 0) & (step.parents[1:] < np.arange(1, len(step.ids)))).all()
        assert step.parents[step.path].tolist() == [-1, *step.path[:-1]]
        assert step.ids[step.path[1:]].tolist() == step.emitted[:-1]
        assert len(step.probabilities) == len(step.sources) <= step.verified
        assert ((step.probabilities >= 0) & (step.probabilities <= 1)).all()
        written += len(step.emitted)
    assert written == len(record.tokens) == len(record.times) == stats.tokens
    assert len(record.steps) == stats.steps
    assert sum(step.verified for step in record.steps) == stats.guesses
    assert sum(step.window for step in record.steps) == stats.window_tokens
    counted = [record.names[step.sources[row - 1]] for step in record.steps for row in step.path[1:]]
    assert {name: counted.count(name) for name in set(counted)} == {name: n for name, n in stats.accepted.items() if n}
    assert np.allclose(sum(step.seconds for step in record.steps), [stats.seconds[stage] for stage in STAGES])


def is_whole(step):
    return len(step.ids) == 1 + step.verified + step.window


def test_a_trace_says_what_the_steps_did(traced):
    trace, stats, plain = traced
    assert trace.record.tokens == plain
    assert stats.accepted.total() > 5
    assert stats.window_tokens > 0
    assert all(map(is_whole, trace.steps))
    check_steps(trace.record, stats)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "mistral", "mamba2"])
def test_a_recorded_text_is_the_same(family, seed):
    model = tiny_model(family)
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(seed))
    options = {"max_new_tokens": 40, "do_sample": seed % 2 == 1, "pad_token_id": 0}
    torch.manual_seed(seed)
    plain = model.generate(ids, **options)[0, 9:].tolist()
    torch.manual_seed(seed)
    record = Recorder()
    lookahead.wrap(model).generate(ids, **options, streamer=record)
    assert record.tokens == plain
    check_steps(record, model.lookahead.last)


class Hooking(BaseStreamer):
    """hooks the model when the first token is written."""

    def __init__(self, model):
        self.model = model
        self.left = 2  # the prompt comes first

    def put(self, value):
        self.left -= 1
        if not self.left:
            self.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * -3)

    def end(self):
        pass


@pytest.mark.parametrize("recorders", [1, 2])
def test_what_a_recorded_streamer_changes_counts_from_the_next_pass_on(recorders):
    ids = torch.arange(3, 12)[None]

    def text(model, streamer=None):
        return model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0, streamer=streamer).tolist()

    plain = tiny_model("llama")
    usual = text(plain)
    expected = text(plain, Hooking(plain))
    model = lookahead.wrap(tiny_model("llama"))
    streamer = Hooking(model)
    for _ in range(recorders):
        streamer = Recorder(streamer)
    assert text(model) == usual
    assert text(model, streamer) == expected
    assert expected != usual, "the hook has an effect"


def test_a_long_record_keeps_accepted_rows_alone(demo, monkeypatch):
    monkeypatch.setattr(recording, "MAX_ROWS", 50)
    model, tokenizer = demo
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=0))
    trace = lookahead.trace(model, tokenizer, PROMPT, max_new_tokens=60)
    kept = [is_whole(step) for step in trace.steps]
    assert kept[0]
    assert not all(kept)
    assert sum(len(step.ids) for step in trace.steps) <= 50 + trace.record.stats.tokens
    check_steps(trace.record, model.lookahead.last)
    lookahead.unwrap(model)


def test_nothing_is_recorded_unasked(demo, monkeypatch):
    monkeypatch.setattr(Recorder, "record", None)
    model, tokenizer = demo
    lookahead.wrap(model).generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=10)
    assert model.lookahead.last.trace is None
    lookahead.unwrap(model)


def test_pieces_make_the_text(traced):
    trace, _, _ = traced
    assert len(trace.pieces) == len(trace.record.tokens)
    assert "".join(trace.pieces) == trace.text
    assert {token for step in trace.steps for token in step.ids.tolist()} <= trace.labels.keys()


def test_characters_of_several_tokens(demo):
    model, tokenizer = demo
    ids = tokenizer("\U0001f30a é", return_tensors="pt").input_ids[:, :2]  # ends within the wave
    lookahead.wrap(model)
    trace = lookahead.trace(model, tokenizer, {"input_ids": ids}, max_new_tokens=12)
    lookahead.unwrap(model)
    assert len(trace.pieces) == 12
    assert json.loads(json.dumps(trace.as_dict()))["tokens"] == trace.record.tokens


def test_labels_of_byte_level_tokens(demo):
    tokenizer = demo[1]
    for token in tokenizer("\U0001f30a").input_ids:
        kind, digits = label(tokenizer, token, False)
        assert kind == "bytes"
        assert set(digits.split()) <= {"F0", "9F", "8C", "8A"}
    assert label(tokenizer, tokenizer(" return").input_ids[0], False) == " return"
    assert label(tokenizer, tokenizer.eos_token_id, True) == ["special", tokenizer.eos_token]
    assert label(tokenizer, len(tokenizer) + 5, False) == ["special", f"#{len(tokenizer) + 5}"]


def test_labels_of_sentencepiece_tokens():
    names = ["<s>", "\N{LOWER ONE EIGHTH BLOCK}sea", "sea", "<0x0A>", "<0xF0>", "é"]
    words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    words.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    labels = [label(tokenizer, i, i in tokenizer.all_special_ids) for i in range(len(names))]
    assert labels == [["special", "<s>"], " sea", "sea", "\n", ["bytes", "F0"], "é"]


class Page(HTMLParser):
    """Reads a page, and demands that each element is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.scripts, self.addresses = [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def hostile(demo):
    model, tokenizer = demo
    lookahead.wrap(model)
    trace = lookahead.trace(model, tokenizer, HOSTILE, max_new_tokens=30, min_new_tokens=30)
    lookahead.unwrap(model)
    return trace


def test_the_page_is_whole_whatever_the_prompt_holds(traced, hostile):
    for trace in (traced[0], hostile):
        page = Page(trace.html())
        data, _ = page.scripts
        assert json.loads(data) == json.loads(json.dumps(trace.as_dict()))
        assert page.addresses == []
    text = PAGE.read_text(encoding="utf-8")
    # The name of a language is the only thing that looks like an address.
    assert set(re.findall(r"\w+://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_a_long_prompt_that_is_no_text(demo):
    model, tokenizer = demo
    lookahead.wrap(model)
    trace = lookahead.trace(model, tokenizer, PROMPT, max_new_tokens=5)
    lookahead.unwrap(model)
    odd = replace(trace, prompt="x" * 9000 + "lone \ud83d surrogate")
    odd.html().encode()
    assert odd.as_dict()["prompt"]["isCut"]
    assert len(odd.html()) < len(trace.html()) + 8100


def test_what_cannot_be_traced_is_named(demo):
    model, tokenizer = demo
    with pytest.raises(ValueError, match=r"call lookahead\.wrap"):
        lookahead.trace(model, tokenizer, PROMPT)
    lookahead.wrap(model)
    with pytest.raises(ValueError, match="one by one"):
        lookahead.trace(model, tokenizer, tokenizer([PROMPT, PROMPT], return_tensors="pt"))
    with pytest.raises(ValueError, match="not a batch of 3"):
        lookahead.trace(model, tokenizer, PROMPT, num_return_sequences=3, do_sample=True)
    with (
        pytest.warns(UserWarning, match="does not decode"),
        pytest.raises(ValueError, match="no steps to trace: lookahead does not decode with prompt_lookup"),
    ):
        lookahead.trace(model, tokenizer, PROMPT, prompt_lookup_num_tokens=3, max_new_tokens=5)
    lookahead.unwrap(model)


def test_a_notebook_shows_the_last_call(traced):
    trace, stats, _ = traced
    shown = stats._repr_html_()
    assert shown == trace._repr_html_()
    frame = re.fullmatch(r"<iframe [^>]*srcdoc=\"([^\"]*)\"></iframe>", shown)
    assert html.unescape(frame[1]) == trace.html()
    total = Stats()
    total += stats
    assert total.tokens == stats.tokens
    assert total.trace is None
    assert Stats(plain="<b>")._repr_html_().endswith("lookahead does not decode &lt;b&gt;</pre>")


def test_plain_decoding_that_was_not_run_has_no_times(traced):
    assert traced[0].as_dict()["plain"] is None


def run(*arguments):
    return CliRunner().invoke(main, ["trace", PROMPT, "--max-new-tokens", "20", *arguments])


def test_the_command(tmp_path):
    out = tmp_path / "page.html"
    result = run("--out", str(out), "--temperature", "0.6", "--compare")
    assert result.exit_code == 0, result.output
    assert f"open {out} in a browser" in result.stderr
    data = json.loads(Page(out.read_text()).scripts[0])
    assert len(data["tokens"]) == 20
    assert data["plain"]["isSame"]
    assert len(data["plain"]["times"]) == 20
    generated = CliRunner().invoke(main, ["generate", PROMPT, "--max-new-tokens", "20", "--temperature", "0.6"])
    assert result.stdout == generated.stdout
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_the_command_refuses(tmp_path):
    result = run("--strategy", "plain", "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 2
    assert "no steps to trace" in result.stderr
    assert run("--out", "/no/such/folder/page.html").exit_code == 2
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    files.write_whole(path, "old")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    link = tmp_path / "link.html"
    link.symlink_to(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            files.write_whole(path, "half")
    assert path.read_text() == "old"
    files.write_whole(link, "new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["link.html", "page.html"]
    files.write_whole(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
USE = Path(__file__).with_name("use_trace.js")


def test_the_page_of_a_text_without_steps(demo, tmp_path):
    model, tokenizer = demo
    lookahead.wrap(model)
    trace = lookahead.trace(model, tokenizer, PROMPT, max_new_tokens=1)
    lookahead.unwrap(model)
    assert trace.steps == []
    if BROWSER is not None:
        seen = browse(trace.html(), tmp_path)
        assert seen["problems"] == []
        assert seen["opened"]["title"] == "The prompt's pass"


def browse(page, tmp_path):
    """What a browser shows of a page while it is used."""
    file = tmp_path / "used.html"
    use = f"<head><script>{USE.read_text(encoding='utf-8')}</script>"
    file.write_text(page.replace("<head>", use), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               f"--user-data-dir={tmp_path / 'profile'}", "--window-size=375,800", "--virtual-time-budget=4000",
               "--dump-dom", file.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("why", ["", "the machine is busy, so no ratio: <why>"])
def test_the_page_of_a_comparison_in_a_browser(why, hostile, tmp_path):
    times = [2 * seconds for seconds in hostile.record.times]
    seen = browse(replace(hostile, plain=PlainTimes(times, True, why)).html(), tmp_path)
    assert seen["problems"] == []
    assert ("2.00\N{MULTIPLICATION SIGN}" in seen["figures"]) is (why == "")
    assert ("2.00 times as fast" in seen["beside"]) is (why == "")
    assert why in seen["beside"]
    assert "The texts are identical." in seen["beside"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(traced, hostile, tmp_path):
    for trace in (traced[0], hostile):
        seen = browse(trace.html(), tmp_path)
        assert seen["problems"] == []
        assert seen["unnamed"] == 0
        assert seen["unexplained"] == []
        assert "reads and writes" in seen["term"]
        assert seen["width"][0] <= seen["width"][1]
        steps = trace.steps
        assert seen["opened"]["slider"] == 1 + int(np.argmax([len(step.emitted) for step in steps]))
        assert seen["home"]["now"] == [0]
        assert len(seen["steps"]) == len(steps)
        written = 1
        for k, (shown, step) in enumerate(zip(seen["steps"], steps, strict=True), 1):
            assert shown["title"] == f"Step {k} of {len(steps)}"
            assert shown["now"] == list(range(written, written + len(step.emitted)))
            written += len(step.emitted)
            assert shown["later"] == len(trace.record.tokens) - written
            assert shown["nodes"] == 2 + step.verified
            assert f" {len(step.path) - 1} accepted" in shown["sentence"]
        assert seen["isOver"]
        assert seen["left"]["slider"] == len(steps) - 1
        assert seen["right"]["slider"] == len(steps)
        assert seen["slid"]["slider"] == 1
        assert seen["clicked"]["slider"] == 0
        assert (seen["playing"], seen["paused"]) == ("Pause", "Play")
        assert seen["readout"].startswith("Row ")
        assert seen["tip"].startswith("step ")
        assert 0 < seen["played"]["slider"] < len(steps)
        assert seen["shown"].replace("\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "").startswith(trace.text[:20])


def test_the_file_of_the_prompt_is_not_replaced(tmp_path):
    (path := tmp_path / "prompt.txt").write_text("import os\n")
    ran = CliRunner().invoke(main, ["trace", "--prompt-file", str(path), "--out", str(path)])
    assert ran.exit_code == 2
    assert "is the file of --prompt-file" in ran.output
    assert path.read_text() == "import os\n"
