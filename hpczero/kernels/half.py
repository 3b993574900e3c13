"""float16 and bfloat16 on processors that cannot add them: decoded, combined in float32, encoded once.

Half arrays reach these kernels as uint16 (`arrays.as_bits`) with a number that says which format it is. Encoding rounds to
nearest, ties to even, as IEEE 754 does; NaN stays NaN; what is too large becomes infinite. A `fold` keeps its partial sums
in float32 and rounds its result once; a chain of `combine`s rounds after each.
"""

from __future__ import annotations

import ml_dtypes
import numba
import numpy as np
from numba import cuda

from hpczero.kernels import cpu_loop
from hpczero.kernels.reduce import BLOCK, MIN, PROD, SUM

FP16, BF16 = range(2)
FORMATS = {np.dtype(np.float16): FP16, np.dtype(ml_dtypes.bfloat16): BF16}


def _decode(h, kind):
    """The float32 value of 16 bits. float16: shift the exponent into place and multiply by 2**112 to move its bias."""
    if kind == BF16:
        return np.uint32(np.uint32(h) << np.uint32(16)).view(np.float32)
    sign = np.uint32(np.uint32(h & np.uint16(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(h & np.uint16(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):           # infinity or NaN
        return np.uint32(magnitude | sign | np.uint32(0x7F800000)).view(np.float32)
    scaled = np.float32(magnitude.view(np.float32) * np.float32(5.192296858534828e33))
    return np.uint32(scaled.view(np.uint32) | sign).view(np.float32)


def _encode(value, kind):
    """The 16 bits nearest to a float32 value, ties to even."""
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    upper = np.uint32(bits >> np.uint32(16))
    if kind == BF16:
        if magnitude > np.uint32(0x7F800000):        # NaN: keep it quiet, never round it to infinity
            return np.uint16(upper | np.uint32(0x40))
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + np.uint32(upper & np.uint32(1))) >> np.uint32(16))
    sign = np.uint32(upper & np.uint32(0x8000))
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):           # 65520 and more round to infinity
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude >= np.uint32(0x38800000):           # normal: move the bias, round the 13 bits that go
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd)
        return np.uint16(sign | np.uint32(rounded >> np.uint32(13)))
    # Subnormal: next to 0.5 a float32 has the spacing of half subnormals, so the addition rounds as wanted.
    shifted = np.float32(magnitude.view(np.float32) + np.float32(0.5))
    return np.uint16(sign | np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000)))


def _combined(a, b, op):
    if op == SUM:
        return a + b
    if op == PROD:
        return a * b
    if op == MIN:
        if a < b or a != a:
            return a
        return b if b < a or b != b or a != a - a else -(-a + -b)
    if a > b or a != a:
        return a
    return b if b > a or b != b or a != a - a else a + b


_decode_cpu, _decode_cuda = numba.njit(error_model="numpy")(_decode), cuda.jit(device=True)(_decode)
_encode_cpu, _encode_cuda = numba.njit(error_model="numpy")(_encode), cuda.jit(device=True)(_encode)
_combined_cpu, _combined_cuda = numba.njit(error_model="numpy")(_combined), cuda.jit(device=True)(_combined)


@cpu_loop()
def combine(mine, arrived, kind, op):
    """mine[i] = mine[i] op arrived[i] in float32, rounded; two 1-D uint16 arrays of half bits."""
    # A loop for each, since one that asks in every turn is not vectorised.
    if op == SUM and kind == BF16:
        for i in range(mine.size):
            mine[i] = _encode_cpu(_decode_cpu(mine[i], BF16) + _decode_cpu(arrived[i], BF16), BF16)
    elif op == SUM:
        for i in range(mine.size):
            mine[i] = _encode_cpu(_decode_cpu(mine[i], FP16) + _decode_cpu(arrived[i], FP16), FP16)
    else:
        for i in range(mine.size):
            mine[i] = _encode_cpu(_combined_cpu(_decode_cpu(mine[i], kind), _decode_cpu(arrived[i], kind), op), kind)


@cpu_loop()
def divide(mine, kind, divisor):
    """mine[i] = mine[i] / divisor, rounded; divisor float32."""
    for i in range(mine.size):
        mine[i] = _encode_cpu(_decode_cpu(mine[i], kind) / divisor, kind)


@cpu_loop()
def fold(rows, instructions, stack, kind, op, first, own_row, own, out):
    """As `reduce.fold`, over rows of half bits: uint16 rows and `out`, a float32 `stack`, instructions of single rows."""
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        size = stop - start
        top = -1
        for k in range(instructions.shape[0]):
            if instructions[k, 0] == 0:
                top -= 1
                _combine_values(stack[top, :size], stack[top + 1, :size], op)
                continue
            top += 1
            number = instructions[k, 1]
            row = own[start:stop] if number == own_row else rows[number, first + start:first + stop]
            _decode_all(row, kind, stack[top, :size])
        _encode_all(stack[0, :size], kind, out[start:stop])


@cpu_loop()
def _combine_values(mine, others, op):
    if op == SUM:
        for i in range(mine.size):
            mine[i] = mine[i] + others[i]
    else:
        for i in range(mine.size):
            mine[i] = _combined_cpu(mine[i], others[i], op)


@cpu_loop()
def _decode_all(bits, kind, into):
    if kind == BF16:
        for i in range(into.size):
            into[i] = _decode_cpu(bits[i], BF16)
    else:
        for i in range(into.size):
            into[i] = _decode_cpu(bits[i], FP16)


@cpu_loop()
def _encode_all(values, kind, into):
    if kind == BF16:
        for i in range(into.size):
            into[i] = _encode_cpu(values[i], BF16)
    else:
        for i in range(into.size):
            into[i] = _encode_cpu(values[i], FP16)


@cuda.jit
def combine_cuda(mine, arrived, kind, op):
    for i in range(cuda.grid(1), mine.size, cuda.gridsize(1)):
        mine[i] = _encode_cuda(_combined_cuda(_decode_cuda(mine[i], kind), _decode_cuda(arrived[i], kind), op), kind)


@cuda.jit
def divide_cuda(mine, kind, divisor):
    for i in range(cuda.grid(1), mine.size, cuda.gridsize(1)):
        mine[i] = _encode_cuda(_decode_cuda(mine[i], kind) / divisor, kind)


_bits, _long = numba.uint16[::1], numba.int64
CUDA_SIGNATURES = {
    combine_cuda: [(_bits, _bits, _long, _long)],
    divide_cuda: [(_bits, _long, numba.float32)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
