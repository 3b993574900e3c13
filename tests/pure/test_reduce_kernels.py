"""The reduction kernels against plain NumPy, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hpczero.collectives.order import balanced, depth, program
from hpczero.kernels import half, reduce

UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
DTYPES = [np.float32, np.float64, np.int32, np.int64, np.uint8]


def numbers(rng, shape, dtype):
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def in_order(tree, rows, ufunc):
    if isinstance(tree, int):
        return rows[tree]
    return ufunc(in_order(tree[0], rows, ufunc), in_order(tree[1], rows, ufunc))


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_fold_combines_rows_in_the_order_of_the_tree_bit_for_bit(num_rows, dtype, op):
    rng = np.random.default_rng(num_rows)
    rows = numbers(rng, (num_rows, 5000), dtype)
    tree = balanced(range(num_rows))
    instructions = program(tree, {rank: rank for rank in range(num_rows)}, widest=4 if op == "sum" else 1)
    stack = np.empty((depth(instructions), reduce.BLOCK), dtype)
    for first, count in [(0, 5000), (0, 0), (7, 1), (3, 2048), (1, 2049), (4999, 1)]:
        out = np.empty(count, dtype)
        reduce.fold(rows, instructions, stack, reduce.OPS[op], first, -1, out, out)
        with np.errstate(over="ignore"):
            expected = in_order(tree, rows[:, first:first + count], UFUNCS[op])
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5, 7])
def test_fold_may_write_into_one_of_its_rows(num_rows):
    rows = np.random.default_rng(0).standard_normal((num_rows, 6000)).astype(np.float32)
    tree = balanced(range(num_rows))
    instructions = program(tree, {rank: rank for rank in range(num_rows)})
    stack = np.empty((depth(instructions), reduce.BLOCK), np.float32)
    expected = in_order(tree, rows.copy(), np.add)
    into = rows[1, 10:5990]
    reduce.fold(rows, instructions, stack, reduce.SUM, 10, -1, into, into)
    assert np.array_equal(into, expected[10:5990])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_fold_may_have_one_row_elsewhere_and_write_over_it(num_rows, dtype):
    rows = np.random.default_rng(0).standard_normal((num_rows, 6000)).astype(dtype)
    tree, is_half = balanced(range(num_rows)), dtype == np.float16
    instructions = program(tree, {rank: rank for rank in range(num_rows)}, widest=1 if is_half else 4)
    stack = np.empty((depth(instructions), reduce.BLOCK), np.float32)
    expected = in_order(tree, rows.astype(np.float32), np.add).astype(dtype)
    for own_row in range(num_rows):
        own, beside = rows[own_row, 10:5990].copy(), rows.copy()
        beside[own_row] = np.nan
        if is_half:
            bits = own.view(np.uint16)
            half.fold(beside.view(np.uint16), instructions, stack, half.FP16, half.SUM, 10, own_row, bits, bits)
        else:
            reduce.fold(beside, instructions, stack, reduce.SUM, 10, own_row, own, own)
        assert np.array_equal(own, expected[10:5990])


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_is_the_numpy_function(dtype, op):
    rng = np.random.default_rng(1)
    for count in (0, 1, 1003):
        mine, arrived = numbers(rng, count, dtype), numbers(rng, count, dtype)
        with np.errstate(over="ignore"):
            expected = UFUNCS[op](mine, arrived)
        reduce.combine(mine, arrived, reduce.OPS[op])
        assert mine.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", ["min", "max"])
def test_minimum_and_maximum_hand_a_nan_on_from_either_side(op):
    mine, arrived = np.array([np.nan, 1.0, np.nan]), np.array([1.0, np.nan, np.nan])
    reduce.combine(mine, arrived, reduce.OPS[op])
    assert np.isnan(mine).all()


def all_halves(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_half_value_decodes_and_encodes_to_itself(dtype):
    values = all_halves(dtype)
    bits, nan = values.view(np.uint16), np.isnan(values.astype(np.float32))
    mine = bits.copy()
    half.divide(mine, half.FORMATS[np.dtype(dtype)], np.float32(1))
    assert np.array_equal(mine[~nan], bits[~nan])
    assert np.isnan(mine.view(dtype)[nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_sums_are_float32_sums_rounded_to_nearest_even(dtype):
    rng = np.random.default_rng(2)
    kind = half.FORMATS[np.dtype(dtype)]
    mine = rng.permutation(np.repeat(all_halves(dtype), 3))
    arrived = rng.permutation(np.repeat(all_halves(dtype), 3))
    with np.errstate(all="ignore"):
        expected = (mine.astype(np.float32) + arrived.astype(np.float32)).astype(dtype)
    got = mine.copy()
    half.combine(got.view(np.uint16), arrived.view(np.uint16), kind, reduce.SUM)
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(got.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(got[nan].astype(np.float32)).all()


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8])
def test_a_half_fold_rounds_once(num_rows, dtype, op):
    rows = np.random.default_rng(3).standard_normal((num_rows, 3000)).astype(dtype)
    tree = balanced(range(num_rows))
    instructions = program(tree, {rank: rank for rank in range(num_rows)}, widest=1)
    stack = np.empty((depth(instructions), reduce.BLOCK), np.float32)
    out = np.empty(2900, dtype)
    half.fold(rows.view(np.uint16), instructions, stack, half.FORMATS[np.dtype(dtype)], reduce.OPS[op], 50, -1,
              out.view(np.uint16), out.view(np.uint16))
    expected = in_order(tree, rows[:, 50:2950].astype(np.float32), UFUNCS[op]).astype(dtype)
    assert out.tobytes() == expected.tobytes()
