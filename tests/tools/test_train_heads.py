"""Heads trained by scripts/train_heads.py: their training, their files, and the texts for it."""

import copy
import json
import math
import random
from pathlib import Path

import click
import compare_sources
import pytest
import torch
import train_heads
from click.testing import CliRunner
from test_heads import GREEDY, IDS, deep_model, proposed
from test_lossless import check_identical
from test_sources import paths_of
from train_heads import write_heads
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo import VOCABULARY

import lookahead
from bench import own_texts
from bench.own_texts import Text, add_texts, chat_frame, read_texts, written
from bench.trained_heads import (
    EagleHead,
    MedusaHeads,
    agreement,
    batch_of,
    layers_read,
    loss_of,
    new_heads,
    read_by,
    tokens_of_heads,
    train,
)
from lookahead import EagleSource, LookaheadConfig, MedusaSource, NgramPool, PoolSource
from lookahead.guessing.bigrams import bigrams_file
from lookahead.passes import stored

KINDS = ["medusa", "eagle", "eagle3"]
DEMO = Path(lookahead.__file__).parent / "demo_model"


def source_of(kind: str, model, folder):
    return (MedusaSource if kind == "medusa" else EagleSource)(model, folder)


def vocabulary_of_heads(known: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """So many tokens of the model, and the place of each among them."""
    tokens = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:known].sort().values
    return tokens, torch.full((VOCABULARY,), -1).index_copy(0, tokens, torch.arange(known))


def random_heads(model, kind: str, tokens: torch.Tensor):
    """Heads with nothing at zero, so that a mistake in any part shows."""
    torch.manual_seed(0)
    heads = new_heads(model, kind, tokens)
    for parameter in heads.parameters():
        noise = torch.randn_like(parameter)
        parameter.data += noise / 4 if parameter.ndim == 1 else noise / math.sqrt(parameter.shape[1])
    return heads


# -- training computes what guessing computes -------------------------------------------------------------------------


@pytest.mark.parametrize("known", [VOCABULARY, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_trained_as_they_guess(tmp_path, kind, known):
    """What training computes at each depth along a path is what the source says of it, from the written files.

    For EAGLE, deeper guesses rest on several passes over the head's own features, so this covers positions, masks and
    the shift between passes.
    """
    model, (tokens, place_of) = deep_model(), vocabulary_of_heads(known)
    heads = random_heads(model, kind, tokens)
    for parameter in heads.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as the files hold them
    write_heads(tmp_path, model, heads, tokens)
    text = [3 + i * i % 90 for i in range(30)]
    paths = paths_of(proposed(source_of(kind, model, tmp_path), text, 30, depth=4))
    assert max(map(len, paths)) > 2
    for path, probability in paths.items():
        ids = [*text, *path, *[5] * 5]  # goes on, so that each depth has a place
        example = read_by(model, [Text(ids, 0)], layers_read(model, kind))[0]
        example.states = exact_states(model, ids, layers_read(model, kind))
        said = said_along(model, heads, batch_of([example], place_of), len(text), tokens)
        expected = math.prod((said[depth] / 0.3).softmax(-1)[token].item() for depth, token in enumerate(path))
        assert probability == pytest.approx(expected, rel=2e-2, abs=1e-5), path


@torch.no_grad()
def said_along(model, heads, batch, root: int, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of all tokens at each depth after a text of ``root`` tokens, as training computes them."""
    if isinstance(heads, EagleHead) and not heads.is_third:  # guesses with all of the model's projection
        return [made[0, root - 2 + i] @ model.lm_head.weight.T for i, made in enumerate(heads.features(batch, 4))]
    rows = []
    for depth, (counts, logits, _, _) in enumerate(heads.said(batch)):
        # A row of Medusa's is that of the state before the root, one of EAGLE's the pair that leads to this depth.
        place = root - 2 + (0 if isinstance(heads, MedusaHeads) else depth)
        rows.append(torch.full((VOCABULARY,), -math.inf))
        rows[-1][tokens] = logits[int(counts[0, :place].sum())]
    return rows


def exact_states(model, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Hidden states in float32: `read_by` keeps them in bfloat16."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def read():
    """A model, and its own texts with its states and predictions."""
    model = deep_model()
    prompts = [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(4, 9))] for rng in map(random.Random, range(60))
    ]
    torch.manual_seed(0)
    answers = written(model, prompts, 40, 0.7)
    return model, [Text(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("known", [VOCABULARY, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_heads_guess_better_and_the_text_is_plain(tmp_path, read, kind, known):
    model, texts = read
    tokens = tokens_of_heads(texts, VOCABULARY, known)
    place_of = torch.full((VOCABULARY,), -1).index_copy(0, tokens, torch.arange(len(tokens)))
    examples = read_by(model, texts, layers_read(model, kind))
    torch.manual_seed(0)
    heads = new_heads(model, kind, tokens)
    held_out = examples[::6]
    before = loss_of(heads, batch_of(held_out, place_of)).item()
    train(heads, [e for i, e in enumerate(examples) if i % 6], held_out, place_of, 60, 400, 4e-3, 0)
    after = loss_of(heads, batch_of(held_out, place_of)).item()
    assert after < 0.95 * before, "guesses no better than before"
    assert min(agreement(heads, held_out, place_of)) > 0.08
    write_heads(tmp_path, model, heads, tokens)
    source = source_of(kind, model, tmp_path)
    for options in (GREEDY, {**GREEDY, "do_sample": True, "temperature": 0.7}):
        check_identical(model, [IDS], options, LookaheadConfig(budget=16), 0, source=[source, PoolSource()])


def test_what_counts(read):
    """A place counts if the model has written the next token; the target is its prediction there."""
    model, texts = read
    example = read_by(model, texts[:3], (8,))
    batch = batch_of(example, torch.arange(VOCABULARY))
    for places in (1, 3):
        counts, likely, chances = batch.after(places)
        expected = [
            [text.begin - 1 <= i < len(text.ids) - 1 for i in range(places, batch.ids.shape[1])] for text in texts[:3]
        ]
        assert counts.tolist() == expected
        with torch.no_grad():
            first = model(torch.tensor([texts[0].ids])).logits[0, max(texts[0].begin - 1, places)].softmax(-1).topk(8)
        assert likely[0].tolist() == first.indices.tolist()
        assert chances[0].tolist() == pytest.approx(first.values.tolist(), rel=1e-3)


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(own_texts, "WRITTEN_AT_ONCE", 4)
    for name in ("USER_TOKENS", "ANSWER_TOKENS", "CONTINUED_TOKENS"):
        monkeypatch.setattr(own_texts, name, 12)


@pytest.fixture
def chat(demo):
    model, tokenizer = demo[0], copy.deepcopy(demo[1])
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[answer]"
    return model, tokenizer


def test_a_chat_model_writes_both_turns(tmp_path, few, chat):
    model, tokenizer = chat
    before, between = chat_frame(tokenizer)
    assert (before, between) == ("[user]", "\n[answer]")
    texts = add_texts(tmp_path / "texts.jsonl", model, tokenizer, [], 1, 0)
    assert len({tuple(text.ids) for text in texts}) == 4
    for text in texts:
        prompt = tokenizer.decode(text.ids[: text.begin])
        assert prompt.startswith(before)
        assert prompt.endswith(between)
        assert len(prompt) > len(before + between)
        assert 0 < len(text.ids) - text.begin <= 12
    given = add_texts(tmp_path / "given.jsonl", model, tokenizer, ["def f("], 1, 0)
    assert {tokenizer.decode(text.ids[: text.begin]) for text in given} == {before + "def f(" + between}


def test_texts_go_on_where_they_stopped(tmp_path, few, demo):
    given = ["import os\n" * 90, "class A:\n    pass\n" * 90]
    whole = add_texts(tmp_path / "whole.jsonl", *demo, given, 130, 0)
    assert sum(len(text.ids) - text.begin for text in whole) >= 130
    assert len({tuple(text.ids[: text.begin]) for text in whole}) > 0.7 * len(whole), "the same prompts again"
    parts = tmp_path / "parts.jsonl"
    half = add_texts(parts, *demo, given, 40, 0)
    assert 0 < len(half) < len(whole)
    assert add_texts(parts, *demo, given, 130, 0) == whole == read_texts(parts)
    parts.write_text(parts.read_text() + '{"ids": [1]}\n')
    with pytest.raises(Exception, match=f"parts.jsonl, line {len(whole) + 1} is not a model's text"):
        read_texts(parts)
    parts.write_text('{"ids": [4096], "begin": 0}\n')
    with pytest.raises(Exception, match="tokens that the model lacks"):
        add_texts(parts, *demo, given, 130, 0)


@pytest.mark.parametrize(("kind", "vocabulary"), [("eagle", 4096), ("medusa", 300), ("eagle3", 300)])
def test_the_command(tmp_path, few, demo, kind, vocabulary):
    command = ["--model", str(DEMO), "--kind", kind, "--out", str(tmp_path / "heads"), "--tokens", "200"]
    command += ["--steps", "2", "--batch", "100", "--vocabulary", str(vocabulary), "--texts", str(tmp_path / "t.jsonl")]
    result = CliRunner().invoke(train_heads.main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "step 2/2: loss" in result.output
    card = (tmp_path / "heads" / "README.md").read_text()
    assert f"{vocabulary:,} of 4,096 tokens" in card
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config.get("truncated_vocab_size", config.get("draft_vocab_size", 4096)) == vocabulary
    source_of(kind, demo[0], tmp_path / "heads")


def test_sources_are_compared(tmp_path, demo, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    (kept := bigrams_file(demo[0])).parent.mkdir()
    NgramPool().save(kept)
    for folder in ("heads", "more/heads", "other/heads"):
        write_heads(tmp_path / folder, demo[0], new_heads(demo[0], "eagle", torch.arange(4096)), torch.arange(4096))
    prompts, files = tmp_path / "prompts.jsonl", tmp_path / "files"
    prompts.write_text('{"question_id": 1, "category": "code", "turns": ["import os\\nimport "]}\n')
    files.mkdir()
    (files / "code.txt").write_text("import os\nimport sys\n")
    command = [
        "--model",
        str(DEMO),
        "--prompts",
        str(prompts),
        "--heads",
        str(tmp_path / "heads"),
        "--heads",
        str(tmp_path / "more" / "heads"),
        "--heads",
        str(tmp_path / "other" / "heads"),
        "--draft",
        str(DEMO),
    ]
    command += ["--published", "--files", str(files), "--max-new-tokens", "8", "--guesses", "4,auto"]
    command += ["--dtype", "bfloat16"]  # that of the bigrams
    command += ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(compare_sources.main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    names = ["pool", "pool, bigrams", "pool, kept"]
    classes = {
        "Eagle": "EagleSource", f"Eagle, {tmp_path / 'more/heads'}": "EagleSource",
        f"Eagle, {tmp_path / 'other/heads'}": "EagleSource", "draft model": "DraftModelSource",
        "files": "RetrievalSource", "Token Recycling": "TokenRecyclingSource", "RACER": "RacerSource",
        "Goose": "GooseSource",
    }  # fmt: skip
    names += [prefix + name for name in classes for prefix in ("", "pool + ")]
    assert [(row["temperature"], row["guesses"], row["sources"]) for row in rows] == [
        (temperature, guesses, name) for temperature in (0, 0.7) for guesses in (4, "auto") for name in (*names, "all")
    ]
    for row in rows:
        assert row["equal"] == row["prompts"] == len(row["milliseconds"]) == 1
        assert row["tokens_per_step"] >= 1
        assert (row["asked"] is None) == (row["sources"] in names[:3])
        assert classes.get(row["sources"], "PoolSource") in row["stats"]["sources"]
        if row["guesses"] == 4 and row["sources"] in ("draft model", "files"):
            assert (row["passes_per_step"] > 0) == (row["sources"] == "draft model")
    text = (tmp_path / "out.md").read_text()
    assert text.count("\n| all |") == 4
    assert text.count("\n## Temperature ") == 4


def test_heads_of_another_model_are_refused_with_both_reasons(tmp_path, demo):
    write_heads(tmp_path, deep_model(), new_heads(deep_model(), "eagle", torch.arange(97)), torch.arange(97))
    with pytest.raises(click.ClickException, match=r"EagleSource: (.|\n)*MedusaSource: "):
        compare_sources.heads_of(demo[0], tmp_path)
