"""What is said to whoever waits at a terminal."""

import time

import pytest
from zoo import tiny_model

import lookahead
from ngram_pool import waiting
from ngram_pool.waiting import kept_for_later, seconds_saved, told_if_long


@pytest.mark.parametrize(("seconds", "is_terminal", "told"), [(0.3, True, True), (0, True, False), (0.3, False, False)])
def test_only_what_takes_long_is_told_and_to_a_terminal_alone(seconds, is_terminal, told, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with told_if_long("thinking"):
        time.sleep(seconds)
    time.sleep(0.15)
    assert capsys.readouterr().err == ("thinking ...\n" if told else "")


def test_a_wrap_that_takes_long_says_so(monkeypatch, capsys):
    """The passes that try a large model take a minute."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.001)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lookahead.wrap(tiny_model("llama"))
    assert capsys.readouterr().err.startswith("trying how the model can be decoded ...\n")


def test_time_counts_as_saved_only_if_something_was_made(monkeypatch):
    monkeypatch.setattr(waiting, "_kept", [])
    with pytest.raises(ZeroDivisionError), kept_for_later():
        time.sleep(1 / 0)
    assert seconds_saved() == 0
    for _ in range(2):
        with kept_for_later():
            time.sleep(0.01)
    assert 0.02 <= seconds_saved() < 1
