"""The activation GELU, x Phi(x), in its approximation by tanh.

Hendrycks and Gimpel, "Gaussian error linear units", arXiv 1606.08415 (2016), section 2: x/2 (1 + tanh u) with u =
sqrt(2 / pi) (x + 0.044715 x^3). Written here as x s with s = sigmoid(2u), the same number, since NumPy's exp is
cheaper than its tanh. With s known, the derivative is s + x s (1 - s) 2u', a polynomial apart from s: no second exp.
Memory-bound but for the exp: eight passes over the activations forward, nine backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hpczero.arrays import Array, namespace

# 2u = x (_LINEAR + _CUBIC x^2)
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


class Gelu:
    """Element by element, any shape; no parameters."""

    def __init__(self):
        self.shapes: dict[str, tuple[int, ...]] = {}

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        return {}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, tuple[Array, Array]]:
        xp = namespace(x)
        s = x * x
        s *= -_CUBIC
        s -= _LINEAR
        s *= x
        with np.errstate(over="ignore"):      # exp(-2u) is infinite for x below -10 (float32): s is 0 then, rightly
            xp.exp(s, out=s)
        s += 1.0
        xp.divide(1.0, s, out=s)
        return x * s, (x, s)

    def backward(
        self, params: Mapping[str, Array], saved: tuple[Array, Array], dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        x, s = saved
        xp = namespace(x)
        dx = x * x
        dx *= 3 * _CUBIC
        dx += _LINEAR
        dx *= x                               # x 2u'
        fall = s * s
        fall -= s                             # -s (1 - s)
        dx *= fall
        xp.subtract(s, dx, out=dx)
        dx *= dy
        return dx, {}
