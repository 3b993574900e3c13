"""A linear map with bias, y = x W + b, on the last axis: three matrix products, one forward and two backward.

All leading axes are folded into one first, so that each product is a single BLAS call instead of one per sequence.
First values after LeCun et al., "Efficient BackProp" (1998), section 4.6: a standard deviation of 1 / sqrt(inputs)
keeps the variance of x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hpczero.arrays import Array
from hpczero.models.layer import normal, rows


class Linear:
    """(..., num_inputs) -> (..., num_outputs).

    Parameters
    ----------
    gain : float
        Factor on the first values of the weights.
    """

    def __init__(self, num_inputs: int, num_outputs: int, gain: float = 1.0):
        self.shapes = {"weight": (num_inputs, num_outputs), "bias": (num_outputs,)}
        self.std = gain / math.sqrt(num_inputs)

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        weight = normal(rng, "weight", self.shapes["weight"], self.std, dtype)
        return {"weight": weight, "bias": np.zeros(self.shapes["bias"], dtype)}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
        weight = params["weight"]
        x = x.astype(weight.dtype, copy=False)      # a table read as float64 may meet float32 parameters
        y = rows(x) @ weight
        y += params["bias"]
        return y.reshape(*x.shape[:-1], weight.shape[1]), x

    def backward(self, params: Mapping[str, Array], x: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
        dy = rows(dy)
        dx = dy @ params["weight"].T
        return dx.reshape(x.shape), {"weight": rows(x).T @ dy, "bias": dy.sum(axis=0)}
