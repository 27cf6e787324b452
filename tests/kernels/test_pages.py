"""Memory in huge pages."""

from itertools import pairwise

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lookahead.cpu import pages
from lookahead.cpu.pages import HugePages

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
