"""The checks must be able to fail: each defect below is planted, and the comparison with generate() has to see it."""

import random

import numpy as np
import pytest
import torch
from test_lossless import check_identical, random_prompt
from zoo import tiny_model

from lookahead import LookaheadConfig, UnsupportedModelError, architecture, decoding, verify
from lookahead.cache import InPlaceLayer, SlidingLayer
from lookahead.step import Step, Visibility
from lookahead.verify import NextTokenRule


def everyone_sees_everyone(monkeypatch):
    original = Step.mask

    def mask(self, positions, length, seen, visibility, dtype):
        return torch.zeros_like(original(self, positions, length, seen, visibility, dtype))

    monkeypatch.setattr(Step, "mask", mask)


def siblings_see_each_other(monkeypatch):
    original = Step.mask

    def mask(self, positions, length, seen, visibility, dtype):
        right = original(self, positions, length, seen, visibility, dtype)
        causal = torch.ones(len(self), len(self)).tril().bool()
        right[..., seen:][..., causal] = 0
        return right

    monkeypatch.setattr(Step, "mask", mask)


def sliding_window_too_wide(monkeypatch):
    original = Visibility.hides

    def hides(self, queries, keys):
        return None if self.window else original(self, queries, keys)

    monkeypatch.setattr(Visibility, "hides", hides)


def prefix_hidden(monkeypatch):
    original = Step.mask

    def mask(self, positions, length, seen, visibility, dtype):
        wrong = original(self, positions, length, seen, visibility, dtype)
        wrong[..., : seen // 2] = torch.finfo(dtype).min
        return wrong

    monkeypatch.setattr(Step, "mask", mask)


def positions_by_row(monkeypatch):
    monkeypatch.setattr(Step, "positions", lambda self, length, last=None: length + np.arange(len(self)))


def positions_late_by_one(monkeypatch):
    monkeypatch.setattr(Step, "positions", lambda self, length, last=None: length + 1 + self.depths)


def commit_keeps_the_first_rows(monkeypatch):
    def commit(self, path):
        self.length = self.base + len(path)

    monkeypatch.setattr(InPlaceLayer, "commit", commit)


def commit_keeps_one_row_too_many(monkeypatch):
    original = InPlaceLayer.commit

    def commit(self, path):
        step = self.length - self.base
        original(self, path)
        self.length += len(path) < step

    monkeypatch.setattr(InPlaceLayer, "commit", commit)


def commit_forgets_the_moved_rows(monkeypatch):
    original = InPlaceLayer.commit

    def commit(self, path):
        original(self, [0])
        self.length = self.base + len(path)

    monkeypatch.setattr(InPlaceLayer, "commit", commit)


def sliding_rows_off_by_one(monkeypatch):
    monkeypatch.setattr(SlidingLayer, "seen", lambda self: min(self.length, self.sliding_window - 2))


def first_guess_always_accepted(monkeypatch):
    original = verify.walk

    def walk(step, logits, rule):
        path, tokens = original(step, logits, rule)
        if len(path) == 1 and step.guesses and not rule.stopped:
            path.append(1)
            tokens.append(int(step.ids[1]))
            rule.ids = torch.cat([rule.ids, torch.tensor([[tokens[-1]]])], dim=1)
        return path, tokens

    monkeypatch.setattr(decoding, "walk", walk)


def one_draw_too_many(monkeypatch):
    original = NextTokenRule.emit

    def emit(self, logits):
        torch.rand(1)
        return original(self, logits)

    monkeypatch.setattr(NextTokenRule, "emit", emit)


DEFECTS = {
    everyone_sees_everyone: "llama",
    siblings_see_each_other: "llama",
    sliding_window_too_wide: "mistral",
    prefix_hidden: "llama",
    positions_by_row: "llama",
    positions_late_by_one: "gpt2",
    commit_keeps_the_first_rows: "llama",
    commit_keeps_one_row_too_many: "llama",
    commit_forgets_the_moved_rows: "gemma2",
    sliding_rows_off_by_one: "mistral",
    first_guess_always_accepted: "llama",
    one_draw_too_many: "llama",
}
SEEN_BY_THE_PROBE = {
    everyone_sees_everyone,
    siblings_see_each_other,
    prefix_hidden,
    positions_by_row,
    positions_late_by_one,
    commit_keeps_the_first_rows,
    commit_keeps_one_row_too_many,
    commit_forgets_the_moved_rows,
}


def check_several(model):
    rng = random.Random(0)
    for seed in range(8):
        options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}
        check_identical(model, random_prompt(rng), options, LookaheadConfig(window_size=3), seed)


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_comparison_with_generate_sees_it(plant, monkeypatch):
    model = tiny_model(DEFECTS[plant])
    architecture.inspect_model(model)  # probed while all is well
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_several(model)


@pytest.mark.parametrize("plant", sorted(SEEN_BY_THE_PROBE, key=lambda f: f.__name__), ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_at_wrap_time_sees_it(plant, dtype, monkeypatch):
    """A defect of the masks costs the branches; one of the cache or of all positions leaves nothing to decode with."""
    model = tiny_model(DEFECTS[plant]).to(dtype)
    assert architecture.inspect_model(model).can_branch
    architecture._inspected.clear()
    plant(monkeypatch)
    try:
        assert not architecture.inspect_model(model).can_branch
    except UnsupportedModelError as error:
        assert type(model).__name__ in str(error)  # noqa: PT017


def test_the_comparison_passes_without_a_defect():
    for model_type in sorted(set(DEFECTS.values())):
        check_several(tiny_model(model_type))
