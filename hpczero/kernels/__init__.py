"""Numba kernels: each element formula once, with the CPU loop and the CUDA loop that apply it.

Rules that hold for every kernel (measured, not taste): `error_model="numpy"`, or the division check stops vectorisation;
no fastmath, or a shard boundary changes bits; formula and loop in one file, or Numba's cache runs a stale formula; arrays
C-contiguous; every scalar of the arrays' type, or the loop silently turns to float64. `cpu_loop` sets what can be set.
"""

from __future__ import annotations

import functools

import numba


def _can_cache() -> bool:
    """Whether Numba finds a folder for compiled code; on a read-only file system it refuses to cache, with an error."""
    try:
        numba.njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True


cpu_loop = functools.partial(numba.njit, nogil=True, error_model="numpy", cache=_can_cache())
"""The decorator of every loop on the CPU. Without a folder to cache in, each process compiles for itself."""
