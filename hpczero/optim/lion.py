"""Lion: every element moves by the learning rate, in the direction of the sign of a mean gradient.

Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2: `betas[0]` mixes the gradient into
the step, `betas[1]` into the momentum that is kept. Weight decay does not pass through either. State: `exp_avg` (m). One
pass reads p, g, m and writes p, m: 20 bytes per float32 parameter.

A sign has jumps. Where the two terms under it cancel to the last bit, a GPU, which rounds a product and a sum together, may
find another sign than a CPU, and the parameters then differ by a whole step, not by a last bit. On machines of one kind
nothing changes: same inputs, same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numba
from numba import cuda

from hpczero.arrays import Array, is_device, launch
from hpczero.kernels import cpu_loop
from hpczero.optim.checks import at_least_zero, two_betas


@dataclass(frozen=True)
class Lion:
    """Hyperparameters under the names of the authors' own PyTorch version."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    state_starts: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        two_betas(self, self.betas)
        at_least_zero(self, "weight_decay", self.weight_decay)

    def update(self, params: Array, grads: Array, state: tuple[Array], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """One step in place on (n,) arrays of one dtype, float32 or float64; `grads` stays as it is."""
        (m,) = state
        beta1, beta2 = self.betas
        scalars = tuple(map(params.dtype.type, (scale, beta1, 1 - beta1, beta2, 1 - beta2, self.lr if lr is None else lr,
                                                self.weight_decay, 0, 1)))
        if is_device(params):
            launch(lion_cuda, params.size, params, grads, m, *scalars)
        else:
            lion_cpu(params, grads, m, *scalars)


def _element(p, g, m, scale, beta1, rest1, beta2, rest2, lr, decay, zero, one):
    # Every scalar has the arrays' type and no literal stands here: one float64 literal promotes the whole expression.
    g = scale * g
    c = beta1 * m + rest1 * g
    # Where neither comparison holds, c is a zero, whose sign is 0, or NaN, which has to stay NaN.
    sign = one if c > zero else -one if c < zero else c + zero
    return p - lr * (sign + decay * p), beta2 * m + rest2 * g


_on_cpu, _on_cuda = numba.njit(error_model="numpy")(_element), cuda.jit(device=True)(_element)


@cpu_loop()
def lion_cpu(p, g, m, scale, beta1, rest1, beta2, rest2, lr, decay, zero, one):
    for i in range(p.size):
        p[i], m[i] = _on_cpu(p[i], g[i], m[i], scale, beta1, rest1, beta2, rest2, lr, decay, zero, one)


@cuda.jit
def lion_cuda(p, g, m, scale, beta1, rest1, beta2, rest2, lr, decay, zero, one):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        p[i], m[i] = _on_cuda(p[i], g[i], m[i], scale, beta1, rest1, beta2, rest2, lr, decay, zero, one)


CUDA_SIGNATURES = {
    lion_cuda: [(kind[::1],) * 3 + (kind,) * 9 for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
