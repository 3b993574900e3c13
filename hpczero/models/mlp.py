"""A multi-layer perceptron for tables and arrays: regression and classification.

Rumelhart, Hinton and Williams, Nature 323 (1986), with GELU between the linear layers. Inputs are taken as they come:
scaling columns to similar ranges is up to the data.
"""

from __future__ import annotations

from hpczero.errors import ConfigError
from hpczero.models.chain import Chain
from hpczero.models.gelu import Gelu
from hpczero.models.linear import Linear
from hpczero.models.losses import cross_entropy, mean_squared_error
from hpczero.models.model import Model

_LOSSES = {"regression": mean_squared_error, "classification": cross_entropy}


def build(*, num_inputs: int, num_outputs: int, task: str, width: int, depth: int) -> Model:
    """(samples, num_inputs) -> (samples, num_outputs): the predicted values, or a score for each class.

    Parameters
    ----------
    task : {"regression", "classification"}
        The loss: mean squared error, or cross-entropy with class numbers 0 … num_outputs - 1.
    width, depth : int
        Size and number of the hidden layers; with depth 0 the model is linear.

    Raises
    ------
    ConfigError
        A size below 1 (depth: below 0), or another task.
    """
    sizes = {"num_inputs": num_inputs, "num_outputs": num_outputs, "width": width}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"mlp: {name} is {value}; at least 1 is needed")
    if depth < 0:
        raise ConfigError(f"mlp: depth is {depth}; the number of hidden layers is 0 or more")
    if task not in _LOSSES:
        raise ConfigError(f"mlp: task {task!r} is not possible; it does {' and '.join(_LOSSES)}")
    widths = [num_inputs, *[width] * depth]
    hidden = [(f"hidden{i}", Chain(linear=Linear(widths[i], width), gelu=Gelu())) for i in range(depth)]
    return Model((*hidden, ("output", Linear(widths[-1], num_outputs))), _LOSSES[task])
