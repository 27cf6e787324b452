"""The pages in docs/ show what the code does, and all their links work."""

import ast
import inspect
import re
import shlex
import shutil
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from doc_blocks import CLIENTS, blocks
from doc_blocks import main as run_page
from draw_design import budget, pool, rooms, step
from draw_speed import draw as draw_speed
from draw_speed import rates
from draw_terminal import COLUMNS, Run, chunks, draw
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead.engine import assisted, fallback, limits, plain, positions, report
from lookahead.models import branching, families, passed_in, state, training
from lookahead.models.families import gemma
from lookahead.models.families.page import Page
from lookahead.passes import conditions, fused, graphs, probe, runner, static, ways
from lookahead.tools.cli import main as program
from ngram_pool import cpp

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OTHERS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md")
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [*DOCS.glob("*.md"), *(ROOT / name for name in OTHERS)]}
NOT_RUN = "no test runs"
RUN_ELSEWHERE = (CLIENTS, "run by `make test-vllm`", "run by tests/server/test_server.py", NOT_RUN)


@pytest.mark.parametrize("draw", [rooms, step, pool, budget])
def test_drawings_are_those_of_the_code(draw):
    drawn = (DOCS / f"{draw.__name__}.svg").read_text(encoding="utf-8")
    assert drawn == draw(), "it has changed: python scripts/draw_design.py --out docs"


def test_the_chart_is_that_of_the_results():
    drawn = (DOCS / "speed.svg").read_text(encoding="utf-8")
    assert drawn == draw_speed(), "it has changed: python scripts/draw_speed.py --out docs/speed.svg"


def test_the_first_numbers_are_those_of_the_results():
    readme, home = PAGES["README.md"].read_text(encoding="utf-8"), PAGES["docs/index.md"].read_text(encoding="utf-8")
    found = {method: f"{speed:.0f}" for method, speed in rates("smollm2-amx").items()}
    said = "**{auto} tokens a second, where llama.cpp writes {llama-plain} and `model.generate` {plain}:**"
    assert said.format(**found) in readme
    assert said.format(**found) in home
    rows = re.findall(r"^\| .*cpu-2-cores/(smollm2\S*)\.md\).* \| ([\d.]+) \| ([\d.]+) \|$", readme, re.M)
    assert len(rows) == 5
    for name, ours, theirs in rows:
        speeds = rates(name)
        peer = speeds.get("llama-plain") or speeds.get("llama-q8_0") or speeds["llama-q4_0"]
        digits = len(ours.partition(".")[2])
        assert (ours, theirs) == (f"{speeds['auto']:.{digits}f}", f"{peer:.{digits}f}"), name


def test_the_moving_picture():
    """Each token is dimmed until it was written; where nothing moves, the whole text is there."""
    pieces = ["def", " f(", "a, b", "):\n", "    return", " a ", "", "& b\n\n", "x" * (COLUMNS + 3), " end"]
    times = [0.5 + 0.25 * i for i in range(len(pieces))]
    plain, ours = Run(pieces, times, list(range(len(pieces)))), Run(pieces, times, [0, 1, 1, 1, 2, 3, 3, 3, 4, 4])
    for run in (plain, ours):
        parts = chunks(run)
        assert "".join(words for *_, words, _ in parts).replace(" ", "") == "".join("".join(pieces).split())
        assert all(column + len(words) <= COLUMNS for _, column, words, _ in parts)
        assert [line for line, *_ in parts] == sorted(line for line, *_ in parts)
        assert {run.steps[token] for *_, token in parts} == set(run.steps) - ({6} if run is plain else set())
    root = ET.fromstring(draw("<prompt>", "model", plain, ours))
    name = "{http://www.w3.org/2000/svg}"
    dimmed = [(text, text.find(f"{name}set")) for text in root.iter(f"{name}text")]
    assert next(text.text for text, dim in dimmed if dim is None) == "> <prompt>"
    assert {dim.get("dur") for text, dim in dimmed if text.text == "return"} == {"1.50s"}
    clocks = [(clock.find(f"{name}text").text, clock.find(f"{name}set")) for clock in root.iter(f"{name}g")]
    assert {shown.get("begin") for words, shown in clocks if words == "1.5 s"} == {"r.begin+1.5s"}
    assert [words for words, shown in clocks if shown.get("to") == "hidden"] == ["2.8 s", "2.8 s"]
    assert "the same text, 1.0 times as fast" in {text.text for text, _ in dimmed}
    picture = (DOCS / "terminal.svg").read_text(encoding="utf-8")
    ET.fromstring(picture)
    assert len(picture) < 300_000
    assert set(re.findall(r"\w+://[^\"]*", picture)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in picture


# -- links ------------------------------------------------------------------------------------------------------------


def prose(page):
    """A page without its code."""
    return re.sub(r"```.*?```|`[^`]*`|^    [^\n]*$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^()#\s]*)(?:#([^()\s]*))?\)", prose(page)):
        goal = (page.parent / target).resolve() if target else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), f"{target}#{anchor}"


def test_the_site_lists_all_pages():
    def files(entry):
        entries = entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else [entry]
        return {entry} if isinstance(entry, str) else set().union(*map(files, entries))

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert {name for name in listed if (DOCS / name).is_file()} == {path.name for path in DOCS.glob("*.md")}
    assert all((DOCS / name).is_file() or (ROOT / name).is_file() for name in listed)


def test_the_api_lists_all_names():
    listed = re.findall(r"^::: lookahead\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(lookahead.__all__)


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first[1] == lookahead.__version__


def test_the_table_of_extras():
    extras = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.S | re.M
    )
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "start.md").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"^(\w+) = \[", extras[1], re.M)) == set(rows)


# -- code -------------------------------------------------------------------------------------------------------------


def test_each_block_is_run_or_says_why_not():
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert len(blocks(page)) == text.count("```python"), name
        for block in blocks(page):
            compile(block.code, name, "exec")
            assert not block.note or any(words in block.note for words in RUN_ELSEWHERE), (name, block.note)


# The package and its dependencies.
INSTALLED = {"torch", "transformers", "numpy", "lookahead", "ngram_pool", *sys.stdlib_module_names}
BROUGHT_BY = {"uvicorn": "starlette uvicorn", "datasets": "trl"}
ENVIRONMENTS = {"vllm"}  # the page makes an environment that has it


def imported(code):
    """The packages that a program imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def named_before(text, package):
    """Whether a text says how a package, or what brings it, is installed."""
    names = [package.replace("_", "-"), BROUGHT_BY.get(package, package)]
    return package in ENVIRONMENTS or any(
        re.search(rf"pip install ['\"]?{re.escape(name)}(?![\w-])", text) for name in names
    )


def test_what_a_block_needs_stands_before_it():
    seen = set()
    for name, page in PAGES.items():
        lines = page.read_text(encoding="utf-8").splitlines()
        for block in blocks(page):
            before = "\n".join(lines[: block.line - 1])
            needed = set(imported(block.code)) - INSTALLED
            assert {package for package in needed if not named_before(before, package)} == set(), name
            seen |= needed
    for file in (ROOT / "examples").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        needed = set(imported(text)) - INSTALLED - {"tqdm"}  # transformers brings it
        assert {package for package in needed if not named_before(text, package)} == set(), file
    assert {"peft", "torchao", "outlines", "openai"} <= seen


def test_nobody_is_told_to_install_a_name_that_is_on_no_index():
    """Whoever registers it would be installed. It stands in pyproject.toml alone, where pip knows whose it is."""
    told = re.compile(r"pip3? install[^\n`]*\blookahead([-_]decoding)?\b")
    texts = [
        *PAGES.values(), ROOT / "CHANGELOG.md", ROOT / "Makefile",
        *(path for folder in ("lookahead", "ngram_pool", "examples", "scripts", "docs")
          for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".sh", ".ipynb", ".html"}),
    ]  # fmt: skip
    assert len(texts) > 100
    assert [path for path in texts if told.search(path.read_text(encoding="utf-8"))] == []
    assert told.search("pip install 'lookahead-decoding[serve]'")


ON_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the packaged model takes its place, as tests download nothing
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"  # which it lacks
HAS_OWN_TEST = ("docs/sources.md", "docs/trace.md")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in PAGES if name not in HAS_OWN_TEST and any(not b.note for b in blocks(PAGES[name]))]
)
def test_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo_prompt.txt").write_bytes((ROOT / "demo_prompt.txt").read_bytes())
    names, chat = {"__name__": "__main__"}, tmp_path / "chat"
    shutil.copytree(lookahead.DEMO_MODEL, chat)
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    for block in blocks(PAGES[name]):
        if not block.note:
            code = block.code.replace(ON_THE_HUB, str(chat))
            replace(block, code=code).run(PAGES[name], names)


def test_a_block_that_fails_is_found(tmp_path):
    page = tmp_path / "page.md"
    fence = "`" * 3
    page.write_text(
        f"Words\n\n{fence}python\nx = 1\n{fence}\n\n*Needs y: {CLIENTS}.*\n\n{fence}python\nx / 0\n{fence}\n"
    )
    first, second = blocks(page)
    assert (first.note, second.note) == ("", f"Needs y: {CLIENTS}.")
    done = CliRunner().invoke(run_page, [str(page)])
    assert isinstance(done.exception, ZeroDivisionError)
    assert done.exc_info[2].tb_next is not None
    assert f"{page}, line 10" in done.stderr


def test_commands_have_the_options_that_pages_name():
    seen = 0
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^ {4,}lookahead (.*)$", text, re.M):
            command, words = program, shlex.split(line, comments=True)
            while words and words[0] in getattr(command, "commands", ()):
                command = command.commands[words.pop(0)]
            assert command is not program or words == ["--help"], (name, line)
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            asked = {word.split("=")[0] for word in words if word.startswith("--")}
            assert asked <= known | {"--help"}, (name, line)
            seen += 1
    assert seen > 20


# -- why is it not faster? --------------------------------------------------------------------------------------------

# Functions whose results reach report() or a warning, and which of their texts do.
SPEAKERS = {
    report.report: ast.FunctionDef,
    report._described: ast.FunctionDef,
    fallback.why_plain: ast.Return,
    plain.described: ast.Return,
    limits.why_plain: ast.Return,
    positions.why_plain: ast.Return,
    passed_in.why_plain: ast.Return,
    assisted.why_no_draft_model: ast.Return,
    ways.try_ways: (ast.Subscript, ast.Call),
    conditions.what_training_changes: ast.Return,
    conditions._try_in_training: ast.Return,
    training.unknown_part: ast.Return,
    families.page_of: ast.Raise,
    Page: ast.Raise,
    gemma.Gemma3: ast.Raise,
    state.State.why_not_split: ast.Return,
    branching.why_not: ast.Return,
    fused.FusedRunner.__init__: ast.Raise,
    graphs.static_program: ast.Raise,
    static.why_not: ast.Return,
    graphs.StepGraphs.lend: (ast.Assign, ast.Call),
    graphs.StepGraphs._run: ast.Call,
    probe.compare_with_plain: ast.Return,
    probe._compare_with_plain: (ast.Return, ast.IfExp),
    cpp.load: ast.Return,
    cpp._why_not_built: ast.Return,
}
# Texts of the same functions that are errors, warnings or names of settings.
ELSEWHERE = re.compile(
    r"adapter$|sdpa|eager|cannot be decoded|Loading it|its own generate|Guesses will be|cuda|"
    r"numpy|is left to torch|, which is slower"
)


def texts_of(function, kinds):
    """The constant parts of the texts in nodes of these kinds, up to a colon or a bracket."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))
    body = tree.body[0]
    if ast.get_docstring(body):
        body.body = body.body[1:]
    for node in ast.walk(body):
        if isinstance(node, kinds):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    said = re.split(r"[;:(\n]", part.value)[0].strip(" ,.")
                    if re.search("[a-z]{4}", said) and " " in said and not ELSEWHERE.search(said):
                        yield said


def test_each_word_of_report_has_its_row():
    rows = " ".join(
        line for line in (DOCS / "slow.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    )
    said = {text for function, kinds in SPEAKERS.items() for text in texts_of(function, kinds)}
    assert len(said) > 60
    assert {text for text in said if text not in rows} == set()
    for name in (runner.EagerRunner.name, fused.FusedRunner.name, graphs.GraphRunner.name):
        assert f"`passes: {name}`" in rows


def test_the_report_that_the_page_shows():
    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL)
    model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(lookahead.DEMO_MODEL, dtype=torch.float32))
    model.generate(**tokenizer("def f():", return_tensors="pt"), max_new_tokens=5)
    page = (DOCS / "slow.md").read_text(encoding="utf-8")
    for line in model.lookahead.report().splitlines():
        assert line.split(":")[0] + ":" in page
        if not line.startswith(("kernels", "given up", "weights", "PoolSource")):  # these depend on the machine
            assert f"    {line}\n" in page


def test_figures_beside_other_methods_stand_in_the_benchmarks():
    page, known = DOCS / "peers.md", (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    _, measured = page.read_text(encoding="utf-8").split("## Measurements")
    figures = re.findall(r"\d+\.\d\d", measured)
    assert len(figures) > 20
    assert [figure for figure in figures if figure not in known] == []


# -- pages with tests of their own ------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Run the example of a source on a corpus that holds the coming text; return its names, inputs and text."""
    source, use, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "sources.md").read_text(encoding="utf-8"), re.S)
    assert len(source.splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(source, names)
    model = names["AutoModelForCausalLM"].from_pretrained(lookahead.DEMO_MODEL)
    tokenizer = names["AutoTokenizer"].from_pretrained(lookahead.DEMO_MODEL)
    inputs = tokenizer("def read_lines(path):", return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=60)[0]
    Path("corpus.txt").write_text("import os\n\n" + tokenizer.decode(text, skip_special_tokens=True))
    exec(use, names)
    return names, inputs, text


def test_the_example_of_a_source(example, capsys):
    names, inputs, text = example
    model = names["model"]
    assert torch.equal(model.generate(**inputs, max_new_tokens=60)[0], text)
    lookahead.wrap(model, source=names["file"])
    assert torch.equal(model.generate(**inputs, max_new_tokens=60)[0], text)
    assert model.lookahead.last.accepted["SuffixArray"] > 30
    assert model.lookahead.last.tokens_per_step > 2


@pytest.mark.parametrize(("number", "name"), [(2, "Repeats"), (3, "DraftModelSource"), (4, "LayerSkipSource")])
def test_the_examples_of_other_sources(example, capsys, number, name):
    names, _, _ = example
    exec(re.findall(r"```python\n(.*?)```", (DOCS / "sources.md").read_text(encoding="utf-8"), re.S)[number], names)
    assert f"{name}: asked in" in capsys.readouterr().out


def test_the_example_of_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "trace.md").read_text(encoding="utf-8"), re.S)
    names: dict = {}
    exec(example, names)
    assert capsys.readouterr().out == names["trace"].text + "\n"
    assert Path("trace.html").read_text(encoding="utf-8") == names["trace"].html()


def test_the_page_of_commands_names_what_there_is():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    options = {name for command in program.commands.values() for option in command.params for name in option.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - {"--help"} <= options
    assert set(re.findall(r"lookahead ([a-z]+)", page)) <= {*program.commands}
