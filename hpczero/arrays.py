"""NumPy and CuPy arrays behind one small set of functions, so that layers, optimizers and collectives serve both.

Nothing here decides where data live: an array is host memory (NumPy) or device memory (it speaks
`__cuda_array_interface__`), and the functions follow the array. The array module is looked up through the array's
type, so CuPy is imported by whoever made the array, and never by a run on CPUs. What MPI and Numba need from a device
array is its `__cuda_array_interface__` (numba.readthedocs.io, "CUDA Array Interface", version 3) and nothing else.

Half precision: MPI has no portable half type and Numba no bfloat16, so float16 and bfloat16 (`ml_dtypes`) travel and
enter kernels as the uint16 view that `as_bits` gives; NumPy and CuPy themselves compute on the typed array.

`launch` and `copy_async` cost microseconds and do not wait for the device; `to_host`, `synchronize` and `copy` between host
and device wait for it; the rest only looks.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = Any
"""A NumPy array, or a CuPy array (CuPy is optional, so its type cannot be named here)."""

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# Threads of a block (fewer, in whole warps, where the vector is smaller), and the most blocks of one launch. Memory is
# used best when every multiprocessor holds its 2048 threads; 8192 blocks fill 512 multiprocessors, more than any GPU
# has, and the grid-stride loop does the rest.
_WARP = 32
_THREADS = 128
_MOST_BLOCKS = 8192

# DLPack's device types (dlpack.h): memory that a CPU can read, and memory of an AMD GPU.
_DLPACK_HOST = (1, 3, 11)
_DLPACK_ROCM = 10


def is_device(x: Any) -> bool:
    """Whether `x` is an array in device memory."""
    # Asked of the type: reading the property itself builds a dictionary, and says that memory is about to be read.
    return hasattr(type(x), "__cuda_array_interface__") and not isinstance(x, np.ndarray)


def namespace(x: Array) -> ModuleType:
    """The module whose functions work on `x`: `numpy`, `cupy`; in general the root module of the array's type."""
    if isinstance(x, np.ndarray):
        return np
    return sys.modules[type(x).__module__.partition(".")[0]]


def is_half(dtype: Any) -> bool:
    """Whether `dtype` is float16 or bfloat16, which are summed in float32 and travel as uint16."""
    return np.dtype(dtype) in _HALVES


def as_bits(x: Array) -> Array:
    """A float16 or bfloat16 array viewed as uint16, for kernels and for MPI; any other array as it is."""
    return x.view(np.uint16) if is_half(x.dtype) else x


def from_any(obj: Any) -> Array:
    """`obj` as an array, without a copy, whatever library made it.

    Parameters
    ----------
    obj : object
        A NumPy or CuPy array (given back as it is), or anything with the buffer protocol, DLPack or
        `__cuda_array_interface__`: tensors of PyTorch and JAX, `array.array`, shared memory, Numba's device arrays.

    Returns
    -------
    NumPy array for host memory, CuPy array for device memory
        Shares its memory with `obj`; read-only where `obj` is, or where it cannot say (DLPack before version 1.0).

    Raises
    ------
    TypeError
        `obj` shares no memory in any of these ways (a list, a number), has masked, structured or foreign-endian
        elements, or lies in the memory of an AMD GPU; or it lies in device memory and CuPy is not installed.
    """
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if isinstance(obj, np.ma.MaskedArray):
        raise TypeError(f"{kind}: masked elements would be trained as if they were there; fill the mask first")
    if isinstance(obj, np.ndarray):
        array = np.asarray(obj)
    elif is_device(obj) and isinstance(obj, getattr(namespace(obj), "ndarray", ())):
        array = obj
    elif hasattr(obj, "__cuda_array_interface__"):    # asked of the object: a PyTorch tensor has it on a GPU only
        array = _cupy_for(kind).asarray(obj)
    elif (view := _memory(obj)) is not None:
        array = np.asarray(view)
    elif hasattr(obj, "__dlpack__"):
        place = obj.__dlpack_device__()[0]
        if place == _DLPACK_ROCM:
            raise TypeError(f"{kind}: lies on an AMD GPU, which hpczero does not support; copy it to the host")
        array = np.from_dlpack(obj) if place in _DLPACK_HOST else _cupy_for(kind).from_dlpack(obj)
    else:
        raise TypeError(
            f"{kind}: not an array: it offers neither the buffer protocol nor DLPack nor __cuda_array_interface__; "
            "numpy.asarray makes an array of lists and numbers"
        )
    if not (array.dtype.kind in "biuf" or is_half(array.dtype)) or not array.dtype.isnative:
        raise TypeError(f"{kind}: elements of type {array.dtype.str} are not numbers in this machine's byte order")
    return array


def to_host(x: Array) -> np.ndarray:
    """A copy of device array `x` in host memory, finished on return; a NumPy array is given back as it is."""
    return x if isinstance(x, np.ndarray) else namespace(x).asnumpy(x)


def copy(dst: Array, src: Array) -> None:
    """Write `src` into `dst`, cast to its dtype; either may be in host or device memory.

    Finished on return where one of the two is in host memory (so both may be used again at once, pinned or not);
    queued on the current stream where both are on the device. ValueError where the shapes differ: nothing is broadcast.
    """
    if dst.shape != src.shape:
        raise ValueError(f"copy: shape {src.shape} into shape {dst.shape}")
    if is_device(dst) and not is_device(src):
        if src.dtype == dst.dtype and dst.flags.c_contiguous:
            dst.set(src)
        else:
            dst[...] = namespace(dst).asarray(src)
        synchronize(dst)     # a copy from pinned memory would still be reading src
    elif is_device(src) and not is_device(dst):
        if src.dtype == dst.dtype and dst.flags.c_contiguous:
            src.get(out=dst)
        else:
            dst[...] = to_host(src)
    else:
        dst[...] = src


def pinned(beside: Array, nbytes: int) -> np.ndarray:
    """(nbytes,) uint8 of host memory that the device of array `beside` reads and writes without the host's help.

    Locking pages in memory takes time: ask once, and keep it. Needed by `copy_async`.
    """
    memory = namespace(beside).cuda.alloc_pinned_memory(max(nbytes, 1))
    return np.frombuffer(memory, np.uint8, nbytes)


def copy_async(dst: Array, src: Array) -> Any:
    """Queue a copy between `pinned` host memory and a device, or on devices, on the current stream, and return its event.

    Both contiguous, of one shape and dtype. Before `event.synchronize()` has returned, memory of the host and of other
    processes must not be written, nor be read if it is `dst`.
    """
    array = dst if is_device(dst) else src
    module = namespace(array)
    stream = module.cuda.get_current_stream()
    if is_device(dst) and is_device(src):
        dst[...] = src
    elif is_device(dst):
        dst.set(src, stream=stream)
    else:
        src.get(stream=stream, out=dst, blocking=False)
    return queued(array)


def queued(x: Array) -> Any:
    """An event behind everything that the current stream of `x`'s device has been given so far."""
    module = namespace(x)
    event = module.cuda.Event(disable_timing=True)
    event.record(module.cuda.get_current_stream())
    return event


def follow(x: Array, event: Any) -> None:
    """What the current stream of `x`'s device is given from now on happens after `event`; the host goes on."""
    namespace(x).cuda.get_current_stream().wait_event(event)


def stream_beside(x: Array) -> Any:
    """A new stream on `x`'s device that waits for no other; as a context manager it is the current one of the thread."""
    with x.device:
        return namespace(x).cuda.Stream(non_blocking=True)


def synchronize(x: Array) -> None:
    """Wait until everything queued on the current stream of `x`'s device has happened; nothing to do for host arrays.

    Called before MPI reads or writes device memory, since MPI knows nothing of streams.
    """
    if is_device(x):
        namespace(x).cuda.get_current_stream().synchronize()


def launch(kernel: Any, size: int, *args: Any) -> None:
    """Run a CUDA kernel over `size` elements on the current stream of the array module, without waiting for it.

    Parameters
    ----------
    kernel : function under `numba.cuda.jit`
        Visits its elements with a grid-stride loop: `for i in range(cuda.grid(1), n, cuda.gridsize(1))`.
    size : int
        Number of elements; with 0 nothing is launched.
    args : device arrays and NumPy scalars
        At least one array. Half arrays come as `as_bits` views.
    """
    from numba import cuda

    if size == 0:
        return
    module = next(namespace(arg) for arg in args if is_device(arg))
    stream = _numba_stream(module.cuda.get_current_stream().ptr)
    # sync=False: Numba would otherwise wait for the stream once per array; launching on that same stream needs no wait.
    passed = [cuda.as_cuda_array(arg, sync=False) if is_device(arg) else arg for arg in args]
    threads = min(_THREADS, -(-size // _WARP) * _WARP)
    kernel[min(-(-size // threads), _MOST_BLOCKS), threads, stream](*passed)


@functools.lru_cache(maxsize=64)
def _numba_stream(ptr: int) -> Any:
    """Numba's object for the CUDA stream at `ptr`; remembered, since Numba keeps launch settings by stream object."""
    from numba import cuda

    return cuda.external_stream(ptr)


def _memory(obj: Any) -> memoryview | None:
    """`obj` through the buffer protocol, or None where it has none."""
    try:
        return memoryview(obj)
    except TypeError:
        return None


def _cupy_for(kind: str) -> ModuleType:
    """CuPy, to view the device memory of an object of type `kind`."""
    try:
        import cupy
    except ImportError:
        raise TypeError(
            f"{kind}: lies in device memory, and CuPy is not installed; pip install 'hpczero[cuda12]' (or cuda13)"
        ) from None
    return cupy
