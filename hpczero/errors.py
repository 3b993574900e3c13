"""Error types, and the rule that an error of one rank becomes an error of all.

An exception on one rank alone leaves the others waiting inside a collective for ever. A check on values that every rank
shares may simply raise; a check on local data (a file missing on one node, a NaN in one shard) goes through
`raise_together`, which costs one small exchange and therefore stays out of the training loop.
"""

from __future__ import annotations

import itertools
import socket
from array import array
from typing import TYPE_CHECKING

from hpczero.waiting import DEFAULT_TIMEOUT_S, Patience, abandon, completed

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


class NoCommunicatorError(HpczeroError, RuntimeError):
    """Something that several ranks do together was asked of an object that was given no communicator."""


class WorldSizeMismatchError(HpczeroError, ValueError):
    """Settings name a number of ranks or nodes that the communicator does not have."""


def raise_together(comm: MPI.Comm, error: Exception | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Every rank of `comm` calls this; if any passes an error, every rank raises, quoting the ranks that found one.

    The type raised is that of the lowest failing rank, so `except DataError` works on all of them. An exception that is
    no `HpczeroError` keeps its own traceback on its own rank and becomes `HpczeroError` elsewhere. StallError where a rank
    does not come within `timeout_s` seconds.
    """
    mine = ""
    if error is not None:
        # A subclass made elsewhere is known on this rank only: the others get the nearest type of this file.
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _TYPES), "HpczeroError")
        text = str(error) if isinstance(error, HpczeroError) else f"{type(error).__name__}: {error}"
        mine = "\0".join((kind, socket.gethostname(), text))
    found = gather_texts(comm, mine, timeout_s)
    failed = [rank for rank, entry in enumerate(found) if entry]
    if not failed:
        return
    if error is not None and not isinstance(error, HpczeroError):
        raise error
    kind, host, text = found[failed[0]].split("\0", 2)
    if len(failed) == comm.size and len({entry.split("\0", 2)[2] for entry in found}) == 1:
        raise _TYPES[kind](text)
    others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    raise _TYPES[kind](f"rank {failed[0]} of {comm.size} on {host}: {text}{others}")


def gather_texts(comm: MPI.Comm, text: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
    """The texts of all ranks, in rank order. Called by every rank; where all are empty, one small exchange is the cost."""
    from mpi4py import MPI

    def wait(request: MPI.Request) -> None:
        if not completed([request], lambda: Patience(timeout_s)):
            abandon([request])
            raise StallError(f"rank {comm.rank} of {comm.size} on {socket.gethostname()}: not all ranks came to tell each "
                             f"other of errors within {timeout_s:g} s; one may have died")

    mine = bytearray(text, "utf-8", "replace")
    lengths = array("q", [0] * comm.size)
    wait(comm.Iallgather([array("q", [len(mine)]), 1, MPI.INT64_T], [lengths, 1, MPI.INT64_T]))
    starts = [0, *itertools.accumulate(lengths)]
    found = bytearray(starts[-1])
    if found:
        wait(comm.Iallgatherv([mine, MPI.BYTE], [found, list(lengths), starts[:-1], MPI.BYTE]))
    return [found[start:end].decode() for start, end in itertools.pairwise(starts)]


_TYPES = {
    kind.__name__: kind
    for kind in (HpczeroError, ConfigError, DataError, DeviceError, RoomError, MismatchError, StallError,
                 NoCommunicatorError, WorldSizeMismatchError)
}
