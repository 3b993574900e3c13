"""Collectives over shared memory: every rank reads its neighbours' rows, and messages go between nodes alone.

Each rank has its contribution in a row of a `NodeRows`. After a meeting, each rank adds its own stripe of all rows in one
pass, in the canonical order; with several nodes the stripes are then exchanged between them (the `across_` parts of
`hierarchical`, whose `Cut` also says who answers for which block).

Bytes that move in memory, for an all-reduce of n bytes on each of L ranks of one node: rows that live in the window
(`topology.empty`) are read once and one sum is written, L n + n; then every rank copies what the others have added,
2 (L - 1) n. Messages would copy everything twice more. Arrays that live elsewhere pass through rows of bounded size: of
one node as `stripes` says, of several through `Staging`. Vectors of up to `slots.slot_bytes` take a shorter way (`small`).

A rank may still read its neighbours' rows when the call returns on another rank: after `reduce_scatter`, `gather_rows`
and `all_gather`, a row may be written only after the next meeting of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.collectives import hierarchical, reduction
from hpczero.collectives.algorithms import even_offsets
from hpczero.collectives.hierarchical import Cut, owned
from hpczero.collectives.order import balanced
from hpczero.collectives.schedule import spans
from hpczero.collectives.transport import Transport
from hpczero.memory import NodeRows, node_rows
from hpczero.topology import Topology

STAGING_BYTES = 16 * 2**20
BLOCK_BYTES, LEAST_BYTES = 2**20, 4 * 2**20
"""Over several nodes a vector is worked on in pieces of about BLOCK_BYTES per block, LEAST_BYTES in all: short enough to
stay in the cache, and for the network to be busy with one rank's, or with what the system has buffered, while another rank
adds and copies. 64 MiB on 2+2 ranks took 564-571 ms in pieces of 2 to 6 MiB, 592-603 in larger ones; at 1 Gbit/s the link
needs 537."""


def reduce_scatter(rows: NodeRows, offsets: Sequence[int], transport: Transport, op: str, what: str = "", *,
                   cut: Cut | None = None, between: str = "pairwise") -> None:
    """Block r of this rank's row becomes the reduction of block r over all ranks, on rank r.

    Called by every rank of the topology after a meeting of the node behind which all contributions are written; block b
    holds elements offsets[b] to offsets[b + 1]. Elsewhere the row may hold partial sums afterwards. With another `cut` than
    `hierarchical.owned`, each block ends with the member of its column that it belongs to.
    """
    topology = transport.topology
    cut = cut or owned(topology.map)
    ranks = topology.map.nodes[topology.node_index]
    if len(ranks) > 1:
        tree, row_of = balanced(ranks), {rank: row for row, rank in enumerate(ranks)}
        for first, last in spans(cut.blocks_of[topology.rank]):
            lo, hi = offsets[first], offsets[last]
            # In place: nobody else reads these elements of this row.
            reduction.fold(rows.all, row_of, tree, op, lo, rows.mine[lo:hi])
            transport.bytes_sent["window"] += (len(ranks) - 1) * (hi - lo) * rows.mine.itemsize
    if topology.num_nodes > 1:
        steps = hierarchical.across_reduce_scatter(topology.rank, topology.map, cut, between)
        transport.execute(steps, rows.mine, offsets, op, what)


def gather_rows(rows: NodeRows, offsets: Sequence[int], transport: Transport, out: np.ndarray, *,
                cut: Cut | None = None) -> None:
    """All blocks, each from the row of the rank that answers for it on this node, into `out`; `out` may be `rows.mine`.

    Called after the `across_all_gather` of `hierarchical` on every rank's row, and a meeting of the node.
    """
    topology = transport.topology
    cut = cut or owned(topology.map)
    for row, rank in enumerate(topology.map.nodes[topology.node_index]):
        source = rows.all[row]
        if rank == topology.rank and np.may_share_memory(out, source):
            continue
        for first, last in spans(cut.blocks_of[rank]):
            lo, hi = offsets[first], offsets[last]
            out[lo:hi] = source[lo:hi]
            transport.bytes_sent["window"] += (hi - lo) * out.itemsize if rank != topology.rank else 0


def all_gather(rows: NodeRows, offsets: Sequence[int], transport: Transport, out: np.ndarray, what: str = "", *,
               cut: Cut | None = None, between: str = "pairwise") -> None:
    """Every block from the row of the rank it belongs to, into `out`; `out` may be `rows.mine`."""
    topology = transport.topology
    if topology.num_nodes > 1:
        steps = hierarchical.across_all_gather(topology.rank, topology.map, cut, between)
        transport.execute(steps, rows.mine, offsets, what=what)
    transport.node_barrier(what)
    gather_rows(rows, offsets, transport, out, cut=cut)


def all_reduce(rows: NodeRows, cut: Cut, transport: Transport, op: str, what: str = "", *,
               between: str = "pairwise") -> None:
    """Every rank's row becomes the reduction over all ranks.

    Called by every rank of the topology after a meeting of the node behind which all contributions are written. A row may
    be written as soon as this returns.
    """
    count, itemsize = rows.mine.size, rows.mine.itemsize
    step = max(1, count if transport.topology.num_nodes == 1 else piece_bytes(cut.num_blocks) // itemsize)
    for lo in range(0, count, step):
        piece = rows if step >= count else rows.part(lo, min(lo + step, count))
        offsets = even_offsets(piece.mine.size, cut.num_blocks)
        reduce_scatter(piece, offsets, transport, op, what, cut=cut, between=between)
        all_gather(piece, offsets, transport, piece.mine, what, cut=cut, between=between)
    transport.node_barrier(what)


def piece_bytes(num_blocks: int) -> int:
    """How much of a vector is worked on at a time over several nodes."""
    return max(num_blocks * BLOCK_BYTES, LEAST_BYTES)


class Staging:
    """The window through which data pass that do not live in shared memory: at most `STAGING_BYTES` per rank.

    Every call begins after a meeting of all ranks (the agreement on the call), by which rows that others may still have
    read are free again.
    """

    def __init__(self, topology: Topology):
        self._topology, self._rows = topology, None

    @classmethod
    def of(cls, topology: Topology) -> Staging:
        return topology.keep("staging window", lambda: cls(topology))

    @property
    def nbytes(self) -> int:
        """This rank's part of the window."""
        return 0 if self._rows is None else self._rows.mine.nbytes

    def reduce_scatter(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str,
                       between: str = "pairwise") -> None:
        """Block r of `flat` becomes the reduction over all ranks, on rank r; its other elements stay as they are."""
        cut, rank = owned(self._topology.map), self._topology.rank
        for piece in self._reduced(flat, offsets, transport, op, what, cut, between):
            piece.copy_out([rank], rank, self._topology)

    def all_reduce(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str,
                   cut: Cut, between: str = "pairwise") -> None:
        """Every element of `flat` becomes the reduction over all ranks; `offsets` are those of the blocks of `cut`."""
        for piece in self._reduced(flat, offsets, transport, op, what, cut, between):
            piece.spread(transport, what, cut, between)

    def all_gather(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, what: str,
                   between: str = "pairwise") -> None:
        """Block r of `flat` comes from rank r, for every r."""
        cut = owned(self._topology.map)
        for piece in self._pieces(flat, offsets, transport, what):
            piece.copy_in([self._topology.rank])
            piece.spread(transport, what, cut, between)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _reduced(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, op: str, what: str, cut: Cut,
                 between: str) -> Iterator[_Piece]:
        """The vector a piece at a time, reduced to the ranks that its blocks belong to, in their rows."""
        rank, nodes = self._topology.rank, self._topology.map
        mine = cut.blocks_of[rank]
        for piece in self._pieces(flat, offsets, transport, what):
            piece.copy_in(sorted(set(range(cut.num_blocks)) - set(mine)))
            transport.node_barrier(what)
            piece.fold(mine, transport, op)
            steps = hierarchical.across_reduce_scatter(rank, nodes, cut, between)
            transport.execute(steps, piece.rows.mine, piece.places, op, what)
            yield piece

    def _pieces(self, flat: np.ndarray, offsets: Sequence[int], transport: Transport, what: str) -> Iterator[_Piece]:
        """A part of every block at a time, as much as the window holds."""
        num_blocks = len(offsets) - 1
        largest = max(hi - lo for lo, hi in zip(offsets, offsets[1:], strict=False))
        itemsize = flat.dtype.itemsize
        step = max(1, min(largest, min(piece_bytes(num_blocks), STAGING_BYTES) // (num_blocks * itemsize)))
        rows = self._of_size(num_blocks * step * itemsize).viewed(flat.dtype)
        for start in range(0, largest, step):
            if start:
                transport.node_barrier(what)      # all have read the piece before
            yield _Piece(flat, rows, [
                (min(lo + start, hi), min(lo + start + step, hi)) for lo, hi in zip(offsets, offsets[1:], strict=False)
            ])

    def _of_size(self, nbytes: int) -> NodeRows:
        """The window, grown to a power of two; every rank asks for the same size, so growing is collective."""
        wanted = max(4096, 1 << (nbytes - 1).bit_length())
        if self._rows is None or self._rows.mine.nbytes < wanted:
            self.close()
            self._rows = node_rows(self._topology, wanted, np.dtype(np.uint8))
        return self._rows


class _Piece:
    """A part of every block of a vector, and its place in the rows of the window."""

    def __init__(self, flat: np.ndarray, rows: NodeRows, ranges: list[tuple[int, int]]):
        self.flat, self.rows, self.ranges = flat, rows, ranges
        self.places = [0]
        for lo, hi in ranges:
            self.places.append(self.places[-1] + hi - lo)

    def copy_in(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            lo, hi = self.ranges[block]
            self.rows.mine[self.places[block]:self.places[block + 1]] = self.flat[lo:hi]

    def fold(self, blocks: Sequence[int], transport: Transport, op: str) -> None:
        """This rank's blocks, of which its own part never left `flat`, into its row."""
        topology = transport.topology
        ranks = topology.map.nodes[topology.node_index]
        tree, row_of = balanced(ranks), {rank: row for row, rank in enumerate(ranks)}
        for block in blocks:
            lo, hi = self.ranges[block]
            place = self.places[block]
            into = self.rows.mine[place:place + hi - lo]
            reduction.fold(self.rows.all, row_of, tree, op, place, into, (topology.rank, self.flat[lo:hi]))
            transport.bytes_sent["window"] += (len(ranks) - 1) * into.nbytes

    def spread(self, transport: Transport, what: str, cut: Cut, between: str) -> None:
        """Every block, from the row of the rank it belongs to, into `flat` on all ranks."""
        topology = transport.topology
        steps = hierarchical.across_all_gather(topology.rank, topology.map, cut, between)
        transport.execute(steps, self.rows.mine, self.places, what=what)
        transport.node_barrier(what)
        for rank in topology.map.nodes[topology.node_index]:
            copied = self.copy_out(cut.blocks_of[rank], rank, topology)
            transport.bytes_sent["window"] += copied if rank != topology.rank else 0

    def copy_out(self, blocks: Sequence[int], rank: int, topology: Topology) -> int:
        """Blocks from the row of a rank of this node; how many bytes."""
        source, copied = self.rows.all[topology.map.local_of[rank]], 0
        for block in blocks:
            lo, hi = self.ranges[block]
            self.flat[lo:hi] = source[self.places[block]:self.places[block + 1]]
            copied += (hi - lo) * self.flat.itemsize
        return copied
