"""Adam: steps of the mean gradient, divided by the root of its mean square, element by element.

Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1. Weight decay, which the paper does not
have, is added to the gradient (an L2 penalty, as in PyTorch), and so passes through the moments; `AdamW` decays beside
them. The gradient is scaled first: neither averaging nor clipping touches the decay. State: `exp_avg` (m) and
`exp_avg_sq` (v). One pass reads p, g, m, v and writes p, m, v: 28 bytes per float32 parameter.

With `amsgrad` the step is divided by the root of the largest v so far: Reddi, Kale and Kumar, "On the convergence of Adam
and beyond", ICLR 2018, algorithm 2, with the bias corrections it leaves out, as in PyTorch: the maximum is taken of v as it
is, and corrected after. One more state, `max_exp_avg_sq`; 36 bytes.
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
from hpczero.optim.checks import at_least_zero, positive, two_betas


@dataclass(frozen=True)
class Adam:
    """Hyperparameters under the names that PyTorch users know; weight decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    state_starts: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        two_betas(self, self.betas)
        positive(self, "eps", self.eps)
        at_least_zero(self, "weight_decay", self.weight_decay)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def update(self, params: Array, grads: Array, state: tuple[Array, ...], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """One step in place on (n,) arrays of one dtype, float32 or float64; `grads` stays as it is."""
        beta1, beta2 = self.betas
        kind = params.dtype.type
        # The corrections are powers: in float64 here, then rounded once.
        scalars = tuple(map(kind, (scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta1**step),
                                   1 / (1 - beta2**step), self.lr if lr is None else lr, self.eps, self.weight_decay)))
        kernels = (adam_amsgrad_cpu, adam_amsgrad_cuda) if self.amsgrad else (adam_cpu, adam_cuda)
        if is_device(params):
            launch(kernels[1], params.size, params, grads, *state, *scalars)
        else:
            kernels[0](params, grads, *state, *scalars)


def _element(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    # Every scalar has the arrays' type and no literal stands here: one float64 literal promotes the whole expression.
    g = scale * g + decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return p - lr * (m * correct1 / (math.sqrt(v * correct2) + eps)), m, v


def _amsgrad(p, g, m, v, top, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    g = scale * g + decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    # Not max(), which on a GPU drops a NaN: here a v that is NaN wins, since no comparison with it holds.
    top = top if top > v else v
    return p - lr * (m * correct1 / (math.sqrt(top * correct2) + eps)), m, v, top


_on_cpu, _on_cuda = numba.njit(error_model="numpy")(_element), cuda.jit(device=True)(_element)
_amsgrad_cpu, _amsgrad_cuda = numba.njit(error_model="numpy")(_amsgrad), cuda.jit(device=True)(_amsgrad)


@cpu_loop()
def adam_cpu(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(p.size):
        p[i], m[i], v[i] = _on_cpu(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps,
                                   decay)


@cpu_loop()
def adam_amsgrad_cpu(p, g, m, v, top, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(p.size):
        p[i], m[i], v[i], top[i] = _amsgrad_cpu(p[i], g[i], m[i], v[i], top[i], scale, beta1, rest1, beta2, rest2, correct1,
                                                correct2, lr, eps, decay)


@cuda.jit
def adam_cuda(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], m[i], v[i] = _on_cuda(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2, lr,
                                    eps, decay)


@cuda.jit
def adam_amsgrad_cuda(p, g, m, v, top, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], m[i], v[i], top[i] = _amsgrad_cuda(p[i], g[i], m[i], v[i], top[i], scale, beta1, rest1, beta2, rest2, correct1,
                                                 correct2, lr, eps, decay)


CUDA_SIGNATURES = {
    adam_cuda: [(kind[::1],) * 4 + (kind,) * 10 for kind in (numba.float32, numba.float64)],
    adam_amsgrad_cuda: [(kind[::1],) * 5 + (kind,) * 10 for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
