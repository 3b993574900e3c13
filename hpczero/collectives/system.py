"""The MPI library's own collectives, behind the interface of ours: a candidate, and the column to beat.

Blocking, as the non-blocking ones of Open MPI take up to twice as long: all ranks have agreed on the call before, and a
`Watchdog` reports and ends what hangs in it. Where ranks outnumber cores they are non-blocking, since a blocking call would
spin on the core that an awaited rank needs. Device arrays pass through host memory: what the library does with them is not
ours to trust. Half types have no sum in MPI; where nothing is added they travel as bytes. No call has more elements than
`transport.max_count`.

The order of additions is the library's, and changes with size and version: only `order="any"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, is_device, to_host
from hpczero.collectives.transport import Transport

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


def all_reduce(flat: Array, transport: Transport, op: str, what: str) -> None:
    """In place; a mean is left as a sum, here and below."""
    host = _aligned(flat)
    for part in _parts(host, transport):
        _call("Allreduce", transport, what, MPI.IN_PLACE, part, _OPS[op])
    _back(flat, host)


def reduce_scatter(flat: Array, shards: Sequence[int], transport: Transport, op: str, what: str) -> None:
    """Rank r's shard, elements shards[r] to shards[r + 1], becomes the reduction; the rest stays as it is."""
    topology, host = transport.topology, _aligned(flat)
    lo, hi = shards[topology.rank:topology.rank + 2]
    mine = np.empty(hi - lo, flat.dtype)
    for ranges in _shares(shards, transport.max_count):
        counts = [stop - start for start, stop in ranges]
        start, stop = ranges[topology.rank]
        _call("Reduce_scatter", transport, what, _joined(host, ranges), mine[start - lo:stop - lo], counts, _OPS[op])
    copy(flat[lo:hi], mine)


def all_gather(flat: Array, shards: Sequence[int], transport: Transport, what: str) -> None:
    """Every rank's shard to all; in place."""
    host = to_host(flat)
    raw, rank = host.view(np.uint8), transport.topology.rank
    ends = [end * flat.itemsize for end in shards]
    if raw.size <= transport.max_count:
        _call("Allgatherv", transport, what, MPI.IN_PLACE, [raw, np.diff(ends).tolist(), ends[:-1], MPI.BYTE])
        return _back(flat, host)
    for ranges in _shares(ends, transport.max_count):
        counts = [stop - start for start, stop in ranges]
        begins = np.cumsum([0, *counts])
        arrived = np.empty(begins[-1], np.uint8)
        _call("Allgatherv", transport, what, [raw[slice(*ranges[rank])], MPI.BYTE],
              [arrived, counts, begins[:-1].tolist(), MPI.BYTE])
        for (start, stop), begin in zip(ranges, begins, strict=False):
            raw[start:stop] = arrived[begin:begin + stop - start]
    _back(flat, host)


def broadcast(flat: Array, root: int, transport: Transport, what: str) -> None:
    """The root's vector to all; in place."""
    host = to_host(flat)
    for part in _parts(host.view(np.uint8), transport):
        _call("Bcast", transport, what, [part, MPI.BYTE], root)
    _back(flat, host)


def reduce(flat: Array, root: int, transport: Transport, op: str, what: str) -> None:
    """The root's `flat` becomes the reduction; those of the others stay as they are."""
    at_root, mine = transport.topology.rank == root, _aligned(flat)
    total = np.empty_like(mine) if at_root else None
    begin = 0
    for part in _parts(mine, transport):
        into = total[begin:begin + part.size] if at_root else None
        _call("Reduce", transport, what, part, into, _OPS[op], root)
        begin += part.size
    if at_root:
        copy(flat, total)


def _call(name: str, transport: Transport, what: str, *arguments: Any) -> None:
    world = transport.topology.world
    if transport.topology.is_oversubscribed:
        transport.wait([getattr(world, f"I{name.lower()}")(*arguments)], what)
    else:
        transport.watchdog.begin(what)
        try:
            getattr(world, name)(*arguments)
        finally:
            transport.watchdog.end()


def _parts(flat: np.ndarray, transport: Transport) -> Iterator[np.ndarray]:
    for start in range(0, max(1, flat.size), transport.max_count):
        yield flat[start:start + transport.max_count]


def _shares(shards: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """A part of every shard at a time, as ranges, together at most `most` elements, or one of each."""
    pairs = list(zip(shards, shards[1:], strict=False))
    step = shards[-1] if shards[-1] <= most else max(1, most // len(pairs))
    for start in range(0, max(1, max(hi - lo for lo, hi in pairs)), max(1, step)):
        yield [(min(lo + start, hi), min(lo + start + step, hi)) for lo, hi in pairs]


def _joined(flat: np.ndarray, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ranges one after the other; a view where they are so already."""
    if all(stop == start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False)):
        return flat[ranges[0][0]:ranges[-1][1]]
    return np.concatenate([flat[start:stop] for start, stop in ranges])


def _back(flat: Array, host: np.ndarray) -> None:
    """What MPI left in host memory, into `flat`, unless it is there already."""
    if host is not flat and (is_device(flat) or host.ctypes.data != flat.ctypes.data):
        copy(flat, host)


def _aligned(flat: Array) -> np.ndarray:
    """In host memory, at an address that mpi4py knows a type for."""
    host = to_host(flat)
    return host if host.flags.aligned else np.require(host, requirements="A")
