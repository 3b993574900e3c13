"""Numba kernels: each element formula once, with the CPU loop and the CUDA loop that apply it.

Rules that hold for every kernel (measured, not taste): `error_model="numpy"`, or the division check stops vectorisation;
no fastmath, or a shard boundary changes bits; formula and loop in one file, or Numba's cache runs a stale formula; arrays
C-contiguous; every scalar of the arrays' type, or the loop silently turns to float64.
"""
