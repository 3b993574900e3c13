"""The MPI library's own collectives, behind the interface of ours: a candidate, and the column to beat.

Non-blocking, so that a wait has a limit and gives way. Device arrays pass through host memory: what the library does with
them is not ours to trust. Half types have no sum in MPI; where nothing is added they travel as bytes.

The order of additions is the library's, and changes with size and version: only `order="any"`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, is_device, to_host
from hpczero.collectives.transport import Transport

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


def all_reduce(flat: Array, transport: Transport, op: str, what: str) -> None:
    """In place; a mean is left as a sum, here and below."""
    host = _aligned(flat)
    transport.wait([transport.topology.world.Iallreduce(MPI.IN_PLACE, host, _OPS[op])], what)
    _back(flat, host)


def reduce_scatter(flat: Array, shards: Sequence[int], transport: Transport, op: str, what: str) -> None:
    """Rank r's shard, elements shards[r] to shards[r + 1], becomes the reduction; the rest stays as it is."""
    topology = transport.topology
    lo, hi = shards[topology.rank:topology.rank + 2]
    mine = np.empty(hi - lo, flat.dtype)
    request = topology.world.Ireduce_scatter(_aligned(flat), mine, np.diff(shards).tolist(), _OPS[op])
    transport.wait([request], what)
    copy(flat[lo:hi], mine)


def all_gather(flat: Array, shards: Sequence[int], transport: Transport, what: str) -> None:
    """Every rank's shard to all; in place."""
    raw = to_host(flat).view(np.uint8)
    ends = np.array(shards) * flat.itemsize
    target = [raw, np.diff(ends).tolist(), ends[:-1].tolist(), MPI.BYTE]
    transport.wait([transport.topology.world.Iallgatherv(MPI.IN_PLACE, target)], what)
    _back(flat, raw.view(flat.dtype))


def broadcast(flat: Array, root: int, transport: Transport, what: str) -> None:
    """The root's vector to all; in place."""
    raw = to_host(flat).view(np.uint8)
    transport.wait([transport.topology.world.Ibcast([raw, MPI.BYTE], root)], what)
    _back(flat, raw.view(flat.dtype))


def reduce(flat: Array, root: int, transport: Transport, op: str, what: str) -> None:
    """The root's `flat` becomes the reduction; those of the others stay as they are."""
    at_root, mine = transport.topology.rank == root, _aligned(flat)
    total = np.empty_like(mine) if at_root else None
    transport.wait([transport.topology.world.Ireduce(mine, total, _OPS[op], root)], what)
    if at_root:
        copy(flat, total)


def _back(flat: Array, host: np.ndarray) -> None:
    """What MPI left in host memory, into `flat`, unless it is there already."""
    if host.ctypes.data != (None if is_device(flat) else flat.ctypes.data):
        copy(flat, host)


def _aligned(flat: Array) -> np.ndarray:
    """In host memory, at an address that mpi4py knows a type for."""
    return np.require(to_host(flat), requirements="A")
