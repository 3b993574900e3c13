"""The hand-written gradients, against central differences in float64, and the promises that every layer makes."""

from __future__ import annotations

import math
import warnings

import devicedouble
import numpy as np
import pytest

from hpczero.models import transformer
from hpczero.models.attention import CausalAttention
from hpczero.models.chain import Chain, Residual
from hpczero.models.embedding import Embedding
from hpczero.models.gelu import Gelu
from hpczero.models.layer_norm import LayerNorm
from hpczero.models.linear import Linear
from hpczero.models.losses import cross_entropy, mean_squared_error

BLOCK = dict(transformer.build(vocabulary=2, sequence_length=2, width=6, depth=1, heads=3).layers)["block0"]

# A layer, and the shape of an input for it: odd sizes, so that no two axes can be mistaken for each other.
LAYERS = {
    "linear": (Linear(5, 3), (7, 5)),
    "linear_on_sequences": (Linear(5, 3), (2, 7, 5)),
    "layer_norm": (LayerNorm(5), (7, 5)),
    "layer_norm_on_sequences": (LayerNorm(3), (2, 5, 3)),
    "gelu": (Gelu(), (7, 5)),
    "attention_one_head": (CausalAttention(1), (3, 5, 9)),
    "attention_three_heads": (CausalAttention(3), (2, 7, 27)),
    "attention_one_token": (CausalAttention(1), (2, 1, 9)),
    "embedding": (Embedding(11, 7, 3, std=1.0), (3, 7)),
    "embedding_of_a_short_sequence": (Embedding(11, 7, 3, std=1.0), (3, 5)),
    "chain": (Chain(norm=LayerNorm(5), up=Linear(5, 7), gelu=Gelu(), down=Linear(7, 3)), (3, 5)),
    "residual": (Residual(Chain(up=Linear(5, 3), gelu=Gelu(), down=Linear(3, 5))), (3, 5)),
    "block": (BLOCK, (2, 5, 6)),
}
each_layer = pytest.mark.parametrize("layer, shape", LAYERS.values(), ids=LAYERS)


def made_up(layer, shape, dtype=np.float64, seed=0):
    """Parameters (none at zero or one, where mistakes hide), an input and an output gradient."""
    rng = np.random.default_rng(seed)
    params = {
        name: value + 0.3 * rng.standard_normal(value.shape).astype(dtype)
        for name, value in layer.init(rng, dtype).items()
    }
    if isinstance(layer, Embedding):
        x = rng.integers(0, layer.shapes["token"][0], shape)
    else:
        x = rng.standard_normal(shape).astype(dtype)
    y, _ = layer.forward(params, x)
    return params, x, rng.standard_normal(y.shape).astype(dtype)


def central_differences(function, x, step=1e-5):
    """The gradient of the number `function()` by the array `x`, element by element; `x` is moved in place."""
    grad = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + step
        above = function()
        x[index] = kept - step
        grad[index] = (above - function()) / (2 * step)
        x[index] = kept
    return grad


def arrays_in(saved):
    if isinstance(saved, np.ndarray):
        return [saved]
    return [array for part in (saved.values() if isinstance(saved, dict) else saved) for array in arrays_in(part)]


@each_layer
def test_gradients_agree_with_central_differences(layer, shape):
    params, x, dy = made_up(layer, shape)

    def loss():
        return float((layer.forward(params, x)[0] * dy).sum())

    dx, grads = layer.backward(params, layer.forward(params, x)[1], dy)
    assert set(grads) == set(layer.shapes)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, central_differences(loss, params[name]), rtol=1e-7, atol=1e-8, err_msg=name)
    if isinstance(layer, Embedding):
        assert dx is None
    else:
        np.testing.assert_allclose(dx, central_differences(loss, x), rtol=1e-7, atol=1e-8, err_msg="dx")


@each_layer
def test_first_values_have_the_shapes_that_the_layer_states(layer, shape):
    values = layer.init(np.random.default_rng(0), np.float32)
    assert {name: value.shape for name, value in values.items()} == dict(layer.shapes)
    assert list(values) == list(layer.shapes)


@each_layer
def test_a_layer_writes_to_nothing_that_it_is_given(layer, shape):
    params, x, dy = made_up(layer, shape)
    for array in (*params.values(), x, dy):
        array.flags.writeable = False
    y, saved = layer.forward(params, x)
    for array in arrays_in(saved):
        array.flags.writeable = False
    y.flags.writeable = False       # a neighbour may keep it
    first = layer.backward(params, saved, dy)
    again = layer.backward(params, saved, dy)
    assert all(np.array_equal(first[1][name], again[1][name]) for name in layer.shapes)


@each_layer
def test_gradients_are_memory_of_their_own(layer, shape):
    params, x, dy = made_up(layer, shape)
    y, saved = layer.forward(params, x)
    _, grads = layer.backward(params, saved, dy)
    held = [*params.values(), x, y, dy, *arrays_in(saved)]
    for name, grad in grads.items():
        others = [other for key, other in grads.items() if key != name]
        assert grad.flags.writeable and not any(np.may_share_memory(grad, other) for other in held + others), name


@each_layer
def test_parameters_are_not_kept_for_backward(layer, shape):
    params, x, _ = made_up(layer, shape)
    _, saved = layer.forward(params, x)
    assert not any(np.may_share_memory(kept, value) for kept in arrays_in(saved) for value in params.values())


@each_layer
def test_float32_stays_float32_and_is_close_to_float64(layer, shape):
    params, x, dy = made_up(layer, shape)
    narrow = {name: value.astype(np.float32) for name, value in params.items()}
    y, saved = layer.forward(params, x)
    dx, grads = layer.backward(params, saved, dy)
    y32, saved32 = layer.forward(narrow, x if isinstance(layer, Embedding) else x.astype(np.float32))
    dx32, grads32 = layer.backward(narrow, saved32, dy.astype(np.float32))
    computed = [y32, *grads32.values()] + ([] if dx32 is None else [dx32])
    assert {array.dtype for array in computed} == {np.dtype(np.float32)}
    assert {array.dtype for array in arrays_in(saved32)} <= {np.dtype(np.float32), np.dtype(np.int64)}
    wide = [y, *(grads[name] for name in grads32)] + ([] if dx is None else [dx])
    for a, b in zip(computed, wide, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@each_layer
def test_a_batch_of_no_samples_gives_zero_gradients_without_a_warning(layer, shape):
    params, x, dy = made_up(layer, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, saved = layer.forward(params, x[:0])
        dx, grads = layer.backward(params, saved, dy[:0])
    assert y.shape == dy[:0].shape and (dx is None or dx.shape == x[:0].shape)
    assert {name: grad.shape for name, grad in grads.items()} == dict(layer.shapes)
    assert not any(grad.any() for grad in grads.values())


@each_layer
def test_a_layer_runs_on_device_arrays_and_gives_the_bits_of_the_host(layer, shape):
    params, x, dy = made_up(layer, shape, np.float32)
    on_device = {name: devicedouble.asarray(value) for name, value in params.items()}
    y, saved = layer.forward(params, x)
    dx, grads = layer.backward(params, saved, dy)
    y_device, saved_device = layer.forward(on_device, devicedouble.asarray(x))
    dx_device, grads_device = layer.backward(on_device, saved_device, devicedouble.asarray(dy))
    assert np.array_equal(y_device.get(), y)
    assert dx is None or np.array_equal(dx_device.get(), dx)
    assert all(np.array_equal(grads_device[name].get(), grads[name]) for name in grads)


def test_layer_norm_gives_rows_of_mean_zero_and_variance_one():
    x = 40 + 3 * np.random.default_rng(0).standard_normal((4, 257))
    y, _ = LayerNorm(257).forward({"gain": np.ones(257), "bias": np.zeros(257)}, x)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-5)


def test_gelu_is_the_formula_with_tanh_and_close_to_the_one_with_erf():
    x = np.linspace(-6, 6, 1001)
    y, _ = Gelu().forward({}, x)
    with_tanh = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(y, with_tanh, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(y, [t / 2 * (1 + math.erf(t / math.sqrt(2))) for t in x], atol=5e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_of_huge_numbers_is_zero_or_themselves_without_a_warning(dtype):
    x = np.array([-1e4, -60, -12, 12, 60, 1e4], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, saved = Gelu().forward({}, x)
        dx, _ = Gelu().backward({}, saved, np.ones_like(x))
    np.testing.assert_allclose(y, np.maximum(x, 0), atol=1e-10)
    np.testing.assert_allclose(dx, [0, 0, 0, 1, 1, 1], atol=1e-6)


def test_no_position_of_attention_sees_a_later_one():
    layer, x = CausalAttention(2), np.random.default_rng(0).standard_normal((1, 9, 12))
    y, _ = layer.forward({}, x)
    for position in range(9):
        changed = x.copy()
        changed[:, position:] += 5.0
        assert np.array_equal(layer.forward({}, changed)[0][:, :position], y[:, :position])


def test_attention_is_the_weighted_mean_of_the_paper():
    rng, (length, heads, size) = np.random.default_rng(0), (5, 3, 4)
    x = rng.standard_normal((2, length, 3 * heads * size))
    y, _ = CausalAttention(heads).forward({}, x)
    q, k, v = x.reshape(2, length, 3, heads, size).transpose(2, 0, 3, 1, 4)
    for sequence, head, position in np.ndindex(2, heads, length):
        scores = k[sequence, head, : position + 1] @ q[sequence, head, position] / math.sqrt(size)
        weights = np.exp(scores) / np.exp(scores).sum()
        expected = weights @ v[sequence, head, : position + 1]
        np.testing.assert_allclose(y[sequence, position, head * size:][:size], expected, rtol=1e-12)


def test_attention_survives_scores_that_overflow_exp():
    x = 100 * np.random.default_rng(0).standard_normal((1, 7, 12)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, saved = CausalAttention(1).forward({}, x)
        dx, _ = CausalAttention(1).backward({}, saved, np.ones_like(y))
    assert np.isfinite(y).all() and np.isfinite(dx).all()


def test_the_embedding_gradient_counts_every_occurrence_of_a_token():
    x = np.array([[4, 4, 0], [4, 1, 0]])
    params = {"token": np.zeros((5, 2)), "position": np.zeros((3, 2))}
    dy = np.arange(12.0).reshape(2, 3, 2)        # whole numbers: sums are exact
    _, grads = Embedding(5, 3, 2, std=1.0).backward(params, x, dy)
    expected = np.zeros((5, 2))
    np.add.at(expected, x, dy)
    assert np.array_equal(grads["token"], expected)
    assert np.array_equal(grads["position"], dy[0] + dy[1])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_bytes_may_come_as_any_integer_type(dtype):
    layer = Embedding(256, 4, 3, std=1.0)
    params = layer.init(np.random.default_rng(0), np.float64)
    x = np.array([[0, 255, 7, 255]])
    y, saved = layer.forward(params, x.astype(dtype))
    assert np.array_equal(y, params["token"][x] + params["position"])
    grads = layer.backward(params, saved, np.ones_like(y))[1]
    assert np.array_equal(grads["token"].sum(axis=1), 3.0 * np.bincount(x[0], minlength=256))


LOSSES = {
    "cross_entropy": (cross_entropy, (7, 5), (7,)),
    "cross_entropy_on_sequences": (cross_entropy, (3, 7, 5), (3, 7)),
    "mean_squared_error": (mean_squared_error, (7, 3), (7, 3)),
    "mean_squared_error_of_one_output": (mean_squared_error, (7, 1), (7,)),
}
each_loss = pytest.mark.parametrize("loss, shape, target_shape", LOSSES.values(), ids=LOSSES)


def scores_and_target(loss, shape, target_shape, dtype=np.float64):
    rng = np.random.default_rng(1)
    target = rng.integers(0, shape[-1], target_shape) if loss is cross_entropy else rng.standard_normal(target_shape)
    return rng.standard_normal(shape).astype(dtype), target


@each_loss
def test_the_gradient_of_a_loss_agrees_with_central_differences(loss, shape, target_shape):
    y, target = scores_and_target(loss, shape, target_shape)
    value, dy = loss(y, target)
    assert type(value) is float and dy.shape == y.shape
    np.testing.assert_allclose(dy, central_differences(lambda: loss(y, target)[0], y), rtol=1e-7, atol=1e-9)


@each_loss
def test_means_over_uneven_parts_weighted_by_their_samples_make_the_mean_over_all(loss, shape, target_shape):
    y, target = scores_and_target(loss, shape, target_shape)
    value, dy = loss(y, target)
    parts = [(y[:1], target[:1]), (y[1:], target[1:]), (y[:0], target[:0])]
    found = [(len(part), *loss(part, goal)) for part, goal in parts]
    assert sum(weight * mean for weight, mean, _ in found) / len(y) == pytest.approx(value, rel=1e-13)
    np.testing.assert_allclose(np.concatenate([weight * grad for weight, _, grad in found]) / len(y), dy, rtol=1e-12)


@each_loss
def test_the_loss_of_no_samples_is_zero_without_a_warning(loss, shape, target_shape):
    y, target = scores_and_target(loss, shape, target_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, dy = loss(y[:0], target[:0])
    assert value == 0.0 and type(value) is float and dy.shape == y[:0].shape


@each_loss
def test_a_loss_keeps_float32_writes_to_nothing_and_gives_the_same_bits_on_device_arrays(loss, shape, target_shape):
    y, target = scores_and_target(loss, shape, target_shape, np.float32)
    y.flags.writeable = target.flags.writeable = False
    value, dy = loss(y, target)
    assert dy.dtype == np.float32 and not np.may_share_memory(dy, y)
    value_device, dy_device = loss(devicedouble.asarray(y), devicedouble.asarray(target))
    assert value_device == value and type(value_device) is float and np.array_equal(dy_device.get(), dy)


def test_cross_entropy_is_the_negative_logarithm_of_the_softmax_and_survives_huge_scores():
    y, target = np.array([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]]), np.array([1, 2])
    expected = (-math.log(math.exp(2) / (math.exp(1) + math.exp(2) + math.exp(4))) + math.log(3)) / 2
    assert cross_entropy(y, target)[0] == pytest.approx(expected, rel=1e-14)
    assert cross_entropy(1e4 * y, target)[0] == pytest.approx((2e4 + math.log(3)) / 2, rel=1e-12)


def test_a_target_of_another_size_is_refused_and_never_broadcast():
    with pytest.raises(ValueError):
        mean_squared_error(np.zeros((4, 3)), np.zeros(4))
    with pytest.raises(ValueError):
        cross_entropy(np.zeros((4, 3)), np.zeros(2, np.int64))
