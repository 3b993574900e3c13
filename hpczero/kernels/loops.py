"""Gradients on their way into flat buffers: scaled by the weight of their batch, written or added.

Kernels rather than NumPy expressions because they need no temporary, release the GIL, and have CUDA twins.
"""

from __future__ import annotations

import numba
from numba import cuda

from hpczero.kernels import cpu_loop


def _scaled(x, weight):
    return weight * x


_scaled_cpu, _scaled_cuda = numba.njit(error_model="numpy")(_scaled), cuda.jit(device=True)(_scaled)


@cpu_loop()
def write_scaled(into, x, weight):
    """into[i] = weight * x[i]; 1-D of one dtype, `weight` too."""
    for i in range(into.size):
        into[i] = _scaled_cpu(x[i], weight)


@cpu_loop()
def add_scaled(into, x, weight):
    """into[i] += weight * x[i]."""
    for i in range(into.size):
        into[i] = into[i] + _scaled_cpu(x[i], weight)


@cuda.jit
def write_scaled_cuda(into, x, weight):
    for i in range(cuda.grid(1), into.size, cuda.gridsize(1)):
        into[i] = _scaled_cuda(x[i], weight)


@cuda.jit
def add_scaled_cuda(into, x, weight):
    for i in range(cuda.grid(1), into.size, cuda.gridsize(1)):
        into[i] = into[i] + _scaled_cuda(x[i], weight)


CUDA_SIGNATURES = {
    kernel: [(kind[::1], kind[::1], kind) for kind in (numba.float32, numba.float64)]
    for kernel in (write_scaled_cuda, add_scaled_cuda)
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
