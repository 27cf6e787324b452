"""For any input, a command works or ends with a sentence that says what is wrong, without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import uvicorn
from click.testing import CliRunner
from zoo import tiny_model

from lookahead.tools.cli import FileToWrite, main
from lookahead.tools.loading import load_tokenizer
from ngram_pool import NgramPool

UNDECODABLE = os.fsdecode(b"def \xff")
NO_NUMBERS = ["nan", "inf", "-inf", "", "many"]
NUMBERS = [*NO_NUMBERS, "-1", "0", "1e-320", "1e300", str(10**30)]
MODELS = ["", "./no/such", ".", "text", UNDECODABLE, "x" * 5000]
DEVICES = ["", "meta", "cuda:99999999999999999999", "cpu:-1", UNDECODABLE]
PROMPTS = ["", UNDECODABLE, "def " * 500]
LISTS = ["", ",", "1,,2", "nan", "-1", str(10**30), "9" * 5000]
FILES = ["", ".", "no/such/file", UNDECODABLE, "unreadable", "not-text", "x" * 5000]
TARGETS = ["", ".", "no/such/file", UNDECODABLE, "unwritable", "sealed/file", "x" * 5000, "not-text"]


def commands() -> dict[tuple[str, ...], click.Command]:
    """Every command by the words that call it."""
    found = {}
    for name, command in main.commands.items():
        within = command.commands if isinstance(command, click.Group) else {None: command}
        found |= {(name, *filter(None, [inner])): command for inner, command in within.items()}
    return found


def odd_values(words: tuple[str, ...], option: click.Parameter) -> list[str]:
    if isinstance(option.type, FileToWrite):  # a pool that were written there by mistake would replace the device
        return TARGETS if words[0] == "pool" else [*TARGETS, "/dev/full"]
    if isinstance(option.type, (click.Path, click.File)):
        return FILES
    if isinstance(option.type, (click.IntRange, click.FloatRange)):
        return NUMBERS
    if isinstance(option.type, click.Choice):
        return ["", "x"]
    return {"contexts": LISTS, "device": DEVICES, "prompt": PROMPTS}.get(option.name, MODELS)


def cases() -> list:
    """What ``trace`` and ``serve`` share with ``generate`` and ``chat`` is tested once."""
    shared = {option.name for command in ("generate", "chat") for option in main.commands[command].params}
    return [
        pytest.param(words, option, value, id=" ".join([*words, option.opts[-1], repr(value)[:40]]))
        for words, command in commands().items()
        for option in command.params
        if not getattr(option, "is_flag", False) and not (words[0] in ("trace", "serve") and option.name in shared)
        for value in odd_values(words, option)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny model, a pool, a file of text and files that are trouble."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = load_tokenizer(None)
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=160).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    NgramPool(0.1).save(folder / "a.pool")
    (folder / "text").write_text("def add(a, b):\n")
    (folder / "lines.jsonl").write_text('{"prompt": "def"}\n')
    (folder / "not-text").write_bytes(b"\xff")
    # Permissions do not keep the administrator out, but what the kernel shows as files does.
    for name, mode, shown in (("unreadable", 0o000, "/proc/self/mem"), ("unwritable", 0o444, "/proc/version"),
                              ("sealed", 0o555, "/proc/self")):  # fmt: skip
        if os.geteuid() == 0:
            (folder / name).symlink_to(shown)
        elif name == "sealed":
            (folder / name).mkdir(mode)
        else:
            (folder / name).touch(mode)
    return folder


def arguments(words: tuple[str, ...], option: click.Parameter, value: str) -> list[str]:
    """A call that works and is soon done, but for the odd value."""
    model = [] if "merge" in words else ["--model", "model"]
    of_a_batch = option.name in ("prompts_file", "out")
    prompt = ["--prompts", "lines.jsonl", "--out", "out.jsonl"] if of_a_batch else ["def"]
    rest = {
        "generate": ["--max-new-tokens", "2", *(prompt if option.name not in ("prompt", "prompt_file") else [])],
        "trace": ["--max-new-tokens", "2", "def"],
        "serve": ["--port", "0"] if option.name != "port" else [],
        "chat": ["--max-new-tokens", "2", *(["--chat-template", "text"] if option.name != "template_file" else [])],
        "audit": ["--max-new-tokens", "2", "--count", "1"],
        "tune": ["--seconds", "1", "--contexts", "8"],
        "build": ["--out", "out.pool", *(["text"] if option.name != "files" else [])],
        "merge": ["--out", "out.pool", *(["a.pool", "a.pool"] if option.name != "files" else ["a.pool"])],
        "show": ["a.pool"] if option.name != "path" else [],
    }[words[-1]]
    given = ["--", value] if isinstance(option, click.Argument) else [option.opts[-1], value]
    return [*words, *model, *rest, *given]


@pytest.mark.parametrize(("words", "option", "value"), cases())
def test_odd_values(words, option, value, place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)  # serves no one
    result = CliRunner().invoke(main, arguments(words, option, value), input="import\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    if result.exit_code:
        *_, sentence = result.stderr.splitlines()
        assert sentence.startswith("Error: ")
        assert len(sentence) > 20
    if value in NO_NUMBERS and isinstance(option.type, (click.IntRange, click.FloatRange)):
        assert result.exit_code == 2
        assert f"'{option.opts[-1]}'" in result.stderr


@pytest.mark.parametrize(
    ("prompt", "flaw"),
    [
        ({"turns": [5]}, "list of texts"),
        ({"turns": "def f():"}, "list of texts"),
        ({"turns": []}, "list of texts"),
        ({"turns": ["x", None]}, "list of texts"),
        ({"turns": ["\ud800"]}, "surrogates"),
        ({}, "turns"),
        ("text", "TypeError"),
        ([[1]], "TypeError"),
    ],
)
def test_lines_that_are_no_prompts(prompt, flaw, tmp_path):
    good = {"question_id": 1, "category": "c", "turns": ["a\u2028b"]}  # which JSON allows within a line
    bad = {"question_id": 2, "category": "c"} | prompt if isinstance(prompt, dict) else prompt
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([json.dumps(good, ensure_ascii=False), json.dumps(bad)]), encoding="utf-8")
    result = CliRunner().invoke(main, ["audit", "--prompts", str(file)])
    assert result.exit_code == 1
    assert f"{file}, line 2 is not in Spec-Bench's format" in result.stderr
    assert flaw in result.stderr


def test_json_too_deep_is_no_prompt(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("[" * 100_000)
    assert "line 1 is not in Spec-Bench" in CliRunner().invoke(main, ["audit", "--prompts", str(file)]).stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_regular_file_is_no_pool(place, tmp_path):
    """Written as pools are, a device or a named pipe would be replaced by a file."""
    out = tmp_path / "out"
    os.mkfifo(out)
    result = CliRunner().invoke(main, ["pool", "merge", *[str(place / "a.pool")] * 2, "--out", str(out)])
    assert result.exit_code == 2
    assert "would be lost" in result.stderr
    assert out.is_fifo()


def shell(line: str, place: Path) -> subprocess.CompletedProcess:
    """Run ``line``, in which ``lookahead`` is the command."""
    function = f'lookahead() {{ "{sys.executable}" -m lookahead "$@"; }}\n'
    here = str(Path(__file__).parents[2])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", function + line], cwd=place, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": here},
    )  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's")
@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("lookahead --help >&-", 0, ""),
        ("lookahead --help >/dev/full", 1, "Error: standard input or output: No space left on device\n"),
        ("lookahead --version >/dev/full 2>&1", 1, ""),
        ("lookahead tune --help | :", 1, ""),
        ("lookahead pool show --help <&- >&- 2>&-", 0, ""),
        ("lookahead generate - --model model <&-", 2, "the prompt is empty"),
        ("lookahead generate def --model model >/dev/full", 1, "No space left on device\n"),
        ("lookahead generate def --model model | :", 1, ""),
        ("lookahead chat --model model --chat-template text <&- >&- 2>&-", 0, ""),
        ("lookahead pool build text --model model --out new.pool >&- && test -s new.pool", 0, ""),
    ],
)
def test_standard_streams(line, status, words, place):
    done = shell(line, place)
    assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (status, False, False), done
    assert words in done.stderr
