"""The one "stream": whether work is queued that nobody has waited for, and who looked at memory in spite of it.

On a GPU an operation returns before it has happened, and MPI, which knows nothing of streams, would send old bytes.
Here every operation calls `mark`, every wait `clear`, and the place where memory is shown to others calls `check`.

Copies between host and device that do not wait are kept in a list, in order. One to the host leaves `POISON` where it will
write, and writes when someone waits for it, so whoever reads earlier reads that; one from the host reads again then, and it
is a violation if it finds something else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

pending = False
num_synchronized = 0
violations: list[str] = []
"""Texts of failed checks. Kept, since mpi4py swallows what is raised while it asks for the interface, and then reports
that it was given no buffer."""
POISON = 0xA5
_copies: list[Callable[[], None]] = []
num_completed = 0
"""Of the copies since the last `reset`."""


def mark() -> None:
    """Something was queued."""
    global pending
    pending = True


def clear() -> None:
    """Everything queued has happened (the host waited, for instance by reading a value)."""
    global pending
    pending = False
    complete(num_queued())


def copy_to_host(host: numpy.ndarray, values: numpy.ndarray) -> None:
    """`host` will hold `values`."""
    values = values.copy()
    assert host.flags.c_contiguous and values.dtype == host.dtype and values.shape == host.shape
    host.reshape(-1).view(numpy.uint8)[:] = POISON

    def arrive() -> None:
        host[...] = values

    _copies.append(arrive)


def copy_from_host(host: numpy.ndarray) -> None:
    """`host` will be read; as far as the device can tell, it has been."""
    bits, read = host.reshape(-1).view(numpy.uint8), host.tobytes()

    def compare() -> None:
        if bits.tobytes() != read:
            violations.append("memory was written while a copy from it was still queued: wait for its event")

    _copies.append(compare)


def num_queued() -> int:
    """Copies that were queued since the last `reset`."""
    return num_completed + len(_copies)


def complete(number: int) -> None:
    """The first `number` copies have happened."""
    global num_completed
    while num_completed < number:
        num_completed += 1
        _copies.pop(0)()


def synchronize() -> None:
    """What code under test must call before MPI sees device memory; counted."""
    global num_synchronized
    num_synchronized += 1
    clear()


def check() -> None:
    """Someone is about to read or write device memory behind the stream's back."""
    if pending:
        violations.append("device memory was shown to MPI while operations on it were still queued: synchronize first")
        raise AssertionError(violations[-1])


def reset() -> None:
    """Forget everything, between tests."""
    global pending, num_synchronized, num_completed
    pending, num_synchronized, num_completed = False, 0, 0
    violations.clear()
    _copies.clear()
