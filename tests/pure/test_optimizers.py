"""Optimizer kernels against plain NumPy, bit for bit, and their hyperparameters."""

from __future__ import annotations

import dataclasses
import inspect
import re

import numba
import numpy as np
import pytest

from hpczero.errors import ConfigError
from hpczero.optim import SGD, Adagrad, Adam, AdamW, Lion, adagrad, adam, adamw, lion, sgd

# With beta2 = 0.9 the mean square falls as well as rises within ten steps, which is where amsgrad differs.
OPTIMIZERS = [
    AdamW(), AdamW(lr=0.1, betas=(0.5, 0.9), weight_decay=0.0), AdamW(lr=0.1, betas=(0.5, 0.9), amsgrad=True),
    Adam(), Adam(lr=0.1, betas=(0.5, 0.9), weight_decay=0.3),
    Adam(lr=0.1, betas=(0.5, 0.9), weight_decay=0.3, amsgrad=True),
    Adagrad(), Adagrad(lr=0.1, lr_decay=0.5, weight_decay=0.3, initial_accumulator_value=0.1),
    Lion(), Lion(lr=0.1, betas=(0.5, 0.9), weight_decay=0.3),
    SGD(lr=0.1), SGD(lr=0.1, weight_decay=0.3),
    SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
]


def fresh_state(optimizer, count, kind):
    """The arrays as a caller hands them to the first step."""
    return tuple(np.full(count, optimizer.state_starts.get(name, 0), kind) for name in optimizer.state_names)


def by_the_book(optimizer, p, g, state, step, scale, kind):
    """The published formula with every operation rounded to `kind`, as NumPy does it."""
    g = kind(scale) * g
    lr, decay = kind(optimizer.lr), kind(optimizer.weight_decay)
    if isinstance(optimizer, Lion):
        beta1, beta2 = optimizer.betas
        sign = np.sign(kind(beta1) * state[0] + kind(1 - beta1) * g)
        return p - lr * (sign + decay * p), (kind(beta2) * state[0] + kind(1 - beta2) * g,)
    if not isinstance(optimizer, AdamW):
        g = g + decay * p
    if isinstance(optimizer, Adam | AdamW):
        beta1, beta2 = optimizer.betas
        m = kind(beta1) * state[0] + kind(1 - beta1) * g
        v = kind(beta2) * state[1] + kind(1 - beta2) * g * g
        tops = (np.maximum(state[2], v),) if optimizer.amsgrad else ()
        largest = tops[0] if tops else v
        step_by = m * kind(1 / (1 - beta1**step)) / (np.sqrt(largest * kind(1 / (1 - beta2**step))) + kind(optimizer.eps))
        return p - lr * (step_by + decay * p if isinstance(optimizer, AdamW) else step_by), (m, v, *tops)
    if isinstance(optimizer, Adagrad):
        total = state[0] + g * g
        lr = kind(optimizer.lr / (1 + (step - 1) * optimizer.lr_decay))
        return p - lr * (g / (np.sqrt(total) + kind(optimizer.eps))), (total,)
    if not state:
        return p - lr * g, ()
    buffer = kind(optimizer.momentum) * state[0] + g
    if optimizer.nesterov:
        return p - lr * (g + kind(optimizer.momentum) * buffer), (buffer,)
    return p - lr * buffer, (buffer,)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_ten_steps_equal_plain_numpy_bit_for_bit(optimizer, kind):
    rng = np.random.default_rng(0)
    p = rng.standard_normal(1003).astype(kind)
    state = fresh_state(optimizer, 1003, kind)
    expected, expected_state = p.copy(), tuple(array.copy() for array in state)
    for step in range(1, 11):
        g = rng.standard_normal(1003).astype(kind)
        g[:3] = 0       # as in an embedding, where no sample used a row yet
        kept = g.copy()
        optimizer.update(p, g, state, step=step, scale=0.3)
        expected, expected_state = by_the_book(optimizer, expected, g, expected_state, step, 0.3, kind)
        assert np.array_equal(p, expected)
        assert all(np.array_equal(mine, other) for mine, other in zip(state, expected_state, strict=True))
        assert np.array_equal(g, kept)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_bits_do_not_depend_on_where_a_shard_is_cut(optimizer):
    rng = np.random.default_rng(1)
    start, g = rng.standard_normal(257).astype(np.float32), rng.standard_normal(257).astype(np.float32)
    whole, whole_state = start.copy(), fresh_state(optimizer, 257, np.float32)
    optimizer.update(whole, g, whole_state, step=1)
    for cut in range(0, 258):
        p, state = start.copy(), fresh_state(optimizer, 257, np.float32)
        for part in (slice(0, cut), slice(cut, 257)):
            optimizer.update(p[part], g[part], tuple(array[part] for array in state), step=1)
        assert p.tobytes() == whole.tobytes()
        assert all(mine.tobytes() == other.tobytes() for mine, other in zip(state, whole_state, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_learning_rate_of_one_step_overrides_the_optimizers_own(optimizer):
    p, q, g = np.ones(3), np.ones(3), np.full(3, 0.5)
    optimizer.update(p, g, fresh_state(optimizer, 3, np.float64), step=2, lr=0.25)
    dataclasses.replace(optimizer, lr=0.25).update(q, g, fresh_state(optimizer, 3, np.float64), step=2)
    assert np.array_equal(p, q)
    optimizer.update(p, g, fresh_state(optimizer, 3, np.float64), step=2, lr=0.0)
    assert np.array_equal(p, q)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_gradient_that_is_nan_makes_its_element_nan_and_no_other(optimizer, kind):
    p, g, state = np.ones(37, kind), np.ones(37, kind), fresh_state(optimizer, 37, kind)
    optimizer.update(p, g, state, step=1)
    g[[5, 36]] = np.nan         # in the vectorised body of a loop, and in its remainder
    optimizer.update(p, g, state, step=2)
    assert all(np.flatnonzero(np.isnan(array)).tolist() == [5, 36] for array in (p, *state))


def test_lion_takes_the_sign_of_either_zero_to_be_zero():
    start = np.array([0.0, -0.0, 0.0, -0.0, 2.0, 2.0])
    p, zeros = start.copy(), np.array([0.0, 0.0, -0.0, -0.0, 0.0, -0.0])
    Lion().update(p, zeros, (zeros.copy(),), step=1)
    assert p.tobytes() == start.tobytes()


def test_lion_moves_by_the_learning_rate_however_large_the_gradient():
    p = np.zeros(4)
    Lion(lr=0.5).update(p, np.array([1e-300, -1e-300, np.inf, -np.inf]), (np.zeros(4),), step=1)
    assert p.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_amsgrad_divides_by_the_largest_mean_square_so_far():
    state = tuple(np.zeros(1) for _ in range(3))
    for step, gradient in enumerate([3.0, 1.0, 2.0, 0.0], start=1):
        AdamW(betas=(0.0, 0.0), amsgrad=True).update(np.ones(1), np.array([gradient]), state, step=step)
    assert [array.item() for array in state] == [0.0, 0.0, 9.0]


def test_which_states_there_are_and_where_they_start():
    assert AdamW().state_names == Adam().state_names == ("exp_avg", "exp_avg_sq")
    assert AdamW(amsgrad=True).state_names == Adam(amsgrad=True).state_names == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert Adagrad().state_names == ("sum",)
    assert Lion().state_names == ("exp_avg",)
    assert all(not optimizer.state_starts for optimizer in (AdamW(), AdamW(amsgrad=True), Adam(), Adagrad(), Lion()))
    assert Adagrad(initial_accumulator_value=0.1).state_starts == {"sum": 0.1}


@pytest.mark.parametrize(("loop", "num_arrays", "instructions"), [
    (adamw.adamw_cpu, 4, ["sqrtps", "divps"]),
    (adamw.adamw_amsgrad_cpu, 5, ["maxps", "sqrtps", "divps"]),
    (adam.adam_cpu, 4, ["sqrtps", "divps"]),
    (adam.adam_amsgrad_cpu, 5, ["maxps", "sqrtps", "divps"]),
    (adagrad.adagrad_cpu, 3, ["sqrtps", "divps"]),
    (lion.lion_cpu, 3, [r"cmp\w*ps", "subps"]),
    (sgd.sgd_cpu, 2, ["mulps", "subps"]),
    (sgd.momentum_cpu, 3, ["mulps", "subps"]),
], ids=lambda value: getattr(value, "__name__", ""))
def test_the_loop_is_vectorised_and_stays_in_float32(loop, num_arrays, instructions):
    num_scalars = len(inspect.signature(loop.py_func).parameters) - num_arrays
    fresh = numba.njit(nogil=True, error_model="numpy")(loop.py_func)
    fresh(*(np.zeros(8, np.float32) for _ in range(num_arrays)), *[np.float32(1)] * num_scalars)
    code = next(iter(fresh.inspect_asm().values()))
    assert [instruction for instruction in instructions if not re.search(instruction, code)] == []
    assert "cvtps2pd" not in code and "cvtss2sd" not in code


@pytest.mark.parametrize("make", [
    lambda: AdamW(lr=-1), lambda: AdamW(lr=float("nan")), lambda: AdamW(lr="1e-3"), lambda: AdamW(lr=True),
    lambda: AdamW(betas=(0.9, 1.0)), lambda: AdamW(betas=(0.9,)), lambda: AdamW(betas=0.9), lambda: AdamW(eps=0),
    lambda: AdamW(weight_decay=-0.1), lambda: Adam(lr=-1), lambda: Adam(betas=(0.9, 1.0)), lambda: Adam(betas="ab"),
    lambda: Adam(betas=(0.9, 0.99, 0.999)), lambda: Adam(eps=0), lambda: Adam(weight_decay=float("inf")),
    lambda: Adagrad(lr=-1), lambda: Adagrad(lr_decay=-0.1), lambda: Adagrad(weight_decay=-0.1), lambda: Adagrad(eps=0),
    lambda: Adagrad(initial_accumulator_value=-0.1), lambda: Lion(lr=None), lambda: Lion(betas=(-0.1, 0.99)),
    lambda: Lion(betas=None), lambda: Lion(weight_decay=-0.1),
    lambda: SGD(momentum=1.0), lambda: SGD(momentum=-0.1), lambda: SGD(nesterov=True),
])
def test_hyperparameters_that_cannot_train_are_refused_with_what_is_allowed(make):
    with pytest.raises(ConfigError):
        make()
