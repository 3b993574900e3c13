"""The optimizers as their papers have them: whole float64 tensors, plain NumPy, one tensor at a time.

Independent of hpczero.optim but for the hyperparameters, which it reads off the objects.
"""

from __future__ import annotations

import numpy as np

from hpczero.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion


def update(optimizer, p, g, state, step):
    """The new value of a tensor; `state` is a dict, empty before the first step, that this updates."""
    return _RULES[type(optimizer)](optimizer, p, g, state, step)


def _adam(optimizer, p, g, state, step):
    beta1, beta2 = optimizer.betas
    decoupled = isinstance(optimizer, AdamW)
    if not decoupled:
        g = g + optimizer.weight_decay * p
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    if optimizer.amsgrad:
        v = state["most"] = np.maximum(state.get("most", 0.0), v)
    direction = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + optimizer.eps)
    return p - optimizer.lr * (direction + (optimizer.weight_decay * p if decoupled else 0.0))


def _sgd(optimizer, p, g, state, step):
    g = g + optimizer.weight_decay * p
    b = state["b"] = optimizer.momentum * state.get("b", 0.0) + g
    return p - optimizer.lr * (g + optimizer.momentum * b if optimizer.nesterov else b)


def _adagrad(optimizer, p, g, state, step):
    g = g + optimizer.weight_decay * p
    s = state["s"] = state.get("s", optimizer.initial_accumulator_value) + g**2
    return p - optimizer.lr / (1 + (step - 1) * optimizer.lr_decay) * g / (np.sqrt(s) + optimizer.eps)


def _lion(optimizer, p, g, state, step):
    beta1, beta2 = optimizer.betas
    m = state.get("m", np.zeros_like(p))
    direction = np.sign(beta1 * m + (1 - beta1) * g)
    state["m"] = beta2 * m + (1 - beta2) * g
    return p - optimizer.lr * (direction + optimizer.weight_decay * p)


def _lamb(optimizer, p, g, state, step):
    beta1, beta2 = optimizer.betas
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    r = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + optimizer.eps) + optimizer.weight_decay * p
    length, norm = np.linalg.norm(p), np.linalg.norm(r)
    return p - optimizer.lr * (length / norm if length > 0 and norm > 0 else 1.0) * r


_RULES = {LAMB: _lamb, Adam: _adam, AdamW: _adam, SGD: _sgd, Adagrad: _adagrad, Lion: _lion}
