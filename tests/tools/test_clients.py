"""What scripts/clients.py reports of equal, different and failing clients."""

import pytest
import torch
from click.testing import CliRunner
from clients import CLIENTS, differences, main, text, tried

import lookahead
from bench.tiny_models import llama


def is_wrapped(model) -> bool:
    return hasattr(model, "lookahead")


def honest(wrap):
    """A text"""
    return text(wrap(llama()))


def other(wrap):
    model = wrap(llama())
    return {"texts": text(model), "wrapped": is_wrapped(model)}


def silent(wrap):
    return wrap(llama()).config.vocab_size


def unwrapped(wrap):
    return text(lookahead.unwrap(wrap(llama())))


def raising(wrap):
    """A wrapped model fails"""
    if is_wrapped(wrap(llama())):
        raise KeyError("taken")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (honest, "equal"),
        (other, "DIFFERS: in 1 values, first ['wrapped']: False became True"),
        (silent, "FAILS: lookahead did not decode for 1 of 1 wrapped models"),
        (unwrapped, "FAILS: lookahead did not decode for 1 of 1 wrapped models"),
        (raising, "FAILS: the wrapped model raises KeyError: 'taken'"),
        (lambda wrap: 1 / 0, "FAILS: the plain model raises ZeroDivisionError: division by zero"),
    ],
)
def test_what_came_of_a_client(run, says):
    assert tried(run) == says


def test_differences_of_tensors():
    ones = torch.ones(2, 3)
    assert not list(differences([{"a": ones}, (1, None)], [{"a": ones.clone()}, (1, None)]))
    for changed in (ones + 1e-6, ones[:1], ones.double(), None):
        (found,) = differences({"a": [ones]}, {"a": [changed]})
        assert found.startswith("['a'][0]: ")
    assert len(list(differences([1, 2], [1]))) == 1
    assert len(list(differences({"a": 1}, {"b": 1}))) == 1
    assert len(list(differences(True, 1))) == 1


def test_the_table(monkeypatch):
    """A client that fails or is not installed is listed, and the command fails."""
    monkeypatch.setitem(CLIENTS, "casts", ("torch", honest))
    monkeypatch.setitem(CLIENTS, "copies", ("no-such-package", honest))
    monkeypatch.setitem(CLIENTS, "state_dicts", ("torch", raising))
    done = CliRunner().invoke(main, ["casts"])
    assert done.exit_code == 0
    assert f"| casts | torch {torch.__version__} | A text | equal |" in done.stdout
    for name, line in (
        ("copies", "| copies | no-such-package | A text | NOT INSTALLED |"),
        ("state_dicts", "| A wrapped model fails | FAILS: the wrapped model raises KeyError: 'taken' |"),
    ):
        done = CliRunner().invoke(main, ["casts", name])
        assert done.exit_code == 1
        assert line in done.stdout
