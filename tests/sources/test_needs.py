"""Sources of guesses are shown what they ask for of a prompt, alone and together with others."""

import pytest
import torch
from zoo import VOCABULARY, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.guessing.pool import PoolSource
from lookahead.guessing.source import GuessSource, Needs
from ngram_pool import GuessTree

PROMPT = torch.arange(3, 33)[None]


class Reader(GuessSource):
    """Guesses nothing, and keeps what it is shown."""

    def __init__(self, **needs):
        self.needs = Needs(**needs)
        self.shown = []

    def observe_prompt(self, text, logits, hidden_states):
        self.shown.append((text, logits, hidden_states))

    def propose(self, texts, limits):
        return [GuessTree.empty() for _ in texts]


@pytest.mark.parametrize("rows", [0, 1, 7, 30, 100])
@pytest.mark.parametrize("others", [[], [PoolSource()], [Reader(), Reader(prompt_logits=3)]])
def test_each_source_sees_the_rows_that_it_asks_for(rows, others):
    model, reader = tiny_model("llama"), Reader(prompt_logits=rows)
    with torch.no_grad():
        expected = model(PROMPT).logits[0]
    lookahead.wrap(model, LookaheadConfig(budget=8), source=[*others, reader])
    model.generate(PROMPT, max_new_tokens=5)
    ((text, logits, hidden_states),) = reader.shown
    assert text[:30] == PROMPT[0].tolist()
    assert logits.shape[1] == VOCABULARY
    assert len(logits) >= min(rows, 30)
    torch.testing.assert_close(logits, expected[-len(logits) :], atol=1e-3, rtol=1e-3)
    assert hidden_states == {}


@pytest.mark.parametrize("others", [[], [PoolSource()]])
def test_each_source_sees_the_layers_that_it_asks_for(others):
    model, readers = tiny_model("llama"), [Reader(hidden_states=(0,)), Reader(hidden_states=(2,))]
    with torch.no_grad():
        expected = model(PROMPT, output_hidden_states=True).hidden_states
    lookahead.wrap(model, LookaheadConfig(budget=8), source=[*others, *readers])
    model.generate(PROMPT, max_new_tokens=5)
    for reader, layer in zip(readers, (0, 2), strict=True):
        ((_, _, hidden_states),) = reader.shown
        torch.testing.assert_close(hidden_states[layer], expected[layer][0], atol=1e-3, rtol=1e-3)


def test_the_pool_learns_from_the_last_rows_of_a_prompt(monkeypatch):
    learned = []
    learn_next = NgramPool.learn_next
    monkeypatch.setattr(
        NgramPool,
        "learn_next",
        lambda self, contexts, *rest: learned.append(contexts) or learn_next(self, contexts, *rest),
    )
    model = lookahead.wrap(tiny_model("llama"), LookaheadConfig(budget=8))
    model.generate(PROMPT, max_new_tokens=5)
    assert learned[0][:, -1].tolist() == PROMPT[0, -PoolSource.needs.prompt_logits :].tolist()
