"""The figures that scripts/grpo_step.py computes from its measurements. `make test-clients` runs it with trl."""

import torch
from grpo_step import Clock, markdown, summary, variety
from transformers import GenerationConfig
from zoo import END, tiny_model

import lookahead
from lookahead.tools.contention import Span


def training(texts, seconds, stats):
    spans = [Span(100.0), *(Span(float(x)) for x in seconds)]  # the first step does not count
    return {"steps": spans, "calls": [Span(span.seconds / 2) for span in spans], "texts": texts, "stats": stats}


def test_summary():
    written = [[[5, 6, 7], [8]], [[9], [5, 5]], [[7, 7], [6]]]
    other = [[[5, 6, 7], [9]], [[9], [5, 5]], [[7, 7], [6]]]
    looked_ahead = lookahead.Stats(steps=4, tokens=6, sequence_steps=4, sequences=0)
    plain = summary("plain", [training(written, [4, 6], lookahead.Stats())], written)
    ours = summary("lookahead", [training(other, [2, 4], looked_ahead)], written)
    assert (plain["tokens"], plain["step"], plain["generating"], plain["identical"]) == (3, 5, 2.5, 6)
    assert (ours["step"], ours["identical"], ours["answers"]) == (3, 5, 6)
    quiet, busy = (markdown([plain, ours], {"command": "x", "note": note}) for note in ("", "busy"))
    assert "| lookahead | 3 | 1.50 | 1.67 | 3.00 | 1.67 |" in quiet
    assert "| lookahead | 3 | 1.50 |  | 3.00 |  |" in busy


def test_the_clock_hears_the_texts_of_generate():
    model = tiny_model("llama")
    ids, chosen = torch.tensor([[5, 6, 7], [8, 9, 5]]), GenerationConfig(max_new_tokens=6, eos_token_id=[END])
    expected = model.generate(ids, generation_config=chosen)
    clock = Clock(model)
    clock.on_step_begin()
    assert model.generate(input_ids=ids, generation_config=chosen).tolist() == expected.tolist()
    clock.on_step_end()
    assert [text[:1] for text in clock.texts[0]] == expected[:, 3:4].tolist()
    assert 0 < clock.calls[0].seconds <= clock.steps[0].seconds


def test_variety():
    assert variety([[1, 1], [1, 2], []]) == [0.5, 1.0, 0.0]
