"""AdamW: Adam with weight decay that does not pass through the moments.

Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2, with the decay multiplied by the
learning rate, as everyone implements it. State: `exp_avg` (m) and `exp_avg_sq` (v). One pass reads p, g, m, v and writes p,
m, v: 28 bytes per float32 parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numba
from numba import cuda

from hpczero.arrays import Array, is_device, launch
from hpczero.errors import ConfigError
from hpczero.kernels import cpu_loop
from hpczero.optim.checks import at_least_zero, below_one, positive


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters under the names that PyTorch users know."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigError(f"AdamW: betas={self.betas!r}; two numbers such as (0.9, 0.999) are needed")
        for beta in self.betas:
            below_one(self, "betas", beta)
        positive(self, "eps", self.eps)
        at_least_zero(self, "weight_decay", self.weight_decay)

    def update(self, params: Array, grads: Array, state: tuple[Array, Array], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """One step in place on (n,) arrays of one dtype, float32 or float64; `grads` stays as it is."""
        m, v = state
        beta1, beta2 = self.betas
        kind = params.dtype.type
        # The corrections are powers: in float64 here, then rounded once.
        scalars = tuple(map(kind, (scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta1**step),
                                   1 / (1 - beta2**step), self.lr if lr is None else lr, self.eps, self.weight_decay)))
        if is_device(params):
            launch(adamw_cuda, params.size, params, grads, m, v, *scalars)
        else:
            adamw_cpu(params, grads, m, v, *scalars)


def _element(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    # Every scalar has the arrays' type and no literal stands here: one float64 literal promotes the whole expression.
    g = scale * g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return p - lr * (m * correct1 / (math.sqrt(v * correct2) + eps) + decay * p), m, v


_on_cpu, _on_cuda = numba.njit(error_model="numpy")(_element), cuda.jit(device=True)(_element)


@cpu_loop()
def adamw_cpu(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(p.size):
        p[i], m[i], v[i] = _on_cpu(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps,
                                   decay)


@cuda.jit
def adamw_cuda(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, lr, eps, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], m[i], v[i] = _on_cuda(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2, lr,
                                    eps, decay)


CUDA_SIGNATURES = {
    adamw_cuda: [(kind[::1],) * 4 + (kind,) * 10 for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
