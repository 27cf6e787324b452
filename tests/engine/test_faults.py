"""What goes wrong in the middle reaches the caller, and the wrapped model still generates correctly afterwards."""

from functools import cache as cache_of_calls

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.models import cache
from lookahead.models.cache import InPlaceLayer
from lookahead.passes.capabilities import can_batch, find_adapter

# At this temperature few guesses are accepted.
LONG_TEXT = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": True, "temperature": 1.5}


class Fault(Exception):
    pass


class RaisesAt:
    """A criterion and streamer that raises when it is called the n-th time."""

    def __init__(self, n: int, error: BaseException):
        self.n, self.error, self.calls = n, error, 0

    def _count(self):
        self.calls += 1
        if self.calls == self.n:
            raise self.error

    def __call__(self, input_ids, scores, **kwargs):
        self._count()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        self._count()

    def end(self):
        pass


class ProcessorRaisesAt(RaisesAt):
    def __call__(self, input_ids, scores):
        self._count()
        return scores


class NanAt(LogitsProcessor):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores):
        return scores * float("nan") if input_ids.shape[1] == self.length else scores


@cache_of_calls
def known(model_type: str, batch: int) -> tuple:
    """A model that all faults befall, a prompt or several, and the texts."""
    model = tiny_model(model_type, seed=5)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    ids = torch.cat([ids.roll(i, dims=1) for i in range(batch)])
    return model, ids, model.generate(ids, max_new_tokens=40, min_new_tokens=40).tolist()


@pytest.fixture(params=[("gemma2", 1), ("gemma2", 3), ("lfm2", 1)], ids=["alone", "batch", "with state"])
def wrapped(request):
    """A wrapped model, a prompt or several, and a check that it generates as it should."""
    model, ids, expected = known(*request.param)
    lookahead.wrap(model, LookaheadConfig(window_size=3, pool_memory_mb=1))

    def still_right():
        assert model.generate(ids, max_new_tokens=40, min_new_tokens=40).tolist() == expected
        model.lookahead.pool.check_integrity()

    still_right()  # measures what a pass costs, too
    yield model, ids, still_right
    still_right()
    lookahead.unwrap(model)


@pytest.mark.parametrize("at", [1, 2, 5, 37])
@pytest.mark.parametrize("error", [Fault("mine"), KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=repr)
@pytest.mark.parametrize("where", ["stopping_criteria", "logits_processor", "streamer"])
def test_a_callback_raises(wrapped, where, error, at):
    model, ids, still_right = wrapped
    options = {
        "stopping_criteria": lambda: [RaisesAt(at, error)],
        "logits_processor": lambda: LogitsProcessorList([ProcessorRaisesAt(at, error)]),
        "streamer": lambda: RaisesAt(at, error),
    }
    with pytest.raises(type(error)):
        model.generate(ids, **LONG_TEXT, **{where: options[where]()})
    still_right()


@pytest.mark.parametrize("stage", ["seen", "compact", "clear_unused"])
@pytest.mark.parametrize("at", [1, 2, 7, 30])
def test_the_cache_runs_out_of_memory(wrapped, monkeypatch, stage, at):
    model, ids, still_right = wrapped
    fault = RaisesAt(at, torch.OutOfMemoryError("full"))
    owner = cache if stage == "compact" else InPlaceLayer
    original = getattr(owner, stage)

    def failing(*args, **kwargs):
        fault._count()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, failing)
        patch.setattr(InPlaceLayer, "hides_unused", True)  # as in float16
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(ids, **LONG_TEXT)
    still_right()


@pytest.mark.parametrize(
    ("stage", "at"),
    [("learn", 1), ("learn_next", 1), *((stage, at) for stage in ("learn_step", "guess") for at in (1, 3, 20))],
)
def test_the_pool_is_interrupted(wrapped, monkeypatch, stage, at):
    model, ids, still_right = wrapped
    fault = RaisesAt(at, KeyboardInterrupt())
    original = getattr(NgramPool, stage)

    def failing(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        fault._count()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(NgramPool, stage, failing)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **LONG_TEXT)
    still_right()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_guess_that_overflows_spoils_nothing(batch):
    """A token that the model never writes may be more than its dtype can hold; guessing it must not be seen."""
    model = tiny_model("llama", seed=3)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5]])[:batch]
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **options)
    never = next(token for token in range(3, 90) if token not in expected)
    can_batch(model, find_adapter(model))  # tried out while all is well
    with torch.no_grad():
        model.get_input_embeddings().weight[never] = float("nan")
    pool = NgramPool(1)
    for text in expected.tolist():
        for length in range(4, len(text)):
            pool.learn([*text[:length], never])
    lookahead.wrap(model, LookaheadConfig(budget=16, window_size=0), pool)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    stats = model.lookahead.last
    assert stats.steps > stats.sequence_steps // batch, "no guess overflowed, so nothing was tested"


@pytest.mark.parametrize("length", [10, 11, 25])
def test_nan_scores_are_named_where_sampling_has_no_choice(wrapped, length):
    model, ids, _ = wrapped
    with pytest.raises(RuntimeError, match=f"position {length}"):
        model.generate(
            ids, max_new_tokens=40, min_new_tokens=40, do_sample=True,
            logits_processor=LogitsProcessorList([NanAt(length)]),
        )  # fmt: skip


@pytest.mark.parametrize("length", [10, 11, 25])
def test_nan_scores_of_a_processor_are_chosen_greedily_as_generate_does(wrapped, length):
    model, ids, _ = wrapped
    options = {"max_new_tokens": 40, "do_sample": False}
    actual = model.generate(ids, **options, logits_processor=LogitsProcessorList([NanAt(length)]))
    lookahead.unwrap(model)
    expected = model.generate(ids, **options, logits_processor=LogitsProcessorList([NanAt(length)]))
    lookahead.wrap(model)
    assert actual.tolist() == expected.tolist()


def test_a_penalty_of_a_forbidden_end_is_chosen_greedily_as_generate_does(wrapped):
    """The end is forbidden by -inf, and its penalty, in the end infinite, makes NaN of that."""
    model, ids, _ = wrapped
    options = {"max_new_tokens": 40, "min_new_tokens": 30, "do_sample": False}
    options["exponential_decay_length_penalty"] = (1, 1.27)
    actual = model.generate(ids, **options)
    lookahead.unwrap(model)
    expected = model.generate(ids, **options)
    lookahead.wrap(model)
    assert actual.tolist() == expected.tolist()


def test_nan_weights_are_named():
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    lookahead.wrap(model)
    weight = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NaN"):
        model.generate(ids, max_new_tokens=5, do_sample=True)
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
    assert model.generate(ids, max_new_tokens=5).shape[1] > 3


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"min_length": 20}])
@pytest.mark.parametrize("spoiled", [[37], [37, 20], slice(None)])
def test_nan_weights_are_decoded_greedily_as_generate_does(spoiled, options):
    """The first token whose logit is NaN is written; guesses are verified by the same rule."""
    model, ids = lookahead.wrap(tiny_model("llama")), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    with torch.no_grad():
        model.lm_head.weight[spoiled] = float("nan")
    actual = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
    assert not model.lookahead.last.plain
    expected = lookahead.unwrap(model).generate(ids, max_new_tokens=12, do_sample=False, **options)
    assert actual.tolist() == expected.tolist()


def test_an_empty_prompt_is_named(wrapped):
    model, _, _ = wrapped
    with pytest.raises(ValueError, match="empty"):
        model.generate(torch.empty((1, 0), dtype=torch.long), max_new_tokens=5)


def test_a_prompt_beyond_the_context_is_named():
    model = lookahead.wrap(tiny_model("gpt2", n_positions=16, max_position_embeddings=16))
    ids = torch.full((1, 20), 5)
    with pytest.warns(UserWarning, match="made for 16"), pytest.raises(ValueError, match=r"20 tokens.* 16"):
        model.generate(ids, max_new_tokens=5)
    assert model.generate(ids[:, :10], max_new_tokens=3).shape[1] > 10
