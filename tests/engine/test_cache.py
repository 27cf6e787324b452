"""The cache against transformers' own, and its promise not to copy the prefix."""

import random

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from zoo import tiny_model

import lookahead.models.cache
from lookahead.models.cache import InPlaceLayer, LookaheadCache, compact
from lookahead.models.sliding import SlidingLayer
from lookahead.passes.capabilities import find_adapter


def states(length: int, first: int = 0) -> torch.Tensor:
    """Keys that tell their position: [1, 2, length, 3]."""
    return torch.arange(first, first + length).float()[None, None, :, None].expand(1, 2, length, 3)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("window", [None, 2, 5, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_update_and_commit(seed, window, batch, monkeypatch):
    """After any steps and commits, an update shows the accepted rows (the last of them, in a sliding layer).

    Each sequence keeps its own; now and then one leaves the batch.
    """
    monkeypatch.setattr(lookahead.models.cache, "FIRST_CAPACITY", 8)
    rng = random.Random(seed)
    layer = InPlaceLayer() if window is None else SlidingLayer(window)
    kept: list[list[float]] = [[] for _ in range(batch)]
    value = 0
    for _ in range(40):
        if len(kept) > 1 and layer.columns and rng.random() < 0.03:
            chosen = sorted(rng.sample(range(len(kept)), len(kept) - 1))
            layer.batch_select_indices(torch.tensor(chosen))
            kept = [kept[b] for b in chosen]
        new = rng.choice([1, 1, 3, 9, 30])
        step = np.arange(value, value + new * len(kept)).reshape(len(kept), new)
        value += step.size
        rows = torch.from_numpy(step).float()[:, None, :, None].expand(-1, 2, new, 3)
        if layer.is_initialized:
            layer.make_room(new)
        held = layer.positions_shown()
        shown_count, offset = layer.get_mask_sizes(new)
        keys, values = layer.update(rows, -rows)
        assert torch.equal(keys, -values)
        assert keys.isfinite().all()
        for b, texts in enumerate(kept):
            positions = held[b if len(held) > 1 else 0]
            first = 0 if window is None else max(len(texts) - window + 1, 0)
            seen = {int(p): float(keys[b, 1, column, 2]) for column, p in enumerate(positions) if p >= 0}
            assert {p: v for p, v in seen.items() if p >= first} == dict(enumerate(texts[first:], first))
            assert keys[b, 0, -new:, 0].tolist() == step[b].tolist()
            if len(kept) == 1:
                assert shown_count == len(texts) - first + new
                assert (shown_count, offset) == (keys.shape[2], len(texts) - (shown_count - new))
        paths = [[0, *sorted(rng.sample(range(1, new), rng.randint(0, new - 1)))] for _ in kept]
        compact([layer], paths)
        for texts, path, row in zip(kept, paths, step, strict=True):
            texts += row[path].tolist()
        assert layer.get_seq_length() == max(map(len, kept))
        if window is not None and len(kept) == 1:
            assert layer._keys.shape[2] <= 2 * max(2 * (window + 30), 8) + 40 * 30 * (batch > 1)


def filled(lengths: list[int], window: int | None = None) -> list[InPlaceLayer]:
    """Layers of one sequence each, whose keys tell their sequence and position, prefilled in two pieces."""
    layers = []
    for b, length in enumerate(lengths):
        layer = InPlaceLayer() if window is None else SlidingLayer(window)
        for first, piece in ((0, length // 2), (length // 2, length - length // 2)):
            layer.update(states(piece, 1000 * b + first), states(piece, 1000 * b + first))
        layers.append(layer)
    return layers


@pytest.mark.parametrize("window", [None, 2, 6, 40])
def test_stack(window):
    """Sequences of several lengths become a batch, all from the first column, or after their padding."""
    lengths = [3, 17, 9]
    for offsets in (None, [20, 0, 2]):
        batch = InPlaceLayer() if window is None else SlidingLayer(window)
        batch.stack(filled(lengths, window), offsets)
        shown = batch.positions_shown()
        keys, _ = batch.update(*[states(1).expand(3, -1, -1, -1)] * 2)
        for b, length in enumerate(lengths):
            offset = offsets[b] if offsets else 0
            end = max(np.array(lengths) + offsets) if offsets else length
            first = 0 if window is None else max(end - window + 1, 0)
            expected = {p + offset: 1000.0 * b + p for p in range(length) if p + offset >= first}
            positions = shown[b] if len(shown) > 1 else shown[0]
            seen = {int(p): float(keys[b, 0, column, 0]) for column, p in enumerate(positions) if p >= first}
            assert {p: v for p, v in seen.items() if v or p in expected} == expected
        assert keys.isfinite().all()


def test_full_layer_behaves_as_transformers_own():
    """Without commits it can stand in for a DynamicLayer, crop included."""
    ours, theirs = InPlaceLayer(), DynamicLayer()
    for first, length in ((0, 5), (5, 1), (6, 300)):
        a, b = (
            ours.update(states(length, first), states(length, first)),
            theirs.update(states(length, first), states(length, first)),
        )
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    ours.crop(-100)
    theirs.crop(-100)
    assert torch.equal(ours.keys, theirs.keys)
    assert ours.get_seq_length() == theirs.get_seq_length() == 206
    with pytest.raises(ValueError, match="crop"):
        ours.crop(207)
    ours.crop(-207)
    theirs.crop(-207)
    assert ours.get_seq_length() == theirs.get_seq_length() == 0


@torch.no_grad()
def test_no_step_copies_the_prefix():
    """The buffers stay where they are for as long as they have room, and growing is rare: O(1) copies a row."""
    layer = InPlaceLayer(expected_length=64)
    layer.update(states(40), states(40))
    compact([layer], [list(range(40))])
    place = layer._keys.data_ptr()
    marked = layer._keys[:, :, :40]
    version = layer._keys._version
    for _ in range(8):
        keys, _ = layer.update(states(16), states(16))
        assert keys.data_ptr() == place, "the prefix was copied to be shown"
        compact([layer], [[0, 3, 7]])
    assert layer._keys.data_ptr() == place
    assert torch.equal(marked, states(40))
    assert layer._keys._version - version <= 2 * 8, "more was written than a step's rows and the accepted ones"

    grown = 0
    layer = InPlaceLayer()
    for _ in range(4000):
        before = layer._keys.shape[2] if layer.is_initialized else 0
        layer.update(states(1), states(1))
        grown += before * (layer._keys.shape[2] != before)
        assert layer._keys.shape[2] <= max(2 * layer.columns, lookahead.models.cache.FIRST_CAPACITY), (
            "the cache is bounded"
        )
    assert grown <= 2 * 4000, "growing by less than doubling copies rows more than a constant number of times"


def test_decoding_moves_no_prefix(monkeypatch):
    """In a real decoding: one buffer a layer from the prefill to the end, and no row of the prompt is rewritten."""
    monkeypatch.setattr(lookahead.models.cache, "FIRST_CAPACITY", 1)  # room is what decoding asks for, to its last step
    model = tiny_model("llama")
    lookahead.wrap(model, lookahead.LookaheadConfig(window_size=4))
    moves = []
    original = InPlaceLayer._move
    monkeypatch.setattr(InPlaceLayer, "_move", lambda self, *a: moves.append(a) or original(self, *a))
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    output = model.generate(ids, max_new_tokens=80, min_new_tokens=80, return_dict_in_generate=True)
    assert moves == []
    assert type(output.past_key_values) is DynamicCache
    assert output.past_key_values.get_seq_length() == 60 + 80 - 1


def test_returned_cache_continues_plain_decoding():
    """What return_dict_in_generate hands out serves as past_key_values of the model's own forward and generate."""
    import lookahead

    model = tiny_model("gemma2")
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=40, min_new_tokens=40)
    lookahead.wrap(model)
    output = model.generate(ids, max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True)
    lookahead.unwrap(model)
    more = model.generate(
        output.sequences, past_key_values=output.past_key_values, max_new_tokens=20, min_new_tokens=20
    )
    assert more.tolist() == expected.tolist()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_passed_in", [False, True])
def test_a_cache_that_outlives_its_call_has_no_room_for_what_was_not_written(
    model_type, batch, is_passed_in, monkeypatch
):
    """Whoever keeps, copies or saves it does so with all of its buffers. The next call makes room again."""
    monkeypatch.setattr(lookahead.models.cache, "FIRST_CAPACITY", 8)
    model = lookahead.wrap(tiny_model(model_type))
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1)).repeat(batch, 1)
    options = {"return_dict_in_generate": True, "eos_token_id": list(range(97))}
    options |= {"past_key_values": DynamicCache(config=model.config)} if is_passed_in else {}
    cache = model.generate(ids, max_new_tokens=200, **options).past_key_values
    held = [layer for layer in cache.layers if isinstance(layer, InPlaceLayer)]
    assert held
    assert all(buffer.shape[2] <= 2 * cache.get_seq_length() for layer in held for buffer in layer.buffers)
    if batch == 1:
        more = torch.cat([ids, ids + 1], dim=1)
        text = model.generate(more, past_key_values=cache, max_new_tokens=30, do_sample=False)
        assert text.tolist() == lookahead.unwrap(model).generate(more, max_new_tokens=30, do_sample=False).tolist()


def test_sliding_layer_gives_memory_back_after_a_long_prompt():
    layer = SlidingLayer(16)
    layer.update(states(5000), states(5000))
    compact([layer], [list(range(5000))])
    layer.update(states(1, 5000), states(1, 5000))
    assert layer._keys.shape[2] <= lookahead.models.cache.FIRST_CAPACITY
    assert layer.keys[0, 0, -1, 0] == 5000


def test_cache_is_a_transformers_cache():
    model = tiny_model("mistral")
    cache = find_adapter(model).make_cache()
    theirs = DynamicCache(config=model.config)
    assert len(cache.layers) == len(theirs.layers)
    assert cache.is_sliding == theirs.is_sliding


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("window", [None, 5])
def test_all_layers_at_once_or_one_by_one(seed, window, monkeypatch):
    """A pass over all layers of a kind finds the columns and the room of each of them, alike or not."""
    monkeypatch.setattr(lookahead.models.cache, "FIRST_CAPACITY", 8)
    rng = random.Random(seed)
    kinds = [[InPlaceLayer() if window is None else SlidingLayer(window) for _ in range(3)] for _ in range(2)]
    caches = [LookaheadCache([*layers, InPlaceLayer()]) for layers in kinds]
    held = rng.randint(1, 12)
    for cache in caches:
        for layer in cache.layers:
            layer.update(states(held), states(held))
        cache.lengths = [held]
    odd, more = rng.randrange(-1, 3), rng.randint(1, 9)
    for layers in kinds:
        if odd >= 0:  # as what users do to a layer leaves it
            layers[odd].update(states(more), states(more))
    for _ in range(6):
        new = rng.randint(1, 7)
        path = [list(range(rng.randint(1, new)))]
        together, alone = caches
        for cache in caches:
            cache.prepare(new)
        places = {index: found for indices, *found in together.extend(new) for index in indices}
        for index, layer in enumerate(alone.layers):
            assert places[index] == list(layer.extend(new))
        for ours, theirs in zip(together.layers, alone.layers, strict=True):
            assert (ours.base, ours.columns) == (theirs.base, theirs.columns)
            assert all(buffer.shape[2] >= ours.columns for buffer in ours.buffers)
        for cache in caches:
            compact(cache.layers, path)
