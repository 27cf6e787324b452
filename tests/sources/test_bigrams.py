"""What a model says after each single token, kept for the pools of its wraps."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from zoo import VOCABULARY, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool, UnsupportedModelError
from lookahead.guessing.bigrams import bigrams_file, new_pool
from lookahead.guessing.pool import TOP_K
from lookahead.passes import stored
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.runner import EagerRunner
from lookahead.sources.jacobi import JacobiSource
from lookahead.tools import bigrams
from lookahead.tools.bigrams import learn_bigrams
from lookahead.tools.cli import main

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    return tmp_path / "bigrams"


def keep(model, pool):
    path = bigrams_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    pool.save(path)
    return path


def learned(model, beginning=(3, 4), progress=lambda done: None):
    return learn_bigrams(EagerRunner(model, find_adapter(model)), beginning, 0.5, progress)


@pytest.mark.parametrize("beginning", [[3], [3, 9, 4, 4]])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "mistral"])
def test_bigrams_are_what_the_model_says_after_each_token(model_type, beginning, monkeypatch):
    monkeypatch.setattr(bigrams, "ROWS", 7)  # so that the last pass is a shorter one
    model = tiny_model(model_type)
    shares = []
    pool = learned(model, beginning, shares.append)
    pool.check_integrity()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for token in range(VOCABULARY):
        with torch.no_grad():
            said = (model(torch.tensor([[*beginning, token]])).logits[0, -1].float() / 0.5).softmax(-1)
        (entry,) = pool._entries(np.array([[token]]), (0, 1))
        held = dict(zip(pool._table.tokens[entry].tolist(), pool._table.weights[entry].tolist(), strict=True))
        assert held == pytest.approx({n: said[n].item() for n in said.topk(TOP_K).indices.tolist()}, abs=1e-4)


def test_models_without_trees_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"TrOCR.* --bigrams"):
        learned(tiny_model("trocr"))


def test_a_new_pool_has_the_kept_bigrams_until_it_observes_something_else():
    model = tiny_model("llama")
    assert len(new_pool(model, LookaheadConfig())) == 0
    known = NgramPool()
    known.learn_next([[5]], [[9]], [[1.0]])
    keep(model, known)
    for pool in (new_pool(model, LookaheadConfig()), lookahead.wrap(model).lookahead.pool):
        assert pool.guess([5], 1).tokens.tolist() == [9]
        pool.learn([5, 7])
        pool.learn([5, 7])
        assert pool.guess([5], 1).tokens.tolist() == [7]
    given = NgramPool()
    assert lookahead.wrap(tiny_model("llama"), pool=given).lookahead.pool is given
    assert len(given) == 0


def test_bigrams_do_not_change_the_text():
    plain = tiny_model("llama").generate(IDS, max_new_tokens=30, do_sample=False)
    model = tiny_model("llama")
    keep(model, learned(model))
    for _ in range(2):
        text = model.generate(IDS, max_new_tokens=30, do_sample=False, custom_generate=lookahead.decode)
        assert torch.equal(text, plain)
    assert torch.equal(lookahead.wrap(model).generate(IDS, max_new_tokens=30, do_sample=False), plain)
    assert model.lookahead.last.tokens_per_step > 1


def test_the_report_says_where_a_pool_could_have_begun_with_bigrams():
    model = tiny_model("llama")
    keep(model, learned(model))
    for wrapped, misses in [
        (lookahead.wrap(model), False),
        (lookahead.wrap(unkept := tiny_model("llama").to(torch.bfloat16)), True),
        (lookahead.wrap(unkept, LookaheadConfig(budget=4)), True),
        (lookahead.wrap(tiny_model("llama").to(torch.bfloat16), pool=NgramPool()), False),
        (lookahead.wrap(tiny_model("llama").to(torch.bfloat16), source=JacobiSource(2)), False),
    ]:
        wrapped.generate(IDS, max_new_tokens=2, do_sample=False)
        assert ("missing: bigrams" in wrapped.lookahead.report()) == misses


def test_files_of_others_are_left_alone():
    model = tiny_model("llama")
    path = keep(model, learned(model))
    other = tiny_model("llama")
    other.name_or_path = "another"
    assert bigrams_file(other) != path
    assert bigrams_file(tiny_model("llama").to(torch.bfloat16)) != path
    path.write_bytes(path.read_bytes()[:-1])
    assert len(new_pool(model, LookaheadConfig())) == 0
    larger = NgramPool()
    larger.learn([1, VOCABULARY])
    keep(model, larger)
    assert len(new_pool(model, LookaheadConfig())) == 0


def test_tune_keeps_bigrams(folder):
    ran = CliRunner().invoke(main, ["tune", "--seconds", "1", "--contexts", "64", "--bigrams"])
    assert ran.exit_code == 0, ran.output
    (path,) = folder.glob("*.pool")
    assert str(path) in ran.output
    assert len(NgramPool.load(path)) > 1000
