"""The one "stream": whether work is queued that nobody has waited for, and who looked at memory in spite of it.

On a GPU an operation returns before it has happened, and MPI, which knows nothing of streams, would send old bytes.
Here every operation calls `mark`, every wait `clear`, and the place where memory is shown to others calls `check`.
"""

from __future__ import annotations

pending = False
num_synchronized = 0
violations: list[str] = []
"""Texts of failed checks. Kept, since mpi4py swallows what is raised while it asks for the interface, and then reports
that it was given no buffer."""


def mark() -> None:
    """Something was queued."""
    global pending
    pending = True


def clear() -> None:
    """Everything queued has happened (the host waited, for instance by reading a value)."""
    global pending
    pending = False


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
    global pending, num_synchronized
    pending, num_synchronized = False, 0
    violations.clear()
