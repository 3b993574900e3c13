"""The models compute on device arrays, in the stand-in for CuPy, what they compute on NumPy arrays."""

from __future__ import annotations

import devicedouble
import numpy as np
import pytest

from hpczero import arrays
from hpczero.models import mlp, transformer


def text(rng):
    model = transformer.build(vocabulary=7, sequence_length=5, width=8, depth=2, heads=2)
    return model, rng.integers(0, 7, (3, 5)), rng.integers(0, 7, (3, 5))


def regression(rng):
    model = mlp.build(num_inputs=3, num_outputs=2, task="regression", width=4, depth=2)
    return model, rng.standard_normal((6, 3)), rng.standard_normal((6, 2))


def classification(rng):
    model = mlp.build(num_inputs=3, num_outputs=4, task="classification", width=4, depth=1)
    return model, rng.standard_normal((6, 3)), rng.integers(0, 4, 6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", [text, regression, classification])
def test_loss_and_gradients_are_the_same_bits_and_stay_on_the_device(case, dtype):
    rng = np.random.default_rng(1)
    model, x, target = case(rng)
    if x.dtype.kind == "f":
        x, target = x.astype(dtype), target if target.dtype.kind == "i" else target.astype(dtype)
    # Parameters that are zero at first would hide the gradients below them.
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in model.shapes.items()}

    def run(params, x, target):
        y, saved = model.forward(params, x)
        loss, dy = model.loss(y, target)
        return loss, dict(model.backward(params, saved, dy))

    loss, grads = run(params, x, target)
    moved = {name: devicedouble.asarray(value) for name, value in params.items()}
    device_loss, device_grads = run(moved, devicedouble.asarray(x), devicedouble.asarray(target))
    assert device_loss == loss
    assert all(map(arrays.is_device, device_grads.values()))
    assert {name: arrays.to_host(grad).tobytes() for name, grad in device_grads.items()} == {
        name: grad.tobytes() for name, grad in grads.items()
    }
