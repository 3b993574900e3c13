"""LAMB: Adam's direction, and a step as long for each tensor as the tensor itself.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020, algorithm 2, with phi(z) = z
and weight decay inside the direction, r = m / (sqrt(v) + eps) + decay p with bias-corrected moments. A tensor moves by
lr |p| / |r| times r; by lr r where one of the two norms is 0. State: `exp_avg` (m) and `exp_avg_sq` (v).

The norms are of whole tensors, whoever owns their parts: `update` leaves the direction where the gradient was, the caller
adds up squares over all owners (`optim.norms`: the same bits for any partition), and `move` takes the step. Two passes: p,
g, m, v read and g, m, v written, then p, g read and p written, 40 bytes per float32 parameter beside the norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numba
import numpy as np
from numba import cuda

from hpczero.arrays import Array, is_device, launch, namespace
from hpczero.kernels import cpu_loop
from hpczero.optim.checks import at_least_zero, positive, two_betas


@dataclass(frozen=True)
class LAMB:
    """Hyperparameters under the names that PyTorch users know."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    state_starts: ClassVar[Mapping[str, float]] = {}
    by_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_zero(self, "lr", self.lr)
        two_betas(self, self.betas)
        positive(self, "eps", self.eps)
        at_least_zero(self, "weight_decay", self.weight_decay)

    def update(self, params: Array, grads: Array, state: tuple[Array, ...], *, step: int, scale: float = 1.0,
               lr: float | None = None) -> None:
        """The moments, and in place of the gradients the direction; (n,) arrays of one dtype, float32 or float64.

        `params` stay as they are until `move`; `lr` is of no use here.
        """
        m, v = state
        beta1, beta2 = self.betas
        scalars = tuple(map(params.dtype.type, (scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta1**step),
                                                1 / (1 - beta2**step), self.eps, self.weight_decay)))
        if is_device(params):
            launch(direction_cuda, params.size, params, grads, m, v, *scalars)
        else:
            direction_cpu(params, grads, m, v, *scalars)

    def move(self, params: Array, directions: Array, table: np.ndarray, lengths: np.ndarray) -> None:
        """params -= length * direction, for parts of tensors.

        Parameters
        ----------
        table : (k, 3) int64
            Of each part: where it begins in `params`, where in `directions`, and its elements.
        lengths : (k,) float64
            The learning rate times what its tensor's norms say.
        """
        lengths = lengths.astype(params.dtype)
        if is_device(params):
            xp, ends = namespace(params), np.cumsum(table[:, 2])
            count = int(ends[-1]) if len(ends) else 0
            launch(move_cuda, count, params, directions, xp.asarray(np.ascontiguousarray(table)), xp.asarray(ends),
                   xp.asarray(lengths))
        else:
            move_cpu(params, directions, table, lengths)


def trust(weight_squares: np.ndarray, direction_squares: np.ndarray) -> np.ndarray:
    """|p| / |r| of every tensor, from the sums of their squares in float64; 1 where one of them is 0."""
    both = (weight_squares > 0) & (direction_squares > 0)
    return np.where(both, np.sqrt(weight_squares) / np.sqrt(np.where(both, direction_squares, 1.0)), 1.0)


def _direction(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, eps, decay):
    # Every scalar has the arrays' type and no literal stands here: one float64 literal promotes the whole expression.
    g = scale * g
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return m * correct1 / (math.sqrt(v * correct2) + eps) + decay * p, m, v


def _moved(p, r, length):
    return p - length * r


_direction_cpu, _direction_cuda = numba.njit(error_model="numpy")(_direction), cuda.jit(device=True)(_direction)
_moved_cpu, _moved_cuda = numba.njit(error_model="numpy")(_moved), cuda.jit(device=True)(_moved)


@cpu_loop()
def direction_cpu(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, eps, decay):
    for i in range(p.size):
        g[i], m[i], v[i] = _direction_cpu(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2, eps,
                                          decay)


@cuda.jit
def direction_cuda(p, g, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, eps, decay):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        g[i], m[i], v[i] = _direction_cuda(p[i], g[i], m[i], v[i], scale, beta1, rest1, beta2, rest2, correct1, correct2,
                                           eps, decay)


@cpu_loop()
def move_cpu(p, r, table, lengths):
    for k in range(lengths.size):
        here, there, count = table[k]
        part, direction, length = p[here:here + count], r[there:there + count], lengths[k]
        for i in range(count):
            part[i] = _moved_cpu(part[i], direction[i], length)


@cuda.jit
def move_cuda(p, r, table, ends, lengths):
    total = ends[ends.size - 1] if ends.size > 0 else 0
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        # The part that element i of them all is in: the first that ends behind it.
        low, high = 0, ends.size - 1
        while low < high:
            middle = (low + high) // 2
            if ends[middle] > i:
                high = middle
            else:
                low = middle + 1
        place = i - (ends[low] - table[low, 2])
        p[table[low, 0] + place] = _moved_cuda(p[table[low, 0] + place], r[table[low, 1] + place], lengths[low])


_whole = numba.int64
CUDA_SIGNATURES = {
    direction_cuda: [(kind[::1],) * 4 + (kind,) * 9 for kind in (numba.float32, numba.float64)],
    move_cuda: [(kind[::1], kind[::1], _whole[:, ::1], _whole[::1], kind[::1]) for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
