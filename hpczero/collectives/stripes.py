"""Collectives of one node, on arrays that live anywhere in host memory: through shared rows, a stripe for each rank.

Every rank leaves in its row what the others need of its vector, and after a meeting adds its own stripe of all rows, in
the canonical order; after another one it reads the stripes that the others have added. The first meeting is also the
agreement on the call: nothing of the caller's is written before it.

Bytes that move in memory, for an all-reduce of n bytes on each of L ranks: (L - 1) n read and written to leave them, n L
read and n written to add, n read and written to leave the sums, (L - 1) n read and written to take them. Vectors of up to
`slots.slot_bytes` take one meeting (`small`), and arrays of `topology.empty` need not be left anywhere (`window`).

Longer vectors pass in pieces. Pieces take the two halves of the rows in turn, so that a rank may leave the next one while
others still read the last: it leaves another one in the same half only after a meeting to which they came later. Whose turn
it is belongs to the mark of the first meeting: a rank that left a call with an exception, half-way, is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hpczero.collectives import reduction
from hpczero.collectives.guard import LeftError, explain
from hpczero.collectives.order import balanced
from hpczero.collectives.transport import Transport
from hpczero.errors import RoomError
from hpczero.memory import NodeRows, node_rows
from hpczero.topology import Topology

PIECE_BYTES, NODE_BYTES = 8 * 2**20, 28 * 2**20
"""What one half of a row holds, and one half of all rows of a node, at most: with 56 MiB in all, and the slots, they fit into
the 64 MiB of /dev/shm that containers have. Short pieces are slow, as their lines go back and forth between caches while
they are still dirty: 64 MiB took 17 ms on two ranks in pieces of 8 MiB, 26 in pieces of 4, 14 in pieces of 16."""


class Stripes:
    """The rows of one node. Every rank calls the same, with the same arguments but for the vectors.

    `flat` : (n,) contiguous, host. `shards` : rank r's stripe is elements shards[r] to shards[r + 1]. `mark` : the
    fingerprint of the call. Where ranks came with different marks, all raise MismatchError, and `flat` is as it was.
    """

    def __init__(self, topology: Topology):
        self._topology, self._transport = topology, Transport.of(topology)
        self._rows: NodeRows | None = None
        self._turn = 0
        self._folds: dict[tuple[np.dtype, str], Callable] = {}

    @classmethod
    def of(cls, topology: Topology) -> Stripes:
        return topology.keep("stripes", lambda: cls(topology))

    @property
    def nbytes(self) -> int:
        """This rank's part of the rows."""
        return 0 if self._rows is None else self._rows.mine.nbytes

    def all_reduce(self, flat: np.ndarray, shards: Sequence[int], op: str, mark: int, what: str) -> None:
        """`flat` becomes the reduction over the ranks."""
        me, sent = self._topology.rank, self._transport.bytes_sent
        for piece in self._added(flat, shards, op, mark, what, for_all=True):
            self._transport.node_barrier(what)
            for rank in range(self._topology.size):
                if rank != me:
                    sent["window"] += piece.take(rank, rank)

    def reduce_scatter(self, flat: np.ndarray, shards: Sequence[int], op: str, mark: int, what: str) -> None:
        """This rank's stripe of `flat` becomes the reduction; the rest stays as it is."""
        for _ in self._added(flat, shards, op, mark, what, for_all=False):
            pass

    def reduce(self, flat: np.ndarray, shards: Sequence[int], root: int, op: str, mark: int, what: str) -> None:
        """`flat` of rank `root` becomes the reduction over the ranks; the others stay as they are."""
        for piece in self._added(flat, shards, op, mark, what, for_all=True):
            self._transport.node_barrier(what)
            if self._topology.rank == root:
                for rank in range(self._topology.size):
                    piece.take(rank, rank)

    def all_gather(self, flat: np.ndarray, shards: Sequence[int], mark: int, what: str) -> None:
        """Every stripe of `flat` comes from the rank whose it is."""
        me, sent = self._topology.rank, self._transport.bytes_sent
        for piece in self._met(flat, shards, mark, what, lambda piece: piece.leave(me)):
            for rank in range(self._topology.size):
                if rank != me:
                    sent["window"] += piece.take(rank, rank)

    def broadcast(self, flat: np.ndarray, root: int, mark: int, what: str) -> None:
        """`flat` becomes that of rank `root`."""
        at_root = self._topology.rank == root
        for piece in self._met(flat, (0, flat.size), mark, what, lambda piece: at_root and piece.leave(0)):
            if not at_root:
                self._transport.bytes_sent["window"] += piece.take(root, 0)

    def close(self) -> None:
        """Called by every rank."""
        self._folds.clear()
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _added(self, flat: np.ndarray, shards: Sequence[int], op: str, mark: int, what: str, *,
               for_all: bool) -> Iterator[_Piece]:
        """Pieces of which this rank has added its stripe: in `flat`, and if it is `for_all` in its row."""
        me, size, fold = self._topology.rank, self._topology.size, self._fold(flat.dtype, op)
        for piece in self._met(flat, shards, mark, what, lambda piece: piece.leave_all_but(me)):
            lo, hi = piece.ranges[me]
            place, mine = piece.base + piece.places[me], flat[lo:hi]
            fold(piece.rows, place, me, mine, mine)
            if for_all:      # by a copy rather than by the kernel: see `slots.COPIED_BYTES`
                piece.rows[me, place:place + hi - lo] = mine
            self._transport.bytes_sent["window"] += (size - 1) * mine.nbytes
            yield piece

    def _met(self, flat: np.ndarray, shards: Sequence[int], mark: int, what: str,
             leave: Callable[[_Piece], object]) -> Iterator[_Piece]:
        """Pieces, one after the other, of which all ranks have left in their rows what `leave` puts there."""
        for number, piece in enumerate(self._pieces(flat, shards)):
            leave(piece)
            if number:
                self._transport.node_barrier(what)
            elif not self._transport.meet(mark ^ (self._turn & 1) << 2, what):
                try:
                    explain(self._transport, what, None)
                except LeftError:      # on all ranks
                    self._turn = 0
                    raise
            self._turn += 1      # all have come, so of all alike
            yield piece

    def _pieces(self, flat: np.ndarray, shards: Sequence[int]) -> Iterator[_Piece]:
        """A part of every stripe at a time, as much as half a row holds."""
        ranges, itemsize = list(zip(shards, shards[1:], strict=False)), flat.dtype.itemsize
        largest = max(hi - lo for lo, hi in ranges)
        most = min(PIECE_BYTES, NODE_BYTES // self._topology.size)
        step = max(1, min(largest, most // (len(ranges) * itemsize)))
        self._grow(min(flat.nbytes, len(ranges) * step * itemsize), most)
        rows = self._rows.all.view(flat.dtype)
        half = self._rows.mine.nbytes // 2 // itemsize
        for start in range(0, max(1, largest), step):
            base = half * (self._turn & 1)
            if step >= largest:
                yield _Piece(flat, rows, base, ranges, shards, self._topology.rank)
            else:
                part = [(min(lo + start, hi), min(lo + start + step, hi)) for lo, hi in ranges]
                yield _Piece(flat, rows, base, part, list(accumulate((hi - lo for lo, hi in part), initial=0)),
                             self._topology.rank)

    def _grow(self, nbytes: int, most: int) -> None:
        """To halves of a power of two, up to `most`. Collective: all ranks have agreed on a call that is new to them."""
        wanted = 2 * max(4096, nbytes, min(1 << max(0, nbytes - 1).bit_length(), most) // 4096 * 4096)
        if self._rows is None or self._rows.mine.nbytes < wanted:
            self.close()
            try:
                self._rows = node_rows(self._topology, wanted, np.dtype(np.uint8))
            except RoomError:      # on all ranks, for which the call is to be new again
                self._transport.decisions.clear()
                self._transport.made.clear()
                raise

    def _fold(self, dtype: np.dtype, op: str) -> Callable:
        size = self._topology.size
        return self._folds.get((dtype, op)) or self._folds.setdefault((dtype, op), reduction.folder(
            dtype, op, balanced(range(size)), {rank: rank for rank in range(size)}
        ))


class _Piece(NamedTuple):
    """A part of every stripe of a vector, and its place in the rows."""

    flat: np.ndarray
    rows: np.ndarray
    """(ranks, n), C-contiguous: kernels are slower on other layouts."""
    base: int
    """Where its half of the rows begins."""
    ranges: Sequence[tuple[int, int]]
    """Elements of `flat`, by stripe."""
    places: Sequence[int]
    """Where they lie, from `base` on."""
    me: int

    def leave(self, stripe: int) -> None:
        """This rank's elements of a stripe, in its row."""
        (lo, hi), place = self.ranges[stripe], self.base + self.places[stripe]
        self.rows[self.me, place:place + hi - lo] = self.flat[lo:hi]

    def leave_all_but(self, stripe: int) -> None:
        """Every stripe but one."""
        if self.places[-1] == self.flat.size:      # the whole vector, as it lies
            lo, hi = self.ranges[stripe]
            self.rows[self.me, self.base:self.base + lo] = self.flat[:lo]
            self.rows[self.me, self.base + hi:self.base + self.flat.size] = self.flat[hi:]
            return
        for other in range(len(self.ranges)):
            if other != stripe:
                self.leave(other)

    def take(self, rank: int, stripe: int) -> int:
        """A stripe from the row of a rank; its bytes."""
        (lo, hi), place = self.ranges[stripe], self.base + self.places[stripe]
        self.flat[lo:hi] = self.rows[rank, place:place + hi - lo]
        return (hi - lo) * self.flat.itemsize
