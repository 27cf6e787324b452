"""Batches: their results, their sampling, and that each sequence takes only its own steps."""

import random

import numpy as np
import pytest
import torch
from test_lossless import Drift, left_pad, random_prompt
from transformers import DynamicCache, LogitsProcessorList
from zoo import END, tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.cpu import choice
from lookahead.engine import call, prefill
from lookahead.engine.sampling import NextTokenRule
from lookahead.passes.capabilities import can_batch, find_adapter


@pytest.fixture
def model():
    return tiny_model("llama", seed=3)


@pytest.fixture
def inputs():
    rng = random.Random(11)
    return left_pad([random_prompt(rng) for _ in range(4)])


def both(model, inputs, seed=0, **options):
    torch.manual_seed(seed)
    expected = model.generate(**inputs, **options)
    lookahead.wrap(model, LookaheadConfig(window_size=2))
    torch.manual_seed(seed)
    actual = model.generate(**inputs, **options)
    assert model.lookahead.last.steps > 0
    lookahead.unwrap(model)
    return expected, actual


def test_scores_and_logits_of_a_batch(model, inputs):
    """Asked for, they make the sequences go in step: the same tuples as generate() returns, from the same seed."""
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True}
    expected, actual = both(model, inputs, max_new_tokens=30, temperature=0.5, **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert len(actual.scores) == len(expected.scores) == len(actual.logits)
    assert (expected.sequences[:, :-1] == END).any(), "of sequences that have ended, too"
    for ours, theirs in zip(actual.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_streamer_of_a_batch(model, inputs):
    class Listed(list):
        def put(self, value):
            self.append(value.tolist())

        def end(self):
            self.append("end")

    theirs, ours = Listed(), Listed()
    model.generate(**inputs, max_new_tokens=30, do_sample=False, streamer=theirs)
    lookahead.wrap(model)
    model.generate(**inputs, max_new_tokens=30, do_sample=False, streamer=ours)
    assert ours == theirs


def test_processors_that_know_their_row(model, inputs):
    """prefix_allowed_tokens_fn is told the sequence's place in the batch."""
    options = {"prefix_allowed_tokens_fn": lambda row, ids: [3 + (7 * row + len(ids) + i) % 60 for i in range(9)]}
    expected, actual = both(model, inputs, max_new_tokens=30, do_sample=True, **options)
    assert actual.tolist() == expected.tolist()


def test_num_return_sequences(model):
    ids = random_prompt(random.Random(2))
    options = {"num_return_sequences": 5, "do_sample": True, "temperature": 1.0, "max_new_tokens": 30}
    can_batch(model, find_adapter(model))  # which takes some passes of its own
    passes = []
    handle = model.register_forward_pre_hook(lambda *_, **__: passes.append(1))
    lookahead.wrap(model)
    model.generate(ids, **options)  # the model is tried out with the hook, and step costs are measured
    passes.clear()
    torch.manual_seed(4)
    output = model.generate(ids, **options)
    handle.remove()
    assert len(passes) == 1 + model.lookahead.last.steps, "equal prompts are computed once"
    assert output.shape[0] == 5
    assert len({tuple(row) for row in output.tolist()}) > 1
    torch.manual_seed(4)
    model.lookahead.pool = NgramPool(1)
    expected = model.generate(ids, **options)
    assert expected.tolist() == output.tolist(), "the pool only guesses"
    drifts = LogitsProcessorList([Drift()]), LogitsProcessorList([Drift()])
    torch.manual_seed(5)
    in_step = model.generate(ids, **options, logits_processor=drifts[0])
    lookahead.unwrap(model)
    torch.manual_seed(5)
    assert in_step.tolist() == model.generate(ids, **options, logits_processor=drifts[1]).tolist()


def test_equal_prompts_of_a_batch(model):
    """As trl's GRPOTrainer hands them over: each prompt several times, among prompts of other lengths."""
    rng = random.Random(random.randrange(1000))
    prompts = [random_prompt(rng) for _ in range(3)]
    order = [i for i in range(3) for _ in range(rng.randint(1, 4))]
    rng.shuffle(order)
    inputs = left_pad([prompts[i] for i in order])
    options = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 20}
    both(model, inputs, **options)  # the model is tried out, and step costs are measured
    read, prefill_read = [], prefill._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "_read", lambda *given: read.append(given[1].tolist()) or prefill_read(*given))
        expected, actual = both(model, inputs, seed=rng.randrange(1000), **options)
    assert actual.tolist() == expected.tolist(), (prompts, order)
    assert sorted(read) == sorted(prompts[i].tolist() for i in set(order)), (prompts, order)


def test_each_sequence_stops_on_its_own(model, inputs):
    """Each token of a sequence is once its end; a sequence that has ended takes no more steps and is padded."""
    start = inputs["input_ids"].shape[1]
    texts = model.generate(**inputs, max_new_tokens=30, do_sample=False)[:, start:].tolist()
    lookahead.wrap(model)
    for token in sorted(set(texts[0]))[:12]:
        output = model.generate(**inputs, max_new_tokens=30, do_sample=False, eos_token_id=[END, token])[:, start:]
        for ours, text in zip(output.tolist(), texts, strict=True):
            ends = [i for i, t in enumerate(text) if t in (END, token)]
            expected = text[: ends[0] + 1] if ends else text
            assert ours[: len(expected)] == expected
            assert set(ours[len(expected) :]) <= {2}
        stats = model.lookahead.last
        assert stats.tokens <= sum(len(text) for text in texts)
        assert stats.tokens == stats.sequences + stats.sequence_steps + stats.accepted.total()


def test_sequences_without_an_end_token(model, inputs):
    """Stop strings alone: plain decoding lets all sequences write on until the last has stopped."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL)
    model = tiny_model("llama", seed=3, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = None
    options = {"stop_strings": ["e", "x"], "tokenizer": tokenizer, "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**inputs, **options)
    lookahead.wrap(model)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.lookahead.last.steps > 0


@pytest.mark.parametrize("model_type", ["gemma2", "llama4_text"])
def test_the_cache_of_a_batch_continues_plain_decoding(model_type):
    """return_dict_in_generate hands out what plain decoding would, padding included."""
    model = tiny_model(model_type)
    inputs = left_pad([random_prompt(random.Random(seed)) for seed in range(3)])
    options = {"do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, max_new_tokens=40, **options)
    lookahead.wrap(model)
    output = model.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True, **options)
    assert model.lookahead.last.steps > 0
    lookahead.unwrap(model)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 20, dtype=torch.long)], dim=1)
    more = model.generate(
        output.sequences, attention_mask=mask, past_key_values=output.past_key_values, max_new_tokens=20, **options
    )
    assert more.tolist() == expected.tolist()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_cache_of_a_batch_holds_the_ends_of_its_sequences(model_type):
    """Plain decoding pads what has ended, which computes the end token too; a next turn relies on it."""
    model = tiny_model(model_type, seed=3)
    inputs = left_pad([random_prompt(random.Random(seed)) for seed in range(3)])
    start = inputs["input_ids"].shape[1]
    end = model.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, start + 4].item()
    following = torch.tensor([[5, 6, 7], [8, 9, 5], [6, 6, 8]])
    logits = []
    for wrapped in (False, True):
        if wrapped:
            lookahead.wrap(model)
        cache = DynamicCache(config=model.config)
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": end, "past_key_values": cache}
        text = model.generate(**inputs, **options)
        mask = torch.cat([inputs["attention_mask"], text[:, start:] != 2, torch.ones_like(following)], dim=1)
        whole = torch.cat([text, following], dim=1)
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        lookahead.unwrap(model)
        logits.append(model.generate(whole, attention_mask=mask, past_key_values=cache, **options).logits[0])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def sampled_continuations(model, count: int, batch: int, length: int, config=None) -> np.ndarray:
    """How often each continuation of ``length`` tokens was sampled, by batches at their own pace."""
    vocabulary = model.config.vocab_size
    counts = np.zeros(vocabulary**length, np.int64)
    ids = torch.tensor([[1, 3, 0, 1, 3]]).repeat(batch, 1)
    lookahead.wrap(model, config or LookaheadConfig(budget=24, pool_memory_mb=0.1))
    for _ in range(count // batch):
        output = model.generate(ids, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=length + 2)[:, 5:]
        places = (output[:, :length] * vocabulary ** torch.arange(length)).sum(1)
        counts += np.bincount(places.numpy(), minlength=len(counts))
    assert model.lookahead.stats.accepted.total() > count // 4
    lookahead.unwrap(model)
    return counts


def exact_probabilities(model, length: int) -> np.ndarray:
    """Of every continuation, by plain passes over all prefixes."""
    vocabulary = model.config.vocab_size
    prompt = torch.tensor([[1, 3, 0, 1, 3]])
    result = np.ones(1)
    prefixes = torch.empty(1, 0, dtype=torch.long)
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.cat([prompt.repeat(len(prefixes), 1), prefixes], dim=1)).logits[:, -1].double()
        following = logits.softmax(-1).numpy()
        # Continuations are numbered with their first token as the lowest digit.
        result = np.concatenate([result * following[:, token] for token in range(vocabulary)])
        prefixes = torch.cat(
            [torch.cat([prefixes, torch.full((len(prefixes), 1), token)], 1) for token in range(vocabulary)]
        )
    return result


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean; rare continuations are taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 8
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.fixture(scope="module")
def small_vocabulary():
    """Five tokens, none of which ends a text; continuations of three tokens can all be counted."""
    model = tiny_model("llama", seed=1, vocab_size=5, eos_token_id=None, bos_token_id=None)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return model, exact_probabilities(model, 3)


SAMPLES = 2000


def test_batches_sample_the_exact_distribution(small_vocabulary):
    model, probabilities = small_vocabulary
    torch.manual_seed(0)
    assert abs(probabilities.sum() - 1) < 1e-6
    assert chi_square(sampled_continuations(model, SAMPLES, 8, 3), probabilities) < 4


@pytest.mark.long
def test_the_distribution_test_sees_a_biased_rule(small_vocabulary, monkeypatch):
    """The usual mistake: after a rejection, the token is drawn from the whole distribution again."""
    walk, emit = call.walk, NextTokenRule.emit

    def noting_guesses(steps, logits, rules, *top_k):
        for rule, step in zip([rule for rule in rules if rule.live], steps, strict=True):
            rule.guessed = {token for parent, token in step.children() if parent == 0}
        return walk(steps, logits, rules, *top_k)

    def drawing_twice(self, logits, *row):
        before = {name: value[:] if type(value) is list else value for name, value in vars(self).items()}
        tokens = emit(self, logits, *row)
        guessed = before.pop("guessed", None)
        if guessed and tokens[0] not in guessed:
            vars(self).update(before)
            tokens = emit(self, logits, *row)
        vars(self).pop("guessed", None)
        return tokens

    monkeypatch.setattr(call, "walk", noting_guesses)
    monkeypatch.setattr(NextTokenRule, "emit", drawing_twice)
    monkeypatch.setattr(choice, "can_draw", lambda: False)  # known draws would leave little to reject
    model, probabilities = small_vocabulary
    torch.manual_seed(0)
    assert chi_square(sampled_continuations(model, SAMPLES, 8, 3), probabilities) > 8
