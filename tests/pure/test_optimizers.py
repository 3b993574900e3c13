"""Optimizer kernels against plain NumPy, bit for bit, and their hyperparameters."""

from __future__ import annotations

import numpy as np
import pytest

from hpczero.errors import ConfigError
from hpczero.optim import SGD, AdamW
from hpczero.optim import adamw as adamw_file

OPTIMIZERS = [AdamW(), AdamW(lr=0.1, betas=(0.5, 0.9), weight_decay=0.0), SGD(lr=0.1), SGD(lr=0.1, weight_decay=0.3),
              SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def by_the_book(optimizer, p, g, state, step, scale, kind):
    """The published formula with every operation rounded to `kind`, as NumPy does it."""
    g = kind(scale) * g
    lr, decay = kind(optimizer.lr), kind(optimizer.weight_decay)
    if isinstance(optimizer, AdamW):
        beta1, beta2 = optimizer.betas
        m = kind(beta1) * state[0] + kind(1 - beta1) * g
        v = kind(beta2) * state[1] + kind(1 - beta2) * g * g
        direction = m * kind(1 / (1 - beta1**step)) / (np.sqrt(v * kind(1 / (1 - beta2**step))) + kind(optimizer.eps))
        return p - lr * (direction + decay * p), (m, v)
    g = g + decay * p
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
    state = tuple(np.zeros(1003, kind) for _ in optimizer.state_names)
    expected, expected_state = p.copy(), tuple(array.copy() for array in state)
    for step in range(1, 11):
        g = rng.standard_normal(1003).astype(kind)
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
    whole, whole_state = start.copy(), tuple(np.zeros(257, np.float32) for _ in optimizer.state_names)
    optimizer.update(whole, g, whole_state, step=1)
    for cut in range(0, 258):
        p, state = start.copy(), tuple(np.zeros(257, np.float32) for _ in optimizer.state_names)
        for part in (slice(0, cut), slice(cut, 257)):
            optimizer.update(p[part], g[part], tuple(array[part] for array in state), step=1)
        assert p.tobytes() == whole.tobytes()


def test_a_learning_rate_of_one_step_overrides_the_optimizers_own():
    p, q = np.ones(3), np.ones(3)
    SGD(lr=0.1).update(p, np.ones(3), (), step=1, lr=0.5)
    SGD(lr=0.5).update(q, np.ones(3), (), step=1)
    assert np.array_equal(p, q)


def test_the_adamw_loop_is_vectorised_and_stays_in_float32():
    arrays = (np.zeros(8, np.float32),) * 4
    fresh = adamw_file.numba.njit(nogil=True, error_model="numpy")(adamw_file.adamw_cpu.py_func)
    fresh(*(array.copy() for array in arrays), *[np.float32(1)] * 10)
    code = next(iter(fresh.inspect_asm().values()))
    assert "sqrtps" in code and "divps" in code
    assert "cvtps2pd" not in code and "cvtss2sd" not in code


@pytest.mark.parametrize("make", [
    lambda: AdamW(lr=-1), lambda: AdamW(lr=float("nan")), lambda: AdamW(lr="1e-3"), lambda: AdamW(lr=True),
    lambda: AdamW(betas=(0.9, 1.0)), lambda: AdamW(betas=(0.9,)), lambda: AdamW(betas=0.9), lambda: AdamW(eps=0),
    lambda: AdamW(weight_decay=-0.1), lambda: SGD(momentum=1.0), lambda: SGD(momentum=-0.1), lambda: SGD(nesterov=True),
])
def test_hyperparameters_that_cannot_train_are_refused_with_what_is_allowed(make):
    with pytest.raises(ConfigError):
        make()
