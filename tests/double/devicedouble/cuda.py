"""The few names of `cupy.cuda` that hpczero uses, for machines that pretend to have GPUs.

Tests change `runtime.num_devices` (and `runtime.failure` or `runtime.ipc_failure`, error texts) to play other machines.
"""

from __future__ import annotations

from typing import Any, Self

from devicedouble import queue, shared
from devicedouble.array import Pinned


class Stream:
    """A stream: here all of them are the same queue. As a context manager it becomes the current one."""

    def __init__(self, null: bool = False, non_blocking: bool = False):
        self.ptr = 0 if null else 0x5EED

    def synchronize(self) -> None:
        queue.synchronize()

    def wait_event(self, event: Event) -> None:
        """What is queued from now on happens after it, as everything here does."""

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.remove(self)


_current = [Stream(null=True)]


def get_current_stream() -> Stream:
    return _current[-1]


class Event:
    """A place in the queue."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False):
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._number = queue.num_queued()

    def synchronize(self) -> None:
        """Copies that were queued before it have happened. Memory may still not be shown: that needs all of the stream."""
        queue.complete(self._number)


def alloc_pinned_memory(size: int) -> Pinned:
    return Pinned(size)


class CUDARuntimeError(RuntimeError):
    """What CuPy raises when the CUDA runtime reports an error."""


class _Runtime:
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_devices, self.failure, self.is_hip, self.bound = 1, "", False, None
        self.ipc_failure = ""

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

    def malloc(self, size: int) -> int:
        return shared.allocate(size)

    def free(self, ptr: int) -> None:
        shared.free(ptr)

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        if self.ipc_failure:
            raise CUDARuntimeError(self.ipc_failure)
        return shared.handle_of(devPtr)

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        try:
            return shared.open_handle(handle)
        except ValueError as error:
            raise CUDARuntimeError(str(error)) from None

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        shared.close_handle(devPtr)


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
