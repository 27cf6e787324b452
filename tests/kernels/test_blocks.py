"""Weights of few bits, found again from the numbers that they were unpacked to: the same products, to the last bit."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import nn

from lookahead.cpu import blocks, codes, gemm, native
from lookahead.cpu.products import Format, Linear

BITS = {
    "Q4_0": torch.uint8, "Q4_1": torch.uint8, "Q4_K": torch.uint8,
    "Q8_0": torch.int8, "Q5_0": torch.int8, "Q6_K": torch.int8, "Q3_K": torch.int8,
}  # fmt: skip
RANGES = {"Q8_0": (-127, 127), "Q5_0": (-16, 15), "Q4_0": (-8, 7), "Q6_K": (-32, 31), "Q3_K": (-4, 3)}


def unpacked(kind: str, outputs: int, blocks_of_32: int, size: float) -> torch.Tensor:
    """Float32 [outputs, 32 * blocks_of_32], as gguf unpacks blocks of this kind with scales up to ``size``.

    Blocks of weights that hardly differ from each other are not found, and not made here.
    """

    def half(*shape):
        return (torch.rand(shape) * size).half().float()

    if kind in ("Q4_1", "Q4_K"):
        shape = outputs, blocks_of_32, 1
        codes = torch.randint(0, 16, (outputs, blocks_of_32, 32))
        if kind == "Q4_1":  # its offset is the lowest weight
            codes[..., 3], codes[..., 17] = 0, 15
            scales = half(*shape)
            return (scales * codes - (scales * 16 * torch.rand(shape)).half().float()).flatten(1)
        if torch.rand(()) < 0.5:  # narrow blocks, some of positive weights alone
            codes = codes % 5 + torch.randint(0, 12, shape)
        scales = torch.randint(0, 64, shape)
        offsets = (scales * 8).minimum(torch.randint(0, 64, shape)) * torch.randint(0, 2, shape)
        of_row = half(outputs, 1, 1)
        return (
            of_row * scales * codes - (of_row * (0.5 + torch.rand(outputs, 1, 1))).half().float() * offsets
        ).flatten(1)
    of_sixteen = kind in ("Q6_K", "Q3_K")
    low, high = RANGES[kind]
    numbers = torch.randint(low, high + 1, (outputs, blocks_of_32 * (1 + of_sixteen), 32 >> of_sixteen))
    numbers[..., 5] = -127 if kind == "Q8_0" else low
    scales = half(*numbers.shape[:2], 1) * (1 if torch.rand(()) < 0.5 else -1)
    if of_sixteen:
        scales = half(outputs, 1, 1) * torch.randint(-32, 32, (*numbers.shape[:2], 1))
    return (scales * numbers).flatten(1)


def assert_same_products(found: Linear, linear: Linear, dtype: torch.dtype, rows: tuple[int, ...] = (1, 5, 17)) -> None:
    """Both layers make the same of random inputs, to the last bit if one kernel serves both. linear: not packed."""
    in_tiles = native.HAS_AMX and dtype == torch.float32 and found.unpacked is not None
    for n in rows:
        input = torch.randn(n, linear.weight.shape[1]).to(dtype)
        (expected,), (got,) = gemm.multiply(input, [linear]), gemm.multiply(input, [found])
        for together, alone in zip(gemm.multiply(input, [linear, found]), (expected, got), strict=True):
            assert torch.equal(together.nan_to_num(), alone.nan_to_num())
        error = 1e-6 * (input.abs() @ linear.weight.abs().T + 1) if in_tiles else torch.zeros(())
        assert (((got - expected).abs() <= error) | (got.isnan() & expected.isnan()) | (got == expected)).all()


@contextmanager
def with_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_there_are_finders():
    assert native.why_missing() is None


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(sorted(BITS)),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 5),
    size=st.sampled_from([0.0, 2.0**-24, 1e-3, 1e-2, 2e3]),
    seed=st.integers(0, 999),
)
def test_weights_unpacked_from_blocks_are_found_to_be(kind, outputs, groups, size, seed):
    note(f"{kind=} {outputs=} {groups=} {size=} {seed=}")
    torch.manual_seed(seed)
    linear = Linear(unpacked(kind, outputs, groups, size), None, torch.randn(outputs))
    found = blocks.pack(linear, torch.float32)
    assert found.unpacked is None
    assert found.weight.dtype in (BITS[kind], torch.uint8), "fewer bits may do"
    assert_same_products(found, linear, torch.float32)
    weight = linear.weight.view(-1)
    place = int(torch.randint(len(weight), ()))
    was = weight[place].clone()
    for other in (torch.nan, torch.inf, was * (1 + 2**-20) + 1e-40):
        weight[place] = other
        assert blocks.pack(linear, torch.float32, found, indexes=False) is linear, "not every weight is one"
    weight[place] = was
    weight[: 16 + len(weight) // 2] = -weight[: 16 + len(weight) // 2].flip(0)
    again = blocks.pack(linear, torch.float32, found)  # what was found before is written over
    assert_same_products(again, linear, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 4),
    size=st.sampled_from([32, 64, 160]),
    seed=st.integers(0, 99),
)
def test_int4_held_in_int8_is_packed(dtype, outputs, groups, size, seed):
    note(f"{dtype=} {outputs=} {groups=} {size=} {seed=}")
    torch.manual_seed(seed)
    numbers = torch.randint(-8, 8, (outputs, groups * size), dtype=torch.int8)
    linear = Linear(
        numbers, torch.rand(outputs, groups).to(dtype).float(), torch.randn(outputs).to(dtype), format=Format.GROUPED
    )
    found = blocks.pack(linear, dtype)
    if native.CAPABILITY != "DEFAULT" or dtype == torch.bfloat16:
        assert found.weight.dtype == torch.uint8, "without FMA, weights are rounded twice if scales have many digits"
    assert_same_products(found, linear, dtype)
    numbers.view(-1)[seed % numbers.numel()] = 8 if seed % 2 else -9
    assert blocks.pack(linear, dtype) is linear


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of MXFP4's codes, times a power of two."""


def numbers_of_mxfp4(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32: what blocks hold; dtype: of the weights that they were made of."""
    each = packed.view(len(packed), -1, 17)
    codes = torch.stack([each[..., 1:] & 15, each[..., 1:] >> 4], -1 if dtype == torch.bfloat16 else -2)
    numbers = E2M1.double()[codes.flatten(2).int()] * 2.0 ** (each[..., :1].double() - 127)
    return numbers.flatten(1).float()


def are_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Not of NaN."""
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 6),
    powers=st.sampled_from([(-12, -4), (-30, 30), (-125, -120), (118, 125), (-125, 125)]),
    beside=st.sampled_from([None, 0, 1, 7]),
    seed=st.integers(0, 999),
)
def test_weights_of_mxfp4_are_found_to_be(dtype, outputs, groups, powers, beside, seed):
    """powers: of two, of the groups. beside: other outputs in the same matrix, if the weights lie transposed."""
    note(f"{dtype=} {outputs=} {groups=} {powers=} {beside=} {seed=}")
    torch.manual_seed(seed)
    codes = torch.randint(16, (outputs, groups, 32))
    codes[..., 5] = 7 - codes[..., 5] % 2  # without a number of the upper exponent, another power of two is found
    codes[torch.rand(outputs, groups) < 0.2] &= 8  # zeros
    scales = 2.0 ** torch.randint(powers[0], powers[1] + 1, (outputs, groups, 1)).float()
    weight = (E2M1[codes] * scales).flatten(1).to(dtype)
    if beside is not None:
        matrix = torch.randn(32 * groups, outputs + beside).to(dtype)
        matrix[:, beside:] = weight.T
        weight = matrix.T[beside:]
    linear = Linear(weight, None, torch.randn(outputs).to(dtype) if seed % 2 else None)
    found = blocks.pack(linear, dtype, indexes=False)
    assert (found.format, found.weight.shape) == (Format.MXFP4, (outputs, 17 * groups))
    assert (found.outputs, found.inputs) == (outputs, 32 * groups)
    assert are_same_bits(numbers_of_mxfp4(found.weight, dtype).to(dtype), weight), "also the signs of zeros"
    plain = Linear(weight.contiguous(), None, linear.bias)
    assert_same_products(found, plain, dtype, rows=(1, 2, 3, 5, 8, 12, 17, 40))

    known, place = found._replace(bias=None, origin=None), (seed % outputs, seed % (32 * groups))
    assert blocks.pack(linear, dtype, known, indexes=False).weight is found.weight
    copies = blocks.copies_of([found])
    differ = blocks.comparison(copies, dtype)
    parts = 1 + seed % 3
    assert not any(differ(turn, parts) for turn in range(1, 50))
    was = weight[place].clone()
    for other in (torch.nan, 1e-40, 1.125 * was if was else 1.125, -was):
        weight[place] = other
        assert blocks.digest_of(linear) != found.digest
        assert any(differ(turn, parts) for turn in range(1, 9000)), "a sign is a number, too, also that of a zero"
        again = blocks.pack(linear, dtype, known, indexes=False)
        is_mxfp4 = again.format == Format.MXFP4
        assert is_mxfp4 == are_same_bits(weight[place], -was), "no other one has two digits"
        if is_mxfp4:
            assert are_same_bits(numbers_of_mxfp4(again.weight, dtype).to(dtype), weight)
        weight[place] = was


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.nan, torch.inf, 5.0, 7.0, 0.25, 1.0078125, 8.0, 2.0**-130])
def test_one_number_that_is_none_of_mxfp4_leaves_all_as_they_are(dtype, other):
    """Beside numbers from 0.5 to 6."""
    weight = E2M1[torch.arange(16)].repeat(9, 6).to(dtype)
    assert blocks.pack(Linear(weight), dtype, indexes=False).format == Format.MXFP4
    weight[7, 70] = other
    assert blocks.pack(Linear(weight), dtype).format != Format.MXFP4
    assert blocks.pack(Linear(weight.T.contiguous().T), dtype, indexes=False).format == Format.FLOATS
    few = weight[:7, :80].contiguous()
    assert blocks.pack(Linear(few), dtype).format != Format.MXFP4, "it has no whole groups"


def test_all_powers_of_two_of_mxfp4_are_read():
    """Also those that only a file can say; but for the last ones, of which some numbers would be infinite."""
    packed = torch.randint(256, (253, 17), dtype=torch.uint8)
    packed[:, 0] = torch.arange(253)
    (found,) = gemm.multiply(torch.eye(32), [Linear(packed, format=Format.MXFP4)])
    assert torch.equal(found.T, numbers_of_mxfp4(packed, torch.float32))


CAN_INDEX = native.CAPABILITY.startswith("AVX")


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outputs=st.integers(1, 50),
    groups=st.integers(1, 70),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    rare=st.sampled_from([0.0, 1e-4, 2e-4, 3e-3]),
    seed=st.integers(0, 999),
)
def test_numbers_of_bf16_are_indexed(dtype, outputs, groups, spread, rare, seed):
    """spread: how much the sizes of rows differ. rare: the share of weights that are zeros, infinite or no numbers."""
    note(f"{dtype=} {outputs=} {groups=} {spread=} {rare=} {seed=}")
    torch.manual_seed(seed)
    shape = outputs, 64 * groups
    numbers = torch.randn(shape)
    numbers += 0.01 * numbers.sign()  # none is so small that its upper byte is rare
    weight = (numbers * (spread * torch.randn(outputs, 1)).exp()).bfloat16().to(dtype)
    odd = torch.tensor([0.0, -0.0, 1e-39, 1e30, torch.inf, torch.nan])[torch.randint(6, shape)].bfloat16().to(dtype)
    weight = torch.where(torch.rand(shape) < rare, odd, weight)
    linear = Linear(weight, None, torch.randn(outputs).to(dtype) if seed % 2 else None)
    found = blocks.pack(linear, dtype)
    if not CAN_INDEX:
        assert found is linear
        return
    together = blocks.TOGETHER
    if rare == 0 and (spread == 0 or together == 1):  # rows together have one table
        assert found.unpacked is weight
        assert found.weight.nbytes <= -(-outputs // together) * together * (96 * groups + 2 * groups + 80)
    place = int(torch.randint(weight.numel(), ()))
    weight.view(-1)[place] = 1e9 if seed % 3 else 0.0
    again = blocks.pack(linear, dtype, found if found is not linear else None)
    assert_same_products(again, linear, dtype, rows=(1, 2, 3, 5, 8, 12, 17))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exceptions_of_a_block_do_not_touch_the_others(dtype):
    """Few, none and too many numbers of a block, in turns, have upper bytes that are not in the table."""
    torch.manual_seed(0)
    weight = 1 + torch.rand(40, 64 * 12)  # so one upper byte is in the table for certain, with any fifteen others
    for block, count in enumerate((3, 0, 400, 1, 0, 254, 0, 2, 5, 0, 1, 1)):
        part = weight[:, 64 * block : 64 * (block + 1)]
        rows, columns = torch.randint(40, (count,)), torch.randint(64, (count,))
        part[rows, columns] = 2.0 ** torch.randint(-120, -8, (count,)).float()
    linear = Linear(weight.bfloat16().to(dtype))
    found = blocks.pack(linear, dtype)
    assert (found.unpacked is not None) == CAN_INDEX
    assert_same_products(found, linear, dtype, rows=(1, 5, 6, 17))
    again = blocks.pack(linear, dtype, found if found is not linear else None)
    assert torch.equal(again.weight, found.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_cannot_be_indexed_do_not_touch_the_others(dtype):
    """Among rows that lie together, so many upper bytes are in no table that these rows are read from the matrix."""
    torch.manual_seed(0)
    weight = torch.randn(131, 64 * 5)
    weight[20:30] *= 2.0 ** torch.randint(-30, 30, (10, 64 * 5)).float()
    weight[128:] *= 2.0 ** torch.randint(-30, 30, (3, 64 * 5)).float()
    linear = Linear(weight.bfloat16().to(dtype))
    found = blocks.pack(linear, dtype)
    assert (found.unpacked is not None) == CAN_INDEX
    assert_same_products(found, linear, dtype, rows=(1, 2, 7, 12, 13, 33))
    weight = linear.weight
    weight[25, 7] += 1
    again = blocks.pack(linear, dtype, found if found is not linear else None)
    assert_same_products(again, linear, dtype, rows=(1, 40))


@pytest.mark.parametrize("rows", [1, 20])
def test_weights_near_zero_are_not_given_to_the_matrix_unit_in_float32(rows):
    """It takes products below 2^-126 as zero, which float32 still tells apart."""
    weight = torch.randn(20, 128).bfloat16().float()
    weight[:rows] *= 2.0**-60
    found = blocks.pack(Linear(weight), torch.float32)
    assert (found.unpacked is not None) == (CAN_INDEX and not native.HAS_AMX)
    weight[0] = 0
    weight[1:] = torch.randn(19, 128).bfloat16().float()
    assert (blocks.pack(Linear(weight), torch.float32).unpacked is not None) == CAN_INDEX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_worth_it_is_not_indexed(dtype):
    weight = torch.randn(7, 256).bfloat16().to(dtype)
    assert blocks.pack(Linear(weight), dtype, indexes=False).unpacked is None
    wide = (weight * 2.0 ** torch.randint(-60, 60, weight.shape)).to(dtype)
    assert blocks.pack(Linear(wide), dtype).unpacked is None, "too many upper bytes are not in its tables"
    assert blocks.pack(Linear(weight[:, :40].contiguous()), dtype).unpacked is None, "it has no whole blocks"
    if dtype == torch.float32:
        weight[3, 100] *= 1 + 2**-20
        assert blocks.pack(Linear(weight), dtype).unpacked is None, "one of its numbers is not of bf16"


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outputs=st.integers(1, 50),
    inputs=st.sampled_from([32, 64, 96, 160]),
    beside=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_transposed_weights_are_laid_out_in_rows(dtype, outputs, inputs, beside, seed):
    """beside: other outputs in the same matrix."""
    note(f"{dtype=} {outputs=} {inputs=} {beside=} {seed=}")
    torch.manual_seed(seed)
    matrix = torch.randn(inputs, outputs + beside).to(dtype)
    weight = matrix.T[beside // 2 :][:outputs]
    linear = Linear(weight, None, torch.randn(outputs).to(dtype) if seed % 2 else None)
    if weight.is_contiguous():  # of one output
        return
    assert (linear.is_transposed(dtype), linear.is_served(dtype)) == (True, False)
    assert blocks.pack(linear, dtype, indexes=False) is linear
    found = blocks.pack(linear, dtype)
    assert found.is_served(dtype)
    assert torch.equal(found.weight, weight)
    known = found._replace(bias=None, origin=None)
    assert blocks.pack(linear, dtype, known).weight is found.weight
    copies = blocks.copies_of([found])
    differ = blocks.comparison(copies, dtype)
    assert not any(differ(turn, 1) for turn in range(1, 50))
    weight[torch.randint(outputs, ()), torch.randint(inputs, ())] += 1
    assert blocks.digest_of(linear) != found.digest
    assert any(differ(turn, 1) for turn in range(1, 500))
    again = blocks.pack(linear, dtype, known)
    assert torch.equal(again.weight, weight)
    assert again.weight is not found.weight


@pytest.mark.parametrize(
    "linear",
    [
        Linear(torch.randn(3, 64)),
        Linear(torch.randn(3, 16)),
        Linear(torch.randn(3, 40)),
        Linear(torch.ones(3, 64, dtype=torch.int8), torch.ones(3), format=Format.BYTES),
        Linear(torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 4), format=Format.GROUPED),
    ],
)
def test_others_stay_as_they_are(linear):
    assert blocks.pack(linear, torch.float32) is linear


def test_a_processor_without_kernels_keeps_its_floats(monkeypatch):
    linear = nn.Linear(32, 2)
    nn.init.ones_(linear.weight)
    monkeypatch.setattr(codes, "_of_codes", dict)
    monkeypatch.setattr(blocks, "_of_mxfp4", dict)
    monkeypatch.setattr(blocks, "_of_bfloat16", dict)
    assert blocks.pack(Linear(linear.weight), torch.float32).weight is linear.weight


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 40000), threads=st.integers(1, 3), data=st.data())
def test_a_digest_is_another_if_anything_has_changed(count, threads, data):
    """Any number, and two numbers that change places."""
    seed = data.draw(st.integers(0, 999))
    note(f"{count=} {threads=} {seed=}")
    torch.manual_seed(seed)
    numbers = torch.randint(-3, 3, (count,), dtype=torch.int16)
    linear = Linear(numbers)
    before = blocks.digest_of(linear)
    with with_threads(threads):
        assert blocks.digest_of(linear) == before == blocks.digest_of(Linear(numbers.clone()))
    first, second = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    was = numbers.clone()
    numbers[first] += data.draw(st.integers(1, 2**16 - 1)) - 2**15 or 1
    assert (blocks.digest_of(linear) == before) == torch.equal(numbers, was)
    numbers.copy_(was)
    numbers[first], numbers[second] = was[second], was[first]
    assert (blocks.digest_of(linear) == before) == torch.equal(numbers, was)
