"""Combining contributions: sum, product, minimum, maximum, in a stated order, at memory speed.

Two forms. `combine` takes one array into another, element by element: what a ring does with a message that arrived.
`fold` takes any number of rows of a block at once, in the order of a tree of additions (`collectives.order.program`): what
a node does with its window, and an owner with the contributions it was sent. Reading L rows once and writing one moves
(L + 1) n elements; a chain of `combine`s would move 3 (L - 1) n.

`fold` runs the tree as a stack machine over blocks of 2048 elements, which stay in the first-level cache, and takes up to
four rows in one pass. On a device the same tree becomes a chain of `combine`s over scratch rows.

Integers wrap around, as in NumPy. Minimum and maximum hand a NaN on, and take -0 for less than +0. Half types: see `half`.
"""

from __future__ import annotations

import numba
from numba import cuda

from hpczero.kernels import cpu_loop

SUM, PROD, MIN, MAX = range(4)
OPS = {"sum": SUM, "prod": PROD, "min": MIN, "max": MAX}

BLOCK = 2048


def _sum(a, b):
    return a + b


def _prod(a, b):
    return a * b


def _min(a, b):
    # Of +0 and -0 always the negative, so that it does not matter which of two ranks came first.
    if a < b or a != a:
        return a
    return b if b < a or b != b or a != a - a else -(-a + -b)


def _max(a, b):
    if a > b or a != a:
        return a
    return b if b > a or b != b or a != a - a else a + b


_sum_cpu, _sum_cuda = numba.njit(error_model="numpy")(_sum), cuda.jit(device=True)(_sum)
_prod_cpu, _prod_cuda = numba.njit(error_model="numpy")(_prod), cuda.jit(device=True)(_prod)
_min_cpu, _min_cuda = numba.njit(error_model="numpy")(_min), cuda.jit(device=True)(_min)
_max_cpu, _max_cuda = numba.njit(error_model="numpy")(_max), cuda.jit(device=True)(_max)


@cpu_loop()
def combine(mine, arrived, op):
    """mine[i] = mine[i] op arrived[i]; two 1-D arrays of one dtype that do not overlap."""
    if op == SUM:
        for i in range(mine.size):
            mine[i] = _sum_cpu(mine[i], arrived[i])
    elif op == PROD:
        for i in range(mine.size):
            mine[i] = _prod_cpu(mine[i], arrived[i])
    elif op == MIN:
        for i in range(mine.size):
            mine[i] = _min_cpu(mine[i], arrived[i])
    else:
        for i in range(mine.size):
            mine[i] = _max_cpu(mine[i], arrived[i])


@cpu_loop()
def fold(rows, instructions, stack, op, first, own_row, own, out):
    """out = the rows[:, first:first + out.size], combined in the order of `instructions`, with `own` for one of the rows.

    Parameters
    ----------
    rows : (num_rows, stride) C-contiguous
        Only read. `out` may lie in one of them: every element is read before it is written.
    instructions : (n, 5) int64
        See `collectives.order.program`; made with `widest=1` unless `op` is SUM.
    stack : (depth, BLOCK) of the rows' dtype
        Scratch for partial sums.
    op : int
        SUM, PROD, MIN or MAX.
    own_row : int
        The row that is not read from `rows`, since its elements are in `own`; -1 for none.
    own : (out.size,)
        May be `out`; not looked at where `own_row` is -1.
    """
    if instructions.shape[0] == 1:
        # Up to four rows in one pass over all: by the block they would take twice as long, at 64 MiB.
        _load_rows(rows, instructions[0], first, own_row, own, out)
        return
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        mine = own[start:stop]
        top = -1
        for k in range(instructions.shape[0]):
            if instructions[k, 0] == 0:
                combine(stack[top - 1, :stop - start], stack[top, :stop - start], op)
                top -= 1
            else:
                top += 1
                _load_rows(rows, instructions[k], first + start, own_row, mine, stack[top, :stop - start])
        _load(stack[0, :stop - start], out[start:stop])


@cpu_loop()
def _load_rows(rows, instruction, lo, own_row, mine, into):
    """into = the rows that the instruction names, from element `lo` on, added up."""
    hi = lo + into.size
    code = instruction[0]
    a = mine if instruction[1] == own_row else rows[instruction[1], lo:hi]
    if code == 1:
        _load(a, into)
        return
    b = mine if instruction[2] == own_row else rows[instruction[2], lo:hi]
    if code == 2:
        _load_sum2(a, b, into)
        return
    c = mine if instruction[3] == own_row else rows[instruction[3], lo:hi]
    if code == 3:
        _load_sum3(a, b, c, into)
    else:
        d = mine if instruction[4] == own_row else rows[instruction[4], lo:hi]
        _load_sum4(a, b, c, d, into)


@cpu_loop()
def _load(a, into):
    for i in range(into.size):
        into[i] = a[i]


@cpu_loop()
def _load_sum2(a, b, into):
    for i in range(into.size):
        into[i] = _sum_cpu(a[i], b[i])


@cpu_loop()
def _load_sum3(a, b, c, into):
    for i in range(into.size):
        into[i] = _sum_cpu(_sum_cpu(a[i], b[i]), c[i])


@cpu_loop()
def _load_sum4(a, b, c, d, into):
    for i in range(into.size):
        into[i] = _sum_cpu(_sum_cpu(a[i], b[i]), _sum_cpu(c[i], d[i]))


@cuda.jit
def combine_cuda(mine, arrived, op):
    for i in range(cuda.grid(1), mine.size, cuda.gridsize(1)):
        if op == SUM:
            mine[i] = _sum_cuda(mine[i], arrived[i])
        elif op == PROD:
            mine[i] = _prod_cuda(mine[i], arrived[i])
        elif op == MIN:
            mine[i] = _min_cuda(mine[i], arrived[i])
        else:
            mine[i] = _max_cuda(mine[i], arrived[i])


def _quotient(a, divisor):
    return a / divisor


_quotient_cpu, _quotient_cuda = numba.njit(error_model="numpy")(_quotient), cuda.jit(device=True)(_quotient)


@cpu_loop()
def divide(mine, divisor):
    """mine[i] = mine[i] / divisor: a mean is a sum, divided once; `divisor` of the array's dtype."""
    for i in range(mine.size):
        mine[i] = _quotient_cpu(mine[i], divisor)


@cuda.jit
def divide_cuda(mine, divisor):
    for i in range(cuda.grid(1), mine.size, cuda.gridsize(1)):
        mine[i] = _quotient_cuda(mine[i], divisor)


_long = numba.int64
CUDA_SIGNATURES = {
    combine_cuda: [
        (kind[::1], kind[::1], _long)
        for kind in (numba.float32, numba.float64, numba.int32, numba.int64, numba.uint8)
    ],
    divide_cuda: [(kind[::1], kind) for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
