"""Models: names and order of their parameters, first values, what backward hands out when, and that they learn."""

from __future__ import annotations

import dataclasses
import math

import devicedouble
import numpy as np
import pytest

from hpczero.errors import ConfigError
from hpczero.models import Model, cross_entropy, mean_squared_error, mlp, transformer
from hpczero.models.gelu import Gelu
from hpczero.models.linear import Linear


def gpt(depth=2):
    return transformer.build(vocabulary=13, sequence_length=7, width=6, depth=depth, heads=3)


def tokens(*shape):
    return np.random.default_rng(0).integers(0, 13, shape)


MODELS = {
    "transformer": (gpt(), tokens(3, 7), tokens(3, 7)),
    "regression": (
        mlp.build(num_inputs=3, num_outputs=2, task="regression", width=5, depth=2),
        np.random.default_rng(0).standard_normal((7, 3)), np.random.default_rng(1).standard_normal((7, 2)),
    ),
    "classification": (
        mlp.build(num_inputs=3, num_outputs=4, task="classification", width=5, depth=1),
        np.random.default_rng(0).standard_normal((7, 3)), np.random.default_rng(1).integers(0, 4, 7),
    ),
    "linear": (
        mlp.build(num_inputs=3, num_outputs=1, task="regression", width=5, depth=0),
        np.random.default_rng(0).standard_normal((7, 3)), np.random.default_rng(1).standard_normal(7),
    ),
}
each_model = pytest.mark.parametrize("model, x, target", MODELS.values(), ids=MODELS)


def loss_and_gradients(model, params, x, target):
    y, saved = model.forward(params, x)
    loss, dy = model.loss(y, target)
    return loss, dict(model.backward(params, saved, dy))


@each_model
def test_gradients_of_the_whole_model_agree_with_central_differences(model, x, target):
    params = model.init(0, np.float64)
    _, grads = loss_and_gradients(model, params, x, target)
    rng = np.random.default_rng(2)
    for name, grad in grads.items():
        direction = rng.standard_normal(grad.shape)
        above, below = (
            loss_and_gradients(model, params | {name: params[name] + step * direction}, x, target)[0]
            for step in (1e-5, -1e-5)
        )
        assert (above - below) / 2e-5 == pytest.approx(float((grad * direction).sum()), rel=1e-6, abs=1e-10), name


@each_model
def test_first_values_stand_in_forward_order_under_full_names(model, x, target):
    params = model.init(0, np.float32)
    assert list(params) == list(model.shapes)
    assert {name: value.shape for name, value in params.items()} == model.shapes
    assert {value.dtype for value in params.values()} == {np.dtype(np.float32)}


@each_model
def test_backward_hands_out_every_gradient_once_in_the_reverse_of_the_forward_order(model, x, target):
    params = model.init(0, np.float32)
    y, saved = model.forward(params, x)
    found = list(model.backward(params, saved, model.loss(y, target)[1]))
    assert [name for name, _ in found] == list(reversed(model.shapes))
    assert {name: grad.shape for name, grad in found} == model.shapes
    assert {grad.dtype for _, grad in found} == {np.dtype(np.float32)}


@each_model
def test_a_model_runs_on_read_only_parameters_and_on_device_arrays_with_the_same_bits(model, x, target):
    params = model.init(0, np.float32)
    for value in params.values():
        value.flags.writeable = False
    loss, grads = loss_and_gradients(model, params, x, target)
    on_device = {name: devicedouble.asarray(value) for name, value in params.items()}
    moved = devicedouble.asarray(x), devicedouble.asarray(target)
    loss_device, grads_device = loss_and_gradients(model, on_device, *moved)
    assert loss_device == loss
    assert all(np.array_equal(grads_device[name].get(), grads[name]) for name in grads)


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 9])
def test_bits_do_not_depend_on_where_in_memory_parameters_and_samples_lie(offset):
    gpt_33 = transformer.build(vocabulary=64, sequence_length=33, width=32, depth=1, heads=2)
    table = mlp.build(num_inputs=33, num_outputs=5, task="classification", width=37, depth=2)
    rng = np.random.default_rng(0)
    for model, x, target in (
        (gpt_33, rng.integers(0, 64, (5, 33)), rng.integers(0, 64, (5, 33))),
        (table, rng.standard_normal((37, 33)).astype(np.float32), rng.integers(0, 5, 37)),
    ):
        params = model.init(0)
        loss, grads = loss_and_gradients(model, params, x, target)
        moved = {name: shifted(value, offset) for name, value in params.items()}
        loss_moved, grads_moved = loss_and_gradients(model, moved, shifted(x, offset), target)
        assert loss_moved == loss
        assert all(np.array_equal(grads_moved[name], grads[name]) for name in grads)


def shifted(x, offset):
    """A copy of `x` that starts `offset` elements into a buffer, as a parameter does in a flat one."""
    copy = np.zeros(x.size + offset, x.dtype)[offset:].reshape(x.shape)
    copy[...] = x
    return copy


@each_model
def test_a_rank_without_samples_contributes_zeros(model, x, target):
    loss, grads = loss_and_gradients(model, model.init(0), x[:0], target[:0])
    assert loss == 0.0 and not any(grad.any() for grad in grads.values())


@each_model
def test_uneven_parts_weighted_by_their_samples_give_the_gradient_of_the_whole_batch(model, x, target):
    params = model.init(0, np.float64)
    loss, grads = loss_and_gradients(model, params, x, target)
    parts = [
        (len(part), *loss_and_gradients(model, params, part, goal))
        for part, goal in ((x[:1], target[:1]), (x[1:], target[1:]))
    ]
    assert sum(weight * value for weight, value, _ in parts) / len(x) == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        mean = sum(weight * part[name] for weight, _, part in parts) / len(x)
        np.testing.assert_allclose(mean, grad, rtol=1e-9, atol=1e-13, err_msg=name)


def test_a_seed_gives_the_same_first_values_every_time_and_another_seed_others():
    first, again, other = gpt().init(3), gpt().init(3), gpt().init(4)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["head.weight"], other["head.weight"])


def test_first_values_in_float32_are_those_of_float64_rounded():
    wide, narrow = gpt().init(0, np.float64), gpt().init(0, np.float32)
    assert all(np.array_equal(narrow[name], wide[name].astype(np.float32)) for name in wide)


def test_a_layer_that_is_added_changes_the_first_values_of_no_other():
    few = Model((("first", Linear(4, 4)), ("last", Linear(4, 2))), mean_squared_error)
    more = Model((("first", Linear(4, 4)), ("between", Linear(4, 4)), ("last", Linear(4, 2))), mean_squared_error)
    before, after = few.init(0), more.init(0)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not np.array_equal(after["first.weight"], after["between.weight"])


def test_a_parameter_of_another_size_changes_the_first_values_of_no_other():
    large = transformer.build(vocabulary=26, sequence_length=7, width=6, depth=2, heads=3).init(0)
    differ = [name for name, value in gpt().init(0).items() if not np.array_equal(value, large[name])]
    assert differ == ["embedding.token", "head.weight", "head.bias"]


def test_no_two_parameters_of_a_transformer_start_with_the_same_random_numbers():
    params = [value for name, value in gpt().init(0, np.float64).items() if not name.endswith(("bias", "gain"))]
    ratios = {round(value.flat[0] / value.flat[1], 9) for value in params}      # what does not depend on the scale
    assert len(ratios) == len(params) == 2 + 2 * 4 + 1


def test_the_transformer_has_the_parameters_of_a_gpt():
    model = transformer.build(vocabulary=256, sequence_length=64, width=96, depth=2, heads=4)
    width, blocks = 96, 2 * (12 * 96**2 + 13 * 96)
    assert sum(math.prod(shape) for shape in model.shapes.values()) == (
        (256 + 64) * width + blocks + 2 * width + (width + 1) * 256
    )
    assert [name for name, _ in model.layers] == ["embedding", "block0", "block1", "norm", "head"]


def test_no_output_of_the_transformer_depends_on_a_later_token():
    model, x = gpt(), tokens(1, 7)
    params = model.init(0, np.float64)
    y, _ = model.forward(params, x)
    for position in range(7):
        changed = x.copy()
        changed[:, position:] = (changed[:, position:] + 1) % 13
        moved, _ = model.forward(params, changed)
        assert np.array_equal(moved[:, :position], y[:, :position])
        assert not np.array_equal(moved[:, position], y[:, position])


def test_a_sequence_may_be_shorter_than_the_model_allows_but_not_longer():
    model = transformer.build(vocabulary=13, sequence_length=1, width=6, depth=1, heads=1)
    assert gpt().forward(gpt().init(0), tokens(2, 3))[0].shape == (2, 3, 13)
    with pytest.raises(ConfigError, match="sequences of 5 tokens, but positions for 1 only"):
        model.forward(model.init(0), tokens(2, 5))


def test_a_layers_gradients_are_out_before_the_layer_below_is_run():
    class Spy(Gelu):
        def backward(self, params, saved, dy):
            happened.append("spy ran")
            return super().backward(params, saved, dy)

    happened: list[str] = []
    model = Model((("bottom", Linear(3, 3)), ("spy", Spy()), ("top", Linear(3, 1))), mean_squared_error)
    params = model.init(0)
    y, saved = model.forward(params, np.ones((2, 3), np.float32))
    for name, _ in model.backward(params, saved, np.ones_like(y)):
        happened.append(name)
    assert happened == ["top.bias", "top.weight", "spy ran", "bottom.bias", "bottom.weight"]


def test_activation_bytes_count_each_buffer_once_and_a_view_as_the_whole_that_it_keeps_alive():
    model = MODELS["linear"][0]
    a, b = np.zeros(10), np.zeros((4, 5), np.float32)
    saved = [a, (a, {"part": a[2:4], "turned": b.T}), None, 7, np.zeros(0)]
    assert model.activation_bytes(saved) == 80 + 80
    device = devicedouble.asarray(b)
    assert model.activation_bytes([device, device[1:], device.reshape(-1), devicedouble.asarray(a)]) == 80 + 80


def test_activation_bytes_of_a_perceptron_are_its_input_and_three_arrays_per_hidden_layer():
    model = mlp.build(num_inputs=3, num_outputs=2, task="regression", width=5, depth=2)
    x = np.zeros((7, 3), np.float32)
    _, saved = model.forward(model.init(0), x)
    # The first linear layer keeps x. A GELU keeps its input and its sigmoid; the next linear layer keeps its output.
    assert model.activation_bytes(saved) == 4 * 7 * 3 + 2 * 3 * 4 * 7 * 5


def test_a_table_of_float64_does_not_widen_float32_parameters():
    model, x, target = MODELS["regression"]
    assert x.dtype == target.dtype == np.float64
    y, saved = model.forward(model.init(0, np.float32), x)
    _, dy = model.loss(y, target)
    assert y.dtype == dy.dtype == np.float32
    assert {grad.dtype for _, grad in model.backward(model.init(0, np.float32), saved, dy)} == {np.dtype(np.float32)}


def trained(model, x, target, lr, steps):
    """The losses of plain gradient descent, first and last."""
    params = model.init(0, np.float64)
    losses = []
    for _ in range(steps):
        loss, grads = loss_and_gradients(model, params, x, target)
        losses.append(loss)
        for name, grad in grads.items():
            params[name] -= lr * grad
    return losses[0], losses[-1]


def test_a_perceptron_learns_a_curve_that_no_line_fits():
    x = np.linspace(-1, 1, 64)[:, None]
    line = mlp.build(num_inputs=1, num_outputs=1, task="regression", width=16, depth=0)
    curve = mlp.build(num_inputs=1, num_outputs=1, task="regression", width=16, depth=2)
    assert trained(line, x, x**2, lr=0.2, steps=400)[1] > 0.05
    assert trained(curve, x, x**2, lr=0.2, steps=400)[1] < 0.005


def test_a_perceptron_learns_classes_that_no_line_separates():
    x = np.random.default_rng(0).uniform(-1, 1, (128, 2))
    target = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    line = mlp.build(num_inputs=2, num_outputs=2, task="classification", width=16, depth=0)
    curve = mlp.build(num_inputs=2, num_outputs=2, task="classification", width=16, depth=2)
    assert trained(line, x, target, lr=0.5, steps=400)[1] > 0.6
    assert trained(curve, x, target, lr=0.5, steps=400)[1] < 0.2


def test_a_transformer_learns_to_look_two_tokens_back():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 4, (16, 12))
    text[:, 2:] = text[:, :1]                       # from the third token on: the first one again, past the second
    model = transformer.build(vocabulary=4, sequence_length=11, width=16, depth=1, heads=2)
    first, last = trained(model, text[:, :-1], text[:, 1:], lr=0.5, steps=150)
    guessed = math.log(4) / 11                      # the second token is random; the ten after it are not
    assert first > guessed + 0.5 and last < guessed + 0.05


@pytest.mark.parametrize("build, changed, message", [
    (transformer.build, {"heads": 5}, "5 heads do not divide the width 6; the nearest that do: 6"),
    (transformer.build, {"width": 0}, "width is 0; at least 1 is needed"),
    (mlp.build, {"task": "text"}, "task 'text' is not possible; it does regression and classification"),
    (mlp.build, {"num_outputs": 0}, "num_outputs is 0; at least 1 is needed"),
    (mlp.build, {"depth": -1}, "depth is -1"),
])
def test_sizes_that_make_no_model_are_refused_by_name(build, changed, message):
    good = {
        transformer.build: {"vocabulary": 13, "sequence_length": 7, "width": 6, "depth": 2, "heads": 3},
        mlp.build: {"num_inputs": 3, "num_outputs": 2, "task": "regression", "width": 5, "depth": 2},
    }
    build(**good[build])
    with pytest.raises(ConfigError, match=message):
        build(**good[build] | changed)


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_a_dtype_that_layers_do_not_compute_in_is_refused(dtype):
    with pytest.raises(ConfigError, match=f"cannot compute in {np.dtype(dtype)}; float32 and float64 are possible"):
        gpt().init(0, dtype)


def test_two_layers_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="2 layers are called 'same'"):
        Model((("same", Linear(2, 2)), ("same", Linear(2, 2))), cross_entropy)


def test_a_model_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpt().layers = ()


def test_a_layer_without_a_method_or_with_gradients_of_other_names_is_named():
    class Half:
        shapes = {"w": (2,)}

        def forward(self, params, x):
            return x, None

        def backward(self, params, saved, dy):
            return dy, {"v": np.zeros(2)}

    with pytest.raises(ConfigError, match=r"layer 'one' \(Half\) has no init"):
        Model(layers=(("one", Half()),), loss=lambda y, target: (0.0, y))
    Half.init = lambda self, rng, dtype: {"w": np.zeros(2, dtype)}
    model = Model(layers=(("one", Half()),), loss=lambda y, target: (0.0, y))
    y, saved = model.forward({"one.w": np.zeros(2)}, np.zeros(2))
    with pytest.raises(ConfigError, match=r"backward of layer 'one' gave gradients of \['v'\]"):
        list(model.backward({"one.w": np.zeros(2)}, saved, y))
