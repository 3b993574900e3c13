"""What Numba's CUDA simulator lacks for running kernels on device arrays of another library.

The simulator takes NumPy arrays only and knows no streams of others. Both functions below exist in the real
`numba.cuda`; here they hand over the NumPy array behind a device array, and the only stream there is.
"""

from __future__ import annotations

import os
from typing import Any

from devicedouble import queue


def complete() -> None:
    """Add the two functions to `numba.cuda`, if this process runs the simulator (NUMBA_ENABLE_CUDASIM=1)."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        return
    from numba import cuda

    cuda.external_stream = _external_stream
    cuda.as_cuda_array = _as_cuda_array


def _external_stream(ptr: int) -> int:
    return 0


def _as_cuda_array(obj: Any, sync: bool = True) -> Any:
    queue.mark()        # the kernel that is about to be queued may write to it
    return obj._host
