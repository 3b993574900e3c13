"""Runs schedules over MPI: the one file that sends payload.

Rules that it keeps, each for a reason met in practice:

- everything goes over a private duplicate of the caller's communicator, with a tag of its own per call;
- receives are posted before sends: above the eager limit two ranks would otherwise sit in Send for ever;
- payload travels as bytes, since MPI has no portable half type, in chunks below 2^31 of them;
- every wait polls, gives way when ranks outnumber cores, and ends at a limit with the names of the missing ranks;
- a device array's stream is synchronised before MPI reads the array. Unless `HPCZERO_DEVICE_TRANSFER=direct` says that
  this MPI library can read device memory, which most builds cannot (a wrong guess is a segmentation fault), it is staged
  through host memory.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, is_device, namespace, synchronize
from hpczero.collectives import reduction
from hpczero.collectives.order import leaves
from hpczero.collectives.schedule import Message, Step, spans
from hpczero.errors import ConfigError, StallError
from hpczero.topology import Topology
from hpczero.waiting import DEFAULT_TIMEOUT_S, completed

LARGEST_COUNT = 2**31 - 1
ROLL_CALL_TAG = 0
ROLL_CALL_S = 2.0
"""How long a rank that stalled listens for others that stalled too; they had the same limit, and began a little later."""
_HERE = b"h"


class Transport:
    """What executing schedules needs between calls: tags, scratch memory, counters, and how long to wait.

    Attributes
    ----------
    timeout_s : float
        How long one wait may last before it ends in StallError.
    bytes_sent : dict of str to int
        Payload this rank has sent since the start: "node" to ranks of its own node, "network" to others; "window" counts
        what it read of its neighbours' rows in shared memory.
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        self.timeout_s = DEFAULT_TIMEOUT_S
        self.bytes_sent = {"window": 0, "node": 0, "network": 0}
        self.max_count = _whole("HPCZERO_MAX_COUNT", LARGEST_COUNT)
        self.direct = _choice("HPCZERO_DEVICE_TRANSFER", ("staged", "direct")) == "direct"
        # Open MPI does not know the attribute on a communicator that was split off; 32767 is what MPI promises.
        self._tag, self._last_tag = 0, topology.world.Get_attr(MPI.TAG_UB) or 32767
        self._scratch: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, topology: Topology) -> Transport:
        """The transport of this topology, made at the first call and closed with it."""
        return topology.keep("transport", lambda: cls(topology))

    @property
    def scratch_bytes(self) -> int:
        """Host memory kept between calls for messages that arrive beside the data they are combined with."""
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def execute(self, steps: Iterable[Step], flat: Array, offsets: Sequence[int], op: str = "sum", what: str = "") -> None:
        """Plays this rank's steps on `flat`, in place. Called by every rank of the topology, if need be without steps.

        Parameters
        ----------
        steps : iterable of Step
            This rank's part of a schedule over `topology.world`.
        flat : (n,) C-contiguous array
            Host or device; a dtype of `reduction.DTYPES`.
        offsets : sequence of int
            Block b holds elements offsets[b] to offsets[b + 1]; the same on every rank.
        op : str
            How what arrives is combined; "mean" sums.
        what : str
            Names the call in error messages.
        """
        tag = self._next_tag()
        for step in steps:
            arrivals = [_Arrival(message, offsets) for message in step.recv]
            departures = [_Arrival(message, offsets) for message in step.send]
            apart = step.add or step.fold is not None
            requests: list[MPI.Request] = []
            landing = self._post_receives(arrivals, flat, tag, apart, requests)
            kept = self._post_sends(departures, flat, tag, requests)
            self.wait(requests, what)
            del kept      # Sends read these buffers until now.
            self._take_in(step, arrivals, landing, flat, op)

    def barrier(self, comm: MPI.Intracomm, what: str = "") -> None:
        """Returns when every rank of `comm` has called it; gives way and ends at the limit as every wait here does."""
        if comm.size > 1:
            self.wait([comm.Ibarrier()], what)

    def all_gather_small(self, values: np.ndarray, what: str = "", comm: MPI.Intracomm | None = None) -> np.ndarray:
        """(size, k): the (k,) values of every rank, in rank order, over `topology.world` or a duplicate of it."""
        gathered = np.empty((self.topology.size, *values.shape), values.dtype)
        values = np.ascontiguousarray(values)
        request = (comm or self.topology.world).Iallgather(
            [values.view(np.uint8), MPI.BYTE], [gathered.reshape(-1).view(np.uint8), MPI.BYTE]
        )
        self.wait([request], what)
        return gathered

    def wait(self, requests: list[MPI.Request], what: str) -> None:
        """Completes all requests, or raises StallError after `timeout_s`, naming the ranks that do not wait as well."""
        if not completed(requests, self.timeout_s, shares_cores=self.topology.is_oversubscribed):
            raise StallError(self._stalled(what))

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """(nbytes,) uint8 of host memory, kept for the next call that asks for the same name."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def close(self) -> None:
        self._scratch.clear()

    def _next_tag(self) -> int:
        self._tag = self._tag % self._last_tag + 1      # 1 to last_tag; 0 is for roll calls
        return self._tag

    def _post_receives(self, arrivals: list[_Arrival], flat: Array, tag: int, apart: bool,
                       requests: list[MPI.Request]) -> _Landing:
        """Posts every receive: straight into `flat` where that is possible, else into rows of scratch memory."""
        landing = _Landing(self, flat, arrivals, apart)
        if not landing.staged:
            synchronize(flat)      # kernels that still read or write it must not meet MPI's writes
        for index, arrival in enumerate(arrivals):
            self._chunks(self.topology.world.Irecv, landing.buffer(index), arrival.peer, tag, requests)
        return landing

    def _post_sends(self, departures: list[_Arrival], flat: Array, tag: int,
                    requests: list[MPI.Request]) -> list[Array]:
        node_of = self.topology.node_of
        home = node_of[self.topology.rank]
        kept = []
        for departure in departures:
            buffer = self._packed(departure, flat)
            kept.append(buffer)
            self._chunks(self.topology.world.Isend, buffer, departure.peer, tag, requests)
            link = "node" if node_of[departure.peer] == home else "network"
            self.bytes_sent[link] += departure.count * flat.dtype.itemsize
        return kept

    def _packed(self, departure: _Arrival, flat: Array) -> Array:
        """The departing elements as one contiguous run of bytes that MPI may read."""
        if is_device(flat) and not self.direct:
            buffer = np.empty(departure.count, flat.dtype)
            for place, (lo, hi) in departure.placed():
                copy(buffer[place:place + hi - lo], flat[lo:hi])
        elif len(departure.ranges) == 1:
            buffer = flat[slice(*departure.ranges[0])]
        else:
            buffer = namespace(flat).empty(departure.count, flat.dtype)
            for place, (lo, hi) in departure.placed():
                buffer[place:place + hi - lo] = flat[lo:hi]
        synchronize(buffer)
        return buffer

    def _chunks(self, post: Any, buffer: Array, peer: int, tag: int, requests: list[MPI.Request]) -> None:
        raw = buffer.view(np.uint8)
        for start in range(0, raw.size, self.max_count):
            part = raw[start:start + self.max_count]
            requests.append(post([part, part.size, MPI.BYTE], peer, tag))

    def _take_in(self, step: Step, arrivals: list[_Arrival], landing: _Landing, flat: Array, op: str) -> None:
        if step.fold is not None:
            self._fold(step, arrivals, landing, flat, op)
            return
        for index, arrival in enumerate(arrivals):
            arrived = landing.arrived(index)
            if arrived is None:
                continue
            for place, (lo, hi) in arrival.placed():
                if step.add:
                    reduction.combine(flat[lo:hi], arrived[place:place + hi - lo], op)
                else:
                    copy(flat[lo:hi], arrived[place:place + hi - lo])

    def _fold(self, step: Step, arrivals: list[_Arrival], landing: _Landing, flat: Array, op: str) -> None:
        mine = arrivals[0]
        if mine.count == 0:
            return
        rows = landing.rows(len(arrivals))
        for place, (lo, hi) in mine.placed():
            copy(rows[len(arrivals), place:place + hi - lo], flat[lo:hi])
        row_of = {arrival.peer: index for index, arrival in enumerate(arrivals)} | {self.topology.rank: len(arrivals)}
        assert sorted(row_of) == sorted(leaves(step.fold))
        if len(mine.ranges) == 1:
            reduction.fold(rows, row_of, step.fold, op, 0, flat[slice(*mine.ranges[0])])
            return
        result = rows[len(arrivals), :mine.count]
        reduction.fold(rows, row_of, step.fold, op, 0, result)
        for place, (lo, hi) in mine.placed():
            copy(flat[lo:hi], result[place:place + hi - lo])

    def _stalled(self, what: str) -> str:
        topology = self.topology
        absent = self._roll_call()
        names = f"rank {', '.join(map(str, absent))}" if absent else "all ranks wait, for each other:"
        return (f"rank {topology.rank} of {topology.size} on {socket.gethostname()}: {what or 'a collective'}: no word "
                f"from {names} for {self.timeout_s:g} s; it may have died, or have left the order of calls that the "
                "other ranks follow")

    def _roll_call(self) -> list[int]:
        """The ranks that do not wait as this one does: whoever stalls tells all others, and listens for them."""
        world = self.topology.world
        others = set(range(world.size)) - {world.rank}
        for other in others:
            world.Isend([_HERE, MPI.BYTE], other, ROLL_CALL_TAG)
        end = time.monotonic() + ROLL_CALL_S
        while others and time.monotonic() < end:
            status = MPI.Status()
            if world.Iprobe(MPI.ANY_SOURCE, ROLL_CALL_TAG, status):
                world.Recv([bytearray(1), MPI.BYTE], status.source, ROLL_CALL_TAG)
                others.discard(status.source)
            else:
                time.sleep(0.001)
        return sorted(others)


class _Arrival:
    """The elements of one message: where its blocks lie in the flat vector."""

    __slots__ = ("count", "peer", "ranges")

    def __init__(self, message: Message, offsets: Sequence[int]):
        self.peer = message.peer
        self.ranges = [(offsets[a], offsets[b]) for a, b in spans(message.blocks) if offsets[a] < offsets[b]]
        self.count = sum(hi - lo for lo, hi in self.ranges)

    def placed(self) -> Iterable[tuple[int, tuple[int, int]]]:
        """(place in the message, (lo, hi) in the flat vector) for each contiguous range."""
        place = 0
        for lo, hi in self.ranges:
            yield place, (lo, hi)
            place += hi - lo


class _Landing:
    """Where the messages of one step arrive: in `flat` itself, or in rows of scratch memory beside it."""

    def __init__(self, transport: Transport, flat: Array, arrivals: list[_Arrival], apart: bool):
        self.flat, self.arrivals = flat, arrivals
        self.staged = is_device(flat) and not transport.direct
        self._direct = [not apart and not self.staged and len(arrival.ranges) == 1 for arrival in arrivals]
        # One row more than messages: a fold puts the rank's own contribution beside what arrived.
        stride = max((arrival.count for arrival in arrivals), default=0)
        num_rows = 0 if all(self._direct) else len(arrivals) + 1
        dtype = flat.dtype
        if is_device(flat) and not self.staged:
            self._rows = namespace(flat).empty((num_rows, stride), dtype)
            if num_rows:
                synchronize(self._rows)
        else:
            raw = transport.scratch("arrivals", num_rows * stride * dtype.itemsize)
            self._rows = raw.view(dtype).reshape(num_rows, stride)

    def buffer(self, index: int) -> Array:
        arrival = self.arrivals[index]
        if self._direct[index]:
            return self.flat[slice(*arrival.ranges[0])]
        return self._rows[index, :arrival.count]

    def arrived(self, index: int) -> Array | None:
        """What arrived beside `flat`, on the device that `flat` is on; None if it is in place already."""
        if self._direct[index]:
            return None
        if not self.staged:
            return self._rows[index, :self.arrivals[index].count]
        on_device = namespace(self.flat).empty(self.arrivals[index].count, self.flat.dtype)
        copy(on_device, self._rows[index, :self.arrivals[index].count])
        return on_device

    def rows(self, used: int) -> Array:
        """All rows, `used` of them filled by messages, on the device that `flat` is on."""
        if not self.staged:
            return self._rows
        on_device = namespace(self.flat).empty(self._rows.shape, self.flat.dtype)
        copy(on_device[:used], self._rows[:used])
        return on_device


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or not 0 < int(text) <= LARGEST_COUNT:
        raise ConfigError(f"{variable}={text!r}: a whole number from 1 to {LARGEST_COUNT} is allowed")
    return int(text)


def _choice(variable: str, allowed: tuple[str, ...]) -> str:
    text = os.environ.get(variable, allowed[0])
    if text not in allowed:
        raise ConfigError(f"{variable}={text!r} is not one of {', '.join(allowed)}")
    return text
