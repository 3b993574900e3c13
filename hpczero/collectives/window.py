"""Collectives inside a node without messages: every rank reads its neighbours' rows in shared memory.

Each rank has its contribution in a row of a `NodeRows`. After a barrier, each rank adds its own stripe of all rows in one
pass, in the canonical order; with several nodes the stripes are then exchanged between them (`hierarchical`, its
`across_` halves). Traffic: reads L n and writes n per node, the least that a sum of L rows can cost, where messages would
copy everything twice more.

Data that live elsewhere pass through a staging window of bounded size (`Staging`).

A rank may still read its neighbours' rows when the call returns on another rank: after `reduce_scatter`, `gather_rows`
and `all_gather`, a row may be written only after the next barrier of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.collectives import hierarchical, reduction
from hpczero.collectives.order import balanced
from hpczero.collectives.schedule import spans
from hpczero.collectives.transport import Transport
from hpczero.memory import NodeRows, node_rows
from hpczero.topology import Topology

STAGING_BYTES = 16 * 2**20


def reduce_scatter(rows: NodeRows, offsets: Sequence[int], transport: Transport, op: str, what: str = "") -> None:
    """Block r of this rank's row becomes the reduction of block r over all ranks, on rank r.

    Called by every rank of the topology after a barrier of the node behind which all contributions are written; block b
    holds elements offsets[b] to offsets[b + 1]. Elsewhere the row may hold partial sums afterwards.
    """
    topology = transport.topology
    ranks = topology.map.nodes[topology.node_index]
    if len(ranks) > 1:
        tree, row_of = balanced(ranks), {rank: row for row, rank in enumerate(ranks)}
        for first, last in spans(hierarchical.deputised(topology.rank, topology.map)):
            lo, hi = offsets[first], offsets[last]
            # In place: nobody else reads these elements of this row.
            reduction.fold(rows.all, row_of, tree, op, lo, rows.mine[lo:hi])
            transport.bytes_sent["window"] += (len(ranks) - 1) * (hi - lo) * rows.mine.itemsize
    transport.execute(hierarchical.across_reduce_scatter(topology.rank, topology.map), rows.mine, offsets, op, what)


def gather_rows(rows: NodeRows, offsets: Sequence[int], transport: Transport, out: np.ndarray) -> None:
    """All blocks, each from the row of the rank that answers for it on this node, into `out`; `out` may be `rows.mine`.

    Called after the `across_all_gather` of `hierarchical` on every rank's row, and a barrier of the node.
    """
    topology = transport.topology
    for row, rank in enumerate(topology.map.nodes[topology.node_index]):
        source = rows.all[row]
        if rank == topology.rank and np.shares_memory(out, source):
            continue
        for first, last in spans(hierarchical.deputised(rank, topology.map)):
            lo, hi = offsets[first], offsets[last]
            out[lo:hi] = source[lo:hi]
            transport.bytes_sent["window"] += (hi - lo) * out.itemsize if rank != topology.rank else 0


def all_gather(rows: NodeRows, offsets: Sequence[int], transport: Transport, out: np.ndarray, what: str = "") -> None:
    """Block r from rank r's row, for every r, into `out`; `out` may be `rows.mine`."""
    topology = transport.topology
    transport.execute(hierarchical.across_all_gather(topology.rank, topology.map), rows.mine, offsets, what=what)
    transport.barrier(topology.node, what)
    gather_rows(rows, offsets, transport, out)


class Staging:
    """The window through which data pass that do not live in shared memory: at most `STAGING_BYTES` per rank."""

    def __init__(self, topology: Topology):
        self._topology, self._rows = topology, None

    @classmethod
    def of(cls, topology: Topology) -> Staging:
        return topology.keep("staging window", lambda: cls(topology))

    @property
    def nbytes(self) -> int:
        """This rank's part of the window."""
        return 0 if self._rows is None else self._rows.mine.nbytes

    def reduce_scatter(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str) -> None:
        """Block r of `flat` becomes the reduction over all ranks, on rank r; its other elements stay as they are."""
        for rows, ranges, places in self._chunks(flat, offsets, transport, op, what):
            mine = transport.topology.rank
            flat[slice(*ranges[mine])] = rows.mine[places[mine]:places[mine + 1]]

    def all_reduce(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str) -> None:
        """Every element of `flat` becomes the reduction over all ranks."""
        for rows, ranges, places in self._chunks(flat, offsets, transport, op, what):
            whole = np.empty(places[-1], flat.dtype)
            all_gather(rows, places, transport, whole, what)
            _scatter(whole, flat, ranges, places)

    def all_gather(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, what: str) -> None:
        """Block r of `flat` comes from rank r, for every r."""
        rank = transport.topology.rank
        for rows, ranges, places in self._slices(flat, offsets):
            rows.mine[places[rank]:places[rank + 1]] = flat[slice(*ranges[rank])]
            whole = np.empty(places[-1], flat.dtype)
            all_gather(rows, places, transport, whole, what)
            _scatter(whole, flat, ranges, places)
            transport.barrier(transport.topology.node, what)     # rows are read: the next slice may be written

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _chunks(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str) -> Iterator:
        """Each slice of the vector, copied into this rank's row and reduced there."""
        for rows, ranges, places in self._slices(flat, offsets):
            for (lo, hi), place in zip(ranges, places, strict=False):
                rows.mine[place:place + hi - lo] = flat[lo:hi]
            transport.barrier(transport.topology.node, what)
            reduce_scatter(rows, places, transport, op, what)
            yield rows, ranges, places
            transport.barrier(transport.topology.node, what)

    def _slices(self, flat: np.ndarray, offsets: Sequence[int]) -> Iterator[tuple[NodeRows, list, list[int]]]:
        """A part of every block at a time, as much as the window holds: (rows, part of each block, its place)."""
        size = len(offsets) - 1
        largest = max(hi - lo for lo, hi in zip(offsets, offsets[1:], strict=False))
        itemsize = flat.dtype.itemsize
        step = max(1, min(largest, STAGING_BYTES // (size * itemsize)))
        rows = self._of_size(size * step * itemsize).viewed(flat.dtype)
        for start in range(0, largest, step):
            ranges = [(min(lo + start, hi), min(lo + start + step, hi))
                      for lo, hi in zip(offsets, offsets[1:], strict=False)]
            places = [0]
            for lo, hi in ranges:
                places.append(places[-1] + hi - lo)
            yield rows, ranges, places

    def _of_size(self, nbytes: int) -> NodeRows:
        """The window, grown to a power of two; every rank asks for the same size, so growing is collective."""
        wanted = max(4096, 1 << (nbytes - 1).bit_length())
        if self._rows is None or self._rows.mine.nbytes < wanted:
            self.close()
            self._rows = node_rows(self._topology, wanted, np.dtype(np.uint8))
        return self._rows


def _scatter(whole: np.ndarray, flat: np.ndarray, ranges: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
    for (lo, hi), place in zip(ranges, places, strict=False):
        flat[lo:hi] = whole[place:place + hi - lo]
