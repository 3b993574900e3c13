"""Device memory that other processes can map: files, so that real ranks see each other's bytes.

What is written to memory of `allocate` is queued, as far as other processes can tell: they find `queue.POISON` until someone
here waits. What is read of another process must stay as it was until the copy has happened. Freeing memory that another
process still has open is a violation, and opening one's own handle an error, as in CUDA.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy

from devicedouble import queue


@dataclass(frozen=True)
class _Mapping:
    path: str
    file: int
    memory: mmap.mmap
    array: numpy.ndarray


_owned: dict[int, _Mapping] = {}
_opened: dict[int, _Mapping] = {}


def allocate(size: int) -> int:
    file, path = tempfile.mkstemp(prefix="double", dir="/dev/shm")
    os.ftruncate(file, size)
    return _map(path, file, _owned)


def free(address: int) -> None:
    mapping = _owned.pop(address)
    try:
        fcntl.flock(mapping.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        queue.violations.append("device memory was freed while another process had it open: close the handle first")
    os.unlink(mapping.path)
    _unmap(mapping)


def handle_of(address: int) -> bytes:
    """Names the allocation that holds this address, as in CUDA."""
    (mapping,) = (one for base, one in _owned.items() if base <= address < base + one.array.size)
    return mapping.path.encode().ljust(64, b"\0")


def open_handle(handle: bytes) -> int:
    path = handle.rstrip(b"\0").decode()
    if any(mapping.path == path for mapping in (*_owned.values(), *_opened.values())):
        raise ValueError("cudaErrorDeviceUninitialized: this process has made the handle, or has opened it")
    if not os.path.exists(path):
        raise ValueError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_SH)
    return _map(path, file, _opened)


def close_handle(address: int) -> None:
    _unmap(_opened.pop(address))


def at(address: int, size: int) -> numpy.ndarray:
    """(size,) uint8 over memory that was allocated or opened here."""
    for base, mapping in (*_owned.items(), *_opened.items()):
        if base <= address and address + size <= base + mapping.array.size:
            return mapping.array[address - base:address - base + size]
    raise ValueError(f"no device memory at {address:#x}")


def is_owned(host: numpy.ndarray) -> bool:
    return _lies_in(host, _owned)


def is_opened(host: numpy.ndarray) -> bool:
    return _lies_in(host, _opened)


def _lies_in(host: numpy.ndarray, mappings: dict[int, _Mapping]) -> bool:
    address = host.__array_interface__["data"][0]
    return host.size > 0 and any(base <= address < base + one.array.size for base, one in mappings.items())


def _map(path: str, file: int, mappings: dict[int, _Mapping]) -> int:
    memory = mmap.mmap(file, os.fstat(file).st_size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mappings[address] = _Mapping(path, file, memory, numpy.frombuffer(memory, numpy.uint8))
    return address


def _unmap(mapping: _Mapping) -> None:
    """Gives the file back; the memory goes with the last array that looks at it, and has a copy of the file's number."""
    fcntl.flock(mapping.file, fcntl.LOCK_UN)
    os.close(mapping.file)
