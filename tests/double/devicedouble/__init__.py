"""A stand-in for CuPy on machines without a GPU: device arrays that really are NumPy arrays, with CuPy's restrictions.

Code that runs on this runs on CuPy as far as interfaces go: an array shows its memory through
`__cuda_array_interface__` alone, so mpi4py takes its device path and NumPy cannot touch it; NumPy arrays may not be
mixed in; sums are 0-d arrays; every operation is "queued" (`queue.py`), and MPI looking at memory before `synchronize`
is a failure, as it would be a wrong result on a GPU. Module functions and methods are NumPy's, found by name, less
those CuPy lacks. Kernels run in Numba's CUDA simulator (`simulator.py`).

Not imitated: speed, streams that run side by side, CuPy's own random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy

from devicedouble import cuda, queue, shared, simulator
from devicedouble.array import forward, ndarray, unwrap, wrap

__all__ = ["array", "asarray", "asnumpy", "cuda", "ndarray", "queue", "unwrap", "wrap"]

# Functions of NumPy that CuPy 14 does not have.
NOT_IN_CUPY = {
    "block", "einsum_path", "errstate", "frompyfunc", "geomspace", "insert", "matvec", "memmap", "nanpercentile",
    "nanquantile", "ndenumerate", "nditer", "spacing", "unstack", "vecdot", "vecmat",
}


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> numpy.ndarray:
    """A host copy, finished on return."""
    return a.get(order=order, out=out) if isinstance(a, ndarray) else numpy.asarray(a, order=order)


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    """A new device array, from host or device memory, lists or numbers."""
    if isinstance(obj, ndarray) and not copy and dtype in (None, obj.dtype):
        return obj
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):      # here: bytes of `runtime.malloc`
        there = obj.__cuda_array_interface__
        return ndarray(shared.at(there["data"][0], there["shape"][0]))
    queue.mark()
    return ndarray(numpy.array(unwrap(obj), dtype, order=order))


def asarray(a: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """`a` itself if it is a device array of this dtype, otherwise a copy on the device."""
    return array(a, dtype, copy=False, order=order)


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in NOT_IN_CUPY:
        raise AttributeError(f"module 'devicedouble' has no attribute {name!r}, and neither has CuPy")
    return forward(getattr(numpy, name), name)


simulator.complete()
