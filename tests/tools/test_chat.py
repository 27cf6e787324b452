"""`lookahead chat`: answers equal those of a model that computes the whole conversation, but only new tokens are."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from zoo import tiny_model

import lookahead
from lookahead import DEMO_MODEL, LookaheadConfig
from lookahead.passes.capabilities import find_adapter
from lookahead.stats import Stats
from lookahead.streaming import StopWhenAsked, render, without_half_character
from lookahead.tools.chat import PLAIN_TEMPLATE, Conversation, TurnRefusedError, in_plain_words
from lookahead.tools.cli import main
from lookahead.tools.loading import load
from lookahead.tools.terminal import AnswerStreamer

MARKED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like templates of reasoning models, drops a part of past answers, here the first half.
FORGETTING = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{{ m.content[m.content | length // 2 :] }}{% else %}{{ m.content }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = ["class Stack:", "    def push(self, item):", "def read_lines(path):", "import"]
# A hybrid's state cannot go back, sliding layers not beyond their window; the last takes no past_key_values.
HYBRID = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
OTHERS = {
    "gpt2": {"n_positions": 1024},
    "gemma2": {},
    "lfm2": HYBRID,
    "mamba": {"state_size": 4},
}


class Fault(Exception):
    pass


class ActsAt:
    """A streamer that acts when it is given its n-th token."""

    def __init__(self, at: int, act):
        self.at, self.act, self.seen = at, act, -1

    def put(self, value):
        self.seen += 1
        if self.seen == self.at:
            self.act()

    def end(self):
        pass


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)  # until the handler has run


def fail(error: BaseException):
    raise error


@pytest.fixture(params=["plain", "wrapped"])
def wrapped(request) -> bool:
    return request.param == "wrapped"


def conversation(template=MARKED, wrapped=False, model_type=None) -> Conversation:
    model, tokenizer = load(None)
    tokenizer.chat_template = template
    if model_type is not None:
        settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "eos_token_id": 0}
        model = tiny_model(model_type, **{**settings, **OTHERS[model_type]})
    if wrapped:
        lookahead.wrap(model, LookaheadConfig(budget=16, window_size=0))
    return Conversation(model, tokenizer)


def from_scratch(talk: Conversation, messages: list[dict], **options) -> str:
    """What the model answers when it reads ``messages`` without any cache."""
    inputs = render(talk.tokenizer, messages)
    output = talk.model.generate(
        inputs["input_ids"], attention_mask=torch.ones_like(inputs["input_ids"]), tokenizer=talk.tokenizer, **options
    )
    text = talk.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return without_half_character(text)


def reads(talk: Conversation, content: str, **options) -> list[int]:
    """Tokens that each forward pass of an answer is given."""
    lengths = []
    hook = talk.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    if hasattr(talk.model, "lookahead"):
        find_adapter(talk.model)  # which tries the model out with the hook
        lengths.clear()
    talk.answer(content, **options)
    hook.remove()
    return lengths


def shared_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("template", [MARKED, FORGETTING, PLAIN_TEMPLATE], ids=["marked", "forgetting", "plain"])
def test_answers_are_those_of_reading_it_all(template, wrapped):
    talk = conversation(template, wrapped)
    for turn, temperature in zip(TURNS, (None, 0.8, None, 1.2), strict=True):
        options = {"max_new_tokens": 40, "do_sample": temperature is not None, "temperature": temperature}
        torch.manual_seed(7)
        expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": turn}], **options)
        torch.manual_seed(7)
        assert talk.answer(turn, **options) == expected
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * len(TURNS)


@pytest.mark.parametrize("model_type", OTHERS)
@pytest.mark.parametrize("template", [MARKED, FORGETTING], ids=["marked", "forgetting"])
def test_other_layers(model_type, template):
    """Random models write what no tokenizer would, so that their answers are tokenized otherwise in the next turn."""
    talk = conversation(template, model_type=model_type)
    for turn in TURNS:
        expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": turn}], max_new_tokens=20)
        assert talk.answer(turn, max_new_tokens=20) == expected


@pytest.mark.parametrize(("model_type", "keeps"), [("lfm2", True), ("gemma2", True), ("mamba", False)])
def test_layers_that_cannot_go_back_need_not_when_nothing_is_altered(model_type, keeps):
    talk = conversation("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", model_type=model_type)
    told = [talk.tokenizer.convert_tokens_to_ids("!"), 0]

    def write(input_ids, scores):
        forced = torch.full_like(scores, -1e9)
        forced[:, told[input_ids[0, -1] == told[0]]] = 0
        return forced

    talk.answer("import os, sys, re", max_new_tokens=9, logits_processor=[write])
    assert talk.tokens[-2:] == told
    messages = [*talk.messages, {"role": "user", "content": "import json"}]
    ids = render(talk.tokenizer, messages)["input_ids"][0].tolist()
    assert ids[: len(talk.tokens)] == talk.tokens
    expected = from_scratch(talk, messages, max_new_tokens=20)
    read = len(talk.tokens) - 1 if keeps else 0
    assert reads(talk, "import json", max_new_tokens=20)[0] == len(ids) - read
    assert talk.messages[-1]["content"] == expected


def test_sliding_layers_wrapped():
    talk = conversation(MARKED, wrapped=True, model_type="gemma2")
    for turn in TURNS:
        expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": turn}], max_new_tokens=20)
        assert talk.answer(turn, max_new_tokens=20) == expected


@pytest.mark.parametrize("template", [MARKED, FORGETTING, PLAIN_TEMPLATE], ids=["marked", "forgetting", "plain"])
def test_the_history_is_not_read_again(template, wrapped):
    talk = conversation(template, wrapped)
    talk.answer("class Stack:\n" + '    """A last-in, first-out queue."""\n' * 8, max_new_tokens=60)
    for turn in TURNS:
        before = talk.tokens
        ids = render(talk.tokenizer, [*talk.messages, {"role": "user", "content": turn}])["input_ids"][0].tolist()
        known = min(shared_prefix(before, ids), len(before) - 1)
        assert known > 100
        lengths = reads(talk, turn, max_new_tokens=60)
        assert lengths[0] == len(ids) - known
        assert max(lengths) < len(before) - 20  # no later pass makes up for it
        if template is not FORGETTING:
            assert known > len(before) - 10


def test_sampled_tokens_that_no_tokenizer_would_write():
    """What was written letter by letter is read as a word in the next turn: the cache is cut back before it."""
    talk = conversation(MARKED)
    spelled = [talk.tokenizer.convert_tokens_to_ids(letter) for letter in "import"]
    assert len(talk.tokenizer("import").input_ids) < len(spelled)
    begin = len(render(talk.tokenizer, [{"role": "user", "content": "x"}])["input_ids"][0])

    def spell(input_ids, scores):
        forced = torch.full_like(scores, -1e9)
        forced[:, spelled[input_ids.shape[1] - begin]] = 0
        return forced

    assert talk.answer("x", max_new_tokens=len(spelled), logits_processor=[spell]) == "import"
    ids = render(talk.tokenizer, [*talk.messages, {"role": "user", "content": "y"}])["input_ids"][0].tolist()
    known = shared_prefix(talk.tokens, ids)
    assert 0 < known <= begin  # before the answer's first token
    expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": "y"}], max_new_tokens=20)
    assert reads(talk, "y", max_new_tokens=20)[0] == len(ids) - known
    assert talk.messages[-1]["content"] == expected


def test_another_system_message_keeps_the_history():
    talk = conversation(MARKED)
    talk.answer(TURNS[0], max_new_tokens=20)
    talk.instruct("Write Python.")
    talk.instruct("Write good Python.")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": TURNS[1]}], max_new_tokens=20)
    assert talk.answer(TURNS[1], max_new_tokens=20) == expected
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Write good Python."}]
    talk.instruct("")
    expected = from_scratch(talk, [{"role": "user", "content": TURNS[1]}], max_new_tokens=20)
    assert talk.answer(TURNS[1], max_new_tokens=20) == expected


@pytest.mark.parametrize("error", [Fault(), KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=repr)
def test_a_turn_that_fails_is_taken_back(wrapped, error):
    talk = conversation(MARKED, wrapped)
    talk.answer(TURNS[0], max_new_tokens=20)
    before = list(talk.messages)
    calls: list[None] = []

    def fail_at_times(module, inputs):
        calls.append(None)
        if len(calls) == 3:
            raise error

    hook = talk.model.model.layers[3].register_forward_pre_hook(fail_at_times)  # some layers have more by then
    if wrapped:
        calls = [None] * 3
        find_adapter(talk.model)  # which tries the model out with the hook
        calls = []
    with pytest.raises(type(error)):
        talk.answer(TURNS[1], max_new_tokens=50, min_new_tokens=50)
    hook.remove()
    assert talk.messages == before
    expected = from_scratch(talk, [*before, {"role": "user", "content": TURNS[2]}], max_new_tokens=20)
    assert talk.answer(TURNS[2], max_new_tokens=20) == expected


def test_an_answer_stopped_half_way_stays(wrapped):
    talk = conversation(MARKED, wrapped)
    talk.answer(TURNS[0], max_new_tokens=20)
    stop = StopWhenAsked()

    def ask():
        stop.asked = True

    options = {"max_new_tokens": 60, "min_new_tokens": 60}
    whole = from_scratch(talk, [*talk.messages, {"role": "user", "content": TURNS[1]}], **options)
    part = talk.answer(TURNS[1], streamer=ActsAt(8, ask), stopping_criteria=[stop], **options)
    assert 0 < len(part) < len(whole)
    assert whole.startswith(part)
    assert talk.messages[-1]["content"] == part
    before = talk.tokens
    expected = from_scratch(talk, [*talk.messages, {"role": "user", "content": TURNS[2]}], max_new_tokens=20)
    lengths = reads(talk, TURNS[2], max_new_tokens=20)
    assert talk.messages[-1]["content"] == expected
    assert lengths[0] < len(before)


def test_a_full_context_is_named(wrapped):
    talk = conversation(MARKED, wrapped)
    talk.answer("x" + " = x" * 450, max_new_tokens=1000, suppress_tokens=[0])
    assert talk.is_full
    assert len(talk.tokens) == 1024
    before = list(talk.messages)
    with pytest.raises(TurnRefusedError, match=r"context is 1024: /reset"):
        talk.answer("more", max_new_tokens=5)
    assert talk.messages == before
    talk.reset()
    expected = from_scratch(talk, [{"role": "user", "content": "more"}], max_new_tokens=5)
    assert talk.answer("more", max_new_tokens=5) == expected
    assert not talk.is_full


def test_a_template_that_refuses_is_named():
    talk = conversation("{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}x")
    talk.instruct("Be brief.")
    with pytest.raises(TurnRefusedError, match="no system, please"):
        talk.answer("hello", max_new_tokens=5)
    assert len(talk.messages) == 1


def test_instructions_that_are_not_text_are_refused():
    talk = conversation()
    talk.instruct("Write Python.")
    with pytest.raises(TurnRefusedError, match="not UTF-8 text"):
        talk.instruct(os.fsdecode(b"\xff"))
    assert talk.messages == [{"role": "system", "content": "Write Python."}]


def chat(text: str, *arguments):
    return CliRunner().invoke(main, ["chat", "--max-new-tokens", "30", *arguments], input=text)


def test_piped_lines_are_turns(wrapped):
    arguments = ["--temperature", "0.6", "--seed", "3", "--strategy", "lookahead" if wrapped else "plain"]
    result = chat("\n".join(TURNS), *arguments)
    assert result.exit_code == 0, result.output
    assert "packaged model" in result.stderr
    talk = conversation(PLAIN_TEMPLATE)
    torch.manual_seed(3)
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.6, "stop_strings": ["\n\n\n"]}
    assert result.stdout == "".join(talk.answer(turn, **options) + "\n" for turn in TURNS)


def test_commands():
    once = chat("import\n").stdout
    assert once.strip()
    assert chat("import\n/exit\nimport\n").stdout == once
    assert chat("\n  \nimport").stdout == once
    result = chat("import\n/reset\nimport\n")
    assert result.stdout == once * 2
    assert result.stderr.count("the conversation starts anew\n") == 1
    result = chat("/system # Sorting.\nimport\n/system\n/reset\nimport\n")
    assert result.stdout.endswith(once)
    assert result.stdout != once * 2
    assert result.stderr.index("the model is instructed\n") < result.stderr.index("the model has no instructions\n")
    result = chat("/help\n/nonsense\nimport\n/usr/bin\n")
    assert all(
        f"{command}  " in result.stderr
        for command in ("/system TEXT", "/reset", "/stats", "/trace FILE", "/help", "/exit")
    )
    assert result.stderr.count("no such command: /nonsense; /help") == 1
    assert len(result.stdout) > len(once)
    assert chat("").stdout == ""


def test_statistics_in_plain_words():
    result = chat("/stats\nimport\n/stats\n")
    before, after = (part for part in result.stdout.splitlines() if part.startswith("tokens of context in use"))
    assert before == "tokens of context in use: 0 of 1,024, 0%"
    assert after > before
    assert "nothing has been written" in result.stdout
    assert "30 tokens (words or parts of words) written in " in result.stdout
    assert "one token" in chat("/stats\n", "--strategy", "plain").stdout
    stats = Stats(calls=2, steps=98, tokens=250)
    assert "250 tokens (words or parts of words) written in 100 passes" in in_plain_words(stats, 1, 2**62)
    assert "2.5 a pass on average\ntokens of context in use: 1" in in_plain_words(stats, 1, 2**62)


def test_the_trace_of_the_last_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = "x" + " = x" * 1100  # which changes nothing
    result = chat(f"/trace\nclass Stack:\nimport\n{refused}\n/trace\n/trace no/such/folder/x.html\n")
    assert result.exit_code == 0, result.output
    assert "no answer to show yet" in result.stderr
    assert f"open {tmp_path / 'trace.html'} in a browser" in result.stderr
    assert "cannot write no/such/folder/x.html: No such file or directory; name another file" in result.stderr
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert result.stdout.endswith("".join(data["pieces"]) + "\n")
    assert data["prompt"]["text"].endswith("import\n")
    assert len(data["tokens"]) == 1 + sum(len(step["emitted"]) for step in data["steps"])
    assert "plain decoding has no steps to show" in chat("import\n/trace\n", "--strategy", "plain").stderr


def test_an_answer_cut_by_the_limit_says_so():
    for strategy in ("lookahead", "plain"):
        result = chat("class Stack:\nif __name__ == '__main__':\n", "--strategy", strategy)
        assert result.stderr.count("the answer was cut off after 30 tokens") == 1  # the other ends by itself


@pytest.mark.parametrize("by", ["end token", "stop string"])
def test_an_answer_that_ends_at_the_limit_is_not_cut(wrapped, by):
    talk = conversation(MARKED, wrapped)
    talk.answer("class Stack:", max_new_tokens=20)
    assert talk.is_cut
    length = len(talk.tokens) - 20
    written = talk.tokens[length:]
    place = next(i for i in range(4, 20) if written[i] not in written[:i])
    options = {"stop_strings": [talk.tokenizer.decode(written[: place + 1])]} if by == "stop string" else {}
    if by == "end token":
        talk.model.generation_config.eos_token_id = [written[place]]
    for limit, cut in ((place, True), (place + 1, False), (20, False)):
        talk.reset()
        talk.answer("class Stack:", max_new_tokens=limit, **options)
        assert len(talk.tokens) - length == min(limit, place + 1)
        assert talk.is_cut == cut


@pytest.mark.parametrize("end", [b"\xe6", b"\xe6\x97", b"\xf0\x9f\x98", "日".encode()])
def test_no_answer_ends_in_half_a_character(end, capsys):
    """Cut off there by the limit, on the screen and in what the model reads next."""
    talk = conversation(MARKED)
    told = talk.tokenizer("x = 日本").input_ids + [byte_token(talk.tokenizer, byte) for byte in end]
    begin = len(render(talk.tokenizer, [{"role": "user", "content": "x"}])["input_ids"][0])

    def write(input_ids, scores):
        forced = torch.full_like(scores, -1e9)
        forced[:, told[input_ids.shape[1] - begin]] = 0
        return forced

    streamer = AnswerStreamer(talk.tokenizer, lambda: 0)
    text = talk.answer("x", max_new_tokens=len(told), logits_processor=[write], streamer=streamer)
    assert talk.is_cut
    assert text == "x = 日本" + end.decode(errors="ignore")
    assert talk.messages[-1]["content"] == text
    assert capsys.readouterr().out == text + "\n"


def byte_token(tokenizer, byte: int) -> int:
    """The token of a single byte, by its name in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return tokenizer.convert_tokens_to_ids(chr(byte if byte in printable else 256 + others.index(byte)))


def test_templates(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(MARKED)
    result = chat(f"{TURNS[0]}\n{TURNS[1]}\n", "--chat-template", str(file))
    assert result.exit_code == 0, result.output
    talk = conversation(MARKED)
    assert result.stdout == "".join(talk.answer(turn, max_new_tokens=30) + "\n" for turn in TURNS[:2])
    assert "packaged" not in result.stderr
    model, tokenizer = load(None)
    tokenizer.chat_template = MARKED
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "model")
    assert chat(f"{TURNS[0]}\n{TURNS[1]}\n", "--model", str(tmp_path / "model")).stdout == result.stdout


def test_bad_input_is_named(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}")
    for arguments, words in (
        (["--model", str(DEMO_MODEL)], "has no chat template: give --chat-template FILE"),
        (["--chat-template", str(file)], f"the chat template {file} cannot render"),
        (["--chat-template", os.devnull], "its result is empty"),
        (["--chat-template", "no/such/file"], "no/such/file"),
        (["--pool", __file__, "--strategy", "plain"], "--pool"),
        (["--model", "no/such/model"], "no/such/model"),
    ):
        result = chat("import\n", *arguments)
        assert result.exit_code in (1, 2)
        assert words in result.stderr
        assert "Traceback" not in result.output


def test_a_full_context_leaves_the_chat_open():
    result = chat("x" + " = x" * 1100 + "\nimport\n")
    assert result.exit_code == 0
    assert "context is 1024: /reset" in result.stderr
    assert result.stdout == chat("import\n").stdout


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("strategy", ["lookahead", "plain"])
def test_ctrl_c_stops_an_answer_and_keeps_the_chat(monkeypatch, strategy):
    streamer = AnswerStreamer
    puts = []
    original = streamer.put

    def put(self, value):
        puts.append(None)
        if len(puts) == 6:  # the prompt and five tokens
            interrupt()
        original(self, value)

    whole = chat("class Stack:\nimport\n", "--strategy", strategy)
    monkeypatch.setattr(streamer, "put", put)
    before = signal.getsignal(signal.SIGINT)
    result = chat("class Stack:\nimport\n", "--strategy", strategy)
    assert signal.getsignal(signal.SIGINT) is before
    assert result.exit_code == 0, result.output
    assert "interrupted" in result.stderr
    expected = []
    for tokens in (5, 6):  # criteria may be asked before or after the streamer is given a token
        talk = conversation(PLAIN_TEMPLATE)
        answers = talk.answer("class Stack:", max_new_tokens=tokens), talk.answer("import", max_new_tokens=30)
        expected.append("".join(answer + "\n" for answer in answers))
    assert result.stdout in expected
    assert result.stdout != whole.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_second_ctrl_c_does_not_wait(monkeypatch):
    puts = []
    original = AnswerStreamer.put

    def put(self, value):
        puts.append(None)
        if len(puts) == 6:
            interrupt()
            interrupt()
        original(self, value)

    once = chat("import\n").stdout
    monkeypatch.setattr(AnswerStreamer, "put", put)
    result = chat("class Stack:\nimport\n")
    assert result.exit_code == 0
    assert "this turn is forgotten" in result.stderr
    assert result.stdout.endswith(once)


@pytest.mark.skipif(os.name == "nt", reason="terminals")
def test_on_a_terminal(tmp_path):
    """A prompt, colours, the live line, Ctrl-C in an answer and at the prompt, and Ctrl-D."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lookahead", "chat", "--max-new-tokens", "900", "--temperature", "1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                               env=os.environ | {"TERM": "xterm"})  # fmt: skip
    os.close(theirs)
    shown = ""

    def appears(words: str, seconds: float) -> bool:
        nonlocal shown
        end = time.monotonic() + seconds
        while words not in shown:
            readable, _, _ = select.select([ours], [], [], max(end - time.monotonic(), 0))
            if not readable:
                return False
            shown += os.read(ours, 1000).decode(errors="replace")
        shown = shown[shown.index(words) + len(words) :]
        return True

    def wait_for(words: str) -> None:
        assert appears(words, 60), f"no {words!r} in {shown!r}"

    def interrupt_prompt() -> bool:  # a signal just before `input` begins to wait is noticed at the next one
        process.send_signal(signal.SIGINT)
        return appears("Ctrl-D leaves", 2)

    try:
        wait_for("/exit")
        wait_for("> ")
        os.write(ours, b"class Stack:\n")
        wait_for("\x1b[3")
        wait_for(" tokens a step, ")  # and the ratio to plain decoding, or why there is none
        wait_for("\x1b[0m\x1b8")
        process.send_signal(signal.SIGINT)
        wait_for("interrupted")
        wait_for("> ")
        assert any(interrupt_prompt() for _ in range(10)), shown
        wait_for("> ")
        os.write(ours, f"/trace {tmp_path / 'page.html'}\n".encode())
        wait_for("in a browser")
        assert (tmp_path / "page.html").exists()
        os.write(ours, b"/stats\n")
        wait_for("tokens of context in use")
        wait_for("> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
