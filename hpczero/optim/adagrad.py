"""Adagrad: each element's step shrinks with the root of the sum of all its squared gradients.

Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", J. Mach. Learn.
Res. 12 (2011), the diagonal form without a proximal term, as in PyTorch: the learning rate of step t is
lr / (1 + (t - 1) lr_decay), whoever gave lr, and weight decay is added to the gradient (an L2 penalty); neither is in the
paper. State: `sum` (s), which starts at `initial_accumulator_value`. One pass reads p, g, s and writes p, s: 20 bytes per
float32 parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numba
from numba import cuda

from hpczero.arrays import Array, is_device, launch
from hpczero.kernels import cpu_loop
from hpczero.optim.checks import at_least_zero, positive


@dataclass(frozen=True)
class Adagrad:
    """Hyperparameters under the names that PyTorch users know; weight decay is added to the gradient."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        at_least_zero(self, "lr_decay", self.lr_decay)
        at_least_zero(self, "weight_decay", self.weight_decay)
        at_least_zero(self, "initial_accumulator_value", self.initial_accumulator_value)
        positive(self, "eps", self.eps)

    @property
    def state_starts(self) -> Mapping[str, float]:
        return {"sum": self.initial_accumulator_value} if self.initial_accumulator_value else {}

    def update(self, params: Array, grads: Array, state: tuple[Array], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """One step in place on (n,) arrays of one dtype, float32 or float64; `grads` stays as it is."""
        (s,) = state
        # In float64 here, then rounded once.
        lr = (self.lr if lr is None else lr) / (1 + (step - 1) * self.lr_decay)
        scalars = tuple(map(params.dtype.type, (scale, lr, self.eps, self.weight_decay)))
        if is_device(params):
            launch(adagrad_cuda, params.size, params, grads, s, *scalars)
        else:
            adagrad_cpu(params, grads, s, *scalars)


def _element(p, g, s, scale, lr, eps, decay):
    # Every scalar has the arrays' type and no literal stands here: one float64 literal promotes the whole expression.
    g = scale * g + decay * p
    s = s + g * g
    return p - lr * (g / (math.sqrt(s) + eps)), s


_on_cpu, _on_cuda = numba.njit(error_model="numpy")(_element), cuda.jit(device=True)(_element)


@cpu_loop()
def adagrad_cpu(p, g, s, scale, lr, eps, decay):
    for i in range(p.size):
        p[i], s[i] = _on_cpu(p[i], g[i], s[i], scale, lr, eps, decay)


@cuda.jit
def adagrad_cuda(p, g, s, scale, lr, eps, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], s[i] = _on_cuda(p[i], g[i], s[i], scale, lr, eps, decay)


CUDA_SIGNATURES = {
    adagrad_cuda: [(kind[::1],) * 3 + (kind,) * 4 for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
