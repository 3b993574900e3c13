"""What arrives in one round: where it lands, and how it is taken in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, copy_async, is_device, namespace, synchronize
from hpczero.collectives import ipc, reduction
from hpczero.collectives.messages import ODD_BYTES, Round, Traffic, Unit

if TYPE_CHECKING:
    from hpczero.collectives.transport import Transport


class Landing:
    """Where the messages of one round arrive: in `flat` itself, or a few segments at a time in rows beside it.

    Few, so that what arrives is still in the cache when it is combined, and room for it does not grow with the vector.

    Attributes
    ----------
    placed : list of MPI.Request
        Of the messages that arrive where they belong.
    units : list of Unit
        What the others are taken in as, in this order: `arriving(number)`, then `take_in(number, op)`.
    """

    def __init__(self, transport: Transport, flat: Array, round_: Round, traffic: Traffic, tag: int, staged: bool):
        self._flat, self._round, self._staged, self._transport, self._tag = flat, round_, staged, transport, tag
        self.units, self._depth = traffic.units, traffic.depth
        if self.units:
            self._make_rows(traffic)
        self._copied: dict[int, Any] = {}      # by place in _rows: the event of the copy to the device
        self.placed = [request for peer, lo, hi in traffic.placed for request in self._receive(flat[lo:hi], peer)]
        self._arriving = [self._await(number) for number in range(self._depth)]

    @property
    def requests(self) -> list[MPI.Request]:
        """Of what has been asked for."""
        return [*self.placed, *(request for requests in self._arriving for request in requests)]

    def arriving(self, number: int) -> list[MPI.Request]:
        """The receives of a unit."""
        return self._arriving[number]

    def take_in(self, number: int, op: str) -> None:
        """Combines or places a unit that has arrived, and asks for another one in its place."""
        flat, unit, rank = self._flat, self.units[number], self._round.rank
        rows = self._rows_of(number)
        for place, lo, hi in unit.segment.runs:
            if unit.tree is not None:
                reduction.fold(rows, unit.row_of, unit.tree, op, place, flat[lo:hi], (rank, flat[lo:hi]))
            elif self._round.add:
                reduction.combine(flat[lo:hi], rows[0, place:place + hi - lo], op)
            else:
                copy(flat[lo:hi], rows[0, place:place + hi - lo])
        if len(self._arriving) < len(self.units):
            self._arriving.append(self._await(len(self._arriving)))

    def finish(self) -> None:
        """The rows may be used for other things."""
        for place in list(self._copied):
            self._await_copy(place)

    def _make_rows(self, traffic: Traffic) -> None:
        flat = self._flat
        # On a device a fold puts the rank's own elements into a row beside what arrived.
        num_rows = traffic.num_rows + is_device(flat)
        longest = traffic.longest if not self._staged else max(
            (unit.segment.count for unit in self.units
             if not all(self._by_ipc(unit, row) for row in range(len(unit.indices)))), default=0)
        shape = self._depth, num_rows, longest + ODD_BYTES // flat.itemsize
        if is_device(flat) and not self._staged:
            self._rows = namespace(flat).empty(shape, flat.dtype)
            synchronize(self._rows)
        else:
            beside = ("arrivals of a device", flat) if self._staged else ("arrivals", None)
            raw = self._transport.scratch(beside[0], math.prod(shape) * flat.itemsize, beside[1])
            self._rows = raw.view(flat.dtype).reshape(shape)
        self._tokens = np.empty((self._depth, num_rows, ipc.TOKEN_BYTES), np.uint8) if self._staged else None

    def _await(self, number: int) -> list[MPI.Request]:
        """Posts the receives of a unit."""
        requests, unit = [], self.units[number]
        for row, index in enumerate(unit.indices):
            into, peer = self._row(number, row), self._round.recv[index].peer
            for buffer in [into] if unit.pieces is None else [into[start:stop] for start, stop in unit.pieces[row]]:
                requests += self._receive(buffer, peer)
        return requests

    def _receive(self, buffer: Array, peer: int) -> list[MPI.Request]:
        return self._transport.post(self._transport.topology.world.Irecv, buffer, peer, self._tag)

    def _row(self, number: int, row: int) -> Array:
        """Where a message of a unit goes; that of the unit `depth` before has been taken in."""
        unit = self.units[number]
        # The device may still be reading what was there before.
        if self._staged:
            self._await_copy(number % self._depth)
        elif number >= self._depth:
            synchronize(self._rows)
        if self._by_ipc(unit, row):
            return self._tokens[number % self._depth, row]
        return self._rows[number % self._depth, row, :unit.segment.count]

    def _rows_of(self, number: int) -> Array:
        """(messages and one more, count or more): what has arrived, on the device that `flat` is on."""
        unit, rows = self.units[number], self._rows[number % self._depth]
        if not self._staged:
            return rows
        count = unit.segment.count
        on_device = namespace(self._flat).empty((len(unit.indices) + 1, count), self._flat.dtype)
        for row in range(len(unit.indices)):
            if self._by_ipc(unit, row):
                token = self._tokens[number % self._depth, row]
                arrived = self._transport.found(token, count * self._flat.itemsize).view(self._flat.dtype)
            else:
                arrived = rows[row, :count]
            self._copied[number % self._depth] = copy_async(on_device[row], arrived)
        return on_device

    def _by_ipc(self, unit: Unit, row: int) -> bool:
        return self._staged and self._transport.in_room(self._round.recv[unit.indices[row]])

    def _await_copy(self, place: int) -> None:
        if (copied := self._copied.pop(place, None)) is not None:
            copied.synchronize()
