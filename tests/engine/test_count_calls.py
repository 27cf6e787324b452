"""The walk of a token stays as short as it has become, and what counts its calls can fail."""

import count_calls
import pytest
from click.testing import CliRunner

from lookahead.step import lay_out
from ngram_pool import GuessTree


@pytest.fixture(scope="module")
def counts():
    return count_calls.count(count_calls.small_model())


def test_the_walk_stays_short(counts):
    """What is above has to be worth it, and to be said here. Newer versions of Python count fewer comprehensions."""
    assert count_calls.excesses(counts, step_calls=110, step_files=10, token_calls=850, longest=40) == []


def test_calls_of_ours_are_counted_and_no_others():
    tree = GuessTree.chain([3, 4])
    calls = count_calls.Walk(count_calls.calls_in(lambda: (lay_out(5, tree), sorted([2, 1], key=abs))))
    assert calls.calls[0] is lay_out.__code__
    assert calls.files == 1
    assert calls.changes == 0
    assert "step.py" in str(calls)


def test_lines_are_those_of_code():
    def one():
        """Not this one."""
        # nor this one

        return 1

    assert count_calls.lines_of(one.__code__) == 1
    assert count_calls.lines_of((lambda: 1).__code__) == 0


def test_what_exceeds_a_limit_is_named(counts):
    measured = {
        "step_calls": len(counts.step.calls),
        "step_files": counts.step.files,
        "token_calls": len(counts.token.calls),
        "longest": counts.lines,
    }
    assert count_calls.excesses(counts, **measured) == []
    for name, value in measured.items():
        (wrong,) = count_calls.excesses(counts, **measured | {name: value - 1})
        assert str(value) in wrong


def test_the_command_fails_where_a_limit_is_exceeded(counts, monkeypatch):
    monkeypatch.setattr(count_calls, "count", lambda model: counts)
    for module, name in ((count_calls.stored, "FOLDER"), (count_calls.costs, "SECONDS")):  # the command sets them
        monkeypatch.setattr(module, name, getattr(module, name))
    within, beyond = (CliRunner().invoke(count_calls.main, options) for options in ([], ["--step-calls", "1"]))
    assert within.exit_code == 0
    assert "| a greedy step |" in within.output
    assert beyond.exit_code == 1
    assert "at most 1 are allowed" in beyond.output


def test_a_loop_without_steps_is_no_short_walk(counts, monkeypatch):
    monkeypatch.setattr(count_calls, "STEP", ("lookahead/engine/call.py", "gone"))
    with pytest.raises(LookupError, match="the decoding loop has changed"):
        count_calls.steps_in(counts.token.calls)
