"""The attention kernel for a CPU equals the formula, over shapes, strides and masks."""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lookahead.cpu import tree_attention

DTYPES = [torch.float32, torch.bfloat16]


def by_the_formula(query, key, value, mask, scaling):
    """In float64, with the mask spread over all keys; the same of values without their signs; and the largest sum of a
    score's magnitudes."""
    groups, hidden = query.shape[1] // key.shape[1], key.shape[2] - mask.shape[3]
    key, value = (states.double().repeat_interleave(groups, 1) for states in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    seen = scores + torch.nn.functional.pad(mask.double(), (hidden, 0))
    magnitudes = query.double().abs() @ key.abs().transpose(2, 3) * scaling
    weights = seen.softmax(-1)
    return (weights @ value).transpose(1, 2), (weights @ value.abs()).transpose(1, 2), magnitudes.max()


@settings(max_examples=200, deadline=None)
@given(
    key_heads=st.integers(1, 4),
    groups=st.integers(1, 5),
    rows=st.integers(1, 40),
    held=st.integers(0, 150) | st.sampled_from([250, 600]),
    size=st.integers(1, 256) | st.sampled_from([16, 32, 64, 80, 128, 256]),
    masking=st.sampled_from(["of step", "of all", "causal"]),
    strided=st.booleans(),
    loud=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_it_is_what_the_formula_says(key_heads, groups, rows, held, size, masking, strided, loud, dtype, seed):
    note(f"{key_heads=} {groups=} {rows=} {held=} {size=} {masking=} {strided=} {loud=} {dtype=} {seed=}")
    torch.manual_seed(seed)
    heads, scaling = groups * key_heads, 0.3 if seed % 2 else None
    query = torch.randn(1, rows, heads, size).transpose(1, 2) if strided else torch.randn(1, heads, rows, size)
    query = (query * (30 if loud else 1)).to(dtype)
    room = torch.randn(2, 1, key_heads, held + rows + 7, size).to(dtype)
    room[..., held + rows :, :] = torch.nan  # not to be read
    key, value = room[..., : held + rows, :]
    hidden = torch.rand(1, 1, rows, held + rows if masking == "of all" else rows) < 0.5
    hidden[..., -rows:] &= ~torch.eye(rows, dtype=torch.bool)  # every token sees itself
    if masking == "causal":
        hidden = torch.ones(1, 1, rows, rows).triu(1).bool()
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    given_mask = None if masking == "causal" else mask
    assert tree_attention.serves(query, key, value, given_mask)
    got = tree_attention.attend(query, key, value, given_mask, scaling)
    expected, unsigned, largest = by_the_formula(query, key, value, mask, size**-0.5 if scaling is None else scaling)
    assert got.shape == (1, rows, heads, size)
    assert got.dtype == dtype
    error = 4e-7 * (8 + largest)  # by which a score in float32 is off
    if dtype == torch.bfloat16:  # to which the weights are rounded, and what comes out
        error = 2 * error + 2**-8 * (1 + 2**-7) * (unsigned + expected.abs())
    assert ((got - expected).abs() <= error).all()


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_so(dtype, size):
    query, key, value = torch.randn(3, 1, 2, 20, size).to(dtype)
    mask = torch.zeros(1, 1, 20, 20, dtype=dtype)
    query[0, 0, 3, 5] = torch.nan
    rows = tree_attention.attend(query, key, value, mask, None)[0].isnan().any(-1)
    assert rows[3, 0]
    assert rows.sum() == 1


def test_what_it_does_not_take():
    query, mask = torch.randn(1, 2, 5, 16), torch.zeros(1, 1, 5, 5)
    assert tree_attention.serves(query, query, query, mask)
    for other in (query.half(), query.repeat(2, 1, 1, 1), query[..., :8], torch.randn(1, 2, 5, 577)):
        assert not tree_attention.serves(other, other, other, mask.to(other.dtype))
    assert not tree_attention.serves(query, query.mT.contiguous().mT, query, mask)
    assert not tree_attention.serves(query, query, query, mask == 0)
    for shape in ((1, 1, 1, 5), (1, 1, 5, 6), (1, 1, 4, 5)):
        assert not tree_attention.serves(query, query, query, torch.zeros(shape))
    key = query.clone().requires_grad_()
    assert not tree_attention.serves(query, key, query, mask)
    assert not tree_attention.serves(query, query, key, mask)
    query.requires_grad = True
    assert not tree_attention.serves(query, query, query, mask)
    with torch.no_grad():
        assert tree_attention.serves(query, query, query, mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_nothing_takes_the_mean(dtype):
    """As torch's attention does where every score is the least number."""
    query, key, value = torch.randn(3, 1, 2, 5, 16).to(dtype)
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype)
    mask[..., 2, :] = torch.finfo(dtype).min
    got = tree_attention.attend(query, key, value, mask, None)[0, 2]
    torch.testing.assert_close(got, value[0].mean(1), atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
