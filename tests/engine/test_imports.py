"""The time of importing the package, and which modules it does not import."""

import subprocess
import sys

import pytest

import lookahead

HEAVY = ["torch", "transformers", "numpy"]


def python(code: str) -> str:
    """Return what ``code`` prints in its own process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["pool", "--help"], ["generate", "--temperature", "nan", "x"]]
    + [[command, "--help"] for command in ("generate", "trace", "chat", "serve", "audit", "tune")]
    + [["pool", command, "--help"] for command in ("build", "merge", "show")],
    ids=" ".join,
)
def test_a_command_that_only_speaks_of_itself_imports_little(arguments):
    code = f"""
import sys
from lookahead.tools.cli import main
try:
    main({arguments!r}, prog_name="lookahead")
except SystemExit:
    print("\\n", [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).endswith("\n []\n")


def test_every_name_is_there():
    for name in lookahead.__all__:
        assert getattr(lookahead, name) is not None
        assert name in dir(lookahead)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lookahead.nonsense
    with pytest.raises(ImportError):
        from lookahead import nonsense  # noqa: F401


@pytest.mark.long
def test_a_transformers_that_dropped_its_processors():
    """Those that are known to treat each sequence by itself are only looked up; without them, batches go in step."""
    code = """
from transformers import GenerationMixin
from transformers.generation import logits_process, stopping_criteria
dropped = 0
for module, ending in ((logits_process, ("Warper", "Processor", "Penalty", "Normalization")),
                       (stopping_criteria, "Criteria")):
    for name in [name for name in vars(module) if name.endswith(ending)]:
        if name not in ("LogitsProcessor", "StoppingCriteria", "MaxLengthCriteria", "EosTokenCriteria"):  # needed
            delattr(module, name)
            dropped += 1
assert dropped > 25
import lookahead.wrapping
from lookahead.engine.sampling import BY_SEQUENCE
print(len(BY_SEQUENCE))
"""
    assert python(code) == "2\n"


@pytest.mark.long
def test_what_is_not_asked_for_is_not_loaded():
    """The package is imported on demand, and a stranger who follows `wrap` and `generate` meets the core alone."""
    bolted_on = [
        "alibi",
        "around",
        "assisted",
        "biases",
        "branching",
        "callers_cache",
        "conditions",
        "convolutions",
        "custom",
        "elementwise",
        "figures",
        "gguf",
        "graphs",
        "limits",
        "merging",
        "loops",
        "mistral",
        "mtp",
        "padding",
        "parts",
        "passed_in",
        "plain",
        "positions",
        "recording",
        "recurrence",
        "refusal",
        "refused",
        "replaying",
        "report",
        "rewinding",
        "shapes",
        "sources",
        "stop_strings",
        "tools",
        "training",
        "trl",
        "users_code",
        "users_guesser",
        "window",
    ]
    code = f"""
import sys
import lookahead
from lookahead import DEMO_MODEL, __version__
assert set(lookahead.__all__) <= set(dir(lookahead))
print([name for name in {HEAVY} if name in sys.modules], "LookaheadConfig" in vars(lookahead))
lookahead.LookaheadConfig()
from lookahead import wrap
assert lookahead.wrap is wrap
import torch
from transformers import AutoModelForCausalLM
model = lookahead.wrap(AutoModelForCausalLM.from_pretrained(DEMO_MODEL))
ids = torch.arange(3, 20)[None]
for rows, do_sample in ((1, False), (1, True), (2, False), (2, True)):
    model.generate(ids.repeat(rows, 1), max_new_tokens=8, do_sample=do_sample)
lookahead.unwrap(model)
print([name for name in sys.modules if name.startswith("lookahead.") and set(name.split(".")) & set({bolted_on})])
"""
    first, *_, last = python(code).splitlines()
    assert (first, last) == ("[] False", "[]")
