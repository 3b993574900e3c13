"""Which kernel combines which arrays: by dtype, by operation, and by where the arrays are.

The element types of every collective are listed here once. Half types enter kernels as bits and are combined in float32;
on a device a fold is a chain of `combine`s over scratch rows, in the same order as the stack machine on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from hpczero.arrays import Array, as_bits, copy, is_device, is_half, launch
from hpczero.collectives.order import Tree, depth, program
from hpczero.errors import ConfigError
from hpczero.kernels import half, reduce

DTYPES = tuple(map(np.dtype, (
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.uint8,
)))
OPERATIONS = ("sum", "mean", "prod", "min", "max")


def check(dtype: Any, op: str) -> None:
    """ConfigError unless every collective can combine elements of `dtype` by `op`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
    if op not in OPERATIONS:
        raise ConfigError(f"op={op!r} is not one of {', '.join(OPERATIONS)}")
    if op == "mean" and dtype.kind in "iu":
        raise ConfigError(f"op='mean' of {dtype}: a mean of whole numbers need not be one; sum them, or cast to float64")


def code(op: str) -> int:
    """The number by which kernels know an operation; a mean is a sum until it is divided."""
    return reduce.OPS.get(op, reduce.SUM)


def combine(mine: Array, arrived: Array, op: str) -> None:
    """mine = mine op arrived, in place; 1-D, one dtype, both on the host or both on one device. A mean sums."""
    number = code(op)
    if is_half(mine.dtype):
        arguments = (as_bits(mine), as_bits(arrived), half.FORMATS[np.dtype(mine.dtype)], number)
        if is_device(mine):
            launch(half.combine_cuda, mine.size, *arguments)
        else:
            half.combine(*arguments)
    elif is_device(mine):
        launch(reduce.combine_cuda, mine.size, mine, arrived, number)
    else:
        reduce.combine(mine, arrived, number)


def fold(rows: Array, row_of: dict[int, int], tree: Tree, op: str, first: int, out: Array,
         own: tuple[int, Array] | None = None) -> None:
    """out = rows[:, first:first + out.size] combined in the order of `tree`, whose rank r lies in row row_of[r].

    `own` is a rank whose elements are not in its row but in an array like `out`, or in `out` itself. On a device the rows
    are overwritten; on the host they are only read, and `out` may lie in one of them.
    """
    own_row, mine = (-1, out) if own is None else (row_of[own[0]], own[1])
    if is_device(rows):
        part = rows[:, first:first + out.size]
        if own_row >= 0:
            copy(part[own_row], mine)
        # Half types are added in float32 and rounded once, as on the host.
        part = part.astype(np.float32) if is_half(rows.dtype) else part
        copy(out, _fold_in_place(part, row_of, tree, op))
        return
    folder(rows.dtype, op, tree, row_of)(rows, first, own_row, mine, out)


def folder(dtype: np.dtype, op: str, tree: Tree, row_of: dict[int, int]) -> Callable[..., None]:
    """fold(rows, first, own_row, own, out) on the host, with all that does not change worked out: for calls made again.

    `own_row` is the row whose elements are in `own` instead, an array like `out`; -1 for none. One thread at a time.
    """
    number, with_bits = code(op), is_half(dtype)
    instructions, height = _program(tree, tuple(row_of.items()), 4 if number == reduce.SUM and not with_bits else 1)
    stack = np.empty((height, reduce.BLOCK), np.float32 if with_bits else dtype)
    if with_bits:
        kind = half.FORMATS[np.dtype(dtype)]
        return lambda rows, first, own_row, own, out: half.fold(
            as_bits(rows), instructions, stack, kind, number, first, own_row, as_bits(own), as_bits(out)
        )
    return lambda rows, first, own_row, own, out: reduce.fold(rows, instructions, stack, number, first, own_row, own, out)


def divide(array: Array, divisor: int) -> None:
    """array = array / divisor, in place: what makes a mean of a sum. 1-D, floating."""
    if is_half(array.dtype):
        arguments = (as_bits(array), half.FORMATS[np.dtype(array.dtype)], np.float32(divisor))
        if is_device(array):
            launch(half.divide_cuda, array.size, *arguments)
        else:
            half.divide(*arguments)
    elif is_device(array):
        launch(reduce.divide_cuda, array.size, array, array.dtype.type(divisor))
    else:
        reduce.divide(array, array.dtype.type(divisor))


def _fold_in_place(rows: Array, row_of: dict[int, int], tree: Tree, op: str) -> Array:
    if isinstance(tree, int):
        return rows[row_of[tree]]
    left, right = (_fold_in_place(rows, row_of, half_tree, op) for half_tree in tree)
    combine(left, right, op)
    return left


@lru_cache(maxsize=256)
def _program(tree: Tree, row_of: tuple[tuple[int, int], ...], widest: int) -> tuple[np.ndarray, int]:
    """The instructions of a fold, and how many partial sums they hold at once."""
    instructions = program(tree, dict(row_of), widest)
    return instructions, depth(instructions)
