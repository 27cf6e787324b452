"""What is said to whoever waits at a terminal."""

import time

import pytest

from ngram_pool import waiting
from ngram_pool.waiting import told_if_long


@pytest.mark.parametrize(("seconds", "is_terminal", "told"), [(0.3, True, True), (0, True, False), (0.3, False, False)])
def test_only_what_takes_long_is_told_and_to_a_terminal_alone(seconds, is_terminal, told, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with told_if_long("thinking"):
        time.sleep(seconds)
    time.sleep(0.15)
    assert capsys.readouterr().err == ("thinking ...\n" if told else "")
