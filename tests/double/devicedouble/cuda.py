"""The few names of `cupy.cuda` that hpczero uses, for machines that pretend to have GPUs.

Tests change `runtime.num_devices` (and `runtime.failure`, an error text) to play other machines.
"""

from __future__ import annotations

from typing import Any, Self

from devicedouble import queue


class Stream:
    """A stream: here all of them are the same queue. As a context manager it becomes the current one."""

    def __init__(self, ptr: int = 0x5EED):
        self.ptr = ptr

    def synchronize(self) -> None:
        queue.synchronize()

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.remove(self)


_current = [Stream(0)]


def get_current_stream() -> Stream:
    return _current[-1]


class CUDARuntimeError(RuntimeError):
    """What CuPy raises when the CUDA runtime reports an error."""


class _Runtime:
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_devices, self.failure, self.is_hip, self.bound = 1, "", False, None

    def getDeviceCount(self) -> int:
        if self.failure:
            raise CUDARuntimeError(self.failure)
        return self.num_devices

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": f"Double {index}".encode(), "uuid": bytes([index] * 16)}

    def deviceGetPCIBusId(self, index: int) -> str:
        return f"0000:{index:02X}:00.0"

    def deviceSynchronize(self) -> None:
        queue.synchronize()


runtime = _Runtime()


class Device:
    """`cupy.cuda.Device`; remembers in `runtime.bound` which one was taken last."""

    def __init__(self, index: int = 0):
        self.id = index

    def use(self) -> None:
        if self.id >= runtime.getDeviceCount():
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        runtime.bound = self.id

    def synchronize(self) -> None:
        runtime.deviceSynchronize()
