"""Stochastic gradient descent, with momentum and Nesterov's look-ahead.

Robbins and Monro (1951); Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
2013, in the form with the learning rate outside the momentum, as in PyTorch. State: `momentum_buffer`, kept only if there
is momentum. 20 bytes per float32 parameter with momentum, 12 without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numba
from numba import cuda

from hpczero.arrays import Array, is_device, launch
from hpczero.errors import ConfigError
from hpczero.kernels import cpu_loop
from hpczero.optim.checks import at_least_zero, below_one


@dataclass(frozen=True)
class SGD:
    """Hyperparameters under the names that PyTorch users know; weight decay is added to the gradient."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    state_starts: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        below_one(self, "momentum", self.momentum)
        at_least_zero(self, "weight_decay", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ConfigError("SGD: nesterov=True looks ahead along the momentum and needs momentum > 0")

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update(self, params: Array, grads: Array, state: tuple[Array, ...], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """One step in place on (n,) arrays of one dtype, float32 or float64; `grads` stays as it is."""
        kind = params.dtype.type
        scale, lr, decay = kind(scale), kind(self.lr if lr is None else lr), kind(self.weight_decay)
        # Nesterov: the step is gradient + momentum * buffer; else it is the buffer itself.
        ahead, along = (kind(1), kind(self.momentum)) if self.nesterov else (kind(0), kind(1))
        if not state:
            kernels, arguments = (sgd_cpu, sgd_cuda), (scale, lr, decay)
        else:
            kernels, arguments = (momentum_cpu, momentum_cuda), (scale, kind(self.momentum), ahead, along, lr, decay)
        if is_device(params):
            launch(kernels[1], params.size, params, grads, *state, *arguments)
        else:
            kernels[0](params, grads, *state, *arguments)


def _plain(p, g, scale, lr, decay):
    return p - lr * (scale * g + decay * p)


def _momentum(p, g, b, scale, momentum, ahead, along, lr, decay):
    g = scale * g + decay * p
    b = momentum * b + g
    return p - lr * (ahead * g + along * b), b


_plain_cpu, _plain_cuda = numba.njit(error_model="numpy")(_plain), cuda.jit(device=True)(_plain)
_momentum_cpu, _momentum_cuda = numba.njit(error_model="numpy")(_momentum), cuda.jit(device=True)(_momentum)


@cpu_loop()
def sgd_cpu(p, g, scale, lr, decay):
    for i in range(p.size):
        p[i] = _plain_cpu(p[i], g[i], scale, lr, decay)


@cpu_loop()
def momentum_cpu(p, g, b, scale, momentum, ahead, along, lr, decay):
    for i in range(p.size):
        p[i], b[i] = _momentum_cpu(p[i], g[i], b[i], scale, momentum, ahead, along, lr, decay)


@cuda.jit
def sgd_cuda(p, g, scale, lr, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i] = _plain_cuda(p[i], g[i], scale, lr, decay)


@cuda.jit
def momentum_cuda(p, g, b, scale, momentum, ahead, along, lr, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], b[i] = _momentum_cuda(p[i], g[i], b[i], scale, momentum, ahead, along, lr, decay)


CUDA_SIGNATURES = {
    sgd_cuda: [(kind[::1],) * 2 + (kind,) * 3 for kind in (numba.float32, numba.float64)],
    momentum_cuda: [(kind[::1],) * 3 + (kind,) * 6 for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
