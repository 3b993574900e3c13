"""Error types, and the rule that an error of one rank becomes an error of all.

An exception on one rank alone leaves the others waiting inside a collective for ever. A check on values that every rank
shares may simply raise; a check on local data (a file missing on one node, a NaN in one shard) goes through
`raise_together`, which costs one small all-reduce and therefore stays out of the training loop.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


class HpczeroError(Exception):
    """Base of every error that hpczero raises on purpose; its text is meant for the user, without a traceback."""


class ConfigError(HpczeroError, ValueError):
    """A setting or an argument that cannot be honoured: names it, its value, and what is allowed."""


class DataError(HpczeroError, ValueError):
    """Training data that cannot be read, or that is too small for what was asked."""


class DeviceError(HpczeroError, RuntimeError):
    """The device that was asked for is not there or cannot be used."""


class RoomError(HpczeroError, RuntimeError):
    """Not enough shared memory for what is about to be allocated."""


class MismatchError(HpczeroError, ValueError):
    """Ranks disagree about size, dtype, operation or name of what they communicate."""


class StallError(HpczeroError, TimeoutError):
    """A wait ran into its limit: names the ranks that were not heard of."""


def raise_together(comm: MPI.Comm, error: Exception | None) -> None:
    """Every rank of `comm` calls this; if any passes an error, every rank raises, quoting the ranks that found one.

    The type raised is that of the lowest failing rank, so `except DataError` works on all of them. An exception that is
    no `HpczeroError` keeps its own traceback on its own rank and becomes `HpczeroError` elsewhere.
    """
    if not _any_failed(comm, error is not None):
        return
    mine = None
    if error is not None:
        # A subclass made elsewhere is known on this rank only: the others get the nearest type of this file.
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _TYPES), "HpczeroError")
        text = str(error) if isinstance(error, HpczeroError) else f"{type(error).__name__}: {error}"
        mine = (kind, text, socket.gethostname())
    found = comm.allgather(mine)
    failed = [rank for rank, entry in enumerate(found) if entry is not None]
    if error is not None and not isinstance(error, HpczeroError):
        raise error
    kind, text, host = found[failed[0]]
    if len(failed) == comm.size and len({entry[1] for entry in found}) == 1:
        raise _TYPES[kind](text)
    others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    raise _TYPES[kind](f"rank {failed[0]} of {comm.size} on {host}: {text}{others}")


def _any_failed(comm: MPI.Comm, failed: bool) -> bool:
    """Whether any rank failed; gives way while it waits, since the others may need this core to get here."""
    from mpi4py import MPI

    mine, any_rank = bytearray([failed]), bytearray(1)
    request = comm.Iallreduce([mine, MPI.BYTE], [any_rank, MPI.BYTE], MPI.BOR)
    while not request.Test():
        os.sched_yield()
    return bool(any_rank[0])


_TYPES = {
    kind.__name__: kind
    for kind in (HpczeroError, ConfigError, DataError, DeviceError, RoomError, MismatchError, StallError)
}
