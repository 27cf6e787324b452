"""Matrices in panels: the products that the formula says, over shapes and strides."""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lookahead import native, packing, panels

DTYPES = list(panels._kernels())
needs_panels = pytest.mark.skipif(not DTYPES, reason="this processor or its compiler has no panels")


@needs_panels
@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 200),
    with_bias=st.booleans(),
    strided=st.booleans(),
    dtype=st.sampled_from(DTYPES or [None]),
    seed=st.integers(0, 99),
)
def test_products_are_what_the_formula_says(rows, inputs, outputs, with_bias, strided, dtype, seed):
    inputs *= 1 if dtype == torch.float32 else 2
    note(f"{rows=} {inputs=} {outputs=} {with_bias=} {strided=} {dtype=} {seed=}")
    torch.manual_seed(seed)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if with_bias else None
    input = (
        torch.randn(inputs, 1, rows).to(dtype).permute(1, 2, 0) if strided else torch.randn(1, rows, inputs).to(dtype)
    )
    got = panels.multiply(input, panels.pack(weight), outputs, bias)
    added = 0 if bias is None else bias.double()
    expected = input.double() @ weight.double().T + added
    assert got.shape == (1, rows, outputs)
    assert got.dtype == dtype
    error = 1e-7 * (4 + inputs) * (input.double().abs() @ weight.double().abs().T + abs(added))
    if dtype == torch.bfloat16:
        error += 2**-8 * expected.abs()  # half of the last bit of what comes out
    assert ((got - expected).abs() <= error).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 32, 100])
def test_a_weight_comes_back_as_it_was(dtype, outputs):
    weight = torch.randn(outputs, 64).to(dtype)
    assert panels.unpack(panels.pack(weight), outputs).equal(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype):
    weight, input = torch.randn(70, 64).to(dtype), torch.randn(3, 64).to(dtype)
    weight[5, 3], weight[68, 0], input[1, 7], input[2, 0] = torch.nan, torch.inf, torch.nan, 0
    got = panels.multiply(input, panels.pack(weight), 70, None)
    assert got.isnan().equal((input @ weight.T).isnan())
    assert got[0, 68].isinf()


def test_what_they_do_not_take():
    for weight in (torch.randn(64, 64).half(), torch.randn(64, 64).double(), torch.randn(64, 64, device="meta")):
        assert not panels.can_hold(weight)
    assert not panels.can_hold(torch.randn(64, 63).bfloat16())  # by pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_them_weights_go_to_onednn(dtype, monkeypatch):
    monkeypatch.setattr(native, "library", lambda name: None)
    panels._kernels.cache_clear()
    try:
        layer = torch.nn.Linear(300, 400).to(dtype).requires_grad_(False)
        input, plain = torch.randn(5, 300).to(dtype), layer.weight.clone()
        expected = layer(input)
        packing.pack(layer)
        assert layer._product._matrix.layout != torch.strided or not torch.backends.mkldnn.is_available()
        torch.testing.assert_close(layer(input), expected)
        assert packing.unpack(layer).weight.equal(plain)
    finally:
        panels._kernels.cache_clear()
