"""C++ built on first use: kept where it was built, and done without where it cannot be."""

import os
from unittest import mock

import pytest
import torch

from lookahead import native, tree_attention


@pytest.mark.parametrize(
    ("compiler", "named"),
    [("no-such-compiler", "no-such-compiler"), ("false", "false"), ("g++ 'unbalanced", "No closing quotation")],
)
def test_without_a_compiler_it_is_left_to_torch(compiler, named, caplog, monkeypatch, tmp_path):
    query, mask = torch.randn(1, 2, 5, 16), torch.zeros(1, 1, 5, 5)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    for cache in (native.library, tree_attention._kernels):
        cache.cache_clear()
    try:
        assert not tree_attention.serves(query, query, query, mask)
        assert not tree_attention.serves(query, query, query, mask)
    finally:
        for cache in (native.library, tree_attention._kernels):
            cache.cache_clear()
    assert len(caplog.records) == 1
    assert "C++ compiler" in caplog.text
    assert caplog.text.count(named) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_what_is_damaged_is_built_anew(content, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native._built("tree_attention").write_bytes(content)
    native.library.cache_clear()
    try:
        assert native.library("tree_attention")["attend_float32"]
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("name", ["panels", "tree_attention"])
def test_what_was_built_is_kept(name, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FOLDER", tmp_path / "new")
    built = native._built(name)
    with mock.patch.object(native.subprocess, "run", side_effect=AssertionError("built again")):
        assert native._built(name) == built
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    monkeypatch.setenv("CXX", os.environ.get("CXX", "g++") + " -O1")
    assert native._built(name) != built
