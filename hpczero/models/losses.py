"""Loss functions: (y, target) -> (mean loss, gradient of the mean by y).

The mean runs over the samples at hand, so that ranks with unequal batches are put right by a weight that is their
number of samples. It is added up in float64 and handed out as a Python float. No samples: loss 0.0 and an empty
gradient.
"""

from __future__ import annotations

import math

import numpy as np

from hpczero.arrays import Array, namespace


def cross_entropy(y: Array, target: Array) -> tuple[float, Array]:
    """Mean of -log softmax(y)[target] in nats, over all leading axes (samples, or all tokens of all sequences).

    Parameters
    ----------
    y : (..., classes) float32 or float64
        Scores; the gradient is (softmax(y) - one-hot(target)) / count.
    target : (...) integers below the number of classes
    """
    xp = namespace(y)
    count, classes = math.prod(y.shape[:-1]), y.shape[-1]
    if count == 0:
        return 0.0, xp.zeros_like(y)
    scores = y.reshape(count, classes)
    hit = xp.arange(count), target.reshape(count)
    grad = scores - scores.max(axis=-1, keepdims=True)
    right = grad[hit]
    xp.exp(grad, out=grad)
    total = xp.einsum("ij->i", grad)
    loss = float((xp.log(total) - right).sum(dtype=np.float64)) / count
    grad *= (1.0 / (total * count))[:, None]
    grad[hit] -= 1.0 / count
    return loss, grad.reshape(y.shape)


def mean_squared_error(y: Array, target: Array) -> tuple[float, Array]:
    """Mean of (y - target)^2 over samples and outputs.

    Parameters
    ----------
    y : (samples, outputs) float32 or float64
    target : same number of elements, any real dtype; (samples,) goes with one output
    """
    xp = namespace(y)
    if y.size == 0:
        return 0.0, xp.zeros_like(y)
    # Reshaped, since (samples, 1) minus (samples,) would broadcast to a square without a word.
    grad = y - target.reshape(y.shape).astype(y.dtype, copy=False)
    loss = float((grad * grad).sum(dtype=np.float64)) / y.size
    grad *= 2.0 / y.size
    return loss, grad
