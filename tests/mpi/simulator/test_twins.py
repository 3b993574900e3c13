"""The CPU twin and the CUDA twin of every kernel give the same bits; the CUDA twins run in the simulator."""

from __future__ import annotations

import importlib
import pkgutil

import devicedouble
import ml_dtypes
import numpy as np
import pytest

import hpczero
from hpczero import arrays
from hpczero.kernels import half, loops, reduce
from hpczero.optim import SGD, Adagrad, Adam, AdamW, Lion, adagrad, adam, adamw, lamb, lion, norms, sgd

# The simulator computes with NumPy's scalars, which warn of overflow and NaN; here they are meant.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in scalar:RuntimeWarning")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Both signs of zero and infinity, subnormals, the largest, values that round to even, and NaN.
SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-45, 3e-8, 65519.0, 65520.0, 3.3e38, -3.3e38, 1.00048828125, np.nan]


def values(dtype, count=60, seed=0):
    """`count` numbers of all sizes, and every pair of special values somewhere at the end of two such vectors."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True)
    plain = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)
    special = np.repeat(SPECIAL, len(SPECIAL)) if seed else np.tile(SPECIAL, len(SPECIAL))
    with np.errstate(over="ignore"):
        return np.concatenate([plain, special]).astype(np.float32).astype(dtype)


def same_bits(a, b):
    """NaN equals NaN: which payload an addition of two of them keeps is the processor's choice."""
    either = (arrays.as_bits(a).view(f"u{a.dtype.itemsize}") == arrays.as_bits(b).view(f"u{b.dtype.itemsize}"))
    if a.dtype.kind in "iu":
        return either.all()
    return (either | (np.isnan(a) & np.isnan(b))).all()


def on_both(cpu, gpu, inputs, *scalars):
    """The arrays after the CPU twin and after the CUDA twin, both started with copies of `inputs`."""
    on_cpu = [x.copy() for x in inputs]
    cpu(*map(arrays.as_bits, on_cpu), *scalars)
    on_gpu = [devicedouble.asarray(x) for x in inputs]
    arrays.launch(gpu, inputs[0].size, *map(arrays.as_bits, on_gpu), *scalars)
    return on_cpu, [arrays.to_host(x) for x in on_gpu]


@pytest.mark.parametrize("op", reduce.OPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_combine(dtype, op):
    inputs = [values(np.dtype(dtype), seed=0), values(np.dtype(dtype), seed=1)]
    cpu, gpu = on_both(reduce.combine, reduce.combine_cuda, inputs, reduce.OPS[op])
    assert same_bits(cpu[0], gpu[0])
    assert not same_bits(cpu[0], inputs[0])


@pytest.mark.parametrize("op", reduce.OPS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_combine_of_halves(dtype, op):
    inputs = [values(dtype, seed=0), values(dtype, seed=1)]
    cpu, gpu = on_both(half.combine, half.combine_cuda, inputs, half.FORMATS[dtype], reduce.OPS[op])
    assert same_bits(cpu[0], gpu[0])
    assert not same_bits(cpu[0], inputs[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_divide(dtype):
    inputs = [values(np.dtype(dtype))]
    cpu, gpu = on_both(reduce.divide, reduce.divide_cuda, inputs, inputs[0].dtype.type(3))
    assert same_bits(cpu[0], gpu[0])
    assert not same_bits(cpu[0], inputs[0])


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_divide_of_halves(dtype):
    inputs = [values(dtype)]
    cpu, gpu = on_both(half.divide, half.divide_cuda, inputs, half.FORMATS[dtype], np.float32(3))
    assert same_bits(cpu[0], gpu[0])
    assert not same_bits(cpu[0], inputs[0])


def steps_on_both(optimizer, dtype):
    """Parameters and states after three steps on the host, and after three on the device."""
    rng = np.random.default_rng(5)
    params, *grads = (rng.standard_normal(100).astype(dtype) for _ in range(4))
    grads[1][:4] = 0.0, np.inf, np.nan, 1e-38

    def steps(on):
        held = [on(params.copy()), *(on(np.zeros(100, dtype)) for _ in optimizer.state_names)]
        for step, grad in enumerate(grads, start=1):
            optimizer.update(held[0], on(grad.copy()), tuple(held[1:]), step=step, scale=0.3, lr=0.1 / step)
        return list(map(arrays.to_host, held))

    return steps(np.asarray), steps(devicedouble.asarray), params


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", [
    AdamW(), AdamW(betas=(0.0, 0.5), eps=1e-3, weight_decay=0.0), SGD(weight_decay=0.1), SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True, weight_decay=0.1), AdamW(amsgrad=True), Adam(weight_decay=0.1),
    Adam(weight_decay=0.1, amsgrad=True), Adagrad(weight_decay=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    Lion(weight_decay=0.1),
], ids=repr)
def test_optimizers(optimizer, dtype):
    on_cpu, on_gpu, start = steps_on_both(optimizer, dtype)
    assert all(map(same_bits, on_cpu, on_gpu))
    assert not np.array_equal(on_cpu[0], start)


@pytest.mark.parametrize("kind", norms.NORMS.values(), ids=norms.NORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_norms(dtype, kind):
    vector = np.random.default_rng(3).standard_normal(160).astype(dtype)
    pieces = [norms.Piece(0, 16, 77, 0), norms.Piece(2, 0, 1, 61), norms.Piece(3, 0, 98, 62)]
    on_cpu = norms.PartialNorms(pieces, kind).sums(vector)
    on_gpu = norms.PartialNorms(pieces, kind).sums(devicedouble.asarray(vector))
    assert on_cpu.tobytes() == on_gpu.tobytes()
    used = np.abs(vector[:160].astype(np.float64))
    expected = {norms.ONE: used.sum(), norms.TWO: (used**2).sum(), norms.MOST: used.max()}[kind]
    assert np.isclose(on_cpu.max() if kind == norms.MOST else on_cpu.sum(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("cpu", "gpu"), [
    (loops.write_scaled, loops.write_scaled_cuda), (loops.add_scaled, loops.add_scaled_cuda),
])
def test_scaled(cpu, gpu, dtype):
    inputs = [values(np.dtype(dtype), seed=0), values(np.dtype(dtype), seed=1)]
    on_cpu, on_gpu = on_both(cpu, gpu, inputs, dtype(0.3))
    assert same_bits(on_cpu[0], on_gpu[0])
    assert not same_bits(on_cpu[0], inputs[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lamb(dtype):
    rng = np.random.default_rng(11)
    p, g = rng.standard_normal((2, 100)).astype(dtype)
    table, lengths = np.array([[90, 0, 7], [3, 10, 0], [5, 20, 61], [0, 99, 1]]), np.array([0.5, 9.0, -0.25, 1 / 3])
    optimizer, results = lamb.LAMB(weight_decay=0.1), []
    for on in (np.asarray, devicedouble.asarray):
        held = [on(p.copy()), on(g.copy()), on(np.zeros(100, dtype)), on(np.zeros(100, dtype))]
        optimizer.update(held[0], held[1], tuple(held[2:]), step=3, scale=0.3)
        optimizer.move(held[0], held[1], table, lengths)
        optimizer.move(held[0], held[1], table[:0], lengths[:0])
        results.append([arrays.to_host(array) for array in held])
    assert all(map(same_bits, *results))
    moved = np.flatnonzero(results[0][0] != p)
    assert set(moved) == {0, *range(5, 66), *range(90, 97)}
    r = results[0][1]
    assert results[0][0][0] == p[0] - dtype(1 / 3) * r[99] and results[0][0][90] == p[90] - dtype(0.5) * r[0]


TESTED = {
    reduce.combine_cuda, reduce.divide_cuda, half.combine_cuda, half.divide_cuda, loops.write_scaled_cuda,
    loops.add_scaled_cuda, norms.sums_cuda, adamw.adamw_cuda, adamw.adamw_amsgrad_cuda, adam.adam_cuda,
    adam.adam_amsgrad_cuda, adagrad.adagrad_cuda, lion.lion_cuda, lamb.direction_cuda,
    lamb.move_cuda, sgd.sgd_cuda, sgd.momentum_cuda,
}


def test_every_kernel_is_among_those_tested_here():
    modules = [found.name for found in pkgutil.walk_packages(hpczero.__path__, "hpczero.")]
    kernels = {
        kernel
        for name in modules if name != "hpczero.__main__"
        for kernel in getattr(importlib.import_module(name), "CUDA_SIGNATURES", {})
    }
    assert sorted(kernel.__qualname__ for kernel in kernels - TESTED) == []
