"""Memory in huge pages."""

from itertools import pairwise

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lookahead.cpu import pages
from lookahead.cpu.pages import HugePages
from lookahead.models.cache import LONG, InPlaceLayer

DTYPES = [torch.uint8, torch.int8, torch.float32, torch.bfloat16]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 300), st.integers(1, 40)), max_size=12))
def test_copies_are_equal_aligned_and_apart(shapes):
    note(f"{shapes=}")
    chunk, pages.CHUNK = pages.CHUNK, 2**13  # so that several are needed
    try:
        memory = HugePages()
        tensors = [torch.randint(100, (rows, columns)).to(dtype).t() for dtype, rows, columns in shapes]
        copies = [memory.copy(tensor) for tensor in tensors]
    finally:
        pages.CHUNK = chunk
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() % pages.ALIGNMENT == 0
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in copies)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, LONG, LONG + 7]),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_long_caches_hold_what_is_written(batch, heads, of_key, of_value, expected, of_keys, of_values):
    note(f"{batch=} {heads=} {of_key=} {of_value=} {expected=} {of_keys=} {of_values=}")
    layer, written = InPlaceLayer(expected), []
    for new in (5, LONG, 300):
        keys = torch.randint(99, (batch, heads, new, of_key)).to(of_keys)
        values = torch.randint(99, (batch, heads, new, of_value)).to(of_values)
        written.append((keys, values))
        found = layer.update(keys, values)
        for states, parts in zip(found, zip(*written, strict=True), strict=True):
            assert torch.equal(states, torch.cat(parts, dim=2))
    assert layer.buffers[0].data_ptr() % pages.ALIGNMENT == 0
